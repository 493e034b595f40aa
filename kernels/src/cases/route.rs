//! The router alone, its gradient, and rows by number.

use super::*;

#[derive(Clone, Copy, Debug)]
pub(super) struct RouteCase {
    is_grad: bool,
    tokens: usize,
    experts: usize,
    chosen: usize,
    round: DType,
}

impl Case for RouteCase {
    fn cases(_: Class) -> Vec<Self> {
        let mut all = Vec::new();
        for (tokens, experts, chosen) in
            [(1, 1, 1), (7, 8, 2), (5, 37, 5), (3, 256, 8), (2, 40, 40)]
        {
            for round in DTYPES {
                let of = |is_grad| RouteCase { is_grad, tokens, experts, chosen, round };
                all.extend([false, true].map(of));
            }
        }
        all
    }

    fn operation(&self) -> &'static str {
        if self.is_grad { "route_grad" } else { "route" }
    }

    fn shape(&self) -> String {
        format!("{} {} of {} tokens {}", self.round, self.chosen, self.experts, self.tokens)
    }

    fn rows(&self) -> usize {
        self.tokens
    }

    fn tolerance(&self, _: Arithmetic) -> f32 {
        match self.round {
            _ if self.is_grad => 1e-5,
            DType::F32 => 1e-6,
            DType::Bf16 => 4e-3,
            DType::F16 => 5e-4,
        }
    }

    fn run<B: Subject>(&self, bench: &mut Bench<'_, B>, rows: Range<usize>) -> Outcome {
        let RouteCase { experts, chosen, round, .. } = *self;
        // Some logits are equal.
        let logits = rows_of(1, self.tokens, experts, &rows);
        let logits: Vec<f32> = logits.iter().map(|v| (v * 20.0).round() / 4.0).collect();
        let mut logits = bench.in_place(&logits)?;
        let grad = bench.input(&rows_of(2, self.tokens, experts, &rows))?;
        let tokens = rows.len();
        bench.launch(|device, _| {
            let (logits, grad) = (&mut *logits, &*grad);
            match self.is_grad {
                false => device.route(Route { logits, tokens, experts, chosen, round }),
                true => {
                    device.route_grad(RouteGrad { logits, grad, tokens, experts, chosen, round })
                }
            }
        })?;
        Ok(vec![bench.take(&logits, tokens * experts)?])
    }

    fn check<B: Subject>(&self, bench: &mut Bench<'_, B>, expected: &[Vec<f32>]) -> Outcome {
        let all = check_rows(self, bench, expected, |bench, rows| self.run(bench, rows))?;
        if !self.is_grad {
            bench.compare(&all[0], &expected[0], |a, e| (a == 0.0) == (e == 0.0))?;
        }
        Ok(all)
    }
}

/// Every third row from the last on, and so none twice.
#[derive(Clone, Copy, Debug)]
pub(super) struct GatherCase {
    stored_rows: usize,
    moved: usize,
    width: usize,
}

impl Case for GatherCase {
    fn cases(class: Class) -> Vec<Self> {
        let quick = [(5, 3, 7), (9, 9, 256)].map(|sizes| (sizes, Class::Quick));
        let table = [&quick[..], &[((20, 6, 4096), Class::Full)]].concat();
        let of = |(stored_rows, moved, width)| GatherCase { stored_rows, moved, width };
        class.select(&table).into_iter().map(of).collect()
    }

    fn measured(shapes: &Shapes) -> Vec<Self> {
        let of =
            |&rows: &usize| GatherCase { stored_rows: rows, moved: rows, width: shapes.hidden };
        shapes.rows.iter().map(of).collect()
    }

    fn operation(&self) -> &'static str {
        "gather"
    }

    fn shape(&self) -> String {
        format!("{} of {}x{}", self.moved, self.stored_rows, self.width)
    }

    fn rows(&self) -> usize {
        self.moved
    }

    fn work(&self) -> Work {
        Work::bytes(8 * self.moved * self.width)
    }

    fn run<B: Subject>(&self, bench: &mut Bench<'_, B>, rows: Range<usize>) -> Outcome {
        let step = if self.stored_rows.is_multiple_of(3) { 2 } else { 3 };
        let at = |i: usize| {
            u32::try_from((self.stored_rows - 1 + i * step) % self.stored_rows).unwrap_or(0)
        };
        let index: Vec<u32> = rows.map(at).collect();
        let (width, len) = (self.width, index.len() * self.width);
        let (x, mut out) = (bench.input(&noise(1, self.stored_rows * width))?, bench.output(len)?);
        bench.launch(|device, _| {
            device.gather(Gather { x: &*x, index: &index, width, out: &mut *out })
        })?;
        Ok(vec![bench.take(&out, len)?])
    }
}
