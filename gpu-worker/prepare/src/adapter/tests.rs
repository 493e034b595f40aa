//! Adapters that do not belong to the model, or are not whole.

use ::safetensors::tensor::Dtype;
use blocks::map::MappedWeights;
use serde_json::{Value, json};
use shared::block::Span;
use shared::config::{PrepareConfig, QuantChoice, QuantType};
use shared::dtype::DType;
use tempfile::TempDir;
use testkit::configs::prepare_config;
use testkit::models::{
    Tensors, bytes, llama_config, llama_tensors, safetensors, values, word, write_model,
};

use super::*;
use crate::Inspected;

const RANK: usize = 4;

struct Trial {
    root: TempDir,
    config: Value,
    tensors: Tensors,
}

/// An adapter of `q_proj` and `down_proj` for a Llama of two blocks.
fn trial() -> Trial {
    let root = tempfile::tempdir().unwrap();
    write_model(&root.path().join("tiny"), &llama_config(2), &llama_tensors(2, DType::Bf16));
    let mut tensors = Tensors::new();
    for block in 0..2 {
        for (k, (module, outputs, inputs)) in
            [("self_attn.q_proj", 64, 64), ("mlp.down_proj", 64, 96)].into_iter().enumerate()
        {
            for (side, shape) in [("A", [RANK, inputs]), ("B", [outputs, RANK])] {
                let name =
                    format!("base_model.model.model.layers.{block}.{module}.lora_{side}.weight");
                let data = bytes(DType::F32, &values(&shape, k + 7 * block));
                tensors.insert(name, (word(DType::F32), shape.to_vec(), data));
            }
        }
    }
    let config = json!({
        "peft_type": "LORA", "base_model_name_or_path": "org/tiny", "r": RANK, "lora_alpha": 8,
        "target_modules": ["q_proj", "down_proj"],
    });
    Trial { root, config, tensors }
}

impl Trial {
    fn folder(&self) -> PathBuf {
        self.root.path().join("lora")
    }

    fn write(&self) {
        let folder = self.folder();
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::write(folder.join(CONFIG), self.config.to_string()).unwrap();
        std::fs::write(folder.join(WEIGHTS[0]), safetensors(&self.tensors)).unwrap();
    }

    fn config(&self, adapters: &[&str], quant_type: QuantType) -> PrepareConfig {
        PrepareConfig {
            quant_type: QuantChoice::Named(quant_type),
            adapters: adapters.iter().map(|a| (*a).to_owned()).collect(),
            ..prepare_config(self.root.path().join("tiny"), self.root.path().join("cache"))
        }
    }

    fn prepare(
        &self,
        adapters: &[&str],
        quant_type: QuantType,
    ) -> Result<MappedWeights, PrepareError> {
        let config = self.config(adapters, quant_type);
        let span = Span::new(0, 2).unwrap();
        let manifest = Inspected::new(&config)?.make_ready(span, |_| Ok(()))?;
        assert_eq!(manifest.model.adapters, adapters);
        Ok(MappedWeights::map(&manifest, span, || ()).unwrap())
    }

    /// Writes it and tells why it is refused.
    fn refusal(&self) -> String {
        self.write();
        let error = self
            .prepare(&[self.folder().to_str().unwrap()], QuantType::None)
            .map(|_| ())
            .unwrap_err();
        assert_eq!(error.exit_reason(), shared::exit::ExitReason::BadConfig, "{error}");
        error.to_string()
    }

    fn rename(&mut self, from: &str, to: &str) {
        let names: Vec<String> =
            self.tensors.keys().filter(|n| n.contains(from)).cloned().collect();
        for name in names {
            let tensor = self.tensors.remove(&name).unwrap();
            self.tensors.insert(name.replace(from, to), tensor);
        }
    }
}

#[test]
fn a_good_adapter_is_mapped_in_the_block_dtype_or_in_float32_beside_quantized_matrices() {
    let trial = trial();
    trial.write();
    let name = trial.folder().to_str().unwrap().to_owned();
    for (quant, dtype) in [(QuantType::None, DType::Bf16), (QuantType::Nf4, DType::F32)] {
        let weights = trial.prepare(&[&name], quant).unwrap();
        for block in 0..2 {
            let view = weights.adapter(0, BlockIndex(block), "mlp.down_proj").unwrap();
            assert_eq!(
                (view.a.outputs(), view.a.inputs(), view.b.outputs(), view.b.inputs()),
                (RANK, 96, 64, RANK)
            );
            assert_eq!((view.scale, view.a.dtype(), view.b.dtype()), (2.0, dtype, dtype));
            assert!(weights.adapter(0, BlockIndex(block), "mlp.up_proj").is_none());
        }
        let facts = |adapters| Inspected::new(&trial.config(adapters, quant)).unwrap().facts;
        let added = facts(&[&name]).block_bytes - facts(&[]).block_bytes;
        assert_eq!(weights.adapter_bytes(), 2 * added);
        let values = 2 * RANK * (64 + 64 + 96 + 64);
        assert_eq!(weights.adapter_bytes(), (values * dtype.size_bytes()) as u64);
    }
}

