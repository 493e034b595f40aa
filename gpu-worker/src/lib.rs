//! The process that owns one device and runs transformer blocks on it. It has no network and trusts
//! nothing that another process wrote.
//!
//! ```text
//! worker    manifest ──map──> weights                                            weights/
//!           submission ring ──> schedule ──> block (weights, KV pages) ──> completion ring
//!           executor.rs         schedule.rs  block/, kv.rs                       link.rs
//! ```
//!
//! A worker holds no session state: its answer to a job is a function of the job, the weights and
//! the KV pages, and the pages outlive it. Whatever a worker was doing when it died, another one
//! does again.
#![deny(unsafe_code)]

pub mod block;
pub mod device;
pub mod engine;
pub mod executor;
pub mod fault;
#[cfg(test)]
#[allow(dead_code, reason = "shared with the tests of package `prepare`")]
mod fixtures;
mod gauges;
#[cfg(test)]
mod harness;
pub mod inventory;
pub mod job;
pub mod kv;
pub mod link;
mod node;
mod probe;
pub mod sample;
pub mod schedule;
pub mod selftest;
pub mod weights;
#[cfg(all(test, feature = "emu"))]
mod wide_fixtures;
mod worker;

pub use worker::run;
