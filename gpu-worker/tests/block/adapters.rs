//! Adapters (`tests/golden/adapters`, made by `generate_adapters.py`) on the blocks of every family
//! against what PEFT computed with them, from the adapter's folder on: through prepare, the
//! manifest and the map.

use std::fs;
use std::path::{Path, PathBuf};

use blocks::map::MappedWeights;
use prepare::Inspected;
use safetensors::SafeTensors;
use shared::block::{BlockIndex, Span};
use shared::config::{PrepareConfig, QuantType};

use crate::*;

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden")
}

fn read(path: &Path) -> HashMap<String, Vec<f32>> {
    let bytes = fs::read(path.join("expected.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap().tensors().into_iter();
    tensors.map(|(name, t)| (name, convert::to_vec(DType::F32, t.data()))).collect()
}

/// A model of `tests/golden/blocks` with adapters, ready to run.
struct Loaded {
    spec: BlockSpec,
    dtype: DType,
    weights: MappedWeights,
    given: HashMap<String, Vec<f32>>,
    tokens: usize,
    _cache: tempfile::TempDir,
}

/// Sequences of the golden data.
const BATCH: usize = 2;

impl Loaded {
    fn new(base: &str, adapters: &[&str], quant_type: QuantType) -> Loaded {
        Loaded::served_as(None, base, adapters, quant_type)
    }

    /// Served in `dtype`, or in that of the golden data.
    fn served_as(
        dtype: Option<DType>,
        base: &str,
        adapters: &[&str],
        quant_type: QuantType,
    ) -> Loaded {
        let cache = tempfile::tempdir().unwrap();
        let model = golden().join("blocks").join(base);
        let path = |name: &&str| golden().join("adapters").join(name).to_str().unwrap().to_owned();
        let config = fs::read(model.join("config.json")).unwrap();
        let config: serde_json::Value = serde_json::from_slice(&config).unwrap();
        let prepare = PrepareConfig {
            model: model.to_str().unwrap().to_owned(),
            dtype: dtype.or(config["torch_dtype"].as_str().map(|name| name.parse().unwrap())),
            quant_type,
            is_quant_named: false,
            adapters: adapters.iter().map(path).collect(),
            hub: Default::default(),
            cache_dir: cache.path().to_owned(),
        };
        let mut inspected = Inspected::new(&prepare).unwrap();
        let span = Span::new(0, inspected.facts.num_blocks).unwrap();
        let manifest = inspected.make_ready(span, |_| Ok(())).unwrap();
        assert_eq!(manifest.model.adapters, prepare.adapters);
        let weights = MappedWeights::map(&manifest, span, || ()).unwrap();
        let given = read(&model);
        let tokens = given["input"].len() / (BATCH * inspected.spec.hidden);
        Loaded {
            spec: inspected.spec,
            dtype: manifest.model.dtype,
            weights,
            given,
            tokens,
            _cache: cache,
        }
    }

    /// Blocks for `rows` sequences.
    fn chain(&self, adapters: &[Option<u32>]) -> (Chain<'_>, Vec<Vec<PageId>>) {
        let mut cpu = Cpu::new(2);
        let block = |index: usize| {
            let index = BlockIndex(index as u32);
            let mut block = BlockWeights::new(&mut cpu, &self.spec, self.dtype, |name| {
                self.weights.tensor(index, name)
            })
            .unwrap();
            for adapter in 0..self.weights.adapter_count() {
                let find = |name: &str| self.weights.adapter(adapter, index, name);
                block.add_adapter(&mut cpu, &self.spec, find).unwrap();
            }
            block
        };
        let blocks = (0..self.spec.num_blocks).map(block).collect();
        let (tables, pages) = shuffled_tables(adapters.len(), self.tokens);
        let mut chain = Chain::of(&self.spec, self.dtype, blocks, cpu, pages);
        chain.adapters = adapters.to_vec();
        (chain, tables)
    }

    /// Tokens `range` of every sequence of `[rows, tokens, hidden]`.
    fn part(&self, values: &[f32], range: &std::ops::Range<usize>) -> Vec<f32> {
        let width = self.spec.hidden;
        let rows = values.chunks(self.tokens * width);
        rows.flat_map(|row| row[range.start * width..range.end * width].to_vec()).collect()
    }

    /// Output of every block `[blocks][rows, tokens, hidden]` for sequences `x` with an adapter
    /// each, in steps up to `ends`.
    fn run(&self, x: &[f32], adapters: &[Option<u32>], ends: &[usize]) -> Vec<Vec<f32>> {
        let (mut chain, tables) = self.chain(adapters);
        let width = self.spec.hidden;
        let mut outputs = vec![vec![0.0; x.len()]; self.spec.num_blocks];
        let mut from = 0;
        for &to in ends {
            let row = |pages| StepRow::new(to - from, from, pages);
            let rows: Vec<_> = tables.iter().map(|pages| row(pages)).collect();
            let mut hidden = self.part(x, &(from..to));
            for (all, step) in outputs.iter_mut().zip(chain.run(&rows, &mut hidden)) {
                for (row, part) in step.chunks((to - from) * width).enumerate() {
                    let at = (row * self.tokens + from) * width;
                    all[at..at + part.len()].copy_from_slice(part);
                }
            }
            from = to;
        }
        outputs
    }

    /// Gradient of the inputs `x` of sequences with an adapter each, taken back in pieces of `cut`
    /// tokens.
    fn gradient(
        &self,
        x: &[f32],
        gradient: &[f32],
        adapters: &[Option<u32>],
        cut: usize,
    ) -> Vec<f32> {
        let (mut chain, tables) = self.chain(adapters);
        chain.lengths = vec![self.tokens; adapters.len()];
        let (width, tokens) = (self.spec.hidden, self.tokens);
        let rows = |range: &std::ops::Range<usize>| -> Vec<StepRow<'_>> {
            let row = |pages| StepRow::new(range.len(), range.start, pages);
            tables.iter().map(|pages| row(pages)).collect()
        };
        let (mut hidden, mut inputs) = (x.to_vec(), Vec::new());
        for block in 0..self.spec.num_blocks {
            inputs.push(hidden.clone());
            chain.block(block, &rows(&(0..tokens)), &[], &mut hidden);
        }
        let mut gradient = gradient.to_vec();
        for block in (0..self.spec.num_blocks).rev() {
            let kv = adapters.len() * tokens * self.spec.kv_heads * self.spec.head_dim;
            let mut taken = Taken {
                keys: vec![0.0; kv],
                values: vec![0.0; kv],
                starts: (0..adapters.len()).map(|row| row * tokens).collect(),
                gradient: Vec::new(),
            };
            for from in (0..tokens).step_by(cut).rev() {
                let range = from..tokens.min(from + cut);
                taken.gradient = self.part(&gradient, &range);
                chain.gradient(
                    block,
                    &rows(&range),
                    &[],
                    &self.part(&inputs[block], &range),
                    &mut taken,
                    SavedActivations::default(),
                );
                for (row, values) in taken.gradient.chunks(range.len() * width).enumerate() {
                    let at = (row * tokens + from) * width;
                    gradient[at..at + values.len()].copy_from_slice(values);
                }
            }
        }
        gradient
    }

    fn assert_near(&self, got: &[f32], wanted: &[f32], what: &str) {
        assert_eq!(got.len(), wanted.len(), "{what}");
        let difference: f32 = got.iter().zip(wanted).map(|(g, w)| (g - w).powi(2)).sum();
        let error = (difference / wanted.iter().map(|w| w.powi(2)).sum::<f32>()).sqrt();
        println!("{what}: relative error {error:.1e}");
        let tolerance = if self.dtype == DType::F32 { 1e-5 } else { 3e-2 };
        assert!(error <= tolerance, "{what}: relative error {error}");
    }
}

#[test]
fn adapters_of_every_family_give_what_peft_gives() {
    let folders: Vec<_> =
        fs::read_dir(golden().join("adapters")).unwrap().map(|e| e.unwrap().path()).collect();
    assert!(folders.len() >= 14, "golden data is missing");
    for folder in folders {
        let name = folder.file_name().unwrap().to_str().unwrap();
        let loaded = Loaded::new(name.split('.').next().unwrap(), &[name], QuantType::None);
        let (expected, both) = (read(&folder), [Some(0); BATCH]);
        let (x, tokens) = (&loaded.given["input"], loaded.tokens);
        let steps: Vec<usize> = (16..=tokens).collect();
        for (ends, what) in [(&[tokens][..], "forward"), (&steps, "cached")] {
            let got = loaded.run(x, &both, ends).concat();
            loaded.assert_near(&got, &expected[what], &format!("{name} {what}"));
        }
        for cut in [tokens, 8] {
            let got = loaded.gradient(x, &loaded.given["output_gradient"], &both, cut);
            loaded.assert_near(
                &got,
                &expected["input_gradient"],
                &format!("{name} gradient by {cut}"),
            );
        }
    }
}

#[test]
fn rows_of_different_adapters_and_of_none_share_a_batch_and_change_no_bit_of_each_other() {
    for (base, names) in [
        ("llama", &["llama.all", "llama.regex", "llama.some"][..]),
        ("bloom", &["bloom.qkv", "bloom.dense"]),
        ("mixtral", &["mixtral.experts", "mixtral.all"]),
    ] {
        for quant in [QuantType::None, QuantType::Int8, QuantType::Nf4] {
            let loaded = Loaded::new(base, names, quant);
            let width = loaded.tokens * loaded.spec.hidden;
            let given =
                |name: &str, row: usize| &loaded.given[name][row % BATCH * width..][..width];
            // Every adapter and none, over both sequences, not in order.
            let adapters: Vec<_> = (0..2 * (names.len() as u32 + 1))
                .map(|row| (row % (names.len() as u32 + 1)).checked_sub(1))
                .collect();
            let all = |name: &str| {
                (0..adapters.len()).flat_map(|row| given(name, row).to_vec()).collect::<Vec<f32>>()
            };
            let (x, g) = (all("input"), all("output_gradient"));
            let ends = [7, 19, 20, loaded.tokens];
            let together = loaded.run(&x, &adapters, &ends);
            let back = loaded.gradient(&x, &g, &adapters, loaded.tokens);
            let plain = Loaded::new(base, &[], quant);
            for (row, adapter) in adapters.iter().enumerate() {
                let own = row * width..(row + 1) * width;
                // Without an adapter it is as if none were loaded.
                let (alone, index) =
                    if adapter.is_none() { (&plain, None) } else { (&loaded, *adapter) };
                let outputs = alone.run(given("input", row), &[index], &[loaded.tokens]);
                for (block, output) in outputs.iter().enumerate() {
                    assert_eq!(
                        bits(output),
                        bits(&together[block][own.clone()]),
                        "{base} {quant} row {row} block {block}"
                    );
                }
                let gradient = alone.gradient(
                    given("input", row),
                    given("output_gradient", row),
                    &[index],
                    loaded.tokens,
                );
                assert_eq!(bits(&gradient), bits(&back[own]), "{base} {quant} row {row}");
            }
        }
    }
}

/// What transformers computes in float32 of the same checkpoint, rounded to float16 on the way.
#[test]
fn every_family_is_served_in_float16_with_the_error_of_float16() {
    let folders = fs::read_dir(golden().join("blocks")).unwrap();
    for folder in folders.map(|e| e.unwrap().path()) {
        let name = folder.file_name().unwrap().to_str().unwrap();
        if name.ends_with("bf16") {
            continue;
        }
        let loaded = Loaded::served_as(Some(DType::F16), name, &[], QuantType::None);
        let rounded = |values: &Vec<f32>| -> Vec<f32> {
            values.iter().map(|v| convert::round(DType::F16, *v)).collect()
        };
        let (x, none) = (rounded(&loaded.given["input"]), [None; BATCH]);
        let steps: Vec<usize> = (16..=loaded.tokens).collect();
        let got = loaded.run(&x, &none, &steps).concat();
        loaded.assert_near(&got, &loaded.given["cached"], &format!("{name} cached"));
        let g = rounded(&loaded.given["output_gradient"]);
        let got = loaded.gradient(&x, &g, &none, 8);
        let wanted = &loaded.given["input_gradient"];
        loaded.assert_near(&got, wanted, &format!("{name} gradient"));
    }
    for (name, quant) in [("llama.all", QuantType::None), ("llama.all", QuantType::Nf4)] {
        let loaded = Loaded::served_as(Some(DType::F16), "llama", &[name], quant);
        let x = &loaded.given["input"];
        let x: Vec<f32> = x.iter().map(|v| convert::round(DType::F16, *v)).collect();
        let got = loaded.run(&x, &[Some(0); BATCH], &[loaded.tokens]).concat();
        assert!(got.iter().all(|v| v.is_finite()));
        if quant == QuantType::None {
            let wanted = &read(&golden().join("adapters").join(name))["forward"];
            loaded.assert_near(&got, wanted, name);
        }
    }
}
