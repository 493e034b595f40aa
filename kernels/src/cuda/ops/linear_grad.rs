//! Launches `linear_grad.cu` and `linear_grad_any.cu`.

use shared::config::QuantType;
use shared::dtype::DType;

use super::linear::{by_format, bytes_of};
use crate::cuda::gpu::ctas;
use crate::cuda::matrix::Parts;
use crate::cuda::{Address, Cuda, Floats, Gpu, Launch, Matrix, Memory, Params};
use crate::ops::{LinearGrad, MatrixShape, OpError};
use crate::tuning;

pub(crate) fn launch<G: Gpu>(
    cuda: &mut Cuda<G>,
    args: LinearGrad<'_, Floats, Matrix<G>>,
) -> Result<(), OpError> {
    args.check()?;
    if args.rows == 0 {
        return Ok(());
    }
    let (dtype, inputs) = (args.weight.dtype(), args.weight.inputs());
    match tuning::cuda_linear_is_tiled(dtype, inputs) {
        true => {
            let segment = tuning::cuda_linear_grad_segment(args.weight.outputs());
            tiled(cuda, args, segment)
        }
        false => any(cuda, args),
    }
}

/// With segments of `segment` steps, which is part of the order of the sums: anything else than [`tuning`]'s is for tests.
pub(crate) fn tiled<G: Gpu>(
    cuda: &mut Cuda<G>,
    args: LinearGrad<'_, Floats, Matrix<G>>,
    segment: usize,
) -> Result<(), OpError> {
    args.check()?;
    let (weight, rows) = (&args.weight, args.rows);
    let padded = weight.outputs().next_multiple_of(STEP);
    let rounded = cuda.scratch(tuning::cuda_linear_grad_workspace(weight.outputs(), rows))?;
    let scales = match weight.parts() {
        Parts::Int8 { absmax, .. } => absmax,
        Parts::Plain { .. } | Parts::Nf4 { .. } => Address(0),
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
    // SAFETY: `check` has made sure of `rows` rows of outputs, `rounded` holds as many of `padded` 16-bit numbers.
    unsafe { cuda.launch(launch)? };
    let few = rows <= tuning::CUDA_LINEAR_GRAD_FEW_ROWS;
    let segments = match few {
        true => tuning::cuda_linear_grad_segments(weight.outputs(), segment),
        false => 1,
    };
    let len = rows.saturating_mul(weight.inputs());
    let sums = match segments {
        1 => None,
        _ => Some(cuda.scratch(len.saturating_mul(segments * 4))?),
    };
    let to = sums.as_ref().map_or(args.out.address(), Memory::address);
    let (kernels, stage_bytes, made_bytes, stages) = match (weight.quant(), weight.dtype()) {
        (QuantType::None, DType::F16) => (
            ["linear_grad_many_plain_f16", "linear_grad_few_plain_f16"],
            8 << 10,
            16 << 10,
            8,
        ),
        (QuantType::None, _) => (
            ["linear_grad_many_plain_bf16", "linear_grad_few_plain_bf16"],
            8 << 10,
            0,
            8,
        ),
        (QuantType::Int8, _) => (
            ["linear_grad_many_int8_bf16", "linear_grad_few_int8_bf16"],
            4 << 10,
            16 << 10,
            10,
        ),
        (QuantType::Nf4, _) => (
            ["linear_grad_many_nf4_bf16", "linear_grad_few_nf4_bf16"],
            2 << 10,
            (16 << 10) + (32 << 10) + 1024,
            10,
        ),
    };
    let (tile_rows, stages) = if few { (32, stages) } else { (128, 4) };
    let launch = Launch {
        kernel: kernels[usize::from(few)],
        grid: [
            ctas(rows.div_ceil(tile_rows)),
            ctas(weight.inputs().div_ceil(128)),
            ctas(segments),
        ],
        cta: [256, 1, 1],
        shared_bytes: ctas(made_bytes + stages * (stage_bytes + tile_rows * STEP * 2)),
        params: Params::new()
            .address(bytes_of(weight))
            .address(rounded.address())
            .address(to)
            .count(weight.outputs())
            .count(weight.inputs())
            .count(rows)
            .count(padded)
            .count(segment),
    };
    // SAFETY: as above; `out` holds `rows` rows of inputs, `sums` as many for each segment; the matrix begins at a multiple of 256 and its rows are whole
    // blocks of 64.
    unsafe { cuda.launch(launch)? };
    let Some(sums) = sums else { return Ok(()) };
    let launch = Launch {
        kernel: "linear_grad_join",
        grid: [ctas(len.div_ceil(1024)), 1, 1],
        cta: [256, 1, 1],
        shared_bytes: 0,
        params: Params::new()
            .address(sums.address())
            .write(args.out)
            .count(segments)
            .wide(len),
    };
    // SAFETY: as above; rows are whole blocks of 64 numbers.
    unsafe { cuda.launch(launch) }
}

fn any<G: Gpu>(cuda: &mut Cuda<G>, args: LinearGrad<'_, Floats, Matrix<G>>) -> Result<(), OpError> {
    let weight = &args.weight;
    let launch = Launch {
        kernel: by_format(ANY, weight),
        grid: [
            ctas(weight.inputs().div_ceil(128)),
            ctas(args.rows.div_ceil(32)),
            1,
        ],
        cta: [256, 1, 1],
        shared_bytes: (16 * 128 + 32 * 17) * 4,
        params: Params::new()
            .address(bytes_of(weight))
            .read(args.grad)
            .write(args.out)
            .count(weight.outputs())
            .count(weight.inputs())
            .count(args.rows),
    };
    // SAFETY: `check` has made sure that both gradients hold `rows` rows, and a matrix has the bytes of its shape.
    unsafe { cuda.launch(launch) }
}

/// Outputs that a step walks.
const STEP: usize = 32;

const ANY: [[&str; 3]; 3] = [
    [
        "linear_grad_any_plain_f32",
        "linear_grad_any_plain_bf16",
        "linear_grad_any_plain_f16",
    ],
    [
        "linear_grad_any_int8_f32",
        "linear_grad_any_int8_bf16",
        "linear_grad_any_int8_f16",
    ],
    [
        "linear_grad_any_nf4_f32",
        "linear_grad_any_nf4_bf16",
        "linear_grad_any_nf4_f16",
    ],
];
