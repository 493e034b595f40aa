//! Blocks of every family, stored in every way (`tests/golden/blocks`, made by
//! `generate_blocks.py`), against what transformers computed with them: forward, cached inference
//! and gradients. Quantized weights are quantized here, and by bitsandbytes there.

use std::fs;

use blocks::SaveLevel;

use crate::golden::checkpoint;
use crate::training::{Gradients, Pass, prompts_on};
use crate::*;

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
    let folders = fs::read_dir(golden_folder("blocks")).unwrap();
    let mut paths: Vec<PathBuf> = folders.map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    assert!(paths.len() >= 34, "golden data is missing");
    let all = [QuantType::None, QuantType::Int8, QuantType::Nf4];
    let cases = paths.iter().flat_map(|path| all.map(|quant| Golden::read(path, quant)));
    cases.collect()
}

impl Golden {
    fn read(path: &Path, quant: QuantType) -> Golden {
        let config = config_of(path);
        let spec = BlockSpec::from_config(&config).unwrap();
        let mut tensors = checkpoint(path);
        let mut expected = expected(path);
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
        let error = relative_error(got, wanted);
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
            let rows = rows_of(&tables, &(from..to));
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
        let (tables, pages) = shuffled_tables(self.batch, self.tokens);
        let mut chain = Chain::new(&self.spec, self.dtype, &self.tensors, threads, pages);
        let prompts = |block: usize, tokens: &Range<usize>| -> Vec<PromptPart<'_>> {
            let rows = if with_prompts { 0..self.batch } else { 0..0 };
            prompts_on(&self.expected["prompts"], self.spec.hidden, block, rows, tokens)
        };
        chain.there_and_back(&Pass {
            tables: &tables,
            tokens: self.tokens,
            x: &self.expected["input"],
            gradient: &self.expected["output_gradient"],
            prompts: &prompts,
            cut,
            level: level.unwrap_or_default(),
            turns: level.is_some(),
        })
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
