//! The mirror of the pages on the device: the kv segment, as it outlives the worker.
//!
//! ```text
//! kernels ── append ──> pages                                   device memory
//!             └───────> outbox ── one copy per unit ──> staging ── by the host ──> segment
//! ```
//! So no kernel waits for the bus, and only the staging is pinned. What a unit appended is in the
//! segment when the host has waited for it ([`Mirror::deliver`]).

use shared::model::MAX_STEP_TOKENS;
use shared::shm::kv::KvMap;

use crate::cuda::Cuda;
use crate::cuda::gpu::{Gpu, GpuError};
use crate::cuda::host_memory::HostMemory;
use crate::cuda::memory::PooledMemory;
use crate::cuda::pages::Outlet;
use crate::kv::{KvPages, PageLayout, StepRow, total_tokens};
use crate::ops::OpError;

/// Pages of a span in host memory, shaped as those on the device.
#[derive(Debug)]
pub(super) struct Mirror<G: Gpu> {
    segment: KvMap,
    layout: PageLayout,
    pages: usize,
    /// What recorded steps append, whose launches name it: the largest step of all blocks.
    steps: MirrorOutbox<G>,
    /// What all other units append.
    others: MirrorOutbox<G>,
}

impl<G: Gpu> Mirror<G> {
    /// The mirror of `blocks` blocks of `pages` pages in `segment`.
    ///
    /// # Errors
    /// When the segment is smaller, or the device has no memory.
    pub(super) fn open(
        cuda: &mut Cuda<G>,
        layout: PageLayout,
        [blocks, pages]: [usize; 2],
        segment: KvMap,
    ) -> Result<Mirror<G>, OpError> {
        let (has, needs) = (segment.len_bytes(), blocks * pages * layout.page_bytes());
        if has < needs {
            return Err(OpError::Short { op: "kv cache", what: "the segment", has, needs });
        }
        let slot_bytes = layout.slot_bytes();
        let steps = MirrorOutbox::new(cuda, slot_bytes, blocks * MAX_STEP_TOKENS)?;
        let others = MirrorOutbox::new(cuda, slot_bytes, 0)?;
        Ok(Mirror { segment, layout, pages, steps, others })
    }

    /// Room for units of `tokens` tokens of a block that are no recorded steps.
    pub(super) fn reserve(&mut self, cuda: &mut Cuda<G>, tokens: usize) -> Result<(), OpError> {
        if self.others.slots() < tokens {
            self.deliver(cuda)?;
            self.others = MirrorOutbox::new(cuda, self.layout.slot_bytes(), tokens)?;
        }
        Ok(())
    }

    /// Why what was appended is copied more slowly than it could be, if it is: the host lets the
    /// device not reach the staging.
    pub(super) fn is_slow(&self) -> Option<&GpuError> {
        let boxes = [&self.steps, &self.others];
        boxes.into_iter().find_map(|outbox| outbox.staging.registered.failure())
    }

    /// Where the tokens of `rows` go that are appended to the block at `index` next.
    pub(super) fn outlet(
        &mut self,
        cuda: &mut Cuda<G>,
        index: usize,
        rows: &[StepRow<'_>],
    ) -> Result<Outlet, OpError> {
        let tokens = total_tokens(rows);
        let unit = cuda.fixed().map(|fixed| fixed.first);
        let Some(first) = unit else {
            self.reserve(cuda, tokens)?;
            if self.others.used + tokens > self.others.slots() {
                self.deliver(cuda)?;
            }
            let at = self.others.used;
            self.others.append(at, index, rows);
            let address = self.others.memory.address().offset(at * self.layout.slot_bytes());
            return Ok(Outlet { address, block: 0 });
        };
        let at = index.checked_sub(first).map(|block| block * tokens);
        let at = at.filter(|at| at + tokens <= self.steps.slots()).ok_or(NO_SLOT)?;
        if at < self.steps.used && tokens > 0 {
            self.deliver(cuda)?;
        }
        self.steps.append(at, index, rows);
        Ok(Outlet { address: self.steps.memory.address(), block: index })
    }

    /// Waits for all enqueued work, and copies what it appended to the segment.
    pub(super) fn deliver(&mut self, cuda: &mut Cuda<G>) -> Result<(), OpError> {
        let slot_bytes = self.layout.slot_bytes();
        for outbox in [&mut self.steps, &mut self.others] {
            outbox.fetch(cuda, slot_bytes)?;
        }
        cuda.wait()?;
        let (layout, block_bytes) = (self.layout, self.pages * self.layout.page_bytes());
        for outbox in [&mut self.steps, &mut self.others] {
            outbox.used = 0;
            let staged = outbox.staging.bytes();
            for Appended { at, block, places } in outbox.appended.drain(..) {
                let all = self.segment.values_mut::<u8>();
                let pages = all.get_mut(block * block_bytes..(block + 1) * block_bytes);
                let mut pages = KvPages::new(layout, pages.ok_or(NO_SLOT)?);
                let slots = staged[at * slot_bytes..].chunks_exact(slot_bytes.max(1));
                for ((page, slot), from) in places.into_iter().zip(slots) {
                    pages.write(page, slot, from);
                }
            }
        }
        Ok(())
    }

    /// What the segment holds of a page.
    pub(super) fn page(&self, entry: usize) -> &[u8] {
        self.segment.page(self.layout.page_bytes(), entry).unwrap_or_default()
    }

    /// The pages of the block at `index`, up to date after [`deliver`](Self::deliver).
    pub(super) fn block(&mut self, index: usize) -> KvPages<'_> {
        let bytes = self.pages * self.layout.page_bytes();
        let block = self.segment.values_mut::<u8>().get_mut(index * bytes..(index + 1) * bytes);
        KvPages::new(self.layout, block.unwrap_or_default())
    }
}

