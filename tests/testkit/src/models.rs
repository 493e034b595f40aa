//! Tiny models for tests: a config and deterministic weights as a Hugging Face folder, written with
//! the reference crate.

use std::collections::BTreeMap;
use std::path::Path;

use half::{bf16, f16};
use safetensors::tensor::{Dtype, TensorView, serialize};
use serde_json::{Value, json};
use shared::dtype::DType;

/// Tensors of a checkpoint by name: dtype, shape, data.
pub type Tensors = BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>;

/// config.json of a Llama with `blocks` blocks of width 64.
pub fn llama_config(blocks: usize) -> Value {
    json!({
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": blocks,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "torch_dtype": "float32",
    })
}

/// The tensors of that model in `dtype`.
pub fn llama_tensors(blocks: usize, dtype: DType) -> Tensors {
    let mut tensors = Tensors::new();
    for block in 0..blocks {
        let shapes: [(&str, &[usize]); 9] = [
            ("self_attn.q_proj.weight", &[64, 64]),
            ("self_attn.k_proj.weight", &[32, 64]),
            ("self_attn.v_proj.weight", &[32, 64]),
            ("self_attn.o_proj.weight", &[64, 64]),
            ("mlp.gate_proj.weight", &[96, 64]),
            ("mlp.up_proj.weight", &[96, 64]),
            ("mlp.down_proj.weight", &[64, 96]),
            ("input_layernorm.weight", &[64]),
            ("post_attention_layernorm.weight", &[64]),
        ];
        for (k, (name, shape)) in shapes.into_iter().enumerate() {
            let name = format!("model.layers.{block}.{name}");
            tensors.insert(
                name,
                (word(dtype), shape.to_vec(), bytes(dtype, &values(shape, k + 31 * block))),
            );
        }
    }
    tensors
}

/// Weights as in no trained model, but of their size: `sin` of the index, scaled by the width.
pub fn values(shape: &[usize], seed: usize) -> Vec<f32> {
    let count: usize = shape.iter().product();
    let scale = if shape.len() == 1 { 0.2 } else { 1.5 / (shape[1] as f32).sqrt() };
    let base = if shape.len() == 1 { 1.0 } else { 0.0 };
    (0..count).map(|i| base + scale * (0.37 * i as f32 + 1.3 * seed as f32).sin()).collect()
}

/// `values` in `dtype`, rounded by the `half` crate.
pub fn bytes(dtype: DType, values: &[f32]) -> Vec<u8> {
    match dtype {
        DType::F32 => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
        DType::Bf16 => values.iter().flat_map(|&v| bf16::from_f32(v).to_le_bytes()).collect(),
        DType::F16 => values.iter().flat_map(|&v| f16::from_f32(v).to_le_bytes()).collect(),
    }
}

pub fn word(dtype: DType) -> Dtype {
    match dtype {
        DType::F32 => Dtype::F32,
        DType::Bf16 => Dtype::BF16,
        DType::F16 => Dtype::F16,
    }
}

/// A safetensors file of `tensors`.
pub fn safetensors(tensors: &Tensors) -> Vec<u8> {
    let views = tensors.iter().map(|(name, (dtype, shape, data))| {
        (
            name.as_str(),
            TensorView::new(*dtype, shape.clone(), data).expect("a tensor of the right size"),
        )
    });
    serialize(views, None).expect("a file of valid tensors")
}

/// Writes a model folder with one checkpoint file.
pub fn write_model(folder: &Path, config: &Value, tensors: &Tensors) {
    std::fs::create_dir_all(folder).expect("a folder");
    std::fs::write(folder.join("config.json"), config.to_string()).expect("config.json");
    std::fs::write(folder.join("model.safetensors"), safetensors(tensors)).expect("weights");
}

/// Writes a model folder with one checkpoint file per block and an index.
pub fn write_sharded(folder: &Path, config: &Value, tensors: &Tensors) {
    std::fs::create_dir_all(folder).expect("a folder");
    std::fs::write(folder.join("config.json"), config.to_string()).expect("config.json");
    let mut shards: BTreeMap<String, Tensors> = BTreeMap::new();
    for (name, tensor) in tensors {
        let block = name.split('.').nth(2).expect("a block's tensor");
        shards
            .entry(format!("model-{block}.safetensors"))
            .or_default()
            .insert(name.clone(), tensor.clone());
    }
    let map: BTreeMap<_, _> =
        shards.iter().flat_map(|(file, t)| t.keys().map(move |name| (name, file))).collect();
    std::fs::write(
        folder.join("model.safetensors.index.json"),
        json!({ "weight_map": map }).to_string(),
    )
    .expect("index");
    for (file, tensors) in &shards {
        std::fs::write(folder.join(file), safetensors(tensors)).expect("weights");
    }
}

/// The queries and matrices of the MLP of a model by this config, of many experts those of some:
/// what an adapter of number `seed` is for, with outputs and inputs.
pub fn adapted_modules(config: &Value, seed: usize) -> Vec<(String, [usize; 2])> {
    let side = |name: &str| config[name].as_u64().unwrap_or(0) as usize;
    let (hidden, middle) = (side("hidden_size"), side("intermediate_size"));
    let mut modules = vec![("self_attn.q_proj".to_owned(), [hidden, hidden])];
    let experts = side("num_local_experts");
    if experts == 0 {
        modules.push(("mlp.up_proj".to_owned(), [middle, hidden]));
        modules.push(("mlp.down_proj".to_owned(), [hidden, middle]));
    }
    for expert in 0..experts {
        for (k, (name, sides)) in
            [("w1", [middle, hidden]), ("w3", [middle, hidden]), ("w2", [hidden, middle])]
                .into_iter()
                .enumerate()
        {
            if (expert + seed + k) % 4 != 3 {
                modules.push((format!("block_sparse_moe.experts.{expert}.{name}"), sides));
            }
        }
    }
    modules
}

/// Writes a LoRA adapter of rank 4 for these modules of every block; another `seed` makes another
/// adapter.
pub fn write_adapter(folder: &Path, blocks: usize, seed: usize, modules: &[(String, [usize; 2])]) {
    let mut tensors = Tensors::new();
    for block in 0..blocks {
        for (k, (module, [outputs, inputs])) in modules.iter().enumerate() {
            for (side, shape) in [("A", [4, *inputs]), ("B", [*outputs, 4])] {
                let name =
                    format!("base_model.model.model.layers.{block}.{module}.lora_{side}.weight");
                let data = bytes(DType::F32, &values(&shape, 100 + k + 7 * block + 1000 * seed));
                tensors.insert(name, (Dtype::F32, shape.to_vec(), data));
            }
        }
    }
    let targets: Vec<&String> = modules.iter().map(|(name, _)| name).collect();
    let config = json!({
        "peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": targets,
    });
    std::fs::create_dir_all(folder).expect("a folder");
    std::fs::write(folder.join("adapter_config.json"), config.to_string()).expect("config");
    let file = safetensors(&tensors);
    std::fs::write(folder.join("adapter_model.safetensors"), file).expect("weights");
}
