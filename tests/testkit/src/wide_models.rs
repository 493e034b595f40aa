//! Models of width 128 for tests on the emulator, whose tensor-core kernels need real head sizes.

use serde_json::{Value, json};
use shared::dtype::DType;

use crate::models::{Tensors, bytes, llama_config, values, word};

/// config.json of a Llama of width 128 whose heads have the size of real ones.
pub fn wide_config(blocks: usize) -> Value {
    let mut config = llama_config(blocks);
    config["hidden_size"] = json!(128);
    config["intermediate_size"] = json!(192);
    config["num_attention_heads"] = json!(2);
    config["num_key_value_heads"] = json!(1);
    config
}

/// The tensors of that model in `dtype`.
pub fn wide_tensors(blocks: usize, dtype: DType) -> Tensors {
    let mlp =
        [("mlp.gate_proj", [192, 128]), ("mlp.up_proj", [192, 128]), ("mlp.down_proj", [128, 192])];
    let mlp = mlp.map(|(name, shape)| (name.to_owned(), shape));
    tensors_of(blocks, dtype, &mlp)
}

/// config.json of a Mixtral of that width with 4 experts, 2 of them for a token.
pub fn mixture_config(blocks: usize) -> Value {
    let mut config = wide_config(blocks);
    config["model_type"] = json!("mixtral");
    config["num_local_experts"] = json!(4);
    config["num_experts_per_tok"] = json!(2);
    config
}

/// The tensors of that model in `dtype`.
pub fn mixture_tensors(blocks: usize, dtype: DType) -> Tensors {
    let mut mlp = vec![("block_sparse_moe.gate".to_owned(), [4, 128])];
    for expert in 0..4 {
        for (name, shape) in [("w1", [192, 128]), ("w3", [192, 128]), ("w2", [128, 192])] {
            mlp.push((format!("block_sparse_moe.experts.{expert}.{name}"), shape));
        }
    }
    tensors_of(blocks, dtype, &mlp)
}

/// Tensors of blocks of width 128 with two heads, and the matrices of their MLP.
fn tensors_of(blocks: usize, dtype: DType, mlp: &[(String, [usize; 2])]) -> Tensors {
    let attention = [
        ("q_proj", [128, 128]),
        ("k_proj", [64, 128]),
        ("v_proj", [64, 128]),
        ("o_proj", [128, 128]),
    ];
    let mut shapes: Vec<(String, Vec<usize>)> = attention
        .into_iter()
        .map(|(name, shape)| (format!("self_attn.{name}"), shape.to_vec()))
        .chain(mlp.iter().map(|(name, shape)| (name.clone(), shape.to_vec())))
        .collect();
    for norm in ["input_layernorm", "post_attention_layernorm"] {
        shapes.push((norm.to_owned(), vec![128]));
    }
    let mut tensors = Tensors::new();
    for block in 0..blocks {
        for (k, (name, shape)) in shapes.iter().enumerate() {
            let data = bytes(dtype, &values(shape, k + 31 * block));
            let name = format!("model.layers.{block}.{name}.weight");
            tensors.insert(name, (word(dtype), shape.clone(), data));
        }
    }
    tensors
}
