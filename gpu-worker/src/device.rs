//! What an engine needs of a device besides the operations of blocks: where KV pages live. On the CPU they are the kv segment; a CUDA
//! device has its own and keeps the segment as their mirror, from which the next worker takes them.

mod cpu;
mod cuda;

use std::ops::Range;
use std::sync::Arc;

use kernels::cuda::arena::MoveError;
use kernels::ops::OpError;
use kernels::{Backend, DType, PageLayout, StepRow};
use shared::job::{PageCopy, SlotRef};
use shared::shm::arena::ArenaMap;
use shared::shm::kv::KvMap;
use shared::shm::segment::OutOfBounds;

pub use cpu::HostCache;
pub(crate) use cuda::KEPT_VALUES;

use crate::engine::EngineError;
use crate::kv::KvShape;
use crate::schedule::UnitTimes;

/// Why a tensor did not get from the arena to the device or back.
#[derive(Debug, thiserror::Error)]
pub enum TransferError {
    /// It is not in the arena: the job is refused.
    #[error(transparent)]
    Outside(#[from] OutOfBounds),
    /// The device failed.
    #[error(transparent)]
    Engine(#[from] EngineError),
}

impl From<MoveError> for TransferError {
    fn from(error: MoveError) -> TransferError {
        match error {
            MoveError::Outside(outside) => TransferError::Outside(outside),
            MoveError::Op(op) => TransferError::Engine(op.into()),
        }
    }
}

/// Most tokens of a recorded step.
pub const MAX_STEP_TOKENS: usize = kernels::cuda::step::MAX_STEP_TOKENS;

/// A backend that keeps KV pages, and reaches an arena.
pub trait Paged: Backend + Sized {
    /// The pages of all blocks of the span.
    type Cache;
    /// How the device reaches the arena of a link.
    type Reach;
    /// Device memory for pages that are not of the cache.
    type Room: Default;
    /// Launches of a decode step through one block, recorded.
    type Graph;

    /// How long units may take.
    fn unit_times(&self) -> UnitTimes;

    /// Gets ready to record steps over a pool of so many pages per block, with so many heads. False: this device does not record.
    ///
    /// # Errors
    /// [`EngineError`] when the device has no memory for it.
    fn open_steps(
        &mut self,
        heads: usize,
        head_dim: usize,
        pages: usize,
    ) -> Result<bool, EngineError>;

    /// Writes the rows of the next step, and which adapter each goes through (empty: none), to where recordings read them. False: they do not
    /// fit.
    ///
    /// # Errors
    /// [`EngineError`] when the device fails.
    fn set_step(
        &mut self,
        rows: &[StepRow<'_>],
        adapters: &[Option<u32>],
    ) -> Result<bool, EngineError>;

    /// Whether operations take the rows of [`set_step`](Self::set_step) for those that they are given.
    fn use_fixed_step(&mut self, on: bool);

    /// Records what `enqueue` enqueues instead of running it. `None`: not all of it can be recorded.
    ///
    /// # Errors
    /// Those of `enqueue`, and the device's.
    fn record(
        &mut self,
        pages: &mut Self::Pages<'_>,
        enqueue: impl FnMut(&mut Self, &mut Self::Pages<'_>) -> Result<(), OpError>,
    ) -> Result<Option<Self::Graph>, EngineError>;

    /// Enqueues what was recorded, over the pages it was recorded for.
    ///
    /// # Errors
    /// [`EngineError`] when they are others, or the device fails.
    fn replay(
        &mut self,
        graph: &Self::Graph,
        pages: &mut Self::Pages<'_>,
    ) -> Result<(), EngineError>;

    /// Kernels that one replay launches.
    fn launches(graph: &Self::Graph) -> u64;

    /// Makes an arena ready for [`load`](Self::load) and [`store`](Self::store).
    fn reach(&mut self, arena: &Arc<ArenaMap>) -> Self::Reach;

    /// Whether hidden states of so many values stay on the device between two units.
    fn keeps(&self, values: usize) -> bool;

    /// Whether units of a job for gradients leave more for each other than inputs, keys and values, which are on the host.
    fn keeps_results(&self) -> bool;

    /// The tensor in `slot`, stored in `dtype`, to the start of `to`.
    ///
    /// # Errors
    /// [`TransferError`].
    fn load(
        &mut self,
        arena: &ArenaMap,
        reach: &mut Self::Reach,
        slot: SlotRef,
        dtype: DType,
        to: &mut Self::Floats,
    ) -> Result<(), TransferError>;

    /// The first values of `from` to `slot` in `dtype`, as many as it holds. They are there after the next [`settle`](Self::settle).
    ///
    /// # Errors
    /// [`TransferError`].
    fn store(
        &mut self,
        from: &Self::Floats,
        dtype: DType,
        arena: &ArenaMap,
        reach: &mut Self::Reach,
        slot: SlotRef,
    ) -> Result<(), TransferError>;

    /// Values of the host, stored in `dtype`, to the start of `to`.
    ///
    /// # Errors
    /// [`EngineError`] when `to` is shorter, or the device fails.
    fn widen(
        &mut self,
        from: &[u8],
        dtype: DType,
        to: &mut Self::Floats,
    ) -> Result<(), EngineError>;

    /// The first values of `from` to the host in `dtype`, as many as `to` has room for.
    ///
    /// # Errors
    /// [`EngineError`] when `from` is shorter, or the device fails.
    fn narrow(
        &mut self,
        from: &Self::Floats,
        dtype: DType,
        to: &mut [u8],
    ) -> Result<(), EngineError>;

    /// Returns when all that was enqueued is done.
    ///
    /// # Errors
    /// The device's.
    fn settle(&mut self) -> Result<(), EngineError>;

    /// Bytes of the device that are free; `None` when it has no memory of its own, or does not tell.
    fn free_bytes(&self) -> Option<u64>;

    /// Takes pieces of so many bytes of the device for work, and keeps them for operations that need as much or less.
    ///
    /// # Errors
    /// [`EngineError`] when the device has no memory.
    fn warm(&mut self, bytes: &[usize]) -> Result<(), EngineError>;

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

    /// Whether jobs keep what they have between two units in memory of the device: one that has its own.
    fn parks(&self) -> bool;

    /// A room of exactly `bytes` bytes.
    ///
    /// # Errors
    /// [`EngineError`] when the device has no memory.
    fn reserve_room(&mut self, bytes: usize) -> Result<Self::Room, EngineError>;

    /// Pages over some bytes of a room; what was written to them stays.
    ///
    /// # Errors
    /// [`EngineError`] when the room is smaller.
    fn parked_pages<'p>(
        &mut self,
        room: &'p mut Self::Room,
        layout: PageLayout,
        bytes: Range<usize>,
    ) -> Result<Self::Pages<'p>, EngineError>;

    /// The first `len` values of `from` in `dtype` to byte `at` of a room.
    ///
    /// # Errors
    /// [`EngineError`] when one of them is shorter, or the device fails.
    fn park(
        &mut self,
        from: &Self::Floats,
        len: usize,
        dtype: DType,
        room: &mut Self::Room,
        at: usize,
    ) -> Result<(), EngineError>;

    /// `len` values, stored in `dtype` from byte `at` of a room on, to the start of `to`.
    ///
    /// # Errors
    /// [`EngineError`] when one of them is shorter, or the device fails.
    fn recall(
        &mut self,
        room: &Self::Room,
        at: usize,
        len: usize,
        dtype: DType,
        to: &mut Self::Floats,
    ) -> Result<(), EngineError>;

    /// Sets values to zero.
    ///
    /// # Errors
    /// [`EngineError`] when the device fails.
    fn zero(&mut self, values: &mut Self::Floats) -> Result<(), EngineError>;
}
