//! Launches that do the work of several operations of a block, with their bits.

use super::by_dtype;
use crate::cuda::gpu::ctas;
use crate::cuda::{Cuda, Floats, Gpu, Launch, Pages, Params};
use crate::kv::{StepRow, total_tokens};
use crate::ops::{Add, KvAppend, OpError, PagePool, Rmsnorm, Rope, check_len};
use crate::tuning;

/// Arguments of a residual and the norm behind it: [`Add`], then [`Rmsnorm`] or, with a bias, [`Layernorm`](crate::ops::Layernorm) of the sum.
#[derive(Debug)]
pub(crate) struct AddNorm<'a> {
    /// First summand, and the sum `[rows, width]`.
    pub x: &'a mut Floats,
    /// Second summand `[rows, width]`.
    pub y: &'a Floats,
    /// Scale of the norm `[width]`.
    pub weight: &'a Floats,
    /// Added at the end, of a layer norm `[width]`.
    pub bias: Option<&'a Floats>,
    /// The norm of the sum `[rows, width]`.
    pub out: &'a mut Floats,
    /// Rows.
    pub rows: usize,
    /// Features of a row.
    pub width: usize,
    /// Added to the mean square or the variance.
    pub eps: f32,
    /// The block dtype.
    pub round: shared::dtype::DType,
}

pub(crate) fn add_norm<G: Gpu>(cuda: &mut Cuda<G>, args: AddNorm<'_>) -> Result<(), OpError> {
    let (rows, width, round) = (args.rows, args.width, args.round);
    Rmsnorm {
        x: args.y,
        weight: args.weight,
        out: &mut *args.out,
        rows,
        width,
        eps: args.eps,
        round,
    }
    .check()?;
    let len = rows * width;
    Add {
        x: &mut *args.x,
        y: args.y,
        len,
        round,
    }
    .check()?;
    let bias = args.bias.map_or(width, Floats::len);
    check_len("layernorm", "bias", bias, 1, width)?;
    if len == 0 {
        return Ok(());
    }
    let params = Params::new().write(args.x).read(args.y).read(args.weight);
    let (names, params) = match args.bias {
        None => (
            ["rmsnorm_add_f32", "rmsnorm_add_bf16", "rmsnorm_add_f16"],
            params,
        ),
        Some(bias) => (
            [
                "layernorm_add_f32",
                "layernorm_add_bf16",
                "layernorm_add_f16",
            ],
            params.read(bias),
        ),
    };
    let launch = Launch {
        kernel: by_dtype(names, round),
        grid: [ctas(rows), 1, 1],
        cta: [tuning::cuda_norm_threads(width), 1, 1],
        shared_bytes: 64 * 4,
        params: params.write(args.out).count(width).float(args.eps),
    };
    // SAFETY: the checks have made sure that all buffers hold `rows` rows of `width`.
    unsafe { cuda.launch(launch) }
}

/// Arguments of the rotation of queries and keys, and of the append: [`Rope`] twice, then [`KvAppend`].
#[derive(Debug)]
pub(crate) struct RopeAppend<'a, 'k> {
    /// Queries, rotated in place `[tokens, heads, head_dim]`.
    pub q: &'a mut Floats,
    /// Keys before rotation `[tokens, kv_heads, head_dim]`; they stay so.
    pub k: &'a Floats,
    /// Values, shaped as the keys.
    pub v: &'a Floats,
    /// From [`RopeTable`](crate::ops::RopeTable), of the dtype of the pages.
    pub table: &'a Floats,
    /// The batch.
    pub rows: &'a [StepRow<'a>],
    /// Query heads per kv head.
    pub group: usize,
    /// Where keys and values go.
    pub pages: &'a mut Pages<'k>,
}

pub(crate) fn rope_append<G: Gpu>(
    cuda: &mut Cuda<G>,
    args: RopeAppend<'_, '_>,
) -> Result<(), OpError> {
    let (layout, tokens) = (args.pages.layout(), total_tokens(args.rows));
    let (heads, head_dim) = (layout.kv_heads * args.group, layout.head_dim);
    Rope {
        x: &mut *args.q,
        table: args.table,
        tokens,
        heads,
        head_dim,
        round: layout.dtype,
        inverse: false,
    }
    .check()?;
    KvAppend {
        keys: args.k,
        values: args.v,
        rows: args.rows,
        pages: &mut *args.pages,
    }
    .check()?;
    if tokens * heads * head_dim == 0 {
        return Ok(());
    }
    let batch = cuda.batch(args.rows)?;
    let names = ["rope_append_f32", "rope_append_bf16", "rope_append_f16"];
    let launch = Launch {
        kernel: by_dtype(names, layout.dtype),
        grid: [ctas(tokens), 1, 1],
        cta: [512, 1, 1],
        shared_bytes: 0,
        params: Params::new()
            .write(args.q)
            .read(args.k)
            .read(args.v)
            .read(args.table)
            .address(batch)
            .address(args.pages.address())
            .address(args.pages.mirror())
            .count(heads)
            .count(layout.kv_heads)
            .count(head_dim),
    };
    // SAFETY: the checks have made sure that queries, keys, values and the table hold all tokens and that every page exists.
    unsafe { cuda.launch(launch) }
}
