//! Llama 1, 2, 3, 3.1 and everything else with `model_type` llama (transformers `LlamaDecoderLayer`).
//!
//! # Discrepancies
//! Petals takes the width of a head to be `hidden_size / num_attention_heads`; here a `head_dim` in the config counts,
//! as in later transformers.

use serde_json::Value;
use shared::block::MAX_BLOCKS;

use super::SpecError;
use super::field::{bad, flag, number, present, size};
use crate::block::rope::RopeScaling;
use crate::block::spec::{BlockSpec, GatedMlp, LinearSpec, Mlp, Norm, Position, Residual};

/// Bounds far above any published model, which keep products of sizes within memory arithmetic.
const MAX_WIDTH: usize = 1 << 18;
const MAX_HEADS: usize = 4096;
const MAX_HEAD_DIM: usize = 1024;

pub(super) fn read(config: &Value) -> Result<BlockSpec, SpecError> {
    let hidden = size(config, "hidden_size", None, 1..=MAX_WIDTH)?;
    let heads = size(config, "num_attention_heads", None, 1..=MAX_HEADS)?;
    let kv_heads = size(config, "num_key_value_heads", Some(heads), 1..=MAX_HEADS)?;
    if !heads.is_multiple_of(kv_heads) {
        let value = Value::from(kv_heads);
        return Err(bad(
            "num_key_value_heads",
            &value,
            format!("a divisor of num_attention_heads ({heads})"),
        ));
    }
    let head_dim = head_dim(config, hidden, heads)?;
    let intermediate = size(config, "intermediate_size", None, 1..=MAX_WIDTH)?;
    if let Some(act) = present(config, "hidden_act").filter(|act| *act != "silu") {
        return Err(bad("hidden_act", act, "\"silu\""));
    }
    let attention_bias = flag(config, "attention_bias")?;
    let linear = |name, outputs, inputs, bias| LinearSpec {
        name,
        outputs,
        inputs,
        bias,
    };
    let attention = |name, outputs, inputs| linear(name, outputs, inputs, attention_bias);
    let mlp_bias = flag(config, "mlp_bias")?;
    let scaling = scaling(config)?;
    Ok(BlockSpec {
        num_blocks: size(config, "num_hidden_layers", None, 1..=MAX_BLOCKS as usize)?,
        hidden,
        heads,
        kv_heads,
        head_dim,
        norm: Norm::Rms {
            eps: number(config, "rms_norm_eps", Some(1e-6), 0.0..=1.0)?,
        },
        position: Position::Rope {
            inverse_frequencies: scaling.inverse_frequencies(theta(config)?, head_dim),
            scaling,
        },
        residual: Residual::Sequential,
        mlp: Mlp::GatedSilu(GatedMlp {
            intermediate,
            gate: linear("mlp.gate_proj", intermediate, hidden, mlp_bias),
            up: linear("mlp.up_proj", intermediate, hidden, mlp_bias),
            down: linear("mlp.down_proj", hidden, intermediate, mlp_bias),
        }),
        attention_norm: "input_layernorm.weight",
        mlp_norm: "post_attention_layernorm.weight",
        qkv_o: [
            attention("self_attn.q_proj", heads * head_dim, hidden),
            attention("self_attn.k_proj", kv_heads * head_dim, hidden),
            attention("self_attn.v_proj", kv_heads * head_dim, hidden),
            attention("self_attn.o_proj", hidden, heads * head_dim),
        ],
        checkpoint_prefix: "model.layers",
    })
}

fn head_dim(config: &Value, hidden: usize, heads: usize) -> Result<usize, SpecError> {
    if present(config, "head_dim").is_none() && !hidden.is_multiple_of(heads) {
        let value = Value::from(heads);
        return Err(bad(
            "num_attention_heads",
            &value,
            format!("a divisor of hidden_size ({hidden})"),
        ));
    }
    let head_dim = size(config, "head_dim", Some(hidden / heads), 2..=MAX_HEAD_DIM)?;
    if !(2..=MAX_HEAD_DIM).contains(&head_dim) || !head_dim.is_multiple_of(2) {
        return Err(bad(
            "head_dim",
            &Value::from(head_dim),
            format!("an even number from 2 to {MAX_HEAD_DIM}"),
        ));
    }
    Ok(head_dim)
}

/// Base of the frequencies. Configs of transformers 5 keep it, with the scaling, in `rope_parameters`.
fn theta(config: &Value) -> Result<f32, SpecError> {
    let place = present(config, "rope_parameters")
        .filter(|_| present(config, "rope_theta").is_none())
        .unwrap_or(config);
    number(place, "rope_theta", Some(10_000.0), 1.0..=1e12)
}

