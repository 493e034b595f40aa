//! The order of the steps back, which differs by what the block adds to what.

use super::*;

const NO_NORM: OpError =
    OpError::Shape { op: "backward", what: "the MLP of a block that is not parallel has a norm" };

/// Intermediate results of one piece, all `[tokens, hidden]` where nothing else is said.
pub(super) struct PieceBuffers<'a, B: Backend> {
    /// The input of the block, with its prompts.
    pub(super) before: &'a B::Floats,
    /// Its norm, which attention is fed.
    pub(super) normed: &'a B::Floats,
    /// The output of attention.
    pub(super) attended: &'a mut B::Floats,
    pub(super) forward_heads: &'a mut Heads<B>,
    pub(super) forward_middle: &'a mut Forward<B>,
    /// The hidden states between attention and MLP.
    pub(super) h: &'a mut B::Floats,
    /// What the MLP is fed.
    pub(super) fed: &'a mut B::Floats,
    /// Gradient of the input of one branch, and of the other one.
    pub(super) branch: &'a mut B::Floats,
    pub(super) aside: &'a mut B::Floats,
    pub(super) heads: &'a mut HeadGradients<B>,
    pub(super) middle: &'a mut Middle<B>,
    pub(super) saved: SavedActivations<'a, B::Floats>,
}

impl<B: Backend> Backward<'_, '_, '_, B> {
    /// h = x + A(n(x)), y = h + M(m(h)).
    pub(super) fn sequential(
        &mut self,
        mut piece: PieceBuffers<'_, B>,
        gradient: &mut B::Floats,
        pages: &mut B::Pages<'_>,
    ) -> Result<(), OpError> {
        let weights = self.pass.weights;
        let norm = weights.mlp_norm.as_ref().ok_or(NO_NORM)?;
        let (before, is_attended) = (piece.before, piece.saved.between.is_none());
        self.states_between(&mut piece, before, pages)?;
        self.mlp_branch(&mut piece, gradient)?;
        self.norm(piece.h, norm, piece.branch)?;
        self.add(gradient, piece.branch)?;
        self.attention_branch(&mut piece, gradient, is_attended, pages)?;
        self.norm(before, &weights.attention_norm, piece.branch)?;
        self.add(gradient, piece.branch)
    }

    /// a = n(x), h = a + A(a), b = m(h), y = b + M(b).
    pub(super) fn normed(
        &mut self,
        mut piece: PieceBuffers<'_, B>,
        gradient: &mut B::Floats,
        pages: &mut B::Pages<'_>,
    ) -> Result<(), OpError> {
        let weights = self.pass.weights;
        let norm = weights.mlp_norm.as_ref().ok_or(NO_NORM)?;
        let (normed, is_attended) = (piece.normed, piece.saved.between.is_none());
        self.states_between(&mut piece, normed, pages)?;
        self.mlp_branch(&mut piece, gradient)?;
        self.add(gradient, piece.branch)?;
        self.norm(piece.h, norm, gradient)?;
        self.attention_branch(&mut piece, gradient, is_attended, pages)?;
        self.add(gradient, piece.branch)?;
        self.norm(piece.before, &weights.attention_norm, gradient)
    }

    /// y = x + A(n(x)) + M(m(x)), or M(n(x)) in a block of one norm.
    pub(super) fn parallel(
        &mut self,
        mut piece: PieceBuffers<'_, B>,
        gradient: &mut B::Floats,
        pages: &mut B::Pages<'_>,
    ) -> Result<(), OpError> {
        let weights = self.pass.weights;
        let mlp_norm = weights.mlp_norm.as_ref();
        let fed = match mlp_norm {
            Some(norm) => {
                self.pass.norm(piece.before, norm, piece.fed)?;
                &*piece.fed
            }
            None => piece.normed,
        };
        let given = [piece.saved.gate.take(), piece.saved.up.take()];
        self.mlp(fed, gradient, given, piece.forward_middle, piece.middle, piece.aside)?;
        self.attention(&mut piece, gradient, false, pages)?;
        match mlp_norm {
            _ if !self.mlp_is_part() => self.sum(&mut [&mut *piece.branch])?,
            Some(_) => self.sum(&mut [&mut *piece.branch, &mut *piece.aside])?,
            // Both go through one norm, so that their sum crosses.
            None => {
                self.add(piece.branch, piece.aside)?;
                self.sum(&mut [&mut *piece.branch])?;
            }
        }
        match mlp_norm {
            Some(norm) => self.norm(piece.before, norm, piece.aside)?,
            None if self.mlp_is_part() => {}
            None => self.add(piece.branch, piece.aside)?,
        }
        self.norm(piece.before, &weights.attention_norm, piece.branch)?;
        self.add(gradient, piece.branch)?;
        match mlp_norm {
            Some(_) => self.add(gradient, piece.aside),
            None => Ok(()),
        }
    }

    /// Puts the states between attention and MLP into `h`, saved or recomputed, and their norm into
    /// `fed` if the MLP needs it. `x` is what the output of attention is added to.
    fn states_between<'a>(
        &mut self,
        piece: &mut PieceBuffers<'a, B>,
        x: &'a B::Floats,
        pages: &mut B::Pages<'_>,
    ) -> Result<(), OpError> {
        if let Some(saved) = piece.saved.between.take() {
            piece.h = saved;
            return match piece.saved.gate {
                Some(_) => Ok(()),
                None => self.pass.mlp_norm(piece.h, piece.fed),
            };
        }
        self.pass.backend.copy(x, piece.h, self.pass.tokens * self.pass.spec.hidden)?;
        let Heads { q, attended, .. } = &mut *piece.forward_heads;
        let queries = piece.saved.queries.as_deref().unwrap_or(&**q);
        self.pass.attend(queries, attended, Some(&mut *piece.heads.logsum), pages)?;
        self.pass.out_of(attended, piece.attended)?;
        self.pass.add_mlp_norm(piece.h, piece.attended, piece.fed)
    }

    /// Gradient of the MLP's input, into `branch`.
    fn mlp_branch(
        &mut self,
        piece: &mut PieceBuffers<'_, B>,
        grad: &B::Floats,
    ) -> Result<(), OpError> {
        let given = [piece.saved.gate.take(), piece.saved.up.take()];
        self.mlp(piece.fed, grad, given, piece.forward_middle, piece.middle, piece.branch)?;
        match self.mlp_is_part() {
            true => self.sum(&mut [&mut *piece.branch]),
            false => Ok(()),
        }
    }

    /// Whether the gradient of the MLP's input is what one rank has of it. Of a mixture it is whole, as
    /// its router is.
    fn mlp_is_part(&self) -> bool {
        !matches!(self.pass.weights.mlp, MlpWeights::Experts { .. })
    }

    /// Gradient of attention's input, into `branch`. `is_attended`: attention was recomputed, and
    /// its output is at hand.
    fn attention_branch(
        &mut self,
        piece: &mut PieceBuffers<'_, B>,
        grad: &B::Floats,
        is_attended: bool,
        pages: &mut B::Pages<'_>,
    ) -> Result<(), OpError> {
        self.attention(piece, grad, is_attended, pages)?;
        self.sum(&mut [&mut *piece.branch])
    }
}
