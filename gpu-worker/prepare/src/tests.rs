use std::path::Path;
use std::time::Duration;

use blocks::kv::page_layout;
use blocks::map::{MapError, MappedWeights};
use blocks::{BlockWeights, Workspace, forward};
use kernels::ops::convert;
use kernels::{Cpu, KvPages, StepRow};
use model::manifest::Manifest;
use model::weight_files::WeightFileError;
use safetensors::SafeTensors;
use safetensors::tensor::Dtype;
use serde_json::{Value, json};
use shared::block::{BlockIndex, Span};
use shared::config::{Device, PrepareConfig, QuantChoice, QuantType, WorkerConfig};
use shared::control::{FromPrepare, Role, ToPrepare};
use shared::dtype::DType;
use shared::exit::ExitReason;
use shared::ids::{Generation, PageId};
use tempfile::TempDir;
use testkit::configs::prepare_config;
use testkit::models::*;
use testkit::process::{DEADLINE, Seat, Spawned, as_child, spawn, wait};
use testkit::span;

use super::*;

mod format;
mod process;
mod refusals;

struct TinyModel {
    _root: TempDir,
    config: PrepareConfig,
}

/// A model folder and a cache folder of their own.
fn place(dtype: Option<DType>) -> TinyModel {
    let root = tempfile::tempdir().unwrap();
    let config = prepare_config(root.path().join("tiny"), root.path().join("cache"));
    TinyModel { _root: root, config: PrepareConfig { dtype, ..config } }
}

impl TinyModel {
    fn folder(&self) -> &Path {
        Path::new(&self.config.model)
    }

    fn ready(&self, span: Span) -> Result<Manifest, PrepareError> {
        Inspected::new(&self.config)?.make_ready(span, |_| Ok(()))
    }

    fn prepared_files(&self) -> Vec<std::fs::DirEntry> {
        let folder = self.config.cache_dir.join("prepared/m-tiny");
        std::fs::read_dir(folder).map_or(vec![], |files| files.map(Result::unwrap).collect())
    }
}

fn tensor<'a>(weights: &'a MappedWeights, block: u32, name: &str) -> &'a [u8] {
    weights.tensor(BlockIndex(block), name).unwrap().bytes()
}

#[test]
fn facts_come_from_the_config() {
    let place = place(None);
    write_model(place.folder(), &llama_config(3), &llama_tensors(3, DType::F32));
    let facts = Inspected::new(&place.config).unwrap().facts;
    assert_eq!((facts.name.as_str(), facts.model_type.as_str()), ("tiny", "llama"));
    assert_eq!(
        (facts.num_blocks, facts.hidden_size, facts.head_dim, facts.kv_heads),
        (3, 64, 16, 2)
    );
    assert_eq!(facts.dtype, DType::Bf16, "float32 is served in bfloat16 unless asked for");
    assert_eq!(facts.block_bytes, 2 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 96 * 64 + 2 * 64));
    assert_eq!((facts.repository, facts.dht_prefix), (None, None));
}

/// As BLOOM is published (`h.0`) and as others save it (`transformer.h.0`), and the like of Llama.
#[test]
fn blocks_are_found_with_and_without_the_word_for_the_rest_of_the_model() {
    for (from, to) in [("model.layers.", "layers."), ("model.layers.", "transformer.layers.")] {
        for is_sharded in [false, true] {
            let place = place(Some(DType::F32));
            let tensors: Tensors = llama_tensors(2, DType::F32)
                .into_iter()
                .map(|(name, tensor)| (name.replace(from, to), tensor))
                .collect();
            if is_sharded && to.contains("transformer") {
                write_sharded(place.folder(), &llama_config(2), &tensors);
            } else {
                write_model(place.folder(), &llama_config(2), &tensors);
            }
            let manifest = place.ready(span(0, 2)).unwrap();
            assert!(manifest.block(BlockIndex(1)).unwrap().contains_key("mlp.up_proj.weight"));
        }
    }
}

/// The same blocks as files of torch (`tests/golden/torch/llama`, made by its `generate.py`) and as
/// safetensors.
#[test]
fn checkpoints_of_torch_are_served_from_where_they_lie_and_hold_the_same_bytes() {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden");
    let read = |folder: &str, dtype: DType| {
        let mut place = place(Some(dtype));
        place.config.model = golden.join(folder).to_str().unwrap().to_owned();
        let manifest = place.ready(span(0, 2)).unwrap();
        (MappedWeights::map(&manifest, span(0, 2), || ()).unwrap(), manifest, place)
    };
    for dtype in [DType::F32, DType::Bf16] {
        let (torch, manifest, _place) = read("torch/llama", dtype);
        let (plain, _, _other) = read("blocks/llama", dtype);
        for (block, tensors) in &manifest.blocks {
            for name in tensors.keys() {
                assert_eq!(tensor(&torch, *block, name), tensor(&plain, *block, name), "{name}");
            }
        }
        let in_place = |f: &model::manifest::FileEntry| f.path.extension().unwrap() == "bin";
        assert_eq!(manifest.files.iter().all(in_place), dtype == DType::F32);
    }
}

