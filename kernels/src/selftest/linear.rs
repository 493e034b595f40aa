//! Cases of matrix products and of their gradient.

use shared::config::QuantType;
use shared::dtype::DType;

use super::{Bench, Extent, Failure, noise, test_on_devices};
use crate::cuda::ops::linear::{launch, launch_products};
use crate::cuda::ops::linear_grad;
use crate::cuda::{Buffer, Cuda, Gpu, Matrix};
use crate::ops::{Linear, LinearGrad, Product, Products, convert, gradient, linear};
use crate::quant::{int8, nf4};
use crate::tensor::WeightView;
use crate::tuning;

/// (inputs, outputs): one, odd, a block, off a tile, off a segment, and those of served models with few outputs.
const SHAPES: [(usize, usize, Extent); 9] = [
    (1, 1, Extent::Small),
    (50, 9, Extent::Small),
    (64, 16, Extent::Small),
    (320, 37, Extent::Small),
    (1000, 20, Extent::Middle),
    (2112, 130, Extent::Middle),
    (4544, 33, Extent::Middle),
    (8192, 48, Extent::Middle),
    (8192, 28672, Extent::Full),
];
/// (tiles of 128 outputs, blocks of 64 inputs, rows) of products by clusters of CTAs: clusters that are filled, and not; fewer blocks than the ring has
/// stages, and several turns of it; rows off a tile.
const CLUSTERS: [(usize, usize, usize, Extent); 8] = [
    (1, 1, 33, Extent::Least),
    (2, 9, 33, Extent::Least),
    (1, 5, 35, Extent::Small),
    (3, 15, 35, Extent::Small),
    (5, 6, 130, Extent::Middle),
    (3, 39, 257, Extent::Middle),
    (7, 18, 1000, Extent::Full),
    (64, 128, 1024, Extent::Full),
];
const FORMATS: [(QuantType, &str); 3] = [
    (QuantType::None, "plain"),
    (QuantType::Int8, "int8"),
    (QuantType::Nf4, "nf4"),
];
const DTYPES: [DType; 3] = [DType::F32, DType::Bf16, DType::F16];

pub(super) fn check<G: Gpu>(cuda: &mut Cuda<G>, extent: Extent) -> Result<usize, Failure> {
    let mut bench = Bench::new(cuda);
    for (inputs, outputs, _) in SHAPES.into_iter().filter(|(_, _, at)| extent.takes(*at)) {
        for (quant, name) in FORMATS {
            for dtype in dtypes_of(extent, inputs) {
                bench.begin(format!("{name} {dtype} [{outputs}, {inputs}]"));
                let bytes = stored(quant, dtype, inputs, outputs);
                let view = view(quant, dtype, (inputs, outputs), &bytes);
                product(&mut bench, view, rows_of(extent, inputs * outputs))?;
            }
        }
    }
    let formats = if extent == Extent::Least {
        &FORMATS[2..]
    } else {
        &FORMATS
    };
    for &(quant, name) in formats {
        bench.begin(format!("{name} three products of one input"));
        together(&mut bench, quant, [70, 9, 33])?;
        if extent.takes(Extent::Middle) {
            together(&mut bench, quant, [130, 9, 300])?;
        }
    }
    clusters(&mut bench, extent, formats)?;
    Ok(bench.cases)
}

pub(super) fn check_grad<G: Gpu>(cuda: &mut Cuda<G>, extent: Extent) -> Result<usize, Failure> {
    let mut bench = Bench::new(cuda);
    for (inputs, outputs, _) in SHAPES.into_iter().filter(|(_, _, at)| extent.takes(*at)) {
        for (quant, name) in FORMATS {
            for dtype in dtypes_of(extent, inputs) {
                bench.begin(format!("{name} {dtype} [{outputs}, {inputs}]"));
                let bytes = stored(quant, dtype, inputs, outputs);
                let view = view(quant, dtype, (inputs, outputs), &bytes);
                gradient(&mut bench, view, rows_of(extent, inputs * outputs))?;
            }
        }
    }
    Ok(bench.cases)
}

/// Types of a case: all, or one that tiles take and one that they do not.
fn dtypes_of(extent: Extent, inputs: usize) -> Vec<DType> {
    match (extent, inputs) {
        (Extent::Least, 64 | 320) => vec![DType::Bf16],
        (Extent::Least, _) => vec![DType::F32],
        _ => DTYPES.to_vec(),
    }
}

/// Rows of a case: past a tile of few rows, and past one of many where a matrix is small.
fn rows_of(extent: Extent, weights: usize) -> usize {
    match extent {
        Extent::Least => 33,
        Extent::Small => 35,
        Extent::Middle if weights > 100_000 => 35,
        Extent::Full if weights > 10_000_000 => 35,
        _ => 131,
    }
}

