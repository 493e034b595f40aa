//! The part of a block that a gradient needs of its last block: keys and values.

use kernels::ops::Rope;

use super::*;

/// Sends the new tokens of `rows` into a block as far as their keys and values, which are
/// written to `pages`. `hidden` `[tokens, hidden]` is then unspecified. Of what is to be `saved` it
/// leaves the queries where they come with the keys.
///
/// # Errors
/// Those of [`forward`](super::forward).
#[allow(clippy::too_many_arguments, reason = "forward's, and what it leaves")]
pub fn keys<B: Backend>(
    backend: &mut B,
    spec: &BlockSpec,
    weights: &BlockWeights<'_, B>,
    work: &mut Workspace<B>,
    rows: &[StepRow<'_>],
    hidden: &mut B::Floats,
    pages: &mut B::Pages<'_>,
    saved: SavedActivations<'_, B::Floats>,
) -> Result<(), OpError> {
    let Joined { mut pass, normed, heads, .. } = begin(backend, spec, weights, work, rows, hidden)?;
    let QkvWeights::Separate([_, k, v]) = &weights.qkv else {
        pass.heads(normed, heads)?;
        pass.append(heads, pages)?;
        return pass.save(&heads.q, saved.queries, spec.heads * spec.head_dim);
    };
    let outs = [&mut *heads.k, &mut *heads.v];
    pass.products(normed, [k, v], pass.tokens, outs)?;
    pass.norm_keys(heads)?;
    if pass.is_rotated() {
        pass.backend.rope(Rope {
            x: &mut *heads.k,
            table: &*heads.table,
            tokens: pass.tokens,
            heads: spec.kv_heads,
            head_dim: spec.head_dim,
            round: weights.dtype,
            inverse: false,
        })?;
    }
    pass.append_keys(heads, pages)
}
