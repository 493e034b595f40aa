//! A small pool of persistent threads for one caller at a time, with a low wake-up latency.
//!
//! The caller opens the gate, works on pieces itself, closes the gate and waits for those who came
//! in. A thread that wakes up too late finds the gate closed, so a descheduled thread delays
//! nobody. Threads spin for a short time after a job and then park: an idle pool costs nothing.
//!
//! ```text
//! gate: u64 = epoch << 32 | OPEN | threads inside
//! closed ──run()──> open(epoch+1, 0) ──enter()──> open(n) ──leave()──> open(n-1) ──run() ends──> closed, inside → 0
//! ```
//! Which thread computes a piece does not change its result; pieces are claimed from a counter.
//!
//! Unsafe here, and why: the job borrows the caller's stack, which safe Rust can only lend to
//! threads that end (`std::thread::scope`, tens of microseconds per operation). The gate gives the
//! same guarantee: `run` does not return, nor unwind, before every thread that entered has left.
#![allow(unsafe_code)]

use std::cell::UnsafeCell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::thread::{self, JoinHandle, Thread};
use std::time::{Duration, Instant};

/// How long a thread looks for the next job before it parks: longer than the serial gaps inside a
/// step.
const SPIN: Duration = Duration::from_micros(40);
/// Most threads of a pool; more is a configuration mistake.
const MAX_THREADS: usize = 256;

const OPEN: u64 = 1 << 31;
const INSIDE: u64 = OPEN - 1;
const EPOCH: u64 = 1 << 32;

type Piece<'a> = &'a (dyn Fn(usize) + Sync);

/// What the threads of a run need to know.
#[derive(Clone, Copy)]
struct PoolJob {
    piece: Piece<'static>,
    pieces: usize,
}

struct PoolState {
    gate: AtomicU64,
    next: AtomicUsize,
    quit: AtomicBool,
    job: UnsafeCell<Option<PoolJob>>,
    /// One flag per thread: true from before it parks until somebody wakes it.
    parked: Vec<AtomicBool>,
}

// SAFETY: `job` is written only while the gate is closed and nobody is inside, by the one caller
// (`run` takes `&mut self`), and read only by threads that entered through the open gate; gate
// transitions order the two.
unsafe impl Sync for PoolState {}
// SAFETY: `Job` holds a shared reference to a `Sync` closure, which may be used from any thread.
unsafe impl Send for PoolState {}

/// The pool; dropped, it ends its threads.
pub struct ThreadPool {
    shared: Arc<PoolState>,
    threads: Vec<(Thread, JoinHandle<()>)>,
}

impl ThreadPool {
    /// A pool in which `threads` threads work, the caller included; at least 1 and at most 256.
    pub fn new(threads: usize) -> ThreadPool {
        ThreadPool::started(threads, |_| ())
    }

    /// [`new`](Self::new); each thread calls `start` with its number before it works. The caller is number
    /// 0, and calls nothing.
    pub fn started(threads: usize, start: impl Fn(usize) + Clone + Send + 'static) -> ThreadPool {
        let helpers = threads.clamp(1, MAX_THREADS) - 1;
        let shared = Arc::new(PoolState {
            gate: AtomicU64::new(0),
            next: AtomicUsize::new(0),
            quit: AtomicBool::new(false),
            job: UnsafeCell::new(None),
            parked: (0..helpers).map(|_| AtomicBool::new(false)).collect(),
        });
        let threads = (0..helpers)
            .map_while(|index| {
                let (shared, start) = (Arc::clone(&shared), start.clone());
                // A pool with fewer threads than asked for gives the same results, only later.
                let handle = thread::Builder::new()
                    .name(format!("kernel-{index}"))
                    .spawn(move || {
                        start(index + 1);
                        shared.help(index);
                    })
                    .ok()?;
                Some((handle.thread().clone(), handle))
            })
            .collect();
        ThreadPool { shared, threads }
    }

    /// Threads that work in a run, the caller included.
    pub fn threads(&self) -> usize {
        self.threads.len() + 1
    }

    /// Calls `piece` once with each of `0..pieces`, in no particular order, and returns when all
    /// are done. One piece runs on the caller without waking anybody.
    pub fn run(&mut self, pieces: usize, piece: impl Fn(usize) + Sync) {
        self.share(pieces, true, piece);
    }

