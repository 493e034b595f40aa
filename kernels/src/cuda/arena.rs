//! The arena as a device reaches it: its first part is registered, so that hidden states are copied
//! by the device itself, without a stop in pinned memory on the way.

use std::ops::Range;
use std::sync::Arc;

use shared::dtype::DType;
use shared::shm::arena::ArenaMap;
use shared::shm::segment::OutOfBounds;

use super::address::{Address, Floats};
use super::gpu::{Gpu, GpuError};
use super::host_memory::HostMemory;
use super::memory::PooledMemory;
use super::ops::convert;
use super::{Cuda, OpError, check_len};

/// Most bytes that are registered: they are pinned, so they take memory whether they are used or
/// not. Slots of decode steps lie at the start.
const MAX_BYTES: u64 = 64 << 20;

/// The part of an arena that the device reaches; the arena stays mapped as long as this lives.
#[derive(Debug)]
pub struct MappedArena<G: Gpu> {
    // Dropped before the mapping.
    registered: HostMemory<G>,
    map: Arc<ArenaMap>,
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
    /// Registers the beginning of `arena`; what the host does not allow goes through pinned memory.
    /// The error says why, if that is anything of the beginning.
    pub fn new(cuda: &Cuda<G>, arena: &Arc<ArenaMap>) -> (MappedArena<G>, Option<GpuError>) {
        let len = usize::try_from(arena.len().min(MAX_BYTES)).unwrap_or(0);
        let (start, len) = match arena.pointer(0, len) {
            Ok(start) => (start, len),
            Err(_) => (std::ptr::null_mut(), 0),
        };
        // SAFETY: the mapping lives in `arena`, which is kept as long as it is registered, and
        // nobody has references into an arena.
        let registered = unsafe { HostMemory::new(&cuda.gpu, start, len) };
        let failure = registered.failure().cloned();
        (MappedArena { registered, map: Arc::clone(arena) }, failure)
    }

    /// Addresses of the `len` bytes at `offset`, if the device reaches them.
    fn pieces(
        &self,
        offset: u64,
        len: usize,
    ) -> Option<impl Iterator<Item = (Address, Range<usize>)>> {
        let start = usize::try_from(offset).ok()?;
        self.registered.pieces(start..start.checked_add(len)?)
    }
}

impl<G: Gpu> Cuda<G> {
    /// Enqueues the way of `len` values from `offset` in the arena, stored in `dtype`, to the start
    /// of `to`.
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
        match arena.pieces(offset, bytes) {
            Some(mut pieces) => Ok(self.widen_from(dtype, len, to, |cuda, to| {
                pieces.try_for_each(|(from, at)| {
                    // SAFETY: `widen_from` names memory of all the bytes, and a piece registered
                    // ones.
                    let copied = unsafe { cuda.gpu.copy(from, to.offset(at.start), at.len()) };
                    cuda.noted(copied)
                })
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
        match arena.pieces(offset, bytes) {
            Some(mut pieces) => Ok(self.narrow_to(from, len, dtype, |cuda, from| {
                pieces.try_for_each(|(to, at)| {
                    // SAFETY: as in `load`.
                    let copied = unsafe { cuda.gpu.copy(from.offset(at.start), to, at.len()) };
                    cuda.noted(copied)
                })
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
        to: &mut PooledMemory<G>,
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
        from: &PooledMemory<G>,
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
