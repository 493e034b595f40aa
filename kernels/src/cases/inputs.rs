//! Inputs of cases: the same in every run.

use std::cell::RefCell;
use std::collections::VecDeque;

use super::slices::Slice;
use super::*;

pub(super) const DTYPES: [DType; 3] = [DType::F32, DType::Bf16, DType::F16];
pub(super) const FORMATS: [QuantType; 3] = [QuantType::None, QuantType::Int8, QuantType::Nf4];

/// How many of the last calls of [`noise`] are remembered, and the most values of one.
const REMEMBERED: (usize, usize) = (8, 1 << 22);

thread_local! {
    /// Seeds with what [`noise`] made of them, the last one first.
    static MADE: RefCell<VecDeque<(u64, Vec<f32>)>> = const { RefCell::new(VecDeque::new()) };
}

/// Reproducible values in -1..1.
pub(super) fn noise(seed: u64, len: usize) -> Vec<f32> {
    part_of_noise(seed, len, 0..len)
}

/// Some of `len` values of noise. A case asks for the same ones again and again, for every device and
/// every range of rows.
fn part_of_noise(seed: u64, len: usize, part: Range<usize>) -> Vec<f32> {
    let (calls, most) = REMEMBERED;
    if len > most {
        return generated(seed, len)[part].to_vec();
    }
    MADE.with_borrow_mut(|made| {
        let known = made.iter().position(|(of, values)| *of == seed && values.len() >= len);
        let found = known.and_then(|at| made.remove(at));
        made.push_front(found.unwrap_or_else(|| (seed, generated(seed, len))));
        made.truncate(calls);
        made[0].1[part].to_vec()
    })
}

fn generated(seed: u64, len: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..len).map(|_| next()).collect()
}

/// Some rows of `all` rows of noise.
pub(super) fn rows_of(seed: u64, all: usize, width: usize, rows: &Range<usize>) -> Vec<f32> {
    part_of_noise(seed, all * width, rows.start * width..rows.end * width)
}

/// `values` as `quant` stores a matrix of `inputs` columns, to be computed with in `dtype`.
pub(super) fn encode(quant: QuantType, dtype: DType, inputs: usize, values: &[f32]) -> Vec<u8> {
    match quant {
        QuantType::Int8 => int8::encode(values, inputs),
        QuantType::Nf4 => nf4::encode(values),
        QuantType::None => {
            let mut bytes = vec![0; values.len() * dtype.size_bytes()];
            convert::from_f32(dtype, values, &mut bytes);
            bytes
        }
    }
}

/// `bytes` as a matrix of `outputs` rows.
pub(super) fn view(
    quant: QuantType,
    dtype: DType,
    inputs: usize,
    outputs: usize,
    bytes: &[u8],
) -> WeightView<'_> {
    WeightView::quantized(quant, dtype, outputs, inputs, bytes).expect("made for this shape")
}

/// A matrix of a case, made when it is first used.
#[derive(Clone, Debug)]
pub(super) struct CaseMatrix {
    pub(super) quant: QuantType,
    pub(super) dtype: DType,
    pub(super) inputs: usize,
    pub(super) outputs: usize,
    aligned: OnceCell<Vec<u8>>,
    /// The same behind one byte.
    unaligned: OnceCell<Vec<u8>>,
    /// Of a slice; the bytes are those of the whole matrix.
    pub(super) part: Option<Slice>,
}

impl CaseMatrix {
    pub(super) fn new(quant: QuantType, dtype: DType, inputs: usize, outputs: usize) -> CaseMatrix {
        let (aligned, unaligned) = (OnceCell::new(), OnceCell::new());
        CaseMatrix { quant, dtype, inputs, outputs, aligned, unaligned, part: None }
    }

    /// What it stands for, as a plain matrix of f32.
    pub(super) fn decoded(&self) -> CaseMatrix {
        let mut values = vec![0.0; self.inputs * self.outputs];
        let view = self.view(self.bytes(false));
        for (index, row) in values.chunks_mut(self.inputs).enumerate() {
            view.row_to_f32(index, row);
        }
        let decoded = CaseMatrix::new(QuantType::None, DType::F32, self.inputs, self.outputs);
        decoded.of_values(&values)
    }

    /// The matrix with these values, of a slice those of the whole matrix.
    pub(super) fn of_values(self, values: &[f32]) -> CaseMatrix {
        let (inputs, _) = self.stored_size();
        self.aligned.get_or_init(|| encode(self.quant, self.dtype, inputs, values));
        self
    }

    /// Its bytes, at an odd address if wanted.
    pub(super) fn bytes(&self, is_unaligned: bool) -> &[u8] {
        let aligned = || {
            let (inputs, outputs) = self.stored_size();
            encode(self.quant, self.dtype, inputs, &noise(1, inputs * outputs))
        };
        let aligned = self.aligned.get_or_init(aligned);
        if !is_unaligned {
            return aligned;
        }
        let behind = || [&[0], &aligned[..]].concat();
        &self.unaligned.get_or_init(behind)[1..]
    }

    pub(super) fn view<'b>(&'b self, bytes: &'b [u8]) -> WeightView<'b> {
        let (inputs, outputs) = self.stored_size();
        let stored = view(self.quant, self.dtype, inputs, outputs, bytes);
        self.part.as_ref().map_or(stored, |part| part.view(stored))
    }

    /// Bytes that a whole matrix takes.
    pub(super) fn len(&self) -> usize {
        crate::quant::stored_bytes(self.quant, self.dtype, self.outputs, self.inputs).unwrap_or(0)
    }

    pub(super) fn name(&self) -> String {
        let part = self.part.as_ref().map_or_else(String::new, Slice::name);
        format!("{} {} {}x{}{part}", self.dtype, self.quant, self.outputs, self.inputs)
    }
}
