//! Launches `convert.cu`.

use super::elementwise;
use crate::cuda::{Address, Cuda, Gpu, Params};
use crate::ops::OpError;

/// Converts `len` elements from `from` to `to` with a kernel of `convert.cu`.
pub(in crate::cuda) fn launch<G: Gpu>(
    cuda: &mut Cuda<G>,
    kernel: &'static str,
    from: Address,
    to: Address,
    len: usize,
) -> Result<(), OpError> {
    let params = Params::new().address(from).address(to).wide(len);
    // SAFETY: the callers convert memory of `len` elements to memory of as many.
    unsafe { elementwise(cuda, kernel, len, params) }
}
