//! Qwen3 (transformers `Qwen3DecoderLayer`): a Llama with a norm over each head of queries and
//! keys, and heads of 128 unless the config says otherwise.

use serde_json::Value;

use super::Family;
use super::decoder::{self, Variant};
use super::field::{flag, present};
use crate::error::SpecError;
use crate::spec::BlockSpec;

pub(super) const FAMILY: Family = Family { model_type: "qwen3", read, dht_prefix: None };

fn read(config: &Value) -> Result<BlockSpec, SpecError> {
    decoder::refuse_windows(config)?;
    let attention_bias = flag(config, "attention_bias")?;
    let variant = Variant {
        eps: 1e-6,
        theta: 10_000.0,
        kv_heads: None,
        qkv_bias: attention_bias,
        o_bias: attention_bias,
        mlp_bias: false,
    };
    let mut config = config.clone();
    if present(&config, "head_dim").is_none() {
        config["head_dim"] = Value::from(128);
    }
    Ok(BlockSpec {
        head_norms: Some(["self_attn.q_norm", "self_attn.k_norm"]),
        ..decoder::read(&config, variant)?
    })
}
