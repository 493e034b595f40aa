//! Backward of attention, from its output to what its projections are fed.

use super::*;

impl<B: Backend> Backward<'_, '_, '_, B> {
    /// Gradient of attention: `grad` of its output, and what this rank has of that of its input
    /// into `branch`. Queries are where the forward pass saved them, or in `forward_heads`; so is,
    /// if it `is_known`, the output of attention.
    pub(super) fn attention(
        &mut self,
        piece: &mut PieceBuffers<'_, B>,
        grad: &B::Floats,
        is_known: bool,
        pages: &mut B::Pages<'_>,
    ) -> Result<(), OpError> {
        let (spec, weights, tokens) = (self.pass.spec, self.pass.weights, self.pass.tokens);
        let queries = piece.saved.queries.as_deref();
        let (heads, work) = (&mut *piece.forward_heads, &mut *piece.heads);
        self.linear(grad, &weights.o, tokens, &mut work.attended)?;
        let (divisor, alibi) = (self.pass.divisor(), self.pass.alibi());
        self.pass.backend.attention_grad(AttentionGrad {
            q: queries.unwrap_or(&*heads.q),
            grad: &work.attended,
            pages,
            rows: self.pass.rows,
            starts: self.sums.starts,
            group: spec.group(),
            divisor,
            alibi,
            window: spec.window.unwrap_or(usize::MAX),
            known: is_known.then_some(Known { out: &heads.attended, logsum: &work.logsum }),
            q_grad: &mut work.q,
            k_grad: &mut *self.sums.keys,
            v_grad: &mut *self.sums.values,
        })?;
        let positions = self.positions();
        for (sums, part) in [(&*self.sums.keys, &mut work.k), (&*self.sums.values, &mut work.v)] {
            self.pass.backend.gather(Gather {
                x: sums,
                index: &positions,
                width: spec.kv_heads * spec.head_dim,
                out: part,
            })?;
        }
        self.rotate_back(heads, work)?;
        self.norm_heads(piece.normed, heads, work)?;
        self.project(work, piece.branch)
    }

    /// Rows of the sums that are the tokens of this piece.
    fn positions(&self) -> Vec<u32> {
        let rows = self.pass.rows.iter().zip(self.sums.starts);
        rows.flat_map(|(row, start)| {
            let first = start + row.prefix;
            (first..first + row.tokens).map(|p| u32::try_from(p).unwrap_or(u32::MAX))
        })
        .collect()
    }

    fn rotate_back(
        &mut self,
        heads: &Heads<B>,
        work: &mut HeadGradients<B>,
    ) -> Result<(), OpError> {
        let Position::Rope { .. } = self.pass.spec.position else {
            return Ok(());
        };
        for (x, count) in
            [(&mut work.q, self.pass.spec.heads), (&mut work.k, self.pass.spec.kv_heads)]
        {
            self.pass.backend.rope(Rope {
                x,
                table: &heads.table,
                tokens: self.pass.tokens,
                heads: count,
                head_dim: self.pass.spec.head_dim,
                round: DType::F32,
                inverse: true,
            })?;
        }
        Ok(())
    }

    /// Through the norms of the heads, whose inputs are computed once more.
    fn norm_heads(
        &mut self,
        fed: &B::Floats,
        heads: &mut Heads<B>,
        work: &mut HeadGradients<B>,
    ) -> Result<(), OpError> {
        let (spec, tokens) = (self.pass.spec, self.pass.tokens);
        let Some([q_scale, k_scale]) = &self.pass.weights.head_norms else {
            return Ok(());
        };
        match &self.pass.weights.qkv {
            QkvWeights::Separate([q, k, _]) => {
                let outs = [&mut *heads.q, &mut *heads.k];
                self.pass.products(fed, [q, k], tokens, outs)?;
            }
            QkvWeights::Fused(_) => self.pass.project(fed, heads)?,
        }
        for (x, weight, grad, count) in [
            (&heads.q, q_scale, &mut work.q, spec.heads),
            (&heads.k, k_scale, &mut work.k, spec.kv_heads),
        ] {
            self.pass.backend.norm_grad(NormGrad {
                x,
                weight,
                grad,
                rows: tokens * count,
                width: spec.head_dim,
                eps: spec.norm.eps(),
                centered: false,
            })?;
        }
        Ok(())
    }

    fn project(&mut self, work: &mut HeadGradients<B>, out: &mut B::Floats) -> Result<(), OpError> {
        let (spec, tokens) = (self.pass.spec, self.pass.tokens);
        match &self.pass.weights.qkv {
            QkvWeights::Separate([q, k, v]) => {
                self.linear(&work.q, q, tokens, out)?;
                self.linear(&work.k, k, tokens, &mut work.part)?;
                self.add(out, &work.part)?;
                self.linear(&work.v, v, tokens, &mut work.part)?;
                self.add(out, &work.part)
            }
            QkvWeights::Fused(qkv) => {
                self.pass.backend.join_qkv(JoinQkv {
                    fused: &mut work.fused,
                    q: &work.q,
                    k: &work.k,
                    v: &work.v,
                    tokens,
                    kv_heads: spec.kv_heads,
                    group: spec.group(),
                    head_dim: spec.head_dim,
                })?;
                self.linear(&work.fused, qkv, tokens, out)
            }
        }
    }
}
