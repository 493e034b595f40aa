//! Launches `qkv.cu`.

use crate::cuda::gpu::ctas;
use crate::cuda::{Cuda, Floats, Gpu, Launch, Params};
use crate::ops::{JoinQkv, OpError, SplitQkv};

pub(crate) fn launch_split<G: Gpu>(
    cuda: &mut Cuda<G>,
    args: SplitQkv<'_, Floats>,
) -> Result<(), OpError> {
    args.check()?;
    let params = Params::new().read(args.fused).write(args.q).write(args.k).write(args.v);
    let sizes = [args.tokens * args.kv_heads, args.group, args.head_dim];
    // SAFETY: `check` has made sure that all four hold all heads of all tokens.
    unsafe { launch(cuda, "split_qkv", params, sizes) }
}

pub(crate) fn launch_join<G: Gpu>(
    cuda: &mut Cuda<G>,
    args: JoinQkv<'_, Floats>,
) -> Result<(), OpError> {
    args.check()?;
    let params = Params::new().write(args.fused).read(args.q).read(args.k).read(args.v);
    let sizes = [args.tokens * args.kv_heads, args.group, args.head_dim];
    // SAFETY: as above; only `fused` is written.
    unsafe { launch(cuda, "join_qkv", params, sizes) }
}

/// `sizes`: heads of all tokens, group, head dimension.
///
/// # Safety
/// The buffers in `params` hold them.
unsafe fn launch<G: Gpu>(
    cuda: &mut Cuda<G>,
    kernel: &'static str,
    params: Params,
    sizes: [usize; 3],
) -> Result<(), OpError> {
    let [heads, group, head_dim] = sizes;
    let elements = heads * (group + 2) * head_dim;
    if elements == 0 {
        return Ok(());
    }
    let launch = Launch {
        kernel,
        grid: [ctas(elements.div_ceil(256)), 1, 1],
        cta: [256, 1, 1],
        shared_bytes: 0,
        params: params.count(heads).count(group).count(head_dim),
    };
    // SAFETY: the caller's.
    unsafe { cuda.launch(launch) }
}
