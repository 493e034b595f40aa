//! Prepared models: those of the golden data, and some whose heads and columns are as wide as fast
//! paths want them.

use std::fs;

use ::model::manifest::Manifest;
use prepare::Inspected;
use serde_json::json;
use shared::block::Span;
use shared::config::{PrepareConfig, QuantChoice};
use testkit::configs::prepare_config;
use testkit::models::{Tensors, word, write_model};

use crate::training::PREFIX;
use crate::*;

/// Of the wide models.
const WIDE_TOKENS: usize = 21;

/// A prepared model and what goes through it.
pub(super) struct Model {
    pub(super) name: String,
    pub(super) spec: BlockSpec,
    pub(super) dtype: DType,
    pub(super) quant: QuantType,
    pub(super) manifest: Manifest,
    pub(super) span: Span,
    pub(super) given: HashMap<String, Vec<f32>>,
    pub(super) tokens: usize,
    folder: PathBuf,
    adapters: Vec<String>,
    _folders: (tempfile::TempDir, Option<tempfile::TempDir>),
}

/// Names of the folders in `folder` of the golden data.
pub(super) fn names(folder: &str, at_least: usize) -> Vec<String> {
    let folders = fs::read_dir(golden_folder(folder)).unwrap();
    let mut names: Vec<String> =
        folders.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    assert!(names.len() >= at_least, "golden data is missing");
    names
}

impl Model {
    /// Blocks of the golden data.
    pub(super) fn new(name: &str, adapters: &[&str], quant: QuantType) -> Model {
        let folder = golden_folder("blocks").join(name);
        Model::prepare(&folder, adapters, quant, None, expected(&folder), None)
    }

    /// Blocks like those of the golden data, of width 256 with four heads of 64 and so many columns
    /// that three ranks cut them at multiples of 64.
    pub(super) fn wide(name: &str, dtype: DType, quant: QuantType) -> Model {
        let made = tempfile::tempdir().unwrap();
        let folder = made.path().join(format!("wide-{name}"));
        let mut config = config_of(&golden_folder("blocks").join(name));
        for (field, value) in [
            ("hidden_size", 256),
            ("n_head", 4),
            ("num_attention_heads", 4),
            ("intermediate_size", 512),
        ] {
            if let Some(known) = config.get_mut(field) {
                *known = json!(value);
            }
        }
        config["torch_dtype"] = json!(if dtype == DType::Bf16 { "bfloat16" } else { "float32" });
        let spec = BlockSpec::from_config(&config).unwrap();
        write_model(&folder, &config, &checkpoint(&spec, dtype));
        let values = |seed, len: usize| -> Vec<f32> {
            noise(seed, len).into_iter().map(|v| convert::round(dtype, v)).collect()
        };
        let states = BATCH * WIDE_TOKENS * spec.hidden;
        let given = HashMap::from([
            ("input".to_owned(), values(1, states)),
            ("output_gradient".to_owned(), values(2, states)),
            ("prompts".to_owned(), values(3, spec.num_blocks * BATCH * PREFIX * spec.hidden)),
        ]);
        Model::prepare(&folder, &[], quant, None, given, Some(made))
    }

    fn prepare(
        folder: &Path,
        adapters: &[&str],
        quant: QuantType,
        dtype: Option<DType>,
        given: HashMap<String, Vec<f32>>,
        made: Option<tempfile::TempDir>,
    ) -> Model {
        let cache = tempfile::tempdir().unwrap();
        let path = |name: &&str| golden_folder("adapters").join(name).to_str().unwrap().to_owned();
        let mut inspected = Inspected::new(&PrepareConfig {
            dtype: dtype.or(config_of(folder)["torch_dtype"].as_str().map(|d| d.parse().unwrap())),
            quant_type: QuantChoice::Named(quant),
            adapters: adapters.iter().map(path).collect(),
            ..prepare_config(folder, &cache)
        })
        .unwrap();
        let span = Span::new(0, inspected.facts.num_blocks).unwrap();
        let manifest = inspected.make_ready(span, |_| Ok(())).unwrap();
        let name = folder.file_name().unwrap().to_str().unwrap();
        Model {
            name: format!("{name} {} {adapters:?}", quant.name()),
            dtype: manifest.model.dtype,
            quant,
            manifest,
            span,
            tokens: given["input"].len() / (BATCH * inspected.spec.hidden),
            given,
            spec: inspected.spec,
            folder: folder.to_owned(),
            adapters: adapters.iter().map(|&name| name.to_owned()).collect(),
            _folders: (cache, made),
        }
    }

    /// The first row goes through the adapter, if there is one.
    pub(super) fn adapters_of_rows(&self) -> Vec<Option<u32>> {
        let is_adapted = !self.manifest.adapters.is_empty();
        vec![is_adapted.then_some(0), None]
    }

    /// The same checkpoint in float32.
    pub(super) fn in_f32(&self) -> Model {
        let adapters: Vec<&str> = self.adapters.iter().map(String::as_str).collect();
        let (folder, given) = (&self.folder, self.given.clone());
        Model::prepare(folder, &adapters, self.quant, Some(DType::F32), given, None)
    }
}

fn noise(seed: u32, len: usize) -> Vec<f32> {
    let value = |i: u32| {
        let hash = (i ^ seed << 24).wrapping_mul(0x9e37_79b9).rotate_left(15);
        (hash.wrapping_mul(0x85eb_ca6b) >> 8) as f32 / 8_388_608.0 - 1.0
    };
    (0..len as u32).map(value).collect()
}

/// All tensors of blocks of `spec`: matrices that keep sizes, scales of norms near one.
fn checkpoint(spec: &BlockSpec, dtype: DType) -> Tensors {
    let tensors = (0..spec.num_blocks).flat_map(|block| spec.tensors(block)).zip(10..);
    tensors
        .map(|(tensor, seed)| {
            let mut values = noise(seed, tensor.shape.iter().product());
            match tensor.shape[..] {
                [_, inputs] => values.iter_mut().for_each(|v| *v *= (3.0 / inputs as f32).sqrt()),
                _ => values.iter_mut().for_each(|v| *v = 1.0 + 0.1 * *v),
            }
            let mut bytes = vec![0; values.len() * dtype.size_bytes()];
            convert::from_f32(dtype, &values, &mut bytes);
            (tensor.full_name, (word(dtype), tensor.shape, bytes))
        })
        .collect()
}
