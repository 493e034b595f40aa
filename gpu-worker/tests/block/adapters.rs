//! Adapters (`tests/golden/adapters`, made by `generate_adapters.py`) on the blocks of every family
//! against what PEFT computed with them, from the adapter's folder on: through prepare, the
//! manifest and the map.

use std::fs;

use blocks::SaveLevel;
use prepare::Inspected;
use shared::block::Span;
use shared::config::{PrepareConfig, QuantChoice, QuantType};
use testkit::configs::prepare_config;

use crate::training::Pass;
use crate::*;

/// A model of `tests/golden/blocks` with adapters, ready to run.
struct Loaded {
    spec: BlockSpec,
    dtype: DType,
    weights: MappedWeights,
    given: HashMap<String, Vec<f32>>,
    tokens: usize,
    _cache: tempfile::TempDir,
}

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
        let model = golden_folder("blocks").join(base);
        let path = |name: &&str| golden_folder("adapters").join(name).to_str().unwrap().to_owned();
        let config = config_of(&model);
        let prepare = PrepareConfig {
            dtype: dtype.or(config["torch_dtype"].as_str().map(|name| name.parse().unwrap())),
            quant_type: QuantChoice::Named(quant_type),
            adapters: adapters.iter().map(path).collect(),
            ..prepare_config(&model, &cache)
        };
        let mut inspected = Inspected::new(&prepare).unwrap();
        let span = Span::new(0, inspected.facts.num_blocks).unwrap();
        let manifest = inspected.make_ready(span, |_| Ok(())).unwrap();
        assert_eq!(manifest.model.adapters, prepare.adapters);
        let weights = MappedWeights::map(&manifest, span, || ()).unwrap();
        let given = expected(&model);
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
        let blocks = mapped_blocks(&mut cpu, &self.spec, self.dtype, &self.weights);
        let (tables, pages) = shuffled_tables(adapters.len(), self.tokens);
        let mut chain = Chain::of(&self.spec, self.dtype, blocks, cpu, pages);
        chain.adapters = adapters.to_vec();
        (chain, tables)
    }

    /// Output of every block `[blocks][rows, tokens, hidden]` for sequences `x` with an adapter
    /// each, in steps up to `ends`.
    fn run(&self, x: &[f32], adapters: &[Option<u32>], ends: &[usize]) -> Vec<Vec<f32>> {
        let (mut chain, tables) = self.chain(adapters);
        let width = self.spec.hidden;
        let mut outputs = vec![vec![0.0; x.len()]; self.spec.num_blocks];
        let mut from = 0;
        for &to in ends {
            let rows = rows_of(&tables, &(from..to));
            let mut hidden = cut_out(x, self.tokens * width, from * width..to * width);
            for (all, step) in outputs.iter_mut().zip(chain.run(&rows, &mut hidden)) {
                put(all, &step, self.tokens * width, from * width);
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
        let pass = Pass {
            tables: &tables,
            tokens: self.tokens,
            x,
            gradient,
            prompts: &|_, _| Vec::new(),
            cut,
            level: SaveLevel::Nothing,
            turns: false,
        };
        chain.there_and_back(&pass).input
    }

    fn assert_near(&self, got: &[f32], wanted: &[f32], what: &str) {
        let error = relative_error(got, wanted);
        println!("{what}: relative error {error:.1e}");
        let tolerance = if self.dtype == DType::F32 { 1e-5 } else { 3e-2 };
        assert!(error <= tolerance, "{what}: relative error {error}");
    }
}

#[test]
fn adapters_of_every_family_give_what_peft_gives() {
    let folders: Vec<_> =
        fs::read_dir(golden_folder("adapters")).unwrap().map(|e| e.unwrap().path()).collect();
    assert!(folders.len() >= 14, "golden data is missing");
    for folder in folders {
        let name = folder.file_name().unwrap().to_str().unwrap();
        let loaded = Loaded::new(name.split('.').next().unwrap(), &[name], QuantType::None);
        let (expected, both) = (expected(&folder), [Some(0); BATCH]);
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
    let folders = fs::read_dir(golden_folder("blocks")).unwrap();
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
            let wanted = &expected(&golden_folder("adapters").join(name))["forward"];
            loaded.assert_near(&got, wanted, name);
        }
    }
}
