//! What an engine needs of a device besides the operations of blocks: where KV pages live. On the CPU they are the kv segment; a CUDA
//! device has its own and keeps the segment as their mirror, from which the next worker takes them.

use kernels::cuda::{self, Cuda, Gpu};
use kernels::{Backend, Cpu, KvPages, PageLayout, StepRow};
use shared::job::PageCopy;
use shared::shm::kv::KvMap;

use crate::engine::EngineError;
use crate::kv::{KvPool, KvShape, WrongSegment};

/// A backend that keeps KV pages.
pub trait Paged: Backend + Sized {
    /// The pages of all blocks of the span.
    type Cache;
    /// Device memory for pages that are not of the cache.
    type Room: Default;

    /// Bytes of the device that are free; `None` when it has no memory of its own, or does not tell.
    fn free_bytes(&self) -> Option<u64>;

    /// Takes `bytes` bytes of the device for work, and keeps them for operations that need as much or less.
    ///
    /// # Errors
    /// [`EngineError`] when the device has no memory.
    fn warm(&mut self, bytes: usize) -> Result<(), EngineError>;

    /// The pages of a span; what the segment holds is what earlier workers left. Only a device that has memory of its own can do without
    /// the segment: then its pages end with the worker.
    ///
    /// # Errors
    /// [`EngineError`] when the segment is too small or not used, or the device has no memory.
    fn open_cache(
        &mut self,
        shape: KvShape,
        segment: Option<KvMap>,
    ) -> Result<Self::Cache, EngineError>;

    /// The pages of the block at `index` of the span, those of the prefixes of `rows` ready to be read.
    ///
    /// # Errors
    /// [`EngineError`] when there is no such block, or the device fails.
    fn cached<'c>(
        &mut self,
        cache: &'c mut Self::Cache,
        index: usize,
        rows: &[StepRow<'_>],
    ) -> Result<Self::Pages<'c>, EngineError>;

    /// Makes copies of pages in the block at `index`, in their order.
    ///
    /// # Errors
    /// [`EngineError`] when a copy names what is not there, or the device fails.
    fn copy_pages(
        &mut self,
        cache: &mut Self::Cache,
        index: usize,
        copies: &[PageCopy],
    ) -> Result<(), EngineError>;

    /// Pages that hold `bytes`, for one unit; [`give_back`](Self::give_back) ends it.
    ///
    /// # Errors
    /// [`EngineError`] when the device fails.
    fn lend<'p>(
        &mut self,
        room: &'p mut Self::Room,
        layout: PageLayout,
        bytes: &'p mut [u8],
    ) -> Result<Self::Pages<'p>, EngineError>;

    /// Takes what was written to pages that were lent back into `bytes`.
    ///
    /// # Errors
    /// [`EngineError`] when the device fails.
    fn give_back(&mut self, room: &mut Self::Room, bytes: &mut [u8]) -> Result<(), EngineError>;

    /// Pages of unspecified content over `bytes` bytes; what was written to them stays until the room is used otherwise.
    ///
    /// # Errors
    /// [`EngineError`] when the device has no memory.
    fn blank<'p>(
        &mut self,
        room: &'p mut Self::Room,
        layout: PageLayout,
        bytes: usize,
    ) -> Result<Self::Pages<'p>, EngineError>;
}

/// The kv segment, where it is mapped.
#[derive(Debug)]
pub struct HostCache {
    shape: KvShape,
    segment: KvMap,
}

impl HostCache {
    fn pool(&mut self) -> Result<KvPool<'_>, EngineError> {
        Ok(KvPool::new(self.shape, self.segment.values_mut())?)
    }
}

impl Paged for Cpu {
    type Cache = HostCache;
    type Room = Vec<u8>;

    fn free_bytes(&self) -> Option<u64> {
        None
    }

    fn warm(&mut self, _bytes: usize) -> Result<(), EngineError> {
        Ok(())
    }

    fn open_cache(
        &mut self,
        shape: KvShape,
        segment: Option<KvMap>,
    ) -> Result<HostCache, EngineError> {
        let segment = segment.ok_or_else(|| WrongSegment::none(shape))?;
        let mut cache = HostCache { shape, segment };
        cache.pool()?;
        Ok(cache)
    }

