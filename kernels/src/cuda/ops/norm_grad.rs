//! Launches `norm_grad.cu`.

use crate::cuda::gpu::ctas;
use crate::cuda::{Cuda, Floats, Gpu, Launch, Params};
use crate::ops::{NormGrad, OpError};
use crate::sizes;
use crate::tuning;

pub(crate) fn launch<G: Gpu>(
    cuda: &mut Cuda<G>,
    args: NormGrad<'_, Floats>,
) -> Result<(), OpError> {
    args.check()?;
    if args.rows == 0 || args.width == 0 {
        return Ok(());
    }
    let launch = Launch {
        kernel: match args.centered {
            false => "rmsnorm_grad",
            true => "layernorm_grad",
        },
        grid: [ctas(args.rows), 1, 1],
        cta: [tuning::cuda_norm_threads(args.width), 1, 1],
        shared_bytes: ctas(sizes::norm_grad::SHARED),
        params: Params::new()
            .read(args.x)
            .read(args.weight)
            .write(args.grad)
            .count(args.width)
            .float(args.eps),
    };
    // SAFETY: `check` has made sure that the buffers hold `rows` rows of `width`.
    unsafe { cuda.launch(launch) }
}
