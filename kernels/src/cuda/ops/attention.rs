//! Launches `attention_decode.cu`, `attention_prefill.cu`, `attention_wgmma.cu` and
//! `attention_generic.cu`.

use shared::dtype::DType;
use shared::warpgroups::WarpgroupKernel;

use super::by_dtype;
use crate::backend::append_then_attend;
use crate::cuda::batch;
use crate::cuda::gpu::ctas;
use crate::cuda::pages::Outlet;
use crate::cuda::{Address, Cuda, Floats, Gpu, Launch, Pages, Params};
use crate::kv::{PageLayout, StepRow, total_tokens};
use crate::ops::{Alibi, AppendAttention, Attention, OpError, PagePool};
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

/// In the launches of attention alone where `attention_decode.cu` takes it, else as an append and
/// attention.
pub(crate) fn launch_append<G: Gpu>(
    cuda: &mut Cuda<G>,
    mut args: AppendAttention<'_, Floats, Pages<'_>>,
) -> Result<(), OpError> {
    args.check()?;
    let layout = args.pages.layout();
    let heads = total_tokens(args.rows) * layout.kv_heads * args.group;
    let (kernels, workspace) = match decode_of(cuda, layout, args.rows, args.group) {
        Some(by_decode) if heads > 0 && layout.head_dim <= sizes::attention_decode::FRESH_DIM => {
            by_decode
        }
        _ => return append_then_attend(cuda, args),
    };
    let fresh = Fresh {
        k: args.k.address(),
        v: args.v.address(),
        angles: args.table.map_or(Address(0), Floats::address),
        outlet: args.pages.outlet(),
    };
    let attention = args.attention();
    let common = common(cuda, &attention)?;
    decode(cuda, kernels, workspace, attention, common, fresh)
}

/// The same, with prefill by warpgroups or by warps. A device without warpgroups refuses them.
pub(crate) fn launch_by<G: Gpu>(
    cuda: &mut Cuda<G>,
    args: Attention<'_, Floats, Pages<'_>>,
    by_warpgroups: bool,
) -> Result<(), OpError> {
    args.check()?;
    let layout = args.pages.layout();
    if total_tokens(args.rows) * layout.kv_heads * args.group * layout.head_dim == 0 {
        return Ok(());
    }
    if layout.head_dim > MAX_HEAD_DIM {
        return Err(OpError::Shape { op: "attention", what: "a head of more than 256 elements" });
    }
    let common = common(cuda, &args)?;
    if let Some((kernels, workspace)) = decode_of(cuda, layout, args.rows, args.group) {
        return decode(cuda, kernels, workspace, args, common, Fresh::NOTHING);
    }
    let dim = HEAD_DIMS.iter().position(|dim| *dim == layout.head_dim);
    let dim = dim.filter(|_| layout.dtype != DType::F32);
    match dim.and_then(|dim| Some((PREFILL.get(dim)?, WGMMA.get(dim)?))) {
        None => generic(cuda, args, common),
        Some((_, kernels)) if by_warpgroups => {
            prefill(cuda, *kernels, sizes::attention_wgmma::QUERIES, args, common)
        }
        Some((kernels, _)) => {
            prefill(cuda, *kernels, sizes::attention_prefill::QUERIES, args, common)
        }
    }
}

/// The kernels of `attention_decode.cu` for a batch, and bytes of the workspace that is not fixed;
/// `None`: other kernels take it.
fn decode_of<G: Gpu>(
    cuda: &Cuda<G>,
    layout: PageLayout,
    rows: &[StepRow<'_>],
    group: usize,
) -> Option<(Kernels, Option<usize>)> {
    let dim = HEAD_DIMS.iter().position(|dim| *dim == layout.head_dim)?;
    if layout.dtype == DType::F32 {
        return None;
    }
    if cuda.fixed().is_some() {
        return Some((DECODE[dim], None));
    }
    let tile_bytes = layout.kv_heads * group * (layout.head_dim + 4) * 4;
    let workspace = batch::tiles(rows).saturating_mul(tile_bytes);
    let is_decode = PREFILL.get(dim).is_none()
        || (total_tokens(rows) <= tuning::CUDA_ATTENTION_DECODE_TOKENS
            && workspace <= tuning::CUDA_ATTENTION_WORKSPACE_BYTES);
    is_decode.then_some((DECODE[dim], Some(workspace)))
}

/// What is on the device for any kernel.
fn common<G: Gpu>(
    cuda: &mut Cuda<G>,
    args: &Attention<'_, Floats, Pages<'_>>,
) -> Result<Common, OpError> {
    Ok(Common {
        slopes: slopes(cuda, args.alibi)?,
        alibi_scale: args.alibi.map_or(0.0, |alibi| alibi.scale),
        batch: cuda.batch(args.rows)?,
        logsum: (args.logsum.as_deref()).map_or(Address(0), Floats::address),
        window: window(args.window),
        tokens: total_tokens(args.rows),
        heads: args.pages.layout().kv_heads * args.group,
    })
}

/// Keys and values that are not in the pages yet.
struct Fresh {
    k: Address,
    v: Address,
    angles: Address,
    outlet: Outlet,
}

impl Fresh {
    const NOTHING: Fresh =
        Fresh { k: Address(0), v: Address(0), angles: Address(0), outlet: Outlet::NONE };
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

/// With so many bytes of workspace, or with that of a fixed step.
fn decode<G: Gpu>(
    cuda: &mut Cuda<G>,
    kernels: Kernels,
    workspace: Option<usize>,
    args: Attention<'_, Floats, Pages<'_>>,
    common: Common,
    fresh: Fresh,
) -> Result<(), OpError> {
    let ((names, shared_bytes), layout) = (kernels, args.pages.layout());
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
            .address(fresh.k)
            .address(fresh.v)
            .address(fresh.angles)
            .address(args.pages.address())
            .address(fresh.outlet.address)
            .count(fresh.outlet.block)
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
    // fixed step because of `set_step`; new keys, values and angles hold all tokens, and what writes
    // to the pages has borrowed them so (`launch_append`).
    unsafe { cuda.launch(launch)? };
    let mergers = tuning::cuda_attention_mergers(device, common.heads * common.tokens);
    let join = Launch {
        kernel: "attention_join",
        grid: [ctas(common.heads), ctas(common.tokens), 1],
        cta: [ctas(layout.head_dim / 4), ctas(mergers), 1],
        shared_bytes: ctas(
            mergers
                * (sizes::attention_decode::JOIN_SHARED_BASE
                    + sizes::attention_decode::JOIN_SHARED_PER_DIM * layout.head_dim),
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
    kernels: Kernels,
    queries: usize,
    args: Attention<'_, Floats, Pages<'_>>,
    common: Common,
) -> Result<(), OpError> {
    let ((names, shared_bytes), layout) = (kernels, args.pages.layout());
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
