//! All device code of Sepal: the operations of a transformer block, the plain CPU reference that
//! defines each of them, and their fast CPU paths. Used by gpu-worker through [`Backend`] and by
//! the client through [`Cpu`] (embedding rows, final norm, head).
//!
//! # Same bits
//! The result for one row (token) is bit-identical whatever the batch size, the batch mates, the
//! number of threads and the places where a prefill is cut. Each operation keeps this by one fixed
//! reduction order per row: a dot product has one accumulator vector that walks the inputs from
//! first to last, and attention walks the pages of a row in the order of positions. The instruction
//! sets ([`Isa`]) differ from each other in bits; a process picks one at start.
#![deny(unsafe_code)]

pub mod backend;
pub mod cases;
pub mod cpu;
pub mod cuda;
mod error;
pub mod kv;
pub mod ops;
pub mod quant;
mod sizes;
pub mod slice;
pub mod tensor;
pub mod tuning;

pub use backend::Backend;
pub use cpu::{Cpu, Isa};
pub use error::{DeviceFailure, GroupFailure, OpError};
pub use kv::{KvPages, PAGE_TOKENS, PageLayout, StepRow};
pub use shared::config::QuantType;
pub use shared::dtype::DType;
pub use slice::WeightSlice;
pub use tensor::{Format, WeightView};
