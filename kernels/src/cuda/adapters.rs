//! The adapters of a matrix as launches read them: a table in device memory that rows name by
//! number.

use shared::config::QuantType;
use shared::dtype::DType;

use super::matrix::MatrixParts;
use super::step::NO_ADAPTER;
use super::{Address, Cuda, Gpu, Matrix, PooledMemory};
use crate::ops::lora::{Adapter, AdapterSizes, sizes_of};
use crate::ops::{MatrixShape, OpError};

/// Most rank of an adapter: what shared memory holds of 8 rows.
const MAX_RANK: usize = 1024;

/// Adapters that one launch adds, each to its own rows.
#[derive(Debug)]
pub struct Adapters<G: Gpu> {
    /// Kept as long as the table names them.
    all: Vec<Option<Adapter<Matrix<G>>>>,
    sizes: AdapterSizes,
    /// `struct Adapter [adapters]` of `lora.cu`.
    table: PooledMemory<G>,
}

impl<G: Gpu> Adapters<G> {
    pub fn sizes(&self) -> AdapterSizes {
        self.sizes
    }

    /// How many there are, those that leave the matrix alone counted.
    pub fn count(&self) -> usize {
        self.all.len()
    }

    /// Where they are listed.
    pub(super) fn table(&self) -> &PooledMemory<G> {
        &self.table
    }
}

impl<G: Gpu> Cuda<G> {
    /// Lists the adapters of a matrix.
    ///
    /// # Errors
    /// When they do not go together, are quantized or of a rank above 1,024, or the device has no
    /// memory for the list.
    pub fn adapters(
        &mut self,
        all: Vec<Option<Adapter<Matrix<G>>>>,
    ) -> Result<Adapters<G>, OpError> {
        let op = "adapters";
        let sizes = sizes_of(&all)?;
        if sizes.rank > MAX_RANK {
            let what = "an adapter of a rank above 1,024";
            return Err(OpError::Shape { op, what });
        }
        let mut bytes = Vec::new();
        for adapter in &all {
            let entry = adapter.as_ref().map_or(Ok([0; 32]), entry_of)?;
            bytes.extend(entry);
        }
        let mut table = self.reserve(bytes.len())?;
        self.upload_bytes(&bytes, &mut table, 0)?;
        Ok(Adapters { all, sizes, table })
    }
}

/// Which adapter each row of a step goes through, in device memory.
#[derive(Clone, Copy, Debug)]
pub(super) struct OfRows {
    /// `uint32_t [rows]`.
    pub(super) numbers: Address,
    /// Where the number of rows lies, if the host does not know it; else null.
    pub(super) there: Address,
}

impl<G: Gpu> Cuda<G> {
    /// The adapters of rows on the device; of a recorded step those that lie in its fixed memory.
    /// The same are copied once, however many operations name them.
    ///
    /// # Errors
    /// When the device has no memory for them, or fails.
    pub(super) fn adapters_of(&mut self, of_rows: &[Option<u32>]) -> Result<OfRows, OpError> {
        if let Some(fixed) = self.fixed() {
            return Ok(OfRows { numbers: fixed.adapters(), there: fixed.tokens() });
        }
        let number = |adapter: &Option<u32>| adapter.unwrap_or(NO_ADAPTER);
        let words = of_rows.iter().map(number);
        let numbers = match &self.of_rows {
            Some((kept, memory)) if words.clone().eq(kept.iter().copied()) => memory.address(),
            _ => {
                let words: Vec<u32> = words.collect();
                let memory = self.words(&words)?;
                let address = memory.address();
                self.of_rows = Some((words, memory));
                address
            }
        };
        let there = Address(0);
        Ok(OfRows { numbers, there })
    }
}

/// The words of `struct Adapter` in `lora.cu`.
fn entry_of<G: Gpu>(adapter: &Adapter<Matrix<G>>) -> Result<[u8; 32], OpError> {
    let plain = |matrix: &Matrix<G>| match (matrix.quant(), matrix.parts()) {
        (QuantType::None, MatrixParts::Plain { values }) => Ok(values.0),
        _ => {
            Err(OpError::Shape { op: "adapters", what: "the matrices of an adapter are quantized" })
        }
    };
    let rank = u32::try_from(adapter.a.outputs()).unwrap_or(u32::MAX);
    let words =
        [rank.to_le_bytes(), code(adapter.a.dtype()).to_le_bytes(), adapter.scale.to_le_bytes()];
    let mut entry = [0; 32];
    entry[..8].copy_from_slice(&plain(&adapter.a)?.to_le_bytes());
    entry[8..16].copy_from_slice(&plain(&adapter.b)?.to_le_bytes());
    entry[16..28].copy_from_slice(words.as_flattened());
    Ok(entry)
}

/// How `lora.cu` numbers dtypes.
pub(super) fn code(dtype: DType) -> u32 {
    match dtype {
        DType::F32 => 0,
        DType::Bf16 => 1,
        DType::F16 => 2,
    }
}
