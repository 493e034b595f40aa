//! The block against numbers computed elsewhere: transformers (golden data of `tests/golden`, made
//! by its `generate.py`) and Petals' own block classes (formulas).

mod adapters;
mod families;
mod golden;
mod petals;
mod shards;
mod training;

use std::collections::HashMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

use blocks::kv::page_layout;
use blocks::kv::{KvPool, KvShape};
use blocks::map::MappedWeights;
use blocks::{
    BlockWeights, GradientWork, PromptPart, SavedActivations, Sums, Workspace, add_prompts,
    backward, forward_saving, keys,
};
use kernels::ops::convert;
use kernels::quant::{int8, nf4};
use kernels::{Backend, Cpu, DType, KvPages, QuantType, StepRow, WeightView};
use model::BlockSpec;
use safetensors::SafeTensors;
use shared::block::BlockIndex;
use shared::ids::PageId;
use training::Taken;

/// Sequences of the golden data.
const BATCH: usize = 2;

/// A folder of the golden data.
fn golden_folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden").join(name)
}

/// Tensors of a file in float32, by their names after `prefix`.
fn floats(path: &Path, prefix: &str) -> HashMap<String, Vec<f32>> {
    let bytes = std::fs::read(path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let named = file.tensors().into_iter().filter_map(|(name, tensor)| {
        let name = name.strip_prefix(prefix)?.to_owned();
        Some((name, convert::to_vec(DType::F32, tensor.data())))
    });
    named.collect()
}

/// What is expected of the golden data in a folder.
fn expected(folder: &Path) -> HashMap<String, Vec<f32>> {
    floats(&folder.join("expected.safetensors"), "")
}

fn config_of(folder: &Path) -> serde_json::Value {
    serde_json::from_slice(&std::fs::read(folder.join("config.json")).unwrap()).unwrap()
}

/// The 2-norm of the difference over that of `wanted`.
fn relative_error(got: &[f32], wanted: &[f32]) -> f32 {
    assert_eq!(got.len(), wanted.len());
    let difference: f32 = got.iter().zip(wanted).map(|(g, w)| (g - w).powi(2)).sum();
    (difference / wanted.iter().map(|w| w.powi(2)).sum::<f32>()).sqrt()
}

/// `tokens` of the rows of these page tables.
fn rows_of<'t>(tables: &'t [Vec<PageId>], tokens: &Range<usize>) -> Vec<StepRow<'t>> {
    let row = |pages| StepRow::new(tokens.len(), tokens.start, pages);
    tables.iter().map(|pages| row(pages)).collect()
}

/// Values `part` of every row of `width` values.
fn cut_out(all: &[f32], width: usize, part: Range<usize>) -> Vec<f32> {
    all.chunks(width).flat_map(|row| row[part.clone()].to_vec()).collect()
}

/// Puts `part` `[rows, ..]` into rows of `width` values, `start` values behind where they begin.
fn put(all: &mut [f32], part: &[f32], width: usize, start: usize) {
    let len = part.len() / (all.len() / width);
    for (row, part) in all.chunks_mut(width).zip(part.chunks(len)) {
        row[start..start + len].copy_from_slice(part);
    }
}

/// All blocks of mapped weights, with their adapters.
fn mapped_blocks<'w, B: Backend>(
    backend: &mut B,
    spec: &BlockSpec,
    dtype: DType,
    weights: &'w MappedWeights,
) -> Vec<BlockWeights<'w, B>> {
    let block = |index: usize| {
        let index = BlockIndex(index as u32);
        let tensor = |name: &str| weights.tensor(index, name);
        let mut block = BlockWeights::new(backend, spec, dtype, tensor).unwrap();
        for adapter in 0..weights.adapter_count() {
            let find = |name: &str| weights.adapter(adapter, index, name);
            block.add_adapter(backend, spec, find).unwrap();
        }
        block
    };
    (0..spec.num_blocks).map(block).collect()
}

/// A tensor in memory, a vector as a matrix of one row.
#[derive(Clone)]
struct Stored {
    dtype: DType,
    quant: QuantType,
    outputs: usize,
    inputs: usize,
    bytes: Vec<u8>,
}

impl Stored {
    fn view(&self) -> WeightView<'_> {
        WeightView::quantized(self.quant, self.dtype, self.outputs, self.inputs, &self.bytes)
            .unwrap()
    }

    /// The same matrix as prepare would store it.
    fn stored_as(&self, quant: QuantType) -> Stored {
        let values = convert::to_vec(self.dtype, &self.bytes);
        let bytes = match quant {
            QuantType::None => self.bytes.clone(),
            QuantType::Int8 => int8::encode(&values, self.inputs),
            QuantType::Nf4 => nf4::encode(&values),
        };
        Stored { quant, bytes, ..*self }
    }
}

/// Several blocks over one pool of pages that starts as NaN everywhere.
struct Chain<'w> {
    cpu: Cpu,
    spec: BlockSpec,
    dtype: DType,
    blocks: Vec<BlockWeights<'w, Cpu>>,
    work: Workspace<Cpu>,
    gradients: GradientWork<Cpu>,
    pool: Vec<u8>,
    shape: KvShape,
    /// Adapters of the rows; empty for none.
    adapters: Vec<Option<u32>>,
    /// Positions of the rows in the end; empty when each step is a job of its own.
    lengths: Vec<usize>,
}

