//! Launches `attention_grad.cu` and `attention_grad_any.cu`.

use shared::dtype::DType;

use super::attention::{MAX_HEAD_DIM, slopes, window};
use super::by_dtype;
use crate::cuda::gpu::ctas;
use crate::cuda::{Address, Cuda, Floats, Gpu, Launch, Pages, Params};
use crate::kv::{PAGE_TOKENS, StepRow, total_tokens};
use crate::ops::{Attention, AttentionGrad, OpError, PagePool};
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

/// The same with so much memory for what the pass over keys leaves to that over queries, or for one tile.
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
    let variant = tuning::CUDA_ATTENTION_GRAD_DIMS
        .iter()
        .position(|&has| has == layout.head_dim);
    let variant = variant.filter(|_| layout.dtype != DType::F32);
    let common = Common {
        batch: cuda.batch(args.rows)?,
        slopes: slopes(cuda, args.alibi)?,
        tokens,
        heads,
        most_bytes,
    };
    match (variant, &args.known) {
        (None, _) => any(cuda, args, common),
        (Some(variant), Some(known)) => {
            let known = (known.out.address(), known.logsum.address());
            tiled(cuda, args, common, variant, known)
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
            let known = (out.address(), logsum.address());
            tiled(cuda, args, common, variant, known)
        }
    }
}

/// What all kernels are told alike.
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
    words.map_err(|_| OpError::Shape {
        op: OP,
        what: "more positions than a word counts",
    })
}

