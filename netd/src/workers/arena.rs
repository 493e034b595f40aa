//! Slots of the arena for one request at a time. A request reserves all its slots together or
//! waits: nobody holds some while waiting for others, so that a full arena slows requests down and
//! never locks them up.
//!
//! Short steps of few rows live in fixed small slots, larger ones in a region of their own,
//! everything else in bulk. Each region has its own queue, first come first served: neither memory
//! nor a queue is shared, so bulk never delays short steps.

use std::collections::VecDeque;
use std::sync::Arc;

use parking_lot::Mutex;
use shared::job::SlotRef;
use shared::shm::arena::ArenaMap;
use tokio::sync::oneshot;

use super::allocator::{AllocError, ArenaAllocator, ArenaPlan, PlanError, Region, Slot};

/// Most slots of short steps: three for each of the 256 jobs that one worker can have in flight,
/// and as many for a second.
const MAX_SMALL_SLOTS: u64 = 1536;
/// Rows of one token that fit a small slot: a beam search, or a short speculation.
const SMALL_SLOT_ROWS: u64 = 4;
/// Bytes of a small slot at least: it also holds the body of a job, with its page tables.
const MIN_SMALL_SLOT_BYTES: u64 = 4096;
/// Tokens of all rows up to which a step is short: what Petals calls a short request
/// (`backend.py`).
pub const SHORT_STEP_TOKENS: u64 = 128;
/// Most steps of [`SHORT_STEP_TOKENS`] that their region holds at once: the jobs that one worker can
/// have in flight.
const MAX_SHORT_STEPS: u64 = 256;
/// The arena is divided by this for the small slots, and again for the region of short steps.
const SHORT_SHARE: u64 = 8;

/// What slots are for, which says where they lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SlotClass {
    /// A step of at most [`SHORT_STEP_TOKENS`] tokens.
    Short,
    /// Prefill, forward and backward.
    Bulk,
}

/// The arena of this netd generation. Cheap to clone.
#[derive(Clone, Debug)]
pub struct ArenaMemory {
    inner: Arc<ArenaState>,
}

#[derive(Debug)]
struct ArenaState {
    map: ArenaMap,
    slots: Mutex<Slots>,
}

/// The slots of all regions, and who waits for some.
#[derive(Debug)]
struct Slots {
    allocator: ArenaAllocator,
    small: VecDeque<SlotWaiter>,
    short: VecDeque<SlotWaiter>,
    bulk: VecDeque<SlotWaiter>,
}

#[derive(Debug)]
struct SlotWaiter {
    sizes: Vec<u64>,
    reply: oneshot::Sender<SlotLease>,
}

/// Slots held by a request and its jobs; they go back when the last holder drops the lease.
#[derive(Debug)]
pub struct SlotLease {
    slots: Vec<Slot>,
    arena: Arc<ArenaState>,
}

impl SlotLease {
    /// Slot `index` in the order of the sizes asked for.
    ///
    /// # Panics
    /// If fewer slots were reserved.
    pub fn slot(&self, index: usize) -> SlotRef {
        let slot = &self.slots[index];
        SlotRef { offset: slot.offset(), len: slot.len() }
    }
}

impl Drop for SlotLease {
    fn drop(&mut self) {
        let slots = std::mem::take(&mut self.slots);
        self.arena.free(slots);
    }
}

/// A request that the arena can never hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "request needs {bytes} bytes of shared memory, more than the {most} that this server has for one"
)]
pub struct TooLarge {
    /// Bytes of all its slots.
    pub bytes: u64,
    /// The most that can be reserved together.
    pub most: u64,
}

