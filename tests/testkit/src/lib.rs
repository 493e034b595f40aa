//! What the tests of several crates need. It stands on `shared` alone, so that the tests of every
//! crate above may use it with their own types.
#![forbid(unsafe_code)]

pub mod golden;
pub mod hub;
pub mod models;
pub mod process;
pub mod wide_models;
