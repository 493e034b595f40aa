//! The gradient of a mixture of experts with respect to its input and to the logits of its router.
//! With `g` that of the output of a token:
//!
//! ```text
//! d = down_e^T g      share_e = sum of silu(gate_e x) up_e x d      (g_e, u_e) = gradient of silu_mul for d
//! out = sum over its experts e in their order of weight_e gate_e^T g_e, then weight_e up_e^T u_e
//! logits = gradient of route for the shares
//! ```
//! Adapters beside a matrix add to its product and to its gradient. The parts are those of
//! [`Mixture`](super::Mixture), and their gradients, expert by expert; gradients round nothing.
//!
//! Of a rank of a group, `out` is a summand of the gradient: the caller sums. The shares are summed
//! here, and the gradient of the logits is that of rank 0.

use shared::dtype::DType;

use super::experts::{
    AdapterViews, DOWN, Definitions, ExpertRows, ExpertSizes, Primitives, list_words, listed,
    sizes_of, tokens_of,
};
use super::{Elements, Expert, ExpertAdapters, OpError, check_len, route};
use crate::ops::{
    GateDot, Gather, LinearGrad, LoraGrad, Route, RouteGrad, ScatterAdd, SiluMulGrad,
};
use crate::tensor::WeightView;

/// Arguments; `E` is the backend's [`Backend::Experts`](crate::Backend::Experts), `A` its
/// [`Backend::Adapters`](crate::Backend::Adapters).
#[derive(Debug)]
pub struct MixtureGrad<'a, F: ?Sized, E: ?Sized, A: ?Sized> {
    /// What the mixture was fed `[tokens, hidden]`.
    pub x: &'a F,
    /// Gradient of its output `[tokens, hidden]`.
    pub grad: &'a F,
    /// `[tokens, experts]`: logits, and their gradient in their place.
    pub logits: &'a mut F,
    pub experts: &'a E,
    /// Adapters beside them; `None` when no token goes through one.
    pub adapters: Option<ExpertAdapters<'a, F, A>>,
    pub tokens: usize,
    /// Experts per token, 1 to all.
    pub chosen: usize,
    /// Memory for what lies between.
    pub workspace: MixtureGradWorkspace<'a, F>,
    /// Gradient of `x` `[tokens, hidden]`, but for what comes through the logits.
    pub out: &'a mut F,
    /// The block dtype, to which forward rounds.
    pub round: DType,
}

/// Memory of the gradient of a mixture, of unspecified content before and after.
#[derive(Debug)]
pub struct MixtureGradWorkspace<'a, F: ?Sized> {
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
        let ExpertSizes { experts, hidden, middle } = sizes;
        route::check_chosen(self.chosen, experts)?;
        let (tokens, pairs) = (self.tokens, self.tokens.saturating_mul(self.chosen));
        let lists = list_words(tokens, self.chosen, experts);
        let [first, second] = &self.workspace.given;
        for (what, has, rows, width) in [
            ("x", self.x.len(), tokens, hidden),
            ("grad", self.grad.len(), tokens, hidden),
            ("logits", self.logits.len(), tokens, experts),
            ("gate", self.workspace.gate.len(), pairs, middle),
            ("up", self.workspace.up.len(), pairs, middle),
            ("middle", self.workspace.grad.len(), pairs, middle),
            ("given", first.len(), pairs, hidden),
            ("given", second.len(), pairs, hidden),
            ("weights", self.workspace.weights.len(), tokens, experts),
            ("shares", self.workspace.shares.len(), tokens, experts),
            ("lists", self.workspace.lists.len(), 1, lists),
            ("out", self.out.len(), tokens, hidden),
        ] {
            check_len("experts grad", what, has, rows, width)?;
        }
        Ok(())
    }
}

/// The definition of [`MixtureGrad`].
pub fn reference(
    args: MixtureGrad<'_, [f32], [Expert<WeightView<'_>>], AdapterViews<'_>>,
) -> Result<(), OpError> {
    compose(&mut Definitions, &mut Vec::new(), args)
}