/// How an arena of `total_bytes` is divided for hidden states of `row_bytes` per token.
///
/// # Errors
/// `PlanError` when it is too small for anything.
pub fn plan(total_bytes: u64, row_bytes: u64) -> Result<ArenaPlan, PlanError> {
    let slot_bytes = row_bytes.saturating_mul(SMALL_SLOT_ROWS).max(MIN_SMALL_SLOT_BYTES);
    let share = total_bytes / SHORT_SHARE;
    let slots = (share / slot_bytes.max(1)).clamp(1, MAX_SMALL_SLOTS);
    let step_bytes = row_bytes.saturating_mul(2 * SHORT_STEP_TOKENS).saturating_add(slot_bytes);
    let short_bytes = share.min(step_bytes.saturating_mul(MAX_SHORT_STEPS));
    ArenaPlan::new(total_bytes, u32::try_from(slots).unwrap_or(u32::MAX), slot_bytes, short_bytes)
}

impl ArenaMemory {
    /// The arena behind `map`, all of it free.
    pub fn new(map: ArenaMap, plan: ArenaPlan) -> ArenaMemory {
        let allocator = ArenaAllocator::new(plan);
        let [small, short, bulk] = std::array::from_fn(|_| VecDeque::new());
        let slots = Slots { allocator, small, short, bulk };
        ArenaMemory { inner: Arc::new(ArenaState { map, slots: Mutex::new(slots) }) }
    }

    /// Reserves one slot per size (none of them 0), waiting until all are free. A future that is
    /// dropped leaves the queue.
    ///
    /// # Errors
    /// [`TooLarge`] when the arena could not hold them even if it were empty.
    pub async fn reserve(&self, sizes: &[u64], class: SlotClass) -> Result<SlotLease, TooLarge> {
        let receiver = {
            let mut arena = self.inner.slots.lock();
            let region = region(arena.allocator.plan(), sizes, class);
            if arena.queue(region).is_empty()
                && let Some(slots) = allocate(&mut arena.allocator, sizes, region)?
            {
                return Ok(SlotLease { slots, arena: self.inner.clone() });
            }
            fits_when_empty(arena.allocator.plan(), sizes, region)?;
            let (reply, receiver) = oneshot::channel();
            arena.queue(region).push_back(SlotWaiter { sizes: sizes.to_vec(), reply });
            receiver
        };
        // The sender is dropped unsent only with the arena itself, which this future keeps.
        receiver.await.map_err(|_| TooLarge { bytes: sizes.iter().sum(), most: 0 })
    }

    /// Whether slots of these sizes would fit into bulk together, were the arena empty.
    pub fn could_hold(&self, sizes: &[u64]) -> bool {
        let plan = *self.inner.slots.lock().allocator.plan();
        fits_when_empty(&plan, sizes, Region::Bulk).is_ok()
    }

    /// Bytes to and from slots.
    pub fn map(&self) -> &ArenaMap {
        &self.inner.map
    }

    /// Slots that are in use.
    pub fn slots_in_use(&self) -> usize {
        self.inner.slots.lock().allocator.slots_in_use()
    }

    /// Requests that wait for slots.
    pub fn waiting(&self) -> usize {
        let arena = self.inner.slots.lock();
        arena.small.len() + arena.short.len() + arena.bulk.len()
    }
}

impl Slots {
    fn queue(&mut self, region: Region) -> &mut VecDeque<SlotWaiter> {
        match region {
            Region::Small => &mut self.small,
            Region::Short => &mut self.short,
            Region::Bulk => &mut self.bulk,
        }
    }
}

impl ArenaState {
    fn free(self: &Arc<Self>, slots: Vec<Slot>) {
        let mut granted = Vec::new();
        {
            let mut arena = self.slots.lock();
            for slot in slots {
                let freed = arena.allocator.free(slot);
                debug_assert!(freed.is_ok(), "a lease frees each of its slots once");
            }
            for region in [Region::Small, Region::Short, Region::Bulk] {
                while let Some(waiting) = arena.queue(region).pop_front() {
                    if waiting.reply.is_closed() {
                        continue;
                    }
                    match allocate(&mut arena.allocator, &waiting.sizes, region) {
                        Ok(Some(slots)) => {
                            granted.push((waiting.reply, SlotLease { slots, arena: self.clone() }));
                        }
                        _ => {
                            arena.queue(region).push_front(waiting);
                            break;
                        }
                    }
                }
            }
        }
        for (reply, lease) in granted {
            let _ = reply.send(lease);
        }
    }
}

