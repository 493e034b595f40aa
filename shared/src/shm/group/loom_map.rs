//! The memory of a group in models, in the place of [`map`](super::map): loom's atomics for the
//! words, and buffers of which loom checks that nobody writes them while another may read.

use std::io;
use std::time::Duration;

use loom::cell::UnsafeCell;
use loom::sync::{Arc as LoomArc, Condvar, Mutex};

use super::layout::{Control, GroupShape, LogWord, PARITIES};
use crate::ids::Rank;
use crate::shm::sync::{AtomicU64, Claim};

/// Models do not spin.
pub(super) const MAX_SPIN: Duration = Duration::ZERO;

/// Bytes of an exchange buffer in models.
const BUFFER_BYTES: usize = 16;

/// A group in memory.
#[derive(Debug)]
pub struct GroupMap {
    shared: LoomArc<Shared>,
    rank: usize,
}

/// What the ranks share.
#[derive(Debug)]
pub(super) struct Shared {
    shape: GroupShape,
    pub(super) control: Control,
    pub(super) bells: Vec<Doorbell>,
    buffers: Vec<[UnsafeCell<[u8; BUFFER_BYTES]>; PARITIES]>,
    log: Vec<LogWord>,
}

// SAFETY: that two threads use a buffer at once is what loom is to find.
unsafe impl Sync for Shared {}

impl Shared {
    pub(super) fn new(shape: GroupShape) -> LoomArc<Shared> {
        shape.check().expect("a shape that a group can have");
        assert!(shape.exchange_bytes() <= BUFFER_BYTES);
        let (world, words) = (shape.world(), shape.log_words());
        let buffer = || UnsafeCell::new([0; BUFFER_BYTES]);
        let word = |_| LogWord { value: AtomicU64::new(0), claim: Claim::default() };
        LoomArc::new(Shared {
            shape,
            control: Control::new(),
            bells: (0..world).map(|_| Doorbell::default()).collect(),
            buffers: (0..world).map(|_| [buffer(), buffer()]).collect(),
            log: (0..words).map(word).collect(),
        })
    }
}

impl GroupMap {
    pub(super) fn new(shared: &LoomArc<Shared>, rank: usize) -> std::sync::Arc<GroupMap> {
        std::sync::Arc::new(GroupMap { shared: LoomArc::clone(shared), rank })
    }

    /// Rings the doorbell of `rank`.
    ///
    /// # Errors
    /// Never.
    pub fn ring(&self, rank: Rank) -> io::Result<()> {
        self.shared.bells[usize::from(rank.0)].ring()
    }

    /// What the group is.
    pub fn shape(&self) -> &GroupShape {
        &self.shared.shape
    }

    pub(super) fn rank(&self) -> usize {
        self.rank
    }

    pub(super) fn own_bell(&self) -> io::Result<Doorbell> {
        Ok(self.shared.bells[self.rank].clone())
    }

    pub(super) fn control(&self) -> &Control {
        &self.shared.control
    }

    pub(super) fn log(&self) -> &[LogWord] {
        &self.shared.log
    }

    pub(super) fn write(&self, parity: usize, offset: usize, bytes: &[u8]) {
        self.shared.buffers[self.rank][parity].with_mut(|buffer| {
            // SAFETY: loom checks that nobody else uses the buffer now.
            let buffer = unsafe { &mut *buffer };
            buffer[offset..offset + bytes.len()].copy_from_slice(bytes);
        });
    }

    pub(super) fn read(&self, rank: usize, parity: usize, offset: usize, bytes: &mut [u8]) {
        self.shared.buffers[rank][parity].with(|buffer| {
            // SAFETY: loom checks that nobody writes the buffer now.
            let buffer = unsafe { &*buffer };
            bytes.copy_from_slice(&buffer[offset..offset + bytes.len()]);
        });
    }
}

/// A doorbell as an eventfd is one: remembers that it was rung until it is answered.
#[derive(Clone, Debug, Default)]
pub(super) struct Doorbell {
    bell: LoomArc<(Mutex<bool>, Condvar)>,
}

impl Doorbell {
    pub(super) fn ring(&self) -> io::Result<()> {
        *self.bell.0.lock().expect("no thread panics") = true;
        self.bell.1.notify_one();
        Ok(())
    }

    /// Waits without a limit: a lost wake-up is a deadlock, which loom reports.
    pub(super) fn wait(&self, _: Duration) -> io::Result<bool> {
        let mut rung = self.bell.0.lock().expect("no thread panics");
        while !*rung {
            rung = self.bell.1.wait(rung).expect("no thread panics");
        }
        *rung = false;
        Ok(true)
    }
}
