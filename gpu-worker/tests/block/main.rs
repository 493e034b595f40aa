//! The block against numbers computed elsewhere: transformers (golden data of `tests/golden`, made
//! by its `generate.py`) and Petals' own block classes (formulas).

mod adapters;
mod families;
mod golden;
mod petals;
mod shards;

use std::collections::HashMap;

use blocks::kv::page_layout;
use blocks::kv::{KvPool, KvShape};
use blocks::{
    BlockWeights, GradientWork, PromptPart, SavedActivations, Sums, Workspace, add_prompts,
    backward, forward_saving, keys,
};
use kernels::ops::convert;
use kernels::quant::{int8, nf4};
use kernels::{Cpu, DType, KvPages, QuantType, StepRow, WeightView};
use model::BlockSpec;
use shared::ids::PageId;

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
        assert!(hidden.iter().all(|&v| v == convert::round(self.dtype, v) && v.is_finite()));
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

/// What the pieces of a sequence pass on to each other on the way back.
struct Taken {
    keys: Vec<f32>,
    values: Vec<f32>,
    starts: Vec<usize>,
    gradient: Vec<f32>,
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
