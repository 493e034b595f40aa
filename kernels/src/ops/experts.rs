//! A mixture of experts from the logits of its router to its output:
//!
//! ```text
//! weights = route(logits)
//! out = sum over the experts e of a token, in their order, of round(weight_e * round(down_e (silu(gate_e x) * up_e x))), each sum rounded
//! ```
//! (transformers `MixtralSparseMoeBlock`.) Its parts are [`Route`], [`Gather`], products and what [adapters](super::lora) add to them,
//! [`SiluMul`] and [`ScatterAdd`], expert by expert; a device does all experts at once, with the bits that a row
//! has by itself.

use shared::dtype::DType;

use super::lora::{self, Adapter, AdapterSizes, Lora, LoraPart, parts_of};
use super::{Elements, MatrixShape, OpError, check_len, linear, route, silu_mul};
use crate::ops::{Gather, Linear, Route, ScatterAdd, SiluMul};
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
    /// Experts.
    pub experts: usize,
    /// Features that go in and come out.
    pub hidden: usize,
    /// Features between.
    pub middle: usize,
}

/// Arguments of a mixture of experts; `E` is the backend's [`Backend::Experts`](crate::Backend::Experts), `A` its
/// [`Backend::Adapters`](crate::Backend::Adapters).
#[derive(Debug)]
pub struct Mixture<'a, F: ?Sized, E: ?Sized, A: ?Sized> {
    /// Input `[tokens, hidden]`.
    pub x: &'a F,
    /// `[tokens, experts]`: logits, and the weights in their place.
    pub logits: &'a mut F,
    /// The matrices.
    pub experts: &'a E,
    /// Adapters beside them; `None` when no token goes through one.
    pub adapters: Option<ExpertAdapters<'a, F, A>>,
    /// Tokens.
    pub tokens: usize,
    /// Experts per token, 1 to all.
    pub chosen: usize,
    /// Memory for what lies between.
    pub room: ExpertsRoom<'a, F>,
    /// Output `[tokens, hidden]`.
    pub out: &'a mut F,
    /// The block dtype.
    pub round: DType,
}

/// Adapters beside the matrices of all experts; `A` is the backend's [`Backend::Adapters`](crate::Backend::Adapters).
#[derive(Debug)]
pub struct ExpertAdapters<'a, F: ?Sized, A: ?Sized> {
    /// Those of the gates, of the matrices up and of those down, each `[experts, count]`; `None` where all leave such matrices alone.
    pub tables: [Option<&'a A>; 3],
    /// Adapters of an expert, those that leave it alone counted.
    pub count: usize,
    /// Which of them each token goes through; one that a matrix does not have changes nothing. A device whose step is recorded takes those of
    /// the step instead.
    pub of_tokens: &'a [Option<u32>],
    /// Memory for what lies between their matrices, `[tokens, chosen, largest rank]`; its content is unspecified before and after.
    pub middle: &'a mut F,
}

/// Memory of a mixture of experts, of unspecified content before and after.
#[derive(Debug)]
pub struct ExpertsRoom<'a, F: ?Sized> {
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
    let wrong = |what| OpError::Shape {
        op: "experts",
        what,
    };
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
    Ok(ExpertSizes {
        experts: experts.len(),
        hidden,
        middle,
    })
}

impl<F: Elements + ?Sized, A: ?Sized> ExpertAdapters<'_, F, A> {
    /// `found` tells sizes and number of the adapters of a table.
    pub(crate) fn check(
        &self,
        sizes: ExpertSizes,
        (tokens, chosen): (usize, usize),
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
        let ExpertSizes {
            experts,
            hidden,
            middle,
        } = sizes;
        route::check_chosen(self.chosen, experts)?;
        let (tokens, pairs) = (self.tokens, self.tokens.saturating_mul(self.chosen));
        let lists = list_words(tokens, self.chosen, experts);
        for (what, has, rows, width) in [
            ("x", self.x.len(), tokens, hidden),
            ("logits", self.logits.len(), tokens, experts),
            ("gate", self.room.gate.len(), pairs, middle),
            ("up", self.room.up.len(), pairs, middle),
            ("given", self.room.given.len(), pairs, hidden),
            ("lists", self.room.lists.len(), 1, lists),
            ("out", self.out.len(), tokens, hidden),
        ] {
            check_len("experts", what, has, rows, width)?;
        }
        Ok(())
    }
}

