//! One file per operation checks the arguments, chooses the kernel and its grid, and launches it.
//! No operation waits.

pub(crate) mod add;
pub(crate) mod attention;
pub(crate) mod attention_grad;
pub(crate) mod convert;
pub(crate) mod exchange;
pub(crate) mod experts;
pub(crate) mod experts_grad;
pub(crate) mod fused_launches;
pub(crate) mod gelu;
pub(crate) mod kv_append;
pub(crate) mod layernorm;
pub(crate) mod linear;
pub(crate) mod linear_grad;
pub(crate) mod lora;
pub(crate) mod norm_grad;
pub(crate) mod qkv;
pub(crate) mod quantize;
pub(crate) mod repack;
pub(crate) mod rmsnorm;
pub(crate) mod rope;
pub(crate) mod route;
pub(crate) mod silu_mul;
pub(crate) mod wgmma;

use shared::dtype::DType;

use super::gpu::ctas;
use super::{Cuda, Gpu, Launch, Params};
use crate::ops::OpError;

/// The variant of a kernel for a dtype, of `[f32, bf16, f16]`.
fn by_dtype(names: [&'static str; 3], dtype: DType) -> &'static str {
    match dtype {
        DType::F32 => names[0],
        DType::Bf16 => names[1],
        DType::F16 => names[2],
    }
}

/// Launches a kernel that takes 4 neighbours of `len` elements per thread.
///
/// # Safety
/// That of [`Gpu::launch`].
unsafe fn elementwise<G: Gpu>(
    cuda: &mut Cuda<G>,
    kernel: &'static str,
    len: usize,
    params: Params,
) -> Result<(), OpError> {
    if len == 0 {
        return Ok(());
    }
    let launch = Launch {
        kernel,
        grid: [ctas(len.div_ceil(1024)), 1, 1],
        cta: [256, 1, 1],
        shared_bytes: 0,
        params,
    };
    // SAFETY: the caller's.
    unsafe { cuda.launch(launch) }
}
