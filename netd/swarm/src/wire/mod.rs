//! The wire of hivemind and Petals against our own types: protobuf messages, hivemind's msgpack
//! dialect, tensors, request metadata, DHT records.
//!
//! Everything here is pure: bytes in, finished types out, and back. Bytes come from anybody on the
//! internet, so every decoder bounds depth, counts and sizes *before* it allocates, and no input
//! can make it panic. The wire's "expert" names end in this module.

pub mod compression;
pub mod fields;
pub mod keys;
pub mod messages;
pub mod metadata;
pub mod msgpack;
pub mod packing;
pub mod records;
pub mod resumption;
pub mod rpc_info;
pub mod step_times;
pub mod stream_parts;
pub mod tensor;
pub mod uid;

#[cfg(test)]
mod fuzz;
#[cfg(test)]
mod transcript_tests;
