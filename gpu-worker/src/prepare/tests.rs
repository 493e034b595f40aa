use std::path::Path;

use kernels::ops::convert;
use kernels::{Cpu, KvPages, StepRow};
use safetensors::SafeTensors;
use safetensors::tensor::Dtype;
use serde_json::{Value, json};
use shared::block::{BlockIndex, Span};
use shared::config::QuantType;
use shared::control::Role;
use shared::dtype::DType;
use shared::ids::{Generation, PageId};
use tempfile::TempDir;

use super::*;
use crate::block::{BlockInput, BlockWeights, Workspace, forward};
use crate::fixtures::*;
use crate::harness::{DEADLINE, Seat, Spawned, as_child, spawn, wait};
use crate::weights::manifest::Manifest;
use crate::weights::map::{MapError, MappedWeights};

struct Place {
    _root: TempDir,
    config: PrepareConfig,
}

/// A model folder and a cache folder of their own.
fn place(dtype: Option<DType>) -> Place {
    let root = tempfile::tempdir().unwrap();
    let model = root.path().join("tiny").to_str().unwrap().to_owned();
    let config = PrepareConfig {
        model,
        dtype,
        quant_type: QuantType::None,
        adapters: Vec::new(),
        cache_dir: root.path().join("cache"),
        hub: shared::config::HubConfig::default(),
    };
    Place {
        _root: root,
        config,
    }
}

impl Place {
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

fn span(start: u32, end: u32) -> Span {
    Span::new(start, end).unwrap()
}

fn tensor<'a>(weights: &'a MappedWeights, block: u32, name: &str) -> &'a [u8] {
    weights.tensor(BlockIndex(block), name).unwrap().bytes()
}

#[test]
fn facts_come_from_the_config() {
    let place = place(None);
    write_model(
        place.folder(),
        &llama_config(3),
        &llama_tensors(3, DType::F32),
    );
    let facts = Inspected::new(&place.config).unwrap().facts;
    assert_eq!(
        (facts.name.as_str(), facts.model_type.as_str()),
        ("tiny", "llama")
    );
    assert_eq!(
        (
            facts.num_blocks,
            facts.hidden_size,
            facts.head_dim,
            facts.kv_heads
        ),
        (3, 64, 16, 2)
    );
    assert_eq!(
        facts.dtype,
        DType::Bf16,
        "float32 is served in bfloat16 unless asked for"
    );
    assert_eq!(
        facts.block_bytes,
        2 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 96 * 64 + 2 * 64)
    );
    assert_eq!((facts.repository, facts.dht_prefix), (None, None));
}

/// As BLOOM is published (`h.0`) and as others save it (`transformer.h.0`), and the like of Llama.
#[test]
fn blocks_are_found_with_and_without_the_word_for_the_rest_of_the_model() {
    for (from, to) in [
        ("model.layers.", "layers."),
        ("model.layers.", "transformer.layers."),
    ] {
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
            assert!(
                manifest
                    .block(BlockIndex(1))
                    .unwrap()
                    .contains_key("mlp.up_proj.weight")
            );
        }
    }
}

/// The same blocks as files of torch (`tests/golden/torch/llama`, made by its `generate.py`) and as safetensors.
#[test]
fn checkpoints_of_torch_are_served_from_where_they_lie_and_hold_the_same_bytes() {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden");
    let read = |folder: &str, dtype: DType| {
        let mut place = place(Some(dtype));
        place.config.model = golden.join(folder).to_str().unwrap().to_owned();
        let manifest = place.ready(span(0, 2)).unwrap();
        (
            MappedWeights::map(&manifest, span(0, 2), || ()).unwrap(),
            manifest,
            place,
        )
    };
    for dtype in [DType::F32, DType::Bf16] {
        let (torch, manifest, _place) = read("torch/llama", dtype);
        let (plain, _, _other) = read("blocks/llama", dtype);
        for (block, tensors) in &manifest.blocks {
            for name in tensors.keys() {
                assert_eq!(
                    tensor(&torch, *block, name),
                    tensor(&plain, *block, name),
                    "{name}"
                );
            }
        }
        let in_place =
            |f: &crate::weights::manifest::FileEntry| f.path.extension().unwrap() == "bin";
        assert_eq!(manifest.files.iter().all(in_place), dtype == DType::F32);
    }
}

