//! Whole servers from outside: real processes, real signals, real peers. Each module proves one promise; tests that need
//! namespaces (`nat`, `systemd`) are ignored unless `tests/nat/run` or `tests/systemd/run` runs them.

mod bad_input;
mod crashes;
mod dht_churn;
mod families;
mod frozen;
mod gateway;
#[path = "../harness/mod.rs"]
mod harness;
mod hostile;
mod lifecycle;
mod load;
mod losses;
mod metrics;
mod moves;
mod nat;
mod openmetrics;
mod pauses;
mod quantized;
mod resume;
mod sandbox;
mod service;
mod serving;
mod storm;
mod systemd;
mod tensor_parallel;
mod training;
mod upgrade;
mod web;
