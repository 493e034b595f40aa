//! Launches `attention_grad.cu` and `attention_grad_generic.cu`.

use shared::dtype::DType;

use super::attention::{Kernels, MAX_HEAD_DIM, slopes, window};
use super::by_dtype;
use crate::cuda::gpu::ctas;
use crate::cuda::{Address, Cuda, Floats, Gpu, Launch, Pages, Params, PooledMemory};
use crate::kv::{PAGE_TOKENS, StepRow, total_tokens};
use crate::ops::{Attention, AttentionGrad, OpError, PagePool};
use crate::sizes;
use crate::tuning;

/// Keys of a tile.
const TILE_KEYS: usize = tuning::CUDA_ATTENTION_TILE;

const OP: &str = "attention grad";

pub(crate) fn launch<G: Gpu>(
    cuda: &mut Cuda<G>,
    args: AttentionGrad<'_, Floats, Pages<'_>>,
) -> Result<(), OpError> {
    launch_within(cuda, args, tuning::CUDA_ATTENTION_GRAD_BYTES)
}

/// The same with so much memory for what the pass over keys leaves to that over queries, or for one
/// tile.
pub(crate) fn launch_within<G: Gpu>(
    cuda: &mut Cuda<G>,
    args: AttentionGrad<'_, Floats, Pages<'_>>,
    most_bytes: usize,
) -> Result<(), OpError> {
    args.check()?;
    let layout = args.pages.layout();
    let (tokens, heads) = (total_tokens(args.rows), layout.kv_heads * args.group);
    if tokens * heads * layout.head_dim == 0 {
        return Ok(());
    }
    if layout.head_dim > MAX_HEAD_DIM {
        let what = "a head of more than 256 elements";
        return Err(OpError::Shape { op: OP, what });
    }
    let variant = tuning::CUDA_ATTENTION_GRAD_DIMS.iter().position(|&has| has == layout.head_dim);
    let variant = variant.filter(|_| layout.dtype != DType::F32);
    let common = Common {
        batch: cuda.batch(args.rows)?,
        slopes: slopes(cuda, args.alibi)?,
        tokens,
        heads,
        most_bytes,
    };
    match (variant, &args.known) {
        (None, _) => generic(cuda, args, common),
        (Some(variant), Some(known)) => {
            let (out, logsum) = (known.out.address(), known.logsum.address());
            tiled(cuda, args, common, variant, out, logsum)
        }
        (Some(variant), None) => {
            let mut out = cuda.buffer(tokens * heads * layout.head_dim);
            let mut logsum = cuda.buffer(tokens * heads);
            super::attention::launch(
                cuda,
                Attention {
                    q: args.q,
                    pages: args.pages,
                    rows: args.rows,
                    group: args.group,
                    divisor: args.divisor,
                    alibi: args.alibi,
                    window: args.window,
                    out: &mut *out,
                    logsum: Some(&mut *logsum),
                },
            )?;
            tiled(cuda, args, common, variant, out.address(), logsum.address())
        }
    }
}

/// Parameters that all kernels share.
#[derive(Clone, Copy)]
struct Common {
    batch: Address,
    slopes: Address,
    tokens: usize,
    heads: usize,
    most_bytes: usize,
}

/// Numbers as the words of a kernel.
fn words(numbers: impl Iterator<Item = usize>) -> Result<Vec<u32>, OpError> {
    let words: Result<Vec<u32>, _> = numbers.map(u32::try_from).collect();
    words.map_err(|_| OpError::Shape { op: OP, what: "more positions than a word counts" })
}

