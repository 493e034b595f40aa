//! Slots of the arena for one request at a time. A request reserves all its slots together or waits: nobody holds some
//! while waiting for others, so that a full arena slows requests down and never locks them up.
//!
//! Requests whose slots are all small live in the region of small slots, the others in bulk; each region has its own queue,
//! first come first served, so that bulk never delays decode.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use shared::job::SlotRef;
use shared::shm::allocator::{AllocError, ArenaAllocator, ArenaPlan, PlanError, Slot};
use shared::shm::arena::ArenaMap;
use tokio::sync::oneshot;

/// Most slots of decode steps: three for each of the 256 jobs that one worker can have in flight, and as many for a second.
const MAX_SMALL_SLOTS: u64 = 1536;
/// Rows of one token that fit a small slot: a beam search, or a short speculation.
const SMALL_SLOT_ROWS: u64 = 4;
/// A small slot also holds the body of a job over this many pages.
const MIN_SMALL_SLOT_BYTES: u64 = 4096;

/// The arena of this netd generation. Cheap to clone.
#[derive(Clone, Debug)]
pub struct ArenaMemory {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    map: ArenaMap,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    allocator: ArenaAllocator,
    small: VecDeque<Waiting>,
    bulk: VecDeque<Waiting>,
}

#[derive(Debug)]
struct Waiting {
    sizes: Vec<u64>,
    reply: oneshot::Sender<SlotLease>,
}

/// Slots held by a request and its jobs; they go back when the last holder drops the lease.
#[derive(Debug)]
pub struct SlotLease {
    slots: Vec<Slot>,
    arena: Arc<Inner>,
}

