//! The tensors of a model that a client computes with: what lies before its first block and behind its
//! last. The form of the norms and all sizes are those of the blocks ([`BlockSpec`]).

use serde::Deserialize;
use serde_json::Value;
use shared::dtype::DType;

use crate::header::NamedTensor;
use crate::spec::{BlockSpec, Norm};

/// Names of the tensors that a client computes with, each as the checkpoints of a family have it: with the
/// name of the model in front, or without.
#[derive(Debug, PartialEq, Eq)]
pub struct ClientNames {
    /// Token embeddings `[vocabulary, hidden]`.
    pub embedding: &'static [&'static str],
    /// The norm behind them; empty for none.
    pub embedding_norm: &'static [&'static str],
    /// The norm behind the last block.
    pub norm: &'static [&'static str],
    /// The head `[vocabulary, hidden]`, where it has a matrix of its own.
    pub head: &'static [&'static str],
    /// Whether it shares that of the embeddings unless config.json says otherwise (the default of
    /// `tie_word_embeddings` in transformers' configuration of the family).
    pub is_tied: bool,
}

/// transformers `LlamaForCausalLM` and those made after it.
const LLAMA: ClientNames = ClientNames {
    embedding: &["model.embed_tokens.weight", "embed_tokens.weight"],
    embedding_norm: &[],
    norm: &["model.norm", "norm"],
    head: &["lm_head.weight"],
    is_tied: false,
};

/// transformers `BloomForCausalLM`.
const BLOOM: ClientNames = ClientNames {
    embedding: &["transformer.word_embeddings.weight", "word_embeddings.weight"],
    embedding_norm: &["transformer.word_embeddings_layernorm", "word_embeddings_layernorm"],
    norm: &["transformer.ln_f", "ln_f"],
    head: &["lm_head.weight"],
    is_tied: true,
};

/// transformers `FalconForCausalLM`.
const FALCON: ClientNames = ClientNames { embedding_norm: &[], ..BLOOM };

/// `model_type` in config.json of each family.
const FAMILIES: &[(&str, &ClientNames)] = &[
    ("bloom", &BLOOM),
    ("falcon", &FALCON),
    ("llama", &LLAMA),
    ("mistral", &LLAMA),
    ("mixtral", &LLAMA),
    ("qwen2", &LLAMA),
    ("qwen3", &LLAMA),
];

impl ClientNames {
    /// Those of a family.
    ///
    /// # Errors
    /// There are none, as the rest of a sentence about config.json.
    pub fn of(model_type: &str) -> Result<&'static ClientNames, String> {
        let found = FAMILIES.iter().find(|(name, _)| *name == model_type);
        found
            .map(|(_, names)| *names)
            .ok_or_else(|| format!("model type {model_type:?} has blocks, but no client yet"))
    }
}

/// What config.json says beside the form of the blocks.
#[derive(Debug, Deserialize)]
struct TensorConfig {
    model_type: String,
    vocab_size: u64,
    #[serde(default)]
    tie_word_embeddings: Option<bool>,
}

/// The tensors that a client computes with, by config.json: embeddings, head and last norm.
///
/// # Errors
/// What is wrong with config.json, as the rest of a sentence.
pub fn client_tensors(config: &Value) -> Result<Vec<NamedTensor>, String> {
    let spec = BlockSpec::from_config(config).map_err(|error| error.to_string())?;
    let config = TensorConfig::deserialize(config).map_err(|error| error.to_string())?;
    let names = ClientNames::of(&config.model_type)?;
    let (rows, width) = (config.vocab_size, spec.hidden as u64);
    let mut tensors = vec![named(names.embedding, "", &[rows, width])];
    if !config.tie_word_embeddings.unwrap_or(names.is_tied) {
        tensors.push(named(names.head, "", &[rows, width]));
    }
    let parts: &[&str] = match spec.norm {
        Norm::Layer { .. } => &[".weight", ".bias"],
        _ => &[".weight"],
    };
    for names in [names.embedding_norm, names.norm].into_iter().filter(|names| !names.is_empty()) {
        tensors.extend(parts.iter().map(|part| named(names, part, &[width])));
    }
    Ok(tensors)
}

fn named(names: &[&str], part: &str, shape: &[u64]) -> NamedTensor {
    let names = names.iter().map(|name| format!("{name}{part}")).collect();
    NamedTensor { names, shape: shape.to_vec() }
}

/// Bytes of [`client_tensors`] in `dtype`; 0 for a config.json without clients.
pub fn client_bytes(config: &Value, dtype: DType) -> u64 {
    let tensors = client_tensors(config).unwrap_or_default();
    let elements =
        |tensor: &NamedTensor| tensor.shape.iter().copied().fold(1u64, u64::saturating_mul);
    let all = tensors.iter().map(elements).fold(0, u64::saturating_add);
    all.saturating_mul(dtype.size_bytes() as u64)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn every_family_that_is_served_has_clients() {
        let refusal = BlockSpec::from_config(&json!({"model_type": "?"})).unwrap_err().to_string();
        let (_, served) = refusal.split_once("supported are: ").expect(&refusal);
        let named: Vec<&str> = FAMILIES.iter().map(|(name, _)| *name).collect();
        assert_eq!(named.join(", "), served);
    }

    #[test]
    fn tensors_of_a_client_are_those_of_its_family() {
        let names = |config: &Value| -> Vec<String> {
            client_tensors(config).unwrap().iter().map(|tensor| tensor.names[0].clone()).collect()
        };
        let llama = json!({
            "model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2,
            "intermediate_size": 128, "vocab_size": 100, "rms_norm_eps": 1e-5,
        });
        let expected = ["model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"];
        assert_eq!(names(&llama), expected);
        assert_eq!(client_bytes(&llama, DType::Bf16), 2 * (2 * 100 * 64 + 64));
        let bloom = json!({
            "model_type": "bloom", "hidden_size": 64, "n_head": 4, "n_layer": 2, "vocab_size": 100,
            "layer_norm_epsilon": 1e-5,
        });
        let first = "transformer.word_embeddings";
        let norms = [format!("{first}_layernorm"), "transformer.ln_f".to_owned()];
        let mut expected = vec![format!("{first}.weight")];
        expected.extend(norms.iter().flat_map(|n| [format!("{n}.weight"), format!("{n}.bias")]));
        assert_eq!(names(&bloom), expected);
        assert_eq!(client_bytes(&bloom, DType::F32), 4 * (100 * 64 + 4 * 64));
        let unknown = client_tensors(&json!({"model_type": "gpt2"})).unwrap_err();
        assert!(unknown.contains("gpt2"), "{unknown}");
        assert_eq!(client_bytes(&json!({"model_type": "gpt2"}), DType::F32), 0);
    }
}
