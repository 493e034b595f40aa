//! CUDA devices, or the emulator: pages and hidden states in device memory.

mod passes;
mod recordings;
mod residency;
mod states;

use std::sync::Arc;

use blocks::kv::KvShape;
use kernels::cuda::{self, Cuda, Gpu};
use kernels::ops::OpError;
use kernels::{PageLayout, StepRow};
use model::BlockSpec;
use model::sizing::unit_tokens;
use shared::job::PageCopy;
use shared::shm::arena::ArenaMap;
use shared::shm::kv::KvMap;
use tracing::warn;

pub use passes::{CudaMemory, CudaPasses};
pub use recordings::RecordedSteps;
pub use states::CudaStates;

use super::{DeviceBackend, NOT_THERE, UnitLimits};
use crate::schedule::UnitTimes;

/// An arena, and its part that the device reaches.
#[derive(Debug)]
pub struct CudaArena<G: Gpu> {
    map: Arc<ArenaMap>,
    mapped: cuda::MappedArena<G>,
}

impl<G: Gpu> DeviceBackend for Cuda<G> {
    type Cache = cuda::Cache<G>;
    type PageMemory = Option<cuda::PooledMemory<G>>;
    type Arena = CudaArena<G>;
    type Hidden = CudaStates<G>;
    type Steps = RecordedSteps<G>;
    type Passes = CudaPasses<G>;

    fn unit_limits(&self, spec: &BlockSpec) -> UnitLimits {
        let time = self.gpu().unit_time();
        let times = UnitTimes { bulk: time, decode: time };
        // As many tokens as memory is planned for.
        UnitLimits { times, tokens: unit_tokens(spec) }
    }

    fn synchronize(&mut self, cache: &mut cuda::Cache<G>) -> Result<(), OpError> {
        cache.synchronize(self)
    }

    fn open_arena(&mut self, arena: &Arc<ArenaMap>) -> CudaArena<G> {
        let (mapped, failure) = cuda::MappedArena::new(self, arena);
        if let Some(failure) = failure {
            warn!(%failure, "device cannot map the arena, copying tensors once more");
        }
        CudaArena { map: Arc::clone(arena), mapped }
    }

    fn open_cache(
        &mut self,
        shape: KvShape,
        segment: Option<KvMap>,
    ) -> Result<cuda::Cache<G>, OpError> {
        let KvShape { layout, blocks, pages } = shape;
        let cache = cuda::Cache::open(self, layout, blocks, pages, segment)?;
        if let Some(failure) = cache.slow_mirror() {
            warn!(%failure, "device cannot write host memory, mirroring the KV cache more slowly");
        }
        Ok(cache)
    }

    fn cached<'c>(
        &mut self,
        cache: &'c mut cuda::Cache<G>,
        index: usize,
        rows: &[StepRow<'_>],
    ) -> Result<cuda::Pages<'c>, OpError> {
        cache.block(self, index, rows)
    }

    fn copy_pages(
        &mut self,
        cache: &mut cuda::Cache<G>,
        index: usize,
        copies: &[PageCopy],
    ) -> Result<(), OpError> {
        let copies: Vec<_> = copies
            .iter()
            .map(|copy| (copy.source, copy.destination, copy.tokens as usize))
            .collect();
        cache.copy(self, index, &copies)
    }

    fn pages_in<'p>(
        &mut self,
        memory: &'p mut Option<cuda::PooledMemory<G>>,
        layout: PageLayout,
        bytes: usize,
    ) -> Result<cuda::Pages<'p>, OpError> {
        let held = match memory.take() {
            Some(held) if held.bytes() >= bytes => held,
            _ => self.scratch(bytes)?,
        };
        Ok(cuda::Pages::new(layout, memory.insert(held), 0, bytes))
    }
}
