//! One rank of a group, or a worker of whole blocks, on its way through all that blocks do.

use std::ops::Range;

use blocks::map::MappedWeights;
use blocks::{ActivationStore, SaveLevel};
use shared::block::BlockIndex;

use super::model::{BATCH, Model, PREFIX};
use crate::*;

/// What a rank gives, as bits: hidden states behind the last block, and the gradients of the input
/// and of the prompts.
#[derive(PartialEq)]
pub(super) struct Results {
    pub(super) output: Vec<u32>,
    pub(super) gradient: Vec<u32>,
    pub(super) prompts: Vec<u32>,
}

impl Results {
    fn parts(&self) -> [&[u32]; 3] {
        [&self.output, &self.gradient, &self.prompts]
    }

    /// Relative error of each of them against `wanted`.
    pub(super) fn errors(&self, wanted: &Results) -> [f64; 3] {
        let value = |bits: &u32| f64::from(f32::from_bits(*bits));
        let mut pairs = self.parts().into_iter().zip(wanted.parts());
        std::array::from_fn(|_| {
            let (got, wanted) = pairs.next().unwrap();
            assert_eq!(got.len(), wanted.len());
            let pairs = || got.iter().map(value).zip(wanted.iter().map(value));
            let difference: f64 = pairs().map(|(g, w)| (g - w).powi(2)).sum();
            (difference / pairs().map(|(_, w)| w.powi(2)).sum::<f64>()).sqrt()
        })
    }
}

/// One rank, or the whole.
pub(super) struct Runner<'m, 'w> {
    model: &'m Model,
    chain: Chain<'w>,
    tables: Vec<Vec<PageId>>,
}

impl<'m, 'w> Runner<'m, 'w> {
    pub(super) fn new(
        model: &'m Model,
        spec: &BlockSpec,
        weights: &'w MappedWeights,
        mut cpu: Cpu,
    ) -> Runner<'m, 'w> {
        let block = |index: usize| {
            let index = BlockIndex(index as u32);
            let tensor = |name: &str| weights.tensor(index, name);
            let mut block = BlockWeights::new(&mut cpu, spec, model.dtype, tensor).unwrap();
            for adapter in 0..weights.adapter_count() {
                let find = |name: &str| weights.adapter(adapter, index, name);
                block.add_adapter(&mut cpu, spec, find).unwrap();
            }
            block
        };
        let blocks = (0..spec.num_blocks).map(block).collect();
        let (tables, pages) = shuffled_tables(BATCH, model.tokens);
        let mut chain = Chain::of(spec, model.dtype, blocks, cpu, pages);
        chain.lengths = vec![model.tokens; BATCH];
        Runner { model, chain, tables }
    }

    /// All that is computed, in one order: a rank exchanges in it. Asserts that neither steps, nor
    /// batches, nor pieces of a gradient or what is saved for it change a bit.
    pub(super) fn results(&mut self) -> Results {
        let (tokens, name) = (self.model.tokens, &self.model.name);
        let output = bits(&self.outputs(0..BATCH, &[tokens]));
        for ends in [&[7, 8, 16, tokens][..], &[tokens - 2, tokens - 1, tokens]] {
            let stepped = bits(&self.outputs(0..BATCH, ends));
            assert!(stepped == output, "{name} in steps {ends:?}");
        }
        let alone = (0..BATCH).flat_map(|row| bits(&self.outputs(row..row + 1, &[tokens])));
        let alone: Vec<u32> = alone.collect();
        assert!(alone == output, "{name}: rows alone");
        let [gradient, prompts] = self.gradient(tokens, SaveLevel::Nothing);
        for (cut, level) in [
            // Where a page ends: within one, sums are of all its tokens.
            (kernels::PAGE_TOKENS, SaveLevel::Nothing),
            (tokens, SaveLevel::Queries),
            (tokens, SaveLevel::Attention),
            (tokens, SaveLevel::Middle),
        ] {
            let [again, _] = self.gradient(cut, level);
            assert!(again == gradient, "{name}: gradient by {cut} at {level:?}");
        }
        Results { output, gradient, prompts }
    }

