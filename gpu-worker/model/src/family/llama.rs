//! Llama 1, 2, 3, 3.1 and everything else with `model_type` llama (transformers
//! `LlamaDecoderLayer`).
//!
//! # Discrepancies
//! Petals takes the width of a head to be `hidden_size / num_attention_heads`; here a `head_dim` in
//! the config counts, as in later transformers.

use serde_json::Value;

use super::decoder::{self, Variant};
use super::field::flag;
use super::{Family, last_part};
use crate::error::SpecError;
use crate::spec::BlockSpec;

pub(super) const FAMILY: Family =
    Family { model_type: "llama", read, dht_prefix: Some(dht_prefix) };

fn read(config: &Value) -> Result<BlockSpec, SpecError> {
    let attention_bias = flag(config, "attention_bias")?;
    let variant = Variant {
        eps: 1e-6,
        theta: 10_000.0,
        kv_heads: None,
        qkv_bias: attention_bias,
        o_bias: attention_bias,
        mlp_bias: flag(config, "mlp_bias")?,
    };
    decoder::read(config, variant)
}

fn dht_prefix(repository: &str) -> String {
    let name = last_part(repository);
    if name.ends_with("-hf") { name.to_owned() } else { format!("{name}-hf") }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::rope::RopeScaling;
    use crate::spec::{Norm, Position};

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
        let Position::Rope { inverse_frequencies, scaling, .. } = &spec.position else {
            panic!("{:?}", spec.position);
        };
        assert_eq!((scaling.clone(), inverse_frequencies[4]), (RopeScaling::None, 0.01));
        assert_eq!(spec.tensors(1).len(), 9);
        assert_eq!(spec.tensors(1)[0].full_name, "model.layers.1.input_layernorm.weight");
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
        let Position::Rope { inverse_frequencies, .. } = &spec.position else {
            panic!("{:?}", spec.position);
        };
        assert_eq!(inverse_frequencies[4], 0.1 / 2.0);
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
            ("num_key_value_heads", json!(3), "a divisor of num_attention_heads (4)"),
            ("num_key_value_heads", json!(0), "num_key_value_heads is 0"),
            ("head_dim", json!(7), "head_dim is 7"),
            ("rms_norm_eps", json!(-1.0), "rms_norm_eps is -1.0"),
            ("rope_theta", json!(0.0), "rope_theta is 0.0"),
            ("hidden_act", json!("gelu"), "hidden_act is \"gelu\""),
            ("attention_bias", json!(1), "true or false"),
            (
                "rope_scaling",
                json!({"type": "ntk-by-parts", "factor": 2.0}),
                "default, linear, dynamic",
            ),
            ("rope_scaling", json!({"type": "linear"}), "factor is missing"),
            ("rope_scaling", json!({"type": "linear", "factor": 0.0}), "factor is 0.0"),
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
