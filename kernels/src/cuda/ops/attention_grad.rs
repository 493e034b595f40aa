//! Launches `attention_grad.cu`.

use super::attention::{MAX_HEAD_DIM, slopes, window};
use super::by_dtype;
use crate::cuda::gpu::ctas;
use crate::cuda::{Cuda, Floats, Gpu, Launch, Pages, Params};
use crate::kv::total_tokens;
use crate::ops::{AttentionGrad, OpError, PagePool};

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
    let stats = cuda.scratch((tokens * heads).saturating_mul(12))?;
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
        .address(batch)
        .address(slopes);
    let queries = [
        "attention_grad_queries_f32",
        "attention_grad_queries_bf16",
        "attention_grad_queries_f16",
    ];
    let launch = Launch {
        kernel: by_dtype(queries, layout.dtype),
        grid: [ctas(heads), ctas(tokens), 1],
        cta: [128, 1, 1],
        shared_bytes: ctas((2 * dim + 256) * 4),
        params: sizes(inputs.write(args.q_grad).address(stats.address())),
    };
    // SAFETY: `check` has made sure that queries and their gradients hold all tokens, and that every page exists.
    unsafe { cuda.launch(launch)? };
    let keys = [
        "attention_grad_keys_f32",
        "attention_grad_keys_bf16",
        "attention_grad_keys_f16",
    ];
    let longest = args.rows.iter().map(|row| row.prefix + row.tokens).max();
    let launch = Launch {
        kernel: by_dtype(keys, layout.dtype),
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
