//! Launches `route.cu`.

use super::by_dtype;
use crate::cuda::gpu::ctas;
use crate::cuda::{Cuda, Floats, Gpu, Launch, Params};
use crate::ops::route::check_index;
use crate::ops::{Gather, OpError, Route, RouteGrad, check_len};

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
    let launch = Launch {
        kernel: "gather",
        grid: [ctas(count), 1, 1],
        cta: [256, 1, 1],
        shared_bytes: 0,
        params: Params::new()
            .read(args.x)
            .address(index.address())
            .write(args.out)
            .count(args.width),
    };
    // SAFETY: every row that is named exists, and `out` holds them all.
    unsafe { cuda.launch(launch) }
}