pub(super) fn stored(quant: QuantType, dtype: DType, inputs: usize, outputs: usize) -> Vec<u8> {
    let values = noise(1, inputs * outputs);
    match quant {
        QuantType::Int8 => int8::encode(&values, inputs),
        QuantType::Nf4 => nf4::encode(&values),
        QuantType::None => {
            let mut bytes = vec![0; values.len() * dtype.size_bytes()];
            convert::from_f32(dtype, &values, &mut bytes);
            bytes
        }
    }
}

pub(super) fn view(
    quant: QuantType,
    dtype: DType,
    (inputs, outputs): (usize, usize),
    bytes: &[u8],
) -> WeightView<'_> {
    WeightView::quantized(quant, dtype, outputs, inputs, bytes).expect("made for this shape")
}

/// Few bits of the sum, and of NF4 the rounding of each weight, which goes another way on the device.
fn tolerance(weight: &WeightView<'_>) -> f32 {
    let is_nf4 = matches!(weight.format(), crate::tensor::Format::Nf4(_));
    match (is_nf4, weight.dtype()) {
        (true, DType::Bf16) => 4e-3,
        (true, DType::F16) => 5e-4,
        _ => 2e-5,
    }
}

fn product<G: Gpu>(
    bench: &mut Bench<'_, G>,
    weight: WeightView<'_>,
    rows: usize,
) -> Result<(), Failure> {
    let (inputs, outputs) = (weight.inputs(), weight.outputs());
    let (x, bias) = (noise(3, rows * inputs), noise(2, outputs));
    let mut wanted = vec![f32::NAN; rows * outputs];
    let args = Linear {
        x: &x[..],
        weight,
        bias: Some(&bias[..]),
        out: &mut wanted[..],
        rows,
    };
    bench.op(linear::reference(args))?;
    let matrix = bench.cuda.matrix(weight);
    let matrix = bench.op(matrix)?;
    let bias = bench.input(&bias)?;
    let all = run(bench, &matrix, &x, Some(&bias), rows)?;
    bench.close(&all, &wanted, tolerance(&weight))?;
    // By warps what was done by warpgroups: the same bits.
    if bench.cuda.use_warpgroups(false) {
        let by_warps = run(bench, &matrix, &x, Some(&bias), rows);
        bench.cuda.use_warpgroups(true);
        bench.same(&by_warps?, &all)?;
    }
    // Any other number of rows, down to one: the same bits.
    let fews: &[usize] = match rows {
        33 => &[1],
        35 => &[1, 11, 32],
        _ => &[1, 3, 8, 9, 16, 20, 32],
    };
    for &few in fews {
        let x = &x[(rows - few) * inputs..];
        let got = run(bench, &matrix, x, Some(&bias), few)?;
        bench.same(&got, &all[(rows - few) * outputs..])?;
    }
    Ok(())
}

fn run<G: Gpu>(
    bench: &mut Bench<'_, G>,
    matrix: &Matrix<G>,
    x: &[f32],
    bias: Option<&Buffer<G>>,
    rows: usize,
) -> Result<Vec<f32>, Failure> {
    let outputs = crate::ops::MatrixShape::outputs(matrix);
    let x = bench.input(x)?;
    let mut out = bench.output(rows * outputs)?;
    let args = Linear {
        x: &*x,
        weight: matrix.clone(),
        bias: bias.map(|bias| &**bias),
        out: &mut *out,
        rows,
    };
    let done = launch(bench.cuda, args);
    bench.op(done)?;
    bench.take(&out, rows * outputs)
}

/// By clusters of CTAs what was done by warps: the same bits, where warpgroups are used.
fn clusters<G: Gpu>(
    bench: &mut Bench<'_, G>,
    extent: Extent,
    formats: &[(QuantType, &str)],
) -> Result<(), Failure> {
    for (tiles, blocks, rows, _) in CLUSTERS.into_iter().filter(|(.., at)| *at <= extent) {
        for &(quant, name) in formats {
            let (outputs, inputs) = (tiles * 128 - 5, blocks * 64);
            bench.begin(format!("{name} [{outputs}, {inputs}] of {rows} rows"));
            let bytes = stored(quant, DType::Bf16, inputs, outputs);
            let view = view(quant, DType::Bf16, (inputs, outputs), &bytes);
            let matrix = bench.cuda.matrix(view);
            let matrix = bench.op(matrix)?;
            let x = noise(6, rows * inputs);
            let is_used = bench.cuda.use_warpgroups(false);
            let by_warps = run(bench, &matrix, &x, None, rows);
            bench.cuda.use_warpgroups(is_used);
            let got = run(bench, &matrix, &x, None, rows)?;
            bench.same(&got, &by_warps?)?;
        }
    }
    Ok(())
}

