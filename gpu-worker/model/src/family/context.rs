//! How many tokens a text may have: the one number that servers, clients, the gateway and `sepal plan` take.
//!
//! # Source
//! vLLM's `_get_and_verify_max_len` (`vllm/config/model.py`): the smallest of the fields of config.json that
//! name a length, times the factor of the scaling where the length is that of the training. For generation it
//! leaves `model_max_length` of the tokenizer aside, and so does this module.
//!
//! # Discrepancies
//! For yarn vLLM takes `original_max_position_embeddings` times the factor. Some configs name a longer text
//! in `max_position_embeddings`; the larger of the two counts.

use serde_json::Value;

use super::field::{bad, present, size};
use crate::error::SpecError;

/// Fields that name a length.
const FIELDS: [&str; 9] = [
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "model_max_length",
    "max_target_positions",
    "max_sequence_length",
    "max_seq_length",
    "seq_len",
];

/// Counts alone where a config has it, as Cohere's.
const OWN_FIELD: &str = "model_max_length";

const ORIGINAL: &str = "original_max_position_embeddings";

/// Most tokens that a config may name.
const MOST: usize = 1 << 30;

/// The length by `model_type` where config.json names none (transformers' configuration of the family).
const DEFAULTS: [(&str, usize); 6] = [
    ("falcon", 2048),
    ("llama", 2048),
    ("mistral", 131_072),
    ("mixtral", 131_072),
    ("qwen2", 32_768),
    ("qwen3", 32_768),
];

/// Most tokens of a text by config.json; `None` where neither config nor family names a length.
///
/// # Errors
/// A field that is no length or no factor.
pub fn context_length(config: &Value) -> Result<Option<u32>, SpecError> {
    let model_type = config.get("model_type").and_then(Value::as_str).unwrap_or_default();
    let Some(length) = length(config, model_type)? else {
        return Ok(None);
    };
    let place = present(config, "rope_scaling").or_else(|| present(config, "rope_parameters"));
    let scaled = match place {
        // Gemma 3 names the length after scaling.
        Some(scaling) if !model_type.contains("gemma3") => scaled(length, scaling)?,
        _ => length,
    };
    Ok(Some(u32::try_from(scaled).unwrap_or(u32::MAX)))
}

fn length(config: &Value, model_type: &str) -> Result<Option<usize>, SpecError> {
    let named = |field| present(config, field).map(|_| size(config, field, None, 1..=MOST));
    if let Some(own) = named(OWN_FIELD).transpose()? {
        return Ok(Some(own));
    }
    let lengths: Result<Vec<usize>, SpecError> = FIELDS.into_iter().filter_map(named).collect();
    let default = DEFAULTS.iter().find(|(name, _)| *name == model_type);
    Ok(lengths?.into_iter().min().or(default.map(|(_, length)| *length)))
}

/// `length` after scaling.
fn scaled(length: usize, scaling: &Value) -> Result<usize, SpecError> {
    let kind = present(scaling, "rope_type").or_else(|| present(scaling, "type"));
    match kind.and_then(Value::as_str).unwrap_or("default") {
        // The first names no factor; the others name the length after scaling.
        "default" | "su" | "longrope" | "llama3" => Ok(length),
        kind => {
            let factor = factor(scaling)?;
            let times = |length: usize| (length as f64 * factor) as usize;
            match present(scaling, ORIGINAL) {
                Some(_) if kind.ends_with("yarn") => {
                    Ok(times(size(scaling, ORIGINAL, None, 1..=MOST)?).max(length))
                }
                _ => Ok(times(length)),
            }
        }
    }
}

