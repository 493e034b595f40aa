//! BLOOM (transformers `BloomBlock`): layer norms, a position bias instead of rotation, one fused
//! projection, GELU by tanh.

use serde_json::Value;

use super::Family;
use super::alibi;
use super::decoder::{MAX_HEADS, MAX_WIDTH};
use super::field::{bad, blocks, first_present, flag, number, size};
use crate::error::SpecError;
use crate::spec::{BlockSpec, Gelu, LinearSpec, Mlp, Norm, PlainMlp, Position, Qkv, Residual};

pub(super) const FAMILY: Family = Family {
    model_type: "bloom",
    read,
    dht_prefix: Some(|repository| format!("{repository}-petals")),
};

fn read(config: &Value) -> Result<BlockSpec, SpecError> {
    let hidden_field = first_present(config, ["hidden_size", "n_embed"]);
    let hidden = size(config, hidden_field, None, 1..=MAX_WIDTH)?;
    let heads_field = first_present(config, ["n_head", "num_attention_heads"]);
    let heads = size(config, heads_field, None, 1..=MAX_HEADS)?;
    if !hidden.is_multiple_of(heads) {
        let wanted = format!("a divisor of {hidden_field} ({hidden})");
        return Err(bad(heads_field, &Value::from(heads), wanted));
    }
    let is_normed = flag(config, "apply_residual_connection_post_layernorm")?;
    let linear = |name, outputs, inputs| LinearSpec::new(name, outputs, inputs, true);
    Ok(BlockSpec {
        num_blocks: blocks(config, first_present(config, ["n_layer", "num_hidden_layers"]))?,
        hidden,
        heads,
        kv_heads: heads,
        head_dim: hidden / heads,
        norm: Norm::Layer { eps: number(config, "layer_norm_epsilon", Some(1e-5), 0.0..=1.0)? },
        position: Position::Alibi { slopes: alibi::slopes(heads), scale: 1.0 },
        window: None,
        residual: if is_normed { Residual::Normed } else { Residual::Sequential },
        attention_norm: "input_layernorm",
        mlp_norm: Some("post_attention_layernorm"),
        qkv: Qkv::Fused(linear("self_attention.query_key_value", 3 * hidden, hidden)),
        head_norms: None,
        o: linear("self_attention.dense", hidden, hidden),
        mlp: Mlp::Plain(PlainMlp {
            intermediate: 4 * hidden,
            activation: Gelu::Tanh,
            up: linear("mlp.dense_h_to_4h", 4 * hidden, hidden),
            down: linear("mlp.dense_4h_to_h", hidden, 4 * hidden),
        }),
        checkpoint_prefix: "h",
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn both_spellings_of_the_fields_are_read_and_nonsense_is_refused() {
        let old =
            json!({"model_type": "bloom", "n_embed": 48, "n_layer": 2, "num_attention_heads": 3});
        let new = json!({"model_type": "bloom", "hidden_size": 48, "n_layer": 2, "n_head": 3});
        let spec = BlockSpec::from_config(&old).unwrap();
        assert_eq!(spec, BlockSpec::from_config(&new).unwrap());
        assert_eq!((spec.head_dim, spec.group()), (16, 1));
        let tensors = spec.tensors(1);
        assert_eq!(tensors.len(), 12);
        assert_eq!(tensors[1].full_name, "h.1.input_layernorm.bias");
        let mut bad = new.clone();
        bad["n_head"] = json!(5);
        let refusal = BlockSpec::from_config(&bad).unwrap_err().to_string();
        assert_eq!(refusal, "n_head is 5, but must be a divisor of hidden_size (48)");
        bad["n_head"] = Value::Null;
        let refusal = BlockSpec::from_config(&bad).unwrap_err().to_string();
        assert_eq!(refusal, "n_head is missing");
    }
}
