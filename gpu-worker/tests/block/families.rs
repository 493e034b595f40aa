//! Blocks of every family, stored in every way (`tests/golden/blocks`, made by
//! `generate_blocks.py`), against what transformers computed with them: forward, cached inference
//! and gradients. Quantized weights are quantized here, and by bitsandbytes there.

use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};

use blocks::{ActivationStore, SaveLevel};
use model::Qkv;
use safetensors::SafeTensors;
use serde_json::Value;

use crate::golden::checkpoint;
use crate::*;

/// Rows of the inputs.
const BATCH: usize = 2;

/// Blocks with their expected results.
struct Golden {
    name: String,
    spec: BlockSpec,
    dtype: DType,
    quant: QuantType,
    tensors: HashMap<String, Stored>,
    expected: HashMap<String, Vec<f32>>,
    batch: usize,
    tokens: usize,
}

fn golden() -> Vec<Golden> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/blocks");
    let mut paths: Vec<PathBuf> =
        fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    assert!(paths.len() >= 34, "golden data is missing");
    let all = [QuantType::None, QuantType::Int8, QuantType::Nf4];
    let cases = paths.iter().flat_map(|path| all.map(|quant| Golden::read(path, quant)));
    cases.collect()
}

/// Tensors of a file in float32, by their names after `prefix`.
fn floats(path: &Path, prefix: &str) -> HashMap<String, Vec<f32>> {
    let bytes = fs::read(path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let named = file.tensors().into_iter().filter_map(|(name, tensor)| {
        let name = name.strip_prefix(prefix)?.to_owned();
        Some((name, convert::to_vec(DType::F32, tensor.data())))
    });
    named.collect()
}

impl Golden {
    fn read(path: &Path, quant: QuantType) -> Golden {
        let config: Value =
            serde_json::from_slice(&fs::read(path.join("config.json")).unwrap()).unwrap();
        let spec = BlockSpec::from_config(&config).unwrap();
        let mut tensors = checkpoint(path);
        let mut expected = floats(&path.join("expected.safetensors"), "");
        if quant != QuantType::None {
            for tensor in (0..spec.num_blocks).flat_map(|block| spec.tensors(block)) {
                let stored = spec.quant_of(&tensor.name, tensor.shape.len(), quant);
                let kept = tensors.get_mut(&tensor.full_name).unwrap();
                *kept = kept.stored_as(stored);
            }
            let results =
                floats(&path.join("quantized.safetensors"), &format!("{}.", quant.name()));
            assert_eq!(results.len(), 6, "{}", path.display());
            expected.extend(results);
        }
        let tokens = expected["input"].len() / BATCH / spec.hidden;
        Golden {
            name: format!("{} {}", path.file_name().unwrap().to_string_lossy(), quant.name()),
            dtype: config["torch_dtype"].as_str().unwrap().parse().unwrap(),
            batch: BATCH,
            spec,
            quant,
            tensors,
            expected,
            tokens,
        }
    }

    /// What transformers in bfloat16 is itself off what it gets in float32, and more; float16 has
    /// three bits more. The mean of the scales of NF4 depends on the order of its sum, and with
    /// its last bit now and then an 8-bit scale is the next one.
    fn tolerance(&self) -> f32 {
        match (self.dtype, self.quant) {
            (DType::F32 | DType::F16, QuantType::Nf4) => 5e-3,
            (DType::F32, _) => 1e-5,
            (DType::F16, _) => 4e-3,
            _ => 3e-2,
        }
    }

    /// Tokens `range` of every row of `[batch, tokens, hidden]`, number `index` in the tensor
    /// `name`.
    fn part(&self, name: &str, index: usize, range: Range<usize>) -> Vec<f32> {
        let width = self.spec.hidden;
        let rows = (0..self.batch).map(|row| (index * self.batch + row) * self.tokens);
        rows.flat_map(|row| {
            self.expected[name][(row + range.start) * width..(row + range.end) * width].to_vec()
        })
        .collect()
    }

    fn assert_near(&self, got: &[f32], wanted: &[f32], what: &str) {
        assert_eq!(got.len(), wanted.len(), "{}: {what}", self.name);
        let difference: f32 = got.iter().zip(wanted).map(|(g, w)| (g - w).powi(2)).sum();
        let error = (difference / wanted.iter().map(|w| w.powi(2)).sum::<f32>()).sqrt();
        println!("{}: {what}: relative error {error:.1e}", self.name);
        assert!(error <= self.tolerance(), "{}: {what}: relative error {error}", self.name);
    }

    /// The output of every block when the tokens of each row come in steps up to `ends`, batched or
    /// row by row; the steps are jobs, or pieces of one.
    fn run(
        &self,
        threads: usize,
        batched: bool,
        is_one_job: bool,
        ends: &[usize],
    ) -> Vec<(Range<usize>, Vec<Vec<f32>>)> {
        let (tables, pages) = shuffled_tables(self.batch, self.tokens);
        let mut chain = Chain::new(&self.spec, self.dtype, &self.tensors, threads, pages);
        if is_one_job {
            chain.lengths = vec![self.tokens; self.batch];
        }
        let mut from = 0;
        let mut steps = Vec::new();
        for &to in ends {
            let row = |pages| StepRow::new(to - from, from, pages);
            let rows: Vec<_> = tables.iter().map(|pages| row(pages)).collect();
            let mut hidden = self.part("input", 0, from..to);
            let outputs = if batched {
                chain.run(&rows, &mut hidden)
            } else {
                let mut outputs = vec![Vec::new(); self.spec.num_blocks];
                let parts = hidden.chunks_mut((to - from) * self.spec.hidden);
                for (row, part) in rows.iter().zip(parts) {
                    let alone = chain.run(std::slice::from_ref(row), part);
                    outputs.iter_mut().zip(alone).for_each(|(all, one)| all.extend(one));
                }
                outputs
            };
            steps.push((from..to, outputs));
            from = to;
        }
        steps
    }
}

#[test]
fn forward_of_every_family_gives_what_transformers_gives() {
    for golden in golden() {
        for (range, outputs) in golden.run(2, true, true, &[golden.tokens]) {
            for (block, got) in outputs.iter().enumerate() {
                let wanted = golden.part("forward", block, range.clone());
                golden.assert_near(got, &wanted, &format!("block {block}"));
            }
        }
    }
}

#[test]
fn cached_inference_of_every_family_gives_what_transformers_gives() {
    for golden in golden() {
        let ends: Vec<usize> = (16..=golden.tokens).collect();
        for (range, outputs) in golden.run(2, true, false, &ends) {
            for (block, got) in outputs.iter().enumerate() {
                let wanted = golden.part("cached", block, range.clone());
                golden.assert_near(got, &wanted, &format!("block {block} tokens {range:?}"));
            }
        }
    }
}

#[test]
fn cuts_batches_and_threads_change_no_bit_of_any_family() {
    for golden in golden() {
        let last = |threads, batched, ends: &[usize]| {
            let mut tokens = vec![Vec::new(); golden.batch];
            for (range, outputs) in golden.run(threads, batched, true, ends) {
                let width = range.len() * golden.spec.hidden;
                let rows = outputs.last().unwrap().chunks(width);
                tokens.iter_mut().zip(rows).for_each(|(all, part)| all.extend(bits(part)));
            }
            tokens
        };
        let whole = last(1, true, &[golden.tokens]);
        for (threads, batched, ends) in [
            (1, false, &[21][..]),
            (2, true, &[4, 5, 6, 16, 17, 21]),
            (3, false, &[1, 2, 3, 19, 20, 21]),
            (4, true, &[20, 21]),
        ] {
            assert_eq!(last(threads, batched, ends), whole, "{} {ends:?}", golden.name);
        }
    }
}

/// Tokens of the deep prompts.
const PREFIX: usize = 3;

/// What backward gives.
struct Gradients {
    output: Vec<f32>,
    input: Vec<f32>,
    /// `[blocks, batch, prefix, hidden]`.
    prompts: Vec<f32>,
}

impl Golden {
    /// Forward and then backward through all blocks, each sequence taken back in pieces that begin
    /// at multiples of `cut`. Forward leaves what `level` says, and in the last block is made
    /// for keys and values alone; without a level it leaves nothing.
    fn gradients(
        &self,
        threads: usize,
        cut: usize,
        with_prompts: bool,
        level: Option<SaveLevel>,
    ) -> Gradients {
        let (width, batch, tokens) = (self.spec.hidden, self.batch, self.tokens);
        let (tables, pages) = shuffled_tables(batch, tokens);
        let mut chain = Chain::new(&self.spec, self.dtype, &self.tensors, threads, pages);
        chain.lengths = vec![tokens; batch];
        let rows = |from: usize, to: usize| -> Vec<StepRow<'_>> {
            let row = |pages| StepRow::new(to - from, from, pages);
            tables.iter().map(|pages| row(pages)).collect()
        };
        // Prompts of a block that fall on tokens `from..to` of every row.
        let prompts = |block: usize, from: usize, to: usize| -> Vec<PromptPart<'_>> {
            let rows = (0..batch).filter(|_| with_prompts && from < PREFIX);
            let part = |row: usize| {
                let at = (block * batch + row) * PREFIX;
                let range = (at + from) * width..(at + PREFIX.min(to)) * width;
                PromptPart {
                    offset: row * (to - from) * width,
                    values: &self.expected["prompts"][range],
                }
            };
            rows.map(part).collect()
        };
        let mut hidden = self.expected["input"].clone();
        let mut inputs = Vec::new();
        let store = |_| {
            ActivationStore::new(
                &mut Cpu::new(1),
                &self.spec,
                level.unwrap_or_default(),
                batch * tokens,
            )
        };
        let mut stores: Vec<ActivationStore<Cpu>> = (0..self.spec.num_blocks).map(store).collect();
        for (block, store) in stores.iter_mut().enumerate() {
            inputs.push(hidden.clone());
            let (rows, prompts) = (rows(0, tokens), prompts(block, 0, tokens));
            let turns = level.is_some() && block + 1 == self.spec.num_blocks;
            if turns {
                // What keys() does not leave must not be taken for left.
                let left = if matches!(self.spec.qkv, Qkv::Fused(_)) {
                    SaveLevel::Queries
                } else {
                    SaveLevel::Nothing
                };
                let left = left.min(level.unwrap_or_default());
                *store = ActivationStore::new(&mut chain.cpu, &self.spec, left, batch * tokens);
            }
            let saved = store.part(0..batch * tokens);
            chain.send(block, &rows, &prompts, &mut hidden, saved, turns);
        }
        let mut gradient = self.expected["output_gradient"].clone();
        let mut prompt_gradients = Vec::new();
        for block in (0..self.spec.num_blocks).rev() {
            let kv = batch * tokens * self.spec.kv_heads * self.spec.head_dim;
            let mut taken = Taken {
                keys: vec![0.0; kv],
                values: vec![0.0; kv],
                starts: (0..batch).map(|row| row * tokens).collect(),
                gradient: Vec::new(),
            };
            for from in (0..tokens).step_by(cut).rev() {
                let to = tokens.min(from + cut);
                let part = |values: &[f32]| -> Vec<f32> {
                    let rows = values.chunks(tokens * width);
                    rows.flat_map(|row| row[from * width..to * width].to_vec()).collect()
                };
                taken.gradient = part(&gradient);
                let (rows, prompts) = (rows(from, to), prompts(block, from, to));
                let parts = (0..batch).map(|row| {
                    let saved = stores[block].part(row * tokens + from..row * tokens + to);
                    [saved.queries, saved.between, saved.gate, saved.up]
                        .map(|part| part.map(|p| p.to_vec()))
                });
                let mut parts = parts
                    .reduce(|all, row| {
                        let mut row = row.into_iter();
                        all.map(|all| Some([all?, row.next()??].concat()))
                    })
                    .unwrap();
                let [queries, between, gate, up] = parts.each_mut().map(|part| part.as_deref_mut());
                let saved = SavedActivations { queries, between, gate, up };
                let x = part(&inputs[block]);
                chain.gradient(block, &rows, &prompts, &x, &mut taken, saved);
                for (row, values) in taken.gradient.chunks((to - from) * width).enumerate() {
                    let at = (row * tokens + from) * width;
                    gradient[at..at + values.len()].copy_from_slice(values);
                }
            }
            let first =
                gradient.chunks(tokens * width).flat_map(|row| row[..PREFIX * width].to_vec());
            prompt_gradients.splice(0..0, first);
        }
        Gradients { output: hidden, input: gradient, prompts: prompt_gradients }
    }
}

