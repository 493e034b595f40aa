//! The process that owns one device and runs transformer blocks on it. It has no network and trusts
//! nothing that another process wrote.
//!
//! ```text
//! submission ring ──> schedule ──> blocks (weights, KV pages) ──> completion ring
//! executor.rs         schedule.rs  engine/, crate blocks         link.rs
//! ```
//!
//! A worker holds no session state: its answer to a job is a function of the job, the weights and
//! the KV pages, and the pages outlive it. Whatever a worker was doing when it died, another one
//! does again.
#![forbid(unsafe_code)]

pub mod device;
pub mod engine;
pub mod executor;
pub mod fault;
mod gauges;
#[cfg(test)]
mod harness;
pub mod inventory;
pub mod job;
pub mod link;
mod node;
mod probe;
pub mod sample;
pub mod schedule;
pub mod selftest;
mod worker;

pub use worker::run;
