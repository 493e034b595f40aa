//! One rank of a group, or a worker of whole blocks, on its way through all that blocks do.

use blocks::SaveLevel;

use super::model::Model;
use crate::training::{Pass, prompts_on};
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
        let blocks = mapped_blocks(&mut cpu, spec, model.dtype, weights);
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

    /// Hidden states behind the last block, of rows that come in steps up to `ends`.
    fn outputs(&mut self, rows: Range<usize>, ends: &[usize]) -> Vec<f32> {
        let (width, tokens) = (self.model.spec.hidden, self.model.tokens);
        let own = rows.start * tokens * width..rows.end * tokens * width;
        let (input, prompts) = (&self.model.given["input"][own], &self.model.given["prompts"]);
        self.chain.adapters = self.model.adapters_of_rows()[rows.clone()].to_vec();
        let mut outputs = vec![f32::NAN; input.len()];
        let (tables, mut from) = (self.tables.clone(), 0);
        for &to in ends {
            let step = from..to;
            let mut hidden = cut_out(input, tokens * width, from * width..to * width);
            for block in 0..self.model.spec.num_blocks {
                let all = rows_of(&tables[rows.clone()], &step);
                let prompts = prompts_on(prompts, width, block, rows.clone(), &step);
                self.chain.block(block, &all, &prompts, &mut hidden);
            }
            put(&mut outputs, &hidden, tokens * width, from * width);
            from = to;
        }
        outputs
    }

    /// Gradients of the input and of the prompts, taken back in pieces of `cut` tokens; the forward
    /// pass saves what `level` says.
    fn gradient(&mut self, cut: usize, level: SaveLevel) -> [Vec<u32>; 2] {
        let model = self.model;
        self.chain.adapters = model.adapters_of_rows();
        let prompts = |block: usize, tokens: &Range<usize>| {
            prompts_on(&model.given["prompts"], model.spec.hidden, block, 0..BATCH, tokens)
        };
        let given = self.chain.there_and_back(&Pass {
            tables: &self.tables,
            tokens: model.tokens,
            x: &model.given["input"],
            gradient: &model.given["output_gradient"],
            prompts: &prompts,
            cut,
            level,
            turns: false,
        });
        [bits(&given.input), bits(&given.prompts)]
    }
}
