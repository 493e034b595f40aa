//! The MLP of a block: plain, gated, or a mixture of experts.

use super::*;

impl<B: Backend> Pass<'_, '_, B> {
    /// The MLP of `x` `[tokens, hidden]` into `out`, shaped alike.
    pub(super) fn mlp(
        &mut self,
        x: &B::Floats,
        middle: &mut Middle<B>,
        out: &mut B::Floats,
        kept: Kept<'_, B::Floats>,
    ) -> Result<(), OpError> {
        let (weights, tokens, round) = (self.weights, self.tokens, self.weights.dtype);
        let wide = self.spec.mlp.intermediate();
        match &weights.mlp {
            MlpWeights::Gated(mlp) => {
                let Middle { gate, up, .. } = middle;
                self.products(x, [&mlp.gate, &mlp.up], tokens, [&mut *gate, &mut *up])?;
                self.keep(gate, kept.gate, wide)?;
                self.keep(up, kept.up, wide)?;
                self.gated_output(mlp, tokens, gate, up, out)
            }
            MlpWeights::Plain {
                activation,
                up,
                down,
            } => {
                self.linear(x, up, tokens, &mut middle.gate)?;
                self.keep(&middle.gate, kept.gate, wide)?;
                self.backend.gelu(Gelu {
                    x: &mut middle.gate,
                    len: tokens * wide,
                    kind: *activation,
                    round,
                })?;
                self.linear(&middle.gate, down, tokens, out)
            }
            MlpWeights::Experts {
                router,
                chosen,
                experts,
                together,
            } => {
                self.linear(x, router, tokens, &mut middle.logits)?;
                if self.adapts(experts) {
                    let Middle { logits, choice, .. } = middle;
                    self.choose(logits, *chosen, experts.len(), choice)?;
                    return self.experts(x, experts, middle, out);
                }
                self.backend.mixture(Mixture {
                    x,
                    logits: &mut middle.logits,
                    experts: together,
                    tokens,
                    chosen: *chosen,
                    room: ExpertsRoom {
                        gate: &mut middle.gate,
                        up: &mut middle.up,
                        given: &mut middle.given,
                        lists: &mut middle.lists,
                    },
                    out,
                    round,
                })
            }
        }
    }

    /// Turns logits into the weights of the experts, and takes them to the host.
    pub(in crate::block) fn choose(
        &mut self,
        logits: &mut B::Floats,
        chosen: usize,
        experts: usize,
        choice: &mut Choice,
    ) -> Result<(), OpError> {
        self.backend.route(Route {
            logits: &mut *logits,
            tokens: self.tokens,
            experts,
            chosen,
            round: self.weights.dtype,
        })?;
        choice.weights.resize(self.tokens * experts, 0.0);
        self.backend.download(logits, &mut choice.weights)
    }

    /// Whether an adapter of these tokens adds to a matrix of an expert.
    fn adapts(&self, experts: &[GatedWeights<'_, B>]) -> bool {
        let of = |linear: &Linear<'_, B>| linear.adapts(&self.adapted);
        let any = |e: &GatedWeights<'_, B>| [&e.gate, &e.up, &e.down].into_iter().any(of);
        !self.adapted.is_empty() && experts.iter().any(any)
    }

    /// The sum over the experts in their order, each over the tokens that go to it.
    fn experts(
        &mut self,
        x: &B::Floats,
        experts: &[GatedWeights<'_, B>],
        middle: &mut Middle<B>,
        out: &mut B::Floats,
    ) -> Result<(), OpError> {
        let Middle {
            gate,
            up,
            taken,
            given,
            choice,
            ..
        } = middle;
        let (width, round) = (self.spec.hidden, self.weights.dtype);
        self.backend.upload(&vec![0.0; self.tokens * width], out)?;
        let whole = std::mem::take(&mut self.adapted);
        for (number, expert) in experts.iter().enumerate() {
            if !choice.select(number, experts.len()) {
                continue;
            }
            self.backend.gather(Gather {
                x,
                index: &choice.index,
                width,
                out: &mut *taken,
            })?;
            self.adapted = adapters::taken(&whole, &choice.index);
            let (rows, both) = (choice.index.len(), [&expert.gate, &expert.up]);
            self.products(taken, both, rows, [&mut *gate, &mut *up])?;
            self.gated_output(expert, rows, gate, up, given)?;
            self.backend.scatter_add(ScatterAdd {
                x: given,
                index: &choice.index,
                weights: &choice.shares,
                width,
                out: &mut *out,
                round,
            })?;
        }
        self.adapted = whole;
        Ok(())
    }

    /// Of the two products of a gated MLP, its output; `gate` is used up.
    fn gated_output(
        &mut self,
        weights: &GatedWeights<'_, B>,
        rows: usize,
        gate: &mut B::Floats,
        up: &B::Floats,
        out: &mut B::Floats,
    ) -> Result<(), OpError> {
        self.backend.silu_mul(SiluMul {
            gate: &mut *gate,
            up,
            len: rows * self.spec.mlp.intermediate(),
            round: self.weights.dtype,
        })?;
        self.linear(gate, &weights.down, rows, out)
    }
}
