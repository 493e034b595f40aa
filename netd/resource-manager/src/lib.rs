//! Bounds on what peers may make a node hold or do.
//!
//! - [`bounds`]: bounds as data
#![forbid(unsafe_code)]

pub mod bounds;
