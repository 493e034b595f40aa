//! The norms of a pass.

use super::*;

impl<'a, 'w, B: Backend> Pass<'a, 'w, B> {
    /// Norms each head of the queries. What was normed stays in `attended`.
    pub(crate) fn norm_queries(&mut self, heads: &mut Heads<B>) -> Result<(), OpError> {
        let Some([scale, _]) = &self.weights.head_norms else {
            return Ok(());
        };
        std::mem::swap(&mut heads.q, &mut heads.attended);
        self.norm_each(&heads.attended, scale, &mut heads.q, self.spec.heads)
    }

    /// Norms each head of the keys. What was normed stays in `normed_k`.
    pub(crate) fn norm_keys(&mut self, heads: &mut Heads<B>) -> Result<(), OpError> {
        let Some([_, scale]) = &self.weights.head_norms else {
            return Ok(());
        };
        std::mem::swap(&mut heads.k, &mut heads.normed_k);
        self.norm_each(&heads.normed_k, scale, &mut heads.k, self.spec.kv_heads)
    }

    fn norm_each(
        &mut self,
        x: &B::Floats,
        weight: &B::Floats,
        out: &mut B::Floats,
        heads: usize,
    ) -> Result<(), OpError> {
        self.backend.rmsnorm(Rmsnorm {
            x,
            weight,
            out,
            rows: self.tokens * heads,
            width: self.spec.head_dim,
            eps: self.spec.norm.eps(),
            round: self.weights.dtype,
        })
    }

    /// The norm before the MLP; without one, `out` stays what attention was fed.
    pub(crate) fn mlp_norm(&mut self, x: &B::Floats, out: &mut B::Floats) -> Result<(), OpError> {
        match &self.weights.mlp_norm {
            Some(weights) => self.norm(x, weights, out),
            None => Ok(()),
        }
    }

    pub(crate) fn norm(
        &mut self,
        x: &B::Floats,
        weights: &NormWeights<B>,
        out: &mut B::Floats,
    ) -> Result<(), OpError> {
        let (rows, width, round) = (self.tokens, self.spec.hidden, self.weights.dtype);
        let (eps, weight) = (self.spec.norm.eps(), &weights.scale);
        match &weights.bias {
            None => self.backend.rmsnorm(Rmsnorm { x, weight, out, rows, width, eps, round }),
            Some(bias) => {
                self.backend.layernorm(Layernorm { x, weight, bias, out, rows, width, eps, round })
            }
        }
    }

    /// Adds `y` to `x`, and norms the sum for the MLP, if there is a norm; without one, `out`
    /// stays.
    pub(crate) fn add_mlp_norm(
        &mut self,
        x: &mut B::Floats,
        y: &B::Floats,
        out: &mut B::Floats,
    ) -> Result<(), OpError> {
        match &self.weights.mlp_norm {
            Some(weights) => self.add_norm(x, y, weights, out),
            None => self.add(x, y),
        }
    }

    /// Adds `y` to `x`, and norms the sum.
    pub(super) fn add_norm(
        &mut self,
        x: &mut B::Floats,
        y: &B::Floats,
        weights: &NormWeights<B>,
        out: &mut B::Floats,
    ) -> Result<(), OpError> {
        let args = self.norm_of_sum(x, y, weights, out);
        self.backend.add_norm(args)
    }

    /// [`add_norm`](Self::add_norm) as arguments.
    pub(super) fn norm_of_sum<'n>(
        &self,
        x: &'n mut B::Floats,
        y: &'n B::Floats,
        weights: &'n NormWeights<B>,
        out: &'n mut B::Floats,
    ) -> AddNorm<'n, B::Floats> {
        AddNorm {
            x,
            y,
            weight: &*weights.scale,
            bias: weights.bias.as_deref(),
            out,
            rows: self.tokens,
            width: self.spec.hidden,
            eps: self.spec.norm.eps(),
            round: self.weights.dtype,
        }
    }
}
