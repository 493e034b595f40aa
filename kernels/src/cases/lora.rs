//! Adapters beside a matrix product, and their gradient: rows go through adapters of different
//! ranks and types, through none, or name one that is not there.

use super::*;

/// (inputs, outputs) of adapters of different ranks and types.
const MIXED: [((usize, usize), Class); 4] = [
    ((1, 1), Class::Quick),
    ((50, 300), Class::Quick),
    ((1000, 257), Class::Full),
    ((8192, 8192), Class::Served),
];
/// Rank and dtype of each of them.
const ADAPTERS: [(usize, DType); 4] =
    [(8, DType::Bf16), (3, DType::F16), (5, DType::F32), (33, DType::F32)];
/// (inputs, rank, outputs) of adapters that are alike: one, odd, a common rank, and enough for
/// several pieces.
const ALIKE: [(usize, usize, usize); 5] =
    [(1, 1, 1), (31, 3, 9), (64, 8, 16), (352, 16, 129), (700, 64, 1000)];
/// Types of adapters and of what they are added to.
const TYPES: [(DType, DType); 4] = [
    (DType::F32, DType::F32),
    (DType::Bf16, DType::Bf16),
    (DType::F16, DType::F16),
    (DType::F32, DType::Bf16),
];

/// The adapters of rows. Number 4 leaves the matrix alone, number 5 does not exist.
fn of_rows() -> Vec<Option<u32>> {
    let runs = [(1, Some(0)), (11, Some(1)), (1, Some(4)), (2, Some(3)), (1, None), (1, Some(5))];
    runs.iter().flat_map(|&(rows, of)| vec![of; rows]).chain([None]).collect()
}

#[derive(Clone, Debug)]
pub(super) struct AdaptCase {
    is_grad: bool,
    inputs: usize,
    outputs: usize,
    /// Rank and dtype of each.
    adapters: Vec<(usize, DType)>,
    /// Which one each row goes through.
    of_rows: Vec<Option<u32>>,
    round: DType,
}

impl AdaptCase {
    fn rank(&self) -> usize {
        self.adapters.iter().map(|(rank, _)| *rank).max().unwrap_or(0)
    }

    /// Features that go in and come out of the operation.
    fn sides(&self) -> (usize, usize) {
        match self.is_grad {
            true => (self.outputs, self.inputs),
            false => (self.inputs, self.outputs),
        }
    }

    fn stored(&self) -> Vec<[Vec<u8>; 2]> {
        let of = |(seed, &(rank, dtype)): (u64, &(usize, DType))| {
            [(seed, self.inputs), (seed + 9, self.outputs)]
                .map(|(seed, side)| encode(QuantType::None, dtype, side, &noise(seed, side * rank)))
        };
        (1..).zip(&self.adapters).map(of).collect()
    }

    fn load<'w, B: Subject>(
        &self,
        bench: &mut Bench<'_, B>,
        stored: &'w [[Vec<u8>; 2]],
    ) -> Result<B::Adapters<'w>, Failure> {
        let mut adapters = Vec::new();
        for (number, (&(rank, dtype), [a, b])) in self.adapters.iter().zip(stored).enumerate() {
            let a = bench.matrix(view(QuantType::None, dtype, self.inputs, rank, a))?;
            let b = bench.matrix(view(QuantType::None, dtype, rank, self.outputs, b))?;
            adapters.push(Some(Adapter { a, b, scale: 0.5 + number as f32 }));
        }
        adapters.push(None);
        let adapters = bench.device.adapters(adapters);
        bench.op(adapters)
    }

    /// The dtype of the adapter of a row that has one.
    fn dtype_of(&self, row: usize) -> Option<DType> {
        let adapter = self.adapters.get(self.of_rows[row]? as usize)?;
        Some(adapter.1)
    }
}

impl Case for AdaptCase {
    fn cases(class: Class) -> Vec<Self> {
        let rounds: &[DType] = if class == Class::Smallest { &[DType::Bf16] } else { &DTYPES };
        let mut all = Vec::new();
        let mut add = |(inputs, outputs), adapters: Vec<_>, round| {
            let (adapters, of_rows) = (&adapters, &of_rows());
            all.extend([false, true].map(|is_grad| {
                let (adapters, of_rows) = (adapters.clone(), of_rows.clone());
                AdaptCase { is_grad, inputs, outputs, adapters, of_rows, round }
            }));
        };
        for size in class.select(&MIXED) {
            rounds.iter().for_each(|&round| add(size, ADAPTERS.to_vec(), round));
        }
        if class > Class::Quick {
            for (inputs, rank, outputs) in ALIKE {
                for (dtype, round) in TYPES {
                    add((inputs, outputs), vec![(rank, dtype); 4], round);
                }
            }
        }
        all
    }

