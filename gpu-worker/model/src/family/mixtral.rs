//! Mixtral (transformers `MixtralDecoderLayer`): a Llama whose MLP is a mixture of experts. With
//! `sliding_window` w a token sees w + 1 positions (transformers
//! `_prepare_4d_causal_attention_mask`, as Petals runs it).

use serde_json::Value;

use super::Family;
use super::decoder::{self, MAX_WIDTH, Variant};
use super::field::size;
use crate::error::SpecError;
use crate::spec::{BlockSpec, Experts, GatedMlp, LinearSpec, Mlp};

/// Bound far above any published model.
const MAX_EXPERTS: usize = 512;

pub(super) const FAMILY: Family =
    Family { model_type: "mixtral", read, dht_prefix: Some(str::to_owned) };

fn read(config: &Value) -> Result<BlockSpec, SpecError> {
    let variant = Variant {
        eps: 1e-5,
        theta: 1e6,
        kv_heads: Some(8),
        qkv_bias: false,
        o_bias: false,
        mlp_bias: false,
    };
    let spec = decoder::read(config, variant)?;
    Ok(BlockSpec {
        window: decoder::window(config)?.map(|w| w + 1),
        mlp: Mlp::Experts(experts(config, spec.hidden)?),
        ..spec
    })
}

fn experts(config: &Value, hidden: usize) -> Result<Experts, SpecError> {
    let count = size(config, "num_local_experts", Some(8), 1..=MAX_EXPERTS)?;
    let intermediate = size(config, "intermediate_size", None, 1..=MAX_WIDTH)?;
    let expert = |number: usize| {
        let linear = |name: &str, outputs, inputs| {
            let name = format!("block_sparse_moe.experts.{number}.{name}");
            LinearSpec::new(name, outputs, inputs, false)
        };
        GatedMlp {
            intermediate,
            gate: linear("w1", intermediate, hidden),
            up: linear("w3", intermediate, hidden),
            down: linear("w2", hidden, intermediate),
        }
    };
    Ok(Experts {
        router: LinearSpec::new("block_sparse_moe.gate", count, hidden, false),
        chosen: size(config, "num_experts_per_tok", Some(2), 1..=count)?,
        experts: (0..count).map(expert).collect(),
    })
}