fn scaling(config: &Value) -> Result<RopeScaling, SpecError> {
    let Some(scaling) =
        present(config, "rope_scaling").or_else(|| present(config, "rope_parameters"))
    else {
        return Ok(RopeScaling::None);
    };
    let Some(kind) = present(scaling, "rope_type").or_else(|| present(scaling, "type")) else {
        return Err(bad("rope_scaling", scaling, "an object with a rope_type"));
    };
    let factor = || number(scaling, "factor", None, 1.0..=1e6);
    match kind.as_str() {
        Some("default") => Ok(RopeScaling::None),
        Some("linear") => Ok(RopeScaling::Linear { factor: factor()? }),
        Some("llama3") => {
            let low = number(scaling, "low_freq_factor", None, 1e-3..=1e6)?;
            let high = number(scaling, "high_freq_factor", None, 1e-3..=1e6)?;
            if high <= low {
                return Err(bad(
                    "rope_scaling",
                    scaling,
                    "one with high_freq_factor above low_freq_factor",
                ));
            }
            let original = number(scaling, "original_max_position_embeddings", None, 1.0..=1e9)?;
            Ok(RopeScaling::Llama3 {
                factor: factor()?,
                low,
                high,
                original,
            })
        }
        _ => Err(bad(
            "rope_scaling",
            scaling,
            "of rope_type default, linear or llama3",
        )),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn config() -> Value {
        json!({
            "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5
        })
    }

    fn refusal(field: &str, value: Value) -> String {
        let mut config = config();
        config[field] = value;
        BlockSpec::from_config(&config).unwrap_err().to_string()
    }

    #[test]
    fn defaults_are_those_of_transformers() {
        let mut config = config();
        let fields = config.as_object_mut().unwrap();
        fields.remove("num_key_value_heads");
        fields.remove("rms_norm_eps");
        fields.insert("rope_scaling".into(), Value::Null);
        let spec = BlockSpec::from_config(&config).unwrap();
        assert_eq!((spec.kv_heads, spec.group(), spec.head_dim), (4, 1, 16));
        assert_eq!(spec.norm, Norm::Rms { eps: 1e-6 });
        let Position::Rope {
            inverse_frequencies,
            scaling,
        } = &spec.position;
        assert_eq!(
            (*scaling, inverse_frequencies[4]),
            (RopeScaling::None, 0.01)
        );
        assert_eq!(spec.tensors(1).len(), 9);
        assert_eq!(
            spec.tensors(1)[0].full_name,
            "model.layers.1.input_layernorm.weight"
        );
    }

    #[test]
    fn biases_and_the_places_of_rope_fields_are_read() {
        let mut config = config();
        config["attention_bias"] = json!(true);
        config["mlp_bias"] = json!(true);
        config["rope_parameters"] =
            json!({"rope_type": "linear", "factor": 2.0, "rope_theta": 100.0});
        let spec = BlockSpec::from_config(&config).unwrap();
        assert_eq!(spec.tensors(0).len(), 16);
        let Position::Rope {
            inverse_frequencies,
            ..
        } = &spec.position;
        assert_eq!(inverse_frequencies[4], 0.1 / 2.0);
    }

    #[test]
    fn an_unknown_model_type_is_named_with_the_supported_ones() {
        assert_eq!(
            refusal("model_type", json!("gpt2")),
            "model_type \"gpt2\" is not supported; supported are: llama"
        );
        assert!(refusal("model_type", json!(7)).contains('7'));
        assert_eq!(
            BlockSpec::from_config(&json!({})).unwrap_err().to_string(),
            "model_type is missing"
        );
    }

    #[test]
    fn every_number_that_makes_no_sense_is_refused_with_its_value() {
        let cases = [
            ("hidden_size", json!(0), "hidden_size is 0"),
            ("hidden_size", json!(1u64 << 40), "1099511627776"),
            ("hidden_size", json!(66), "a divisor of hidden_size (66)"),
            ("hidden_size", json!(4), "head_dim is 1"),
            ("hidden_size", json!("big"), "\"big\""),
            ("intermediate_size", json!(-1), "-1"),
            ("num_hidden_layers", json!(5000), "5000"),
            ("num_attention_heads", json!(3), "num_key_value_heads is 2"),
            (
                "num_key_value_heads",
                json!(3),
                "a divisor of num_attention_heads (4)",
            ),
            ("num_key_value_heads", json!(0), "num_key_value_heads is 0"),
            ("head_dim", json!(7), "head_dim is 7"),
            ("rms_norm_eps", json!(-1.0), "rms_norm_eps is -1.0"),
            ("rope_theta", json!(0.0), "rope_theta is 0.0"),
            ("hidden_act", json!("gelu"), "hidden_act is \"gelu\""),
            ("attention_bias", json!(1), "true or false"),
            (
                "rope_scaling",
                json!({"type": "yarn", "factor": 2.0}),
                "default, linear or llama3",
            ),
            (
                "rope_scaling",
                json!({"type": "linear"}),
                "factor is missing",
            ),
            (
                "rope_scaling",
                json!({"type": "linear", "factor": 0.0}),
                "factor is 0.0",
            ),
            ("rope_scaling", json!([]), "rope_scaling is []"),
        ];
        for (field, value, wanted) in cases {
            let message = refusal(field, value.clone());
            assert!(message.contains(wanted), "{field} = {value}: {message}");
        }
        let llama3 = json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8});
        assert!(refusal("rope_scaling", llama3).contains("high_freq_factor above"));
    }
}
