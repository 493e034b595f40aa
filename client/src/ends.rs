//! The two ends of each family: what lies before its first block and behind its last. The form of the
//! norms and all sizes are those of the blocks ([`model::BlockSpec`]).

/// Names of the tensors that a client computes with, each as the checkpoints of the family have it:
/// with the name of the model in front, or without.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Ends {
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
const LLAMA: Ends = Ends {
    embedding: &["model.embed_tokens.weight", "embed_tokens.weight"],
    embedding_norm: &[],
    norm: &["model.norm", "norm"],
    head: &["lm_head.weight"],
    is_tied: false,
};

/// transformers `BloomForCausalLM`.
const BLOOM: Ends = Ends {
    embedding: &["transformer.word_embeddings.weight", "word_embeddings.weight"],
    embedding_norm: &["transformer.word_embeddings_layernorm", "word_embeddings_layernorm"],
    norm: &["transformer.ln_f", "ln_f"],
    head: &["lm_head.weight"],
    is_tied: true,
};

/// transformers `FalconForCausalLM`.
const FALCON: Ends = Ends { embedding_norm: &[], ..BLOOM };

/// `model_type` in config.json of each family.
const FAMILIES: &[(&str, &Ends)] = &[
    ("bloom", &BLOOM),
    ("falcon", &FALCON),
    ("llama", &LLAMA),
    ("mistral", &LLAMA),
    ("mixtral", &LLAMA),
    ("qwen2", &LLAMA),
    ("qwen3", &LLAMA),
];

impl Ends {
    /// Those of a family.
    pub fn of(model_type: &str) -> Option<&'static Ends> {
        FAMILIES.iter().find(|(name, _)| *name == model_type).map(|(_, ends)| *ends)
    }
}

#[cfg(test)]
mod tests {
    use model::BlockSpec;
    use serde_json::json;

    use super::*;

    #[test]
    fn every_family_that_is_served_has_its_ends() {
        let refusal = BlockSpec::from_config(&json!({"model_type": "?"})).unwrap_err().to_string();
        let (_, served) = refusal.split_once("supported are: ").expect(&refusal);
        let named: Vec<&str> = FAMILIES.iter().map(|(name, _)| *name).collect();
        assert_eq!(named.join(", "), served);
    }
}
