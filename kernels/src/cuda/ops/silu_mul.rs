//! Launches `silu_mul.cu`.

use super::{by_dtype, elementwise};
use crate::cuda::{Cuda, Floats, Gpu, Params};
use crate::ops::{OpError, SiluMul, SiluMulGrad};

pub(crate) fn launch<G: Gpu>(cuda: &mut Cuda<G>, args: SiluMul<'_, Floats>) -> Result<(), OpError> {
    args.check()?;
    let names = ["silu_mul_f32", "silu_mul_bf16", "silu_mul_f16"];
    let params = Params::new().write(args.gate).read(args.up).wide(args.len);
    // SAFETY: `check` has made sure that both hold `len` elements; buffers begin at multiples of
    // 256.
    unsafe { elementwise(cuda, by_dtype(names, args.round), args.len, params) }
}

pub(crate) fn launch_grad<G: Gpu>(
    cuda: &mut Cuda<G>,
    args: SiluMulGrad<'_, Floats>,
) -> Result<(), OpError> {
    args.check()?;
    let params = Params::new().write(args.gate).write(args.up).read(args.grad).wide(args.len);
    // SAFETY: as above, for all three.
    unsafe { elementwise(cuda, "silu_mul_grad", args.len, params) }
}
