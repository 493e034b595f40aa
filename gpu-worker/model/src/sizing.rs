//! Memory, counted: sizes of units of work with what a device needs for them, from a [`BlockSpec`],
//! and what a whole instance [`Need`]s, from the facts of a model. Pure arithmetic: the supervisor
//! decides with it how many blocks fit, prepare plans with it before anything is loaded, and the
//! worker checks its device with it before it loads.

mod need;

pub use need::{GRAPH_LAUNCH_BYTES, Machine, Need, Sharing, graph_block_bytes, step_kv_bytes};
use shared::job::WorkKind;
use shared::model::{MAX_STEP_TOKENS, PAGE_TOKENS};

use crate::spec::{BlockSpec, Mlp};

/// Multiplications and additions of a unit of forward: about 20 ms of a small machine.
const UNIT_FLOPS: u64 = 2_000_000_000;

/// Work of a unit of gradients, in units of forward of as many tokens: that again, two gradients of
/// attention, one of each matrix.
pub const BACK_COST: usize = 4;

/// Most tokens of one decode unit; more wait for the next. Far beyond where one more row is free of
/// cost.
pub const BATCH_TOKENS: usize = 128;

/// Values of the hidden states of one job that a device keeps; larger jobs are on the host between
/// their units. At most one job of each class other than decode has begun at a time, so that these
/// are some 200 MB at most.
pub const RESIDENT_VALUES: usize = 16 << 20;

/// Buffers are rounded up to size classes, a quarter apart.
const ROUNDING: (u64, u64) = (5, 4);

/// Small arrays of a step: rows and page tables, frequencies, the pages of a rehearsal.
const SMALL_BYTES: u64 = 16 << 20;

/// Hidden states of jobs that are begun, which [`RESIDENT_VALUES`] bounds per job.
const STATES_BYTES: u64 = 192 << 20;

/// Tokens of the largest job for gradients whose gradients stay on the device, if its hidden states
/// do.
const RESIDENT_TOKENS: usize = 4096;

/// A job's pages and inputs stay on the device as far as they are those of so many tokens and
/// blocks, and no more bytes.
const RESIDENT_INPUTS: (usize, usize) = (1024, 32);
const RESIDENT_BYTES: usize = 256 << 20;

/// Most bytes of the buffers of a unit, there and on the way back, and most tokens: as many as keep
/// all multiprocessors busy.
const UNIT_BYTES: [usize; 2] = [192 << 20, 384 << 20];
const MOST_UNIT_TOKENS: usize = 1024;

/// Bytes that a worker takes of its device for its largest units, forward and backward, of so many
/// tokens ([`unit_tokens`] of whole blocks): every buffer of both passes at once, and
/// `scratch_bytes` of the operations themselves (package `kernels`,
/// `cuda::scratch::planned_bytes`). `spec` is that of the blocks as they run on the device: whole, or
/// the share of a rank.
pub fn work_bytes(spec: &BlockSpec, unit_tokens: [usize; 2], scratch_bytes: u64) -> u64 {
    let [forward_rows, back_rows] = unit_tokens;
    let forward = forward_width(spec);
    let gradients = (spec.hidden + 2 * spec.kv_heads * spec.head_dim) * resident_tokens(spec);
    let floats = (forward + spec.hidden) * forward_rows
        + (forward + back_width(spec)) * back_rows
        + gradients
        + 2 * spec.kv_heads * spec.head_dim * forward_rows.max(BATCH_TOKENS)
        + (forward + 2 * spec.hidden) * MAX_STEP_TOKENS;
    let kinds = [WorkKind::Forward, WorkKind::Backward];
    let resident: usize = kinds.iter().map(|&kind| resident_bytes(spec, kind)).sum();
    let (up, down) = ROUNDING;
    (4 * floats as u64 + scratch_bytes).saturating_mul(up) / down
        + STATES_BYTES
        + SMALL_BYTES
        + resident as u64
}

/// Multiplications and additions of one token in one block, attention left out.
pub fn token_flops(spec: &BlockSpec) -> u64 {
    let elements = |shape: &[usize]| shape.iter().map(|&side| side as u64).product::<u64>();
    let tensors = spec.tensors(0);
    let weights: u64 = tensors.iter().map(|t| elements(&t.shape)).sum();
    2 * weights.max(1)
}

/// Tokens of a unit of a forward pass on a small machine.
pub fn forward_tokens(spec: &BlockSpec) -> usize {
    let tokens = UNIT_FLOPS / token_flops(spec);
    let tokens = usize::try_from(tokens).unwrap_or(usize::MAX).clamp(PAGE_TOKENS, 256);
    1 << tokens.ilog2()
}

/// Tokens of the largest job for gradients whose gradients and their sums stay on a device from
/// unit to unit.
pub fn resident_tokens(spec: &BlockSpec) -> usize {
    RESIDENT_TOKENS.min(RESIDENT_VALUES / spec.hidden.max(1))
}

