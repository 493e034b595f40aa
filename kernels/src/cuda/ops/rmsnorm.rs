//! Launches `rmsnorm.cu`.

use super::by_dtype;
use crate::cuda::gpu::ctas;
use crate::cuda::{Cuda, Floats, Gpu, Launch, Params};
use crate::ops::{OpError, Rmsnorm};
use crate::sizes;
use crate::tuning;

const KERNELS: [&str; 3] = ["rmsnorm_f32", "rmsnorm_bf16", "rmsnorm_f16"];

/// Bytes of shared memory for rows of this width.
pub(super) fn shared_bytes(width: usize) -> usize {
    width.div_ceil(64) * sizes::rmsnorm::SHARED_PER_BLOCK
}

/// Enqueues the norm.
pub(crate) fn launch<G: Gpu>(cuda: &mut Cuda<G>, args: Rmsnorm<'_, Floats>) -> Result<(), OpError> {
    args.check()?;
    if args.rows == 0 || args.width == 0 {
        return Ok(());
    }
    let launch = Launch {
        kernel: by_dtype(KERNELS, args.round),
        grid: [ctas(args.rows), 1, 1],
        cta: [tuning::cuda_norm_threads(args.width), 1, 1],
        shared_bytes: ctas(shared_bytes(args.width)),
        params: Params::new()
            .read(args.x)
            .read(args.weight)
            .write(args.out)
            .count(args.width)
            .float(args.eps),
    };
    // SAFETY: `check` has made sure that the buffers hold `rows` rows of `width`, which is what
    // rmsnorm.cu uses.
    unsafe { cuda.launch(launch) }
}