    /// [`run`](Self::run), in which threads that sleep take part only if it `wakes` them.
    pub fn share(&mut self, pieces: usize, wakes: bool, piece: impl Fn(usize) + Sync) {
        if pieces <= 1 || self.threads.is_empty() {
            (0..pieces).for_each(piece);
            return;
        }
        let borrowed: Piece<'_> = &piece;
        // SAFETY: only the lifetime changes. `Closing` keeps this frame, and so `piece`, alive
        // until no thread is inside.
        let piece = unsafe { std::mem::transmute::<Piece<'_>, Piece<'static>>(borrowed) };
        let job = PoolJob { piece, pieces };
        // SAFETY: the gate is closed and nobody is inside (the previous run waited for that), so no
        // one else reads.
        unsafe { *self.shared.job.get() = Some(job) };
        self.shared.next.store(0, Ordering::Relaxed);
        let epoch = self.shared.gate.load(Ordering::Relaxed) & !(OPEN | INSIDE);
        // SYNC POINT pool.gate: publishes `job` and `next` to `enter`. SeqCst with `parked`: either
        // we see the flag of a thread that is going to park, or it sees the open gate.
        self.shared.gate.store(epoch.wrapping_add(EPOCH) | OPEN, Ordering::SeqCst);
        let closing = Closing(&self.shared);
        for ((thread, _), parked) in
            self.threads.iter().zip(&self.shared.parked).take(if wakes { pieces - 1 } else { 0 })
        {
            if parked.load(Ordering::SeqCst) && parked.swap(false, Ordering::SeqCst) {
                thread.unpark();
            }
        }
        self.shared.work(job);
        drop(closing);
    }

    /// Splits `out` into pieces of `length` elements (the last may be shorter) and calls
    /// `fill(index, piece)` for each.
    pub fn chunks<T: Send>(
        &mut self,
        out: &mut [T],
        length: usize,
        fill: impl Fn(usize, &mut [T]) + Sync,
    ) {
        let total = out.len();
        let whole = Disjoint::new(out);
        self.run(total.div_ceil(length.max(1)), |index| {
            let start = index * length;
            // SAFETY: `run` calls each index once, and the ranges of different indexes do not
            // overlap.
            let piece = unsafe { whole.range(start, length.min(total - start)) };
            fill(index, piece);
        });
    }
}

impl Drop for ThreadPool {
    fn drop(&mut self) {
        self.shared.quit.store(true, Ordering::SeqCst);
        for (thread, handle) in self.threads.drain(..) {
            thread.unpark();
            // A thread that panicked has aborted the process already.
            let _ = handle.join();
        }
    }
}

impl std::fmt::Debug for ThreadPool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pool").field("threads", &self.threads()).finish()
    }
}

/// Ends a run: closes the gate and waits for those inside, also when the caller's own piece panics.
struct Closing<'a>(&'a PoolState);

impl Drop for Closing<'_> {
    fn drop(&mut self) {
        self.0.gate.fetch_and(!OPEN, Ordering::Relaxed);
        let mut spins = 0u32;
        // SYNC POINT pool.leave: what the threads wrote is visible after this Acquire.
        while self.0.gate.load(Ordering::Acquire) & INSIDE != 0 {
            spins += 1;
            if spins.is_multiple_of(512) { thread::yield_now() } else { std::hint::spin_loop() }
        }
    }
}

impl PoolState {
    /// Life of a helping thread.
    fn help(&self, index: usize) {
        let mut done = 0;
        while let Some(epoch) = self.await_epoch(done, &self.parked[index]) {
            done = epoch;
            if !self.enter(epoch) {
                continue;
            }
            let leaving = Leaving(self);
            // SAFETY: we are inside an open gate, so the caller's write is visible and it writes no
            // more until we left.
            let job = unsafe { *self.job.get() };
            if let Some(job) = job {
                self.work(job);
            }
            drop(leaving);
        }
    }

    /// Waits for an open gate of another epoch than `done`; `None` when the pool ends.
    fn await_epoch(&self, done: u64, parked: &AtomicBool) -> Option<u64> {
        let mut until = Instant::now() + SPIN;
        loop {
            for _ in 0..64 {
                let gate = self.gate.load(Ordering::SeqCst);
                if gate & OPEN != 0 && gate >> 32 != done {
                    return Some(gate >> 32);
                }
                std::hint::spin_loop();
            }
            if self.quit.load(Ordering::SeqCst) {
                return None;
            }
            if Instant::now() < until {
                continue;
            }
            parked.store(true, Ordering::SeqCst);
            // Open for a job that is done but for a piece of another thread, which may have lost
            // its core: nothing to wait for.
            let gate = self.gate.load(Ordering::SeqCst);
            let is_new = gate & OPEN != 0 && gate >> 32 != done;
            if !is_new && !self.quit.load(Ordering::SeqCst) {
                thread::park();
            }
            parked.store(false, Ordering::SeqCst);
            until = Instant::now() + SPIN;
        }
    }

    /// Goes in if the gate of `epoch` is still open.
    fn enter(&self, epoch: u64) -> bool {
        // SYNC POINT pool.gate: pairs with the store in `run`.
        self.gate
            .fetch_update(Ordering::Acquire, Ordering::Relaxed, |gate| {
                (gate & OPEN != 0 && gate >> 32 == epoch).then_some(gate + 1)
            })
            .is_ok()
    }

    /// Claims and computes pieces until none is left.
    fn work(&self, job: PoolJob) {
        loop {
            let index = self.next.fetch_add(1, Ordering::Relaxed);
            if index >= job.pieces {
                return;
            }
            (job.piece)(index);
        }
    }
}