/// On the tensor cores. `out` and `logsum` are the results of attention.
fn tiled<G: Gpu>(
    cuda: &mut Cuda<G>,
    args: AttentionGrad<'_, Floats, Pages<'_>>,
    common: Common,
    variant: usize,
    out: Address,
    logsum: Address,
) -> Result<(), OpError> {
    let pages: Vec<usize> = args.rows.iter().map(pages_of).collect();
    let operands = begin(cuda, &args, common, &pages, out, logsum)?;
    let blocks = pages.iter().sum::<usize>() * common.heads;
    let longest = args.rows.iter().map(|row| row.prefix + row.tokens).max();
    let all_tiles = longest.unwrap_or(0).div_ceil(TILE_KEYS);
    let at_once = tuning::cuda_attention_grad_tiles(blocks, all_tiles, common.most_bytes);
    let score_grads = tuning::CUDA_SCORE_GRAD_BYTES.saturating_mul(blocks);
    let score_grads = cuda.scratch(score_grads.saturating_mul(at_once))?;
    let mut pass = TiledPass {
        args,
        common,
        variant,
        operands,
        score_grads,
        blocks,
        most_pages: pages.iter().copied().max().unwrap_or(0),
    };
    for first in (0..all_tiles).step_by(at_once) {
        let tiles = at_once.min(all_tiles - first);
        pass.keys(cuda, first, tiles)?;
        pass.queries(cuda, first, tiles)?;
    }
    Ok(())
}

/// What the kernels on the tensor cores read in place of the arguments.
struct Operands<G: Gpu> {
    /// Where position 0 of each row lies in the sums, then the first of its pages.
    offsets: PooledMemory<G>,
    /// Queries and gradients of the output, in 16 bits.
    q: PooledMemory<G>,
    grad: PooledMemory<G>,
    /// Of each query and head: the logarithm of its sum, and the product of output and gradient.
    stats: PooledMemory<G>,
}

/// Makes the operands. `pages` counts the pages that the new tokens of each row lie in.
fn begin<G: Gpu>(
    cuda: &mut Cuda<G>,
    args: &AttentionGrad<'_, Floats, Pages<'_>>,
    common: Common,
    pages: &[usize],
    out: Address,
    logsum: Address,
) -> Result<Operands<G>, OpError> {
    let layout = args.pages.layout();
    let (dim, pairs) = (layout.head_dim, common.tokens * common.heads);
    let mut next = 0;
    let first_pages = pages.iter().map(|pages| {
        next += pages;
        next - pages
    });
    let offsets = words(args.starts.iter().copied().chain(first_pages))?;
    let offsets = cuda.words(&offsets)?;
    let [q, grad] = [(); 2].map(|()| cuda.scratch(pairs.saturating_mul(2 * dim)));
    let (q, grad, stats) = (q?, grad?, cuda.scratch(pairs.saturating_mul(16))?);
    let kernels = ["attention_grad_begin_bf16", "attention_grad_begin_f16"];
    let launch = Launch {
        kernel: kernels[usize::from(layout.dtype == DType::F16)],
        grid: [ctas(pairs.div_ceil(8)), 1, 1],
        cta: [256, 1, 1],
        shared_bytes: 0,
        params: Params::new()
            .read(args.q)
            .read(args.grad)
            .address(out)
            .address(logsum)
            .address(q.address())
            .address(grad.address())
            .address(stats.address())
            .count(pairs)
            .count(dim)
            .float(1.0 / args.divisor),
    };
    // SAFETY: `check` has made sure that queries, gradients, outputs and logarithms hold all
    // tokens; the workspaces do too.
    unsafe { cuda.launch(launch)? };
    Ok(Operands { offsets, q, grad, stats })
}

/// The passes over keys and over queries, some tiles of keys at a time.
struct TiledPass<'a, 'p, G: Gpu> {
    args: AttentionGrad<'a, Floats, Pages<'p>>,
    common: Common,
    /// Index of the head dimension among the kernels.
    variant: usize,
    operands: Operands<G>,
    /// What the pass over keys leaves to that over queries: of each block, those of the tiles.
    score_grads: PooledMemory<G>,
    /// Pages of all rows times heads.
    blocks: usize,
    /// Pages of the row that has most.
    most_pages: usize,
}