    fn measured(shapes: &Shapes) -> Vec<Self> {
        let of = |&(rank, rows): &(usize, usize)| {
            let (inputs, outputs, round) = (shapes.hidden, shapes.hidden, DType::Bf16);
            [false, true].map(|is_grad| {
                let (adapters, of_rows) = (vec![(rank, round)], vec![Some(0); rows]);
                AdaptCase { is_grad, inputs, outputs, adapters, of_rows, round }
            })
        };
        shapes.adapters.iter().flat_map(of).collect()
    }

    fn operation(&self) -> &'static str {
        if self.is_grad { "adapt_grad" } else { "adapt" }
    }

    fn shape(&self) -> String {
        let of = |(rank, dtype): &(usize, DType)| format!("{dtype} rank {rank}");
        let mut adapters: Vec<String> = self.adapters.iter().map(of).collect();
        adapters.dedup();
        let (round, rows) = (self.round, self.of_rows.len());
        format!("{round} {}x{} {} rows {rows}", self.outputs, self.inputs, adapters.join(", "))
    }

    fn rows(&self) -> usize {
        self.of_rows.len()
    }

    /// Where a rounding falls the other way, bfloat16 moves by 2^-8 of the value, before it is
    /// scaled. A processor may round gradients to bfloat16 before each product.
    fn tolerance(&self, arithmetic: Arithmetic) -> f32 {
        let has = |dtype| self.adapters.iter().any(|(_, of)| *of == dtype);
        match (arithmetic, self.is_grad) {
            (Arithmetic::TensorCores, false) => 8e-3,
            (Arithmetic::TensorCores, true) => 1e-5,
            (_, true) if has(DType::Bf16) => 1e-2,
            (_, true) => 1e-4,
            (_, false) if has(DType::Bf16) || has(DType::F16) => 2e-2,
            (_, false) => 1e-5,
        }
    }

    fn work(&self) -> Work {
        let (rows, both) = (self.of_rows.len(), self.inputs + self.outputs);
        let bytes = 2 * self.rank() * both + 4 * rows * both;
        Work { bytes, operations: 2 * self.rank() * both * rows }
    }

    fn run<B: Subject>(&self, bench: &mut Bench<'_, B>, rows: Range<usize>) -> Outcome {
        let (stored, (from, to)) = (self.stored(), self.sides());
        let adapters = &self.load(bench, &stored)?;
        let x = bench.input(&rows_of(30, self.rows(), from, &rows))?;
        let mut out = bench.in_place(&rows_of(31, self.rows(), to, &rows))?;
        let (len, middle_len) = (rows.len() * to, rows.len() * self.rank());
        let mut middle = bench.output(middle_len)?;
        let (of_rows, round) = (&self.of_rows[rows], self.round);
        bench.launch(|device, _| {
            let (x, middle, out) = (&*x, &mut *middle, &mut *out);
            match self.is_grad {
                true => device.adapt_grad(AdaptGrad { grad: x, adapters, of_rows, middle, out }),
                false => device.adapt(Adapt {
                    x,
                    adapters,
                    of_rows,
                    middle,
                    out,
                    round,
                    inputs: RankInputs::Whole,
                }),
            }
        })?;
        bench.take(&middle, middle_len)?;
        Ok(vec![bench.take(&out, len)?])
    }

    fn check<B: Subject>(&self, bench: &mut Bench<'_, B>, expected: &[Vec<f32>]) -> Outcome {
        let all = check_rows(self, bench, expected, |bench, rows| self.run(bench, rows))?;
        let width = self.sides().1;
        let before = noise(31, self.rows() * width);
        for row in 0..self.rows() {
            let own = row * width..(row + 1) * width;
            let actual = &all[0][own.clone()];
            match self.dtype_of(row) {
                // Rows without an adapter keep their bits.
                None => bench.same(actual, &before[own])?,
                // These round nothing that could fall otherwise.
                Some(DType::F32) if !self.is_grad => {
                    bench.close(actual, &expected[0][own], 2e-5)?;
                }
                Some(_) => (),
            }
        }
        Ok(all)
    }
}
