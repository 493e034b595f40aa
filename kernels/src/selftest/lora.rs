//! Cases of adapters: parts with different ranks and dtypes, a part without rows, rows without a part.

use shared::config::QuantType;
use shared::dtype::DType;

use super::linear::view;
use super::{Bench, Extent, Failure, noise, test_on_devices};
use crate::cuda::ops::lora as device;
use crate::cuda::{Adapters, Cuda, Gpu, Matrix};
use crate::ops::{Adapt, AdaptGrad, Adapter, Lora, LoraGrad, LoraPart, convert, lora};
use crate::tensor::WeightView;

const SHAPES: [(usize, usize, Extent); 4] = [
    (1, 1, Extent::Small),
    (50, 300, Extent::Small),
    (1000, 257, Extent::Middle),
    (8192, 8192, Extent::Full),
];
/// (first row, rows, rank, dtype)
const PARTS: [(usize, usize, usize, DType); 4] = [
    (0, 1, 8, DType::Bf16),
    (1, 11, 3, DType::F16),
    (13, 0, 5, DType::F32),
    (13, 2, 33, DType::F32),
];
const ROWS: usize = 16;
const RANK: usize = 33;

pub(super) fn check<G: Gpu>(cuda: &mut Cuda<G>, extent: Extent) -> Result<usize, Failure> {
    let mut bench = Bench::new(cuda);
    for (inputs, outputs, _) in SHAPES.into_iter().filter(|(_, _, at)| extent.takes(*at)) {
        let rounds: &[DType] = match extent {
            Extent::Least => &[DType::Bf16],
            _ => &[DType::F32, DType::Bf16, DType::F16],
        };
        for &round in rounds {
            bench.begin(format!("adapters {round} {inputs} -> {outputs}"));
            case(&mut bench, inputs, outputs, round)?;
        }
    }
    Ok(bench.cases)
}

fn bytes(seed: u64, dtype: DType, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len * dtype.size_bytes()];
    convert::from_f32(dtype, &noise(seed, len), &mut bytes);
    bytes
}

fn parts<'a>(
    stored: &'a [(Vec<u8>, Vec<u8>)],
    inputs: usize,
    outputs: usize,
) -> Vec<LoraPart<WeightView<'a>>> {
    let parts = PARTS.iter().zip(stored);
    parts
        .map(|(&(first, rows, rank, dtype), (a, b))| LoraPart {
            first,
            rows,
            a: view(QuantType::None, dtype, (inputs, rank), a),
            b: view(QuantType::None, dtype, (rank, outputs), b),
            scale: 0.5 + first as f32,
        })
        .collect()
}