impl<'w> Chain<'w> {
    fn new(
        spec: &BlockSpec,
        dtype: DType,
        tensors: &'w HashMap<String, Stored>,
        threads: usize,
        pages: usize,
    ) -> Chain<'w> {
        let mut cpu = Cpu::new(threads);
        let blocks = (0..spec.num_blocks)
            .map(|index| {
                let find = |name: &str| {
                    let full = spec.tensors(index).into_iter().find(|t| t.name == name)?.full_name;
                    tensors.get(&full).map(Stored::view)
                };
                BlockWeights::new(&mut cpu, spec, dtype, find).unwrap()
            })
            .collect();
        Chain::of(spec, dtype, blocks, cpu, pages)
    }

    fn of(
        spec: &BlockSpec,
        dtype: DType,
        blocks: Vec<BlockWeights<'w, Cpu>>,
        mut cpu: Cpu,
        pages: usize,
    ) -> Chain<'w> {
        let shape = KvShape { layout: page_layout(spec, dtype), blocks: spec.num_blocks, pages };
        let work = Workspace::new(&mut cpu);
        let gradients = GradientWork::new(&mut cpu);
        Chain {
            cpu,
            spec: spec.clone(),
            dtype,
            blocks,
            work,
            gradients,
            pool: vec![0xff; shape.segment_bytes()],
            shape,
            adapters: Vec::new(),
            lengths: Vec::new(),
        }
    }

    /// The rows with their adapters and the lengths of their jobs.
    fn jobs<'r>(&self, rows: &[StepRow<'r>]) -> Vec<StepRow<'r>> {
        let job = |(index, row): (usize, &StepRow<'r>)| StepRow {
            adapter: self.adapters.get(index).copied().flatten(),
            length: self.lengths.get(index).copied().unwrap_or(row.length),
            ..*row
        };
        rows.iter().enumerate().map(job).collect()
    }

    /// Runs block `index` over `hidden`.
    fn block(
        &mut self,
        index: usize,
        rows: &[StepRow<'_>],
        prompts: &[PromptPart<'_>],
        hidden: &mut [f32],
    ) {
        self.send(index, rows, prompts, hidden, SavedActivations::default(), false);
        assert!(self.is_served(hidden));
    }

    /// Whether all these values are finite and of the type that is served.
    fn is_served(&self, hidden: &[f32]) -> bool {
        hidden.iter().all(|&v| v == convert::round(self.dtype, v) && v.is_finite())
    }

    /// Sends `hidden` through block `index`, or as far as its keys and values, leaving what is to
    /// be `saved`.
    fn send(
        &mut self,
        index: usize,
        rows: &[StepRow<'_>],
        prompts: &[PromptPart<'_>],
        hidden: &mut [f32],
        saved: SavedActivations<'_, [f32]>,
        keys_only: bool,
    ) {
        let rows = &self.jobs(rows);
        let mut pool = KvPool::new(self.shape, &mut self.pool).unwrap();
        let mut pages: KvPages<'_> = pool.block(index).unwrap();
        let (cpu, spec, weights) = (&mut self.cpu, &self.spec, &self.blocks[index]);
        let work = &mut self.work;
        add_prompts(cpu, prompts, hidden, self.dtype).unwrap();
        let done = if keys_only {
            keys(cpu, spec, weights, work, rows, hidden, &mut pages, saved)
        } else {
            forward_saving(cpu, spec, weights, work, rows, hidden, &mut pages, saved)
        };
        done.unwrap();
    }

    /// Gradient of the input of block `index`, for tokens whose rows end at the end of their
    /// sequences or before what was taken already.
    fn gradient(
        &mut self,
        index: usize,
        rows: &[StepRow<'_>],
        prompts: &[PromptPart<'_>],
        x: &[f32],
        taken: &mut Taken,
        saved: SavedActivations<'_, [f32]>,
    ) {
        let rows = &self.jobs(rows);
        let mut pool = KvPool::new(self.shape, &mut self.pool).unwrap();
        let mut pages: KvPages<'_> = pool.block(index).unwrap();
        let sums = Sums {
            keys: &mut taken.keys[..],
            values: &mut taken.values[..],
            starts: &taken.starts,
        };
        backward(
            &mut self.cpu,
            &self.spec,
            &self.blocks[index],
            &mut self.gradients,
            rows,
            prompts,
            x,
            &mut taken.gradient,
            sums,
            saved,
            &mut pages,
        )
        .unwrap();
    }

    /// Runs all blocks; the output of each.
    fn run(&mut self, rows: &[StepRow<'_>], hidden: &mut [f32]) -> Vec<Vec<f32>> {
        (0..self.blocks.len())
            .map(|index| {
                self.block(index, rows, &[], hidden);
                hidden.to_vec()
            })
            .collect()
    }
}

/// Page tables of `rows` rows of `tokens` positions over shuffled, interleaved pages; page 0 stays
/// unused.
fn shuffled_tables(rows: usize, tokens: usize) -> (Vec<Vec<PageId>>, usize) {
    let per_row = tokens.div_ceil(kernels::PAGE_TOKENS);
    let count = rows * per_row;
    let step = (2..).find(|step| gcd(*step, count) == 1).unwrap();
    let page = |row, n| PageId((1 + (row * per_row + n) * step % count) as u32);
    let tables = (0..rows).map(|row| (0..per_row).map(|n| page(row, n)).collect()).collect();
    (tables, 1 + count)
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}
