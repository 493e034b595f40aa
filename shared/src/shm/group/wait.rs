//! How a rank waits for another: it looks, spins for a moment where cores allow, then sleeps on its
//! doorbell. However it waits, it sees an abort, and while it sleeps it reports that it is alive.
//!
//! # Why no wake-up is lost
//!
//! ```text
//!   rank p (publish, then wake)               rank r (sleep until p has published)
//!   P1  epoch or tail <- n  (Release)         R1  sleeping <- p + 1      (Relaxed)
//!   P2  fence(SeqCst)                         R2  fence(SeqCst)
//!   P3  read r's sleeping   (Relaxed)         R3  read p's epoch or tail (Acquire)
//!   P4  if p + 1: take it, ring r             R4  if not there: sleep until rung, else go on
//! ```
//!
//! The two fences have one order, as in [`ring`](crate::shm::ring): either R3 sees n, or P3 sees
//! p + 1. P4 may take a flag that r set anew for another rank q between P3 and P4. Then q does not
//! ring, but p does, and r looks at what it waits for after every ring.
//!
//! An abort rings all doorbells after it set the word. A doorbell remembers the ring, so that a
//! rank that looked at the word too early does not sleep.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::GroupError;
use super::layout::{Sleep, rank_id};
use super::map::{Doorbell, GroupMap, MAX_SPIN};
use crate::shm::ring::Armed;
use crate::shm::sync::{AtomicU64, Ordering, fence};

/// Looks between two looks at the clock (which takes as long as about 30 of them).
const SPINS_PER_CLOCK: u32 = 32;

/// How a rank waits for others.
pub struct WaitPolicy {
    /// Longest spin before a sleep, at most 50 µs. Zero where the threads of all ranks together
    /// exceed the cores.
    pub spin: Duration,
    /// Longest sleep between two calls of `heartbeat`.
    pub interval: Duration,
    /// Reports that this rank is alive although it waits: called after every sleep.
    pub heartbeat: Box<dyn Fn() + Send>,
}

impl std::fmt::Debug for WaitPolicy {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("WaitPolicy")
            .field("spin", &self.spin)
            .field("interval", &self.interval)
            .finish_non_exhaustive()
    }
}

/// What a rank sleeps for. Each has a word of its own, so that two threads of a rank may wait, one
/// for each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SleepPurpose {
    Exchange,
    Log,
}

impl SleepPurpose {
    fn word(self, sleep: &Sleep) -> &AtomicU64 {
        match self {
            SleepPurpose::Exchange => &sleep.exchange,
            SleepPurpose::Log => &sleep.log,
        }
    }
}

/// Why a sleep ended.
enum Woken {
    Ready,
    Rung,
    TimedOut,
}

/// One rank, as it waits for one purpose.
#[derive(Debug)]
pub(super) struct Waiter {
    map: Arc<GroupMap>,
    rank: usize,
    purpose: SleepPurpose,
    bell: Doorbell,
    policy: WaitPolicy,
}

impl Waiter {
    pub(super) fn new(
        map: &Arc<GroupMap>,
        purpose: SleepPurpose,
        policy: WaitPolicy,
    ) -> io::Result<Waiter> {
        Ok(Waiter {
            bell: map.own_bell()?,
            rank: map.rank(),
            map: Arc::clone(map),
            purpose,
            policy,
        })
    }

    pub(super) fn map(&self) -> &GroupMap {
        &self.map
    }

    /// The rank that waits.
    pub(super) fn rank(&self) -> usize {
        self.rank
    }

    /// All ranks but this one, those after it first, so that ranks do not all use one at once.
    pub(super) fn peers(&self) -> impl Iterator<Item = usize> + use<> {
        let (rank, world) = (self.rank, self.map.shape().world());
        (rank + 1..world).chain(0..rank)
    }

    /// Fails once the group was aborted.
    pub(super) fn check_abort(&self) -> Result<(), GroupError> {
        // Nothing is published with the word.
        match self.map.control().aborted.value.load(Ordering::Relaxed) {
            0 => Ok(()),
            _ => Err(GroupError::Aborted),
        }
    }

    /// Waits until `ready`, which depends on rank `on` alone. The supervisor sees for whom.
    pub(super) fn wait_for(
        &self,
        on: usize,
        mut ready: impl FnMut() -> Result<bool, GroupError>,
    ) -> Result<(), GroupError> {
        if self.look_spinning(&mut ready)? {
            return Ok(());
        }
        let waits_for = &self.sleep_word().waits_for;
        waits_for.store(on as u64 + 1, Ordering::Relaxed);
        let outcome = loop {
            match self.sleep(on, self.policy.interval, &mut ready) {
                Ok(Woken::Ready) => break Ok(()),
                Ok(Woken::Rung | Woken::TimedOut) => {}
                Err(error) => break Err(error),
            }
        };
        waits_for.store(0, Ordering::Relaxed);
        outcome
    }

