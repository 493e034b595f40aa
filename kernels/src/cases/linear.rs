//! Matrix products, alone and several of one input.

use super::slices::{Slice, slices};
use super::*;

/// (inputs, outputs): one, odd, a block, off a tile, off a group of NF4, off a segment, several
/// chunks, enough for several pieces, and those of served models with few outputs.
pub(super) const SIZES: [((usize, usize), Class); 17] = [
    ((1, 1), Class::Quick),
    ((3, 5), Class::Full),
    ((31, 9), Class::Full),
    ((50, 9), Class::Quick),
    ((64, 13), Class::Full),
    ((64, 16), Class::Quick),
    ((100, 37), Class::Full),
    ((128, 37), Class::Full),
    ((128, 601), Class::Full),
    ((320, 37), Class::Quick),
    ((352, 128), Class::Full),
    ((1000, 203), Class::Full),
    ((1408, 40), Class::Full),
    ((2112, 130), Class::Full),
    ((4544, 33), Class::Full),
    ((8192, 48), Class::Full),
    ((8192, 28672), Class::Served),
];

/// (tiles of 128 outputs, blocks of 64 inputs, rows) of products by clusters of CTAs: clusters that
/// are filled, and not; fewer blocks than the ring of a pipeline has stages, and several times as
/// many; rows off a tile.
const CLUSTERS: [((usize, usize, usize), Class); 8] = [
    ((1, 1, 33), Class::Smallest),
    ((2, 9, 33), Class::Smallest),
    ((1, 5, 35), Class::Quick),
    ((3, 15, 35), Class::Quick),
    ((5, 6, 130), Class::Full),
    ((3, 39, 257), Class::Full),
    ((7, 18, 1000), Class::Served),
    ((64, 128, 1024), Class::Served),
];

/// Matrices and rows of the cases of products and of their gradients.
pub(super) fn matrices(class: Class) -> Vec<(CaseMatrix, usize)> {
    let sizes = class.select(&SIZES).into_iter();
    let slices = slices(class);
    let of = |(inputs, outputs): (usize, usize)| {
        FORMATS.into_iter().flat_map(move |quant| {
            let dtypes = dtypes_of(class, inputs).into_iter();
            dtypes.map(move |dtype| {
                (CaseMatrix::new(quant, dtype, inputs, outputs), rows_of(class, inputs * outputs))
            })
        })
    };
    sizes.flat_map(of).chain(slices).collect()
}

/// Types of a case: all, or one that tiles take and one that they do not.
fn dtypes_of(class: Class, inputs: usize) -> Vec<DType> {
    match (class, inputs) {
        (Class::Smallest, 64 | 320) => vec![DType::Bf16],
        (Class::Smallest, _) => vec![DType::F32],
        _ => DTYPES.to_vec(),
    }
}

/// Rows of a case: more than a tile of few rows, and than one of many where a matrix is small.
fn rows_of(class: Class, weights: usize) -> usize {
    match class {
        Class::Smallest => 33,
        Class::Quick => 35,
        Class::Full if weights > 40_000 => 35,
        Class::Served if weights > 10_000_000 => 35,
        _ => 131,
    }
}

/// The matrices that are measured.
pub(super) fn measured(shapes: &Shapes) -> impl Iterator<Item = CaseMatrix> + '_ {
    shapes.formats.iter().flat_map(|&(quant, dtype)| {
        let of = move |&(outputs, inputs): &(usize, usize)| {
            CaseMatrix::new(quant, dtype, inputs, outputs)
        };
        shapes.matrices.iter().map(of)
    })
}

pub(super) struct LinearCase {
    weight: CaseMatrix,
    rows: usize,
    has_bias: bool,
}

impl LinearCase {
    /// The middle of a gated MLP with this matrix as gate and `up` as up, by one operation or by
    /// several.
    fn gated<B: Subject>(
        &self,
        bench: &mut Bench<'_, B>,
        up: &CaseMatrix,
        rows: usize,
        is_joint: bool,
    ) -> Outcome {
        let (inputs, outputs) = (self.weight.inputs, self.weight.outputs);
        let of_gate = bench.matrix(self.weight.view(self.weight.bytes(false)))?;
        let of_up = bench.matrix(up.view(up.bytes(false)))?;
        let x = bench.input(&noise(7, rows * inputs))?;
        let (low, high) = (bench.input(&noise(8, outputs))?, bench.input(&noise(9, outputs))?);
        let (mut gate, mut up) = (bench.output(rows * outputs)?, bench.output(rows * outputs)?);
        bench.launch(|device, _| {
            let bias = |bias| self.has_bias.then_some(bias);
            let mut parts = [
                Product { weight: of_gate.clone(), bias: bias(&*low), out: &mut *gate },
                Product { weight: of_up.clone(), bias: bias(&*high), out: &mut *up },
            ];
            let (x, round) = (&*x, self.weight.dtype);
            if is_joint {
                return device.gated(Gated { x, rows, parts, round });
            }
            device.products(Products { x, rows, parts: &mut parts })?;
            let [gate, up] = parts;
            let len = rows * outputs;
            device.silu_mul(SiluMul { gate: gate.out, up: up.out, len, round })
        })?;
        Ok(vec![bench.take(&gate, rows * outputs)?])
    }
}

