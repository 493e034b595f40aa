//! A mixture of experts from the logits of its router to its output:
//!
//! ```text
//! weights = route(logits)
//! out = sum over the experts e of a token, in their order, of round(weight_e * round(down_e (silu(gate_e x) * up_e x))), each sum rounded
//! ```
//! (transformers `MixtralSparseMoeBlock`.) Its parts are [`Route`], [`Gather`], products and what
//! [adapters](super::lora) add to them, [`SiluMul`] and [`ScatterAdd`], expert by expert; a device
//! does all experts at once, with the bits that a row has by itself.
//!
//! Ranks of a group have columns of the middle of every expert: rank 0 routes, and products with down
//! are summed over the ranks before they are rounded.

use shared::dtype::DType;

use super::lora::{self, Adapter, AdapterSizes, Lora, LoraPart, parts_of};
use super::{
    Elements, MatrixShape, OpError, RankInputs, check_len, gradient, linear, route, silu_mul,
};
use crate::ops::{
    Gather, Linear, LinearGrad, LoraGrad, Product, Products, Route, ScatterAdd, SiluMul,
    SiluMulGrad,
};
use crate::tensor::WeightView;

/// The matrices of one expert; `W` is the backend's matrix.
#[derive(Clone, Debug)]
pub struct Expert<W> {
    /// `[middle, hidden]`, activated.
    pub gate: W,
    /// `[middle, hidden]`, multiplied with it.
    pub up: W,
    /// `[hidden, middle]`.
    pub down: W,
}

/// Sizes of the experts of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertSizes {
    pub experts: usize,
    /// Features that go in and come out.
    pub hidden: usize,
    /// Features between.
    pub middle: usize,
}

/// Arguments of a mixture of experts; `E` is the backend's
/// [`Backend::Experts`](crate::Backend::Experts), `A` its
/// [`Backend::Adapters`](crate::Backend::Adapters).
#[derive(Debug)]
pub struct Mixture<'a, F: ?Sized, E: ?Sized, A: ?Sized> {
    /// Input `[tokens, hidden]`.
    pub x: &'a F,
    /// `[tokens, experts]`: logits, and the weights in their place.
    pub logits: &'a mut F,
    pub experts: &'a E,
    /// Adapters beside them; `None` when no token goes through one.
    pub adapters: Option<ExpertAdapters<'a, F, A>>,
    pub tokens: usize,
    /// Experts per token, 1 to all.
    pub chosen: usize,
    /// Memory for what lies between.
    pub workspace: MixtureWorkspace<'a, F>,
    /// Output `[tokens, hidden]`.
    pub out: &'a mut F,
    pub round: DType,
}

/// Adapters beside the matrices of all experts; `A` is the backend's
/// [`Backend::Adapters`](crate::Backend::Adapters).
#[derive(Debug)]
pub struct ExpertAdapters<'a, F: ?Sized, A: ?Sized> {
    /// Those of the gates, of the matrices up and of those down, each `[experts, count]`; `None`
    /// where all leave such matrices alone.
    pub tables: [Option<&'a A>; 3],
    /// Adapters of an expert, those that leave it alone counted.
    pub count: usize,
    /// Which of them each token goes through; one that a matrix does not have changes nothing. A
    /// device whose step is recorded takes those of the step instead.
    pub of_tokens: &'a [Option<u32>],
    /// Memory for what lies between their matrices, `[tokens, chosen, largest rank]`; its content
    /// is unspecified before and after.
    pub middle: &'a mut F,
}

/// Memory of a mixture of experts, of unspecified content before and after.
#[derive(Debug)]
pub struct MixtureWorkspace<'a, F: ?Sized> {
    /// `[tokens, chosen, middle]`.
    pub gate: &'a mut F,
    /// `[tokens, chosen, middle]`.
    pub up: &'a mut F,
    /// `[tokens, chosen, hidden]`.
    pub given: &'a mut F,
    /// Which token goes where, [`list_words`] elements.
    pub lists: &'a mut F,
}

/// Elements of the lists of a step.
pub fn list_words(tokens: usize, chosen: usize, experts: usize) -> usize {
    let pairs = tokens.saturating_mul(chosen);
    pairs.saturating_mul(8).saturating_add(experts + 3)
}

