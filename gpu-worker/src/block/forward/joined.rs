//! One pass over a block, from its first norm to what is added last.

use super::*;

/// A pass and the buffers of its workspace.
pub(super) struct Joined<'a, 'w, B: Backend> {
    pub(super) pass: Pass<'a, 'w, B>,
    pub(super) normed: &'a mut B::Buffer,
    pub(super) branch: &'a mut B::Buffer,
    aside: &'a mut B::Buffer,
    pub(super) heads: &'a mut Heads<B>,
    middle: &'a mut Middle<B>,
}

impl<'a, 'w, B: Backend> Joined<'a, 'w, B> {
    pub(super) fn new(
        backend: &'a mut B,
        spec: &'a BlockSpec,
        weights: &'a BlockWeights<'w, B>,
        work: &'a mut Workspace<B>,
        input: BlockInput<'a>,
    ) -> Self {
        let tokens = total_tokens(input.rows);
        work.grow(backend, spec, tokens, weights.largest_rank);
        let Workspace { normed, branch, aside, heads, middle, rank } = work;
        Joined {
            pass: Pass::new(backend, spec, weights, input, rank),
            normed,
            branch,
            aside,
            heads,
            middle,
        }
    }

    /// Attention and MLP of the hidden states, whose first norm is made; what is to be added to
    /// them at last is left in `branch`.
    pub(super) fn halves(
        &mut self,
        hidden: &mut B::Floats,
        pages: &mut B::Pages<'_>,
        mut saved: SavedActivations<'_, B::Floats>,
    ) -> Result<(), OpError> {
        let Joined { pass, normed, branch, aside, heads, middle } = self;
        pass.heads(normed, heads, pages)?;
        let width = pass.spec.heads * pass.spec.head_dim;
        pass.save(&heads.q, saved.queries.take(), width)?;
        match pass.spec.residual {
            Residual::Sequential => {
                pass.attend(&heads.q, (&mut *heads.attended, None), branch, pages)?;
                pass.add_mlp_norm(hidden, branch, normed)?;
                pass.save(hidden, saved.between.take(), pass.spec.hidden)?;
                pass.mlp(normed, middle, branch, saved)
            }
            Residual::Normed => {
                pass.attend(&heads.q, (&mut *heads.attended, None), branch, pages)?;
                pass.add_mlp_norm(normed, branch, hidden)?;
                pass.save(normed, saved.between.take(), pass.spec.hidden)?;
                pass.mlp(hidden, middle, branch, saved)
            }
            Residual::Parallel => {
                pass.attend_part(&heads.q, (&mut *heads.attended, None), aside, pages)?;
                pass.mlp_norm(hidden, normed)?;
                pass.mlp_part(normed, middle, branch, saved)?;
                let (linear, out) = (&pass.weights.o, &mut **aside);
                let attended = CutProduct { x: &*heads.attended, linear, out };
                match pass.down(middle, branch) {
                    Some(down) => pass.whole([attended, down])?,
                    None => pass.whole([attended])?,
                }
                pass.add(branch, aside)
            }
        }
    }
}
