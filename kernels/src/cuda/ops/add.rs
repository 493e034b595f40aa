//! Launches `add.cu`.

use super::{by_dtype, elementwise};
use crate::cuda::{Cuda, Floats, Gpu, Params};
use crate::ops::{Add, OpError, PromptAdd};

const KERNELS: [&str; 3] = ["add_f32", "add_bf16", "add_f16"];

pub(crate) fn launch<G: Gpu>(cuda: &mut Cuda<G>, args: Add<'_, Floats>) -> Result<(), OpError> {
    args.check()?;
    let params = Params::new().write(args.x).read(args.y).wide(args.len);
    // SAFETY: `check` has made sure that both hold `len` elements.
    unsafe { elementwise(cuda, by_dtype(KERNELS, args.round), args.len, params) }
}

pub(crate) fn launch_prompt<G: Gpu>(
    cuda: &mut Cuda<G>,
    args: PromptAdd<'_, Floats>,
) -> Result<(), OpError> {
    let (has, len) = (args.x.len(), args.prompt.len());
    let needs = args.offset.saturating_add(len);
    if needs > has {
        let (op, what) = ("prompt add", "x");
        return Err(OpError::Short { op, what, has, needs });
    }
    let prompt = cuda.floats(args.prompt)?;
    let params = Params::new()
        .address(args.x.address().offset(args.offset * 4))
        .address(prompt.address())
        .wide(len);
    // SAFETY: `x` has `len` elements from the offset on, and so has the prompt.
    unsafe { elementwise(cuda, by_dtype(KERNELS, args.round), len, params) }
}
