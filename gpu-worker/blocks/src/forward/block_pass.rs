//! One pass over a block, from its first norm to what is added last.

use super::*;

/// A pass and the buffers of its workspace.
pub(super) struct Joined<'a, 'w, B: Backend> {
    pub(super) pass: Pass<'a, 'w, B>,
    pub(super) normed: &'a mut B::Buffer,
    pub(super) branch: &'a mut B::Buffer,
    aside: &'a mut B::Buffer,
    beside: &'a mut B::Buffer,
    pub(super) heads: &'a mut Heads<B>,
    middle: &'a mut Middle<B>,
}

impl<'a, 'w, B: Backend> Joined<'a, 'w, B> {
    pub(super) fn new(
        backend: &'a mut B,
        spec: &'a BlockSpec,
        weights: &'a BlockWeights<'w, B>,
        work: &'a mut Workspace<B>,
        rows: &'a [StepRow<'a>],
    ) -> Self {
        let tokens = total_tokens(rows);
        work.grow(backend, spec, tokens, weights.largest_rank);
        let Workspace { normed, branch, aside, beside, heads, middle, rank } = work;
        Joined {
            pass: Pass::new(backend, spec, weights, rows, rank),
            normed,
            branch,
            aside,
            beside,
            heads,
            middle,
        }
    }

    /// Attention and MLP of a step in a run: to the hidden states is first added what the block
    /// before has left in `branch`; what is to be added to them at last is left there again.
    pub(super) fn step(
        &mut self,
        hidden: &mut B::Floats,
        pages: &mut B::Pages<'_>,
    ) -> Result<(), OpError> {
        let Joined { pass, normed, branch, beside, heads, middle, .. } = self;
        if pass.spec.residual != Residual::Sequential {
            pass.add_norm(hidden, branch, &pass.weights.attention_norm, normed)?;
            return self.halves(hidden, pages, SavedActivations::default());
        }
        let first = pass.heads_of_sum(hidden, branch, beside, normed, heads)?;
        pass.attend_new(heads, None, pages)?;
        pass.out_of(&heads.attended, branch)?;
        // The states are where the first sum is, and the other place is free.
        let (states, free): (&mut B::Floats, &mut B::Floats) = match first {
            SumPlace::X => (&mut *hidden, &mut **beside),
            SumPlace::Sum => (&mut **beside, &mut *hidden),
        };
        let second = pass.mlp_of_sum(states, branch, free, normed, middle)?;
        match first == second {
            true => Ok(()),
            false => pass.backend.copy(beside, hidden, pass.tokens * pass.spec.hidden),
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
        let Joined { pass, normed, branch, aside, heads, middle, .. } = self;
        pass.heads(normed, heads)?;
        pass.attend_new(heads, saved.queries.take(), pages)?;
        match pass.spec.residual {
            Residual::Sequential => {
                pass.out_of(&heads.attended, branch)?;
                pass.add_mlp_norm(hidden, branch, normed)?;
                pass.save(hidden, saved.between.take(), pass.spec.hidden)?;
                pass.mlp(normed, middle, branch, saved)
            }
            Residual::Normed => {
                pass.out_of(&heads.attended, branch)?;
                pass.add_mlp_norm(normed, branch, hidden)?;
                pass.save(normed, saved.between.take(), pass.spec.hidden)?;
                pass.mlp(hidden, middle, branch, saved)
            }
            Residual::Parallel => {
                pass.part(&heads.attended, &pass.weights.o, pass.tokens, aside)?;
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