fn together<G: Gpu>(
    bench: &mut Bench<'_, G>,
    quant: QuantType,
    sizes: [usize; 3],
) -> Result<(), Failure> {
    const INPUTS: usize = 320;
    for rows in [2, 40] {
        let x = noise(5, rows * INPUTS);
        let mut matrices = Vec::new();
        let mut alone = Vec::new();
        for outputs in sizes {
            let bytes = stored(quant, DType::Bf16, INPUTS, outputs);
            let matrix = bench
                .cuda
                .matrix(view(quant, DType::Bf16, (INPUTS, outputs), &bytes));
            let matrix = bench.op(matrix)?;
            alone.push(run(bench, &matrix, &x, None, rows)?);
            matrices.push((matrix, bench.output(rows * outputs)?));
        }
        let x = bench.input(&x)?;
        let mut products: Vec<_> = matrices
            .iter_mut()
            .map(|(weight, out)| Product {
                weight: weight.clone(),
                bias: None,
                out: &mut **out,
            })
            .collect();
        let args = Products {
            x: &*x,
            rows,
            parts: &mut products,
        };
        let done = launch_products(bench.cuda, args);
        bench.op(done)?;
        for ((_, out), alone) in matrices.iter().zip(&alone) {
            let got = bench.take(out, alone.len())?;
            bench.same(&got, alone)?;
        }
    }
    Ok(())
}

fn gradient<G: Gpu>(
    bench: &mut Bench<'_, G>,
    weight: WeightView<'_>,
    rows: usize,
) -> Result<(), Failure> {
    let (inputs, outputs) = (weight.inputs(), weight.outputs());
    let grad = noise(4, rows * outputs);
    let mut wanted = vec![f32::NAN; rows * inputs];
    let args = LinearGrad {
        grad: &grad[..],
        weight,
        out: &mut wanted[..],
        rows,
    };
    bench.op(gradient::reference_linear(args))?;
    let matrix = bench.cuda.matrix(weight);
    let matrix = bench.op(matrix)?;
    // Segments of so many steps; none: those that are served, of which matrices as small as these have one.
    let run = |bench: &mut Bench<'_, G>, grad: &[f32], rows, segment: Option<usize>| {
        let grad = bench.input(grad)?;
        let mut out = bench.output(rows * inputs)?;
        let args = LinearGrad {
            grad: &*grad,
            weight: matrix.clone(),
            out: &mut *out,
            rows,
        };
        let done = match segment {
            Some(segment) => linear_grad::tiled(bench.cuda, args, segment),
            None => linear_grad::launch(bench.cuda, args),
        };
        bench.op(done)?;
        bench.take(&out, rows * inputs)
    };
    let is_tiled = tuning::cuda_linear_is_tiled(weight.dtype(), inputs);
    // Gradients and weights that are not bfloat16 are rounded to it where tensor cores multiply them.
    let tolerance = if is_tiled { 6e-3 } else { 2e-6 };
    let segments: &[_] = if is_tiled {
        &[None, Some(1), Some(2)]
    } else {
        &[None]
    };
    for &segment in segments {
        let got = run(bench, &grad, rows, segment)?;
        bench.close(&got, &wanted, tolerance)?;
        // Other numbers of rows, through the other kernel too, which shares the segments among CTAs: the same bits.
        for few in [1, 32] {
            let part = run(bench, &grad[(rows - few) * outputs..], few, segment)?;
            bench.same(&part, &got[(rows - few) * inputs..])?;
        }
    }
    Ok(())
}

test_on_devices!(super::check);

#[cfg(all(test, feature = "emu"))]
mod emulated_clusters {
    use super::*;
    use crate::cuda::emu::Emu;

    /// With even seeds what is overwritten before others have done with it shows.
    #[test]
    fn copies_to_clusters_may_come_at_once_and_in_any_order() {
        for seed in [2, 1234, 98_765_432] {
            let mut cuda = Cuda::new(Emu::with_order(2, seed));
            cuda.use_warpgroups(true);
            let mut bench = Bench::new(&mut cuda);
            let done = clusters(&mut bench, Extent::Small, &FORMATS);
            done.unwrap_or_else(|failure| panic!("order {seed}: {failure}"));
        }
    }
}

#[cfg(all(test, feature = "emu"))]
mod emulated_grad {
    #[test]
    fn equals_its_reference_on_the_emulator() {
        crate::selftest::assert_emulated(super::check_grad);
    }
}
