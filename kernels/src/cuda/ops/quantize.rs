//! Launches `quantize.cu`.

use shared::config::QuantType;

use super::by_dtype;
use crate::cuda::gpu::ctas;
use crate::cuda::{Address, Cuda, Floats, Gpu, Launch, Matrix, Params};
use crate::ops::{MatrixShape, OpError, check_len};
use crate::quant::nf4::{GROUP, SUPER_GROUP};
use crate::quant::{PART_ALIGNMENT, stored_bytes};
use crate::sizes;

/// Makes the bytes that `quant` stores of a matrix of numbers, in `to`.
pub(crate) fn launch<G: Gpu>(
    cuda: &mut Cuda<G>,
    from: &Matrix<G>,
    quant: QuantType,
    to: &mut Floats,
) -> Result<(), OpError> {
    let op = "quantize";
    if from.quant() != QuantType::None {
        let what = "the matrix is quantized already";
        return Err(OpError::Shape { op, what });
    }
    let (outputs, inputs) = (from.outputs(), from.inputs());
    let bytes = stored_bytes(quant, from.dtype(), outputs, inputs)
        .ok_or(OpError::TooManyTokens { tokens: outputs, limit: usize::MAX / inputs })?;
    check_len(op, "to", to.len(), 1, bytes.div_ceil(4))?;
    let to = to.address();
    // SAFETY: `to` holds so many bytes.
    let zeroed = unsafe { cuda.gpu.fill(to, 0, bytes) };
    cuda.noted(zeroed)?;
    match quant {
        QuantType::None => {
            // SAFETY: both hold so many bytes, and a buffer is not a matrix.
            let copied = unsafe { cuda.gpu.copy(from.start(), to, bytes) };
            cuda.noted(copied)
        }
        QuantType::Int8 => int8(cuda, from, to),
        QuantType::Nf4 => nf4(cuda, from, to),
    }
}

fn int8<G: Gpu>(cuda: &mut Cuda<G>, from: &Matrix<G>, to: Address) -> Result<(), OpError> {
    let names = ["quantize_int8_f32", "quantize_int8_bf16", "quantize_int8_f16"];
    let codes = from.outputs() * from.inputs();
    let launch = Launch {
        kernel: by_dtype(names, from.dtype()),
        grid: [ctas(from.outputs()), 1, 1],
        cta: [256, 1, 1],
        shared_bytes: ctas(sizes::quantize::MAXIMA_SHARED),
        params: Params::new()
            .address(from.start())
            .address(to)
            .address(to.offset(codes.next_multiple_of(PART_ALIGNMENT)))
            .count(from.inputs()),
    };
    // SAFETY: `launch` was given memory for codes and scales.
    unsafe { cuda.launch(launch) }
}

fn nf4<G: Gpu>(cuda: &mut Cuda<G>, from: &Matrix<G>, to: Address) -> Result<(), OpError> {
    let weights = from.outputs() * from.inputs();
    let groups = weights.div_ceil(GROUP);
    let largest = cuda.scratch(groups * 4)?;
    let scales = to.offset(weights.div_ceil(2).next_multiple_of(PART_ALIGNMENT));
    let second = scales.offset(groups.next_multiple_of(PART_ALIGNMENT));
    let offset = second.offset(4 * groups.div_ceil(SUPER_GROUP));
    let names = ["quantize_nf4_codes_f32", "quantize_nf4_codes_bf16", "quantize_nf4_codes_f16"];
    let codes = Launch {
        kernel: by_dtype(names, from.dtype()),
        grid: [ctas(groups.div_ceil(8)), 1, 1],
        cta: [256, 1, 1],
        shared_bytes: 0,
        params: Params::new()
            .address(from.start())
            .address(to)
            .address(largest.address())
            .wide(weights),
    };
    // SAFETY: `launch` was given memory for all parts; `largest` holds one number per group.
    unsafe { cuda.launch(codes)? };
    let mean = Launch {
        kernel: "quantize_nf4_mean",
        grid: [1, 1, 1],
        cta: [256, 1, 1],
        shared_bytes: ctas(sizes::quantize::MEAN_SHARED),
        params: Params::new().address(largest.address()).address(offset).wide(groups),
    };
    // SAFETY: as above.
    unsafe { cuda.launch(mean)? };
    let scales = Launch {
        kernel: "quantize_nf4_scales",
        grid: [ctas(groups.div_ceil(SUPER_GROUP)), 1, 1],
        cta: [256, 1, 1],
        shared_bytes: ctas(sizes::quantize::MAXIMA_SHARED),
        params: Params::new()
            .address(largest.address())
            .address(offset)
            .address(scales)
            .address(second)
            .wide(groups),
    };
    // SAFETY: as above.
    unsafe { cuda.launch(scales) }
}
