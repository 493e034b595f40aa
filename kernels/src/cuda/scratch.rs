//! Scratch memory that the operations of a block take of a device, by the dimensions of the block.
//! Whoever plans the memory of a device asks here.

use shared::model::BlockDimensions;

use crate::tuning;

/// Longest row whose attention is planned for. A longer one may take memory when it comes, up to
/// the limit of [`tuning`].
const PLANNED_POSITIONS: usize = 32 << 10;

/// Bytes of all scratch memory for units of at most `unit_tokens` tokens, forward and backward, of
/// recorded decode steps, and of the upload of weights, which may stay in the pool.
pub fn planned_bytes(block: &BlockDimensions, unit_tokens: [usize; 2]) -> u64 {
    let units: usize = scratch_bytes(block, unit_tokens, PLANNED_POSITIONS).iter().sum();
    (units + tuning::CUDA_STEP_WORKSPACE_BYTES + tuning::CUDA_REPACK_BYTES) as u64
}

/// Scratch buffers that operations of units of at most `unit_tokens` tokens, forward and backward,
/// have at the same time, or one after the other: partial results of attention for the largest batch
/// of decode steps over rows of `positions` positions, numbers rounded for the tensor cores, what
/// attention backward leaves per query, sums of segments of gradients, and what attention backward
/// leaves per query and key; of parallel blocks what attention gives, which others have at hand.
pub fn scratch_bytes(
    block: &BlockDimensions,
    unit_tokens: [usize; 2],
    positions: usize,
) -> [usize; 9] {
    let positions = positions.min(PLANNED_POSITIONS);
    let [forward, back] = unit_tokens;
    let q = block.heads * block.head_dim;
    // A page for each token at most.
    let changes = match tuning::CUDA_ATTENTION_GRAD_DIMS.contains(&block.head_dim) {
        true => tuning::cuda_attention_grad_workspace(back * block.heads, PLANNED_POSITIONS),
        false => 0,
    };
    let computed_again = if block.is_parallel { 4 * back } else { 0 };
    // A token of a mixture is rounded once for each of its experts.
    let widest = block.experts_per_token * block.intermediate.max(block.hidden);
    let widest = widest.max(q + block.fused_outputs());
    [
        tuning::cuda_attention_workspace(block.heads, block.head_dim, positions),
        2 * widest.next_multiple_of(32) * forward.max(back).next_multiple_of(128),
        2 * q * back,
        2 * q * back,
        16 * block.heads * back,
        gradient_sums(block),
        changes,
        computed_again * q,
        computed_again * block.heads,
    ]
}

/// Sums of segments of the gradient of a product of few rows: the most of any matrix.
fn gradient_sums(block: &BlockDimensions) -> usize {
    let q = block.heads * block.head_dim;
    let (hidden, inner) = (block.hidden, block.intermediate);
    let matrices =
        [(q + block.fused_outputs(), hidden), (hidden, q), (inner, hidden), (hidden, inner)];
    let sums = |&(outputs, inputs): &(usize, usize)| {
        tuning::cuda_linear_grad_sums(outputs, inputs, tuning::CUDA_LINEAR_GRAD_GEMV_ROWS)
    };
    matrices.iter().map(sums).max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scratch_of_the_largest_llama_2_is_as_computed_by_hand() {
        let block = BlockDimensions {
            hidden: 8192,
            heads: 64,
            kv_heads: 8,
            head_dim: 128,
            intermediate: 28672,
            experts_per_token: 1,
            is_fused: false,
            is_parallel: false,
        };
        let scratch = scratch_bytes(&block, [256, 256], 1 << 20);
        assert_eq!(scratch[0], 512 << 20, "attention over more positions than are planned");
        assert_eq!(scratch[1], 2 * 28672 * 256);
        assert_eq!(scratch[2..5], [4 << 20, 4 << 20, 256 << 10]);
        assert_eq!(scratch[5], 32 * 28672 * 2 * 4, "two segments of the matrix with most inputs");
        assert_eq!(scratch[6], 64 << 20);
        assert_eq!(scratch[7..], [0, 0]);
        let planned: usize = scratch.iter().sum::<usize>() + (128 << 20) + (4 << 20);
        assert_eq!(planned_bytes(&block, [256, 256]), planned as u64);
        let parallel = BlockDimensions { is_parallel: true, ..block };
        assert_eq!(scratch_bytes(&parallel, [256, 256], 16)[7..], [8 << 20, 64 << 10]);
    }
}