    /// Waits for work: until `ready`, which depends on rank `on` alone, until the bell is rung for
    /// another reason, or for `timeout`. Tells whether it is ready.
    pub(super) fn wait_idle(
        &self,
        on: usize,
        timeout: Duration,
        mut ready: impl FnMut() -> Result<bool, GroupError>,
    ) -> Result<bool, GroupError> {
        if self.look_spinning(&mut ready)? {
            return Ok(true);
        }
        let start = Instant::now();
        loop {
            let left = timeout.saturating_sub(start.elapsed());
            match self.sleep(on, left.min(self.policy.interval), &mut ready)? {
                Woken::Ready => return Ok(true),
                Woken::Rung => return ready(),
                Woken::TimedOut if start.elapsed() >= timeout => return ready(),
                Woken::TimedOut => {}
            }
        }
    }

    /// Spins until `ready`, which depends on rank `on` alone; else asks to be rung when it
    /// publishes. After [`Armed::Sleep`] the caller sleeps on the bell, then calls
    /// [`disarm`](Self::disarm). The supervisor sees for whom it waits.
    pub(super) fn arm(
        &self,
        on: usize,
        mut ready: impl FnMut() -> Result<bool, GroupError>,
    ) -> Result<Armed, GroupError> {
        if self.look_spinning(&mut ready)? {
            return Ok(Armed::Ready);
        }
        self.sleep_word().waits_for.store(on as u64 + 1, Ordering::Relaxed);
        let look = self.announce_sleep(on, &mut ready);
        if !matches!(look, Ok(false)) {
            self.disarm();
        }
        Ok(if look? { Armed::Ready } else { Armed::Sleep })
    }

    /// Takes back [`arm`](Self::arm). A ring may still be on its way.
    pub(super) fn disarm(&self) {
        let sleep = self.sleep_word();
        self.purpose.word(sleep).swap(0, Ordering::Relaxed);
        sleep.waits_for.store(0, Ordering::Relaxed);
    }

    /// Where the rings for this rank arrive, an abort among them.
    #[cfg(not(loom))]
    pub(super) fn bell(&self) -> &Doorbell {
        &self.bell
    }

    fn look_spinning(
        &self,
        ready: &mut impl FnMut() -> Result<bool, GroupError>,
    ) -> Result<bool, GroupError> {
        if ready()? {
            return Ok(true);
        }
        let limit = self.policy.spin.min(MAX_SPIN);
        if limit.is_zero() {
            return Ok(false);
        }
        let start = Instant::now();
        while start.elapsed() < limit {
            self.check_abort()?;
            for _ in 0..SPINS_PER_CLOCK {
                std::hint::spin_loop();
                if ready()? {
                    return Ok(true);
                }
            }
        }
        Ok(false)
    }

    /// One sleep of at most `timeout`, unless it is ready already.
    fn sleep(
        &self,
        on: usize,
        timeout: Duration,
        ready: &mut impl FnMut() -> Result<bool, GroupError>,
    ) -> Result<Woken, GroupError> {
        let look = self.announce_sleep(on, ready);
        let slept = match look {
            Ok(false) => Some(self.bell.wait(timeout)),
            Ok(true) | Err(_) => None,
        };
        self.purpose.word(self.sleep_word()).swap(0, Ordering::Relaxed);
        let Some(rung) = slept else {
            return look.map(|_| Woken::Ready);
        };
        (self.policy.heartbeat)();
        Ok(if rung? { Woken::Rung } else { Woken::TimedOut })
    }

    /// Says that this rank sleeps until rank `on` publishes, then looks once more.
    fn announce_sleep(
        &self,
        on: usize,
        ready: &mut impl FnMut() -> Result<bool, GroupError>,
    ) -> Result<bool, GroupError> {
        // Swaps and not stores, since the word has several writers: see ring::Consumer::arm().
        self.purpose.word(self.sleep_word()).swap(on as u64 + 1, Ordering::Relaxed);
        // Orders the store of `sleeping` before the loads of `ready`; pairs with the fence in
        // wake_peers().
        fence(Ordering::SeqCst);
        self.check_abort()?;
        ready()
    }

    fn sleep_word(&self) -> &Sleep {
        &self.map.control().ranks[self.rank].sleep
    }

    /// Rings every rank that sleeps until this one publishes; called after it did.
    pub(super) fn wake_peers(&self) -> Result<(), GroupError> {
        // Orders what was published before the loads of `sleeping`; pairs with the fence in
        // sleep().
        fence(Ordering::SeqCst);
        self.peers().try_for_each(|peer| {
            let sleeping = self.purpose.word(&self.map.control().ranks[peer].sleep);
            // The load spares the swap, and with it the cache line, while the peer is awake. The
            // doorbell orders what the woken peer reads.
            let sleeps_for_us = sleeping.load(Ordering::Relaxed) == self.rank as u64 + 1;
            if sleeps_for_us && sleeping.swap(0, Ordering::Relaxed) != 0 {
                self.map.ring(rank_id(peer))?;
            }
            Ok(())
        })
    }
}