/// Outputs of block 0 for a few tokens, served as `quant`.
fn outputs(place: &Place, quant: QuantType) -> Vec<f32> {
    let config = PrepareConfig {
        quant_type: quant,
        ..place.config.clone()
    };
    let mut inspected = Inspected::new(&config).unwrap();
    assert_eq!(inspected.facts.quant_type, quant);
    let manifest = inspected.make_ready(span(0, 1), |_| Ok(())).unwrap();
    let weights = MappedWeights::map(&manifest, span(0, 1), || ()).unwrap();
    // The vectors stay in the block dtype, so what is served is what was promised.
    assert_eq!(weights.bytes(), inspected.facts.block_bytes);
    let (spec, dtype) = (&inspected.spec, inspected.facts.dtype);
    let mut cpu = Cpu::new(2);
    let blocks = BlockWeights::new(&mut cpu, spec, dtype, |name| {
        weights.tensor(BlockIndex(0), name)
    })
    .unwrap();
    let mut work = Workspace::new(&mut cpu);
    let layout = spec.page_layout(dtype);
    let mut pool = vec![0; layout.page_bytes()];
    let mut pages = KvPages::new(layout, &mut pool);
    let rows = [StepRow {
        tokens: 9,
        prefix: 0,
        pages: &[PageId(0)],
    }];
    let input = BlockInput {
        rows: &rows,
        prompts: &[],
        adapters: &[],
        lengths: &[],
    };
    let mut hidden: Vec<f32> = (0..9 * spec.hidden)
        .map(|i| (0.61 * i as f32).sin())
        .map(|v| convert::round(dtype, v))
        .collect();
    let before = hidden.clone();
    forward(
        &mut cpu,
        spec,
        &blocks,
        &mut work,
        input,
        &mut hidden,
        &mut pages,
    )
    .unwrap();
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
            assert_eq!(
                got,
                outputs(&place, quant),
                "the prepared file is used again"
            );
        }
    }
}

#[test]
fn a_prepared_block_of_another_format_is_not_used() {
    let place = place(Some(DType::F32));
    write_model(
        place.folder(),
        &llama_config(1),
        &llama_tensors(1, DType::F32),
    );
    for quant in [QuantType::None, QuantType::Int8, QuantType::Nf4] {
        outputs(&place, quant);
    }
    assert_eq!(place.prepared_files().len(), 3);
    let first = |quant_type| {
        let config = PrepareConfig {
            quant_type,
            ..place.config.clone()
        };
        let mut inspected = Inspected::new(&config).unwrap();
        let manifest = inspected.make_ready(span(0, 1), |_| Ok(())).unwrap();
        let tensors = &manifest.blocks[&0];
        let (matrix, norm) = (
            &tensors["mlp.up_proj.weight"],
            &tensors["input_layernorm.weight"],
        );
        assert_eq!((matrix.quant, norm.quant), (quant_type, QuantType::None));
        matrix.len
    };
    assert_eq!(first(QuantType::None), 4 * 96 * 64);
    assert_eq!(first(QuantType::Int8), 96 * 64 + 384);
    assert_eq!(first(QuantType::Nf4), 96 * 32 + 128 + 64);
}

#[test]
fn tensors_in_the_block_dtype_are_mapped_from_the_checkpoint() {
    let place = place(Some(DType::F32));
    let tensors = llama_tensors(2, DType::F32);
    write_model(place.folder(), &llama_config(2), &tensors);
    let manifest = place.ready(span(0, 2)).unwrap();
    assert_eq!(manifest.files.len(), 1);
    assert_eq!(
        manifest.files[0].path,
        place
            .folder()
            .join("model.safetensors")
            .canonicalize()
            .unwrap()
    );
    let weights = MappedWeights::map(&manifest, span(1, 2), || ()).unwrap();
    let (_, _, data) = &tensors["model.layers.1.mlp.up_proj.weight"];
    assert_eq!(tensor(&weights, 1, "mlp.up_proj.weight"), data);
    assert!(
        weights
            .tensor(BlockIndex(0), "mlp.up_proj.weight")
            .is_none(),
        "block 0 is not in the span"
    );
}