impl<G: Gpu> TiledPass<'_, '_, G> {
    fn first_pages(&self) -> Address {
        self.operands.offsets.address().offset(4 * self.args.rows.len())
    }

    /// Gradients of keys and values of so many tiles from `first` on, and the score gradients.
    fn keys(&mut self, cuda: &mut Cuda<G>, first: usize, tiles: usize) -> Result<(), OpError> {
        let first_pages = self.first_pages();
        let (args, common) = (&mut self.args, self.common);
        let Operands { offsets, q, grad, stats } = &self.operands;
        let layout = args.pages.layout();
        let (kernels, shared_bytes) = KEYS[self.variant];
        let launch = Launch {
            kernel: kernels[usize::from(layout.dtype == DType::F16)],
            grid: [ctas(tiles), ctas(layout.kv_heads), ctas(args.rows.len())],
            cta: [128, 1, 1],
            shared_bytes: ctas(shared_bytes),
            params: Params::new()
                .address(q.address())
                .address(grad.address())
                .address(args.pages.address())
                .address(common.batch)
                .address(common.slopes)
                .address(offsets.address())
                .address(first_pages)
                .address(stats.address())
                .write(args.k_grad)
                .write(args.v_grad)
                .address(self.score_grads.address())
                .count(layout.kv_heads)
                .count(args.group)
                .count(self.blocks)
                .count(first)
                .float(1.0 / args.divisor)
                .float(args.alibi.map_or(0.0, |alibi| alibi.scale))
                .count(window(args.window)),
        };
        // SAFETY: `check` has made sure that every page exists, and that the sums hold all
        // positions of each row from its start on; the score gradients of all blocks and of these
        // tiles fit in `score_grads`.
        unsafe { cuda.launch(launch) }
    }

    /// Adds to the gradients of the queries what the score gradients of these tiles give.
    fn queries(&mut self, cuda: &mut Cuda<G>, first: usize, tiles: usize) -> Result<(), OpError> {
        let first_pages = self.first_pages();
        let (args, common) = (&mut self.args, self.common);
        let layout = args.pages.layout();
        let (kernels, shared_bytes) = QUERIES[self.variant];
        let launch = Launch {
            kernel: kernels[usize::from(layout.dtype == DType::F16)],
            grid: [
                ctas((self.most_pages * args.group).div_ceil(sizes::attention_grad::BLOCKS)),
                ctas(layout.kv_heads),
                ctas(args.rows.len()),
            ],
            cta: [128, 1, 1],
            shared_bytes: ctas(shared_bytes),
            params: Params::new()
                .address(args.pages.address())
                .address(common.batch)
                .address(first_pages)
                .address(self.score_grads.address())
                .write(args.q_grad)
                .count(layout.kv_heads)
                .count(args.group)
                .count(self.blocks)
                .count(first)
                .count(tiles)
                .count(window(args.window)),
        };
        // SAFETY: as in `keys`; it reads what that kernel has written.
        unsafe { cuda.launch(launch) }
    }
}

/// Pages that the new tokens of a row lie in.
fn pages_of(row: &StepRow<'_>) -> usize {
    match row.tokens {
        0 => 0,
        tokens => (row.prefix + tokens).div_ceil(PAGE_TOKENS) - row.prefix / PAGE_TOKENS,
    }
}