const NO_SLOT: OpError =
    OpError::Shape { op: "kv cache", what: "the outbox has no room for the block of a step" };

/// What units appended and the host has not taken yet.
#[derive(Debug)]
struct MirrorOutbox<G: Gpu> {
    memory: PooledMemory<G>,
    staging: Staging<G>,
    slot_bytes: usize,
    /// Slots from the first on that may hold something.
    used: usize,
    appended: Vec<Appended>,
}

/// Tokens of a block in slots that follow each other.
#[derive(Debug)]
struct Appended {
    /// The first slot.
    at: usize,
    block: usize,
    /// Page and slot in the page of each token.
    places: Vec<(usize, usize)>,
}

impl<G: Gpu> MirrorOutbox<G> {
    fn new(
        cuda: &mut Cuda<G>,
        slot_bytes: usize,
        slots: usize,
    ) -> Result<MirrorOutbox<G>, OpError> {
        let bytes = slots * slot_bytes;
        let memory = cuda.reserve(bytes)?;
        let staging = Staging::new(cuda, bytes);
        Ok(MirrorOutbox { memory, staging, slot_bytes, used: 0, appended: Vec::new() })
    }

    fn slots(&self) -> usize {
        self.memory.bytes() / self.slot_bytes.max(1)
    }

    fn append(&mut self, at: usize, block: usize, rows: &[StepRow<'_>]) {
        let positions = |row: &StepRow<'_>| row.prefix..row.prefix + row.tokens;
        let places = rows.iter().flat_map(|row| positions(row).map(|at| row.locate(at)));
        let places: Vec<_> = places.collect();
        self.used = self.used.max(at + places.len());
        if !places.is_empty() {
            self.appended.push(Appended { at, block, places });
        }
    }

    /// Enqueues the way of what is in it to the staging.
    fn fetch(&mut self, cuda: &mut Cuda<G>, slot_bytes: usize) -> Result<(), OpError> {
        let bytes = self.used * slot_bytes;
        let reached = bytes.min(self.staging.registered.bytes());
        for (to, at) in self.staging.registered.pieces(0..reached).into_iter().flatten() {
            let from = self.memory.address().offset(at.start);
            // SAFETY: both hold so many bytes; the staging is read after a wait alone.
            let copied = unsafe { cuda.gpu.copy(from, to, at.len()) };
            cuda.noted(copied)?;
        }
        if reached == bytes {
            return Ok(());
        }
        cuda.download_bytes(&self.memory, reached, &mut self.staging.bytes_mut()[reached..bytes])
    }
}

/// Host memory that the device reaches, where the host allows it.
struct Staging<G: Gpu> {
    // Dropped before the pages.
    registered: HostMemory<G>,
    pages: Vec<HostPage>,
}

/// A page of host memory: what is pinned is whole pages.
#[derive(Clone)]
#[repr(C, align(4096))]
struct HostPage([u8; 4096]);

impl<G: Gpu> Staging<G> {
    fn new(cuda: &Cuda<G>, bytes: usize) -> Staging<G> {
        let mut pages = vec![HostPage([0; 4096]); bytes.div_ceil(4096)];
        let (start, len) = (pages.as_mut_ptr().cast(), size_of_val(&pages[..]));
        // SAFETY: the pages live longer than what is registered, and are read and written through
        // `self` alone, while nothing is enqueued that writes them.
        let registered = unsafe { HostMemory::new(&cuda.gpu, start, len) };
        Staging { registered, pages }
    }

    fn bytes(&self) -> &[u8] {
        let (start, len) = (self.pages.as_ptr().cast(), size_of_val(&self.pages[..]));
        // SAFETY: pages are bytes, without padding between them.
        unsafe { std::slice::from_raw_parts(start, len) }
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        let (start, len) = (self.pages.as_mut_ptr().cast(), size_of_val(&self.pages[..]));
        // SAFETY: as in `bytes`.
        unsafe { std::slice::from_raw_parts_mut(start, len) }
    }
}

impl<G: Gpu> std::fmt::Debug for Staging<G> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} bytes of staging", size_of_val(&self.pages[..]))
    }
}
