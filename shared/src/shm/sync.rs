//! The atomics of shared memory: std in the executable, loom in models, and in unit tests std with
//! a counter that kills the process before its n-th store. Rings and board compile against this
//! module alone, so that what is modelled and what is killed in tests is the very source that
//! serves.

#[cfg(loom)]
pub(super) use loom::sync::atomic::{AtomicU64, Ordering, fence};

#[cfg(not(any(loom, test)))]
pub(super) use std::sync::atomic::{AtomicU64, Ordering, fence};

#[cfg(all(test, not(loom)))]
pub(super) use mortal::{AtomicU64, Ordering, die_at_store, fence};

/// Who uses a piece of memory when. Loom checks it: of two uses that are not ordered by a SYNC
/// POINT, both must be reads. (Entries are relaxed atomics, whose races loom would let pass.)
/// Elsewhere it is nothing.
#[derive(Debug, Default)]
pub(super) struct UseClaim {
    #[cfg(loom)]
    cell: loom::cell::UnsafeCell<()>,
}

// SAFETY: the cell holds nothing; that threads use it at once is what loom is to find.
#[cfg(loom)]
unsafe impl Sync for UseClaim {}

impl UseClaim {
    /// The memory is being read.
    pub(super) fn read(&self) {
        #[cfg(loom)]
        self.cell.with(|_| ());
    }

    /// The memory is being written.
    pub(super) fn write(&self) {
        #[cfg(loom)]
        self.cell.with_mut(|_| ());
    }
}

/// Atomics whose process can be told to die at a store.
#[cfg(all(test, not(loom)))]
mod mortal {
    use std::cell::Cell;
    use std::sync::atomic;
    pub use std::sync::atomic::{Ordering, fence};

    use nix::sys::signal::{Signal, kill};
    use nix::unistd::Pid;

    thread_local! {
        static STORES_LEFT: Cell<Option<u64>> = const { Cell::new(None) };
    }

    /// Lets this thread do `stores` more stores; the one after them kills the process instead of
    /// happening.
    pub fn die_at_store(stores: u64) {
        STORES_LEFT.set(Some(stores));
    }

    fn count_store() {
        match STORES_LEFT.get() {
            None => {}
            Some(0) => kill(Pid::this(), Signal::SIGKILL).expect("a process may kill itself"),
            Some(left) => STORES_LEFT.set(Some(left - 1)),
        }
    }

    /// `std::sync::atomic::AtomicU64` that counts its stores.
    #[repr(transparent)]
    #[derive(Debug)]
    pub struct AtomicU64(atomic::AtomicU64);

    impl AtomicU64 {
        pub fn new(value: u64) -> AtomicU64 {
            AtomicU64(atomic::AtomicU64::new(value))
        }

        pub fn load(&self, order: Ordering) -> u64 {
            self.0.load(order)
        }

        pub fn store(&self, value: u64, order: Ordering) {
            count_store();
            self.0.store(value, order);
        }

        pub fn swap(&self, value: u64, order: Ordering) -> u64 {
            count_store();
            self.0.swap(value, order)
        }
    }
}
