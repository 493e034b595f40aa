//! Views of weights where they lie (a mapped file, any alignment), and nothing that copies them.

use shared::dtype::DType;

use crate::ops::convert;

/// A matrix `[outputs, inputs]`, row-major, in its stored dtype; the bytes need no alignment.
#[derive(Clone, Copy, Debug)]
pub struct WeightView<'a> {
    dtype: DType,
    outputs: usize,
    inputs: usize,
    bytes: &'a [u8],
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
        let wanted = outputs
            .checked_mul(inputs)
            .and_then(|n| n.checked_mul(dtype.size_bytes()));
        if wanted == Some(bytes.len()) && !bytes.is_empty() {
            Ok(WeightView {
                dtype,
                outputs,
                inputs,
                bytes,
            })
        } else {
            Err(WrongSize {
                dtype,
                outputs,
                inputs,
                bytes: bytes.len(),
            })
        }
    }

    /// Stored dtype.
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

    /// All bytes, row-major.
    pub fn bytes(&self) -> &'a [u8] {
        self.bytes
    }

    /// Bytes of one row.
    pub fn row_bytes(&self) -> usize {
        self.inputs * self.dtype.size_bytes()
    }

    /// Bytes of row `index`, or `None` when there is no such row (the client looks token ids up with this).
    pub fn row(&self, index: usize) -> Option<&'a [u8]> {
        let start = index.checked_mul(self.row_bytes())?;
        self.bytes.get(start..start.checked_add(self.row_bytes())?)
    }

    /// Row `index` as f32 into `out` (`[inputs]`); false when there is no such row or `out` has another length.
    pub fn row_to_f32(&self, index: usize, out: &mut [f32]) -> bool {
        match self.row(index) {
            Some(row) if out.len() == self.inputs => {
                convert::to_f32(self.dtype, row, out);
                true
            }
            _ => false,
        }
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
        let bytes: Vec<u8> = [1.0f32, 2.0, 3.0, 4.0]
            .iter()
            .flat_map(|v| v.to_le_bytes())
            .collect();
        let view = WeightView::new(DType::F32, 2, 2, &bytes).unwrap();
        let mut out = [0.0; 2];
        assert!(view.row_to_f32(1, &mut out));
        assert_eq!(out, [3.0, 4.0]);
        assert!(!view.row_to_f32(2, &mut out));
        assert!(!view.row_to_f32(usize::MAX, &mut out));
    }
}
