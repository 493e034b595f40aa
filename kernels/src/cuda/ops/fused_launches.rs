//! Launches that do the work of several operations of a block, with their bits.

use super::{by_dtype, rmsnorm};
use crate::cuda::gpu::ctas;
use crate::cuda::{Cuda, Floats, Gpu, Launch, Pages, Params};
use crate::kv::total_tokens;
use crate::ops::{AddNorm, OpError, PagePool, RopeAppend};
use crate::sizes;
use crate::tuning;

pub(crate) fn add_norm<G: Gpu>(
    cuda: &mut Cuda<G>,
    mut args: AddNorm<'_, Floats>,
) -> Result<(), OpError> {
    args.check()?;
    let (rows, width, round) = (args.rows, args.width, args.round);
    if rows * width == 0 {
        return Ok(());
    }
    let params = Params::new().write(args.x).read(args.y).read(args.weight);
    let (names, params, shared_bytes) = match args.bias {
        None => (
            ["rmsnorm_add_f32", "rmsnorm_add_bf16", "rmsnorm_add_f16"],
            params,
            rmsnorm::shared_bytes(width),
        ),
        Some(bias) => (
            ["layernorm_add_f32", "layernorm_add_bf16", "layernorm_add_f16"],
            params.read(bias),
            sizes::layernorm::SHARED,
        ),
    };
    let launch = Launch {
        kernel: by_dtype(names, round),
        grid: [ctas(rows), 1, 1],
        cta: [tuning::cuda_norm_threads(width), 1, 1],
        shared_bytes: ctas(shared_bytes),
        params: params.write(args.out).count(width).float(args.eps),
    };
    // SAFETY: the checks have made sure that all buffers hold `rows` rows of `width`.
    unsafe { cuda.launch(launch) }
}

pub(crate) fn rope_append<G: Gpu>(
    cuda: &mut Cuda<G>,
    mut args: RopeAppend<'_, Floats, Pages<'_>>,
) -> Result<(), OpError> {
    args.check()?;
    let (layout, tokens) = (args.pages.layout(), total_tokens(args.rows));
    let (heads, head_dim) = (layout.kv_heads * args.group, layout.head_dim);
    if tokens * heads * head_dim == 0 {
        return Ok(());
    }
    let batch = cuda.batch(args.rows)?;
    let names = ["rope_append_f32", "rope_append_bf16", "rope_append_f16"];
    let pairs = (args.group + 1) * (head_dim / 2);
    let threads = pairs.next_multiple_of(32).min(sizes::rope::APPEND_THREADS);
    let launch = Launch {
        kernel: by_dtype(names, layout.dtype),
        grid: [ctas(tokens), ctas(layout.kv_heads), 1],
        cta: [ctas(threads), 1, 1],
        shared_bytes: 0,
        params: Params::new()
            .write(args.q)
            .read(args.k)
            .read(args.v)
            .read(args.table)
            .address(batch)
            .address(args.pages.address())
            .address(args.pages.outlet().address)
            .count(args.pages.outlet().block)
            .count(layout.kv_heads)
            .count(args.group)
            .count(head_dim),
    };
    // SAFETY: the checks have made sure that queries, keys, values and the table hold all tokens
    // and that every page exists.
    unsafe { cuda.launch(launch) }
}
