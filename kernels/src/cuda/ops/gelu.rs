//! Launches `gelu.cu`.

use super::{by_dtype, elementwise};
use crate::cuda::{Cuda, Floats, Gpu, Params};
use crate::ops::{Gelu, GeluGrad, GeluKind, OpError};

pub(crate) fn launch<G: Gpu>(cuda: &mut Cuda<G>, args: Gelu<'_, Floats>) -> Result<(), OpError> {
    args.check()?;
    let names = match args.kind {
        GeluKind::Tanh => ["gelu_tanh_f32", "gelu_tanh_bf16", "gelu_tanh_f16"],
        GeluKind::Erf => ["gelu_erf_f32", "gelu_erf_bf16", "gelu_erf_f16"],
    };
    let params = Params::new().write(args.x).wide(args.len);
    // SAFETY: `check` has made sure that `x` holds `len` elements; buffers begin at multiples of
    // 256.
    unsafe { elementwise(cuda, by_dtype(names, args.round), args.len, params) }
}

pub(crate) fn launch_grad<G: Gpu>(
    cuda: &mut Cuda<G>,
    args: GeluGrad<'_, Floats>,
) -> Result<(), OpError> {
    args.check()?;
    let kernel = match args.kind {
        GeluKind::Tanh => "gelu_tanh_grad",
        GeluKind::Erf => "gelu_erf_grad",
    };
    let params = Params::new().read(args.x).write(args.grad).wide(args.len);
    // SAFETY: as above, for both.
    unsafe { elementwise(cuda, kernel, args.len, params) }
}
