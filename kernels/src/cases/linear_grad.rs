//! Gradients of matrix products.

use super::linear::{matrices, measured};
use super::*;

pub(super) struct LinearGradCase {
    weight: CaseMatrix,
    rows: usize,
}

impl LinearGradCase {
    fn run_by<B: Subject>(
        &self,
        bench: &mut Bench<'_, B>,
        rows: Range<usize>,
        segment: Option<usize>,
    ) -> Outcome {
        let (inputs, outputs) = (self.weight.inputs, self.weight.outputs);
        let is_unaligned = B::IS_HOST && rows.len() < self.rows;
        let stored = bench.weights(self.weight.len(), || self.weight.bytes(is_unaligned));
        let ring = bench.matrices(stored.into_iter().map(|bytes| self.weight.view(bytes)))?;
        let grad = &noise(4, self.rows * outputs)[rows.start * outputs..rows.end * outputs];
        let (grad, rows) = (bench.input(grad)?, rows.len());
        let mut out = bench.output(rows * inputs)?;
        bench.launch(|device, run| {
            let weight = ring[run % ring.len()].clone();
            let args = LinearGrad { grad: &*grad, weight, out: &mut *out, rows };
            device.linear_grad_by(args, segment)
        })?;
        Ok(vec![bench.take(&out, rows * inputs)?])
    }
}

impl Case for LinearGradCase {
    fn cases(class: Class) -> Vec<Self> {
        let of = |(weight, rows)| LinearGradCase { weight, rows };
        let mut cases: Vec<_> = matrices(class).into_iter().map(of).collect();
        if class.takes(Class::Full) {
            // More rows than a group of AMX tiles on a CPU.
            let rows = crate::tuning::TILED_GRADIENT_ROWS + 20;
            let groups =
                FORMATS.map(|quant| of((CaseMatrix::new(quant, DType::Bf16, 192, 40), rows)));
            cases.extend(groups);
        }
        cases
    }

    fn measured(shapes: &Shapes) -> Vec<Self> {
        let of = |weight: CaseMatrix| {
            let rows = shapes.gradient_rows.iter();
            rows.map(move |&rows| LinearGradCase { weight: weight.clone(), rows })
        };
        measured(shapes).flat_map(of).collect()
    }

    fn operation(&self) -> &'static str {
        "linear_grad"
    }

    fn shape(&self) -> String {
        format!("{} rows {}", self.weight.name(), self.rows)
    }

    fn rows(&self) -> usize {
        self.rows
    }

    fn tolerance(&self, arithmetic: Arithmetic) -> f32 {
        match arithmetic {
            // Gradients and weights that are not bfloat16 are rounded to it where tensor cores
            // multiply them.
            Arithmetic::TensorCores if self.weight.is_tiled() => 6e-3,
            Arithmetic::TensorCores => 2e-6,
            // Gradients may be rounded to bfloat16.
            _ if self.weight.dtype == DType::Bf16 => 4e-3,
            _ => 3e-6,
        }
    }

    fn work(&self) -> Work {
        let operations = 2 * self.rows * self.weight.inputs * self.weight.outputs;
        Work { bytes: self.weight.len(), operations }
    }

    fn run<B: Subject>(&self, bench: &mut Bench<'_, B>, rows: Range<usize>) -> Outcome {
        self.run_by(bench, rows, None)
    }

    fn check<B: Subject>(&self, bench: &mut Bench<'_, B>, expected: &[Vec<f32>]) -> Outcome {
        let segments = if self.weight.is_tiled() { B::SEGMENTS } else { &[None] };
        let mut all = Vec::new();
        for &segment in segments {
            all.extend(check_rows(self, bench, expected, |bench, rows| {
                self.run_by(bench, rows, segment)
            })?);
        }
        let has_pairs = bench.device.arithmetic() != Arithmetic::F32;
        let is_exact = !has_pairs || self.weight.dtype != DType::Bf16;
        if B::IS_HOST && is_exact && self.weight.quant != QuantType::None {
            // A quantized matrix has the bits of the plain one that it stands for.
            let plain = LinearGradCase { weight: self.weight.decoded(), rows: self.rows };
            let plain = plain.run(bench, 0..self.rows)?;
            bench.all_same(&all, &plain)?;
        }
        if let Some(weight) = self.weight.whole() {
            // Columns of a matrix have the bits that they have among all.
            let whole = LinearGradCase { weight, rows: self.rows };
            if let Some(own) = self.weight.own_inputs(&whole.run(bench, 0..self.rows)?[0]) {
                bench.same(&all[0], &own)?;
            }
        }
        Ok(all)
    }
}