/// The sizes of experts that are alike.
///
/// # Errors
/// When there are none, or their matrices do not go together.
pub fn sizes_of<W: MatrixShape>(experts: &[Expert<W>]) -> Result<ExpertSizes, OpError> {
    let shape = |w: &W| (w.dtype(), w.outputs(), w.inputs());
    let wrong = |what| OpError::Shape { op: "experts", what };
    let first = experts.first().ok_or(wrong("there are none"))?;
    let (dtype, middle, hidden) = shape(&first.gate);
    let fits = |expert: &Expert<W>| {
        let wide = (dtype, middle, hidden);
        [shape(&expert.gate), shape(&expert.up), shape(&expert.down)]
            == [wide, wide, (dtype, hidden, middle)]
    };
    if !experts.iter().all(fits) {
        return Err(wrong("the matrices of the experts do not go together"));
    }
    Ok(ExpertSizes { experts: experts.len(), hidden, middle })
}

impl<F: Elements + ?Sized, A: ?Sized> ExpertAdapters<'_, F, A> {
    /// `found` tells sizes and number of the adapters of a table.
    pub(crate) fn check(
        &self,
        sizes: ExpertSizes,
        tokens: usize,
        chosen: usize,
        found: impl Fn(&A) -> Result<(AdapterSizes, usize), OpError>,
    ) -> Result<(), OpError> {
        let op = "adapters of experts";
        check_len(op, "tokens", self.of_tokens.len(), tokens, 1)?;
        let sides = [
            (sizes.hidden, sizes.middle),
            (sizes.hidden, sizes.middle),
            (sizes.middle, sizes.hidden),
        ];
        for (table, sides) in self.tables.iter().zip(sides) {
            let Some(table) = table else {
                continue;
            };
            let (found, count) = found(table)?;
            let wanted = sizes.experts.checked_mul(self.count);
            if (found.inputs, found.outputs) != sides || Some(count) != wanted {
                let what = "the adapters do not go with the matrices of the experts";
                return Err(OpError::Shape { op, what });
            }
            let pairs = tokens.saturating_mul(chosen);
            check_len(op, "middle", self.middle.len(), pairs, found.rank)?;
        }
        Ok(())
    }
}

impl<F: Elements + ?Sized, E: ?Sized, A: ?Sized> Mixture<'_, F, E, A> {
    pub(crate) fn check(&self, sizes: ExpertSizes) -> Result<(), OpError> {
        let ExpertSizes { experts, hidden, middle } = sizes;
        route::check_chosen(self.chosen, experts)?;
        let (tokens, pairs) = (self.tokens, self.tokens.saturating_mul(self.chosen));
        let lists = list_words(tokens, self.chosen, experts);
        for (what, has, rows, width) in [
            ("x", self.x.len(), tokens, hidden),
            ("logits", self.logits.len(), tokens, experts),
            ("gate", self.workspace.gate.len(), pairs, middle),
            ("up", self.workspace.up.len(), pairs, middle),
            ("given", self.workspace.given.len(), pairs, hidden),
            ("lists", self.workspace.lists.len(), 1, lists),
            ("out", self.out.len(), tokens, hidden),
        ] {
            check_len("experts", what, has, rows, width)?;
        }
        Ok(())
    }
}

/// Tokens that go to `expert`, and their weights, out of the weights `[tokens, experts]` of
/// [`Route`].
pub(super) fn tokens_of(weights: &[f32], expert: usize, experts: usize) -> (Vec<u32>, Vec<f32>) {
    // A weight that is no number goes on, so that the result is none either.
    (0u32..)
        .zip(weights.chunks_exact(experts))
        .map(|(token, row)| (token, row[expert]))
        .filter(|(_, weight)| *weight != 0.0)
        .unzip()
}

/// The adapter of each of some tokens.
fn adapters_at(of_tokens: &[Option<u32>], index: &[u32]) -> Vec<Option<u32>> {
    let of = |token: &u32| of_tokens.get(*token as usize).copied().flatten();
    index.iter().map(of).collect()
}

/// Sizes and number of adapters of the host.
pub(super) fn listed<W: MatrixShape>(
    adapters: &[Option<Adapter<W>>],
) -> Result<(AdapterSizes, usize), OpError> {
    Ok((lora::sizes_of(adapters)?, adapters.len()))
}

