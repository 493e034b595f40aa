//! The doorbell of a ring: an eventfd that both sides hold. It remembers that it was rung until it
//! is answered. The supervisor makes it and hands a copy of the descriptor to each side; any thread
//! may ring it (a worker's control thread rings the submission bell to get the executor's
//! attention).

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use nix::sys::eventfd::{EfdFlags, EventFd};

use super::layout::RingShared;
use super::ring::{Armed, Consumer, Producer, RingCorrupt};

/// Longest spin before a sleep: about what a sleep and a wake-up cost in a virtual machine (37 us
/// there and back, measured), so that a spin in vain at most doubles the cost of the wait.
pub const MAX_SPIN: Duration = Duration::from_micros(50);

/// Looks at the ring between two looks at the clock (which takes as long as about 30 of them).
const SPINS_PER_CLOCK: u32 = 32;

/// An eventfd, non-blocking and closed on exec.
///
/// A thread waits for it through an edge-triggered epoll of its own: every ring is an edge, so that
/// the eventfd need not be read after a wake-up, which saves one of three system calls of a hop.
/// The same holds in the reactor of an async runtime (mio wakes itself that way): there,
/// [`clear`](Self::clear) can be left out.
#[derive(Debug)]
pub struct Doorbell {
    fd: EventFd,
    /// Made at the first wait; who only rings, or waits in a reactor, has none.
    edges: OnceLock<Epoll>,
}

impl Doorbell {
    /// A new doorbell, not rung.
    ///
    /// # Errors
    /// When the process or the system is out of descriptors.
    pub fn new() -> io::Result<Doorbell> {
        let flags = EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK;
        let fd = EventFd::from_flags(flags)?;
        Ok(Doorbell { fd, edges: OnceLock::new() })
    }

