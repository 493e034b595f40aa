//! Cases of the root-mean-square norm.

use shared::dtype::DType;

use super::{Bench, Extent, Failure, noise, test_on_devices};
use crate::cuda::ops::rmsnorm::launch;
use crate::cuda::{Cuda, Gpu};
use crate::ops::{Rmsnorm, rmsnorm};

/// Widths: one, odd, one off a warp, a head, and those of served models.
const WIDTHS: [(usize, Extent); 9] = [
    (1, Extent::Small),
    (3, Extent::Small),
    (33, Extent::Small),
    (128, Extent::Small),
    (1000, Extent::Middle),
    (2049, Extent::Middle),
    (4096, Extent::Middle),
    (8192, Extent::Full),
    (16384, Extent::Full),
];
const ROWS: [usize; 2] = [1, 5];

pub(super) fn check<G: Gpu>(cuda: &mut Cuda<G>, extent: Extent) -> Result<usize, Failure> {
    let mut bench = Bench::new(cuda);
    for (width, _) in WIDTHS.into_iter().filter(|(_, at)| extent.takes(*at)) {
        for dtype in [DType::F32, DType::Bf16, DType::F16] {
            for rows in ROWS {
                bench.begin(format!("{dtype} [{rows}, {width}]"));
                case(&mut bench, rows, width, dtype)?;
            }
        }
    }
    Ok(bench.cases)
}

fn case<G: Gpu>(
    bench: &mut Bench<'_, G>,
    rows: usize,
    width: usize,
    round: DType,
) -> Result<(), Failure> {
    let (x, weight) = (noise(1, rows * width), noise(2, width));
    let mut wanted = vec![f32::NAN; rows * width];
    let reference = rmsnorm::reference(Rmsnorm {
        x: &x[..],
        weight: &weight[..],
        out: &mut wanted[..],
        rows,
        width,
        eps: 1e-5,
        round,
    });
    bench.op(reference)?;
    let last = x[(rows - 1) * width..].to_vec();
    let (x, weight) = (bench.input(&x)?, bench.input(&weight)?);
    let mut out = bench.output(rows * width)?;
    let done = launch(
        bench.cuda,
        Rmsnorm {
            x: &x,
            weight: &weight,
            out: &mut out,
            rows,
            width,
            eps: 1e-5,
            round,
        },
    );
    bench.op(done)?;
    let got = bench.take(&out, rows * width)?;
    // The order of the sum moves the scale by a few bits, and with it some values to the next of their dtype.
    let tolerance = match round {
        DType::F32 => 2e-6,
        DType::F16 => 1e-3,
        DType::Bf16 => 8e-3,
    };
    bench.close(&got, &wanted, tolerance)?;
    // The last row alone.
    let mut alone = bench.output(width)?;
    let last = bench.input(&last)?;
    let done = launch(
        bench.cuda,
        Rmsnorm {
            x: &last,
            weight: &weight,
            out: &mut alone,
            rows: 1,
            width,
            eps: 1e-5,
            round,
        },
    );
    bench.op(done)?;
    let alone = bench.take(&alone, width)?;
    bench.same(&got[(rows - 1) * width..], &alone)
}

test_on_devices!(super::check);
