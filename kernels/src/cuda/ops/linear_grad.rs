//! Launches `linear_grad.cu` and `linear_grad_generic.cu`.

use shared::config::QuantType;
use shared::dtype::DType;

use super::linear::by_format;
use crate::cuda::gpu::ctas;
use crate::cuda::matrix::MatrixParts;
use crate::cuda::{Address, Cuda, Floats, Gpu, Launch, Matrix, Params, PooledMemory};
use crate::ops::{LinearGrad, MatrixShape, OpError};
use crate::sizes;
use crate::tuning;

pub(crate) fn launch<G: Gpu>(
    cuda: &mut Cuda<G>,
    args: LinearGrad<'_, Floats, Matrix<G>>,
) -> Result<(), OpError> {
    args.check()?;
    if args.rows == 0 {
        return Ok(());
    }
    match args.weight.is_tiled() {
        true => {
            let segment = tuning::cuda_linear_grad_segment(args.weight.outputs());
            tiled(cuda, args, segment)
        }
        false => generic(cuda, args),
    }
}

/// With segments of `segment` steps, which is part of the order of the sums: anything else than
/// [`tuning`]'s is for tests.
pub(crate) fn tiled<G: Gpu>(
    cuda: &mut Cuda<G>,
    args: LinearGrad<'_, Floats, Matrix<G>>,
    segment: usize,
) -> Result<(), OpError> {
    args.check()?;
    let (weight, rows) = (&args.weight, args.rows);
    let rounded = round(cuda, &args)?;
    let is_gemv = rows <= tuning::CUDA_LINEAR_GRAD_GEMV_ROWS;
    let segments = match is_gemv {
        true => tuning::cuda_linear_grad_segments(weight.outputs(), segment),
        false => 1,
    };
    let len = rows.saturating_mul(weight.inputs());
    let sums = match segments {
        1 => None,
        _ => Some(cuda.scratch(len.saturating_mul(segments * 4))?),
    };
    let to = sums.as_ref().map_or(args.out.address(), PooledMemory::address);
    let (kernel, tile_rows, shared_bytes) = tiled_kernel(weight.quant(), weight.dtype(), is_gemv);
    let product = Launch {
        kernel,
        grid: [
            ctas(rows.div_ceil(tile_rows)),
            ctas(weight.inputs().div_ceil(sizes::linear_grad::TILE_INPUTS)),
            ctas(segments),
        ],
        cta: [256, 1, 1],
        shared_bytes: ctas(shared_bytes),
        params: Params::new()
            .address(weight.start())
            .count(weight.layout())
            .address(rounded.address())
            .address(to)
            .count(weight.outputs())
            .count(weight.inputs())
            .count(rows)
            .count(padded(weight))
            .count(segment),
    };
    // SAFETY: `rounded` holds `rows` rows of padded outputs, `out` as many rows of inputs, and
    // `sums` as many for each segment; the matrix begins at a multiple of 256 and its rows are
    // whole blocks of 64.
    unsafe { cuda.launch(product)? };
    let Some(sums) = sums else { return Ok(()) };
    let join = Launch {
        kernel: "linear_grad_join",
        grid: [ctas(len.div_ceil(1024)), 1, 1],
        cta: [256, 1, 1],
        shared_bytes: 0,
        params: Params::new().address(sums.address()).write(args.out).count(segments).wide(len),
    };
    // SAFETY: as above; rows are whole blocks of 64 numbers.
    unsafe { cuda.launch(join) }
}

/// Outputs of a matrix in whole steps of the product.
fn padded<G: Gpu>(weight: &Matrix<G>) -> usize {
    weight.outputs().next_multiple_of(sizes::linear_grad::STEP)
}

