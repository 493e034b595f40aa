//! Weight matrices in device memory, in the bytes in which they are stored (see [`crate::quant`]).

use std::sync::Arc;

use shared::config::QuantType;
use shared::dtype::DType;

use super::address::Address;
use super::gpu::Gpu;
use super::memory::Memory;
use crate::ops::MatrixShape;
use crate::tensor::{Format, WeightView};

/// A matrix `[outputs, inputs]` on the device; cheap to clone.
#[derive(Debug)]
pub struct Matrix<G: Gpu>(Arc<Stored<G>>);

#[derive(Debug)]
struct Stored<G: Gpu> {
    dtype: DType,
    outputs: usize,
    inputs: usize,
    parts: Parts,
    memory: Memory<G>,
}

/// Where the parts of a matrix lie, by format. Every part begins at a multiple of 64 bytes, the
/// first at one of 256.
#[derive(Clone, Copy, Debug)]
pub enum Parts {
    /// Numbers of the matrix's dtype, row-major.
    Plain {
        /// `[outputs, inputs]`.
        values: Address,
    },
    /// INT8 with a scale per row.
    Int8 {
        /// `int8_t [outputs, inputs]`.
        codes: Address,
        /// `float [outputs]`; a weight is `code * absmax / 127`.
        absmax: Address,
    },
    /// NF4 with scales quantized in turn.
    Nf4 {
        /// Two weights a byte, the first in the upper half.
        codes: Address,
        /// `uint8_t`, one per 64 weights.
        absmax: Address,
        /// `float`, one per 256 groups.
        absmax2: Address,
        /// Added to every scale.
        offset: f32,
    },
}

impl<G: Gpu> Matrix<G> {
    /// `view`, whose bytes were copied to `memory`.
    pub(super) fn new(view: &WeightView<'_>, memory: Memory<G>) -> Matrix<G> {
        let start = memory.address();
        let at = |part: &[u8]| start.offset(part.as_ptr().addr() - view.bytes().as_ptr().addr());
        let parts = match view.format() {
            Format::Plain => Parts::Plain { values: start },
            Format::Int8(parts) => Parts::Int8 { codes: at(parts.codes), absmax: at(parts.absmax) },
            Format::Nf4(parts) => Parts::Nf4 {
                codes: at(parts.codes),
                absmax: at(parts.absmax),
                absmax2: at(parts.absmax2),
                offset: parts.offset,
            },
        };
        Matrix(Arc::new(Stored {
            dtype: view.dtype(),
            outputs: view.outputs(),
            inputs: view.inputs(),
            parts,
            memory,
        }))
    }

    /// How it is stored.
    pub fn quant(&self) -> QuantType {
        match self.0.parts {
            Parts::Plain { .. } => QuantType::None,
            Parts::Int8 { .. } => QuantType::Int8,
            Parts::Nf4 { .. } => QuantType::Nf4,
        }
    }

    /// Where its parts lie.
    pub fn parts(&self) -> Parts {
        self.0.parts
    }

    /// Bytes on the device.
    pub fn bytes(&self) -> usize {
        self.0.memory.bytes()
    }
}

impl<G: Gpu> Clone for Matrix<G> {
    fn clone(&self) -> Self {
        Matrix(Arc::clone(&self.0))
    }
}

impl<G: Gpu> MatrixShape for Matrix<G> {
    fn dtype(&self) -> DType {
        self.0.dtype
    }

    fn outputs(&self) -> usize {
        self.0.outputs
    }

    fn inputs(&self) -> usize {
        self.0.inputs
    }
}
