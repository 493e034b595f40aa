//! A mixture of experts from the logits of its router to its output:
//!
//! ```text
//! weights = route(logits)
//! out = sum over the experts e of a token, in their order, of round(weight_e * round(down_e (silu(gate_e x) * up_e x))), each sum rounded
//! ```
//! (transformers `MixtralSparseMoeBlock`.) Its parts are [`Route`], [`Gather`], products,
//! [`SiluMul`] and [`ScatterAdd`], expert by expert; a device does all experts at once, with the bits that a row
//! has by itself.

use shared::dtype::DType;

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

/// Arguments of a mixture of experts; `E` is the backend's [`Backend::Experts`](crate::Backend::Experts).
#[derive(Debug)]
pub struct Mixture<'a, F: ?Sized, E: ?Sized> {
    /// Input `[tokens, hidden]`.
    pub x: &'a F,
    /// `[tokens, experts]`: logits, and the weights in their place.
    pub logits: &'a mut F,
    /// The matrices.
    pub experts: &'a E,
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

impl<F: Elements + ?Sized, E: ?Sized> Mixture<'_, F, E> {
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

/// The definition of [`Mixture`].
pub fn reference(args: Mixture<'_, [f32], [Expert<WeightView<'_>>]>) -> Result<(), OpError> {
    let sizes = sizes_of(args.experts)?;
    args.check(sizes)?;
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
        let mut middle = [(); 2].map(|()| vec![0.0; rows * sizes.middle]);
        for (weight, out) in [expert.gate, expert.up].into_iter().zip(&mut middle) {
            linear::reference(Linear {
                x: &taken[..],
                weight,
                bias: None,
                out: &mut out[..],
                rows,
            })?;
        }
        let [gate, up] = &mut middle;
        silu_mul::reference(SiluMul {
            gate: &mut gate[..],
            up: &up[..],
            len: rows * sizes.middle,
            round,
        })?;
        linear::reference(Linear {
            x: &gate[..],
            weight: expert.down,
            bias: None,
            out: &mut taken[..],
            rows,
        })?;
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