/// Most bytes of pages, and for gradients of the inputs of blocks, that a job without cache keeps
/// on a device from unit to unit.
pub fn resident_bytes(spec: &BlockSpec, kind: WorkKind) -> usize {
    // Keys and values, 16 bits each.
    let pages = 4 * spec.kv_heads * spec.head_dim;
    let (tokens, blocks) = RESIDENT_INPUTS;
    match kind {
        WorkKind::Decode | WorkKind::Prefill => 0,
        WorkKind::Forward => (pages * resident_tokens(spec)).min(RESIDENT_BYTES),
        WorkKind::Backward => (tokens * blocks * (pages + 2 * spec.hidden)).min(RESIDENT_BYTES),
    }
}

/// Most tokens of a unit other than decode steps, on a device with memory of its own: there, and on
/// the way back. At least a piece, and as many as the buffers of a pass have room for. Of whole
/// blocks, so that all ranks of a group plan for the same units.
pub fn unit_tokens(spec: &BlockSpec) -> [usize; 2] {
    let forward = forward_width(spec) + spec.hidden;
    let back = forward + back_width(spec);
    let tokens = |most: usize, width: usize| {
        let tokens = (most / (4 * width)).clamp(1, MOST_UNIT_TOKENS);
        1 << tokens.ilog2()
    };
    let [forward_bytes, back_bytes] = UNIT_BYTES;
    [
        tokens(forward_bytes, forward).max(forward_tokens(spec).max(BATCH_TOKENS)),
        tokens(back_bytes, back).max((forward_tokens(spec) / BACK_COST).max(PAGE_TOKENS)),
    ]
}

/// Floats of a token in the buffers of a forward pass (`Workspace`).
fn forward_width(spec: &BlockSpec) -> usize {
    let (q, kv) = (spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim);
    let (experts, chosen) = experts(spec);
    // Rows that all experts of a token give back, and their lists.
    let moved = match experts {
        0 => 0,
        _ => chosen * spec.hidden + 9 * chosen,
    };
    3 * spec.hidden
        + 2 * q
        + 3 * kv
        + spec.head_dim
        + spec.dimensions().fused_outputs()
        + 2 * chosen * spec.mlp.intermediate()
        + experts
        + moved
        + chosen * RANK
}

/// Floats of a token in the buffers of a backward pass (`GradientWork`) beside those of the forward
/// pass in it.
fn back_width(spec: &BlockSpec) -> usize {
    let (q, kv) = (spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim);
    let (experts, chosen) = experts(spec);
    (7 + chosen) * spec.hidden
        + 2 * q
        + 2 * kv
        + spec.heads
        + spec.dimensions().fused_outputs()
        + chosen * spec.mlp.intermediate()
        + 3 * experts
}

/// Largest rank of an adapter that is counted on.
const RANK: usize = 256;

/// Experts, and those of a token.
fn experts(spec: &BlockSpec) -> (usize, usize) {
    match &spec.mlp {
        Mlp::Experts(mlp) => (mlp.experts.len(), mlp.chosen),
        Mlp::Gated(_) | Mlp::Plain(_) => (0, 1),
    }
}

/// Why weights, KV pages and work memory (with recorded steps) do not fit into the memory of a
/// device; `None` when they do.
pub fn shortage(
    free_bytes: u64,
    weights_bytes: u64,
    kv_bytes: u64,
    work_bytes: u64,
) -> Option<String> {
    let needed = weights_bytes.saturating_add(kv_bytes).saturating_add(work_bytes);
    let mib = |bytes: u64| bytes.div_ceil(1 << 20);
    (needed > free_bytes).then(|| {
        format!(
            "{} MiB of weights + {} MiB of KV cache + {} MiB of work memory = {} MiB, and {} MiB of its memory are free; serve fewer \
             blocks (--num_blocks), lower --attn_cache_tokens, or give --quant_type nf4",
            mib(weights_bytes),
            mib(kv_bytes),
            mib(work_bytes),
            mib(needed),
            free_bytes >> 20
        )
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn llama() -> BlockSpec {
        let config = json!({
            "model_type": "llama", "hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64,
            "num_key_value_heads": 8, "num_hidden_layers": 80, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        });
        BlockSpec::from_config(&config).unwrap()
    }

    #[test]
    fn units_and_work_of_the_largest_llama_2_are_bounded() {
        assert_eq!(unit_tokens(&llama()), [256, 256]);
        // 256 tokens forward and backward; scratch memory; 192 MiB of hidden states; 80 MiB of
        // gradients, 8 MiB of pages of forward, 256 MiB of pages and inputs of jobs without cache.
        let work = |scratch| work_bytes(&llama(), unit_tokens(&llama()), scratch);
        assert!(work(0) > 700 << 20 && work(0) < 1200 << 20, "{}", work(0));
        assert_eq!(work(800 << 20) - work(0), 1000 << 20, "buffers are rounded up");
    }

    #[test]
    fn a_shortage_names_its_numbers() {
        let needed = (7 << 30) + (5 << 20);
        assert_eq!(shortage(needed, 4 << 30, 3 << 30, 5 << 20), None);
        let said = shortage(needed - 1, 4 << 30, 3 << 30, 5 << 20).unwrap();
        assert!(said.contains("4096 MiB of weights + 3072 MiB of KV cache + 5 MiB"), "{said}");
        assert!(said.contains("--num_blocks"), "{said}");
    }
}
