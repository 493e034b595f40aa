//! Facts of models that no test needs on disk. A test names what it is about and takes the rest:
//! `ModelFacts { num_blocks: 2, ..facts() }`.

use shared::config::QuantType;
use shared::dtype::DType;
use shared::model::ModelFacts;

/// A Llama of 8 blocks of width 64 in float32, with two heads of queries for one of keys.
pub fn facts() -> ModelFacts {
    ModelFacts {
        name: "tiny".into(),
        repository: None,
        model_type: "llama".into(),
        dht_prefix: None,
        num_blocks: 8,
        hidden_size: 64,
        attention_heads: 4,
        kv_heads: 2,
        head_dim: 16,
        context_tokens: None,
        dtype: DType::F32,
        quant_type: QuantType::None,
        block_bytes: 1 << 20,
        client_bytes: 0,
        adapters: Vec::new(),
    }
}

/// Llama-2-70B in NF4, as stored.
pub fn llama_70b() -> ModelFacts {
    ModelFacts {
        name: "llama-70b".into(),
        num_blocks: 80,
        hidden_size: 8192,
        attention_heads: 64,
        kv_heads: 8,
        head_dim: 128,
        dtype: DType::Bf16,
        quant_type: QuantType::Nf4,
        block_bytes: 440 << 20,
        ..facts()
    }
}
