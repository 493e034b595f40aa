//! Launches `route.cu`.

use super::by_dtype;
use crate::cuda::gpu::ctas;
use crate::cuda::{Cuda, Floats, Gpu, Launch, Params};
use crate::ops::route::check_index;
use crate::ops::{GateDot, Gather, OpError, Route, RouteGrad, ScatterAdd, check_len};

/// Most experts of a router.
const MAX_EXPERTS: usize = 256;

fn check_experts(op: &'static str, experts: usize) -> Result<(), OpError> {
    let what = "more than 256 experts";
    match experts {
        0..=MAX_EXPERTS => Ok(()),
        _ => Err(OpError::Shape { op, what }),
    }
}

pub(crate) fn launch<G: Gpu>(cuda: &mut Cuda<G>, args: Route<'_, Floats>) -> Result<(), OpError> {
    args.check()?;
    check_experts("route", args.experts)?;
    if args.tokens == 0 {
        return Ok(());
    }
    let launch = Launch {
        kernel: by_dtype(["route_f32", "route_bf16", "route_f16"], args.round),
        grid: [ctas(args.tokens.div_ceil(4)), 1, 1],
        cta: [128, 1, 1],
        shared_bytes: 0,
        params: Params::new()
            .write(args.logits)
            .count(args.tokens)
            .count(args.experts)
            .count(args.chosen),
    };
    // SAFETY: `check` has made sure that there are logits of all tokens.
    unsafe { cuda.launch(launch) }
}

pub(crate) fn launch_grad<G: Gpu>(
    cuda: &mut Cuda<G>,
    args: RouteGrad<'_, Floats>,
) -> Result<(), OpError> {
    args.check()?;
    check_experts("route grad", args.experts)?;
    if args.tokens == 0 {
        return Ok(());
    }
    let names = ["route_grad_f32", "route_grad_bf16", "route_grad_f16"];
    let launch = Launch {
        kernel: by_dtype(names, args.round),
        grid: [ctas(args.tokens.div_ceil(4)), 1, 1],
        cta: [128, 1, 1],
        shared_bytes: 0,
        params: Params::new()
            .write(args.logits)
            .read(args.grad)
            .count(args.tokens)
            .count(args.experts)
            .count(args.chosen),
    };
    // SAFETY: as above, for the gradients too.
    unsafe { cuda.launch(launch) }
}

/// A launch of one CTA per moved row.
fn rows(kernel: &'static str, count: usize, params: Params) -> Launch {
    Launch {
        kernel,
        grid: [ctas(count), 1, 1],
        cta: [256, 1, 1],
        shared_bytes: 32 * 4,
        params,
    }
}

pub(crate) fn launch_gather<G: Gpu>(
    cuda: &mut Cuda<G>,
    args: Gather<'_, Floats>,
) -> Result<(), OpError> {
    let count = args.index.len();
    check_index("gather", args.index, args.x.len(), args.width)?;
    check_len("gather", "out", args.out.len(), count, args.width)?;
    if count == 0 {
        return Ok(());
    }
    let index = cuda.words(args.index)?;
    let params = Params::new()
        .read(args.x)
        .address(index.address())
        .write(args.out)
        .count(args.width);
    // SAFETY: every row that is named exists, and `out` holds them all.
    unsafe { cuda.launch(rows("gather", count, params)) }
}

pub(crate) fn launch_scatter_add<G: Gpu>(
    cuda: &mut Cuda<G>,
    args: ScatterAdd<'_, Floats>,
) -> Result<(), OpError> {
    let count = args.index.len();
    check_index("scatter", args.index, args.out.len(), args.width)?;
    check_len("scatter", "x", args.x.len(), count, args.width)?;
    check_len("scatter", "weights", args.weights.len(), 1, count)?;
    if count == 0 {
        return Ok(());
    }
    let (index, weights) = (cuda.words(args.index)?, cuda.floats(args.weights)?);
    let names = ["scatter_add_f32", "scatter_add_bf16", "scatter_add_f16"];
    let params = Params::new()
        .read(args.x)
        .address(index.address())
        .address(weights.address())
        .write(args.out)
        .count(args.width);
    // SAFETY: every row that is named exists, once, and `x` holds a row for each.
    unsafe { cuda.launch(rows(by_dtype(names, args.round), count, params)) }
}

pub(crate) fn launch_gate_dot<G: Gpu>(
    cuda: &mut Cuda<G>,
    args: GateDot<'_, Floats>,
) -> Result<(), OpError> {
    args.check()?;
    let count = args.index.len();
    if count == 0 {
        return Ok(());
    }
    let index = cuda.words(args.index)?;
    let params = Params::new()
        .read(args.gate)
        .read(args.up)
        .read(args.grad)
        .address(index.address())
        .write(args.out)
        .count(args.width)
        .count(args.expert)
        .count(args.experts);
    // SAFETY: `check` has made sure that every token that is named has a row of experts, and of three inputs of that width.
    unsafe { cuda.launch(rows("gate_dot", count, params)) }
}
