//! Launches `attention_decode.cu`, `attention_prefill.cu`, `attention_wgmma.cu` and
//! `attention_generic.cu`.

use shared::dtype::DType;
use shared::warpgroups::WarpgroupKernel;

use super::by_dtype;
use crate::cuda::batch;
use crate::cuda::gpu::ctas;
use crate::cuda::{Address, Cuda, Floats, Gpu, Launch, Pages, Params};
use crate::kv::total_tokens;
use crate::ops::{Alibi, Attention, OpError, PagePool};
use crate::sizes;
use crate::tuning;

/// Head dimensions of the tensor-core kernels; the last has no kernel for prefill.
const HEAD_DIMS: [usize; 6] = [64, 80, 96, 112, 128, 256];
/// Largest head dimension.
pub(super) const MAX_HEAD_DIM: usize = 256;

pub(crate) fn launch<G: Gpu>(
    cuda: &mut Cuda<G>,
    args: Attention<'_, Floats, Pages<'_>>,
) -> Result<(), OpError> {
    let layout = args.pages.layout();
    let kernel = WarpgroupKernel::attention(layout.head_dim, layout.dtype);
    let by_warpgroups = kernel.is_some_and(|kernel| cuda.used_warpgroups().contains(kernel));
    launch_by(cuda, args, by_warpgroups)
}

/// The same, with prefill by warpgroups or by warps. A device without warpgroups refuses them.
pub(crate) fn launch_by<G: Gpu>(
    cuda: &mut Cuda<G>,
    args: Attention<'_, Floats, Pages<'_>>,
    by_warpgroups: bool,
) -> Result<(), OpError> {
    args.check()?;
    let layout = args.pages.layout();
    let tokens = total_tokens(args.rows);
    let heads = layout.kv_heads * args.group;
    if tokens * heads * layout.head_dim == 0 {
        return Ok(());
    }
    if layout.head_dim > MAX_HEAD_DIM {
        return Err(OpError::Shape { op: "attention", what: "a head of more than 256 elements" });
    }
    let common = Common {
        slopes: slopes(cuda, args.alibi)?,
        alibi_scale: args.alibi.map_or(0.0, |alibi| alibi.scale),
        batch: cuda.batch(args.rows)?,
        logsum: (args.logsum.as_deref()).map_or(Address(0), Floats::address),
        window: window(args.window),
        tokens,
        heads,
    };
    let dim = HEAD_DIMS.iter().position(|dim| *dim == layout.head_dim);
    match (dim, layout.dtype) {
        (None, _) | (_, DType::F32) => generic(cuda, args, common),
        (Some(dim), _) => {
            let tile_bytes = heads * (layout.head_dim + 4) * 4;
            let workspace = batch::tiles(args.rows).saturating_mul(tile_bytes);
            if cuda.fixed().is_some() {
                return decode(cuda, DECODE[dim], args, common, None);
            }
            let is_decode = tokens <= tuning::CUDA_ATTENTION_DECODE_TOKENS
                && workspace <= tuning::CUDA_ATTENTION_WORKSPACE_BYTES;
            match (PREFILL.get(dim), WGMMA.get(dim)) {
                (_, Some(kernels)) if !is_decode && by_warpgroups => {
                    let queries = sizes::attention_wgmma::QUERIES;
                    prefill(cuda, *kernels, queries, args, common)
                }
                (Some(kernels), _) if !is_decode => {
                    let queries = sizes::attention_prefill::QUERIES;
                    prefill(cuda, *kernels, queries, args, common)
                }
                _ => decode(cuda, DECODE[dim], args, common, Some(workspace)),
            }
        }
    }
}

/// Parameters that all kernels share.
#[derive(Clone, Copy)]
struct Common {
    slopes: Address,
    alibi_scale: f32,
    batch: Address,
    logsum: Address,
    window: usize,
    tokens: usize,
    heads: usize,
}

