//! Backward of the MLP: plain, gated, or a mixture of experts.

use super::*;

impl<B: Backend> Backward<'_, '_, '_, B> {
    /// Gradient of the MLP: `grad` of its output, `out` what this rank has of that of its input `fed`;
    /// of a mixture all. What its activation takes is `given`, or computed of `fed` into `of`.
    pub(super) fn mlp(
        &mut self,
        fed: &B::Floats,
        grad: &B::Floats,
        given: [Option<&mut B::Floats>; 2],
        of: &mut Forward<B>,
        work: &mut Middle<B>,
        out: &mut B::Floats,
    ) -> Result<(), OpError> {
        let (weights, tokens) = (self.pass.weights, self.pass.tokens);
        match &weights.mlp {
            MlpWeights::Gated(mlp) => {
                let [gate, up] = match given {
                    [Some(gate), Some(up)] => [gate, up],
                    _ => {
                        let outs = [&mut *of.gate, &mut *of.up];
                        self.pass.products(fed, [&mlp.gate, &mlp.up], tokens, outs)?;
                        [&mut *of.gate, &mut *of.up]
                    }
                };
                self.linear(grad, &mlp.down, tokens, &mut work.grad)?;
                self.gated_input(mlp, tokens, [&mut *gate, up], &work.grad, &mut work.part)?;
                self.linear(gate, &mlp.gate, tokens, out)?;
                self.add(out, &work.part)
            }
            MlpWeights::Plain { activation, up, down } => {
                let [given, _] = given;
                let x = match given {
                    Some(given) => given,
                    None => {
                        self.pass.linear(fed, up, tokens, &mut of.gate)?;
                        &mut *of.gate
                    }
                };
                self.linear(grad, down, tokens, &mut work.grad)?;
                self.pass.backend.gelu_grad(GeluGrad {
                    x,
                    grad: &mut work.grad,
                    len: tokens * self.pass.spec.mlp.intermediate(),
                    kind: *activation,
                })?;
                self.linear(&work.grad, up, tokens, out)
            }
            MlpWeights::Experts { router, chosen, experts, together, adapters } => {
                self.pass.linear(fed, router, tokens, &mut work.logits)?;
                let pass = &mut self.pass;
                let adapters = adapters_of(experts, adapters, &pass.adapted, &mut *pass.rank);
                pass.backend.mixture_grad(MixtureGrad {
                    x: fed,
                    grad,
                    logits: &mut work.logits,
                    experts: together,
                    adapters,
                    tokens,
                    chosen: *chosen,
                    workspace: MixtureGradWorkspace {
                        gate: &mut of.gate,
                        up: &mut of.up,
                        grad: &mut work.grad,
                        given: [&mut of.given, &mut work.part],
                        weights: &mut work.weights,
                        shares: &mut work.shares,
                        lists: &mut of.lists,
                    },
                    out,
                    round: weights.dtype,
                })?;
                // The router is whole on every rank.
                self.sum(&mut [&mut *out])?;
                self.linear(&work.logits, router, tokens, &mut work.part)?;
                self.add(out, &work.part)
            }
        }
    }

    /// Turns gate and up into their gradients, `grad` being that of their product, and that of up
    /// into the input's part of it.
    fn gated_input(
        &mut self,
        mlp: &GatedWeights<'_, B>,
        rows: usize,
        [gate, up]: [&mut B::Floats; 2],
        grad: &B::Floats,
        part: &mut B::Floats,
    ) -> Result<(), OpError> {
        self.pass.backend.silu_mul_grad(SiluMulGrad {
            gate,
            up: &mut *up,
            grad,
            len: rows * self.pass.spec.mlp.intermediate(),
        })?;
        self.linear(up, &mlp.up, rows, part)
    }
}
