//! Launches `linear_grad.cu`.

use super::linear::{by_format, bytes_of};
use crate::cuda::gpu::ctas;
use crate::cuda::{Cuda, Floats, Gpu, Launch, Matrix, Params};
use crate::ops::{LinearGrad, MatrixShape, OpError};

pub(crate) fn launch<G: Gpu>(
    cuda: &mut Cuda<G>,
    args: LinearGrad<'_, Floats, Matrix<G>>,
) -> Result<(), OpError> {
    args.check()?;
    if args.rows == 0 {
        return Ok(());
    }
    let weight = &args.weight;
    let launch = Launch {
        kernel: by_format(KERNELS, weight),
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

const KERNELS: [[&str; 3]; 3] = [
    [
        "linear_grad_plain_f32",
        "linear_grad_plain_bf16",
        "linear_grad_plain_f16",
    ],
    [
        "linear_grad_int8_f32",
        "linear_grad_int8_bf16",
        "linear_grad_int8_f16",
    ],
    [
        "linear_grad_nf4_f32",
        "linear_grad_nf4_bf16",
        "linear_grad_nf4_f16",
    ],
];
