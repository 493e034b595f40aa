//! Cases of the layer norm and of the gradients of both norms.

use shared::dtype::DType;

use super::{Bench, Extent, Failure, noise, test_on_devices};
use crate::cuda::ops::{layernorm as device, norm_grad};
use crate::cuda::{Cuda, Gpu};
use crate::ops::{Layernorm, NormGrad, gradient, layernorm};

const SHAPES: [(usize, usize, Extent); 6] = [
    (1, 1, Extent::Small),
    (3, 17, Extent::Small),
    (5, 100, Extent::Small),
    (2, 4544, Extent::Middle),
    (2, 8192, Extent::Middle),
    (64, 14336, Extent::Full),
];
const EPS: f32 = 1e-5;

pub(super) fn check<G: Gpu>(cuda: &mut Cuda<G>, extent: Extent) -> Result<usize, Failure> {
    let mut bench = Bench::new(cuda);
    for (rows, width, _) in SHAPES.into_iter().filter(|(_, _, at)| extent.takes(*at)) {
        for (round, tolerance) in [(DType::F32, 2e-5), (DType::Bf16, 8e-3), (DType::F16, 1e-3)] {
            bench.begin(format!("layernorm {round} [{rows}, {width}]"));
            norm(&mut bench, rows, width, round, tolerance)?;
        }
        for centered in [false, true] {
            bench.begin(format!("gradient, centred {centered} [{rows}, {width}]"));
            grad(&mut bench, rows, width, centered)?;
        }
    }
    Ok(bench.cases)
}

fn norm<G: Gpu>(
    bench: &mut Bench<'_, G>,
    rows: usize,
    width: usize,
    round: DType,
    tolerance: f32,
) -> Result<(), Failure> {
    let x: Vec<f32> = noise(1, rows * width).iter().map(|v| 3.0 + v).collect();
    let (weight, bias) = (noise(2, width), noise(3, width));
    let mut wanted = vec![f32::NAN; rows * width];
    let reference = layernorm::reference(Layernorm {
        x: &x[..],
        weight: &weight[..],
        bias: &bias[..],
        out: &mut wanted[..],
        rows,
        width,
        eps: EPS,
        round,
    });
    bench.op(reference)?;
    let (weight, bias) = (bench.input(&weight)?, bench.input(&bias)?);
    let run = |bench: &mut Bench<'_, G>, x: &[f32], rows| {
        let (x, mut out) = (bench.input(x)?, bench.output(rows * width)?);
        let args = Layernorm {
            x: &*x,
            weight: &*weight,
            bias: &*bias,
            out: &mut *out,
            rows,
            width,
            eps: EPS,
            round,
        };
        let done = device::launch(bench.cuda, args);
        bench.op(done)?;
        bench.take(&out, rows * width)
    };
    let got = run(bench, &x, rows)?;
    bench.close(&got, &wanted, tolerance)?;
    let last = run(bench, &x[(rows - 1) * width..], 1)?;
    bench.same(&last, &got[(rows - 1) * width..])
}

fn grad<G: Gpu>(
    bench: &mut Bench<'_, G>,
    rows: usize,
    width: usize,
    centered: bool,
) -> Result<(), Failure> {
    let (x, weight) = (noise(1, rows * width), noise(2, width));
    let given = noise(3, rows * width);
    let mut wanted = given.clone();
    let reference = gradient::reference_norm(NormGrad {
        x: &x[..],
        weight: &weight[..],
        grad: &mut wanted[..],
        rows,
        width,
        eps: EPS,
        centered,
    });
    bench.op(reference)?;
    let (x, weight, mut grad) = (
        bench.input(&x)?,
        bench.input(&weight)?,
        bench.in_place(&given)?,
    );
    let args = NormGrad {
        x: &*x,
        weight: &*weight,
        grad: &mut *grad,
        rows,
        width,
        eps: EPS,
        centered,
    };
    let done = norm_grad::launch(bench.cuda, args);
    bench.op(done)?;
    let got = bench.take(&grad, rows * width)?;
    bench.close(&got, &wanted, 2e-5)
}

test_on_devices!(super::check);