/// On the tensor cores; `out` and `logsum` are what attention gave.
fn tiled<G: Gpu>(
    cuda: &mut Cuda<G>,
    args: AttentionGrad<'_, Floats, Pages<'_>>,
    common: Common,
    variant: usize,
    (out, logsum): (Address, Address),
) -> Result<(), OpError> {
    let layout = args.pages.layout();
    let (dim, pairs, rows) = (layout.head_dim, common.tokens * common.heads, args.rows);
    let is_f16 = usize::from(layout.dtype == DType::F16);
    let pages: Vec<usize> = rows.iter().map(pages_of).collect();
    let mut next = 0;
    let first_pages = pages.iter().map(|pages| {
        next += pages;
        next - pages
    });
    let places = words(args.starts.iter().copied().chain(first_pages))?;
    let places = cuda.words(&places)?;
    let (starts, first_pages) = (places.address(), places.address().offset(4 * rows.len()));
    let [q, grad] = [(); 2].map(|()| cuda.scratch(pairs.saturating_mul(2 * dim)));
    let (q, grad, stats) = (q?, grad?, cuda.scratch(pairs.saturating_mul(16))?);
    let launch = Launch {
        kernel: ["attention_grad_begin_bf16", "attention_grad_begin_f16"][is_f16],
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
    // SAFETY: `check` has made sure that queries, gradients, outputs and logarithms hold all tokens; the workspaces do too.
    unsafe { cuda.launch(launch)? };

    let blocks = pages.iter().sum::<usize>() * common.heads;
    let most_pages = pages.iter().copied().max().unwrap_or(0);
    let longest = rows.iter().map(|row| row.prefix + row.tokens).max();
    let all_tiles = longest.unwrap_or(0).div_ceil(TILE_KEYS);
    let at_once = tuning::cuda_attention_grad_tiles(blocks, all_tiles, common.most_bytes);
    let changes = tuning::CUDA_ATTENTION_CHANGES_BYTES.saturating_mul(blocks);
    let changes = cuda.scratch(changes.saturating_mul(at_once))?;
    let (pitch, stage) = (2 * dim + 16, PAGE_TOKENS * (2 * (2 * dim + 16) + 16));
    for first in (0..all_tiles).step_by(at_once) {
        let tiles = at_once.min(all_tiles - first);
        let keys = Launch {
            kernel: KEYS[variant][is_f16],
            grid: [ctas(tiles), ctas(layout.kv_heads), ctas(rows.len())],
            cta: [128, 1, 1],
            shared_bytes: ctas(2 * TILE_KEYS * pitch + 3 * stage),
            params: Params::new()
                .address(q.address())
                .address(grad.address())
                .address(args.pages.address())
                .address(common.batch)
                .address(common.slopes)
                .address(starts)
                .address(first_pages)
                .address(stats.address())
                .write(args.k_grad)
                .write(args.v_grad)
                .address(changes.address())
                .count(layout.kv_heads)
                .count(args.group)
                .count(blocks)
                .count(first)
                .float(1.0 / args.divisor)
                .float(args.alibi.map_or(0.0, |alibi| alibi.scale))
                .count(window(args.window)),
        };
        // SAFETY: `check` has made sure that every page exists, and that the sums hold all positions of each row from its start on; the
        // changes of all blocks and of these tiles have room.
        unsafe { cuda.launch(keys)? };
        let queries = Launch {
            kernel: QUERIES[variant][is_f16],
            grid: [
                ctas((most_pages * args.group).div_ceil(BLOCKS)),
                ctas(layout.kv_heads),
                ctas(rows.len()),
            ],
            cta: [128, 1, 1],
            shared_bytes: ctas(
                3 * (TILE_KEYS * pitch + BLOCKS * tuning::CUDA_ATTENTION_CHANGES_BYTES),
            ),
            params: Params::new()
                .address(args.pages.address())
                .address(common.batch)
                .address(first_pages)
                .address(changes.address())
                .write(args.q_grad)
                .count(layout.kv_heads)
                .count(args.group)
                .count(blocks)
                .count(first)
                .count(tiles)
                .count(window(args.window)),
        };
        // SAFETY: as above; it reads what the kernel before has written.
        unsafe { cuda.launch(queries)? };
    }
    Ok(())
}

/// Blocks of a CTA of the kernel for queries.
const BLOCKS: usize = 8;

/// Pages that the new tokens of a row lie in.
fn pages_of(row: &StepRow<'_>) -> usize {
    match row.tokens {
        0 => 0,
        tokens => (row.prefix + tokens).div_ceil(PAGE_TOKENS) - row.prefix / PAGE_TOKENS,
    }
}

/// For all shapes, in f32.
fn any<G: Gpu>(
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
        kernel: by_dtype(ANY_QUERIES, layout.dtype),
        grid: [ctas(common.heads), ctas(common.tokens), 1],
        cta: [128, 1, 1],
        shared_bytes: ctas((2 * dim + 256) * 4),
        params: sizes(inputs.write(args.q_grad).address(stats.address())),
    };
    // SAFETY: `check` has made sure that queries and their gradients hold all tokens, and that every page exists.
    unsafe { cuda.launch(launch)? };
    let longest = args.rows.iter().map(|row| row.prefix + row.tokens).max();
    let launch = Launch {
        kernel: by_dtype(ANY_KEYS, layout.dtype),
        grid: [
            ctas(longest.unwrap_or(0)),
            ctas(layout.kv_heads),
            ctas(args.rows.len()),
        ],
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
    // SAFETY: as above; `check` has made sure that the sums hold all positions of each row from its start on.
    unsafe { cuda.launch(launch) }
}

const ANY_QUERIES: [&str; 3] = [
    "attention_grad_any_queries_f32",
    "attention_grad_any_queries_bf16",
    "attention_grad_any_queries_f16",
];
const ANY_KEYS: [&str; 3] = [
    "attention_grad_any_keys_f32",
    "attention_grad_any_keys_bf16",
    "attention_grad_any_keys_f16",
];

/// By head dimension, then `[bf16, f16]`.
const QUERIES: [[&str; 2]; 5] = [
    [
        "attention_grad_queries_bf16_d64",
        "attention_grad_queries_f16_d64",
    ],
    [
        "attention_grad_queries_bf16_d80",
        "attention_grad_queries_f16_d80",
    ],
    [
        "attention_grad_queries_bf16_d96",
        "attention_grad_queries_f16_d96",
    ],
    [
        "attention_grad_queries_bf16_d112",
        "attention_grad_queries_f16_d112",
    ],
    [
        "attention_grad_queries_bf16_d128",
        "attention_grad_queries_f16_d128",
    ],
];
const KEYS: [[&str; 2]; 5] = [
    [
        "attention_grad_keys_bf16_d64",
        "attention_grad_keys_f16_d64",
    ],
    [
        "attention_grad_keys_bf16_d80",
        "attention_grad_keys_f16_d80",
    ],
    [
        "attention_grad_keys_bf16_d96",
        "attention_grad_keys_f16_d96",
    ],
    [
        "attention_grad_keys_bf16_d112",
        "attention_grad_keys_f16_d112",
    ],
    [
        "attention_grad_keys_bf16_d128",
        "attention_grad_keys_f16_d128",
    ],
];