/// Outputs of block 0 for a few tokens, served as `quant`.
fn outputs(place: &TinyModel, quant: QuantType) -> Vec<f32> {
    let config = PrepareConfig { quant_type: QuantChoice::Named(quant), ..place.config.clone() };
    let mut inspected = Inspected::new(&config).unwrap();
    assert_eq!(inspected.facts.quant_type, quant);
    let manifest = inspected.make_ready(span(0, 1), |_| Ok(())).unwrap();
    let weights = MappedWeights::map(&manifest, span(0, 1), || ()).unwrap();
    // The vectors stay in the block dtype, so what is served is what was promised.
    assert_eq!(weights.bytes(), inspected.facts.block_bytes);
    let (spec, dtype) = (&inspected.spec, inspected.facts.dtype);
    let mut cpu = Cpu::new(2);
    let blocks =
        BlockWeights::new(&mut cpu, spec, dtype, |name| weights.tensor(BlockIndex(0), name))
            .unwrap();
    let mut work = Workspace::new(&mut cpu);
    let layout = page_layout(spec, dtype);
    let mut pool = vec![0; layout.page_bytes()];
    let mut pages = KvPages::new(layout, &mut pool);
    let rows = [StepRow::new(9, 0, &[PageId(0)])];
    let mut hidden: Vec<f32> = (0..9 * spec.hidden)
        .map(|i| (0.61 * i as f32).sin())
        .map(|v| convert::round(dtype, v))
        .collect();
    let before = hidden.clone();
    forward(&mut cpu, spec, &blocks, &mut work, &rows, &mut hidden, &mut pages).unwrap();
    // What the block adds; the residual would hide errors.
    hidden.iter().zip(&before).map(|(a, b)| a - b).collect()
}

/// Reproducible values in `-scale..scale` (xorshift).
fn uniform(seed: u64, count: usize, scale: f32) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        ((state >> 40) as f32 / (1 << 23) as f32 - 1.0) * scale
    };
    (0..count).map(|_| next()).collect()
}

#[test]
fn quantized_blocks_are_small_and_compute_nearly_the_same() {
    for dtype in [DType::F32, DType::Bf16] {
        let place = place(Some(dtype));
        let mut tensors = llama_tensors(1, DType::F32);
        // Waves, as matrices of the fixture are, nearly cancel, which no trained matrix does.
        for (seed, (_, shape, data)) in (1..).zip(tensors.values_mut()) {
            if let [_, inputs] = shape.as_slice() {
                let scale = 1.5 / (*inputs as f32).sqrt();
                *data = bytes(DType::F32, &uniform(seed, data.len() / 4, scale));
            }
        }
        write_model(place.folder(), &llama_config(1), &tensors);
        let wanted = outputs(&place, QuantType::None);
        let size: f32 = wanted.iter().map(|v| v * v).sum();
        // Relative error of what one block adds, in the root mean square.
        for (quant, bound) in [(QuantType::Int8, 0.02), (QuantType::Nf4, 0.25)] {
            let got = outputs(&place, quant);
            let error: f32 = got.iter().zip(&wanted).map(|(a, b)| (a - b).powi(2)).sum();
            let error = (error / size).sqrt();
            assert!(error < bound, "{quant} {dtype}: {error}");
            assert!(error > 0.0, "{quant} {dtype} must not be served as it is");
            assert_eq!(got, outputs(&place, quant), "the prepared file is used again");
        }
    }
}

#[test]
fn a_prepared_block_of_another_format_is_not_used() {
    let place = place(Some(DType::F32));
    write_model(place.folder(), &llama_config(1), &llama_tensors(1, DType::F32));
    for quant in [QuantType::None, QuantType::Int8, QuantType::Nf4] {
        outputs(&place, quant);
    }
    assert_eq!(place.prepared_files().len(), 3);
    let first = |quant_type| {
        let config =
            PrepareConfig { quant_type: QuantChoice::Named(quant_type), ..place.config.clone() };
        let mut inspected = Inspected::new(&config).unwrap();
        let manifest = inspected.make_ready(span(0, 1), |_| Ok(())).unwrap();
        let tensors = &manifest.blocks[&0];
        let (matrix, norm) = (&tensors["mlp.up_proj.weight"], &tensors["input_layernorm.weight"]);
        assert_eq!((matrix.quant, norm.quant), (quant_type, QuantType::None));
        matrix.len
    };
    assert_eq!(first(QuantType::None), 4 * 96 * 64);
    assert_eq!(first(QuantType::Int8), 96 * 64 + 384);
    assert_eq!(first(QuantType::Nf4), 96 * 32 + 128 + 64);
}