impl Case for LinearCase {
    const HAS_ALTERNATIVES: bool = true;

    fn cases(class: Class) -> Vec<Self> {
        let of = |(weight, rows): (CaseMatrix, usize)| {
            let has_bias = weight.part.is_none();
            LinearCase { weight, rows, has_bias }
        };
        let mut cases: Vec<_> = matrices(class).into_iter().map(of).collect();
        let formats = if class == Class::Smallest { &FORMATS[2..] } else { &FORMATS };
        let clusters = CLUSTERS.into_iter().filter(|(_, at)| *at <= class);
        // The fewest inputs that clusters share by segments, and a strip that is not whole.
        cases.extend(FORMATS.map(|quant| LinearCase {
            weight: CaseMatrix::new(quant, DType::Bf16, 7 * 256 + 64, 20),
            rows: 33,
            has_bias: true,
        }));
        if class.takes(Class::Full) {
            // More rows than share a decoded panel on a CPU; more inputs than are decoded at a time.
            let panels = [
                (DType::F32, (64, 33), crate::tuning::PANEL_GROUP_ROWS + 18),
                (DType::Bf16, (4180, 33), 70),
            ];
            for (dtype, (inputs, outputs), rows) in panels {
                cases.extend(FORMATS.map(|quant| LinearCase {
                    weight: CaseMatrix::new(quant, dtype, inputs, outputs),
                    rows,
                    has_bias: true,
                }));
            }
        }
        cases.extend(clusters.flat_map(|((tiles, blocks, rows), _)| {
            let (inputs, outputs) = (blocks * 64, tiles * 128 - 5);
            formats.iter().map(move |&quant| LinearCase {
                weight: CaseMatrix::new(quant, DType::Bf16, inputs, outputs),
                rows,
                has_bias: false,
            })
        }));
        cases
    }

    fn measured(shapes: &Shapes) -> Vec<Self> {
        let of = |weight: CaseMatrix| {
            let rows = shapes.rows.iter();
            rows.map(move |&rows| LinearCase { weight: weight.clone(), rows, has_bias: false })
        };
        measured(shapes).flat_map(of).collect()
    }

    fn operation(&self) -> &'static str {
        "linear"
    }

    fn shape(&self) -> String {
        format!("{} rows {}", self.weight.name(), self.rows)
    }

    fn rows(&self) -> usize {
        self.rows
    }

    fn reference_rows(&self) -> usize {
        match self.rows * self.weight.inputs * self.weight.outputs {
            ..10_000_000_000 => self.rows,
            _ => self.rows.min(35),
        }
    }

    fn tolerance(&self, arithmetic: Arithmetic) -> f32 {
        tolerance(&self.weight, arithmetic)
    }

    fn work(&self) -> Work {
        let operations = 2 * self.rows * self.weight.inputs * self.weight.outputs;
        Work { bytes: self.weight.len(), operations }
    }

    fn run<B: Subject>(&self, bench: &mut Bench<'_, B>, rows: Range<usize>) -> Outcome {
        let (inputs, outputs) = (self.weight.inputs, self.weight.outputs);
        // A host reads weights where they lie, which may be anywhere.
        let is_unaligned = B::IS_HOST && rows.len() < self.rows;
        let stored = bench.weights(self.weight.len(), || self.weight.bytes(is_unaligned));
        let ring = bench.matrices(stored.into_iter().map(|bytes| self.weight.view(bytes)))?;
        let x = &noise(3, self.rows * inputs)[rows.start * inputs..rows.end * inputs];
        let (x, bias) = (bench.input(x)?, bench.input(&noise(2, outputs))?);
        let rows = rows.len();
        let mut out = bench.output(rows * outputs)?;
        bench.launch(|device, run| {
            let weight = ring[run % ring.len()].clone();
            let (x, bias, out) = (&*x, self.has_bias.then_some(&*bias), &mut *out);
            device.linear(Linear { x, weight, bias, out, rows })
        })?;
        Ok(vec![bench.take(&out, rows * outputs)?])
    }

    fn check<B: Subject>(&self, bench: &mut Bench<'_, B>, expected: &[Vec<f32>]) -> Outcome {
        let all = check_rows(self, bench, expected, |bench, rows| self.run(bench, rows))?;
        if let Some(weight) = self.weight.whole() {
            // Rows of a matrix have the bits that they have among all.
            let whole = LinearCase { weight, rows: self.rows, has_bias: self.has_bias };
            if let Some(own) = self.weight.own_outputs(&whole.run(bench, 0..self.rows)?[0]) {
                bench.same(&all[0], &own)?;
            }
        }
        // Gated in one operation: the bits of products and activation.
        let up = self.weight.other();
        for rows in [1, 7, 16] {
            let together = self.gated(bench, &up, rows, true)?;
            let apart = self.gated(bench, &up, rows, false)?;
            bench.all_same(&together, &apart)?;
        }
        Ok(all)
    }
}