/// Counts a thread out of the gate. A panic in a piece would leave a hole in a result: nobody may
/// use it.
struct Leaving<'a>(&'a PoolState);

impl Drop for Leaving<'_> {
    fn drop(&mut self) {
        if thread::panicking() {
            std::process::abort();
        }
        // SYNC POINT pool.leave: publishes what this thread wrote.
        self.0.gate.fetch_sub(1, Ordering::Release);
    }
}

/// A slice of which several threads write different parts.
pub(crate) struct Disjoint<'a, T> {
    start: *mut T,
    length: usize,
    borrow: std::marker::PhantomData<&'a mut [T]>,
}

// SAFETY: it hands out parts only through `range`, whose caller promises that they do not overlap.
unsafe impl<T: Send> Sync for Disjoint<'_, T> {}

impl<'a, T> Disjoint<'a, T> {
    pub(crate) fn new(slice: &'a mut [T]) -> Self {
        Disjoint {
            start: slice.as_mut_ptr(),
            length: slice.len(),
            borrow: std::marker::PhantomData,
        }
    }

    /// The elements `start..start + length`.
    ///
    /// # Safety
    /// No two parts that are alive at the same time may overlap.
    ///
    /// # Panics
    /// When the range is not inside the slice.
    #[allow(clippy::mut_from_ref, reason = "the caller keeps the parts disjoint")]
    pub(crate) unsafe fn range(&self, start: usize, length: usize) -> &mut [T] {
        assert!(
            start <= self.length && length <= self.length - start,
            "part {start}+{length} of {}",
            self.length
        );
        // SAFETY: the range is inside the slice, which is borrowed mutably for as long as `self`
        // lives.
        let first = unsafe { self.start.add(start) };
        // SAFETY: initialised elements of that slice; the caller promises that no other part
        // overlaps.
        unsafe { std::slice::from_raw_parts_mut(first, length) }
    }

    /// Where the elements `start..start + length` begin, for a kernel that writes some of them.
    ///
    /// Kernels with instructions of their own do.
    ///
    /// # Panics
    /// When the range is not inside the slice.
    #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
    pub(crate) fn pointer(&self, start: usize, length: usize) -> *mut T {
        assert!(
            start <= self.length && length <= self.length - start,
            "part {start}+{length} of {}",
            self.length
        );
        self.start.wrapping_add(start)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_piece_runs_exactly_once_for_any_number_of_threads() {
        for threads in [1, 2, 3, 8] {
            let mut pool = ThreadPool::new(threads);
            for round in 0..2000usize {
                let pieces = round % 37;
                let counts: Vec<AtomicUsize> = (0..pieces).map(|_| AtomicUsize::new(0)).collect();
                pool.run(pieces, |i| {
                    counts[i].fetch_add(1, Ordering::Relaxed);
                });
                assert!(
                    counts.iter().all(|c| c.load(Ordering::Relaxed) == 1),
                    "{threads} threads, round {round}"
                );
            }
        }
    }

    #[test]
    fn work_that_wakes_nobody_is_done_by_whoever_is_awake() {
        let mut pool = ThreadPool::new(3);
        for round in 0..2000usize {
            let counts: Vec<AtomicUsize> = (0..5).map(|_| AtomicUsize::new(0)).collect();
            if round.is_multiple_of(500) {
                thread::park_timeout(4 * SPIN);
            }
            pool.share(5, round.is_multiple_of(7), |i| {
                counts[i].fetch_add(1, Ordering::Relaxed);
            });
            assert!(counts.iter().all(|c| c.load(Ordering::Relaxed) == 1));
        }
    }

    #[test]
    fn a_parked_pool_wakes_up_and_results_are_visible() {
        let mut pool = ThreadPool::new(4);
        for round in 0..20u64 {
            thread::park_timeout(4 * SPIN);
            let mut out = vec![0u64; 1000];
            pool.chunks(&mut out, 7, |index, chunk| {
                for (i, value) in chunk.iter_mut().enumerate() {
                    *value = round + (index * 7 + i) as u64;
                }
            });
            assert!(out.iter().enumerate().all(|(i, &v)| v == round + i as u64));
        }
    }

    #[test]
    fn a_panic_on_the_caller_leaves_the_pool_usable() {
        let mut pool = ThreadPool::new(2);
        let caller = thread::current().id();
        let panics = AtomicBool::new(false);
        let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            pool.run(2, |_| {
                if thread::current().id() == caller {
                    panics.store(true, Ordering::SeqCst);
                    panic!("a piece fails");
                }
                while !panics.load(Ordering::SeqCst) {
                    std::hint::spin_loop();
                }
            });
        }));
        let mut out = vec![0u8; 64];
        pool.chunks(&mut out, 1, |_, chunk| chunk.fill(1));
        assert!(out.iter().all(|&v| v == 1));
        assert!(caught.is_err());
    }
}
