//! Operations that take elements one by one: additions, activations and their gradients. An element
//! is a row.

use super::*;

const LENS: [(usize, Class); 7] = [
    (1, Class::Quick),
    (EXTREMES.len(), Class::Quick),
    (7, Class::Quick),
    (1027, Class::Quick),
    (28672, Class::Full),
    (163_840, Class::Full),
    (10_000_003, Class::Served),
];

/// Inputs of the case of this length.
const EXTREMES: [f32; 4] = [1e4, -1e4, 1e-9, 0.0];

#[derive(Clone, Copy, Debug, PartialEq)]
enum ElementwiseKind {
    Add(DType),
    /// A prompt of half the length behind a third, which is aligned to nothing.
    PromptAdd(DType),
    SiluMul(DType),
    Gelu(GeluKind, DType),
    SiluMulGrad,
    GeluGrad(GeluKind),
}

const KINDS: [GeluKind; 2] = [GeluKind::Tanh, GeluKind::Erf];

#[derive(Clone, Copy, Debug)]
pub(super) struct ElementCase {
    kind: ElementwiseKind,
    len: usize,
}

impl ElementCase {
    /// From tail to tail of the activations.
    fn tails(&self, range: &Range<usize>) -> Vec<f32> {
        if self.len == EXTREMES.len() {
            return EXTREMES[range.clone()].to_vec();
        }
        let jitter = noise(1, self.len);
        let at = |i: usize| -16.0 + 32.0 * (i as f32 + jitter[i]) / self.len as f32;
        range.clone().map(at).collect()
    }
}

impl Case for ElementCase {
    const IS_ELEMENTWISE: bool = true;

    fn cases(class: Class) -> Vec<Self> {
        let mut kinds = vec![ElementwiseKind::SiluMulGrad];
        kinds.extend(KINDS.map(ElementwiseKind::GeluGrad));
        for round in DTYPES {
            kinds.extend([
                ElementwiseKind::Add(round),
                ElementwiseKind::PromptAdd(round),
                ElementwiseKind::SiluMul(round),
            ]);
            kinds.extend(KINDS.map(|kind| ElementwiseKind::Gelu(kind, round)));
        }
        let of = |len| kinds.iter().map(move |&kind| ElementCase { len, kind });
        class.select(&LENS).into_iter().flat_map(of).collect()
    }

    fn measured(shapes: &Shapes) -> Vec<Self> {
        let of = |&rows: &usize| {
            [
                (ElementwiseKind::Add(DType::Bf16), shapes.hidden),
                (ElementwiseKind::SiluMul(DType::Bf16), shapes.middle),
                (ElementwiseKind::Gelu(GeluKind::Tanh, DType::Bf16), shapes.middle),
                (ElementwiseKind::SiluMulGrad, shapes.middle),
                (ElementwiseKind::GeluGrad(GeluKind::Tanh), shapes.middle),
            ]
            .map(|(kind, width)| ElementCase { kind, len: rows * width })
        };
        shapes.rows.iter().flat_map(of).collect()
    }

    fn operation(&self) -> &'static str {
        match self.kind {
            ElementwiseKind::Add(_) => "add",
            ElementwiseKind::PromptAdd(_) => "prompt_add",
            ElementwiseKind::SiluMul(_) => "silu_mul",
            ElementwiseKind::Gelu(..) => "gelu",
            ElementwiseKind::SiluMulGrad => "silu_mul_grad",
            ElementwiseKind::GeluGrad(_) => "gelu_grad",
        }
    }

    fn shape(&self) -> String {
        match self.kind {
            ElementwiseKind::Add(round)
            | ElementwiseKind::PromptAdd(round)
            | ElementwiseKind::SiluMul(round) => {
                format!("{round} {}", self.len)
            }
            ElementwiseKind::Gelu(kind, round) => format!("{kind:?} {round} {}", self.len),
            ElementwiseKind::SiluMulGrad => self.len.to_string(),
            ElementwiseKind::GeluGrad(kind) => format!("{kind:?} {}", self.len),
        }
    }

    fn rows(&self) -> usize {
        if matches!(self.kind, ElementwiseKind::PromptAdd(_)) { 1 } else { self.len }
    }

    /// Of many elements few ranges suffice.
    fn ranges(&self, usual: Vec<Range<usize>>) -> Vec<Range<usize>> {
        match self.len {
            ..2000 => usual,
            _ => usual.into_iter().filter(|range| range.len() >= 9).take(4).collect(),
        }
    }

    fn tolerance(&self, arithmetic: Arithmetic) -> f32 {
        let of_device = if arithmetic == Arithmetic::TensorCores { 2.0 } else { 1.0 };
        match self.kind {
            ElementwiseKind::Add(_) | ElementwiseKind::PromptAdd(_) => 0.0,
            ElementwiseKind::SiluMul(DType::F32) => of_device * 1e-6,
            // A rounding that falls the other way costs one unit of the dtype.
            ElementwiseKind::SiluMul(DType::Bf16) => 8e-3,
            ElementwiseKind::SiluMul(DType::F16) => 1e-3,
            ElementwiseKind::Gelu(..) => 1e-6,
            ElementwiseKind::SiluMulGrad => 2e-6,
            ElementwiseKind::GeluGrad(_) => of_device * 2e-6,
        }
    }

    fn work(&self) -> Work {
        let bytes = match self.kind {
            ElementwiseKind::Gelu(..) => 8,
            ElementwiseKind::SiluMulGrad => 20,
            _ => 12,
        };
        Work::bytes(bytes * self.len)
    }

    fn run<B: Subject>(&self, bench: &mut Bench<'_, B>, rows: Range<usize>) -> Outcome {
        if let ElementwiseKind::PromptAdd(round) = self.kind {
            let (mut x, prompt) = (bench.in_place(&noise(1, self.len))?, noise(2, self.len / 2));
            let (offset, prompt) = (self.len / 3, &prompt[..]);
            bench.launch(|device, _| {
                device.prompt_add(PromptAdd { x: &mut *x, offset, prompt, round })
            })?;
            return Ok(vec![bench.take(&x, self.len)?]);
        }
        let len = rows.len();
        let mut x = bench.in_place(&self.tails(&rows))?;
        let mut y = bench.in_place(&noise(2, self.len)[rows.clone()])?;
        let mut grad = bench.in_place(&noise(3, self.len)[rows])?;
        bench.launch(|device, _| {
            let (x, y, grad) = (&mut *x, &mut *y, &mut *grad);
            match self.kind {
                ElementwiseKind::Add(round) => device.add(Add { x, y, len, round }),
                ElementwiseKind::PromptAdd(_) => Ok(()),
                ElementwiseKind::SiluMul(round) => {
                    device.silu_mul(SiluMul { gate: x, up: y, len, round })
                }
                ElementwiseKind::Gelu(kind, round) => device.gelu(Gelu { x, len, kind, round }),
                ElementwiseKind::SiluMulGrad => {
                    device.silu_mul_grad(SiluMulGrad { gate: x, up: y, grad, len })
                }
                ElementwiseKind::GeluGrad(kind) => {
                    device.gelu_grad(GeluGrad { x, grad, len, kind })
                }
            }
        })?;
        Ok(vec![bench.take(&x, len)?, bench.take(&y, len)?, bench.take(&grad, len)?])
    }
}
