//! Qwen2 and 2.5 (transformers `Qwen2DecoderLayer`): a Llama with biases on queries, keys and
//! values.

use serde_json::Value;

use super::Family;
use super::decoder::{self, Variant};
use crate::error::SpecError;
use crate::spec::BlockSpec;

pub(super) const FAMILY: Family = Family { model_type: "qwen2", read, dht_prefix: None };

fn read(config: &Value) -> Result<BlockSpec, SpecError> {
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
