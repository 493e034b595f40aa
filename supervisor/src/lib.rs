//! The process tree of Sepal: starts netd, prepare and the workers, watches them, restarts them, ends them, and reports.
//! Knows children, descriptors, exit codes and time; no tensors, no peers, nothing async.
#![deny(unsafe_code)]

pub mod plan;
pub mod tree;