/// Computes the gradient of a mixture from its primitives, expert by expert over the rows that go to
/// it. `gathered` is scratch memory for those rows.
pub(crate) fn compose(
    primitives: &mut impl Primitives,
    gathered: &mut Vec<f32>,
    mut args: MixtureGrad<'_, [f32], [Expert<WeightView<'_>>], AdapterViews<'_>>,
) -> Result<(), OpError> {
    let sizes = sizes_of(args.experts)?;
    args.check(sizes)?;
    if let Some(adapters) = &args.adapters {
        adapters.check(sizes, args.tokens, args.chosen, listed)?;
    }
    let (tokens, experts, width) = (args.tokens, sizes.experts, sizes.hidden);
    let (chosen, round) = (args.chosen, args.round);
    let MixtureGradWorkspace { weights, shares, .. } = &mut args.workspace;
    weights[..tokens * experts].copy_from_slice(&args.logits[..tokens * experts]);
    route::reference(Route { logits: &mut **weights, tokens, experts, chosen, round })?;
    primitives.broadcast(&mut weights[..tokens * experts])?;
    shares[..tokens * experts].fill(0.0);
    args.out[..tokens * width].fill(0.0);
    for (number, expert) in args.experts.iter().enumerate() {
        let (index, weights) =
            tokens_of(&args.workspace.weights[..tokens * experts], number, experts);
        if !index.is_empty() {
            let own = ExpertRows { number, expert, index: &index, round };
            own.backward(primitives, gathered, &mut args, sizes, &weights)?;
        }
    }
    primitives.all_reduce(&mut args.workspace.shares[..tokens * experts])?;
    let (logits, grad) = (&mut *args.logits, &*args.workspace.shares);
    route::reference_grad(RouteGrad { logits, grad, tokens, experts, chosen, round })?;
    primitives.broadcast(&mut args.logits[..tokens * experts])
}

impl ExpertRows<'_, '_> {
    /// Adds what the expert contributes to the gradient of the input, and stores the gradients of
    /// its router weights.
    fn backward(
        &self,
        primitives: &mut impl Primitives,
        gathered: &mut Vec<f32>,
        args: &mut MixtureGrad<'_, [f32], [Expert<WeightView<'_>>], AdapterViews<'_>>,
        sizes: ExpertSizes,
        weights: &[f32],
    ) -> Result<(), OpError> {
        let ExpertSizes { experts, hidden: width, middle } = sizes;
        let MixtureGradWorkspace { gate, up, grad, given: [given, part], shares, .. } =
            &mut args.workspace;
        let (adapters, index) = (&mut args.adapters, self.index);
        let x = self.gather(args.x, width, gathered)?;
        let out = &mut **given;
        route::reference_gather(Gather { x: args.grad, index, width, out })?;
        self.gate_and_up(primitives, adapters, x, gate, up)?;
        self.gradient(primitives, adapters, DOWN, given, grad)?;
        route::reference_gate_dot(GateDot {
            gate: &**gate,
            up: &**up,
            grad: &**grad,
            index,
            width: middle,
            expert: self.number,
            experts,
            out: &mut **shares,
        })?;
        let len = index.len() * middle;
        primitives.silu_mul_grad(SiluMulGrad {
            gate: &mut **gate,
            up: &mut **up,
            grad: &**grad,
            len,
        })?;
        self.gradient(primitives, adapters, 0, gate, given)?;
        self.gradient(primitives, adapters, 1, up, part)?;
        for x in [&**given, &**part] {
            let (out, round) = (&mut *args.out, DType::F32);
            route::reference_scatter_add(ScatterAdd { x, index, weights, width, out, round })?;
        }
        Ok(())
    }

    /// The gradient of the input of the product with matrix `which`, adapters included.
    fn gradient(
        &self,
        primitives: &mut impl Primitives,
        adapters: &mut Option<ExpertAdapters<'_, [f32], AdapterViews<'_>>>,
        which: usize,
        grad: &[f32],
        out: &mut [f32],
    ) -> Result<(), OpError> {
        let (rows, expert) = (self.index.len(), self.expert);
        let weight = [expert.gate, expert.up, expert.down][which];
        primitives.linear_grad(LinearGrad { grad, weight, out: &mut *out, rows })?;
        let Some(adapters) = adapters else {
            return Ok(());
        };
        primitives.lora_grad(LoraGrad {
            grad,
            parts: &self.parts(adapters, which),
            middle: &mut *adapters.middle,
            out,
            rows,
        })
    }
}
