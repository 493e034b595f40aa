//! Launches `attention_few.cu`, `attention_many.cu`, `attention_wgmma.cu` and `attention_any.cu`.

use shared::dtype::DType;

use super::by_dtype;
use crate::cuda::batch;
use crate::cuda::gpu::ctas;
use crate::cuda::{Address, Cuda, Floats, Gpu, Launch, Pages, Params};
use crate::kv::total_tokens;
use crate::ops::{Alibi, Attention, OpError, PagePool};
use crate::tuning;

/// Keys of a tile.
const TILE_KEYS: usize = batch::TILE_TOKENS;
/// Head dimensions of the tensor-core kernels; the last has no kernel for many tokens.
const HEAD_DIMS: [usize; 6] = [64, 80, 96, 112, 128, 256];
/// Largest head dimension.
pub(super) const MAX_HEAD_DIM: usize = 256;

pub(crate) fn launch<G: Gpu>(
    cuda: &mut Cuda<G>,
    args: Attention<'_, Floats, Pages<'_>>,
) -> Result<(), OpError> {
    let by_warpgroups = cuda.uses_warpgroups();
    launch_by(cuda, args, by_warpgroups)
}

/// The same, many tokens by warpgroups or by warps. A device that has no warpgroups refuses them.
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
        return Err(OpError::Shape {
            op: "attention",
            what: "a head of more than 256 elements",
        });
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
        (None, _) | (_, DType::F32) => any(cuda, args, common),
        (Some(dim), _) => {
            let tile_bytes = heads * (layout.head_dim + 4) * 4;
            let workspace = batch::tiles(args.rows).saturating_mul(tile_bytes);
            if cuda.fixed().is_some() {
                return few(cuda, FEW[dim], args, common, None);
            }
            let is_few = tokens <= tuning::CUDA_ATTENTION_FEW_TOKENS
                && workspace <= tuning::CUDA_ATTENTION_WORKSPACE_BYTES;
            match MANY.get(dim) {
                Some(_) if !is_few && by_warpgroups => warpgroups(cuda, dim, args, common),
                Some(names) if !is_few => many(cuda, names, args, common),
                _ => few(cuda, FEW[dim], args, common, Some(workspace)),
            }
        }
    }
}

/// What the three kernels are told alike.
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

fn any<G: Gpu>(
    cuda: &mut Cuda<G>,
    args: Attention<'_, Floats, Pages<'_>>,
    common: Common,
) -> Result<(), OpError> {
    let layout = args.pages.layout();
    let names = [
        "attention_any_f32",
        "attention_any_bf16",
        "attention_any_f16",
    ];
    let launch = Launch {
        kernel: by_dtype(names, layout.dtype),
        grid: [ctas(common.heads), ctas(common.tokens), 1],
        cta: [128, 1, 1],
        shared_bytes: ctas((5 * layout.head_dim + 64) * 4),
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
    // SAFETY: `check` has made sure that queries, output and logarithms hold all tokens, that there is a slope per head, and that every page exists.
    unsafe { cuda.launch(launch) }
}

fn few<G: Gpu>(
    cuda: &mut Cuda<G>,
    names: [&'static str; 2],
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
        shared_bytes: ctas(2 * TILE_KEYS * (2 * layout.head_dim + 16)),
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
    // SAFETY: as in `any`; the workspace holds every tile of every head of every token: that of a fixed step by `set_step`.
    unsafe { cuda.launch(launch)? };
    let join = Launch {
        kernel: "attention_join",
        grid: [ctas(common.heads), ctas(common.tokens), 1],
        cta: [ctas(layout.head_dim / 4), 1, 1],
        shared_bytes: 0,
        params: Params::new()
            .address(workspace)
            .address(common.batch)
            .write(args.out)
            .address(common.logsum)
            .count(layout.head_dim)
            .count(common.window),
    };
    // SAFETY: as above; it reads the tiles that a token sees, which the kernel before has written.
    unsafe { cuda.launch(join) }
}

fn many<G: Gpu>(
    cuda: &mut Cuda<G>,
    names: &[&'static str; 2],
    args: Attention<'_, Floats, Pages<'_>>,
    common: Common,
) -> Result<(), OpError> {
    let layout = args.pages.layout();
    let shape = Shape {
        kernel: names[usize::from(layout.dtype == DType::F16)],
        queries: 64,
        shared_bytes: 4 * TILE_KEYS * (2 * layout.head_dim + 16),
    };
    tiled(cuda, shape, args, common)
}

fn warpgroups<G: Gpu>(
    cuda: &mut Cuda<G>,
    dim: usize,
    args: Attention<'_, Floats, Pages<'_>>,
    common: Common,
) -> Result<(), OpError> {
    let layout = args.pages.layout();
    // Keys and values in four stages, in pieces of 64 dimensions.
    let pieces = layout.head_dim.div_ceil(64);
    let shape = Shape {
        kernel: WARPGROUPS[dim][usize::from(layout.dtype == DType::F16)],
        queries: 128,
        shared_bytes: 4 * 2 * TILE_KEYS * 128 * pieces,
    };
    tiled(cuda, shape, args, common)
}

/// A kernel for many tokens: queries and shared memory of a CTA.
struct Shape {
    kernel: &'static str,
    queries: usize,
    shared_bytes: usize,
}

fn tiled<G: Gpu>(
    cuda: &mut Cuda<G>,
    shape: Shape,
    args: Attention<'_, Floats, Pages<'_>>,
    common: Common,
) -> Result<(), OpError> {
    let layout = args.pages.layout();
    let most = args.rows.iter().map(|row| row.tokens).max().unwrap_or(0);
    let launch = Launch {
        kernel: shape.kernel,
        grid: [
            ctas((most * args.group).div_ceil(shape.queries)),
            ctas(layout.kv_heads),
            ctas(args.rows.len()),
        ],
        cta: [ctas(2 * shape.queries), 1, 1],
        shared_bytes: ctas(shape.shared_bytes),
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
    // SAFETY: as in `any`.
    unsafe { cuda.launch(launch) }
}

/// By head dimension, then `[bf16, f16]`.
const FEW: [[&str; 2]; 6] = [
    ["attention_few_bf16_d64", "attention_few_f16_d64"],
    ["attention_few_bf16_d80", "attention_few_f16_d80"],
    ["attention_few_bf16_d96", "attention_few_f16_d96"],
    ["attention_few_bf16_d112", "attention_few_f16_d112"],
    ["attention_few_bf16_d128", "attention_few_f16_d128"],
    ["attention_few_bf16_d256", "attention_few_f16_d256"],
];
const WARPGROUPS: [[&str; 2]; 5] = [
    ["attention_wgmma_bf16_d64", "attention_wgmma_f16_d64"],
    ["attention_wgmma_bf16_d80", "attention_wgmma_f16_d80"],
    ["attention_wgmma_bf16_d96", "attention_wgmma_f16_d96"],
    ["attention_wgmma_bf16_d112", "attention_wgmma_f16_d112"],
    ["attention_wgmma_bf16_d128", "attention_wgmma_f16_d128"],
];
const MANY: [[&str; 2]; 5] = [
    ["attention_many_bf16_d64", "attention_many_f16_d64"],
    ["attention_many_bf16_d80", "attention_many_f16_d80"],
    ["attention_many_bf16_d96", "attention_many_f16_d96"],
    ["attention_many_bf16_d112", "attention_many_f16_d112"],
    ["attention_many_bf16_d128", "attention_many_f16_d128"],
];
