//! The MLP of a block: plain, gated, or a mixture of experts.

use super::*;

impl<'a, 'w, B: Backend> Pass<'a, 'w, B> {
    /// The MLP of `x` `[tokens, hidden]` into `out`, shaped alike.
    pub(super) fn mlp(
        &mut self,
        x: &B::Floats,
        middle: &mut Middle<B>,
        out: &mut B::Floats,
        saved: SavedActivations<'_, B::Floats>,
    ) -> Result<(), OpError> {
        self.mlp_part(x, middle, out, saved)?;
        match self.down(middle, out) {
            Some(down) => self.whole([down]),
            None => Ok(()),
        }
    }

    /// The norm of `x` and `branch`, whose sum goes to `x` or `beside`, and the MLP of it, into
    /// `branch`.
    pub(super) fn mlp_of_sum(
        &mut self,
        x: &mut B::Floats,
        branch: &mut B::Floats,
        beside: &mut B::Floats,
        normed: &mut B::Floats,
        middle: &mut Middle<B>,
    ) -> Result<SumPlace, OpError> {
        let weights = self.weights;
        let (mlp, norm) = match (&weights.mlp, &weights.mlp_norm) {
            (MlpWeights::Gated(mlp), Some(norm)) if !self.is_adapted([&mlp.gate, &mlp.up]) => {
                (mlp, norm)
            }
            _ => {
                self.add_mlp_norm(x, branch, normed)?;
                self.mlp(normed, middle, branch, SavedActivations::default())?;
                return Ok(SumPlace::X);
            }
        };
        let Middle { gate, up, .. } = &mut *middle;
        let mut parts = [product(&mlp.gate, &mut **gate), product(&mlp.up, &mut **up)];
        let norm = self.norm_of_sum(x, branch, norm, normed);
        let (sum, parts, is_gated) = (beside, &mut parts[..], true);
        let place = self.backend.normed_products(NormedProducts { norm, sum, parts, is_gated })?;
        self.part(&middle.gate, &mlp.down, self.tokens, branch)?;
        if let Some(down) = self.down(middle, branch) {
            self.whole([down])?;
        }
        Ok(place)
    }

    /// What [`mlp_part`](Self::mlp_part) left to [`whole`](Self::whole); nothing of experts.
    pub(super) fn down<'p>(
        &self,
        middle: &'p Middle<B>,
        out: &'p mut B::Floats,
    ) -> Option<CutProduct<'p, 'w, B>>
    where
        'a: 'p,
    {
        let linear = match &self.weights.mlp {
            MlpWeights::Gated(mlp) => &mlp.down,
            MlpWeights::Plain { down, .. } => down,
            MlpWeights::Experts { .. } => return None,
        };
        Some(CutProduct { x: &*middle.gate, linear, out })
    }

    /// [`mlp`](Self::mlp) but for [`whole`](Self::whole).
    pub(super) fn mlp_part(
        &mut self,
        x: &B::Floats,
        middle: &mut Middle<B>,
        out: &mut B::Floats,
        saved: SavedActivations<'_, B::Floats>,
    ) -> Result<(), OpError> {
        let (weights, tokens, round) = (self.weights, self.tokens, self.weights.dtype);
        let wide = self.spec.mlp.intermediate();
        match &weights.mlp {
            MlpWeights::Gated(mlp) => {
                let Middle { gate, up, .. } = middle;
                let is_adapted = self.is_adapted([&mlp.gate, &mlp.up]);
                if is_adapted || saved.gate.is_some() || saved.up.is_some() {
                    self.products(x, [&mlp.gate, &mlp.up], tokens, [&mut *gate, &mut *up])?;
                    self.save(gate, saved.gate, wide)?;
                    self.save(up, saved.up, wide)?;
                    let (gate, up, len) = (&mut **gate, &**up, tokens * wide);
                    self.backend.silu_mul(SiluMul { gate, up, len, round })?;
                } else {
                    let parts = [product(&mlp.gate, gate), product(&mlp.up, up)];
                    self.backend.gated(Gated { x, rows: tokens, parts, round })?;
                }
                self.part(gate, &mlp.down, tokens, out)
            }
            MlpWeights::Plain { activation, up, down } => {
                self.linear(x, up, tokens, &mut middle.gate)?;
                self.save(&middle.gate, saved.gate, wide)?;
                self.backend.gelu(Gelu {
                    x: &mut middle.gate,
                    len: tokens * wide,
                    kind: *activation,
                    round,
                })?;
                self.part(&middle.gate, down, tokens, out)
            }
            MlpWeights::Experts { router, chosen, experts, together, adapters } => {
                self.linear(x, router, tokens, &mut middle.logits)?;
                let adapters = adapters_of(experts, adapters, &self.adapted, self.rank);
                self.backend.mixture(Mixture {
                    x,
                    logits: &mut middle.logits,
                    experts: together,
                    adapters,
                    tokens,
                    chosen: *chosen,
                    workspace: MixtureWorkspace {
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
}

/// The adapters beside the matrices of experts, if one of these tokens may go through one; `middle`
/// is memory for them.
pub(crate) fn adapters_of<'a, 'w, B: Backend>(
    experts: &[GatedWeights<'w, B>],
    tables: &'a [Option<B::Adapters<'w>>; 3],
    of_tokens: &'a [Option<u32>],
    middle: &'a mut B::Floats,
) -> Option<ExpertAdapters<'a, B::Floats, B::Adapters<'w>>> {
    let is_adapted = !of_tokens.is_empty() && tables.iter().any(Option::is_some);
    is_adapted.then(|| ExpertAdapters {
        tables: tables.each_ref().map(Option::as_ref),
        count: experts.first().map_or(0, |e| e.gate.adapters.len()),
        of_tokens,
        middle,
    })
}