/// For all shapes, in f32.
fn generic<G: Gpu>(
    cuda: &mut Cuda<G>,
    args: AttentionGrad<'_, Floats, Pages<'_>>,
    common: Common,
) -> Result<(), OpError> {
    let layout = args.pages.layout();
    let dim = layout.head_dim;
    let starts = cuda.words(&words(args.starts.iter().copied())?)?;
    let stats = cuda.scratch((common.tokens * common.heads).saturating_mul(12))?;
    let sizes = |params: Params| {
        params
            .count(layout.kv_heads)
            .count(args.group)
            .count(dim)
            .float(1.0 / args.divisor)
            .float(args.alibi.map_or(0.0, |alibi| alibi.scale))
            .count(window(args.window))
    };
    let inputs = Params::new()
        .read(args.q)
        .read(args.grad)
        .address(args.pages.address())
        .address(common.batch)
        .address(common.slopes);
    let launch = Launch {
        kernel: by_dtype(GENERIC_QUERIES, layout.dtype),
        grid: [ctas(common.heads), ctas(common.tokens), 1],
        cta: [128, 1, 1],
        shared_bytes: ctas(
            sizes::attention_grad_generic::SHARED_BASE
                + sizes::attention_grad_generic::SHARED_PER_DIM * dim,
        ),
        params: sizes(inputs.write(args.q_grad).address(stats.address())),
    };
    // SAFETY: `check` has made sure that queries and their gradients hold all tokens, and that
    // every page exists.
    unsafe { cuda.launch(launch)? };
    let longest = args.rows.iter().map(|row| row.prefix + row.tokens).max();
    let launch = Launch {
        kernel: by_dtype(GENERIC_KEYS, layout.dtype),
        grid: [ctas(longest.unwrap_or(0)), ctas(layout.kv_heads), ctas(args.rows.len())],
        cta: [32, 1, 1],
        shared_bytes: 0,
        params: sizes(
            inputs
                .address(starts.address())
                .address(stats.address())
                .write(args.k_grad)
                .write(args.v_grad),
        ),
    };
    // SAFETY: as above; `check` has made sure that the sums hold all positions of each row from its
    // start on.
    unsafe { cuda.launch(launch) }
}

const GENERIC_QUERIES: [&str; 3] = [
    "attention_grad_generic_queries_f32",
    "attention_grad_generic_queries_bf16",
    "attention_grad_generic_queries_f16",
];
const GENERIC_KEYS: [&str; 3] = [
    "attention_grad_generic_keys_f32",
    "attention_grad_generic_keys_bf16",
    "attention_grad_generic_keys_f16",
];

/// By head dimension.
const QUERIES: [Kernels; 5] = [
    (
        ["attention_grad_queries_bf16_d64", "attention_grad_queries_f16_d64"],
        sizes::attention_grad::QUERIES_SHARED_D64,
    ),
    (
        ["attention_grad_queries_bf16_d80", "attention_grad_queries_f16_d80"],
        sizes::attention_grad::QUERIES_SHARED_D80,
    ),
    (
        ["attention_grad_queries_bf16_d96", "attention_grad_queries_f16_d96"],
        sizes::attention_grad::QUERIES_SHARED_D96,
    ),
    (
        ["attention_grad_queries_bf16_d112", "attention_grad_queries_f16_d112"],
        sizes::attention_grad::QUERIES_SHARED_D112,
    ),
    (
        ["attention_grad_queries_bf16_d128", "attention_grad_queries_f16_d128"],
        sizes::attention_grad::QUERIES_SHARED_D128,
    ),
];
const KEYS: [Kernels; 5] = [
    (
        ["attention_grad_keys_bf16_d64", "attention_grad_keys_f16_d64"],
        sizes::attention_grad::KEYS_SHARED_D64,
    ),
    (
        ["attention_grad_keys_bf16_d80", "attention_grad_keys_f16_d80"],
        sizes::attention_grad::KEYS_SHARED_D80,
    ),
    (
        ["attention_grad_keys_bf16_d96", "attention_grad_keys_f16_d96"],
        sizes::attention_grad::KEYS_SHARED_D96,
    ),
    (
        ["attention_grad_keys_bf16_d112", "attention_grad_keys_f16_d112"],
        sizes::attention_grad::KEYS_SHARED_D112,
    ),
    (
        ["attention_grad_keys_bf16_d128", "attention_grad_keys_f16_d128"],
        sizes::attention_grad::KEYS_SHARED_D128,
    ),
];
