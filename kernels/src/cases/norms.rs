//! Norms, their gradient, and a residual with the norm behind it.

use super::*;

const EPS: f32 = 1e-5;

/// (rows, width): one, odd, one off a warp, a head, and those of served models.
const SHAPES: [((usize, usize), Class); 16] = [
    ((1, 1), Class::Quick),
    ((5, 1), Class::Quick),
    ((5, 3), Class::Quick),
    ((3, 17), Class::Quick),
    ((5, 33), Class::Quick),
    ((5, 64), Class::Quick),
    ((7, 100), Class::Quick),
    ((5, 128), Class::Quick),
    ((2, 260), Class::Quick),
    ((5, 1000), Class::Full),
    ((5, 2049), Class::Full),
    ((40, 4096), Class::Full),
    ((40, 4544), Class::Full),
    ((2, 8192), Class::Full),
    ((64, 14336), Class::Served),
    ((5, 16384), Class::Served),
];

#[derive(Clone, Copy, Debug, PartialEq)]
enum NormKind {
    Norm,
    /// The norm of a sum: the bits of an addition and a norm, one after the other.
    AddNorm,
    /// Both, one after the other.
    AddThenNorm,
    Grad,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct NormCase {
    kind: NormKind,
    /// Whether it is a layer norm.
    centered: bool,
    round: DType,
    rows: usize,
    width: usize,
}

impl Case for NormCase {
    fn cases(class: Class) -> Vec<Self> {
        let mut all = Vec::new();
        for (rows, width) in class.select(&SHAPES) {
            for centered in [false, true] {
                let of = |kind, round| NormCase { kind, centered, round, rows, width };
                all.push(of(NormKind::Grad, DType::F32));
                all.extend(DTYPES.map(|round| of(NormKind::Norm, round)));
                all.extend(DTYPES.map(|round| of(NormKind::AddNorm, round)));
            }
        }
        all
    }

    fn measured(shapes: &Shapes) -> Vec<Self> {
        let kinds = [(NormKind::Norm, false), (NormKind::Norm, true), (NormKind::Grad, false)];
        let of = |&rows: &usize| {
            let (round, width) = (DType::Bf16, shapes.hidden);
            kinds.map(|(kind, centered)| NormCase { kind, centered, round, rows, width })
        };
        shapes.rows.iter().flat_map(of).collect()
    }

    fn operation(&self) -> &'static str {
        match self.kind {
            NormKind::Norm if self.centered => "layernorm",
            NormKind::Norm => "rmsnorm",
            NormKind::AddNorm | NormKind::AddThenNorm => "add_norm",
            NormKind::Grad => "norm_grad",
        }
    }

    fn shape(&self) -> String {
        let kind = if self.centered { "layer" } else { "rms" };
        match self.kind {
            NormKind::Norm => format!("{} {}x{}", self.round, self.rows, self.width),
            _ => format!("{kind} {} {}x{}", self.round, self.rows, self.width),
        }
    }

    fn rows(&self) -> usize {
        self.rows
    }

    /// A sum in another order moves a value to the next of its dtype.
    fn tolerance(&self, arithmetic: Arithmetic) -> f32 {
        match (self.kind, self.round) {
            (NormKind::Grad, _) if arithmetic == Arithmetic::TensorCores => 2e-5,
            (NormKind::Grad, _) => 1e-5,
            (_, DType::F16) => 1e-3,
            (_, DType::Bf16) => 8e-3,
            (_, DType::F32) if self.centered => 2e-5,
            (_, DType::F32) => 2e-6,
        }
    }

    fn work(&self) -> Work {
        let values = if self.kind == NormKind::Norm { 2 } else { 3 };
        Work::bytes(4 * values * self.rows * self.width)
    }

    fn run<B: Subject>(&self, bench: &mut Bench<'_, B>, rows: Range<usize>) -> Outcome {
        let NormCase { kind, centered, round, width, .. } = *self;
        let values = |seed| rows_of(seed, self.rows, width, &rows);
        // Far from zero, so that the mean matters.
        let offset = if centered && kind == NormKind::Norm { 3.0 } else { 0.0 };
        let x: Vec<f32> = values(1).iter().map(|v| offset + v).collect();
        let mut x = bench.in_place(&x)?;
        let (y, mut grad) = (bench.input(&values(2))?, bench.in_place(&values(3))?);
        let (weight, bias) = (bench.input(&noise(4, width))?, bench.input(&noise(5, width))?);
        let (rows, len, eps) = (rows.len(), rows.len() * width, EPS);
        let mut out = bench.output(len)?;
        bench.launch(|device, _| {
            let (weight, bias, out) = (&*weight, &*bias, &mut *out);
            match kind {
                NormKind::Grad => {
                    let (x, grad) = (&*x, &mut *grad);
                    let args = NormGrad { x, weight, grad, rows, width, eps, centered };
                    return device.norm_grad(args);
                }
                NormKind::AddNorm => {
                    let (x, y, bias) = (&mut *x, &*y, centered.then_some(bias));
                    let args = AddNorm { x, y, weight, bias, out, rows, width, eps, round };
                    return device.add_norm(args);
                }
                NormKind::AddThenNorm => device.add(Add { x: &mut *x, y: &*y, len, round })?,
                NormKind::Norm => (),
            }
            let x = &*x;
            if centered {
                let args = Layernorm { x, weight, bias, out, rows, width, eps, round };
                return device.layernorm(args);
            }
            device.rmsnorm(Rmsnorm { x, weight, out, rows, width, eps, round })
        })?;
        match kind {
            NormKind::Grad => Ok(vec![bench.take(&grad, len)?]),
            _ => Ok(vec![bench.take(&x, len)?, bench.take(&out, len)?]),
        }
    }

    fn check<B: Subject>(&self, bench: &mut Bench<'_, B>, expected: &[Vec<f32>]) -> Outcome {
        let all = check_rows(self, bench, expected, |bench, rows| self.run(bench, rows))?;
        if self.kind == NormKind::AddNorm {
            let separate = NormCase { kind: NormKind::AddThenNorm, ..*self };
            let separate = separate.run(bench, 0..self.rows)?;
            bench.all_same(&all, &separate)?;
        }
        Ok(all)
    }
}
