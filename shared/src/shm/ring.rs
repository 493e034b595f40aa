//! One-producer one-consumer ring of 64-byte entries between two processes, and its sleep protocol.
//! Layout and tables of states are in [`layout`](super::layout).
//!
//! [`Producer`] and [`Consumer`] each keep their own index in their own memory and publish it; what
//! they read of the other side is bounded before use, so that a mad or torn writer costs the ring
//! ([`RingCorrupt`]) and nothing else. Entries are copied in and out word by word; an entry whose
//! writer died before it published the index was never pushed. Both types are over anything that
//! dereferences to a [`RingShared`]: a mapped segment ([`pair`](super::pair)) in the executable, an
//! `Arc` of loom atomics in models. Nothing here allocates, locks or makes a system call.
//!
//! # Why no wake-up is lost
//!
//! ```text
//!   producer (push, then must_wake)          consumer (arm)
//!   P1  tail    <- t + 1   (Release)         C1  sleeping <- 1   (Relaxed)
//!   P2  fence(SeqCst)                        C2  fence(SeqCst)
//!   P3  read sleeping      (Relaxed)         C3  read tail       (Acquire)
//!   P4  if it was 1: take it, ring           C4  if empty: sleep until rung, else go on
//! ```
//!
//! The two fences have one order. If P2 is first, C3 sees the new tail and the consumer does not
//! sleep; if C2 is first, P3 sees the 1 and the doorbell is rung. Both may happen, which costs one
//! idle wake-up; neither cannot. Without the fences each side's read could pass its own store, and
//! both would miss. The producer takes the 1 back before it rings, so that a burst of pushes costs
//! one ring; the consumer sets it again before every sleep.
//!
//! A doorbell keeps what was rung until it is answered, so a ring between C3 and the sleep is not
//! lost either. The consumer empties the bell *before* it looks at the ring again, never between
//! `arm` and the sleep.

use std::ops::Deref;

use super::layout::{ENTRY_WORDS, RING_ENTRIES};
use super::sync::{Ordering, fence};

pub use super::layout::RingShared;

/// One entry: eight words whose meaning belongs to `shared::job`.
pub type Entry = [u64; ENTRY_WORDS];

const CAPACITY: u64 = RING_ENTRIES as u64;

/// The other side published an index that no honest history can reach. The ring is of no more use;
/// its worker or netd generation ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("ring is corrupt: the other side's {index} index is {theirs} while ours is {ours}")]
pub struct RingCorrupt {
    /// Which index: `head` or `tail`.
    pub index: &'static str,
    /// What the other side published.
    pub theirs: u64,
    /// The index of this side.
    pub ours: u64,
}

/// Why an entry was not pushed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PushError {
    /// All entries are in use: the caller keeps this one and tries again after a pop.
    #[error("ring is full")]
    Full(Entry),
    /// The ring is of no more use.
    #[error(transparent)]
    Corrupt(#[from] RingCorrupt),
}

/// What [`Consumer::arm`] found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Armed {
    /// An entry is there; the consumer is awake and must not sleep.
    Ready,
    /// The ring is empty and the next push rings the doorbell: sleep on it.
    Sleep,
}

/// The side that pushes. There is one per ring; a second one would overwrite entries (which is
/// wrong but not unsound).
#[derive(Debug)]
pub struct Producer<R> {
    ring: R,
    /// Entries pushed. The copy in the segment is written, never read back.
    tail: u64,
    /// The consumer's index when last read, at most `CAPACITY` behind `tail`.
    head: u64,
}

impl<R: Deref<Target = RingShared>> Producer<R> {
    /// The producer of a fresh ring. (Rings are never taken over: a new generation gets new ones.)
    pub fn new(ring: R) -> Self {
        Producer { ring, tail: 0, head: 0 }
    }

    /// Appends `entry`. The consumer is not woken: see [`must_wake`](Self::must_wake).
    ///
    /// # Errors
    /// [`PushError::Full`] hands the entry back; [`PushError::Corrupt`] when the consumer's index
    /// is impossible.
    pub fn push(&mut self, entry: Entry) -> Result<(), PushError> {
        if self.vacant()? == 0 {
            return Err(PushError::Full(entry));
        }
        let cell = &self.ring.entries[(self.tail % CAPACITY) as usize];
        cell.claim.write();
        for (word, value) in cell.words.iter().zip(entry) {
            word.store(value, Ordering::Relaxed);
        }
        self.tail = self.tail.wrapping_add(1);
        // SYNC POINT ring.tail: publishes the words stored above to the load in
        // Consumer::waiting().
        self.ring.tail.value.store(self.tail, Ordering::Release);
        Ok(())
    }