impl SlotLease {
    /// Slot `index` in the order of the sizes asked for.
    ///
    /// # Panics
    /// If fewer slots were reserved.
    pub fn slot(&self, index: usize) -> SlotRef {
        let slot = &self.slots[index];
        SlotRef {
            offset: slot.offset(),
            len: slot.len(),
        }
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
/// [`PlanError`] when it is too small for anything.
pub fn plan(total_bytes: u64, row_bytes: u64) -> Result<ArenaPlan, PlanError> {
    let slot_bytes = row_bytes
        .saturating_mul(SMALL_SLOT_ROWS)
        .max(MIN_SMALL_SLOT_BYTES);
    let slots = (total_bytes / 4 / slot_bytes.max(1)).clamp(1, MAX_SMALL_SLOTS);
    ArenaPlan::new(
        total_bytes,
        u32::try_from(slots).unwrap_or(u32::MAX),
        slot_bytes,
    )
}

impl ArenaMemory {
    /// The arena behind `map`, all of it free.
    pub fn new(map: ArenaMap, plan: ArenaPlan) -> ArenaMemory {
        let allocator = ArenaAllocator::new(plan);
        let state = State {
            allocator,
            small: VecDeque::new(),
            bulk: VecDeque::new(),
        };
        ArenaMemory {
            inner: Arc::new(Inner {
                map,
                state: Mutex::new(state),
            }),
        }
    }

    /// Reserves one slot per size (none of them 0), waiting until all are free. A future that is dropped leaves the queue.
    ///
    /// # Errors
    /// [`TooLarge`] when the arena could not hold them even if it were empty.
    pub async fn reserve(&self, sizes: &[u64]) -> Result<SlotLease, TooLarge> {
        let receiver = {
            let mut state = self.inner.lock();
            let small = is_small(state.allocator.plan(), sizes);
            if state.queue(small).is_empty()
                && let Some(slots) = allocate(&mut state.allocator, sizes, small)?
            {
                return Ok(SlotLease {
                    slots,
                    arena: self.inner.clone(),
                });
            }
            check_size(&state.allocator, sizes, small)?;
            let (reply, receiver) = oneshot::channel();
            state.queue(small).push_back(Waiting {
                sizes: sizes.to_vec(),
                reply,
            });
            receiver
        };
        // The sender is dropped unsent only with the arena itself, which this future keeps.
        receiver.await.map_err(|_| TooLarge {
            bytes: sizes.iter().sum(),
            most: 0,
        })
    }

    /// Whether slots of these sizes would fit together, were the arena empty.
    pub fn could_hold(&self, sizes: &[u64]) -> bool {
        let state = self.inner.lock();
        let small = is_small(state.allocator.plan(), sizes);
        check_size(&state.allocator, sizes, small).is_ok()
    }

    /// Bytes to and from slots.
    pub fn map(&self) -> &ArenaMap {
        &self.inner.map
    }

    /// Slots that are in use.
    pub fn slots_in_use(&self) -> usize {
        self.inner.lock().allocator.slots_in_use()
    }

    /// Requests that wait for slots.
    pub fn waiting(&self) -> usize {
        let state = self.inner.lock();
        state.small.len() + state.bulk.len()
    }
}

impl State {
    fn queue(&mut self, small: bool) -> &mut VecDeque<Waiting> {
        if small {
            &mut self.small
        } else {
            &mut self.bulk
        }
    }
}

impl Inner {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn free(self: &Arc<Self>, slots: Vec<Slot>) {
        let mut granted = Vec::new();
        {
            let mut state = self.lock();
            for slot in slots {
                let freed = state.allocator.free(slot);
                debug_assert!(freed.is_ok(), "a lease frees each of its slots once");
            }
            for small in [true, false] {
                while let Some(waiting) = state.queue(small).pop_front() {
                    if waiting.reply.is_closed() {
                        continue;
                    }
                    match allocate(&mut state.allocator, &waiting.sizes, small) {
                        Ok(Some(slots)) => {
                            granted.push((
                                waiting.reply,
                                SlotLease {
                                    slots,
                                    arena: self.clone(),
                                },
                            ));
                        }
                        _ => {
                            state.queue(small).push_front(waiting);
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

fn is_small(plan: &ArenaPlan, sizes: &[u64]) -> bool {
    sizes.iter().all(|&bytes| bytes <= plan.small_slot_bytes())
}

/// All of the slots, or none.
fn allocate(
    allocator: &mut ArenaAllocator,
    sizes: &[u64],
    small: bool,
) -> Result<Option<Vec<Slot>>, TooLarge> {
    let mut slots = Vec::with_capacity(sizes.len());
    for &bytes in sizes {
        let slot = if small {
            allocator.allocate_small(bytes)
        } else {
            allocator.allocate_bulk(bytes)
        };
        match slot {
            Ok(slot) => slots.push(slot),
            Err(error) => {
                slots.into_iter().for_each(|slot| _ = allocator.free(slot));
                return match error {
                    AllocError::Exhausted { .. } => Ok(None),
                    AllocError::TooLarge { max_bytes, .. } => Err(TooLarge {
                        bytes: sizes.iter().sum(),
                        most: max_bytes,
                    }),
                    AllocError::Empty => Err(TooLarge { bytes: 0, most: 0 }),
                };
            }
        }
    }
    Ok(Some(slots))
}

/// Whether an empty arena would hold the slots, tried on a fresh allocator of the same plan.
fn check_size(allocator: &ArenaAllocator, sizes: &[u64], small: bool) -> Result<(), TooLarge> {
    let mut empty = ArenaAllocator::new(*allocator.plan());
    match allocate(&mut empty, sizes, small)? {
        Some(_) => Ok(()),
        None => {
            let region = match small {
                true => shared::shm::allocator::Region::Small,
                false => shared::shm::allocator::Region::Bulk,
            };
            let most = ArenaAllocator::new(*allocator.plan()).free_bytes(region);
            Err(TooLarge {
                bytes: sizes.iter().sum(),
                most,
            })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use shared::shm::segment::MemfdSegment;

    fn arena(total: u64) -> ArenaMemory {
        let segment = MemfdSegment::create("sepal-test-arena", total as usize).unwrap();
        ArenaMemory::new(
            ArenaMap::map(&segment).unwrap(),
            ArenaPlan::new(total, 4, 4096).unwrap(),
        )
    }

    #[tokio::test]
    async fn all_slots_come_together_and_go_back_together() {
        let arena = arena(1 << 20);
        let lease = arena.reserve(&[4096, 100, 64]).await.unwrap();
        assert_eq!((lease.slot(1).len, arena.slots_in_use()), (100, 3));
        drop(lease);
        assert_eq!(arena.slots_in_use(), 0);
    }

    #[tokio::test]
    async fn a_full_region_makes_requests_wait_in_order_and_loses_none() {
        let arena = arena(1 << 20);
        let held = arena.reserve(&[64; 3]).await.unwrap();
        let waiters: Vec<_> = (0..10)
            .map(|_| {
                let arena = arena.clone();
                tokio::spawn(async move { arena.reserve(&[64, 64]).await.map(drop) })
            })
            .collect();
        while arena.waiting() < 10 {
            tokio::task::yield_now().await;
        }
        // Bulk is not held up by decode.
        assert!(arena.reserve(&[5000]).await.is_ok());
        drop(held);
        for waiter in waiters {
            waiter.await.unwrap().unwrap();
        }
        assert_eq!((arena.slots_in_use(), arena.waiting()), (0, 0));
    }

    #[tokio::test]
    async fn what_never_fits_is_refused_at_once() {
        let arena = arena(1 << 20);
        let error = arena.reserve(&[1 << 21]).await.unwrap_err();
        assert!(error.to_string().contains("2097152 bytes"), "{error}");
        assert!(arena.reserve(&[600_000, 600_000]).await.is_err());
        assert!(arena.reserve(&[64; 5]).await.is_err());
    }

    #[tokio::test]
    async fn a_waiter_that_gave_up_does_not_hold_up_the_next() {
        let arena = arena(1 << 20);
        let held = arena.reserve(&[64; 4]).await.unwrap();
        let quitter = tokio::spawn({
            let arena = arena.clone();
            async move { arena.reserve(&[64; 4]).await.map(drop) }
        });
        while arena.waiting() == 0 {
            tokio::task::yield_now().await;
        }
        quitter.abort();
        assert!(quitter.await.is_err());
        let next = tokio::spawn({
            let arena = arena.clone();
            async move { arena.reserve(&[64]).await.map(drop) }
        });
        while arena.waiting() < 2 {
            tokio::task::yield_now().await;
        }
        drop(held);
        next.await.unwrap().unwrap();
    }
}
