//! Launches `layernorm.cu`.

use super::by_dtype;
use crate::cuda::gpu::ctas;
use crate::cuda::{Cuda, Floats, Gpu, Launch, Params};
use crate::ops::{Layernorm, OpError};
use crate::sizes;
use crate::tuning;

const KERNELS: [&str; 3] = ["layernorm_f32", "layernorm_bf16", "layernorm_f16"];

pub(crate) fn launch<G: Gpu>(
    cuda: &mut Cuda<G>,
    args: Layernorm<'_, Floats>,
) -> Result<(), OpError> {
    args.check()?;
    if args.rows == 0 || args.width == 0 {
        return Ok(());
    }
    let launch = Launch {
        kernel: by_dtype(KERNELS, args.round),
        grid: [ctas(args.rows), 1, 1],
        cta: [tuning::cuda_norm_threads(args.width), 1, 1],
        shared_bytes: ctas(sizes::layernorm::SHARED),
        params: Params::new()
            .read(args.x)
            .read(args.weight)
            .read(args.bias)
            .write(args.out)
            .count(args.width)
            .float(args.eps),
    };
    // SAFETY: `check` has made sure that the buffers hold `rows` rows of `width`; without a branch
    // to add, x is only read.
    unsafe { cuda.launch(launch) }
}