    /// How many entries can be pushed now.
    ///
    /// # Errors
    /// [`RingCorrupt`] when the consumer's index is impossible.
    pub fn vacant(&mut self) -> Result<usize, RingCorrupt> {
        if self.tail.wrapping_sub(self.head) >= CAPACITY {
            // SYNC POINT ring.head: after this load the consumer is done reading the entries before
            // `head`, so that they may be overwritten; pairs with the store in Consumer::pop().
            let head = self.ring.head.value.load(Ordering::Acquire);
            if self.tail.wrapping_sub(head) > CAPACITY {
                return Err(RingCorrupt { index: "head", theirs: head, ours: self.tail });
            }
            self.head = head;
        }
        Ok((CAPACITY - self.tail.wrapping_sub(self.head)) as usize)
    }

    /// Whether the consumer sleeps, or is about to, and has to be rung now; called after one push
    /// or a burst of them. Answers yes once for each [`Consumer::arm`].
    #[must_use]
    pub fn must_wake(&self) -> bool {
        // Orders the store of `tail` before the load of `sleeping`; pairs with the fence in
        // Consumer::arm().
        fence(Ordering::SeqCst);
        let sleeping = &self.ring.sleeping.value;
        // The load spares the swap, and with it the cache line, while the consumer is awake.
        // Neither publishes anything: the doorbell itself orders what the woken consumer reads.
        sleeping.load(Ordering::Relaxed) != 0 && sleeping.swap(0, Ordering::Relaxed) != 0
    }
}

/// The side that pops. There is one per ring.
#[derive(Debug)]
pub struct Consumer<R> {
    ring: R,
    /// Entries popped. The copy in the segment is written, never read back.
    head: u64,
    /// The producer's index when last read, at most `CAPACITY` ahead of `head`.
    tail: u64,
}

impl<R: Deref<Target = RingShared>> Consumer<R> {
    /// The consumer of a fresh ring.
    pub fn new(ring: R) -> Self {
        Consumer { ring, head: 0, tail: 0 }
    }

    /// Copies the oldest entry out and gives its place back; `None` when the ring is empty.
    ///
    /// # Errors
    /// [`RingCorrupt`] when the producer's index is impossible.
    pub fn pop(&mut self) -> Result<Option<Entry>, RingCorrupt> {
        if self.waiting()? == 0 {
            return Ok(None);
        }
        let cell = &self.ring.entries[(self.head % CAPACITY) as usize];
        cell.claim.read();
        let entry = std::array::from_fn(|word| cell.words[word].load(Ordering::Relaxed));
        self.head = self.head.wrapping_add(1);
        // SYNC POINT ring.head: the words were read before this store; pairs with the load in
        // Producer::vacant().
        self.ring.head.value.store(self.head, Ordering::Release);
        Ok(Some(entry))
    }

    /// How many entries are known to wait; looks at the producer's index only when none is known.
    ///
    /// # Errors
    /// [`RingCorrupt`] when the producer's index is impossible.
    pub fn waiting(&mut self) -> Result<usize, RingCorrupt> {
        if self.tail == self.head {
            // SYNC POINT ring.tail: after this load the words of the entries before `tail` are
            // visible; pairs with the store in Producer::push().
            let tail = self.ring.tail.value.load(Ordering::Acquire);
            if tail.wrapping_sub(self.head) > CAPACITY {
                return Err(RingCorrupt { index: "tail", theirs: tail, ours: self.head });
            }
            self.tail = tail;
        }
        Ok(self.tail.wrapping_sub(self.head) as usize)
    }

    /// Asks to be rung at the next push, then looks once more. After [`Armed::Sleep`] the caller
    /// sleeps on the doorbell; when rung it empties the bell, then pops. In a reactor:
    ///
    /// ```text
    /// loop {
    ///     while let Some(entry) = consumer.pop()? { ... }
    ///     if consumer.arm()? == Armed::Ready { continue }
    ///     let mut guard = async_fd.readable().await?;   // AsyncFd<Doorbell>, also in a select!
    ///     guard.clear_ready();
    ///     consumer.disarm();
    /// }
    /// ```
    ///
    /// # Errors
    /// [`RingCorrupt`] when the producer's index is impossible.
    pub fn arm(&mut self) -> Result<Armed, RingCorrupt> {
        // A swap and not a store, here and in disarm(): the flag has two writers, and loom gives
        // stores that race with a swap no order, which C++ does. It costs nothing beside a sleep.
        self.ring.sleeping.value.swap(1, Ordering::Relaxed);
        // Orders the store of `sleeping` before the load of `tail`; pairs with the fence in
        // Producer::must_wake().
        fence(Ordering::SeqCst);
        if self.waiting()? == 0 {
            return Ok(Armed::Sleep);
        }
        self.disarm();
        Ok(Armed::Ready)
    }

    /// Takes back [`arm`](Self::arm): the consumer is awake for another reason. A ring may still be
    /// on its way.
    pub fn disarm(&mut self) {
        // Only a hint that spares rings; the producer loses nothing if it still sees the 1.
        self.ring.sleeping.value.swap(0, Ordering::Relaxed);
    }
}

#[cfg(all(test, loom))]
mod loom_models;
#[cfg(all(test, not(loom)))]
mod tests;