/// Few bits of the sum; on a device also the rounding of each NF4 weight, which goes another way
/// there.
fn tolerance(weight: &CaseMatrix, arithmetic: Arithmetic) -> f32 {
    let is_nf4 = weight.quant == QuantType::Nf4;
    match (arithmetic, weight.dtype) {
        (Arithmetic::TensorCores, DType::Bf16) if is_nf4 => 4e-3,
        (Arithmetic::TensorCores, DType::F16) if is_nf4 => 5e-4,
        (Arithmetic::TensorCores, _) => 2e-5,
        _ if weight.quant == QuantType::None && weight.inputs <= 1000 => 3e-6,
        _ => 1e-5,
    }
}

/// Three products of one input, with the bits that each has alone.
pub(super) struct ProductsCase {
    weights: Vec<CaseMatrix>,
    rows: usize,
}

const INPUTS: usize = 320;

impl ProductsCase {
    fn run_as<B: Subject>(
        &self,
        bench: &mut Bench<'_, B>,
        rows: Range<usize>,
        is_joint: bool,
    ) -> Outcome {
        let views = self.weights.iter().map(|weight| weight.view(weight.bytes(false)));
        let matrices = bench.matrices(views)?;
        let x = &noise(5, self.rows * INPUTS)[rows.start * INPUTS..rows.end * INPUTS];
        let (x, rows) = (bench.input(x)?, rows.len());
        let mut outs = Vec::new();
        for weight in &self.weights {
            outs.push(bench.output(rows * weight.outputs)?);
        }
        bench.launch(|device, _| {
            let pairs = matrices.iter().zip(&mut outs);
            let pairs = pairs.map(|(weight, out)| (weight.clone(), &mut **out));
            if is_joint {
                let product = |(weight, out)| Product { weight, bias: None, out };
                let mut parts: Vec<_> = pairs.map(product).collect();
                return device.products(Products { x: &*x, rows, parts: &mut parts });
            }
            pairs.into_iter().try_for_each(|(weight, out)| {
                device.linear(Linear { x: &*x, weight, bias: None, out, rows })
            })
        })?;
        let pairs = outs.iter().zip(&self.weights);
        pairs.map(|(out, weight)| bench.take(out, rows * weight.outputs)).collect()
    }
}

impl Case for ProductsCase {
    const HAS_ALTERNATIVES: bool = true;

    fn cases(class: Class) -> Vec<Self> {
        let formats = if class == Class::Smallest { &FORMATS[2..] } else { &FORMATS };
        let outputs: &[[usize; 3]] = match class.takes(Class::Full) {
            true => &[[70, 9, 33], [130, 9, 300]],
            false => &[[70, 9, 33]],
        };
        let of = |quant: &QuantType| {
            let quant = *quant;
            let cases = outputs.iter().map(move |outputs| {
                let of = |outputs| CaseMatrix::new(quant, DType::Bf16, INPUTS, outputs);
                ProductsCase { weights: outputs.map(of).to_vec(), rows: 40 }
            });
            // As of a rank: its heads, and a key/value head that every rank has.
            let part = Slice::new((2 * INPUTS, 70), &[3..40, 50..63], INPUTS..2 * INPUTS);
            let heads = CaseMatrix::slice(quant, DType::Bf16, part);
            let whole = CaseMatrix::new(quant, DType::Bf16, INPUTS, 9);
            let slices = ProductsCase { weights: vec![heads, whole], rows: 40 };
            cases.chain((quant != QuantType::None).then_some(slices))
        };
        formats.iter().flat_map(of).collect()
    }

    fn operation(&self) -> &'static str {
        "products"
    }

    fn shape(&self) -> String {
        let names: Vec<String> = self.weights.iter().map(CaseMatrix::name).collect();
        format!("{} rows {}", names.join(", "), self.rows)
    }

    fn rows(&self) -> usize {
        self.rows
    }

    fn tolerance(&self, arithmetic: Arithmetic) -> f32 {
        tolerance(&self.weights[0], arithmetic)
    }

    fn run<B: Subject>(&self, bench: &mut Bench<'_, B>, rows: Range<usize>) -> Outcome {
        self.run_as(bench, rows, true)
    }

    fn check<B: Subject>(&self, bench: &mut Bench<'_, B>, expected: &[Vec<f32>]) -> Outcome {
        let all = check_rows(self, bench, expected, |bench, rows| self.run(bench, rows))?;
        let separate = self.run_as(bench, 0..self.rows, false)?;
        bench.all_same(&all, &separate)?;
        Ok(all)
    }
}
