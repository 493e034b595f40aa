//! Device memory that other processes map: the device's own, exported as a descriptor, or that of
//! another process.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

use super::address::Address;
use super::gpu::{Gpu, GpuError};

/// Memory that several devices reach, mapped here until dropped.
#[derive(Debug)]
pub(crate) struct SharedMemory<G: Gpu> {
    gpu: Arc<G>,
    address: Address,
    bytes: usize,
}

impl<G: Gpu> SharedMemory<G> {
    /// New memory of this device, and a descriptor for others; `None` where the driver has no such
    /// memory.
    pub(super) fn new(
        gpu: &Arc<G>,
        bytes: usize,
    ) -> Result<Option<(SharedMemory<G>, OwnedFd)>, GpuError> {
        let shared = gpu.share(bytes)?;
        Ok(shared.map(|(address, fd)| {
            let gpu = Arc::clone(gpu);
            (SharedMemory { gpu, address, bytes }, fd)
        }))
    }

    /// Memory of as many bytes that another process exported.
    pub(super) fn open(
        gpu: &Arc<G>,
        memory: BorrowedFd<'_>,
        bytes: usize,
    ) -> Result<SharedMemory<G>, GpuError> {
        let address = gpu.map_shared(memory, bytes)?;
        Ok(SharedMemory { gpu: Arc::clone(gpu), address, bytes })
    }

    pub(super) fn address(&self) -> Address {
        self.address
    }
}

impl<G: Gpu> Drop for SharedMemory<G> {
    fn drop(&mut self) {
        // SAFETY: mapped by `share` or `map_shared` with as many bytes. Work that uses it is done:
        // who holds this waits for the device before.
        unsafe { self.gpu.unmap_shared(self.address, self.bytes) };
    }
}