#[test]
fn float32_is_rounded_to_the_nearest_bfloat16_with_ties_to_even() {
    let place = place(Some(DType::Bf16));
    let mut tensors = llama_tensors(1, DType::F32);
    // Exactly between two neighbours: down to even, up to even; just above the middle; subnormal; largest that fits.
    let cases = [
        (0x3f80_8000u32, 0x3f80u16),
        (0x3f81_8000, 0x3f82),
        (0x3f80_8001, 0x3f81),
        (0x0000_8001, 0x0001),
        (0xff7f_7fff, 0xff7f),
        (0x8000_0000, 0x8000),
    ];
    let norm = tensors
        .get_mut("model.layers.0.input_layernorm.weight")
        .unwrap();
    for (i, (bits, _)) in cases.iter().enumerate() {
        norm.2[4 * i..4 * i + 4].copy_from_slice(&bits.to_le_bytes());
    }
    write_model(place.folder(), &llama_config(1), &tensors);
    let weights = MappedWeights::map(&place.ready(span(0, 1)).unwrap(), span(0, 1), || ()).unwrap();
    let got = tensor(&weights, 0, "input_layernorm.weight");
    for (i, (bits, expected)) in cases.iter().enumerate() {
        assert_eq!(
            u16::from_le_bytes([got[2 * i], got[2 * i + 1]]),
            *expected,
            "{bits:#x}"
        );
    }
    let reference = &llama_tensors(1, DType::Bf16)["model.layers.0.mlp.down_proj.weight"].2;
    assert_eq!(tensor(&weights, 0, "mlp.down_proj.weight"), reference);
}

#[test]
fn prepared_files_are_valid_for_the_reference_crate_and_leave_no_temporary_file() {
    let place = place(None);
    write_model(
        place.folder(),
        &llama_config(2),
        &llama_tensors(2, DType::F32),
    );
    place.ready(span(0, 2)).unwrap();
    let files = place.prepared_files();
    assert_eq!(files.len(), 2);
    for file in files {
        let bytes = std::fs::read(file.path()).unwrap();
        let read = SafeTensors::deserialize(&bytes).unwrap();
        assert_eq!(read.len(), 9);
        assert_eq!(
            read.tensor("self_attn.k_proj.weight").unwrap().shape(),
            [32, 64]
        );
    }
}

#[test]
fn prepared_files_are_reused_until_the_checkpoint_changes() {
    let place = place(None);
    write_model(
        place.folder(),
        &llama_config(2),
        &llama_tensors(2, DType::F32),
    );
    let first = place.ready(span(0, 2)).unwrap();
    let mut tensors = 0;
    let again = Inspected::new(&place.config)
        .unwrap()
        .make_ready(span(0, 2), |p| {
            tensors += usize::from(p == Progress::Tensor);
            Ok(())
        })
        .unwrap();
    assert_eq!((tensors, &again), (0, &first), "nothing is converted twice");

    let mut changed = llama_tensors(2, DType::F32);
    changed.remove("model.layers.1.mlp.up_proj.weight");
    changed.insert(
        "model.layers.1.mlp.up_proj.weight".into(),
        (Dtype::F32, vec![96, 64], bytes(DType::F32, &[0.5; 96 * 64])),
    );
    write_model(place.folder(), &llama_config(2), &changed);
    let weights = MappedWeights::map(&place.ready(span(0, 2)).unwrap(), span(0, 2), || ()).unwrap();
    assert_eq!(
        tensor(&weights, 1, "mlp.up_proj.weight"),
        bytes(DType::Bf16, &[0.5; 96 * 64])
    );
}

