//! The experts of a block as launches read them: the addresses of all their matrices in device
//! memory.

use shared::config::QuantType;

use super::{Cuda, Gpu, Matrix, PooledMemory};
use crate::ops::OpError;
use crate::ops::experts::{Expert, ExpertSizes, sizes_of};

/// Most experts of a block.
pub(super) const MAX_EXPERTS: usize = 256;

/// Experts that one launch multiplies, each with its own rows.
#[derive(Debug)]
pub struct Experts<G: Gpu> {
    all: Vec<Expert<Matrix<G>>>,
    sizes: ExpertSizes,
    /// `uint64_t [experts, 3]`: where gate, up and down begin.
    table: PooledMemory<G>,
}

impl<G: Gpu> Experts<G> {
    pub fn sizes(&self) -> ExpertSizes {
        self.sizes
    }

    /// One that all others are like.
    pub(super) fn like(&self) -> Option<&Expert<Matrix<G>>> {
        self.all.first()
    }

    /// The addresses.
    pub(super) fn table(&self) -> &PooledMemory<G> {
        &self.table
    }
}

impl<G: Gpu> Cuda<G> {
    /// Puts experts together.
    ///
    /// # Errors
    /// When they are not of one shape, dtype and format, are too many, or the device has no memory
    /// for their addresses.
    pub fn experts(&mut self, all: Vec<Expert<Matrix<G>>>) -> Result<Experts<G>, OpError> {
        let sizes = sizes_of(&all)?;
        let wrong = |what| OpError::Shape { op: "experts", what };
        if all.len() > MAX_EXPERTS {
            return Err(wrong("more than 256 experts"));
        }
        let kinds = |expert: &Expert<Matrix<G>>| {
            [&expert.gate, &expert.up, &expert.down].map(|m| (m.quant(), m.layout(), m.is_tiled()))
        };
        let first = all.first().map(kinds);
        let is_one = |[gate, up, down]: [(QuantType, usize, bool); 3]| gate == up && up.0 == down.0;
        if !first.is_none_or(is_one) || !all.iter().all(|expert| Some(kinds(expert)) == first) {
            return Err(wrong("the matrices of the experts are stored or cut in different ways"));
        }
        let addresses: Vec<u8> = all
            .iter()
            .flat_map(|expert| [&expert.gate, &expert.up, &expert.down])
            .flat_map(|matrix| matrix.start().0.to_le_bytes())
            .collect();
        let mut table = self.reserve(addresses.len())?;
        self.upload_bytes(&addresses, &mut table, 0)?;
        Ok(Experts { all, sizes, table })
    }
}
