//! What the memory of a device holds, told by prepare before anything is loaded, and checked by the worker before it loads. Arithmetic and
//! one question to the driver.

use kernels::cuda::driver::{Driver, OpenError};
use kernels::tuning;
use shared::config::Device;
use shared::control::DeviceMemory;

use crate::block::{BlockSpec, Mlp, Qkv, Residual};
use crate::device::{KEPT_VALUES, MAX_STEP_TOKENS};
use crate::engine::{BACK_COST, forward_tokens};
use crate::schedule::BATCH_TOKENS;
use shared::job::JobKind;
use shared::model::PAGE_TOKENS;

/// Memory that the emulator pretends to have.
const EMULATED_BYTES: u64 = 8 << 30;

/// Buffers are rounded up to size classes, a quarter apart.
const ROUNDING: (u64, u64) = (5, 4);

/// Small arrays of a step: rows and page tables, frequencies, the pages of a rehearsal.
const SMALL_BYTES: u64 = 16 << 20;

/// Hidden states of jobs that are begun, as `Paged::keeps` bounds them.
const STATES_BYTES: u64 = 192 << 20;

/// Tokens of the largest job for gradients whose gradients stay on the device, if its hidden states do.
const PARKED_TOKENS: usize = 4096;

/// A job's pages and inputs stay on the device as far as they are those of so many tokens and blocks, and no more bytes.
const PARKED_INPUTS: (usize, usize) = (1024, 32);
const PARKED_BYTES: usize = 256 << 20;

/// Most bytes of the buffers of a unit, there and on the way back, and most tokens: as many as keep all multiprocessors busy.
const UNIT_BYTES: [usize; 2] = [192 << 20, 384 << 20];
const MOST_UNIT_TOKENS: usize = 1024;

/// Longest row whose attention is planned for. A longer one may take memory when it comes, up to the limit of `tuning`.
const PLANNED_POSITIONS: usize = 32 << 10;

/// Memory of those of `devices` that have their own, of which no worker is to take more than `most_bytes`.
///
/// # Errors
/// When a device cannot be asked.
pub fn device_memory(
    devices: &[Device],
    most_bytes: Option<u64>,
    spec: &BlockSpec,
) -> Result<Vec<DeviceMemory>, (u32, OpenError)> {
    let mut found = Vec::new();
    for &device in devices {
        let free = match device {
            Device::Cpu => continue,
            Device::Emulator => EMULATED_BYTES,
            Device::Cuda(ordinal) => {
                let (free, _) = Driver::memory_of(ordinal).map_err(|e| (ordinal, e))?;
                free as u64
            }
        };
        found.push(DeviceMemory {
            device,
            free_bytes: most_bytes.map_or(free, |most| most.min(free)),
            work_bytes: work_bytes(spec),
        });
    }
    Ok(found)
}

/// Bytes that a worker takes of its device for its largest units, forward and backward: every buffer of both passes at once, as they are kept.
pub fn work_bytes(spec: &BlockSpec) -> u64 {
    let [forward_rows, back_rows] = unit_tokens(spec);
    let forward = forward_width(spec);
    let kept = (spec.hidden + 2 * spec.kv_heads * spec.head_dim) * parked_tokens(spec);
    let floats =
        (forward + spec.hidden) * forward_rows + (forward + back_width(spec)) * back_rows + kept;
    let parked = [JobKind::Forward, JobKind::Backward].map(|kind| parked_bytes(spec, kind) as u64);
    let (up, down) = ROUNDING;
    let scratch = scratch_bytes(spec, PLANNED_POSITIONS);
    let scratch = scratch.iter().sum::<usize>() as u64;
    let floats_recorded = (forward + 2 * spec.hidden) * MAX_STEP_TOKENS;
    let recorded = 4 * floats_recorded as u64 + tuning::CUDA_STEP_WORKSPACE_BYTES as u64;
    (4 * floats as u64 + scratch + recorded).saturating_mul(up) / down
        + STATES_BYTES
        + SMALL_BYTES
        + parked.iter().sum::<u64>()
}

/// Tokens of the largest job for gradients whose gradients and their sums stay on a device from unit to unit.
pub fn parked_tokens(spec: &BlockSpec) -> usize {
    PARKED_TOKENS.min(KEPT_VALUES / spec.hidden.max(1))
}

/// Most bytes of pages, and for gradients of the inputs of blocks, that a job without cache keeps on a device from unit to unit.
pub fn parked_bytes(spec: &BlockSpec, kind: JobKind) -> usize {
    // Keys and values, 16 bits each.
    let pages = 4 * spec.kv_heads * spec.head_dim;
    let (tokens, blocks) = PARKED_INPUTS;
    match kind {
        JobKind::Step => 0,
        JobKind::Forward => (pages * parked_tokens(spec)).min(PARKED_BYTES),
        JobKind::Backward => (tokens * blocks * (pages + 2 * spec.hidden)).min(PARKED_BYTES),
    }
}

/// Most tokens of a unit other than decode steps, on a device with memory of its own: there, and on the way back. At least a piece, and as many
/// as the buffers of a pass have room for.
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

