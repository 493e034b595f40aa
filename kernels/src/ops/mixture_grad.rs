//! The gradient of a mixture of experts with respect to its input and to the logits of its router. With `g` that of the output of a token:
//!
//! ```text
//! d = down_e^T g      share_e = sum of silu(gate_e x) up_e x d      (g_e, u_e) = gradient of silu_mul for d
//! out = sum over its experts e in their order of weight_e gate_e^T g_e, then weight_e up_e^T u_e
//! logits = gradient of route for the shares
//! ```
//! Adapters beside a matrix add to its product and to its gradient. The parts are those of [`Mixture`](super::Mixture), and their gradients, expert by
//! expert; gradients round nothing.

use shared::dtype::DType;

use super::experts::{AdapterViews, ExpertSizes, Own, list_words, listed, sizes_of, tokens_of};
use super::{Elements, Expert, ExpertAdapters, OpError, check_len, gradient, lora, route};
use crate::ops::{
    GateDot, Gather, LinearGrad, LoraGrad, Route, RouteGrad, ScatterAdd, SiluMulGrad,
};
use crate::tensor::WeightView;

/// Arguments; `E` is the backend's [`Backend::Experts`](crate::Backend::Experts), `A` its [`Backend::Adapters`](crate::Backend::Adapters).
#[derive(Debug)]
pub struct MixtureGrad<'a, F: ?Sized, E: ?Sized, A: ?Sized> {
    /// What the mixture was fed `[tokens, hidden]`.
    pub x: &'a F,
    /// Gradient of its output `[tokens, hidden]`.
    pub grad: &'a F,
    /// `[tokens, experts]`: logits, and their gradient in their place.
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
    pub room: ExpertsGradRoom<'a, F>,
    /// Gradient of `x` `[tokens, hidden]`, but for what comes through the logits.
    pub out: &'a mut F,
    /// The block dtype, to which forward rounds.
    pub round: DType,
}

/// Memory of the gradient of a mixture, of unspecified content before and after.
#[derive(Debug)]
pub struct ExpertsGradRoom<'a, F: ?Sized> {
    /// `[tokens, chosen, middle]`.
    pub gate: &'a mut F,
    /// `[tokens, chosen, middle]`.
    pub up: &'a mut F,
    /// `[tokens, chosen, middle]`.
    pub grad: &'a mut F,
    /// `[tokens, chosen, hidden]` each.
    pub given: [&'a mut F; 2],
    /// `[tokens, experts]`.
    pub weights: &'a mut F,
    /// `[tokens, experts]`.
    pub shares: &'a mut F,
    /// Which token goes where, [`list_words`] elements.
    pub lists: &'a mut F,
}

impl<F: Elements + ?Sized, E: ?Sized, A: ?Sized> MixtureGrad<'_, F, E, A> {
    pub(crate) fn check(&self, sizes: ExpertSizes) -> Result<(), OpError> {
        let ExpertSizes {
            experts,
            hidden,
            middle,
        } = sizes;
        route::check_chosen(self.chosen, experts)?;
        let (tokens, pairs) = (self.tokens, self.tokens.saturating_mul(self.chosen));
        let lists = list_words(tokens, self.chosen, experts);
        let [first, second] = &self.room.given;
        for (what, has, rows, width) in [
            ("x", self.x.len(), tokens, hidden),
            ("grad", self.grad.len(), tokens, hidden),
            ("logits", self.logits.len(), tokens, experts),
            ("gate", self.room.gate.len(), pairs, middle),
            ("up", self.room.up.len(), pairs, middle),
            ("middle", self.room.grad.len(), pairs, middle),
            ("given", first.len(), pairs, hidden),
            ("given", second.len(), pairs, hidden),
            ("weights", self.room.weights.len(), tokens, experts),
            ("shares", self.room.shares.len(), tokens, experts),
            ("lists", self.room.lists.len(), 1, lists),
            ("out", self.out.len(), tokens, hidden),
        ] {
            check_len("experts grad", what, has, rows, width)?;
        }
        Ok(())
    }
}

/// The definition of [`MixtureGrad`].
pub fn reference(
    mut args: MixtureGrad<'_, [f32], [Expert<WeightView<'_>>], AdapterViews<'_>>,
) -> Result<(), OpError> {
    let sizes = sizes_of(args.experts)?;
    args.check(sizes)?;
    if let Some(adapters) = &args.adapters {
        adapters.check(sizes, (args.tokens, args.chosen), listed)?;
    }
    let (tokens, width, round) = (args.tokens, sizes.hidden, args.round);
    let mut weights = args.logits[..tokens * sizes.experts].to_vec();
    route::reference(Route {
        logits: &mut weights[..],
        tokens,
        experts: sizes.experts,
        chosen: args.chosen,
        round,
    })?;
    args.out[..tokens * width].fill(0.0);
    let mut shares = vec![0.0; tokens * sizes.experts];
    for (number, expert) in args.experts.iter().enumerate() {
        let (index, weights) = tokens_of(&weights, number, sizes.experts);
        let rows = index.len();
        let gather = |x: &[f32]| {
            let mut taken = vec![0.0; rows * width];
            let (index, out) = (&index[..], &mut taken[..]);
            let done = route::reference_gather(Gather {
                x,
                index,
                width,
                out,
            });
            done.map(|()| taken)
        };
        let (taken, given) = (gather(args.x)?, gather(args.grad)?);
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
        let mut grad = vec![0.0; rows * sizes.middle];
        own.gradient(adapters, 2, &given, &mut grad)?;
        route::reference_gate_dot(GateDot {
            gate: &gate[..],
            up: &up[..],
            grad: &grad[..],
            index: &index,
            width: sizes.middle,
            expert: number,
            experts: sizes.experts,
            out: &mut shares[..],
        })?;
        gradient::reference_silu_mul(SiluMulGrad {
            gate: &mut gate[..],
            up: &mut up[..],
            grad: &grad[..],
            len: rows * sizes.middle,
        })?;
        for (which, grad) in [gate, up].into_iter().enumerate() {
            let mut part = vec![0.0; rows * width];
            own.gradient(adapters, which, grad, &mut part)?;
            route::reference_scatter_add(ScatterAdd {
                x: &part[..],
                index: &index,
                weights: &weights,
                width,
                out: &mut *args.out,
                round: DType::F32,
            })?;
        }
    }
    route::reference_grad(RouteGrad {
        logits: &mut *args.logits,
        grad: &shares[..],
        tokens,
        experts: sizes.experts,
        chosen: args.chosen,
        round,
    })
}

impl Own<'_, '_> {
    /// The gradient of the input of the product with matrix `which` of the expert.
    fn gradient(
        &self,
        adapters: &mut Option<ExpertAdapters<'_, [f32], AdapterViews<'_>>>,
        which: usize,
        grad: &[f32],
        out: &mut [f32],
    ) -> Result<(), OpError> {
        let rows = self.index.len();
        gradient::reference_linear(LinearGrad {
            grad,
            weight: self.matrix(which),
            out: &mut *out,
            rows,
        })?;
        let Some(adapters) = adapters else {
            return Ok(());
        };
        lora::reference_grad(LoraGrad {
            grad,
            parts: &self.parts(adapters, which),
            middle: &mut *adapters.middle,
            out,
            rows,
        })
    }
}
