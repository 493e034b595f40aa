//! What a model is, as data: the form of its blocks ([`BlockSpec`], filled in by a file per family),
//! how much memory blocks and their computation need ([`sizing`]), how the ranks of a group share
//! each block ([`shards`]), and the files that describe a model: checkpoint files (of safetensors and of PyTorch), the manifest of
//! prepared blocks, measured rates, how the blocks were cut among devices. A [`survey`] is what all of
//! them say before anything is loaded. Supervisor, prepare and
//! workers all count with this package; it computes no tensors and knows no device.
#![forbid(unsafe_code)]

pub mod checkpoint;
pub mod client_tensors;
pub mod cuts;
mod error;
mod family;
pub mod file_lock;
#[cfg(test)]
mod fuzz;
pub mod header;
pub mod manifest;
pub mod plain_lora;
pub mod rates;
mod rope;
pub mod shards;
pub mod sizing;
mod spec;
pub mod survey;
pub mod torch;
pub mod weight_files;

pub use error::SpecError;
pub use family::{context_length, dht_prefix};
pub use rope::RopeScaling;
pub use spec::{
    BlockSpec, Experts, GatedMlp, Gelu, LinearSpec, Mlp, Norm, PlainMlp, Position, Qkv, Residual,
    TensorSpec,
};