#[test]
fn names_with_the_adapters_own_name_and_of_a_model_without_head_are_read() {
    let mut trial = trial();
    trial.rename(".weight", ".default.weight");
    trial.rename("base_model.model.model.", "base_model.model.");
    trial.write();
    let weights = trial.prepare(&[trial.folder().to_str().unwrap()], QuantType::None).unwrap();
    assert!(weights.adapter(0, BlockIndex(1), "self_attn.q_proj").is_some());
}

#[test]
fn tensors_outside_of_the_blocks_are_left_to_the_client() {
    let mut trial = trial();
    let head = trial.tensors.values().next().unwrap().clone();
    trial.tensors.insert("base_model.model.lm_head.lora_A.weight".into(), head);
    trial.write();
    assert!(trial.prepare(&[trial.folder().to_str().unwrap()], QuantType::None).is_ok());
}

const FILE: &str = "adapter_model.safetensors";
const Q0: &str = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight";

#[test]
fn an_adapter_that_does_not_fit_is_refused_by_file_tensor_and_reason() {
    let shapes = |trial: &mut Trial, name: &str, shape: [usize; 2]| {
        let tensor = (word(DType::F32), shape.to_vec(), bytes(DType::F32, &values(&shape, 1)));
        trial.tensors.insert(name.to_owned(), tensor);
    };
    type Break = Box<dyn Fn(&mut Trial)>;
    let cases: Vec<(Break, &[&str])> = vec![
        (
            Box::new(move |t| shapes(t, Q0, [RANK, 32])),
            &[FILE, Q0, "has shape [4, 32]", "[4, 64]", "org/tiny"],
        ),
        (Box::new(move |t| shapes(t, Q0, [2, 64])), &[FILE, Q0, "rank 4"]),
        (
            Box::new(|t| drop(t.tensors.remove(Q0))),
            &[FILE, "layers.0.self_attn.q_proj.lora_A.weight", "is missing"],
        ),
        (
            Box::new(|t| t.tensors.retain(|n, _| !n.contains("layers.1.mlp"))),
            &[FILE, "model.layers.1.mlp.down_proj", "is missing", "target_modules"],
        ),
        (Box::new(|t| t.rename("layers.1.", "layers.2.")), &["block 2 of a model that has 2"]),
        (Box::new(|t| t.rename("layers.", "h.")), &[FILE, "no tensor for the blocks"]),
        (Box::new(|t| t.rename("q_proj", "query_key_value")), &["query_key_value", "do not have"]),
        (Box::new(|t| t.rename("lora_A", "lora_magnitude_vector")), &["neither lora_A nor lora_B"]),
        (Box::new(|t| t.rename("lora_B.weight", "lora_B.bias")), &["neither lora_A nor lora_B"]),
        (
            Box::new(|t| t.config["target_modules"] = json!(["q_proj"])),
            &["mlp.down_proj", "does not name"],
        ),
        (Box::new(|t| t.config["target_modules"] = json!("all-linear")), &["k_proj", "is missing"]),
        (
            Box::new(|t| t.config["layers_to_transform"] = json!([1])),
            &["layers.0", "does not name"],
        ),
        (Box::new(|t| t.config["use_dora"] = json!(true)), &[CONFIG, "use_dora"]),
        (Box::new(|t| t.config["peft_type"] = json!("IA3")), &[CONFIG, "only LORA"]),
        (
            Box::new(|t| {
                let mut data = values(&[RANK, 64], 1);
                data[17] = f32::NAN;
                t.tensors
                    .insert(Q0.to_owned(), (Dtype::F32, vec![RANK, 64], bytes(DType::F32, &data)));
            }),
            &[FILE, Q0, "NaN"],
        ),
        (
            Box::new(|t| {
                t.tensors.insert(
                    Q0.to_owned(),
                    (Dtype::F32, vec![RANK, 64], bytes(DType::F32, &[f32::INFINITY; RANK * 64])),
                );
            }),
            &[FILE, Q0, "infinite"],
        ),
        (
            Box::new(|t| {
                t.tensors
                    .insert(Q0.to_owned(), (Dtype::I32, vec![RANK, 64], vec![0; 4 * RANK * 64]));
            }),
            &[FILE, Q0, "I32"],
        ),
    ];
    for (broken, says) in cases {
        let mut trial = trial();
        broken(&mut trial);
        let error = trial.refusal();
        for word in says {
            assert!(error.contains(word), "{word}: {error}");
        }
    }
}

#[test]
fn folders_that_hold_no_adapter_are_refused() {
    let trial = trial();
    trial.write();
    let refusal =
        |name: &str| trial.prepare(&[name], QuantType::None).map(|_| ()).unwrap_err().to_string();
    assert!(refusal("/nowhere/at/all").contains("/nowhere/at/all"));
    let folder = trial.folder();
    std::fs::write(folder.join(WEIGHTS[0]), b"short").unwrap();
    assert!(refusal(folder.to_str().unwrap()).contains("cut short"));
    std::fs::remove_file(folder.join(WEIGHTS[0])).unwrap();
    assert!(refusal(folder.to_str().unwrap()).contains("holds neither"));
    std::fs::remove_file(folder.join(CONFIG)).unwrap();
    assert!(refusal(folder.to_str().unwrap()).contains(CONFIG));
}
