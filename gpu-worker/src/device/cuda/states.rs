//! Hidden states of a job: in device memory from its first block to its last, unless the job is so
//! large that a device would have to plan memory for it.

use std::ops::Range;

use kernels::DType;
use kernels::cuda::{Buffer, Cuda, Floats, Gpu};
use kernels::ops::OpError;
use model::sizing::RESIDENT_VALUES;
use shared::job::SlotRef;

use super::{CudaArena, NOT_THERE};
use crate::device::host::{read, write};
use crate::device::{HiddenStates, TransferError};

/// Where a part of the hidden states may begin for kernels to work on it in place: device memory is
/// read in pieces of so many bytes.
pub(super) const PART_BYTES: usize = 256;

/// Hidden states of one job.
#[derive(Debug)]
pub enum CudaStates<G: Gpu> {
    /// In device memory.
    Device(Buffer<G>),
    /// On the host: each unit copies its values to the device and back.
    Host(Vec<f32>),
}

/// Whether kernels can work on values that begin at `start` of a buffer.
pub(super) fn is_aligned(start: usize) -> bool {
    (4 * start).is_multiple_of(PART_BYTES)
}

impl<G: Gpu> HiddenStates<Cuda<G>> for CudaStates<G> {
    fn load(
        cuda: &mut Cuda<G>,
        arena: &mut CudaArena<G>,
        slot: SlotRef,
        dtype: DType,
    ) -> Result<CudaStates<G>, TransferError> {
        let values = usize::try_from(slot.len).unwrap_or(usize::MAX) / dtype.size_bytes();
        if values > RESIDENT_VALUES {
            return Ok(CudaStates::Host(read(&arena.map, dtype, slot)?));
        }
        let mut buffer = cuda.buffer(values);
        cuda.load(&arena.mapped, slot.offset, values, dtype, &mut buffer)?;
        Ok(CudaStates::Device(buffer))
    }

    fn store(
        &self,
        cuda: &mut Cuda<G>,
        arena: &mut CudaArena<G>,
        slot: SlotRef,
        dtype: DType,
    ) -> Result<(), TransferError> {
        match self {
            CudaStates::Device(all) => {
                let values = usize::try_from(slot.len).unwrap_or(usize::MAX) / dtype.size_bytes();
                Ok(cuda.store(all, values, dtype, &arena.mapped, slot.offset)?)
            }
            CudaStates::Host(all) => Ok(write(&arena.map, dtype, slot, all)?),
        }
    }

    fn gather(
        &self,
        cuda: &mut Cuda<G>,
        values: Range<usize>,
        to: &mut Floats,
    ) -> Result<(), OpError> {
        match self {
            CudaStates::Device(all) => {
                let len = values.len();
                cuda.copy(all.part(values).ok_or(NOT_THERE)?, to, len)
            }
            CudaStates::Host(all) => cuda.upload(all.get(values).ok_or(NOT_THERE)?, to),
        }
    }

    fn scatter(
        &mut self,
        cuda: &mut Cuda<G>,
        values: Range<usize>,
        from: &Floats,
    ) -> Result<(), OpError> {
        match self {
            CudaStates::Device(all) => {
                let len = values.len();
                cuda.copy(from, all.part_mut(values).ok_or(NOT_THERE)?, len)
            }
            CudaStates::Host(all) => cuda.download(from, all.get_mut(values).ok_or(NOT_THERE)?),
        }
    }

    fn work_on(
        &mut self,
        cuda: &mut Cuda<G>,
        values: Range<usize>,
        work: impl FnOnce(&mut Cuda<G>, &mut Floats) -> Result<(), OpError>,
    ) -> Result<(), OpError> {
        if let CudaStates::Device(all) = self
            && is_aligned(values.start)
        {
            return work(cuda, all.part_mut(values).ok_or(NOT_THERE)?);
        }
        // From the pool, where the rehearsal left one that is large enough.
        let mut staging = cuda.buffer(values.len());
        self.gather(cuda, values.clone(), &mut staging)?;
        work(cuda, &mut staging)?;
        self.scatter(cuda, values, &staging)
    }
}
