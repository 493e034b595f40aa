//! One file per operation: checks its arguments, chooses the kernel and its grid, launches. None allocates or waits.

pub(crate) mod rmsnorm;

use shared::dtype::DType;

/// The variant of a kernel for a dtype, of `[f32, bf16, f16]`.
fn by_dtype(names: [&'static str; 3], dtype: DType) -> &'static str {
    match dtype {
        DType::F32 => names[0],
        DType::Bf16 => names[1],
        DType::F16 => names[2],
    }
}