/// The slopes on the device; [`Address`] 0 when there are none.
pub(super) fn slopes<G: Gpu>(
    cuda: &mut Cuda<G>,
    alibi: Option<Alibi<'_>>,
) -> Result<Address, OpError> {
    alibi.map_or(Ok(Address(0)), |alibi| cuda.constants(alibi.slopes))
}

/// A window in a word; all that are longer than any sequence are one.
pub(super) fn window(positions: usize) -> usize {
    positions.min(u32::MAX as usize)
}

fn generic<G: Gpu>(
    cuda: &mut Cuda<G>,
    args: Attention<'_, Floats, Pages<'_>>,
    common: Common,
) -> Result<(), OpError> {
    let layout = args.pages.layout();
    let names = ["attention_generic_f32", "attention_generic_bf16", "attention_generic_f16"];
    let launch = Launch {
        kernel: by_dtype(names, layout.dtype),
        grid: [ctas(common.heads), ctas(common.tokens), 1],
        cta: [128, 1, 1],
        shared_bytes: ctas(
            sizes::attention_generic::SHARED_BASE
                + sizes::attention_generic::SHARED_PER_DIM * layout.head_dim,
        ),
        params: Params::new()
            .read(args.q)
            .address(args.pages.address())
            .address(common.batch)
            .address(common.slopes)
            .write(args.out)
            .address(common.logsum)
            .count(layout.kv_heads)
            .count(args.group)
            .count(layout.head_dim)
            .float(args.divisor)
            .float(common.alibi_scale)
            .count(common.window),
    };
    // SAFETY: `check` has made sure that queries, output and logarithms hold all tokens, that there
    // is a slope per head, and that every page exists.
    unsafe { cuda.launch(launch) }
}

fn decode<G: Gpu>(
    cuda: &mut Cuda<G>,
    (names, shared_bytes): Kernels,
    args: Attention<'_, Floats, Pages<'_>>,
    common: Common,
    workspace: Option<usize>,
) -> Result<(), OpError> {
    let layout = args.pages.layout();
    let own = workspace.map(|bytes| cuda.scratch(bytes)).transpose()?;
    let workspace = match (&own, cuda.fixed()) {
        (Some(own), _) => own.address(),
        (None, Some(fixed)) => fixed.workspace.address(),
        (None, None) => Address(0),
    };
    let device = cuda.gpu().properties().multiprocessors as usize;
    let splits = tuning::cuda_attention_splits(device, layout.kv_heads * common.tokens);
    let launch = Launch {
        kernel: names[usize::from(layout.dtype == DType::F16)],
        grid: [ctas(splits), ctas(layout.kv_heads), ctas(common.tokens)],
        cta: [32, 1, 1],
        shared_bytes: ctas(shared_bytes),
        params: Params::new()
            .read(args.q)
            .address(args.pages.address())
            .address(common.batch)
            .address(common.slopes)
            .address(workspace)
            .count(layout.kv_heads)
            .count(args.group)
            .float(1.0 / args.divisor)
            .float(common.alibi_scale)
            .count(common.window),
    };
    // SAFETY: as in `generic`; the workspace holds every tile of every head of every token, in a
    // fixed step because of `set_step`.
    unsafe { cuda.launch(launch)? };
    let join = Launch {
        kernel: "attention_join",
        grid: [ctas(common.heads), ctas(common.tokens), 1],
        cta: [ctas(layout.head_dim / 4), ctas(sizes::attention_decode::MERGERS), 1],
        shared_bytes: ctas(
            sizes::attention_decode::JOIN_SHARED_BASE
                + sizes::attention_decode::JOIN_SHARED_PER_DIM * layout.head_dim,
        ),
        params: Params::new()
            .address(workspace)
            .address(common.batch)
            .write(args.out)
            .address(common.logsum)
            .count(layout.head_dim)
            .count(args.group)
            .count(common.window)
            .count(splits),
    };
    // SAFETY: as above; it reads the tiles that a token sees, which the kernel before has written.
    unsafe { cuda.launch(join) }
}

