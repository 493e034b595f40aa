//! Weight matrices in device memory: in the bytes in which they are stored (see [`crate::quant`]),
//! slices in those of [`crate::quant::slice`], and NF4 for tensor cores in tiles (`nf4.cuh`).

use std::sync::Arc;

use shared::config::QuantType;
use shared::dtype::DType;

use super::address::Address;
use super::gpu::Gpu;
use super::memory::PooledMemory;
use crate::ops::MatrixShape;
use crate::tensor::{Format, WeightView};
use crate::tuning;

/// A matrix `[outputs, inputs]` on the device; cheap to clone.
#[derive(Debug)]
pub struct Matrix<G: Gpu>(Arc<StoredMatrix<G>>);

#[derive(Debug)]
struct StoredMatrix<G: Gpu> {
    dtype: DType,
    outputs: usize,
    inputs: usize,
    parts: MatrixParts,
    is_tiled: bool,
    memory: PooledMemory<G>,
}

/// Where the parts of a matrix lie, by format. Every part begins at a multiple of 64 bytes, the
/// first at one of 256.
#[derive(Clone, Copy, Debug)]
pub enum MatrixParts {
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
        /// Two weights a byte, the first in the upper half; the other parts follow. A tiled matrix has them
        /// in the order of `Nf4Tiles` in `nf4.cuh`.
        codes: Address,
        /// How rows and second scales lie: `nf4_matrix` and `nf4_tiles` in `nf4.cuh`.
        layout: u32,
    },
}

impl<G: Gpu> Matrix<G> {
    /// `view`, whose bytes were copied to `memory`, NF4 that [`is_tiled`] in tiles.
    pub(super) fn new(view: &WeightView<'_>, memory: PooledMemory<G>) -> Matrix<G> {
        let start = memory.address();
        let at = |part: &[u8]| start.offset(part.as_ptr().addr() - view.bytes().as_ptr().addr());
        let parts = match view.format() {
            Format::Plain => MatrixParts::Plain { values: start },
            Format::Int8(parts) => {
                MatrixParts::Int8 { codes: at(parts.codes), absmax: at(parts.absmax) }
            }
            Format::Nf4(parts) => MatrixParts::Nf4 { codes: start, layout: parts.layout() },
        };
        Matrix(Arc::new(StoredMatrix {
            dtype: view.dtype(),
            outputs: view.outputs(),
            inputs: view.inputs(),
            parts,
            is_tiled: is_tiled(view),
            memory,
        }))
    }

    /// How it is stored.
    pub fn quant(&self) -> QuantType {
        match self.0.parts {
            MatrixParts::Plain { .. } => QuantType::None,
            MatrixParts::Int8 { .. } => QuantType::Int8,
            MatrixParts::Nf4 { .. } => QuantType::Nf4,
        }
    }

    /// Where its parts lie.
    pub fn parts(&self) -> MatrixParts {
        self.0.parts
    }

    /// Where its bytes begin.
    pub(super) fn start(&self) -> Address {
        self.0.memory.address()
    }

    /// Of NF4, how its rows and second scales lie, as kernels take it.
    pub(super) fn layout(&self) -> usize {
        match self.0.parts {
            MatrixParts::Nf4 { layout, .. } => layout as usize,
            MatrixParts::Plain { .. } | MatrixParts::Int8 { .. } => 0,
        }
    }

    /// Whether the tensor-core kernels take it.
    pub(super) fn is_tiled(&self) -> bool {
        self.0.is_tiled
    }

    /// Bytes on the device.
    pub fn bytes(&self) -> usize {
        self.0.memory.bytes()
    }
}

/// Whether the tensor-core kernels take a matrix: 16-bit arithmetic, rows of whole blocks, and of NF4
/// rows that begin and end with a group.
pub(super) fn is_tiled(view: &WeightView<'_>) -> bool {
    let cuts_groups = matches!(view.format(), Format::Nf4(parts) if !parts.is_grouped());
    !cuts_groups && tuning::cuda_linear_is_tiled(view.dtype(), view.inputs())
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