fn factor(scaling: &Value) -> Result<f64, SpecError> {
    let Some(value) = present(scaling, "factor") else {
        return Ok(1.0);
    };
    let factor = value.as_f64().filter(|factor| (1.0..=1e6).contains(factor));
    factor.ok_or_else(|| bad("factor", value, "a number from 1 to 1000000"))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// The fields that count of published configs.
    #[test]
    fn lengths_of_published_models_are_those_of_vllm() {
        let long = json!({"type": "longrope", "long_factor": [1.0], "short_factor": [1.0]});
        let su = json!({"type": "su", "long_factor": [1.0], "short_factor": [1.0]});
        let llama3 = json!({"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192, "rope_type": "llama3"});
        let yarn = |factor: f64, original: u32| json!({"type": "yarn", "factor": factor, "original_max_position_embeddings": original});
        let cases = [
            ("Qwen2.5-7B-Instruct", "qwen2", 32768, Value::Null, 32768),
            ("Qwen2.5-7B-Instruct with yarn", "qwen2", 32768, yarn(4.0, 32768), 131_072),
            ("Qwen3-8B", "qwen3", 40960, Value::Null, 40960),
            ("Qwen3-8B with yarn", "qwen3", 40960, yarn(4.0, 32768), 131_072),
            ("yarn below the named length", "qwen3", 40960, yarn(1.0, 32768), 40960),
            (
                "yarn without an original",
                "qwen2",
                32768,
                json!({"type": "yarn", "factor": 2.0}),
                65536,
            ),
            ("Llama-3.1-8B", "llama", 131_072, llama3, 131_072),
            ("Phi-3-mini-128k", "phi3", 131_072, long, 131_072),
            ("Phi-3-mini-128k of 2024-04", "phi3", 131_072, su, 131_072),
            ("vicuna-13b-v1.5-16k", "llama", 4096, json!({"type": "linear", "factor": 4.0}), 16384),
            ("a Llama with NTK", "llama", 2048, json!({"type": "dynamic", "factor": 2.0}), 4096),
            (
                "a factor that no f32 is",
                "llama",
                10240,
                json!({"type": "linear", "factor": 3.3}),
                33792,
            ),
            ("gemma-3-1b", "gemma3_text", 32768, Value::Null, 32768),
            (
                "gemma-3-4b",
                "gemma3_text",
                131_072,
                json!({"rope_type": "linear", "factor": 8.0}),
                131_072,
            ),
            ("DeepSeek-V3", "deepseek_v3", 163_840, yarn(40.0, 4096), 163_840),
            ("gpt-oss-20b", "gpt_oss", 131_072, yarn(32.0, 4096), 131_072),
            ("Qwen2-VL", "qwen2_vl", 32768, json!({"type": "mrope", "mrope_section": [16]}), 32768),
            (
                "of transformers 5",
                "llama",
                8192,
                json!({"rope_type": "default", "rope_theta": 1e4}),
                8192,
            ),
        ];
        for (name, model_type, named, scaling, wanted) in cases {
            for field in ["rope_scaling", "rope_parameters"] {
                let config = json!({
                    "model_type": model_type, "max_position_embeddings": named, field: scaling,
                });
                assert_eq!(context_length(&config), Ok(Some(wanted)), "{name}, {field}");
            }
        }
    }

    #[test]
    fn the_smallest_field_counts_then_the_family() {
        for (config, wanted) in [
            (json!({"model_type": "bloom", "seq_length": 2048}), Some(2048)),
            (json!({"model_type": "bloom"}), None),
            (json!({"model_type": "falcon"}), Some(2048)),
            (json!({"model_type": "mistral", "max_position_embeddings": null}), Some(131_072)),
            (json!({"max_position_embeddings": 4096, "seq_length": 8192}), Some(4096)),
            (json!({"max_position_embeddings": 8192, "model_max_length": 131_072}), Some(131_072)),
        ] {
            assert_eq!(context_length(&config), Ok(wanted), "{config}");
        }
    }

    #[test]
    fn what_is_no_length_is_refused_by_field_and_value() {
        let yarn = json!({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": "x"});
        for (field, value, says) in [
            ("max_position_embeddings", json!(-1), "max_position_embeddings is -1"),
            ("max_position_embeddings", json!(1e30), "max_position_embeddings is 1e+30"),
            ("rope_scaling", json!({"type": "linear", "factor": 0.5}), "factor is 0.5"),
            ("rope_scaling", yarn, "original_max_position_embeddings is \"x\""),
        ] {
            let mut config = json!({"model_type": "llama", "max_position_embeddings": 64});
            config[field] = value;
            let error = context_length(&config).unwrap_err().to_string();
            assert!(error.contains(says), "{error}");
        }
        let most = json!({"max_position_embeddings": 1 << 30,
            "rope_scaling": {"type": "linear", "factor": 1e6}});
        assert_eq!(context_length(&most), Ok(Some(u32::MAX)));
    }
}
