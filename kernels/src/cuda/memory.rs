//! Owned device memory. [`MemoryPool`] caches freed memory by size class, so that a step that is no
//! larger than earlier ones allocates nothing.
//!
//! Work on a device runs in one order. Memory may therefore be reused while work with it is still
//! enqueued: its next user is enqueued later.

use std::collections::BTreeMap;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use parking_lot::Mutex;

use super::address::{Address, Floats};
use super::gpu::{Gpu, GpuError};

/// Memory of a device that returns to its pool when dropped.
pub struct PooledMemory<G: Gpu> {
    pool: Arc<MemoryPool<G>>,
    address: Address,
    bytes: usize,
}

impl<G: Gpu> PooledMemory<G> {
    /// The address of the first byte; not 0.
    pub fn address(&self) -> Address {
        self.address
    }

    /// Length in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl<G: Gpu> Drop for PooledMemory<G> {
    fn drop(&mut self) {
        if self.bytes > 0 {
            self.pool.take_back(self.address, self.bytes);
        }
    }
}

impl<G: Gpu> std::fmt::Debug for PooledMemory<G> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} bytes at {:#x}", self.bytes, self.address.0)
    }
}

/// f32 values in device memory, owned.
#[derive(Debug)]
pub struct Buffer<G: Gpu> {
    memory: PooledMemory<G>,
    len: usize,
}

impl<G: Gpu> Buffer<G> {
    pub(super) fn new(memory: PooledMemory<G>) -> Buffer<G> {
        let len = memory.bytes / 4;
        Buffer { memory, len }
    }
}

impl<G: Gpu> Deref for Buffer<G> {
    type Target = Floats;

    fn deref(&self) -> &Floats {
        // SAFETY: a slice of elements without bytes is valid at every address that is not 0, and
        // `Memory` has one.
        unsafe { &*Floats::at(self.memory.address, self.len) }
    }
}

impl<G: Gpu> DerefMut for Buffer<G> {
    fn deref_mut(&mut self) -> &mut Floats {
        // SAFETY: as for `deref`.
        unsafe { &mut *Floats::at(self.memory.address, self.len) }
    }
}

/// Memory of a device, by size class.
#[derive(Debug)]
pub struct MemoryPool<G: Gpu> {
    gpu: Arc<G>,
    free: Mutex<BTreeMap<usize, Vec<Address>>>,
    taken: Mutex<Taken>,
    /// Whether sizes are exact and nothing is cached, for sanitizers that watch the ends of memory.
    is_exact: bool,
    keeps: Mutex<bool>,
}

/// Counts of what a pool has allocated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Taken {
    /// Allocations since start; a warm pool makes none.
    pub allocations: u64,
    /// Bytes allocated now, in use or cached.
    pub bytes: u64,
}

/// Requests below [`SMALL`] take cached memory of at most this size.
const LARGEST_FOR_SMALL: usize = 1 << 20;
const SMALL: usize = 256 << 10;

/// Address of empty memory.
const NOWHERE: Address = Address(256);

impl<G: Gpu> MemoryPool<G> {
    pub(super) fn new(gpu: Arc<G>, is_exact: bool) -> Arc<MemoryPool<G>> {
        Arc::new(MemoryPool {
            gpu,
            free: Mutex::default(),
            taken: Mutex::default(),
            is_exact,
            keeps: Mutex::default(),
        })
    }

    /// Whether sizes are exact and nothing is cached.
    pub(super) fn is_exact(&self) -> bool {
        self.is_exact
    }

    /// Memory of at least `bytes` bytes: from its size class, or else the smallest larger cached
    /// one. Small requests leave large memory to others.
    pub(super) fn take(
        self: &Arc<MemoryPool<G>>,
        bytes: usize,
    ) -> Result<PooledMemory<G>, GpuError> {
        if self.is_exact || bytes == 0 {
            return self.take_exactly(bytes);
        }
        let class = class(bytes);
        let most = match class {
            0..SMALL => LARGEST_FOR_SMALL,
            _ => usize::MAX,
        };
        let kept = self
            .free
            .lock()
            .range_mut(class..=most)
            .find_map(|(size, addresses)| Some((*size, addresses.pop()?)));
        match kept {
            Some((bytes, address)) => Ok(self.memory(address, bytes)),
            None => self.take_exactly(class),
        }
    }

    /// Counts of allocations.
    pub(super) fn taken(&self) -> Taken {
        *self.taken.lock()
    }

    fn memory(self: &Arc<MemoryPool<G>>, address: Address, bytes: usize) -> PooledMemory<G> {
        PooledMemory { pool: Arc::clone(self), address, bytes }
    }

    /// Memory of exactly `bytes` bytes, for long-lived data.
    pub(super) fn take_exactly(
        self: &Arc<MemoryPool<G>>,
        bytes: usize,
    ) -> Result<PooledMemory<G>, GpuError> {
        let memory = |address| self.memory(address, bytes);
        if bytes == 0 {
            return Ok(memory(NOWHERE));
        }
        let kept = self.free.lock().get_mut(&bytes).and_then(Vec::pop);
        match kept {
            Some(address) => Ok(memory(address)),
            None => self.allocate(bytes).map(memory),
        }
    }

    fn allocate(&self, bytes: usize) -> Result<Address, GpuError> {
        let address = self.gpu.allocate(bytes).or_else(|_| {
            self.trim()?;
            self.gpu.allocate(bytes)
        })?;
        let mut taken = self.taken.lock();
        taken.allocations += 1;
        taken.bytes += bytes as u64;
        Ok(address)
    }

    fn take_back(&self, address: Address, bytes: usize) {
        self.free.lock().entry(bytes).or_default().push(address);
        if self.is_exact {
            // A failure here shows again at the next trim.
            let _ = self.trim();
        }
    }

    /// Frees no memory until the end, because recorded launches name it.
    pub(super) fn keep_all(&self) {
        *self.keeps.lock() = true;
    }

    /// Frees all cached memory.
    pub(super) fn trim(&self) -> Result<(), GpuError> {
        let keeps = *self.keeps.lock();
        if keeps {
            return Ok(());
        }
        self.release()
    }

    fn release(&self) -> Result<(), GpuError> {
        self.gpu.wait()?;
        let kept = std::mem::take(&mut *self.free.lock());
        for (bytes, addresses) in kept {
            for address in addresses {
                // SAFETY: nobody owns what is in the pool, it was allocated with so many bytes, and
                // nothing is enqueued.
                unsafe { self.gpu.release(address, bytes) };
                let mut taken = self.taken.lock();
                taken.bytes = taken.bytes.saturating_sub(bytes as u64);
            }
        }
        Ok(())
    }
}

impl<G: Gpu> Drop for MemoryPool<G> {
    fn drop(&mut self) {
        // A device that does not answer keeps its memory until the process ends.
        let _ = self.release();
    }
}

/// The size that a request is rounded up to: quarters between powers of two, at least 256 bytes.
fn class(bytes: usize) -> usize {
    if bytes == 0 {
        return 0;
    }
    let step = (bytes.next_power_of_two() / 8).max(256);
    bytes.next_multiple_of(step)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_waste_at_most_a_quarter_and_hold_the_request() {
        assert_eq!(class(0), 0);
        assert_eq!(class(1), 256);
        for bytes in [255, 256, 257, 1000, 4097, 1 << 20, (1 << 20) + 1, 10_000_001] {
            let class = class(bytes);
            assert!(class >= bytes && class.is_multiple_of(256));
            assert!(bytes < 1024 || class <= bytes + bytes / 4 + 256, "{bytes}");
        }
    }
}
