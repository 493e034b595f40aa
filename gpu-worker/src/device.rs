//! What the engine asks of a device besides the operations of blocks. Where devices differ (KV
//! cache, memory that a job keeps between its units, recorded steps), an associated type of
//! [`DeviceBackend`] holds the difference, and each device does the same work in its own way.
//!
//! ```text
//!                       processor                              CUDA
//! Cache                 the kv segment                         device memory, mirrored in the segment
//! Arena                 copied                                 registered: the device copies
//! HiddenStates          f32 on the host                        device memory; of large jobs on the host
//! StepRunner            block by block                         recorded launches, else block by block
//! PassRunner            in place, with saved activations       resident in planned regions, else on the host
//! ```

mod cpu;
mod cuda;
mod direct;
mod host;
mod unit;

use std::ops::Range;
use std::sync::Arc;

use blocks::Workspace;
use blocks::kv::KvShape;
use kernels::cuda::arena::MoveError;
use kernels::ops::OpError;
use kernels::{Backend, DType, PageLayout, StepRow};
use model::BlockSpec;
use shared::job::{PageCopy, SlotRef};
use shared::shm::arena::ArenaMap;
use shared::shm::kv::KvMap;
use shared::shm::segment::OutOfBounds;

pub use cpu::{HostArena, HostCache, HostMemory, HostPasses};
pub use cuda::{CudaArena, CudaMemory, CudaPasses, CudaStates, RecordedSteps};
pub use direct::DirectSteps;
pub use host::HostGradients;
pub(crate) use host::read;
pub use unit::{PassUnit, StepUnit};

use crate::job::Job;
use crate::schedule::UnitTimes;

/// Why a tensor did not get from the arena to the device or back.
#[derive(Debug, thiserror::Error)]
pub enum TransferError {
    /// The slot lies outside the arena: the job is refused.
    #[error(transparent)]
    Outside(#[from] OutOfBounds),
    #[error(transparent)]
    Op(#[from] OpError),
}

impl From<MoveError> for TransferError {
    fn from(error: MoveError) -> TransferError {
        match error {
            MoveError::Outside(outside) => TransferError::Outside(outside),
            MoveError::Op(op) => TransferError::Op(op),
        }
    }
}

/// How large units may be on a device.
#[derive(Clone, Copy, Debug)]
pub struct UnitLimits {
    /// How long units may take.
    pub times: UnitTimes,
    /// Most tokens of units other than decode steps, in the forward and in the backward pass.
    pub tokens: [usize; 2],
}

/// A backend that serves the blocks of a span.
pub trait DeviceBackend: Backend + Sized {
    /// The KV pages of all blocks of the span.
    type Cache;
    /// Memory for KV pages outside the cache; empty by default.
    type PageMemory: Default;
    /// An arena, as this device reaches it.
    type Arena;
    /// Hidden states of one job.
    type Hidden: HiddenStates<Self>;
    /// Runs steps of sessions.
    type Steps: StepRunner<Self>;
    /// Runs jobs without cache.
    type Passes: PassRunner<Self>;

    /// How large units of blocks of this spec may be.
    fn unit_limits(&self, spec: &BlockSpec) -> UnitLimits;

    /// Waits until all operations that were enqueued are done. What they appended to `cache` outlives
    /// the worker then, if anything does.
    ///
    /// # Errors
    /// The device's.
    fn synchronize(&mut self, cache: &mut Self::Cache) -> Result<(), OpError>;

    /// Makes an arena ready for transfers.
    fn open_arena(&mut self, arena: &Arc<ArenaMap>) -> Self::Arena;

    /// The pages of a span; the segment holds what earlier workers left. Only a device with memory
    /// of its own works without a segment: its pages then end with the worker.
    ///
    /// # Errors
    /// [`OpError`] when the segment is too small or missing, or the device has no memory.
    fn open_cache(
        &mut self,
        shape: KvShape,
        segment: Option<KvMap>,
    ) -> Result<Self::Cache, OpError>;

    /// The pages of the block at `index` of the span, those of the prefixes of `rows` ready to be
    /// read.
    ///
    /// # Errors
    /// [`OpError`] when there is no such block, or the device fails.
    fn cached<'c>(
        &mut self,
        cache: &'c mut Self::Cache,
        index: usize,
        rows: &[StepRow<'_>],
    ) -> Result<Self::Pages<'c>, OpError>;

    /// Makes copies of pages in the block at `index`, in their order.
    ///
    /// # Errors
    /// [`OpError`] when a copy names what is not there, or the device fails.
    fn copy_pages(
        &mut self,
        cache: &mut Self::Cache,
        index: usize,
        copies: &[PageCopy],
    ) -> Result<(), OpError>;

    /// Pages of unspecified content over the first `bytes` bytes of `memory`, which grows as
    /// needed.
    ///
    /// # Errors
    /// [`OpError`] when the device has no memory.
    fn pages_in<'p>(
        &mut self,
        memory: &'p mut Self::PageMemory,
        layout: PageLayout,
        bytes: usize,
    ) -> Result<Self::Pages<'p>, OpError>;
}

/// Hidden states of one job, from its first block to its last.
pub trait HiddenStates<B: DeviceBackend>: Sized {
    /// Reads the hidden states in `slot`, stored in `dtype`.
    fn load(
        backend: &mut B,
        arena: &mut B::Arena,
        slot: SlotRef,
        dtype: DType,
    ) -> Result<Self, TransferError>;

