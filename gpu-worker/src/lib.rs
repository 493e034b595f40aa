//! The process that owns one device and runs transformer blocks on it, and the short-lived process that makes weights
//! ready for it. Neither has a network; both trust nothing that another process wrote.
//!
//! ```text
//! prepare   model folder ──> manifest, prepared block files                      prepare/
//! worker    manifest ──map──> weights                                            weights/
//!           submission ring ──> schedule ──> block (weights, KV pages) ──> completion ring
//!           executor.rs         schedule.rs  block/, kv.rs                       link.rs
//! ```
//!
//! A worker holds no session state: its answer to a job is a function of the job, the weights and the KV pages, and the pages
//! outlive it. Whatever a worker was doing when it died, another one does again.
#![deny(unsafe_code)]

pub mod block;
pub mod device;
pub mod engine;
pub mod executor;
pub mod fault;
#[cfg(test)]
mod fixtures;
#[cfg(test)]
mod harness;
pub mod kv;
pub mod link;
pub mod prepare;
mod probe;
pub mod running;
pub mod sample;
pub mod schedule;
pub mod selftest;
pub(crate) mod sizing;
mod throughput;
pub mod weights;
mod worker;

pub use worker::run;
