//! What happens when a mapped file is cut short (or its disk fails): the next read of what is gone
//! raises SIGBUS. The process cannot go on, but it can say why. Copying every checkpoint into
//! sealed memory would prevent it at the price of the memory and the start-up time that mapping
//! saves; a file that is *overwritten* in place is beyond either, since the copy could be taken in
//! the middle.
//!
//! ```text
//! the thread that read: handler -> is the address in a mapped file? -> its index into a pipe, then waits
//! the guard thread:                                                    reads the pipe -> tells the supervisor -> exits
//! ```
//! The handler does only what a signal handler may: it reads atomics, writes to a pipe and sleeps.
//! If the guard thread does not end the process in time, the handler does. A SIGBUS anywhere else
//! takes its usual course.

use std::io::{PipeReader, Read};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicI32, AtomicUsize, Ordering};

use nix::libc;
use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction};
use parking_lot::Mutex;
use shared::exit::ExitReason;

/// Most files that are told apart; a model has hundreds. Of more, some would not be named.
const MAX_FILES: usize = 4096;

/// What the handler leaves to the guard thread before it ends the process itself.
const PATIENCE_S: i64 = 3;

/// A mapping; both zero while the entry is free.
struct MappedRange {
    start: AtomicUsize,
    end: AtomicUsize,
}

static RANGES: [MappedRange; MAX_FILES] =
    [const { MappedRange { start: AtomicUsize::new(0), end: AtomicUsize::new(0) } }; MAX_FILES];

/// Paths of the ranges; never touched by the handler.
static PATHS: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

/// Where the handler writes; -1 while nobody reads.
static PIPE: AtomicI32 = AtomicI32::new(-1);

/// A mapping that is known here; forgotten when it is dropped.
#[derive(Debug)]
pub(super) struct KnownMapping(Option<usize>);

impl KnownMapping {
    /// Notes that `len` bytes at `start` are those of `path`.
    pub(super) fn new(start: usize, len: usize, path: &Path) -> KnownMapping {
        let mut paths = PATHS.lock();
        let free = RANGES.iter().position(|p| p.end.load(Ordering::Relaxed) == 0);
        let Some(index) = free else {
            return KnownMapping(None);
        };
        if paths.len() <= index {
            paths.resize(index + 1, PathBuf::new());
        }
        path.clone_into(&mut paths[index]);
        RANGES[index].start.store(start, Ordering::Relaxed);
        // SYNC POINT guard.range: publishes `start` to the handler.
        RANGES[index].end.store(start + len, Ordering::Release);
        KnownMapping(Some(index))
    }
}

impl Drop for KnownMapping {
    fn drop(&mut self) {
        let _paths = PATHS.lock();
        if let Some(index) = self.0 {
            RANGES[index].end.store(0, Ordering::Release);
        }
    }
}

/// From now on a mapped file that lost what is read from it ends this process with
/// [`ExitReason::WeightsChanged`], after `tell` was given a sentence for the operator. Only the
/// first call counts.
///
/// # Errors
/// When the pipe, the thread or the handler cannot be made.
pub fn install(tell: impl Fn(String) + Send + 'static) -> std::io::Result<()> {
    let (mut reader, writer) = std::io::pipe()?;
    let writer = OwnedFd::from(writer);
    let first = PIPE.compare_exchange(-1, writer.as_raw_fd(), Ordering::SeqCst, Ordering::SeqCst);
    if first.is_err() {
        return Ok(());
    }
    // The handler may write at any time until the process ends.
    std::mem::forget(writer);
    std::thread::Builder::new()
        .name("weights-guard".to_owned())
        .spawn(move || watch(&mut reader, tell))?;
    let action = SigAction::new(
        SigHandler::SigAction(on_bus_error),
        SaFlags::SA_SIGINFO | SaFlags::SA_ONSTACK,
        SigSet::empty(),
    );
    // SAFETY: the handler does only what is allowed in one (see the head of this file).
    unsafe { sigaction(Signal::SIGBUS, &action) }?;
    Ok(())
}

/// Waits for the handler's word; returns only when there will be none.
fn watch(reader: &mut PipeReader, tell: impl Fn(String)) {
    let mut index = [0; 4];
    if reader.read_exact(&mut index).is_err() {
        return;
    }
    let index = u32::from_le_bytes(index) as usize;
    let paths = PATHS.lock();
    let path = paths.get(index).cloned().unwrap_or_default();
    drop(paths);
    tell(format!(
        "checkpoint file {path:?} changed while mapped, or cannot be read any more; put the whole file back and start again"
    ));
    end_now();
}

extern "C" fn on_bus_error(_: libc::c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // SAFETY: the kernel passes a filled siginfo to a handler with SA_SIGINFO.
    let info = unsafe { &*info };
    // SAFETY: SIGBUS has an address.
    let address = unsafe { info.si_addr() }.addr();
    let inside = |range: &MappedRange| {
        // SYNC POINT guard.range: pairs with the store in Known::new.
        let end = range.end.load(Ordering::Acquire);
        (range.start.load(Ordering::Relaxed)..end).contains(&address)
    };
    let Some(index) = RANGES.iter().position(inside) else {
        // Not ours: the read is repeated after this handler, and ends the process as it would have.
        // SAFETY: resetting a handler touches no memory of this process.
        unsafe { libc::signal(libc::SIGBUS, libc::SIG_DFL) };
        return;
    };
    let word = (index as u32).to_le_bytes();
    // SAFETY: `word` holds 4 bytes; the pipe stays open for the life of the process.
    unsafe { libc::write(PIPE.load(Ordering::SeqCst), word.as_ptr().cast(), word.len()) };
    let patience = libc::timespec { tv_sec: PATIENCE_S, tv_nsec: 0 };
    // SAFETY: a valid time, and nothing to write the rest to.
    unsafe { libc::nanosleep(&patience, std::ptr::null_mut()) };
    end_now();
}

fn end_now() -> ! {
    // SAFETY: ends the process without running anything of it: other threads may be in the handler.
    unsafe { libc::_exit(i32::from(ExitReason::WeightsChanged.code())) }
}