    /// Writes all of them to `slot` in `dtype`. They are there after the next
    /// [`synchronize`](DeviceBackend::synchronize).
    fn store(
        &self,
        backend: &mut B,
        arena: &mut B::Arena,
        slot: SlotRef,
        dtype: DType,
    ) -> Result<(), TransferError>;

    /// Copies some values to the start of `to`.
    ///
    /// # Errors
    /// [`OpError`] when there are no such values, or the device fails.
    fn gather(
        &self,
        backend: &mut B,
        values: Range<usize>,
        to: &mut B::Floats,
    ) -> Result<(), OpError>;

    /// Replaces some values by the first of `from`.
    ///
    /// # Errors
    /// [`OpError`] when there are no such values, or the device fails.
    fn scatter(
        &mut self,
        backend: &mut B,
        values: Range<usize>,
        from: &B::Floats,
    ) -> Result<(), OpError>;

    /// Has `work` replace some values, where kernels can read and write them.
    ///
    /// # Errors
    /// [`OpError`] when there are no such values, or those of `work`.
    fn work_on(
        &mut self,
        backend: &mut B,
        values: Range<usize>,
        work: impl FnOnce(&mut B, &mut B::Floats) -> Result<(), OpError>,
    ) -> Result<(), OpError>;
}

/// Runs steps of sessions, which read and write the KV cache.
pub trait StepRunner<B: DeviceBackend>: Sized {
    /// A runner without memory.
    fn new(backend: &mut B) -> Self;

    /// Sends the rows of `unit` through its blocks. `work` is memory for intermediate results.
    ///
    /// # Errors
    /// [`OpError`] when the unit does not fit the span, or the device fails.
    fn run(
        &mut self,
        backend: &mut B,
        work: &mut Workspace<B>,
        cache: &mut B::Cache,
        unit: StepUnit<'_, '_, B>,
    ) -> Result<(), OpError>;
}

/// Runs jobs without cache: forward, and gradients.
pub trait PassRunner<B: DeviceBackend>: Sized {
    /// What one job keeps between its units besides the hidden states: its KV pages, and for
    /// gradients the inputs of its blocks, the gradient of the hidden states at hand, and its sums.
    type Memory;

    /// A runner for blocks of `spec`. A job for gradients may keep `saved_bytes` bytes.
    fn new(backend: &mut B, spec: &BlockSpec, saved_bytes: u64) -> Self;

    /// Takes the memory of a job, and reads the gradient of its output if it has one. A page has
    /// the shape `layout`.
    fn begin(
        &mut self,
        backend: &mut B,
        arena: &mut B::Arena,
        spec: &BlockSpec,
        layout: PageLayout,
        job: &Job,
    ) -> Result<Self::Memory, TransferError>;

    /// Sends some tokens through a block. `work` is memory for intermediate results.
    ///
    /// # Errors
    /// [`OpError`] when the unit does not fit its job, or the device fails.
    fn forward(
        &mut self,
        backend: &mut B,
        work: &mut Workspace<B>,
        unit: &PassUnit<'_, '_, B>,
        hidden: &mut B::Hidden,
        memory: &mut Self::Memory,
    ) -> Result<(), OpError>;

    /// Sends the gradient of some tokens back through a block. Behind the last of them the gradient
    /// of the block's prompts goes to the arena.
    fn backward(
        &mut self,
        backend: &mut B,
        arena: &mut B::Arena,
        unit: &PassUnit<'_, '_, B>,
        memory: &mut Self::Memory,
    ) -> Result<(), TransferError>;

    /// Writes the gradient of the input to `slot` in `dtype`. It is there after the next
    /// [`synchronize`](DeviceBackend::synchronize).
    fn store(
        &self,
        backend: &mut B,
        arena: &mut B::Arena,
        memory: &Self::Memory,
        slot: SlotRef,
        dtype: DType,
    ) -> Result<(), TransferError>;
}

/// A unit names values, pages or a block that its job or the span does not have.
const NOT_THERE: OpError =
    OpError::Shape { op: "unit", what: "it names what its job or the span does not have" };