/// With `queries` queries of each CTA, by warps (`attention_prefill.cu`) or by warpgroups.
fn prefill<G: Gpu>(
    cuda: &mut Cuda<G>,
    (names, shared_bytes): Kernels,
    queries: usize,
    args: Attention<'_, Floats, Pages<'_>>,
    common: Common,
) -> Result<(), OpError> {
    let layout = args.pages.layout();
    let most = args.rows.iter().map(|row| row.tokens).max().unwrap_or(0);
    let launch = Launch {
        kernel: names[usize::from(layout.dtype == DType::F16)],
        grid: [
            ctas((most * args.group).div_ceil(queries)),
            ctas(layout.kv_heads),
            ctas(args.rows.len()),
        ],
        cta: [ctas(2 * queries), 1, 1],
        shared_bytes: ctas(shared_bytes),
        params: Params::new()
            .read(args.q)
            .address(args.pages.address())
            .address(common.batch)
            .address(common.slopes)
            .write(args.out)
            .address(common.logsum)
            .count(layout.kv_heads)
            .count(args.group)
            .float(1.0 / args.divisor)
            .float(common.alibi_scale)
            .count(common.window),
    };
    // SAFETY: as in `generic`.
    unsafe { cuda.launch(launch) }
}

/// Kernels of a head dimension for `[bf16, f16]`, and their shared memory.
pub(super) type Kernels = ([&'static str; 2], usize);

/// By head dimension.
const DECODE: [Kernels; 6] = [
    (
        ["attention_decode_bf16_d64", "attention_decode_f16_d64"],
        sizes::attention_decode::SHARED_D64,
    ),
    (
        ["attention_decode_bf16_d80", "attention_decode_f16_d80"],
        sizes::attention_decode::SHARED_D80,
    ),
    (
        ["attention_decode_bf16_d96", "attention_decode_f16_d96"],
        sizes::attention_decode::SHARED_D96,
    ),
    (
        ["attention_decode_bf16_d112", "attention_decode_f16_d112"],
        sizes::attention_decode::SHARED_D112,
    ),
    (
        ["attention_decode_bf16_d128", "attention_decode_f16_d128"],
        sizes::attention_decode::SHARED_D128,
    ),
    (
        ["attention_decode_bf16_d256", "attention_decode_f16_d256"],
        sizes::attention_decode::SHARED_D256,
    ),
];
const PREFILL: [Kernels; 5] = [
    (
        ["attention_prefill_bf16_d64", "attention_prefill_f16_d64"],
        sizes::attention_prefill::SHARED_D64,
    ),
    (
        ["attention_prefill_bf16_d80", "attention_prefill_f16_d80"],
        sizes::attention_prefill::SHARED_D80,
    ),
    (
        ["attention_prefill_bf16_d96", "attention_prefill_f16_d96"],
        sizes::attention_prefill::SHARED_D96,
    ),
    (
        ["attention_prefill_bf16_d112", "attention_prefill_f16_d112"],
        sizes::attention_prefill::SHARED_D112,
    ),
    (
        ["attention_prefill_bf16_d128", "attention_prefill_f16_d128"],
        sizes::attention_prefill::SHARED_D128,
    ),
];
const WGMMA: [Kernels; 5] = [
    (["attention_wgmma_bf16_d64", "attention_wgmma_f16_d64"], sizes::attention_wgmma::SHARED_D64),
    (["attention_wgmma_bf16_d80", "attention_wgmma_f16_d80"], sizes::attention_wgmma::SHARED_D80),
    (["attention_wgmma_bf16_d96", "attention_wgmma_f16_d96"], sizes::attention_wgmma::SHARED_D96),
    (
        ["attention_wgmma_bf16_d112", "attention_wgmma_f16_d112"],
        sizes::attention_wgmma::SHARED_D112,
    ),
    (
        ["attention_wgmma_bf16_d128", "attention_wgmma_f16_d128"],
        sizes::attention_wgmma::SHARED_D128,
    ),
];