/// Workspaces that operations of the largest units have at the same time, or one after the other: partial results of attention for the largest batch
/// of decode steps over rows of `positions` positions, numbers rounded for the tensor cores, what attention backward leaves per query, sums of
/// segments of gradients, and what attention backward leaves per query and key; of parallel blocks what attention gives, which others have at hand.
pub fn scratch_bytes(spec: &BlockSpec, positions: usize) -> [usize; 9] {
    let positions = positions.min(PLANNED_POSITIONS);
    let [forward, back] = unit_tokens(spec);
    let q = spec.heads * spec.head_dim;
    // A token of a mixture is rounded once for each of its experts.
    let (_, chosen) = experts(spec);
    // A page for each token at most.
    let changes = match tuning::CUDA_ATTENTION_GRAD_DIMS.contains(&spec.head_dim) {
        true => tuning::cuda_attention_grad_workspace(back * spec.heads, PLANNED_POSITIONS),
        false => 0,
    };
    let made_again = match spec.residual {
        Residual::Parallel => 4 * back,
        Residual::Sequential | Residual::Normed => 0,
    };
    let widest = (chosen * spec.mlp.intermediate().max(spec.hidden)).max(q + fused(spec));
    [
        tuning::cuda_attention_workspace(spec.heads, spec.head_dim, positions),
        2 * widest.next_multiple_of(32) * forward.max(back).next_multiple_of(128),
        2 * q * back,
        2 * q * back,
        16 * spec.heads * back,
        gradient_sums(spec),
        changes,
        made_again * q,
        made_again * spec.heads,
    ]
}

/// Sums of segments of the gradient of a product of few rows: the most of any matrix.
fn gradient_sums(spec: &BlockSpec) -> usize {
    let q = spec.heads * spec.head_dim;
    let (hidden, inner) = (spec.hidden, spec.mlp.intermediate());
    let matrices = [
        (q + fused(spec), hidden),
        (hidden, q),
        (inner, hidden),
        (hidden, inner),
    ];
    let sums = |&(outputs, inputs): &(usize, usize)| {
        tuning::cuda_linear_grad_sums(outputs, inputs, tuning::CUDA_LINEAR_GRAD_FEW_ROWS)
    };
    matrices.iter().map(sums).max().unwrap_or(0)
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
        + fused(spec)
        + 2 * chosen * spec.mlp.intermediate()
        + experts
        + moved
        + chosen * RANK
}

/// Floats of a token in the buffers of a backward pass (`GradientWork`) beside those of the forward pass in it.
fn back_width(spec: &BlockSpec) -> usize {
    let (q, kv) = (spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim);
    let (experts, chosen) = experts(spec);
    (7 + chosen) * spec.hidden
        + 2 * q
        + 2 * kv
        + spec.heads
        + fused(spec)
        + chosen * spec.mlp.intermediate()
        + 3 * experts
}

/// Largest rank of an adapter that is counted on.
const RANK: usize = 256;

fn fused(spec: &BlockSpec) -> usize {
    match spec.qkv {
        Qkv::Fused(_) => (spec.heads + 2 * spec.kv_heads) * spec.head_dim,
        Qkv::Separate(_) => 0,
    }
}

/// Experts, and those of a token.
fn experts(spec: &BlockSpec) -> (usize, usize) {
    match &spec.mlp {
        Mlp::Experts(mlp) => (mlp.experts.len(), mlp.chosen),
        Mlp::Gated(_) | Mlp::Plain(_) => (0, 1),
    }
}

/// Why weights, KV pages and recorded steps do not fit into the memory of a device; `None` when they do.
pub fn shortage(
    free_bytes: u64,
    weights_bytes: u64,
    kv_bytes: u64,
    graph_bytes: u64,
    spec: &BlockSpec,
) -> Option<String> {
    let work = work_bytes(spec).saturating_add(graph_bytes);
    let needed = weights_bytes.saturating_add(kv_bytes).saturating_add(work);
    let mib = |bytes: u64| bytes.div_ceil(1 << 20);
    (needed > free_bytes).then(|| {
        format!(
            "{} MiB of weights + {} MiB of KV cache + {} MiB of work memory = {} MiB, and {} MiB of its memory are free; serve fewer \
             blocks (--num_blocks), lower --attn_cache_tokens, or give --quant_type nf4",
            mib(weights_bytes),
            mib(kv_bytes),
            mib(work),
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
    fn the_emulator_has_what_it_is_given_and_the_processor_is_left_out() {
        let devices = [Device::Cpu, Device::Emulator];
        for (most, wanted) in [
            (None, 8 << 30),
            (Some(1 << 30), 1 << 30),
            (Some(1 << 40), 8 << 30),
        ] {
            let found = device_memory(&devices, most, &llama()).unwrap();
            assert_eq!(found.len(), 1);
            assert_eq!(
                (found[0].device, found[0].free_bytes),
                (Device::Emulator, wanted)
            );
        }
        // 256 tokens forward and backward of a block of the largest Llama 2, 512 MiB for attention and 64 for its gradient; 128 MiB for that
        // of recorded steps, and 192 MiB of hidden states; what jobs without cache park: 80 MiB of gradients, 8 MiB of pages of forward,
        // 256 MiB of pages and inputs.
        let work = work_bytes(&llama());
        assert!(work > 1000 << 20 && work < 2200 << 20, "{work}");
        assert_eq!(unit_tokens(&llama()), [256, 256]);
    }

    #[test]
    fn a_shortage_names_its_numbers() {
        let spec = llama();
        let needed = (7 << 30) + (5 << 20) + work_bytes(&spec);
        assert_eq!(shortage(needed, 4 << 30, 3 << 30, 5 << 20, &spec), None);
        let said = shortage(needed - 1, 4 << 30, 3 << 30, 5 << 20, &spec).unwrap();
        assert!(
            said.contains("4096 MiB of weights + 3072 MiB of KV cache"),
            "{said}"
        );
        assert!(said.contains("--num_blocks"), "{said}");
    }
}