/// Tokens that go to `expert`, and their weights, out of the weights `[tokens, experts]` of [`Route`].
pub(crate) fn tokens_of(weights: &[f32], expert: usize, experts: usize) -> (Vec<u32>, Vec<f32>) {
    // A weight that is no number goes on, so that the result is none either.
    (0u32..)
        .zip(weights.chunks_exact(experts))
        .map(|(token, row)| (token, row[expert]))
        .filter(|(_, weight)| *weight != 0.0)
        .unzip()
}

/// The adapter of each of some tokens.
pub(crate) fn adapters_at(of_tokens: &[Option<u32>], index: &[u32]) -> Vec<Option<u32>> {
    let of = |token: &u32| of_tokens.get(*token as usize).copied().flatten();
    index.iter().map(of).collect()
}

/// Sizes and number of adapters of the host.
pub(crate) fn listed<W: MatrixShape>(
    adapters: &[Option<Adapter<W>>],
) -> Result<(AdapterSizes, usize), OpError> {
    Ok((lora::sizes_of(adapters)?, adapters.len()))
}

/// Adapters of the host.
pub type AdapterViews<'w> = [Option<Adapter<WeightView<'w>>>];

/// The definition of [`Mixture`].
pub fn reference(
    mut args: Mixture<'_, [f32], [Expert<WeightView<'_>>], AdapterViews<'_>>,
) -> Result<(), OpError> {
    let sizes = sizes_of(args.experts)?;
    args.check(sizes)?;
    if let Some(adapters) = &args.adapters {
        adapters.check(sizes, (args.tokens, args.chosen), listed)?;
    }
    let (tokens, width, round) = (args.tokens, sizes.hidden, args.round);
    route::reference(Route {
        logits: &mut *args.logits,
        tokens,
        experts: sizes.experts,
        chosen: args.chosen,
        round,
    })?;
    args.out[..tokens * width].fill(0.0);
    let weights = &args.logits[..tokens * sizes.experts];
    for (number, expert) in args.experts.iter().enumerate() {
        let (index, weights) = tokens_of(weights, number, sizes.experts);
        let rows = index.len();
        let mut taken = vec![0.0; rows * width];
        route::reference_gather(Gather {
            x: args.x,
            index: &index,
            width,
            out: &mut taken[..],
        })?;
        let own = Own {
            number,
            expert,
            index: &index,
            round,
        };
        let adapters = &mut args.adapters;
        let mut middle = [(); 2].map(|()| vec![0.0; rows * sizes.middle]);
        for (which, out) in middle.iter_mut().enumerate() {
            own.product(adapters, which, &taken, out)?;
        }
        let [gate, up] = &mut middle;
        silu_mul::reference(SiluMul {
            gate: &mut gate[..],
            up: &up[..],
            len: rows * sizes.middle,
            round,
        })?;
        own.product(adapters, 2, gate, &mut taken)?;
        route::reference_scatter_add(ScatterAdd {
            x: &taken[..],
            index: &index,
            weights: &weights,
            width,
            out: &mut *args.out,
            round,
        })?;
    }
    Ok(())
}

/// What the definitions know of the expert at hand.
pub(super) struct Own<'a, 'w> {
    /// Which it is.
    pub(super) number: usize,
    /// Its matrices.
    pub(super) expert: &'a Expert<WeightView<'w>>,
    /// The tokens that go to it.
    pub(super) index: &'a [u32],
    /// The block dtype.
    pub(super) round: DType,
}

impl<'w> Own<'_, 'w> {
    /// Gate, up or down.
    pub(super) fn matrix(&self, which: usize) -> WeightView<'w> {
        [self.expert.gate, self.expert.up, self.expert.down][which]
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

    /// The product with matrix `which`.
    pub(super) fn product(
        &self,
        adapters: &mut Option<ExpertAdapters<'_, [f32], AdapterViews<'_>>>,
        which: usize,
        x: &[f32],
        out: &mut [f32],
    ) -> Result<(), OpError> {
        let rows = self.index.len();
        linear::reference(Linear {
            x,
            weight: self.matrix(which),
            bias: None,
            out: &mut *out,
            rows,
        })?;
        let Some(adapters) = adapters else {
            return Ok(());
        };
        lora::reference(Lora {
            x,
            parts: &self.parts(adapters, which),
            middle: &mut *adapters.middle,
            out,
            rows,
            round: self.round,
        })
    }
}
