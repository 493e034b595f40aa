//! Falcon (transformers `FalconDecoderLayer`): 7B (one key/value head, one norm before both
//! halves), 40B and 180B (groups, two norms), 11B (groups, one norm) and RW (position bias, one
//! half after the other).
//!
//! # Discrepancies
//! Petals ignores `rope_theta`, `rope_scaling` and `num_ln_in_parallel_attn`, and its 7B never ran;
//! here they are what they are in transformers.

use half::bf16;
use serde_json::Value;

use super::decoder::{MAX_HEADS, MAX_WIDTH};
use super::field::{bad, blocks, first_present, flag, flag_or, number, present, size};
use super::{Family, alibi, last_part, rotary};
use crate::error::SpecError;
use crate::spec::{BlockSpec, Gelu, LinearSpec, Mlp, Norm, PlainMlp, Position, Qkv, Residual};

pub(super) const FAMILY: Family = Family {
    model_type: "falcon",
    read,
    dht_prefix: Some(|repository| last_part(repository).to_owned()),
};

fn read(config: &Value) -> Result<BlockSpec, SpecError> {
    let hidden = size(config, "hidden_size", None, 1..=MAX_WIDTH)?;
    let heads_field = first_present(config, ["num_attention_heads", "n_head"]);
    let heads = size(config, heads_field, None, 1..=MAX_HEADS)?;
    if !hidden.is_multiple_of(heads) {
        let wanted = format!("a divisor of hidden_size ({hidden})");
        return Err(bad(heads_field, &Value::from(heads), wanted));
    }
    let (head_dim, is_new) = (hidden / heads, flag(config, "new_decoder_architecture")?);
    let kv_heads = kv_heads(config, heads, is_new)?;
    if let Some(act) = present(config, "activation").filter(|act| *act != "gelu") {
        return Err(bad("activation", act, "\"gelu\""));
    }
    let residual = if is_new || flag_or(config, "parallel_attn", true)? {
        Residual::Parallel
    } else {
        Residual::Sequential
    };
    let (attention_norm, mlp_norm) = norms(config, is_new, residual)?;
    let bias = flag(config, "bias")?;
    let linear = |name, outputs, inputs| LinearSpec::new(name, outputs, inputs, bias);
    let intermediate = size(config, "ffn_hidden_size", Some(4 * hidden), 1..=4 * MAX_WIDTH)?;
    Ok(BlockSpec {
        num_blocks: blocks(config, first_present(config, ["num_hidden_layers", "n_layer"]))?,
        hidden,
        heads,
        kv_heads,
        head_dim,
        norm: Norm::Layer { eps: number(config, "layer_norm_epsilon", Some(1e-5), 0.0..=1.0)? },
        position: position(config, heads, head_dim)?,
        window: None,
        residual,
        attention_norm,
        mlp_norm,
        qkv: Qkv::Fused(linear(
            "self_attention.query_key_value",
            (heads + 2 * kv_heads) * head_dim,
            hidden,
        )),
        head_norms: None,
        o: linear("self_attention.dense", hidden, hidden),
        mlp: Mlp::Plain(PlainMlp {
            intermediate,
            activation: Gelu::Erf,
            up: linear("mlp.dense_h_to_4h", intermediate, hidden),
            down: linear("mlp.dense_4h_to_h", hidden, intermediate),
        }),
        checkpoint_prefix: "transformer.h",
    })
}

fn kv_heads(config: &Value, heads: usize, is_new: bool) -> Result<usize, SpecError> {
    if !is_new {
        let is_multi_query = flag_or(config, "multi_query", true)?;
        return Ok(if is_multi_query { 1 } else { heads });
    }
    let field = first_present(config, ["num_kv_heads", "n_head_kv"]);
    let kv_heads = size(config, field, Some(heads), 1..=MAX_HEADS)?;
    if heads.is_multiple_of(kv_heads) {
        Ok(kv_heads)
    } else {
        let wanted = format!("a divisor of the number of heads ({heads})");
        Err(bad(field, &Value::from(kv_heads), wanted))
    }
}

/// Names of the norms before attention and before the MLP.
fn norms(
    config: &Value,
    is_new: bool,
    residual: Residual,
) -> Result<(&'static str, Option<&'static str>), SpecError> {
    let count = size(config, "num_ln_in_parallel_attn", Some(2), 1..=2)?;
    Ok(match (is_new && count == 2, residual) {
        (true, _) => ("ln_attn", Some("ln_mlp")),
        (false, Residual::Parallel) => ("input_layernorm", None),
        (false, _) => ("input_layernorm", Some("post_attention_layernorm")),
    })
}

/// The bias is added before the scores are scaled, and its slopes are those that bfloat16 holds.
fn position(config: &Value, heads: usize, head_dim: usize) -> Result<Position, SpecError> {
    if !flag(config, "alibi")? {
        if head_dim % 2 == 1 {
            let value = Value::from(head_dim);
            return Err(bad("hidden_size", &value, "an even number per head"));
        }
        return rotary::position(config, head_dim, 10_000.0);
    }
    let slopes = alibi::slopes(heads);
    Ok(Position::Alibi {
        slopes: slopes.into_iter().map(|slope| bf16::from_f32(slope).to_f32()).collect(),
        scale: 1.0 / (head_dim as f32).sqrt(),
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn config(fields: Value) -> Value {
        let mut config = json!({
            "model_type": "falcon", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1
        });
        for (name, value) in fields.as_object().unwrap() {
            config[name] = value.clone();
        }
        config
    }

    #[test]
    fn every_published_form_is_read() {
        let form = |fields| {
            let spec = BlockSpec::from_config(&config(fields)).unwrap();
            (spec.kv_heads, spec.residual, spec.mlp_norm, spec.tensors(0).len())
        };
        use Residual::{Parallel, Sequential};
        assert_eq!(form(json!({})), (1, Parallel, None, 6));
        let new = json!({"new_decoder_architecture": true, "num_kv_heads": 2});
        assert_eq!(form(new), (2, Parallel, Some("ln_mlp"), 8));
        let one_norm = json!({"new_decoder_architecture": true, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1});
        assert_eq!(form(one_norm), (2, Parallel, None, 6));
        let rw = json!({"alibi": true, "bias": true, "multi_query": false, "parallel_attn": false});
        assert_eq!(form(rw), (4, Sequential, Some("post_attention_layernorm"), 12));
    }

    #[test]
    fn nonsense_is_refused_by_field() {
        let refusal = |fields| BlockSpec::from_config(&config(fields)).unwrap_err().to_string();
        let new = json!({"new_decoder_architecture": true, "num_kv_heads": 3});
        assert!(refusal(new).contains("num_kv_heads is 3, but must be a divisor"));
        assert!(refusal(json!({"activation": "relu"})).contains("activation is \"relu\""));
        assert!(refusal(json!({"hidden_size": 66})).contains("num_attention_heads is 4"));
        assert!(refusal(json!({"hidden_size": 12})).contains("an even number per head"));
    }
}