/// Rounds the rows of gradients to 16 bits and multiplies them by the scales of INT8.
fn round<G: Gpu>(
    cuda: &mut Cuda<G>,
    args: &LinearGrad<'_, Floats, Matrix<G>>,
) -> Result<PooledMemory<G>, OpError> {
    let (weight, rows) = (&args.weight, args.rows);
    let padded = padded(weight);
    let rounded = cuda.scratch(tuning::cuda_linear_grad_workspace(weight.outputs(), rows))?;
    let scales = match weight.parts() {
        MatrixParts::Int8 { absmax, .. } => absmax,
        MatrixParts::Plain { .. } | MatrixParts::Nf4 { .. } => Address(0),
    };
    let launch = Launch {
        kernel: "linear_grad_round",
        grid: [ctas(rows), ctas(padded.div_ceil(2048)), 1],
        cta: [256, 1, 1],
        shared_bytes: 0,
        params: Params::new()
            .read(args.grad)
            .address(scales)
            .address(rounded.address())
            .count(weight.outputs())
            .count(padded)
            .count(rows),
    };
    // SAFETY: `check` has made sure of `rows` rows of outputs, `rounded` holds as many of `padded`
    // 16-bit numbers.
    unsafe { cuda.launch(launch)? };
    Ok(rounded)
}

fn generic<G: Gpu>(
    cuda: &mut Cuda<G>,
    args: LinearGrad<'_, Floats, Matrix<G>>,
) -> Result<(), OpError> {
    let weight = &args.weight;
    let launch = Launch {
        kernel: by_format(GENERIC, weight),
        grid: [
            ctas(weight.inputs().div_ceil(sizes::linear_grad_generic::TILE_INPUTS)),
            ctas(args.rows.div_ceil(sizes::linear_grad_generic::TILE_ROWS)),
            1,
        ],
        cta: [256, 1, 1],
        shared_bytes: ctas(sizes::linear_grad_generic::SHARED),
        params: Params::new()
            .address(weight.start())
            .count(weight.layout())
            .read(args.grad)
            .write(args.out)
            .count(weight.outputs())
            .count(weight.inputs())
            .count(args.rows),
    };
    // SAFETY: `check` has made sure that both gradients hold `rows` rows, and a matrix has the
    // bytes of its shape.
    unsafe { cuda.launch(launch) }
}

/// The kernel of a format for few (GEMV) or many (GEMM) rows, its rows of a tile and its shared
/// memory.
fn tiled_kernel(quant: QuantType, dtype: DType, is_gemv: bool) -> (&'static str, usize, usize) {
    use sizes::linear_grad as of;
    let kernels = match (quant, dtype) {
        (QuantType::None, DType::F16) => [
            ("linear_grad_gemm_plain_f16", of::GEMM_SHARED_PLAIN_F16),
            ("linear_grad_gemv_plain_f16", of::GEMV_SHARED_PLAIN_F16),
        ],
        (QuantType::None, _) => [
            ("linear_grad_gemm_plain_bf16", of::GEMM_SHARED_PLAIN_BF16),
            ("linear_grad_gemv_plain_bf16", of::GEMV_SHARED_PLAIN_BF16),
        ],
        (QuantType::Int8, _) => [
            ("linear_grad_gemm_int8_bf16", of::GEMM_SHARED_INT8),
            ("linear_grad_gemv_int8_bf16", of::GEMV_SHARED_INT8),
        ],
        (QuantType::Nf4, _) => [
            ("linear_grad_gemm_nf4_bf16", of::GEMM_SHARED_NF4),
            ("linear_grad_gemv_nf4_bf16", of::GEMV_SHARED_NF4),
        ],
    };
    let (kernel, shared_bytes) = kernels[usize::from(is_gemv)];
    (kernel, [of::GEMM_ROWS, of::GEMV_ROWS][usize::from(is_gemv)], shared_bytes)
}

const GENERIC: [[&str; 3]; 3] = [
    [
        "linear_grad_generic_plain_f32",
        "linear_grad_generic_plain_bf16",
        "linear_grad_generic_plain_f16",
    ],
    [
        "linear_grad_generic_int8_f32",
        "linear_grad_generic_int8_bf16",
        "linear_grad_generic_int8_f16",
    ],
    ["linear_grad_generic_nf4_f32", "linear_grad_generic_nf4_bf16", "linear_grad_generic_nf4_f16"],
];
