//! Qwen2 and 2.5 (transformers `Qwen2DecoderLayer`): a Llama with biases on queries, keys and values.

use serde_json::Value;

use super::SpecError;
use super::decoder::{self, Variant};
use crate::block::spec::BlockSpec;

pub(super) fn read(config: &Value) -> Result<BlockSpec, SpecError> {
    decoder::refuse_windows(config)?;
    let variant = Variant {
        eps: 1e-6,
        theta: 10_000.0,
        kv_heads: None,
        qkv_bias: true,
        o_bias: false,
        mlp_bias: false,
    };
    decoder::read(config, variant)
}