#[test]
fn a_prepared_file_that_was_cut_short_is_made_again() {
    let place = place(None);
    write_model(
        place.folder(),
        &llama_config(1),
        &llama_tensors(1, DType::F32),
    );
    let first = place.ready(span(0, 1)).unwrap();
    let file = place.prepared_files().pop().unwrap().path();
    let whole = std::fs::read(&file).unwrap();
    for cut in [0, 7, 100, whole.len() / 2, whole.len() - 1] {
        std::fs::write(&file, &whole[..cut]).unwrap();
        let blocks = place.ready(span(0, 1)).unwrap().blocks;
        assert_eq!(
            (blocks, std::fs::read(&file).unwrap()),
            (first.blocks.clone(), whole.clone()),
            "cut at {cut}"
        );
    }
}

#[test]
fn a_sharded_checkpoint_opens_only_the_shards_of_the_span() {
    let place = place(Some(DType::F32));
    let tensors = llama_tensors(3, DType::F32);
    write_sharded(place.folder(), &llama_config(3), &tensors);
    std::fs::remove_file(place.folder().join("model-0.safetensors")).unwrap();
    let manifest = place.ready(span(1, 3)).unwrap();
    assert_eq!(manifest.files.len(), 2);
    let weights = MappedWeights::map(&manifest, span(1, 3), || ()).unwrap();
    assert_eq!(
        tensor(&weights, 2, "mlp.up_proj.weight"),
        tensors["model.layers.2.mlp.up_proj.weight"].2
    );
    let missing = place.ready(span(0, 1)).unwrap_err().to_string();
    assert!(
        missing.contains("model-0.safetensors") && missing.contains("missing"),
        "{missing}"
    );
}

#[test]
fn a_manifest_round_trips_and_a_changed_file_is_not_mapped() {
    let place = place(None);
    write_model(
        place.folder(),
        &llama_config(1),
        &llama_tensors(1, DType::Bf16),
    );
    let manifest = place.ready(span(0, 1)).unwrap();
    let path = place.folder().join("manifest.json");
    manifest.write(&path).unwrap();
    assert_eq!(Manifest::read(&path).unwrap(), manifest);

    let checkpoint = place.folder().join("model.safetensors");
    let mut bytes = std::fs::read(&checkpoint).unwrap();
    bytes.push(0);
    std::fs::write(&checkpoint, bytes).unwrap();
    let changed = MappedWeights::map(&manifest, span(0, 1), || ()).unwrap_err();
    assert!(
        matches!(&changed, MapError::Changed(p) if p.ends_with("model.safetensors")),
        "{changed}"
    );
    std::fs::remove_file(&checkpoint).unwrap();
    assert!(
        MappedWeights::map(&manifest, span(0, 1), || ())
            .unwrap_err()
            .to_string()
            .contains("model.safetensors")
    );
}

#[test]
fn a_manifest_that_lies_is_refused() {
    let place = place(Some(DType::F32));
    write_model(
        place.folder(),
        &llama_config(1),
        &llama_tensors(1, DType::F32),
    );
    let good = place.ready(span(0, 1)).unwrap();
    let lies: [fn(&mut crate::weights::manifest::TensorEntry); 5] = [
        |t| t.offset = u64::MAX - 3,
        |t| t.len *= 2,
        |t| t.file = 9,
        |t| t.shape = vec![u64::MAX, 64],
        |t| t.shape = vec![],
    ];
    for (i, lie) in lies.iter().enumerate() {
        let mut manifest = good.clone();
        lie(manifest
            .blocks
            .get_mut(&0)
            .unwrap()
            .get_mut("mlp.up_proj.weight")
            .unwrap());
        let error = MappedWeights::map(&manifest, span(0, 1), || ()).unwrap_err();
        assert!(
            matches!(error, MapError::BadTensor { .. }),
            "lie {i}: {error}"
        );
    }
    assert!(matches!(
        MappedWeights::map(&good, span(0, 2), || ()),
        Err(MapError::MissingBlock(BlockIndex(1)))
    ));
}

