//! All blocks there and back: a forward pass, and the gradients of its input and of its prompts.

use std::ops::Range;

use blocks::{ActivationStore, SaveLevel};
use model::Qkv;

use crate::*;

/// Tokens of the deep prompts.
pub(crate) const PREFIX: usize = 3;

/// What rows of `tokens` tokens go through there and back.
pub(crate) struct Pass<'a> {
    pub(crate) tables: &'a [Vec<PageId>],
    pub(crate) tokens: usize,
    pub(crate) x: &'a [f32],
    /// Of the output.
    pub(crate) gradient: &'a [f32],
    /// Deep prompts of a block that fall on some tokens of every row.
    pub(crate) prompts: &'a dyn Fn(usize, &Range<usize>) -> Vec<PromptPart<'a>>,
    /// Sequences are taken back in pieces that begin at multiples of it.
    pub(crate) cut: usize,
    /// What the forward pass saves.
    pub(crate) level: SaveLevel,
    /// Whether it goes through the last block for keys and values alone.
    pub(crate) turns: bool,
}

/// What a [`Pass`] gives.
pub(crate) struct Gradients {
    pub(crate) output: Vec<f32>,
    pub(crate) input: Vec<f32>,
    /// `[blocks, batch, prefix, hidden]`.
    pub(crate) prompts: Vec<f32>,
}

/// What the pieces of a sequence pass on to each other on the way back.
pub(crate) struct Taken {
    pub(crate) keys: Vec<f32>,
    pub(crate) values: Vec<f32>,
    pub(crate) starts: Vec<usize>,
    pub(crate) gradient: Vec<f32>,
}

impl Taken {
    /// Nothing yet of rows of so many tokens.
    pub(crate) fn new(spec: &BlockSpec, rows: usize, tokens: usize) -> Taken {
        let kv = vec![0.0; rows * tokens * spec.kv_heads * spec.head_dim];
        let starts = (0..rows).map(|row| row * tokens).collect();
        Taken { keys: kv.clone(), values: kv, starts, gradient: Vec::new() }
    }
}

impl Chain<'_> {
    pub(crate) fn there_and_back(&mut self, pass: &Pass<'_>) -> Gradients {
        let (blocks, row) = (self.spec.num_blocks, pass.tokens * self.spec.hidden);
        self.lengths = vec![pass.tokens; pass.tables.len()];
        let (mut hidden, mut inputs, mut stores) = (pass.x.to_vec(), Vec::new(), Vec::new());
        for block in 0..blocks {
            inputs.push(hidden.clone());
            stores.push(self.there(block, pass, &mut hidden));
        }
        let (mut gradient, mut prompts) = (pass.gradient.to_vec(), Vec::new());
        for (block, store) in stores.iter_mut().enumerate().rev() {
            self.back(block, pass, &inputs[block], store, &mut gradient);
            prompts.splice(0..0, cut_out(&gradient, row, 0..PREFIX * self.spec.hidden));
        }
        Gradients { output: hidden, input: gradient, prompts }
    }

    /// Through one block; what is saved of it.
    fn there(&mut self, block: usize, pass: &Pass<'_>, hidden: &mut [f32]) -> ActivationStore<Cpu> {
        let turns = pass.turns && block + 1 == self.spec.num_blocks;
        // What keys() does not leave must not be taken for left.
        let level = match &self.spec.qkv {
            _ if !turns => pass.level,
            Qkv::Fused(_) => pass.level.min(SaveLevel::Queries),
            _ => SaveLevel::Nothing,
        };
        let (all, tokens) = (0..pass.tokens, pass.tables.len() * pass.tokens);
        let mut store = ActivationStore::new(&mut self.cpu, &self.spec, level, tokens);
        let (rows, prompts) = (rows_of(pass.tables, &all), (pass.prompts)(block, &all));
        self.send(block, &rows, &prompts, hidden, store.part(0..tokens), turns);
        assert!(turns || self.is_served(hidden));
        store
    }

    fn back(
        &mut self,
        block: usize,
        pass: &Pass<'_>,
        x: &[f32],
        store: &mut ActivationStore<Cpu>,
        gradient: &mut [f32],
    ) {
        let (tokens, width) = (pass.tokens, self.spec.hidden);
        let mut taken = Taken::new(&self.spec, pass.tables.len(), tokens);
        for from in (0..tokens).step_by(pass.cut).rev() {
            let piece = from..tokens.min(from + pass.cut);
            let own = |all: &[f32]| cut_out(all, tokens * width, from * width..piece.end * width);
            taken.gradient = own(gradient);
            let (rows, prompts) = (rows_of(pass.tables, &piece), (pass.prompts)(block, &piece));
            let parts = (0..pass.tables.len()).map(|row| {
                let saved = store.part(row * tokens + from..row * tokens + piece.end);
                [saved.queries, saved.between, saved.gate, saved.up]
                    .map(|part| part.map(|p| p.to_vec()))
            });
            let parts = parts.reduce(|all, row| {
                let mut row = row.into_iter();
                all.map(|all| Some([all?, row.next()??].concat()))
            });
            let mut parts = parts.unwrap();
            let [queries, between, gate, up] = parts.each_mut().map(|part| part.as_deref_mut());
            let saved = SavedActivations { queries, between, gate, up };
            self.gradient(block, &rows, &prompts, &own(x), &mut taken, saved);
            put(gradient, &taken.gradient, tokens * width, from * width);
        }
    }
}

/// What falls on `tokens` of `rows` of the deep prompts `[blocks, BATCH, PREFIX, width]` of a block.
pub(crate) fn prompts_on<'p>(
    prompts: &'p [f32],
    width: usize,
    block: usize,
    rows: Range<usize>,
    tokens: &Range<usize>,
) -> Vec<PromptPart<'p>> {
    let rows = rows.enumerate().filter(|_| tokens.start < PREFIX);
    let part = |(index, row): (usize, usize)| {
        let at = (block * BATCH + row) * PREFIX;
        let values = (at + tokens.start) * width..(at + PREFIX.min(tokens.end)) * width;
        PromptPart { offset: index * tokens.len() * width, values: &prompts[values] }
    };
    rows.map(part).collect()
}
