//! CUDA devices, or the emulator: pages and hidden states in device memory.

use std::ops::Range;
use std::sync::Arc;

use kernels::cuda::{self, Cuda, Gpu};
use kernels::ops::OpError;
use kernels::{DType, PageLayout, StepRow};
use shared::job::{PageCopy, SlotRef};
use shared::shm::arena::ArenaMap;
use shared::shm::kv::KvMap;
use tracing::warn;

use super::{Paged, TransferError};
use crate::engine::EngineError;
use crate::kv::KvShape;
use crate::schedule::UnitTimes;

/// Values of the hidden states of one job that a device keeps; larger jobs are on the host between their units. At most one job of each
/// class other than decode has begun at a time, so that these are some 200 MB at most.
pub(crate) const KEPT_VALUES: usize = 16 << 20;

/// Pieces for what the host tells kernels (rows, page tables, indexes), more than are alive at once, and their size: larger than any.
const SMALL_PIECES: usize = 8;
const SMALL_PIECE_BYTES: usize = 64 << 10;

impl<G: Gpu> Paged for Cuda<G> {
    type Cache = cuda::Cache<G>;
    type Room = Option<cuda::Memory<G>>;
    type Reach = cuda::Reach<G>;
    type Graph = cuda::Recorded<G>;

    fn unit_times(&self) -> UnitTimes {
        let time = self.gpu().unit_time();
        UnitTimes {
            bulk: time,
            decode: time,
        }
    }

    fn open_steps(
        &mut self,
        heads: usize,
        head_dim: usize,
        pages: usize,
    ) -> Result<bool, EngineError> {
        Cuda::open_steps(self, heads, head_dim, pages)?;
        Ok(true)
    }

    fn set_step(
        &mut self,
        rows: &[StepRow<'_>],
        adapters: &[Option<u32>],
    ) -> Result<bool, EngineError> {
        Ok(Cuda::set_step(self, rows, adapters)?)
    }

    fn use_fixed_step(&mut self, on: bool) {
        Cuda::use_fixed_step(self, on);
    }

    fn record(
        &mut self,
        pages: &mut cuda::Pages<'_>,
        enqueue: impl FnMut(&mut Self, &mut cuda::Pages<'_>) -> Result<(), OpError>,
    ) -> Result<Option<cuda::Recorded<G>>, EngineError> {
        Ok(Cuda::record(self, pages, enqueue)?)
    }

    fn replay(
        &mut self,
        graph: &cuda::Recorded<G>,
        pages: &mut cuda::Pages<'_>,
    ) -> Result<(), EngineError> {
        Ok(Cuda::replay(self, graph, pages)?)
    }

    fn launches(graph: &cuda::Recorded<G>) -> u64 {
        graph.launches()
    }

    fn reach(&mut self, arena: &Arc<ArenaMap>) -> cuda::Reach<G> {
        let (reach, failure) = cuda::Reach::new(self, arena);
        if let Some(failure) = failure {
            warn!(%failure, "the device does not reach the arena; tensors are copied once more");
        }
        reach
    }

    fn keeps(&self, values: usize) -> bool {
        values <= KEPT_VALUES
    }

    fn keeps_results(&self) -> bool {
        false
    }

    fn load(
        &mut self,
        _arena: &ArenaMap,
        reach: &mut cuda::Reach<G>,
        slot: SlotRef,
        dtype: DType,
        to: &mut cuda::Floats,
    ) -> Result<(), TransferError> {
        let len = usize::try_from(slot.len).unwrap_or(usize::MAX) / dtype.size_bytes();
        Ok(Cuda::load(self, reach, slot.offset, len, dtype, to)?)
    }

    fn store(
        &mut self,
        from: &cuda::Floats,
        dtype: DType,
        _arena: &ArenaMap,
        reach: &mut cuda::Reach<G>,
        slot: SlotRef,
    ) -> Result<(), TransferError> {
        let len = usize::try_from(slot.len).unwrap_or(usize::MAX) / dtype.size_bytes();
        Ok(Cuda::store(self, from, len, dtype, reach, slot.offset)?)
    }

    fn widen(
        &mut self,
        from: &[u8],
        dtype: DType,
        to: &mut cuda::Floats,
    ) -> Result<(), EngineError> {
        Ok(Cuda::widen(self, from, dtype, to)?)
    }

    fn narrow(
        &mut self,
        from: &cuda::Floats,
        dtype: DType,
        to: &mut [u8],
    ) -> Result<(), EngineError> {
        Ok(Cuda::narrow(self, from, dtype, to)?)
    }

    fn settle(&mut self) -> Result<(), EngineError> {
        Ok(self.wait()?)
    }

    fn free_bytes(&self) -> Option<u64> {
        let (free, _) = self.gpu().memory().ok()?;
        Some(free as u64)
    }

    fn warm(&mut self, bytes: &[usize]) -> Result<(), EngineError> {
        // All at once, and given back when all are there.
        let mut taken = Vec::new();
        for &bytes in bytes {
            taken.push(self.scratch(bytes)?);
        }
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

    fn parks(&self) -> bool {
        true
    }

    fn reserve_room(&mut self, bytes: usize) -> Result<Option<cuda::Memory<G>>, EngineError> {
        Ok(Some(self.reserve(bytes)?))
    }

    fn parked_pages<'p>(
        &mut self,
        room: &'p mut Option<cuda::Memory<G>>,
        layout: PageLayout,
        bytes: Range<usize>,
    ) -> Result<cuda::Pages<'p>, EngineError> {
        let memory = room.as_mut().filter(|memory| bytes.end <= memory.bytes());
        let memory = memory.ok_or(NO_ROOM)?;
        Ok(cuda::Pages::new(layout, memory, bytes.start, bytes.len()))
    }

    fn park(
        &mut self,
        from: &cuda::Floats,
        len: usize,
        dtype: DType,
        room: &mut Option<cuda::Memory<G>>,
        at: usize,
    ) -> Result<(), EngineError> {
        let memory = room.as_mut().ok_or(NO_ROOM)?;
        Ok(self.narrow_into(from, len, dtype, memory, at)?)
    }

    fn recall(
        &mut self,
        room: &Option<cuda::Memory<G>>,
        at: usize,
        len: usize,
        dtype: DType,
        to: &mut cuda::Floats,
    ) -> Result<(), EngineError> {
        let memory = room.as_ref().ok_or(NO_ROOM)?;
        Ok(self.widen_out_of(memory, at, len, dtype, to)?)
    }

    fn zero(&mut self, values: &mut cuda::Floats) -> Result<(), EngineError> {
        Ok(Cuda::zero(self, values)?)
    }
}

const NO_ROOM: EngineError = EngineError::Op(OpError::Shape {
    op: "room",
    what: "it does not hold so much",
});