/// What is wrong with a folder, how to make it so, and words that the sentence must hold.
type BadFolder = (&'static str, fn(&Path), &'static [&'static str]);

fn change_config(folder: &Path, key: &str, value: Value) {
    let mut config = llama_config(2);
    config[key] = value;
    std::fs::write(folder.join("config.json"), config.to_string()).unwrap();
}

fn change_tensor(folder: &Path, change: impl FnOnce(&mut Tensors)) {
    let mut tensors = llama_tensors(2, DType::F32);
    change(&mut tensors);
    std::fs::write(folder.join("model.safetensors"), safetensors(&tensors)).unwrap();
}

const UP: &str = "model.layers.1.mlp.up_proj.weight";

fn set_value(folder: &Path, value: f32) {
    change_tensor(folder, |t| {
        t.get_mut(UP).unwrap().2[400..404].copy_from_slice(&value.to_le_bytes())
    });
}

fn replace_weights(folder: &Path, index: &str) {
    std::fs::remove_file(folder.join("model.safetensors")).unwrap();
    std::fs::write(folder.join("model.safetensors.index.json"), index).unwrap();
}

const BAD_FOLDERS: &[BadFolder] = &[
    (
        "no folder",
        |f| std::fs::remove_dir_all(f).unwrap(),
        &["tiny", "folder"],
    ),
    (
        "no config",
        |f| std::fs::remove_file(f.join("config.json")).unwrap(),
        &["config.json", "missing"],
    ),
    (
        "config is no JSON",
        |f| std::fs::write(f.join("config.json"), "{").unwrap(),
        &["config.json", "JSON"],
    ),
    (
        "huge config",
        |f| std::fs::write(f.join("config.json"), vec![b' '; 5 << 20]).unwrap(),
        &["config.json", "longer"],
    ),
    (
        "unknown model type",
        |f| change_config(f, "model_type", json!("gpt9")),
        &["config.json", "gpt9", "llama"],
    ),
    (
        "unknown dtype",
        |f| change_config(f, "torch_dtype", json!("int3")),
        &["int3", "float32"],
    ),
    (
        "no weights",
        |f| std::fs::remove_file(f.join("model.safetensors")).unwrap(),
        &["model.safetensors", "weights"],
    ),
    (
        "weights of another format than their name says",
        |f| std::fs::rename(f.join("model.safetensors"), f.join("pytorch_model.bin")).unwrap(),
        &["pytorch_model.bin", "no zip archive of torch"],
    ),
    (
        "empty weights",
        |f| std::fs::write(f.join("model.safetensors"), "").unwrap(),
        &["model.safetensors", "cut short"],
    ),
    (
        "huge header",
        |f| std::fs::write(f.join("model.safetensors"), u64::MAX.to_le_bytes()).unwrap(),
        &["model.safetensors", "header", "100000000"],
    ),
    (
        "header of garbage",
        |f| {
            std::fs::write(
                f.join("model.safetensors"),
                [&4u64.to_le_bytes()[..], b"ab{}"].concat(),
            )
            .unwrap()
        },
        &["model.safetensors", "header"],
    ),
    (
        "offsets in disorder",
        |f| {
            let json = br#"{"x":{"dtype":"F32","shape":[1],"data_offsets":[4,0]}}"#;
            std::fs::write(
                f.join("model.safetensors"),
                [&(json.len() as u64).to_le_bytes()[..], json].concat(),
            )
            .unwrap();
        },
        &["model.safetensors", "tensor x", "before"],
    ),
    (
        "missing tensor",
        |f| change_tensor(f, |t| drop(t.remove(UP))),
        &["model.safetensors", UP, "missing"],
    ),
    (
        "wrong shape",
        |f| change_tensor(f, |t| t.get_mut(UP).unwrap().1 = vec![64, 96]),
        &["model.safetensors", UP, "[64, 96]", "[96, 64]"],
    ),
    (
        "wrong type",
        |f| change_tensor(f, |t| t.get_mut(UP).unwrap().0 = Dtype::I32),
        &["model.safetensors", UP, "I32"],
    ),
    (
        "NaN",
        |f| set_value(f, f32::NAN),
        &["model.safetensors", UP, "NaN"],
    ),
    (
        "infinity",
        |f| set_value(f, f32::INFINITY),
        &["model.safetensors", UP, "infinite"],
    ),
    (
        "too large for bfloat16",
        |f| set_value(f, f32::MAX),
        &["model.safetensors", UP, "bfloat16"],
    ),
    (
        "index is no index",
        |f| replace_weights(f, "[]"),
        &["index.json"],
    ),
    (
        "index without the tensor",
        |f| replace_weights(f, r#"{"weight_map": {}}"#),
        &["index.json", "model.layers.0", "not listed"],
    ),
    (
        "index that points outside",
        |f| {
            let map: std::collections::BTreeMap<_, _> = llama_tensors(2, DType::F32)
                .into_keys()
                .map(|name| (name, "../other.safetensors"))
                .collect();
            replace_weights(f, &json!({ "weight_map": map }).to_string());
        },
        &[
            "index.json",
            "../other.safetensors",
            "no file of this folder",
        ],
    ),
];

#[test]
fn every_bad_folder_gets_a_sentence_that_names_what_is_wrong() {
    for (what, spoil, words) in BAD_FOLDERS {
        for dtype in [DType::Bf16, DType::F32] {
            if dtype == DType::F32 && *what == "too large for bfloat16" {
                continue;
            }
            let place = place(Some(dtype));
            write_model(
                place.folder(),
                &llama_config(2),
                &llama_tensors(2, DType::F32),
            );
            spoil(place.folder());
            let config = PrepareConfig {
                dtype: if *what == "unknown dtype" {
                    None
                } else {
                    Some(dtype)
                },
                ..place.config.clone()
            };
            let result =
                Inspected::new(&config).and_then(|mut i| i.make_ready(span(0, 2), |_| Ok(())));
            let error = result.expect_err(what);
            let text = error.to_string();
            assert!(
                words.iter().all(|w| text.contains(w)),
                "{what} ({dtype}): {text}"
            );
            assert_eq!(error.exit_reason(), ExitReason::BadConfig, "{what}");
            assert!(!text.contains('\n'), "{what}: one sentence");
        }
    }
}

#[test]
fn temporary_files_of_killed_processes_are_removed_when_they_are_old() {
    let place = place(None);
    write_model(
        place.folder(),
        &llama_config(1),
        &llama_tensors(1, DType::F32),
    );
    let folder = place.config.cache_dir.join("prepared/m-tiny");
    std::fs::create_dir_all(&folder).unwrap();
    let days = |n: u64| std::time::SystemTime::now() - Duration::from_secs(n * 24 * 3600);
    for (name, written) in [
        ("old.tmp", days(2)),
        ("new.tmp", days(0)),
        ("old.safetensors", days(2)),
    ] {
        let file = std::fs::File::create(folder.join(name)).unwrap();
        file.set_modified(written).unwrap();
    }
    place.ready(span(0, 1)).unwrap();
    let left: Vec<_> = place
        .prepared_files()
        .into_iter()
        .map(|f| f.file_name())
        .collect();
    assert_eq!(left.len(), 3, "{left:?}");
    assert!(!left.contains(&"old.tmp".into()), "{left:?}");
}

#[test]
fn a_span_outside_the_model_is_refused() {
    let place = place(None);
    write_model(
        place.folder(),
        &llama_config(2),
        &llama_tensors(2, DType::Bf16),
    );
    let text = place.ready(span(1, 3)).unwrap_err().to_string();
    assert!(text.contains("1:3") && text.contains("0:2"), "{text}");
}

#[test]
fn a_checkpoint_cut_short_anywhere_is_refused() {
    let place = place(Some(DType::F32));
    write_model(
        place.folder(),
        &llama_config(1),
        &llama_tensors(1, DType::F32),
    );
    let path = place.folder().join("model.safetensors");
    let whole = std::fs::read(&path).unwrap();
    let header = 8 + u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize;
    let lengths = (0..header)
        .step_by(13)
        .chain((header..whole.len()).step_by(997))
        .chain([whole.len() - 1]);
    for length in lengths {
        std::fs::write(&path, &whole[..length]).unwrap();
        let text = place.ready(span(0, 1)).unwrap_err().to_string();
        assert!(
            text.contains("model.safetensors") && text.contains("cut short"),
            "{length}: {text}"
        );
    }
}

#[test]
fn a_refusal_by_the_caller_stops_the_work_and_leaves_nothing_half_done() {
    let place = place(None);
    write_model(
        place.folder(),
        &llama_config(1),
        &llama_tensors(1, DType::F32),
    );
    let mut left = 3;
    let result = Inspected::new(&place.config)
        .unwrap()
        .make_ready(span(0, 1), |_| {
            left -= 1;
            if left == 0 {
                Err(PrepareError::Stopped)
            } else {
                Ok(())
            }
        });
    assert!(matches!(result, Err(PrepareError::Stopped)));
    assert!(place.prepared_files().is_empty());
}

#[test]
#[ignore = "the process that the other tests start"]
fn child() {
    as_child(Role::Prepare, run);
}

fn started(config: &PrepareConfig) -> (Seat, Spawned<ToPrepare, FromPrepare>) {
    let seat = Seat::of(Role::Prepare, Generation(1));
    let spawned = spawn(Role::Prepare, Generation(1), "prepare::tests::child");
    let init = ToPrepare::Init {
        config: config.clone(),
        board: seat.seat.clone(),
        devices: vec![Device::Cpu],
        worker: WorkerConfig {
            rates_dir: Some(config.cache_dir.clone()),
            ..WorkerConfig::default()
        },
    };
    spawned.down.send(init).unwrap();
    (seat, spawned)
}

#[test]
fn the_process_tells_facts_then_progress_then_that_the_manifest_is_there() {
    let place = place(None);
    write_model(
        place.folder(),
        &llama_config(3),
        &llama_tensors(3, DType::F32),
    );
    let (seat, mut prepare) = started(&place.config);
    let next = || {
        prepare
            .up
            .try_recv_timeout(DEADLINE)
            .expect("a message in time")
    };
    let FromPrepare::Inspected(facts) = next() else {
        panic!("facts come first")
    };
    let path = place.folder().join("manifest.json");
    prepare
        .down
        .send(ToPrepare::Span {
            span: span(1, 3),
            manifest: path.clone(),
        })
        .unwrap();
    for expected in 1..=2 {
        assert!(matches!(next(), FromPrepare::Progress { done, total: 2 } if done == expected));
    }
    assert!(matches!(next(), FromPrepare::Prepared));
    assert_eq!(wait(&mut prepare.process).code(), Some(0));
    let manifest = Manifest::read(&path).unwrap();
    assert_eq!(manifest.model, facts);
    assert_eq!(manifest.missing_block(span(1, 3)), None);
    assert_eq!(manifest.missing_block(span(0, 3)), Some(BlockIndex(0)));
    let progress = seat.board.view().child_snapshot(0).unwrap().progress;
    assert!(progress >= 2 * 9, "one per tensor, not {progress}");
}

#[test]
fn the_process_says_what_is_wrong_and_exits_with_the_reason() {
    let place = place(None);
    write_model(
        place.folder(),
        &llama_config(1),
        &llama_tensors(1, DType::F32),
    );
    change_config(place.folder(), "model_type", json!("gpt9"));
    let (_seat, mut prepare) = started(&place.config);
    match prepare.up.try_recv_timeout(DEADLINE).unwrap() {
        FromPrepare::Failed { reason, message } => {
            assert_eq!(reason, ExitReason::BadConfig);
            assert!(message.contains("gpt9"), "{message}");
        }
        other => panic!("{other:?} instead of Failed"),
    }
    assert_eq!(
        wait(&mut prepare.process).code(),
        Some(ExitReason::BadConfig.code().into())
    );
}

#[test]
fn a_drain_or_a_closed_channel_ends_the_process_before_a_span_is_chosen() {
    let place = place(None);
    write_model(
        place.folder(),
        &llama_config(1),
        &llama_tensors(1, DType::F32),
    );
    let (_seat, mut prepare) = started(&place.config);
    prepare.down.send(ToPrepare::Drain).unwrap();
    assert_eq!(wait(&mut prepare.process).code(), Some(0));
    let (
        _seat,
        Spawned {
            mut process, down, ..
        },
    ) = started(&place.config);
    drop(down);
    assert_eq!(
        wait(&mut process).code(),
        Some(ExitReason::ParentGone.code().into())
    );
}