/// Adapters of the host.
pub type AdapterViews<'w> = [Option<Adapter<WeightView<'w>>>];

/// What the experts of a mixture are made of: the operations on the rows of one expert. A mixture
/// is composed of them once, whether they are the definitions or the fast paths.
pub(crate) trait Primitives {
    /// Sums over the ranks of the group, if there is one.
    fn all_reduce(&mut self, _values: &mut [f32]) -> Result<(), OpError> {
        Ok(())
    }
    /// Values of rank 0 of the group, if there is one.
    fn broadcast(&mut self, _values: &mut [f32]) -> Result<(), OpError> {
        Ok(())
    }
    /// Products of one input.
    fn products(&mut self, args: Products<'_, '_, [f32], WeightView<'_>>) -> Result<(), OpError>;
    /// Adapters beside a product.
    fn lora(&mut self, args: Lora<'_, [f32], WeightView<'_>>) -> Result<(), OpError>;
    /// Middle of a gated MLP.
    fn silu_mul(&mut self, args: SiluMul<'_, [f32]>) -> Result<(), OpError>;
    /// Gradient of a product.
    fn linear_grad(&mut self, args: LinearGrad<'_, [f32], WeightView<'_>>) -> Result<(), OpError>;
    /// Gradient through adapters.
    fn lora_grad(&mut self, args: LoraGrad<'_, [f32], WeightView<'_>>) -> Result<(), OpError>;
    /// Gradient of the middle of a gated MLP.
    fn silu_mul_grad(&mut self, args: SiluMulGrad<'_, [f32]>) -> Result<(), OpError>;
}

/// The definitions of all primitives.
pub(crate) struct Definitions;

impl Primitives for Definitions {
    fn products(&mut self, args: Products<'_, '_, [f32], WeightView<'_>>) -> Result<(), OpError> {
        let (x, rows) = (args.x, args.rows);
        args.parts.iter_mut().try_for_each(|product| {
            let (weight, bias, out) = (product.weight, product.bias, &mut *product.out);
            linear::reference(Linear { x, weight, bias, out, rows })
        })
    }

    fn lora(&mut self, args: Lora<'_, [f32], WeightView<'_>>) -> Result<(), OpError> {
        lora::reference(args)
    }

    fn silu_mul(&mut self, args: SiluMul<'_, [f32]>) -> Result<(), OpError> {
        silu_mul::reference(args)
    }

    fn linear_grad(&mut self, args: LinearGrad<'_, [f32], WeightView<'_>>) -> Result<(), OpError> {
        gradient::reference_linear(args)
    }

    fn lora_grad(&mut self, args: LoraGrad<'_, [f32], WeightView<'_>>) -> Result<(), OpError> {
        lora::reference_grad(args)
    }

    fn silu_mul_grad(&mut self, args: SiluMulGrad<'_, [f32]>) -> Result<(), OpError> {
        gradient::reference_silu_mul(args)
    }
}

/// Which matrix of an expert is the last; gate and up come before it.
pub(crate) const DOWN: usize = 2;

/// The definition of [`Mixture`].
pub fn reference(
    args: Mixture<'_, [f32], [Expert<WeightView<'_>>], AdapterViews<'_>>,
) -> Result<(), OpError> {
    compose(&mut Definitions, &mut Vec::new(), args)
}

/// Computes a mixture from its primitives, expert by expert over the rows that go to it. `gathered`
/// is scratch memory for those rows.
pub(crate) fn compose(
    primitives: &mut impl Primitives,
    gathered: &mut Vec<f32>,
    mut args: Mixture<'_, [f32], [Expert<WeightView<'_>>], AdapterViews<'_>>,
) -> Result<(), OpError> {
    let sizes = sizes_of(args.experts)?;
    args.check(sizes)?;
    if let Some(adapters) = &args.adapters {
        adapters.check(sizes, args.tokens, args.chosen, listed)?;
    }
    let (tokens, width, round) = (args.tokens, sizes.hidden, args.round);
    route::reference(Route {
        logits: &mut *args.logits,
        tokens,
        experts: sizes.experts,
        chosen: args.chosen,
        round,
    })?;
    // Ranks of different kinds may round differently: one decides.
    primitives.broadcast(&mut args.logits[..tokens * sizes.experts])?;
    args.out[..tokens * width].fill(0.0);
    let MixtureWorkspace { gate, up, given, .. } = args.workspace;
    let weights = &args.logits[..tokens * sizes.experts];
    for (number, expert) in args.experts.iter().enumerate() {
        let (index, weights) = tokens_of(weights, number, sizes.experts);
        let rows = index.len();
        if rows == 0 {
            continue;
        }
        let own = ExpertRows { number, expert, index: &index, round };
        let x = own.gather(args.x, width, gathered)?;
        own.gate_and_up(primitives, &mut args.adapters, x, gate, up)?;
        let len = rows * sizes.middle;
        primitives.silu_mul(SiluMul { gate: &mut *gate, up: &*up, len, round })?;
        let mut down = [Product { weight: expert.down, bias: None, out: &mut *given }];
        primitives.products(Products { x: &*gate, rows, parts: &mut down })?;
        primitives.all_reduce(&mut given[..rows * width])?;
        own.adapt(primitives, &mut args.adapters, DOWN, gate, given)?;
        route::reference_scatter_add(ScatterAdd {
            x: &*given,
            index: &index,
            weights: &weights,
            width,
            out: &mut *args.out,
            round,
        })?;
    }
    Ok(())
}

/// The expert at hand, and the tokens that go to it.
pub(super) struct ExpertRows<'a, 'w> {
    /// Which expert it is.
    pub(super) number: usize,
    pub(super) expert: &'a Expert<WeightView<'w>>,
    /// The tokens that go to it.
    pub(super) index: &'a [u32],
    pub(super) round: DType,
}

impl ExpertRows<'_, '_> {
    /// Collects the rows of the tokens from `x` `[tokens, width]` in `memory`.
    pub(super) fn gather<'m>(
        &self,
        x: &[f32],
        width: usize,
        memory: &'m mut Vec<f32>,
    ) -> Result<&'m [f32], OpError> {
        memory.resize(memory.len().max(self.index.len() * width), 0.0);
        let (index, out) = (self.index, &mut memory[..]);
        route::reference_gather(Gather { x, index, width, out })?;
        Ok(memory)
    }

    /// The products with the matrices gate and up, adapters included.
    pub(super) fn gate_and_up(
        &self,
        primitives: &mut impl Primitives,
        adapters: &mut Option<ExpertAdapters<'_, [f32], AdapterViews<'_>>>,
        x: &[f32],
        gate: &mut [f32],
        up: &mut [f32],
    ) -> Result<(), OpError> {
        let both = [(self.expert.gate, &mut *gate), (self.expert.up, &mut *up)];
        let mut parts = both.map(|(weight, out)| Product { weight, bias: None, out });
        primitives.products(Products { x, rows: self.index.len(), parts: &mut parts })?;
        self.adapt(primitives, adapters, 0, x, gate)?;
        self.adapt(primitives, adapters, 1, x, up)
    }

    /// Adds what adapters make of `x` to its product with matrix `which`.
    fn adapt(
        &self,
        primitives: &mut impl Primitives,
        adapters: &mut Option<ExpertAdapters<'_, [f32], AdapterViews<'_>>>,
        which: usize,
        x: &[f32],
        out: &mut [f32],
    ) -> Result<(), OpError> {
        let Some(adapters) = adapters else {
            return Ok(());
        };
        primitives.lora(Lora {
            x,
            parts: &self.parts(adapters, which),
            middle: &mut *adapters.middle,
            out,
            rows: self.index.len(),
            round: self.round,
            inputs: if which == DOWN { RankInputs::Cut } else { RankInputs::Whole },
        })
    }

    /// What adapters add to matrix `which`, by the rows that go through them.
    pub(super) fn parts<'v>(
        &self,
        adapters: &ExpertAdapters<'_, [f32], AdapterViews<'v>>,
        which: usize,
    ) -> Vec<LoraPart<WeightView<'v>>> {
        let own = self.number * adapters.count..(self.number + 1) * adapters.count;
        let own = adapters.tables[which].map_or(&[][..], |table| &table[own]);
        parts_of(own, &adapters_at(adapters.of_tokens, self.index))
    }
}
