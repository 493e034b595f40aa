//! The processor as a device: its memory is the host's, its pages are the kv segment, and it records nothing.

use std::ops::Range;
use std::sync::Arc;

use kernels::ops::{OpError, convert};
use kernels::{Cpu, DType, KvPages, PageLayout, StepRow};
use shared::job::{PageCopy, SlotRef};
use shared::shm::arena::ArenaMap;
use shared::shm::kv::KvMap;

use super::{Paged, TransferError};
use crate::engine::EngineError;
use crate::kv::{KvPool, KvShape, WrongSegment};
use crate::schedule::UnitTimes;

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
    /// Bytes on their way.
    type Reach = Vec<u8>;
    type Graph = ();

    fn unit_times(&self) -> UnitTimes {
        UnitTimes::PROCESSOR
    }

    fn open_steps(&mut self, _: usize, _: usize, _: usize) -> Result<bool, EngineError> {
        Ok(false)
    }

    fn set_step(
        &mut self,
        _rows: &[StepRow<'_>],
        _adapters: &[Option<u32>],
    ) -> Result<bool, EngineError> {
        Ok(false)
    }

    fn use_fixed_step(&mut self, _on: bool) {}

    fn record(
        &mut self,
        _pages: &mut KvPages<'_>,
        _enqueue: impl FnMut(&mut Self, &mut KvPages<'_>) -> Result<(), OpError>,
    ) -> Result<Option<()>, EngineError> {
        Ok(None)
    }

    fn replay(&mut self, _graph: &(), _pages: &mut KvPages<'_>) -> Result<(), EngineError> {
        Ok(())
    }

    fn launches(_graph: &()) -> u64 {
        0
    }

    fn reach(&mut self, _arena: &Arc<ArenaMap>) -> Vec<u8> {
        Vec::new()
    }

    fn keeps(&self, _values: usize) -> bool {
        true
    }

    fn keeps_results(&self) -> bool {
        true
    }

    fn load(
        &mut self,
        arena: &ArenaMap,
        bytes: &mut Vec<u8>,
        slot: SlotRef,
        dtype: DType,
        to: &mut [f32],
    ) -> Result<(), TransferError> {
        bytes.resize(usize::try_from(slot.len).unwrap_or(usize::MAX), 0);
        arena.read(slot.offset, bytes)?;
        Ok(self.widen(bytes, dtype, to)?)
    }

    fn store(
        &mut self,
        from: &[f32],
        dtype: DType,
        arena: &ArenaMap,
        bytes: &mut Vec<u8>,
        slot: SlotRef,
    ) -> Result<(), TransferError> {
        bytes.resize(usize::try_from(slot.len).unwrap_or(usize::MAX), 0);
        self.narrow(from, dtype, bytes)?;
        Ok(arena.write(slot.offset, bytes)?)
    }

    fn widen(&mut self, from: &[u8], dtype: DType, to: &mut [f32]) -> Result<(), EngineError> {
        let len = from.len() / dtype.size_bytes();
        let (op, what, has, needs) = ("widen", "to", to.len(), len);
        let short = OpError::Short {
            op,
            what,
            has,
            needs,
        };
        let to = to.get_mut(..len).ok_or(short)?;
        convert::to_f32(dtype, from, to);
        Ok(())
    }

    fn narrow(&mut self, from: &[f32], dtype: DType, to: &mut [u8]) -> Result<(), EngineError> {
        let len = to.len() / dtype.size_bytes();
        let (op, what, has, needs) = ("narrow", "from", from.len(), len);
        let short = OpError::Short {
            op,
            what,
            has,
            needs,
        };
        convert::from_f32(dtype, from.get(..len).ok_or(short)?, to);
        Ok(())
    }

    fn settle(&mut self) -> Result<(), EngineError> {
        Ok(())
    }

    fn free_bytes(&self) -> Option<u64> {
        None
    }

    fn warm(&mut self, _bytes: &[usize]) -> Result<(), EngineError> {
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

    fn parks(&self) -> bool {
        false
    }

    fn reserve_room(&mut self, bytes: usize) -> Result<Vec<u8>, EngineError> {
        Ok(vec![0; bytes])
    }

    fn parked_pages<'p>(
        &mut self,
        room: &'p mut Vec<u8>,
        layout: PageLayout,
        bytes: Range<usize>,
    ) -> Result<KvPages<'p>, EngineError> {
        Ok(KvPages::new(layout, room.get_mut(bytes).ok_or(NO_ROOM)?))
    }

    fn park(
        &mut self,
        from: &[f32],
        len: usize,
        dtype: DType,
        room: &mut Vec<u8>,
        at: usize,
    ) -> Result<(), EngineError> {
        let to = room.get_mut(at..at.saturating_add(len * dtype.size_bytes()));
        self.narrow(from, dtype, to.ok_or(NO_ROOM)?)
    }

    fn recall(
        &mut self,
        room: &Vec<u8>,
        at: usize,
        len: usize,
        dtype: DType,
        to: &mut [f32],
    ) -> Result<(), EngineError> {
        let from = room.get(at..at.saturating_add(len * dtype.size_bytes()));
        self.widen(from.ok_or(NO_ROOM)?, dtype, to)
    }

    fn zero(&mut self, values: &mut [f32]) -> Result<(), EngineError> {
        values.fill(0.0);
        Ok(())
    }
}

const NO_ROOM: EngineError = EngineError::Op(OpError::Shape {
    op: "room",
    what: "it does not hold so much",
});
