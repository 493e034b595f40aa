//! Launches `wgmma.cu`, the products of a warpgroup by themselves.

use shared::dtype::DType;

use crate::cuda::gpu::ctas;
use crate::cuda::{Cuda, Floats, Gpu, GpuError, Launch, Params};
use crate::ops::{OpError, check_len};
use crate::sizes;

/// One product: `out = a bᵀ`.
#[derive(Debug)]
pub(crate) struct Args<'a> {
    /// `[64, inputs]`, 16-bit numbers.
    pub a: &'a [u8],
    /// `[columns, inputs]`, or `[inputs, columns]` when `by_columns`.
    pub b: &'a [u8],
    /// `[64, columns]`.
    pub out: &'a mut Floats,
    pub inputs: usize,
    pub columns: usize,
    pub by_columns: bool,
    pub dtype: DType,
}

/// Sizes that there are.
pub(crate) const COLUMNS: [usize; 5] = [64, 80, 96, 112, 128];

/// # Errors
/// When a length is not that of the shape, or the device fails or has no such kernel.
pub(crate) fn launch<G: Gpu>(cuda: &mut Cuda<G>, args: Args<'_>) -> Result<(), OpError> {
    let (inputs, columns) = (args.inputs, args.columns);
    check_len("wgmma", "a", args.a.len(), 2 * 64, inputs)?;
    check_len("wgmma", "b", args.b.len(), 2 * columns, inputs)?;
    check_len("wgmma", "out", args.out.len(), 64, columns)?;
    let size = COLUMNS.iter().position(|size| *size == columns);
    let names = &KERNELS[usize::from(args.dtype == DType::F16)][usize::from(args.by_columns)];
    let kernel = *size
        .and_then(|size| names.get(size))
        .filter(|_| inputs.is_multiple_of(64))
        .ok_or(GpuError::NoKernel("wgmma of this shape"))?;
    let mut upload = |bytes: &[u8]| {
        let mut memory = cuda.scratch(bytes.len())?;
        cuda.upload_bytes(bytes, &mut memory, 0).map(|()| memory)
    };
    let (a, b) = (upload(args.a)?, upload(args.b)?);
    let launch = Launch {
        kernel,
        grid: [1, 1, 1],
        cta: [128, 1, 1],
        shared_bytes: ctas(sizes::wgmma::SHARED),
        params: Params::new()
            .address(a.address())
            .address(b.address())
            .write(args.out)
            .count(inputs),
    };
    // SAFETY: the parameters of the declaration; `a`, `b` and `out` have the lengths of the shape.
    unsafe { cuda.launch(launch) }
}

/// By dtype, layout and size.
const KERNELS: [[[&str; 5]; 2]; 2] = {
    macro_rules! sizes {
        ($name:literal) => {
            [
                concat!($name, "_64"),
                concat!($name, "_80"),
                concat!($name, "_96"),
                concat!($name, "_112"),
                concat!($name, "_128"),
            ]
        };
    }
    [
        [sizes!("wgmma_rows_bf16"), sizes!("wgmma_columns_bf16")],
        [sizes!("wgmma_rows_f16"), sizes!("wgmma_columns_f16")],
    ]
};