/// Where the slots of one request lie. A short step that its region could never hold, as one with
/// deep prompts over many blocks, goes to bulk.
fn region(plan: &ArenaPlan, sizes: &[u64], class: SlotClass) -> Region {
    let is_small = || sizes.iter().all(|&bytes| bytes <= plan.small_slot_bytes());
    match class {
        SlotClass::Bulk => Region::Bulk,
        SlotClass::Short if is_small() => Region::Small,
        SlotClass::Short if fits_when_empty(plan, sizes, Region::Short).is_ok() => Region::Short,
        SlotClass::Short => Region::Bulk,
    }
}

/// All of the slots, or none.
fn allocate(
    allocator: &mut ArenaAllocator,
    sizes: &[u64],
    region: Region,
) -> Result<Option<Vec<Slot>>, TooLarge> {
    let mut slots = Vec::with_capacity(sizes.len());
    for &bytes in sizes {
        match allocator.allocate(region, bytes) {
            Ok(slot) => slots.push(slot),
            Err(error) => {
                slots.into_iter().for_each(|slot| _ = allocator.free(slot));
                return match error {
                    AllocError::Exhausted { .. } => Ok(None),
                    AllocError::TooLarge { max_bytes, .. } => {
                        Err(TooLarge { bytes: sizes.iter().sum(), most: max_bytes })
                    }
                    AllocError::Empty => Err(TooLarge { bytes: 0, most: 0 }),
                };
            }
        }
    }
    Ok(Some(slots))
}

/// Whether an empty region would hold the slots, tried on a fresh allocator of the same plan.
fn fits_when_empty(plan: &ArenaPlan, sizes: &[u64], region: Region) -> Result<(), TooLarge> {
    let mut empty = ArenaAllocator::new(*plan);
    let most = empty.free_bytes(region);
    match allocate(&mut empty, sizes, region)? {
        Some(_) => Ok(()),
        None => Err(TooLarge { bytes: sizes.iter().sum(), most }),
    }
}

#[cfg(test)]
mod tests {
    use super::SlotClass::{Bulk, Short};
    use super::*;
    use futures::FutureExt;
    use shared::shm::segment::MemfdSegment;

    fn arena(total: u64) -> ArenaMemory {
        let segment = MemfdSegment::create("sepal-test-arena", total as usize).unwrap();
        ArenaMemory::new(
            ArenaMap::map(&segment).unwrap(),
            ArenaPlan::new(total, 4, 4096, 256 << 10).unwrap(),
        )
    }

    #[tokio::test]
    async fn all_slots_come_together_and_go_back_together() {
        let arena = arena(1 << 20);
        let lease = arena.reserve(&[4096, 100, 64], Short).await.unwrap();
        assert_eq!((lease.slot(1).len, arena.slots_in_use()), (100, 3));
        drop(lease);
        assert_eq!(arena.slots_in_use(), 0);
    }

    #[tokio::test]
    async fn a_full_region_makes_requests_wait_in_order_and_loses_none() {
        let arena = arena(1 << 20);
        let held = arena.reserve(&[64; 3], Short).await.unwrap();
        let waiters: Vec<_> = (0..10)
            .map(|_| {
                let arena = arena.clone();
                tokio::spawn(async move { arena.reserve(&[64, 64], Short).await.map(drop) })
            })
            .collect();
        while arena.waiting() < 10 {
            tokio::task::yield_now().await;
        }
        // Bulk is not held up by short steps.
        assert!(arena.reserve(&[5000], Bulk).await.is_ok());
        drop(held);
        for waiter in waiters {
            waiter.await.unwrap().unwrap();
        }
        assert_eq!((arena.slots_in_use(), arena.waiting()), (0, 0));
    }

