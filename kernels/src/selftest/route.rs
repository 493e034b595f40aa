//! Cases of the router and of its gradient, and of rows by number.

use shared::dtype::DType;

use super::{Bench, Extent, Failure, noise, test_on_devices};
use crate::cuda::ops::route as device;
use crate::cuda::{Cuda, Gpu};
use crate::ops::{Gather, Route, RouteGrad, route};

/// (tokens, experts, chosen)
const ROUTERS: [(usize, usize, usize); 5] =
    [(1, 1, 1), (7, 8, 2), (5, 37, 5), (3, 256, 8), (2, 40, 40)];
/// (rows, moved rows, width)
const MOVES: [(usize, usize, usize, Extent); 3] = [
    (5, 3, 7, Extent::Small),
    (9, 9, 256, Extent::Small),
    (20, 6, 4096, Extent::Middle),
];
const ROUNDINGS: [(DType, f32); 3] = [(DType::F32, 1e-6), (DType::Bf16, 4e-3), (DType::F16, 5e-4)];

pub(super) fn check<G: Gpu>(cuda: &mut Cuda<G>, extent: Extent) -> Result<usize, Failure> {
    let mut bench = Bench::new(cuda);
    for (tokens, experts, chosen) in ROUTERS {
        for (round, tolerance) in ROUNDINGS {
            bench.begin(format!("router {round} {tokens} x {chosen} of {experts}"));
            router(&mut bench, [tokens, experts, chosen], round, tolerance)?;
        }
    }
    for (rows, moved, width, _) in MOVES.into_iter().filter(|(.., at)| extent.takes(*at)) {
        bench.begin(format!("{moved} of {rows} rows, {width} wide"));
        gather(&mut bench, [rows, moved, width])?;
    }
    Ok(bench.cases)
}

fn router<G: Gpu>(
    bench: &mut Bench<'_, G>,
    [tokens, experts, chosen]: [usize; 3],
    round: DType,
    tolerance: f32,
) -> Result<(), Failure> {
    // Some logits are equal.
    let logits: Vec<f32> = noise(1, tokens * experts)
        .iter()
        .map(|v| (v * 20.0).round() / 4.0)
        .collect();
    let grad = noise(2, tokens * experts);
    let mut wanted = logits.clone();
    let reference = route::reference(Route {
        logits: &mut wanted[..],
        tokens,
        experts,
        chosen,
        round,
    });
    bench.op(reference)?;
    let mut on_device = bench.in_place(&logits)?;
    let args = Route {
        logits: &mut *on_device,
        tokens,
        experts,
        chosen,
        round,
    };
    let done = device::launch(bench.cuda, args);
    bench.op(done)?;
    let got = bench.take(&on_device, wanted.len())?;
    bench.close(&got, &wanted, tolerance)?;
    bench.compare(&got, &wanted, |g, w| (g == 0.0) == (w == 0.0))?;
    let mut wanted = logits.clone();
    let reference = route::reference_grad(RouteGrad {
        logits: &mut wanted[..],
        grad: &grad[..],
        tokens,
        experts,
        chosen,
        round,
    });
    bench.op(reference)?;
    let (mut on_device, grad) = (bench.in_place(&logits)?, bench.input(&grad)?);
    let args = RouteGrad {
        logits: &mut *on_device,
        grad: &*grad,
        tokens,
        experts,
        chosen,
        round,
    };
    let done = device::launch_grad(bench.cuda, args);
    bench.op(done)?;
    let got = bench.take(&on_device, wanted.len())?;
    bench.close(&got, &wanted, 1e-5)
}

/// Every third row from the last on, and so none twice.
fn index(rows: usize, moved: usize) -> Vec<u32> {
    let step = if rows.is_multiple_of(3) { 2 } else { 3 };
    let at = |i: usize| u32::try_from((rows - 1 + i * step) % rows).unwrap_or(0);
    (0..moved).map(at).collect()
}

fn gather<G: Gpu>(
    bench: &mut Bench<'_, G>,
    [rows, moved, width]: [usize; 3],
) -> Result<(), Failure> {
    let (x, index) = (noise(1, rows * width), index(rows, moved));
    let mut wanted = vec![f32::NAN; moved * width];
    let reference = route::reference_gather(Gather {
        x: &x[..],
        index: &index,
        width,
        out: &mut wanted[..],
    });
    bench.op(reference)?;
    let (from, mut to) = (bench.input(&x)?, bench.output(moved * width)?);
    let args = Gather {
        x: &*from,
        index: &index,
        width,
        out: &mut *to,
    };
    let done = device::launch_gather(bench.cuda, args);
    bench.op(done)?;
    let got = bench.take(&to, wanted.len())?;
    bench.same(&got, &wanted)
}

test_on_devices!(super::check);
