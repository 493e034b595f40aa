//! The arena as a device reaches it: its first part is registered, so that hidden states are copied
//! by the device itself, without a stop in pinned memory on the way.

use std::sync::Arc;

use shared::dtype::DType;
use shared::shm::arena::ArenaMap;
use shared::shm::segment::OutOfBounds;

use super::address::{Address, Floats};
use super::gpu::{Gpu, GpuError};
use super::memory::Memory;
use super::ops::convert;
use super::{Cuda, OpError, check_len};

/// Most bytes that are registered: they are pinned, so they take memory whether they are used or
/// not. Slots of decode steps lie at the start.
const MAX_BYTES: u64 = 64 << 20;

/// The part of an arena that the device reaches; the arena stays mapped as long as this lives.
#[derive(Debug)]
pub struct MappedArena<G: Gpu> {
    gpu: Arc<G>,
    map: Arc<ArenaMap>,
    /// Nothing is registered where the host does not allow it.
    start: Option<Address>,
    bytes: u64,
}

/// Why a tensor was not moved.
#[derive(Debug, thiserror::Error)]
pub enum MoveError {
    /// It is not in the arena.
    #[error(transparent)]
    Outside(#[from] OutOfBounds),
    /// The device failed, or the buffer is too short.
    #[error(transparent)]
    Op(#[from] OpError),
}

impl<G: Gpu> MappedArena<G> {
    /// Registers the beginning of `arena`; where that fails, all goes through pinned memory.
    pub fn new(cuda: &Cuda<G>, arena: &Arc<ArenaMap>) -> (MappedArena<G>, Option<GpuError>) {
        let bytes = arena.len().min(MAX_BYTES);
        let len = usize::try_from(bytes).unwrap_or(0);
        let gpu = Arc::clone(&cuda.gpu);
        let registered = match arena.pointer(0, len) {
            // SAFETY: the mapping lives in `arena`, which is kept as long as it is registered, and
            // nobody has references into an arena.
            Ok(start) => unsafe { gpu.register(start, len) }.map(Some),
            Err(_) => Ok(None),
        };
        let (start, failure) = match registered {
            Ok(start) => (start, None),
            Err(failure) => (None, Some(failure)),
        };
        let map = Arc::clone(arena);
        (MappedArena { gpu, map, start, bytes }, failure)
    }

    /// The address of the `len` bytes at `offset`, if the device reaches them.
    fn address_of(&self, offset: u64, len: usize) -> Option<Address> {
        let end = offset.checked_add(len as u64)?;
        let start = self.start.filter(|_| end <= self.bytes)?;
        Some(start.offset(usize::try_from(offset).ok()?))
    }
}

impl<G: Gpu> Drop for MappedArena<G> {
    fn drop(&mut self) {
        // A device that does not answer any more does not read any more.
        let _ = self.gpu.wait();
        if let Some(start) = self.start {
            // SAFETY: registered by `new`; nothing is enqueued.
            unsafe { self.gpu.unregister(start) };
        }
    }
}

impl<G: Gpu> Cuda<G> {
    /// Enqueues the way of `len` values from `offset` in the arena, stored in `dtype`, to the start
    /// of `to`.
    ///
    /// # Errors
    /// [`MoveError`].
    pub fn load(
        &mut self,
        arena: &MappedArena<G>,
        offset: u64,
        len: usize,
        dtype: DType,
        to: &mut Floats,
    ) -> Result<(), MoveError> {
        check_len("load", "to", to.len(), 1, len)?;
        let bytes = len * dtype.size_bytes();
        match arena.address_of(offset, bytes) {
            Some(from) => Ok(self.widen_from(dtype, len, to, |cuda, at| {
                // SAFETY: `widen_from` names memory of so many bytes, and `address_of` registered ones.
                let copied = unsafe { cuda.gpu.copy(from, at, bytes) };
                cuda.noted(copied)
            })?),
            None => {
                let mut values = vec![0u8; bytes];
                arena.map.read(offset, &mut values)?;
                Ok(self.widen(&values, dtype, to)?)
            }
        }
    }

    /// Enqueues the way of the first `len` values of `from` to `offset` in the arena, in `dtype`.
    /// They are there after the next [`wait`](Self::wait).
    ///
    /// # Errors
    /// [`MoveError`].
    pub fn store(
        &mut self,
        from: &Floats,
        len: usize,
        dtype: DType,
        arena: &MappedArena<G>,
        offset: u64,
    ) -> Result<(), MoveError> {
        check_len("store", "from", from.len(), 1, len)?;
        let bytes = len * dtype.size_bytes();
        match arena.address_of(offset, bytes) {
            Some(to) => Ok(self.narrow_to(from, len, dtype, |cuda, at| {
                // SAFETY: as in `load`.
                let copied = unsafe { cuda.gpu.copy(at, to, bytes) };
                cuda.noted(copied)
            })?),
            None => {
                let mut values = vec![0u8; bytes];
                self.narrow(from, dtype, &mut values)?;
                Ok(arena.map.write(offset, &values)?)
            }
        }
    }

    /// Copies values of the host, stored in `dtype`, to the start of `to`.
    ///
    /// # Errors
    /// When `to` is shorter, or the device fails.
    pub fn widen(&mut self, from: &[u8], dtype: DType, to: &mut Floats) -> Result<(), OpError> {
        let len = from.len() / dtype.size_bytes();
        check_len("widen", "to", to.len(), 1, len)?;
        self.widen_from(dtype, len, to, |cuda, at| {
            // SAFETY: memory of so many bytes.
            let written = unsafe { cuda.gpu.write(from, at) };
            cuda.noted(written)
        })
    }

    /// Copies the first values of `from` to the host in `dtype`, as many as `to` has room for,
    /// after all operations before it.
    ///
    /// # Errors
    /// When `from` is shorter, or the device fails.
    pub fn narrow(&mut self, from: &Floats, dtype: DType, to: &mut [u8]) -> Result<(), OpError> {
        let len = to.len() / dtype.size_bytes();
        check_len("narrow", "from", from.len(), 1, len)?;
        self.narrow_to(from, len, dtype, |cuda, at| {
            // SAFETY: memory of so many bytes.
            let read = unsafe { cuda.gpu.read(at, to) };
            cuda.noted(read)
        })
    }

    /// Copies the first `len` values of `from` to byte `at` of `to`, in `dtype`.
    ///
    /// # Errors
    /// When one of them is shorter, or the device fails.
    pub fn narrow_into(
        &mut self,
        from: &Floats,
        len: usize,
        dtype: DType,
        to: &mut Memory<G>,
        at: usize,
    ) -> Result<(), OpError> {
        let bytes = len * dtype.size_bytes();
        check_len("narrow", "from", from.len(), 1, len)?;
        check_len("narrow", "to", to.bytes(), 1, at.saturating_add(bytes))?;
        let to = to.address().offset(at);
        self.narrow_to(from, len, dtype, |cuda, from| {
            // SAFETY: both hold so many bytes, and are not the same memory.
            let copied = unsafe { cuda.gpu.copy(from, to, bytes) };
            cuda.noted(copied)
        })
    }

    /// Copies `len` values, stored in `dtype` from byte `at` of `from` on, to the start of `to`.
    ///
    /// # Errors
    /// When one of them is shorter, or the device fails.
    pub fn widen_out_of(
        &mut self,
        from: &Memory<G>,
        at: usize,
        len: usize,
        dtype: DType,
        to: &mut Floats,
    ) -> Result<(), OpError> {
        let bytes = len * dtype.size_bytes();
        check_len("widen", "from", from.bytes(), 1, at.saturating_add(bytes))?;
        check_len("widen", "to", to.len(), 1, len)?;
        let from = from.address().offset(at);
        self.widen_from(dtype, len, to, |cuda, to| {
            // SAFETY: both hold so many bytes, and are not the same memory.
            let copied = unsafe { cuda.gpu.copy(from, to, bytes) };
            cuda.noted(copied)
        })
    }

    /// Sets values to zero.
    ///
    /// # Errors
    /// When the device fails.
    pub fn zero(&mut self, values: &mut Floats) -> Result<(), OpError> {
        self.health()?;
        if values.is_empty() {
            return Ok(());
        }
        // SAFETY: a live buffer of so many values, all of whose bytes are 0 at zero.
        let done = unsafe { self.gpu.fill(values.address(), 0, 4 * values.len()) };
        self.noted(done)
    }

    /// `fill` puts the stored values where it is told.
    fn widen_from(
        &mut self,
        dtype: DType,
        len: usize,
        to: &mut Floats,
        fill: impl FnOnce(&mut Cuda<G>, Address) -> Result<(), OpError>,
    ) -> Result<(), OpError> {
        self.health()?;
        let kernel = match dtype {
            DType::F32 => return fill(self, to.address()),
            DType::Bf16 => "convert_bf16_f32",
            DType::F16 => "convert_f16_f32",
        };
        let stored = self.scratch(len * dtype.size_bytes())?;
        fill(self, stored.address())?;
        convert::launch(self, kernel, stored.address(), to.address(), len)
    }

    /// `take` takes the stored values from where it is told.
    fn narrow_to(
        &mut self,
        from: &Floats,
        len: usize,
        dtype: DType,
        take: impl FnOnce(&mut Cuda<G>, Address) -> Result<(), OpError>,
    ) -> Result<(), OpError> {
        self.health()?;
        let kernel = match dtype {
            DType::F32 => return take(self, from.address()),
            DType::Bf16 => "convert_f32_bf16",
            DType::F16 => "convert_f32_f16",
        };
        let stored = self.scratch(len * dtype.size_bytes())?;
        convert::launch(self, kernel, from.address(), stored.address(), len)?;
        take(self, stored.address())
    }
}
