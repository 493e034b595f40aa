//! What two processes of Sepal must agree on, and nothing else: names of things, jobs, control
//! messages, the layout of shared memory, and the first steps of every child process. No async, no
//! CUDA, no network beyond Unix sockets.
#![deny(unsafe_code)]

pub mod block;
pub mod bootstrap;
pub mod build;
pub mod clock;
pub mod config;
pub mod control;
pub mod dtype;
pub mod error_chain;
pub mod exit;
pub mod figures;
pub mod files;
#[cfg(all(test, not(loom)))]
mod fuzz;
pub mod ids;
pub mod job;
pub mod limits;
pub mod model;
pub mod network;
pub mod processor;
pub mod role;
pub mod sandbox;
pub mod sanitize_text;
pub mod shm;
pub mod survey;
#[cfg(test)]
mod test_skips;
pub mod warpgroups;
