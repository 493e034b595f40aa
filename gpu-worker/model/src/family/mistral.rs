//! Mistral (transformers `MistralDecoderLayer`): a Llama whose tokens see `sliding_window`
//! positions, their own included.

use serde_json::Value;

use super::Family;
use super::decoder::{self, Variant};
use crate::error::SpecError;
use crate::spec::BlockSpec;

pub(super) const FAMILY: Family = Family { model_type: "mistral", read, dht_prefix: None };

fn read(config: &Value) -> Result<BlockSpec, SpecError> {
    let variant = Variant {
        eps: 1e-6,
        theta: 10_000.0,
        kv_heads: Some(8),
        qkv_bias: false,
        o_bias: false,
        mlp_bias: false,
    };
    Ok(BlockSpec { window: decoder::window(config)?, ..decoder::read(config, variant)? })
}
