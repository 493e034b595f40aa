//! Fuzz targets of LoRA adapters: the config, and the names and shapes of the tensors.

use fuzzing::{Target, outcome};
use model::header::Header;
use model::manifest::FileEntry;
use serde_json::json;

use super::*;

fn golden() -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/adapters");
    let entries = std::fs::read_dir(folder).expect("golden adapters");
    let mut folders: Vec<_> = entries.map(|entry| entry.expect("entry").path()).collect();
    folders.sort();
    folders
}

fn configs() -> Vec<Vec<u8>> {
    golden().iter().map(|folder| std::fs::read(folder.join(CONFIG)).expect("read")).collect()
}

fn llama() -> BlockSpec {
    let config = json!({
        "model_type": "llama", "hidden_size": 64, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 96, "num_hidden_layers": 2,
        "rms_norm_eps": 1e-5, "max_position_embeddings": 64,
    });
    BlockSpec::from_config(&config).expect("a Llama")
}

#[test]
fn fuzz_configs_of_adapters() {
    // Patterns are compiled: each may take MAX_COMPILED_BYTES.
    Target::new("adapter configs", configs()).with_bound(16 << 20, 4096).fuzz(move |input| {
        let config = AdapterConfig::parse(input);
        if let Ok(config) = &config {
            for path in ["model.layers.1.self_attn.q_proj", "transformer.h.0.mlp.dense", ""] {
                let _ = (config.targets(path, 1), config.rank(path), config.scale(path));
            }
        }
        outcome(&config)
    });
}

#[test]
fn fuzz_tensors_of_adapters() {
    let folders = golden().into_iter().map(|folder| folder.join(WEIGHTS[0]));
    let seeds = folders.filter(|path| path.is_file()).map(|path| {
        let bytes = std::fs::read(path).expect("read");
        let header = u64::from_le_bytes(bytes[..8].try_into().expect("eight"));
        bytes[8..8 + header as usize].to_vec()
    });
    let (spec, path) = (llama(), PathBuf::from("adapter_model.safetensors"));
    let config = json!({"peft_type": "LORA", "r": 4, "target_modules": "all-linear"}).to_string();
    let config = AdapterConfig::parse(config.as_bytes()).expect("a config");
    Target::new("adapter tensors", seeds).with_bound(1 << 20, 256).fuzz(move |input| {
        let Ok(header) = Header::parse(input) else { return "no header".into() };
        let file = tempfile::tempfile().expect("a file");
        let entry = FileEntry::of(&path, &file).expect("its state");
        let file = CheckpointFile { file, shown: path.clone(), entry, header };
        let blocks = Reading { file: &file, config: &config, spec: &spec }.blocks();
        let outcome = outcome(&blocks);
        if let Ok(blocks) = blocks {
            let adapter = Adapter { name: "a".to_owned(), file, blocks };
            let _ = adapter.block_bytes(DType::F32);
            for block in 0..2 {
                let _ = adapter.sources(BlockIndex(block)).map(|sources| sources.len());
            }
        }
        outcome
    });
}