    /// The doorbell behind a descriptor that came from another process.
    ///
    /// # Errors
    /// When it cannot be made non-blocking, or is no eventfd.
    pub fn from_fd(fd: OwnedFd) -> io::Result<Doorbell> {
        let flags = OFlag::from_bits_retain(fcntl(&fd, FcntlArg::F_GETFL)?);
        fcntl(&fd, FcntlArg::F_SETFL(flags | OFlag::O_NONBLOCK))?;
        let target = std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd()))?;
        if target.as_os_str() != "anon_inode:[eventfd]" {
            let message =
                format!("descriptor of a doorbell is {}, not an eventfd", target.display());
            return Err(io::Error::new(io::ErrorKind::InvalidInput, message));
        }
        // SAFETY: the descriptor is owned here and was just seen to be an eventfd.
        let fd = unsafe { EventFd::from_owned_fd(fd) };
        Ok(Doorbell { fd, edges: OnceLock::new() })
    }

    /// Another descriptor of the same doorbell, to be sent to the other side.
    ///
    /// # Errors
    /// When the process is out of descriptors.
    pub fn try_clone(&self) -> io::Result<OwnedFd> {
        self.fd.as_fd().try_clone_to_owned()
    }

    /// Rings. A bell that was rung and not answered stays rung.
    ///
    /// # Errors
    /// Only when the descriptor is broken.
    pub fn ring(&self) -> io::Result<()> {
        match self.fd.write(1) {
            // EAGAIN: the counter is at its limit, so the bell is certainly rung.
            Ok(_) | Err(Errno::EAGAIN) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Empties the bell; tells whether it had been rung.
    ///
    /// # Errors
    /// Only when the descriptor is broken.
    pub fn clear(&self) -> io::Result<bool> {
        match self.fd.read() {
            Ok(_) => Ok(true),
            Err(Errno::EAGAIN | Errno::EINTR) => Ok(false),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Sleeps until the bell is rung or `timeout` has passed (in whole milliseconds, rounded up);
    /// tells whether it was rung since the last wait. A signal ends the sleep early. One thread
    /// waits for a bell.
    ///
    /// # Errors
    /// When the process is out of descriptors (at the first wait), or the descriptor is broken.
    pub fn wait(&self, timeout: Duration) -> io::Result<bool> {
        let millis = i32::try_from(timeout.as_nanos().div_ceil(1_000_000)).unwrap_or(i32::MAX);
        let timeout = EpollTimeout::try_from(millis).unwrap_or(EpollTimeout::MAX);
        let mut events = [EpollEvent::empty()];
        match self.edges()?.wait(&mut events, timeout) {
            Ok(events) => Ok(events > 0),
            Err(Errno::EINTR) => Ok(false),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Has every wait for this bell end when `other` is rung, too. A ring of either before the next
    /// wait is remembered.
    ///
    /// # Errors
    /// When the process is out of descriptors.
    pub fn join(&self, other: &Doorbell) -> io::Result<()> {
        Ok(self.edges()?.add(&other.fd, edge())?)
    }

    fn edges(&self) -> io::Result<&Epoll> {
        if let Some(edges) = self.edges.get() {
            return Ok(edges);
        }
        let edges = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        edges.add(&self.fd, edge())?;
        Ok(self.edges.get_or_init(|| edges))
    }
}

fn edge() -> EpollEvent {
    EpollEvent::new(EpollFlags::EPOLLIN | EpollFlags::EPOLLET, 0)
}

impl AsFd for Doorbell {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl AsRawFd for Doorbell {
    fn as_raw_fd(&self) -> RawFd {
        self.fd.as_fd().as_raw_fd()
    }
}

/// Why [`Consumer::wait`] came back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wake {
    Ready,
    /// The bell was rung and the ring is empty: somebody else wants attention, or a late ring for
    /// an entry already popped.
    Rung,
    /// The time is over.
    TimedOut,
}

/// Why a consumer could not wait.
#[derive(Debug, thiserror::Error)]
pub enum WaitError {
    /// The ring is of no more use.
    #[error(transparent)]
    Corrupt(#[from] RingCorrupt),
    /// The doorbell is broken.
    #[error("cannot wait for a doorbell")]
    Doorbell(#[from] io::Error),
}

impl<R: std::ops::Deref<Target = RingShared>> Consumer<R> {
    /// Waits on a plain thread until an entry can be popped: spins for `spin` (at most
    /// [`MAX_SPIN`]; zero where cores are scarce), then sleeps on `bell`, in all for about
    /// `timeout`. Entries are looked for first, so that a bell rung for another reason shows as
    /// [`Wake::Rung`] only when the ring is empty.
    ///
    /// # Errors
    /// [`WaitError::Corrupt`] when the producer's index is impossible, [`WaitError::Doorbell`] when
    /// the bell is broken.
    pub fn wait(
        &mut self,
        bell: &Doorbell,
        spin: Duration,
        timeout: Duration,
    ) -> Result<Wake, WaitError> {
        let start = Instant::now();
        if self.spin(start, spin.min(MAX_SPIN).min(timeout))? {
            return Ok(Wake::Ready);
        }
        if self.arm()? == Armed::Ready {
            return Ok(Wake::Ready);
        }
        let rung = bell.wait(timeout.saturating_sub(start.elapsed()))?;
        self.disarm();
        match (self.waiting()?, rung) {
            (1.., _) => Ok(Wake::Ready),
            (0, true) => Ok(Wake::Rung),
            (0, false) => Ok(Wake::TimedOut),
        }
    }

    fn spin(&mut self, start: Instant, limit: Duration) -> Result<bool, RingCorrupt> {
        loop {
            for _ in 0..SPINS_PER_CLOCK {
                if self.waiting()? > 0 {
                    return Ok(true);
                }
                if limit.is_zero() {
                    return Ok(false);
                }
                std::hint::spin_loop();
            }
            if start.elapsed() >= limit {
                return Ok(false);
            }
        }
    }
}

impl<R: std::ops::Deref<Target = RingShared>> Producer<R> {
    /// Rings `bell` if the consumer sleeps; called after one push or a burst of them.
    ///
    /// # Errors
    /// Only when the bell is broken.
    pub fn ring_if_sleeping(&self, bell: &Doorbell) -> io::Result<()> {
        if self.must_wake() { bell.ring() } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests;
