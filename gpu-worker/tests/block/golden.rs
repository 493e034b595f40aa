//! Every checkpoint of `tests/golden` against what transformers computed with it.

use std::fs;

use kernels::Backend;
use kernels::ops::{Linear, Rmsnorm};
use model::Position;
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;

use crate::*;

/// A checkpoint with its expected results.
struct Golden {
    name: String,
    spec: BlockSpec,
    dtype: DType,
    tensors: HashMap<String, Stored>,
    frequencies: Vec<f32>,
    forward: Vec<f32>,
    cached: Vec<f32>,
    prompt: Vec<i64>,
    greedy: Vec<i64>,
    batch: usize,
}

fn golden() -> Vec<Golden> {
    let folders = fs::read_dir(golden_folder("")).unwrap();
    let mut paths: Vec<PathBuf> = folders.map(|entry| entry.unwrap().path()).collect();
    paths.retain(|path| path.join("expected.safetensors").exists());
    paths.sort();
    assert!(paths.len() >= 7, "golden data is missing");
    paths.iter().map(|path| Golden::read(path)).collect()
}

impl Golden {
    fn read(path: &Path) -> Golden {
        let config = config_of(path);
        let bytes = fs::read(path.join("expected.safetensors")).unwrap();
        let expected = SafeTensors::deserialize(&bytes).unwrap();
        let floats =
            |name: &str| convert::to_vec(DType::F32, expected.tensor(name).unwrap().data());
        let tokens = |name: &str| {
            let (words, rest) = expected.tensor(name).unwrap().data().as_chunks::<8>();
            assert!(rest.is_empty());
            words.iter().map(|word| i64::from_le_bytes(*word)).collect::<Vec<_>>()
        };
        Golden {
            name: path.file_name().unwrap().to_string_lossy().into_owned(),
            spec: BlockSpec::from_config(&config).unwrap(),
            dtype: config["torch_dtype"].as_str().unwrap().parse().unwrap(),
            tensors: checkpoint(path),
            frequencies: floats("inverse_frequencies"),
            forward: floats("forward"),
            cached: floats("cached"),
            prompt: tokens("prompt_tokens"),
            greedy: tokens("greedy_tokens"),
            batch: expected.tensor("prompt_tokens").unwrap().shape()[0],
        }
    }

    fn tolerance(&self) -> f32 {
        if self.dtype == DType::F32 { 1e-5 } else { 1e-2 }
    }

    /// Tokens of the prompt, and all tokens that went through the blocks.
    fn lengths(&self) -> (usize, usize) {
        let prompt = self.prompt.len() / self.batch;
        (prompt, prompt + self.greedy.len() / self.batch - 1)
    }

    /// Token `at` of a row: of the prompt, or a greedy one.
    fn token(&self, row: usize, at: usize) -> i64 {
        let (prompt, total) = self.lengths();
        if at < prompt {
            self.prompt[row * prompt + at]
        } else {
            self.greedy[row * (total + 1 - prompt) + at - prompt]
        }
    }

    /// Embeddings of tokens `range` of every row.
    fn embed(&self, range: Range<usize>) -> Vec<f32> {
        let table = self.tensors["model.embed_tokens.weight"].view();
        let mut hidden = vec![0.0; self.batch * range.len() * self.spec.hidden];
        let tokens =
            (0..self.batch).flat_map(|row| range.clone().map(move |at| self.token(row, at)));
        for (token, out) in tokens.zip(hidden.chunks_mut(self.spec.hidden)) {
            assert!(table.row_to_f32(token as usize, out));
        }
        hidden
    }

    /// The most likely next token after each row of `hidden`.
    fn greedy_tokens(&self, cpu: &mut Cpu, hidden: &[f32]) -> Vec<i64> {
        let (width, eps) = (self.spec.hidden, self.spec.norm.eps());
        let rows = hidden.len() / width;
        let norm = &self.tensors["model.norm.weight"];
        let weight = convert::to_vec(norm.dtype, &norm.bytes);
        let mut normed = vec![0.0; hidden.len()];
        let args = Rmsnorm {
            x: hidden,
            weight: &weight,
            out: &mut normed[..],
            rows,
            width,
            eps,
            round: self.dtype,
        };
        cpu.rmsnorm(args).unwrap();
        let head = self.tensors["lm_head.weight"].view();
        let mut logits = vec![0.0; rows * head.outputs()];
        cpu.linear(Linear { x: &normed[..], weight: head, bias: None, out: &mut logits[..], rows })
            .unwrap();
        let best = |logits: &[f32]| {
            (0..logits.len()).max_by(|&a, &b| logits[a].total_cmp(&logits[b])).unwrap() as i64
        };
        logits.chunks(head.outputs()).map(best).collect()
    }

    /// Relative error (2-norm of the difference over 2-norm) of tokens `range` of all rows after
    /// block `block`. The bfloat16 results of transformers are themselves 5e-3 off those that
    /// it gets in float32.
    fn error(&self, expected: &[f32], block: usize, range: Range<usize>, got: &[f32]) -> f32 {
        let (width, (_, total)) = (self.spec.hidden, self.lengths());
        let tokens = (0..self.batch)
            .flat_map(|row| range.clone().map(move |at| (block * self.batch + row) * total + at));
        let wanted: Vec<f32> = tokens
            .flat_map(|token| expected[token * width..(token + 1) * width].to_vec())
            .collect();
        relative_error(got, &wanted)
    }
}