#[test]
fn gradients_of_every_family_are_those_of_autograd() {
    for golden in golden() {
        let plain = golden.gradients(2, golden.tokens, false, None);
        golden.assert_near(&plain.input, &golden.expected["input_gradient"], "gradient");
        let prompted = golden.gradients(2, golden.tokens, true, None);
        let wanted = |name: &str| &golden.expected[name];
        golden.assert_near(&prompted.output, wanted("prompted"), "output with prompts");
        golden.assert_near(
            &prompted.input,
            wanted("prompted_input_gradient"),
            "gradient with prompts",
        );
        golden.assert_near(&prompted.prompts, wanted("prompt_gradient"), "gradient of prompts");
    }
}

#[test]
fn gradients_have_the_same_bits_wherever_a_sequence_is_cut() {
    for golden in golden() {
        let whole = golden.gradients(1, golden.tokens, true, None);
        for (threads, cut) in [(2, 1), (3, 4), (1, 16), (4, 20)] {
            let cut_up = golden.gradients(threads, cut, true, None);
            assert_eq!(bits(&cut_up.input), bits(&whole.input), "{} by {cut}", golden.name);
            assert_eq!(bits(&cut_up.prompts), bits(&whole.prompts), "{} by {cut}", golden.name);
        }
    }
}

#[test]
fn what_forward_leaves_changes_no_bit_of_a_gradient() {
    for golden in golden() {
        let whole = golden.gradients(1, golden.tokens, true, None);
        for (level, cut) in [
            (SaveLevel::Nothing, 4),
            (SaveLevel::Queries, 16),
            (SaveLevel::Attention, 16),
            (SaveLevel::Middle, 20),
            (SaveLevel::Middle, golden.tokens),
        ] {
            let saved = golden.gradients(2, cut, true, Some(level));
            let what = format!("{} at {level:?}", golden.name);
            assert_eq!(bits(&saved.input), bits(&whole.input), "{what}");
            assert_eq!(bits(&saved.prompts), bits(&whole.prompts), "{what}");
        }
    }
}
