//! Cases of the products of a warpgroup by themselves: every size, both layouts of B.

use shared::dtype::DType;

use super::{Bench, Extent, Failure, noise};
use crate::cuda::ops::wgmma::{Args, COLUMNS, launch};
use crate::cuda::{Cuda, Gpu};
use crate::ops::convert;

/// No cases where the device has no such products.
pub(super) fn check<G: Gpu>(cuda: &mut Cuda<G>, extent: Extent) -> Result<usize, Failure> {
    let mut bench = Bench::new(cuda);
    if !bench.cuda.has_warpgroups() {
        return Ok(0);
    }
    let sizes = match extent {
        Extent::Least => &COLUMNS[1..2],
        _ => &COLUMNS[..],
    };
    for dtype in [DType::Bf16, DType::F16] {
        for by_columns in [false, true] {
            for &columns in sizes {
                let layout = if by_columns { "columns" } else { "rows" };
                bench.begin(format!("{dtype} {layout} [64, {columns}]"));
                case(&mut bench, dtype, by_columns, columns)?;
            }
        }
    }
    Ok(bench.cases)
}

fn case<G: Gpu>(
    bench: &mut Bench<'_, G>,
    dtype: DType,
    by_columns: bool,
    columns: usize,
) -> Result<(), Failure> {
    const INPUTS: usize = 128;
    let stored = |values: &[f32]| {
        let mut bytes = vec![0; 2 * values.len()];
        convert::from_f32(dtype, values, &mut bytes);
        let mut rounded = vec![0.0; values.len()];
        convert::to_f32(dtype, &bytes, &mut rounded);
        (bytes, rounded)
    };
    let (a_bytes, a) = stored(&noise(1, 64 * INPUTS));
    let (b_bytes, b) = stored(&noise(2, columns * INPUTS));
    let wanted: Vec<f32> = (0..64 * columns)
        .map(|at| {
            let (row, column) = (at / columns, at % columns);
            let product = |k: usize| {
                let of_b = match by_columns {
                    true => k * columns + column,
                    false => column * INPUTS + k,
                };
                f64::from(a[row * INPUTS + k]) * f64::from(b[of_b])
            };
            (0..INPUTS).map(product).sum::<f64>() as f32
        })
        .collect();
    let mut out = bench.output(64 * columns)?;
    let args = Args {
        a: &a_bytes,
        b: &b_bytes,
        out: &mut out,
        inputs: INPUTS,
        columns,
        by_columns,
        dtype,
    };
    let done = launch(bench.cuda, args);
    bench.op(done)?;
    let got = bench.take(&out, 64 * columns)?;
    bench.close(&got, &wanted, 1e-5)
}

#[cfg(all(test, feature = "emu"))]
mod emulated {
    #[test]
    fn equals_its_reference_on_the_emulator() {
        crate::selftest::assert_emulated(super::check);
    }
}
