//! Launches `attention_grad.cu` and `attention_grad_any.cu`.

use shared::dtype::DType;

use super::attention::{MAX_HEAD_DIM, slopes, window};
use super::by_dtype;
use crate::cuda::gpu::ctas;
use crate::cuda::{Cuda, Floats, Gpu, Launch, Pages, Params};
use crate::kv::{PAGE_TOKENS, StepRow, total_tokens};
use crate::ops::{AttentionGrad, OpError, PagePool};

/// Head dimensions of the tensor-core kernels.
const HEAD_DIMS: [usize; 5] = [64, 80, 96, 112, 128];

/// Keys of a tile.
const TILE_KEYS: usize = 64;

pub(crate) fn launch<G: Gpu>(
    cuda: &mut Cuda<G>,
    args: AttentionGrad<'_, Floats, Pages<'_>>,
) -> Result<(), OpError> {
    args.check()?;
    let layout = args.pages.layout();
    let (op, dim) = ("attention grad", layout.head_dim);
    let (tokens, heads) = (total_tokens(args.rows), layout.kv_heads * args.group);
    if tokens * heads * dim == 0 {
        return Ok(());
    }
    if dim > MAX_HEAD_DIM {
        let what = "a head of more than 256 elements";
        return Err(OpError::Shape { op, what });
    }
    let batch = cuda.batch(args.rows)?;
    let slopes = slopes(cuda, args.alibi)?;
    let starts: Result<Vec<u32>, _> = args.starts.iter().map(|&s| u32::try_from(s)).collect();
    let starts = cuda.words(&starts.map_err(|_| OpError::Shape {
        op,
        what: "more positions than a word counts",
    })?)?;
    let variant = HEAD_DIMS.iter().position(|&has| has == dim);
    let variant = variant.filter(|_| layout.dtype != DType::F32);
    let (stat_bytes, rounded_bytes) = match variant {
        Some(_) => (16, 2 * dim),
        None => (12, 0),
    };
    let stats = cuda.scratch((tokens * heads).saturating_mul(stat_bytes))?;
    let sizes = |params: Params| {
        let params = params.count(layout.kv_heads).count(args.group);
        let params = match variant {
            Some(_) => params,
            None => params.count(dim),
        };
        params
            .float(1.0 / args.divisor)
            .float(args.alibi.map_or(0.0, |alibi| alibi.scale))
            .count(window(args.window))
    };
    // The tensor cores multiply numbers of 16 bits.
    let len = tokens * heads * dim;
    let rounded = [(); 2].map(|()| cuda.scratch((tokens * heads).saturating_mul(rounded_bytes)));
    let [rounded_q, rounded_grad] = rounded;
    let (rounded_q, rounded_grad) = (rounded_q?, rounded_grad?);
    let is_f16 = usize::from(layout.dtype == DType::F16);
    let inputs = match variant {
        Some(_) => {
            let convert = ["convert_f32_bf16", "convert_f32_f16"];
            let (q, grad) = (rounded_q.address(), rounded_grad.address());
            super::convert::launch(cuda, convert[is_f16], args.q.address(), q, len)?;
            super::convert::launch(cuda, convert[0], args.grad.address(), grad, len)?;
            Params::new().address(q).address(grad)
        }
        None => Params::new().read(args.q).read(args.grad),
    };
    let inputs = inputs
        .address(args.pages.address())
        .address(batch)
        .address(slopes);
    let (kernel, grid, shared_bytes) = match variant {
        Some(variant) => {
            let quads = (most_pages(args.rows) * args.group).div_ceil(4);
            (
                QUERIES[variant][is_f16],
                [ctas(quads), ctas(layout.kv_heads), ctas(args.rows.len())],
                4 * TILE_KEYS * (2 * dim + 16),
            )
        }
        None => (
            by_dtype(ANY_QUERIES, layout.dtype),
            [ctas(heads), ctas(tokens), 1],
            (2 * dim + 256) * 4,
        ),
    };
    let launch = Launch {
        kernel,
        grid,
        cta: [128, 1, 1],
        shared_bytes: ctas(shared_bytes),
        params: sizes(inputs.write(args.q_grad).address(stats.address())),
    };
    // SAFETY: `check` has made sure that queries and their gradients hold all tokens, and that every page exists.
    unsafe { cuda.launch(launch)? };
    let longest = args.rows.iter().map(|row| row.prefix + row.tokens).max();
    let longest = longest.unwrap_or(0);
    let (kernel, positions, threads, shared_bytes) = match variant {
        Some(variant) => {
            let stage = PAGE_TOKENS * (2 * (2 * dim + 16) + 16);
            (
                KEYS[variant][is_f16],
                TILE_KEYS,
                128,
                2 * TILE_KEYS * (2 * dim + 16) + 3 * stage,
            )
        }
        None => (by_dtype(ANY_KEYS, layout.dtype), 1, 32, 0),
    };
    let launch = Launch {
        kernel,
        grid: [
            ctas(longest.div_ceil(positions)),
            ctas(layout.kv_heads),
            ctas(args.rows.len()),
        ],
        cta: [threads, 1, 1],
        shared_bytes: ctas(shared_bytes),
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

/// Most pages that the new tokens of a row lie in.
fn most_pages(rows: &[StepRow<'_>]) -> usize {
    let pages = |row: &StepRow<'_>| {
        (row.prefix + row.tokens).div_ceil(PAGE_TOKENS) - row.prefix / PAGE_TOKENS
    };
    rows.iter().map(pages).max().unwrap_or(0)
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