    #[tokio::test]
    async fn what_never_fits_is_refused_at_once() {
        let arena = arena(1 << 20);
        let error = arena.reserve(&[1 << 21], Bulk).await.unwrap_err();
        assert!(error.to_string().contains("2097152 bytes"), "{error}");
        assert!(arena.reserve(&[600_000, 600_000], Bulk).await.is_err());
        assert!(arena.reserve(&[64; 5], Short).await.is_err());
        let error = arena.reserve(&[2 << 20], Short).await.unwrap_err();
        assert_eq!(error.bytes, 2 << 20);
    }

    #[tokio::test]
    async fn a_waiter_that_gave_up_does_not_hold_up_the_next() {
        let arena = arena(1 << 20);
        let held = arena.reserve(&[64; 4], Short).await.unwrap();
        let quitter = tokio::spawn({
            let arena = arena.clone();
            async move { arena.reserve(&[64; 4], Short).await.map(drop) }
        });
        while arena.waiting() == 0 {
            tokio::task::yield_now().await;
        }
        quitter.abort();
        assert!(quitter.await.is_err());
        let next = tokio::spawn({
            let arena = arena.clone();
            async move { arena.reserve(&[64], Short).await.map(drop) }
        });
        while arena.waiting() < 2 {
            tokio::task::yield_now().await;
        }
        drop(held);
        next.await.unwrap().unwrap();
    }

    /// The slots of a short step of `rows` rows of 8 KiB: input, output and body.
    fn step(rows: u64) -> [u64; 3] {
        [rows * 8192, rows * 8192, 600]
    }

    /// What the supervisor's default gives a model of hidden size 4096 in 16 bits.
    fn served() -> ArenaMemory {
        let total = 64 << 20;
        let segment = MemfdSegment::create("sepal-test-arena", total).unwrap();
        ArenaMemory::new(ArenaMap::map(&segment).unwrap(), plan(total as u64, 8192).unwrap())
    }

    #[tokio::test]
    async fn a_flood_of_bulk_leaves_every_short_step_its_slots_at_once() {
        let arena = served();
        // Large ones until bulk is full, then small ones into what is left, then some that wait.
        let mut flood = Vec::new();
        for bytes in [1 << 20, 64 << 10, 64] {
            while let Some(lease) = arena.reserve(&[bytes], Bulk).now_or_never() {
                flood.push(lease.unwrap());
            }
        }
        let waiters: Vec<_> = (0..20)
            .map(|_| {
                let arena = arena.clone();
                tokio::spawn(async move { arena.reserve(&[64; 3], Bulk).await.map(drop) })
            })
            .collect();
        while arena.waiting() < 20 {
            tokio::task::yield_now().await;
        }
        for rows in [1, 4, 5, 32, 128] {
            let held: Vec<_> = (0..3)
                .map(|_| arena.reserve(&step(rows), Short).now_or_never().expect("at once"))
                .collect();
            assert!(held.iter().all(Result::is_ok), "{rows} rows");
        }
        drop(flood);
        for waiter in waiters {
            waiter.await.unwrap().unwrap();
        }
        assert_eq!((arena.slots_in_use(), arena.waiting()), (0, 0));
    }

    #[tokio::test]
    async fn small_requests_of_bulk_take_no_slot_of_short_steps() {
        let arena = served();
        let held: Vec<_> = (0..2000)
            .map(|_| arena.reserve(&[64; 3], Bulk).now_or_never().expect("bulk has room").unwrap())
            .collect();
        let first_of_bulk = held[0].slot(0).offset;
        let few = arena.reserve(&step(4), Short).now_or_never().expect("at once").unwrap();
        let many = arena.reserve(&step(5), Short).now_or_never().expect("at once").unwrap();
        assert!(few.slot(2).offset < many.slot(0).offset);
        assert!(many.slot(2).offset < first_of_bulk);
    }

    #[tokio::test]
    async fn a_short_step_beyond_its_region_goes_to_bulk() {
        let arena = served();
        let prompts = [8192, 8192, 600, 12 << 20];
        let bulk = arena.reserve(&[64], Bulk).await.unwrap().slot(0).offset;
        let step = arena.reserve(&prompts, Short).now_or_never().expect("bulk is free").unwrap();
        assert_eq!(step.slot(0).offset, bulk);
    }
}