    fn cached<'c>(
        &mut self,
        cache: &'c mut HostCache,
        index: usize,
        _rows: &[StepRow<'_>],
    ) -> Result<KvPages<'c>, EngineError> {
        let (shape, bytes) = (cache.shape, cache.segment.values_mut());
        let unknown = EngineError::Unit(u32::try_from(index).unwrap_or(u32::MAX));
        KvPool::new(shape, bytes)?.into_block(index).ok_or(unknown)
    }

    fn copy_pages(
        &mut self,
        cache: &mut HostCache,
        index: usize,
        copies: &[PageCopy],
    ) -> Result<(), EngineError> {
        Ok(cache.pool()?.copy(index, copies)?)
    }

    fn lend<'p>(
        &mut self,
        _room: &'p mut Vec<u8>,
        layout: PageLayout,
        bytes: &'p mut [u8],
    ) -> Result<KvPages<'p>, EngineError> {
        Ok(KvPages::new(layout, bytes))
    }

    fn give_back(&mut self, _room: &mut Vec<u8>, _bytes: &mut [u8]) -> Result<(), EngineError> {
        Ok(())
    }

    fn blank<'p>(
        &mut self,
        room: &'p mut Vec<u8>,
        layout: PageLayout,
        bytes: usize,
    ) -> Result<KvPages<'p>, EngineError> {
        room.resize(bytes, 0);
        Ok(KvPages::new(layout, room))
    }
}

/// Pieces for what the host tells kernels (rows, page tables, indexes), more than are alive at once, and their size: larger than any.
const SMALL_PIECES: usize = 8;
const SMALL_PIECE_BYTES: usize = 64 << 10;

impl<G: Gpu> Paged for Cuda<G> {
    type Cache = cuda::Cache<G>;
    type Room = Option<cuda::Memory<G>>;

    fn free_bytes(&self) -> Option<u64> {
        let (free, _) = self.gpu().memory().ok()?;
        Some(free as u64)
    }

    fn warm(&mut self, bytes: usize) -> Result<(), EngineError> {
        // All at once, and given back when all are there.
        let mut taken = vec![self.scratch(bytes)?];
        for _ in 0..SMALL_PIECES {
            taken.push(self.scratch(SMALL_PIECE_BYTES)?);
        }
        Ok(())
    }

    fn open_cache(
        &mut self,
        shape: KvShape,
        segment: Option<KvMap>,
    ) -> Result<cuda::Cache<G>, EngineError> {
        let KvShape {
            layout,
            blocks,
            pages,
        } = shape;
        Ok(cuda::Cache::open(self, layout, blocks, pages, segment)?)
    }

    fn cached<'c>(
        &mut self,
        cache: &'c mut cuda::Cache<G>,
        index: usize,
        rows: &[StepRow<'_>],
    ) -> Result<cuda::Pages<'c>, EngineError> {
        Ok(cache.block(self, index, rows)?)
    }

    fn copy_pages(
        &mut self,
        cache: &mut cuda::Cache<G>,
        index: usize,
        copies: &[PageCopy],
    ) -> Result<(), EngineError> {
        let copies: Vec<_> = copies
            .iter()
            .map(|copy| (copy.source, copy.destination, copy.tokens as usize))
            .collect();
        Ok(cache.copy(self, index, &copies)?)
    }

    fn lend<'p>(
        &mut self,
        room: &'p mut Option<cuda::Memory<G>>,
        layout: PageLayout,
        bytes: &'p mut [u8],
    ) -> Result<cuda::Pages<'p>, EngineError> {
        let memory = self.scratch(bytes.len())?;
        let memory = room.insert(memory);
        self.upload_bytes(bytes, memory, 0)?;
        Ok(cuda::Pages::new(layout, memory, 0, bytes.len()))
    }

    fn give_back(
        &mut self,
        room: &mut Option<cuda::Memory<G>>,
        bytes: &mut [u8],
    ) -> Result<(), EngineError> {
        match room.take() {
            Some(memory) => Ok(self.download_bytes(&memory, 0, bytes)?),
            None => Ok(()),
        }
    }

    fn blank<'p>(
        &mut self,
        room: &'p mut Option<cuda::Memory<G>>,
        layout: PageLayout,
        bytes: usize,
    ) -> Result<cuda::Pages<'p>, EngineError> {
        let memory = match room.take() {
            Some(memory) if memory.bytes() >= bytes => memory,
            _ => self.scratch(bytes)?,
        };
        Ok(cuda::Pages::new(layout, room.insert(memory), 0, bytes))
    }
}