fn on_device<G: Gpu>(
    bench: &mut Bench<'_, G>,
    parts: &[LoraPart<WeightView<'_>>],
) -> Result<Vec<LoraPart<Matrix<G>>>, Failure> {
    let mut moved = Vec::new();
    for part in parts {
        let (a, b) = (bench.cuda.matrix(part.a), bench.cuda.matrix(part.b));
        moved.push(LoraPart {
            first: part.first,
            rows: part.rows,
            a: bench.op(a)?,
            b: bench.op(b)?,
            scale: part.scale,
        });
    }
    Ok(moved)
}

/// The adapters of all rows: those of the parts, and for a row without one a number that no adapter has, or one that leaves the matrix alone.
fn of_rows() -> Vec<Option<u32>> {
    let mut of_rows = vec![None; ROWS];
    for (number, (first, rows, ..)) in (0u32..).zip(PARTS) {
        of_rows[first..first + rows].fill(Some(number));
    }
    of_rows[12] = Some(PARTS.len() as u32);
    of_rows
}

/// What adapters make of products.
fn adapted<G: Gpu>(
    bench: &mut Bench<'_, G>,
    adapters: &Adapters<G>,
    (x, product): (&[f32], &[f32]),
    of_rows: &[Option<u32>],
    round: DType,
) -> Result<Vec<f32>, Failure> {
    let (x, mut out) = (bench.input(x)?, bench.in_place(product)?);
    let mut middle = bench.output(of_rows.len() * RANK)?;
    let args = Adapt {
        x: &*x,
        adapters,
        of_rows,
        middle: &mut *middle,
        out: &mut *out,
        round,
    };
    let done = device::launch(bench.cuda, args);
    bench.op(done)?;
    bench.take(&middle, of_rows.len() * RANK)?;
    bench.take(&out, product.len())
}

/// Gradients through adapters.
fn gradient<G: Gpu>(
    bench: &mut Bench<'_, G>,
    adapters: &Adapters<G>,
    (grad, sums): (&[f32], &[f32]),
    of_rows: &[Option<u32>],
) -> Result<Vec<f32>, Failure> {
    let (grad, mut out) = (bench.input(grad)?, bench.in_place(sums)?);
    let mut middle = bench.output(of_rows.len() * RANK)?;
    let args = AdaptGrad {
        grad: &*grad,
        adapters,
        of_rows,
        middle: &mut *middle,
        out: &mut *out,
    };
    let done = device::launch_grad(bench.cuda, args);
    bench.op(done)?;
    bench.take(&middle, of_rows.len() * RANK)?;
    bench.take(&out, sums.len())
}

fn case<G: Gpu>(
    bench: &mut Bench<'_, G>,
    inputs: usize,
    outputs: usize,
    round: DType,
) -> Result<(), Failure> {
    let stored: Vec<_> = (1..)
        .zip(PARTS)
        .map(|(seed, (_, _, rank, dtype))| {
            (
                bytes(seed, dtype, rank * inputs),
                bytes(seed + 9, dtype, outputs * rank),
            )
        })
        .collect();
    let host = parts(&stored, inputs, outputs);
    let moved = on_device(bench, &host)?;
    let (x, product) = (noise(30, ROWS * inputs), noise(31, ROWS * outputs));
    let mut wanted = product.clone();
    let reference = lora::reference(Lora {
        x: &x[..],
        parts: &host,
        middle: &mut vec![0.0; ROWS * RANK][..],
        out: &mut wanted[..],
        rows: ROWS,
        round,
    });
    bench.op(reference)?;
    let adapters = moved.iter().map(|part| {
        Some(Adapter {
            a: part.a.clone(),
            b: part.b.clone(),
            scale: part.scale,
        })
    });
    let adapters = bench.cuda.adapters(adapters.chain([None]).collect());
    let adapters = bench.op(adapters)?;
    let got = adapted(bench, &adapters, (&x, &product), &of_rows(), round)?;
    // Rows alone, or where an adapter is not there: the same bits.
    for rows in [0..1, 5..14, 13..16] {
        let inputs = (
            &x[rows.start * inputs..rows.end * inputs],
            &product[rows.start * outputs..rows.end * outputs],
        );
        let some = adapted(bench, &adapters, inputs, &of_rows()[rows.clone()], round)?;
        bench.same(&some, &got[rows.start * outputs..rows.end * outputs])?;
    }
    // Where a rounding falls the other way, bfloat16 moves by 2^-8 of the value, before it is scaled.
    bench.close(&got, &wanted, 8e-3)?;
    // The rows of the adapter in f32, and those without one, round nothing that could fall otherwise.
    let exact = 13 * outputs..;
    bench.close(&got[exact.clone()], &wanted[exact], 2e-5)?;

    let grad = product;
    let mut wanted = x.clone();
    let reference = lora::reference_grad(LoraGrad {
        grad: &grad[..],
        parts: &host,
        middle: &mut vec![0.0; ROWS * RANK][..],
        out: &mut wanted[..],
        rows: ROWS,
    });
    bench.op(reference)?;
    let got = gradient(bench, &adapters, (&grad, &x), &of_rows())?;
    for rows in [0..1, 5..14, 13..16] {
        let inputs_of = (
            &grad[rows.start * outputs..rows.end * outputs],
            &x[rows.start * inputs..rows.end * inputs],
        );
        let some = gradient(bench, &adapters, inputs_of, &of_rows()[rows.clone()])?;
        bench.same(&some, &got[rows.start * inputs..rows.end * inputs])?;
    }
    bench.close(&got, &wanted, 1e-5)
}

test_on_devices!(super::check);
