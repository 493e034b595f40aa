//! Views of weights where they lie (a mapped file, any alignment), and nothing that copies them.

use std::ops::Range;

use shared::config::QuantType;
use shared::dtype::DType;

use crate::quant::{int8, nf4};

/// A matrix `[outputs, inputs]`, row-major, as stored: numbers of its dtype, or quantized and
/// computed with in its dtype. The bytes need no alignment.
#[derive(Clone, Copy, Debug)]
pub struct WeightView<'a> {
    dtype: DType,
    outputs: usize,
    inputs: usize,
    bytes: &'a [u8],
    format: Format<'a>,
    parts: WeightParts,
}

/// Where the parts of a quantized matrix lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum WeightParts {
    /// As those of a whole matrix.
    Whole,
    /// Apart: of rows of a larger matrix.
    Apart,
    /// As in a copied slice.
    Copied,
}

/// How a matrix is stored.
#[derive(Clone, Copy, Debug)]
pub enum Format<'a> {
    /// Numbers of the view's dtype.
    Plain,
    /// INT8 with a scale per row.
    Int8(int8::Int8Parts<'a>),
    Nf4(nf4::Nf4Parts<'a>),
}

/// The bytes of a tensor do not fit its shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("tensor [{outputs}, {inputs}] of {dtype} has {bytes} bytes")]
pub struct WrongSize {
    dtype: DType,
    outputs: usize,
    inputs: usize,
    bytes: usize,
}

impl<'a> WeightView<'a> {
    /// A view of `bytes` as `[outputs, inputs]` elements of `dtype`, little-endian.
    ///
    /// # Errors
    /// When a side is zero or the number of bytes is not exactly that of the shape.
    pub fn new(
        dtype: DType,
        outputs: usize,
        inputs: usize,
        bytes: &'a [u8],
    ) -> Result<Self, WrongSize> {
        let wanted = outputs.checked_mul(inputs).and_then(|n| n.checked_mul(dtype.size_bytes()));
        if wanted == Some(bytes.len()) && !bytes.is_empty() {
            let (format, parts) = (Format::Plain, WeightParts::Whole);
            Ok(WeightView { dtype, outputs, inputs, bytes, format, parts })
        } else {
            Err(WrongSize { dtype, outputs, inputs, bytes: bytes.len() })
        }
    }

    /// A view of a matrix stored as `quant` says (see [`crate::quant`]), to be computed with in
    /// `dtype`.
    ///
    /// # Errors
    /// When a side is zero or the number of bytes is not exactly that of the shape.
    pub fn quantized(
        quant: QuantType,
        dtype: DType,
        outputs: usize,
        inputs: usize,
        bytes: &'a [u8],
    ) -> Result<Self, WrongSize> {
        let format = match quant {
            QuantType::None => return WeightView::new(dtype, outputs, inputs, bytes),
            QuantType::Int8 => int8::Int8Parts::new(outputs, inputs, bytes).map(Format::Int8),
            QuantType::Nf4 => nf4::Nf4Parts::new(outputs, inputs, bytes).map(Format::Nf4),
        };
        let format = format.filter(|_| outputs > 0 && inputs > 0);
        let parts = WeightParts::Whole;
        let view = |format| WeightView { dtype, outputs, inputs, bytes, format, parts };
        format.map(view).ok_or(WrongSize { dtype, outputs, inputs, bytes: bytes.len() })
    }

    /// A copied slice of an NF4 matrix; the parts have the rows and columns of `shape`.
    pub(crate) fn copied(
        dtype: DType,
        [outputs, inputs]: [usize; 2],
        bytes: &'a [u8],
        parts: nf4::Nf4Parts<'a>,
    ) -> WeightView<'a> {
        let format = Format::Nf4(parts);
        WeightView { dtype, outputs, inputs, bytes, format, parts: WeightParts::Copied }
    }

    /// Some rows of the matrix where they lie: their values are those of the whole. `None` when they
    /// are not all there, there are none, or this is a slice itself.
    pub fn rows(&self, range: Range<usize>) -> Option<WeightView<'a>> {
        let (outputs, inputs) = (range.len(), self.inputs);
        if range.is_empty() || range.end > self.outputs || self.is_slice() {
            return None;
        }
        if outputs == self.outputs {
            return Some(*self);
        }
        let (bytes, format) = match self.format {
            Format::Plain => {
                let row = self.row_bytes();
                let bytes = self.bytes.get(range.start * row..range.end * row)?;
                return WeightView::new(self.dtype, outputs, inputs, bytes).ok();
            }
            Format::Int8(parts) => {
                let parts = parts.rows(range, inputs)?;
                (parts.codes, Format::Int8(parts))
            }
            Format::Nf4(parts) => {
                let parts = parts.rows(range)?;
                (parts.codes, Format::Nf4(parts))
            }
        };
        Some(WeightView { outputs, bytes, format, parts: WeightParts::Apart, ..*self })
    }

    /// Whether it is a slice of a quantized matrix, whose parts lie in their own way: see
    /// [`format`](Self::format).
    pub fn is_slice(&self) -> bool {
        self.parts != WeightParts::Whole
    }

    /// Whether its parts lie apart, between those of other rows: [`bytes`](Self::bytes) are not all
    /// of it.
    pub(crate) fn lies_apart(&self) -> bool {
        self.parts == WeightParts::Apart
    }

    /// How it is stored.
    pub fn format(&self) -> Format<'a> {
        self.format
    }

    /// Stored dtype; that of the arithmetic when the matrix is quantized.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Rows of the matrix: features that come out.
    pub fn outputs(&self) -> usize {
        self.outputs
    }

    /// Columns of the matrix: features that go in.
    pub fn inputs(&self) -> usize {
        self.inputs
    }

    /// All bytes: row-major numbers, or the parts of a quantized matrix; of rows of a larger
    /// quantized matrix the codes alone.
    pub fn bytes(&self) -> &'a [u8] {
        self.bytes
    }

    /// Bytes of one row; of its codes when the matrix is quantized.
    pub fn row_bytes(&self) -> usize {
        match self.format {
            Format::Plain => self.inputs * self.dtype.size_bytes(),
            Format::Int8(_) => self.inputs,
            Format::Nf4(_) => self.inputs.div_ceil(2),
        }
    }

    /// Bytes of row `index`, or `None` when there is no such row or the matrix is quantized (the
    /// client looks token ids up with this).
    pub fn row(&self, index: usize) -> Option<&'a [u8]> {
        if !matches!(self.format, Format::Plain) {
            return None;
        }
        let start = index.checked_mul(self.row_bytes())?;
        self.bytes.get(start..start.checked_add(self.row_bytes())?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_view_refuses_bytes_that_do_not_fit_its_shape() {
        assert!(WeightView::new(DType::F32, 2, 3, &[0; 24]).is_ok());
        assert!(WeightView::new(DType::F32, 2, 3, &[0; 23]).is_err());
        assert!(WeightView::new(DType::Bf16, 0, 3, &[]).is_err());
        assert!(WeightView::new(DType::Bf16, usize::MAX, 3, &[0; 6]).is_err());
    }

    #[test]
    fn rows_are_found_by_index_and_never_past_the_end() {
        let bytes: Vec<u8> = [1.0f32, 2.0, 3.0, 4.0].iter().flat_map(|v| v.to_le_bytes()).collect();
        let view = WeightView::new(DType::F32, 2, 2, &bytes).unwrap();
        let mut out = [0.0; 2];
        assert!(view.row_to_f32(1, &mut out));
        assert_eq!(out, [3.0, 4.0]);
        assert!(!view.row_to_f32(2, &mut out));
        assert!(!view.row_to_f32(usize::MAX, &mut out));
    }
}