    /// Prompts of a block that fall on `tokens` of `rows`.
    fn prompts(
        &self,
        block: usize,
        rows: Range<usize>,
        tokens: &Range<usize>,
    ) -> Vec<PromptPart<'m>> {
        let width = self.model.spec.hidden;
        let rows = rows.enumerate().filter(|_| tokens.start < PREFIX);
        let part = |(index, row): (usize, usize)| {
            let at = (block * BATCH + row) * PREFIX;
            let values = (at + tokens.start) * width..(at + PREFIX.min(tokens.end)) * width;
            let values = &self.model.given["prompts"][values];
            PromptPart { offset: index * tokens.len() * width, values }
        };
        rows.map(part).collect()
    }

    /// `tokens` of every row of `[rows, tokens, hidden]`.
    fn part(&self, values: &[f32], tokens: &Range<usize>) -> Vec<f32> {
        let width = self.model.spec.hidden;
        let rows = values.chunks(self.model.tokens * width);
        rows.flat_map(|row| row[tokens.start * width..tokens.end * width].to_vec()).collect()
    }

    /// Hidden states behind the last block, of rows that come in steps up to `ends`.
    fn outputs(&mut self, rows: Range<usize>, ends: &[usize]) -> Vec<f32> {
        let (width, tokens) = (self.model.spec.hidden, self.model.tokens);
        let own = rows.start * tokens * width..rows.end * tokens * width;
        let input = &self.model.given["input"][own];
        self.chain.adapters = self.model.adapters_of_rows()[rows.clone()].to_vec();
        let mut outputs = vec![f32::NAN; input.len()];
        let (tables, mut from) = (self.tables.clone(), 0);
        for &to in ends {
            let step = from..to;
            let mut hidden = self.part(input, &step);
            for block in 0..self.model.spec.num_blocks {
                let (all, prompts) = (
                    rows_of(&tables[rows.clone()], &step),
                    self.prompts(block, rows.clone(), &step),
                );
                self.chain.block(block, &all, &prompts, &mut hidden);
            }
            put(&mut outputs, &hidden, tokens * width, from * width);
            from = to;
        }
        outputs
    }

    /// Gradients of the input and of the prompts, taken back in pieces of `cut` tokens; the forward
    /// pass saves what `level` says if that is one piece.
    fn gradient(&mut self, cut: usize, level: SaveLevel) -> [Vec<u32>; 2] {
        let (width, tokens) = (self.model.spec.hidden, self.model.tokens);
        let (blocks, all) = (self.model.spec.num_blocks, 0..tokens);
        let (spec, tables) = (self.chain.spec.clone(), self.tables.clone());
        self.chain.adapters = self.model.adapters_of_rows();
        let store = |_| ActivationStore::new(&mut Cpu::new(1), &spec, level, BATCH * tokens);
        let mut stores: Vec<ActivationStore<Cpu>> = (0..blocks).map(store).collect();
        let (mut hidden, mut inputs) = (self.model.given["input"].clone(), Vec::new());
        for (block, store) in stores.iter_mut().enumerate() {
            inputs.push(hidden.clone());
            let (rows, prompts) = (rows_of(&tables, &all), self.prompts(block, 0..BATCH, &all));
            let saved = store.part(0..BATCH * tokens);
            self.chain.send(block, &rows, &prompts, &mut hidden, saved, false);
        }
        let mut gradient = self.model.given["output_gradient"].clone();
        let mut of_prompts = Vec::new();
        for block in (0..blocks).rev() {
            let kv = BATCH * tokens * spec.kv_heads * spec.head_dim;
            let mut taken = Taken {
                keys: vec![0.0; kv],
                values: vec![0.0; kv],
                starts: (0..BATCH).map(|row| row * tokens).collect(),
                gradient: Vec::new(),
            };
            for from in (0..tokens).step_by(cut).rev() {
                let piece = from..tokens.min(from + cut);
                taken.gradient = self.part(&gradient, &piece);
                let rows = rows_of(&tables, &piece);
                let prompts = self.prompts(block, 0..BATCH, &piece);
                let x = self.part(&inputs[block], &piece);
                let saved = match piece == all {
                    true => stores[block].part(0..BATCH * tokens),
                    false => SavedActivations::default(),
                };
                self.chain.gradient(block, &rows, &prompts, &x, &mut taken, saved);
                put(&mut gradient, &taken.gradient, tokens * width, from * width);
            }
            of_prompts.extend(self.part(&gradient, &(0..PREFIX)));
        }
        [bits(&gradient), bits(&of_prompts)]
    }
}

/// `tokens` of the rows of these page tables.
fn rows_of<'t>(tables: &'t [Vec<PageId>], tokens: &Range<usize>) -> Vec<StepRow<'t>> {
    let row = |pages| StepRow::new(tokens.len(), tokens.start, pages);
    tables.iter().map(|pages| row(pages)).collect()
}

/// Puts `part` `[rows, ..]` into rows of `width` values, `start` values behind where they begin.
fn put(all: &mut [f32], part: &[f32], width: usize, start: usize) {
    let len = part.len() / (all.len() / width);
    for (row, part) in all.chunks_mut(width).zip(part.chunks(len)) {
        row[start..start + len].copy_from_slice(part);
    }
}
