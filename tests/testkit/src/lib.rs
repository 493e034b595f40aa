//! What the tests of several crates need. It stands on `shared` alone, so that the tests of every
//! crate above may use it with their own types.
#![forbid(unsafe_code)]

pub mod configs;
pub mod facts;
pub mod golden;
pub mod hub;
pub mod jobs;
pub mod link;
pub mod log;
pub mod models;
pub mod process;
pub mod processor;
pub mod skip;
pub mod wide_models;

use shared::block::Span;

/// The span of these blocks.
pub fn span(start: u32, end: u32) -> Span {
    Span::new(start, end).unwrap()
}