/// All tensors of a checkpoint, of one file or of those that its index names.
pub(crate) fn checkpoint(path: &Path) -> HashMap<String, Stored> {
    let index = path.join("model.safetensors.index.json");
    let files: Vec<String> = match fs::read(index) {
        Ok(json) => {
            let index: Value = serde_json::from_slice(&json).unwrap();
            let mut files: Vec<String> = index["weight_map"]
                .as_object()
                .unwrap()
                .values()
                .map(|v| v.as_str().unwrap().to_owned())
                .collect();
            files.sort();
            files.dedup();
            assert!(files.len() > 1);
            files
        }
        Err(_) => vec!["model.safetensors".to_owned()],
    };
    let mut tensors = HashMap::new();
    for file in files {
        let bytes = fs::read(path.join(file)).unwrap();
        for (name, tensor) in SafeTensors::deserialize(&bytes).unwrap().tensors() {
            let dtype = match tensor.dtype() {
                Dtype::F32 => DType::F32,
                Dtype::BF16 => DType::Bf16,
                Dtype::F16 => DType::F16,
                other => panic!("{name} is {other:?}"),
            };
            let inputs = *tensor.shape().last().unwrap();
            let outputs = tensor.shape().iter().product::<usize>() / inputs;
            tensors.insert(
                name,
                Stored {
                    dtype,
                    quant: QuantType::None,
                    outputs,
                    inputs,
                    bytes: tensor.data().to_vec(),
                },
            );
        }
    }
    tensors
}

#[test]
fn frequencies_are_those_of_transformers() {
    for golden in golden() {
        let Position::Rope { inverse_frequencies, .. } = &golden.spec.position else {
            panic!("{} has no frequencies", golden.name);
        };
        assert_eq!(inverse_frequencies.len(), golden.frequencies.len());
        for (got, wanted) in inverse_frequencies.iter().zip(&golden.frequencies) {
            assert!(
                (got - wanted).abs() <= 2e-7 * wanted,
                "{}: {got} is not {wanted}",
                golden.name
            );
        }
    }
}

#[test]
fn a_pass_without_cache_gives_what_transformers_gives() {
    for golden in golden() {
        let total = golden.lengths().1;
        let (tables, pages) = shuffled_tables(golden.batch, total);
        let mut chain = Chain::new(&golden.spec, golden.dtype, &golden.tensors, 2, pages);
        let rows = rows_of(&tables, &(0..total));
        let mut hidden = golden.embed(0..total);
        for (block, got) in chain.run(&rows, &mut hidden).iter().enumerate() {
            let error = golden.error(&golden.forward, block, 0..total, got);
            println!("{}: block {block}, relative error {error:.1e}", golden.name);
            assert!(error <= golden.tolerance(), "{} block {block}: {error}", golden.name);
        }
    }
}

#[test]
fn greedy_decoding_over_pages_gives_the_tokens_and_states_of_transformers() {
    for golden in golden() {
        let (prompt, total) = golden.lengths();
        let (tables, pages) = shuffled_tables(golden.batch, total);
        let mut chain = Chain::new(&golden.spec, golden.dtype, &golden.tensors, 2, pages);
        let mut from = 0;
        while from < total {
            let to = if from == 0 { prompt } else { from + 1 };
            let rows = rows_of(&tables, &(from..to));
            let mut hidden = golden.embed(from..to);
            for (block, got) in chain.run(&rows, &mut hidden).iter().enumerate() {
                let error = golden.error(&golden.cached, block, from..to, got);
                assert!(
                    error <= golden.tolerance(),
                    "{} block {block} tokens {from}..{to}: {error}",
                    golden.name
                );
            }
            let width = golden.spec.hidden;
            let row = (to - from) * width;
            let last = cut_out(&hidden, row, row - width..row);
            let wanted: Vec<i64> = (0..golden.batch).map(|row| golden.token(row, to)).collect();
            assert_eq!(
                golden.greedy_tokens(&mut chain.cpu, &last),
                wanted,
                "{} token {to}",
                golden.name
            );
            from = to;
        }
    }
}

#[test]
fn any_cut_batch_and_thread_count_gives_the_same_bits() {
    for golden in golden() {
        let total = golden.lengths().1;
        let (tables, pages) = shuffled_tables(golden.batch, total);
        let outputs = |threads: usize, batched: bool, cut: usize| {
            let mut chain = Chain::new(&golden.spec, golden.dtype, &golden.tensors, threads, pages);
            let width = golden.spec.hidden;
            let mut output = vec![f32::NAN; golden.batch * total * width];
            for from in (0..total).step_by(cut) {
                let to = total.min(from + cut);
                let rows = rows_of(&tables, &(from..to));
                let mut hidden = golden.embed(from..to);
                let per_row = (to - from) * width;
                match batched {
                    true => drop(chain.run(&rows, &mut hidden)),
                    false => {
                        rows.iter().zip(hidden.chunks_mut(per_row)).for_each(|(row, hidden)| {
                            chain.run(std::slice::from_ref(row), hidden);
                        })
                    }
                }
                put(&mut output, &hidden, total * width, from * width);
            }
            bits(&output)
        };
        let whole = outputs(1, true, total);
        for (threads, batched, cut) in
            [(1, false, 1), (2, true, 1), (3, true, 5), (2, false, 16), (4, true, 17)]
        {
            assert_eq!(
                outputs(threads, batched, cut),
                whole,
                "{}: {threads} {batched} {cut}",
                golden.name
            );
        }
    }
}
