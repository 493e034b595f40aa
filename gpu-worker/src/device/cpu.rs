//! The processor: its memory is the host's, and its pages are the kv segment.

mod passes;

use std::ops::Range;
use std::sync::Arc;

use blocks::kv::{KvPool, KvShape};
use kernels::ops::{OpError, convert};
use kernels::{Cpu, DType, KvPages, PageLayout, StepRow};
use model::BlockSpec;
use shared::job::{PageCopy, SlotRef};
use shared::shm::arena::ArenaMap;
use shared::shm::kv::KvMap;

pub use passes::{HostMemory, HostPasses};

use super::{DeviceBackend, DirectSteps, HiddenStates, NOT_THERE, TransferError, UnitLimits};
use crate::schedule::UnitTimes;

/// The kv segment, where it is mapped.
#[derive(Debug)]
pub struct HostCache {
    shape: KvShape,
    segment: KvMap,
}

impl HostCache {
    fn pool(&mut self) -> Result<KvPool<'_>, OpError> {
        KvPool::new(self.shape, self.segment.values_mut())
    }
}

/// An arena, and bytes on their way.
#[derive(Debug)]
pub struct HostArena {
    map: Arc<ArenaMap>,
    bytes: Vec<u8>,
}

impl DeviceBackend for Cpu {
    type Cache = HostCache;
    type PageMemory = Vec<u8>;
    type Arena = HostArena;
    type Hidden = Vec<f32>;
    type Steps = DirectSteps<Cpu>;
    type Passes = HostPasses;

    fn unit_limits(&self, _spec: &BlockSpec) -> UnitLimits {
        UnitLimits { times: UnitTimes::PROCESSOR, tokens: [usize::MAX; 2] }
    }

    fn synchronize(&mut self, _cache: &mut HostCache) -> Result<(), OpError> {
        // Operations of the processor return when they are done.
        Ok(())
    }

    fn open_arena(&mut self, arena: &Arc<ArenaMap>) -> HostArena {
        HostArena { map: Arc::clone(arena), bytes: Vec::new() }
    }

    fn open_cache(&mut self, shape: KvShape, segment: Option<KvMap>) -> Result<HostCache, OpError> {
        let segment = segment.ok_or_else(|| shape.too_small(0))?;
        let mut cache = HostCache { shape, segment };
        cache.pool()?;
        Ok(cache)
    }

    fn cached<'c>(
        &mut self,
        cache: &'c mut HostCache,
        index: usize,
        _rows: &[StepRow<'_>],
    ) -> Result<KvPages<'c>, OpError> {
        cache.pool()?.into_block(index).ok_or(NOT_THERE)
    }

    fn copy_pages(
        &mut self,
        cache: &mut HostCache,
        index: usize,
        copies: &[PageCopy],
    ) -> Result<(), OpError> {
        cache.pool()?.copy(index, copies)
    }

    fn pages_in<'p>(
        &mut self,
        memory: &'p mut Vec<u8>,
        layout: PageLayout,
        bytes: usize,
    ) -> Result<KvPages<'p>, OpError> {
        memory.resize(bytes, 0);
        Ok(KvPages::new(layout, memory))
    }
}

impl HiddenStates<Cpu> for Vec<f32> {
    fn load(
        _cpu: &mut Cpu,
        arena: &mut HostArena,
        slot: SlotRef,
        dtype: DType,
    ) -> Result<Vec<f32>, TransferError> {
        let HostArena { map, bytes } = arena;
        bytes.resize(usize::try_from(slot.len).unwrap_or(usize::MAX), 0);
        map.read(slot.offset, bytes)?;
        Ok(convert::to_vec(dtype, bytes))
    }

    fn store(
        &self,
        _cpu: &mut Cpu,
        arena: &mut HostArena,
        slot: SlotRef,
        dtype: DType,
    ) -> Result<(), TransferError> {
        let HostArena { map, bytes } = arena;
        bytes.resize(self.len() * dtype.size_bytes(), 0);
        convert::from_f32(dtype, self, bytes);
        Ok(map.write(slot.offset, bytes)?)
    }

    fn gather(&self, _cpu: &mut Cpu, values: Range<usize>, to: &mut [f32]) -> Result<(), OpError> {
        let from = self.get(values).ok_or(NOT_THERE)?;
        to.get_mut(..from.len()).ok_or(NOT_THERE)?.copy_from_slice(from);
        Ok(())
    }

    fn scatter(
        &mut self,
        _cpu: &mut Cpu,
        values: Range<usize>,
        from: &[f32],
    ) -> Result<(), OpError> {
        let to = self.get_mut(values).ok_or(NOT_THERE)?;
        to.copy_from_slice(from.get(..to.len()).ok_or(NOT_THERE)?);
        Ok(())
    }

    fn work_on(
        &mut self,
        cpu: &mut Cpu,
        values: Range<usize>,
        work: impl FnOnce(&mut Cpu, &mut [f32]) -> Result<(), OpError>,
    ) -> Result<(), OpError> {
        work(cpu, self.get_mut(values).ok_or(NOT_THERE)?)
    }
}
