//! The links that are compared: each sends 64 bytes to the other process and waits for 64 bytes
//! from it.

use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use nix::libc;
use nix::sys::eventfd::EventFd;
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::mman::{MapFlags, ProtFlags, mmap};
use nix::sys::socket::{AddressFamily, SockFlag, SockType, socketpair};
use nix::unistd::{ftruncate, pipe, read, write};
use shared::ids::{Generation, GroupId, WorkerId};
use shared::shm::doorbell::{Doorbell, MAX_SPIN, Wake};
use shared::shm::pair::{RingHandle, RingIdentity, RingPair};
use shared::shm::ring::{Consumer, Entry, Producer, PushError};

const DEADLINE: Duration = Duration::from_secs(20);

/// A way between two processes.
pub trait Link {
    /// Sends `entry`, and wakes the other side if it sleeps.
    fn send(&mut self, entry: &Entry);
    /// Waits for the next entry.
    fn receive(&mut self) -> Entry;
}

/// Which way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    RingSleeping,
    RingSpinning,
    Eventfd,
    Futex,
    Socket,
    Pipe,
}

impl Kind {
    pub const ALL: [Kind; 6] = [
        Kind::Eventfd,
        Kind::RingSleeping,
        Kind::RingSpinning,
        Kind::Futex,
        Kind::Socket,
        Kind::Pipe,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Kind::RingSleeping => "ring, sleeping",
            Kind::RingSpinning => "ring, spinning up to 50 us",
            Kind::Eventfd => "bare eventfd",
            Kind::Futex => "bare futex",
            Kind::Socket => "Unix SEQPACKET socket",
            Kind::Pipe => "pipe",
        }
    }

    pub fn from_name(name: &str) -> Kind {
        Kind::ALL.into_iter().find(|kind| kind.name() == name).expect("a kind of link")
    }

    /// The bare primitives only wake.
    pub fn carries_payload(self) -> bool {
        !matches!(self, Kind::Eventfd | Kind::Futex)
    }
}

/// One side of a link before it is opened: what it reads from, what it writes to, and the rings'
/// segment.
pub struct Ends {
    rx: OwnedFd,
    tx: OwnedFd,
    asks: bool,
    /// The rings' segment, of a link that has some.
    rings: Option<OwnedFd>,
}

impl Ends {
    /// How the other process is told its ends: descriptors that it inherits.
    pub fn arguments(&self) -> [String; 3] {
        let pass_on = |fd: &OwnedFd| {
            fcntl(fd, FcntlArg::F_SETFD(FdFlag::empty())).expect("let a descriptor be inherited");
            fd.as_raw_fd().to_string()
        };
        let rings = self.rings.as_ref().map_or_else(String::new, pass_on);
        [pass_on(&self.rx), pass_on(&self.tx), rings]
    }

    pub fn from_arguments(arguments: &[String]) -> Ends {
        let fd = |text: &str| {
            let fd: RawFd = text.parse().expect("a descriptor");
            // SAFETY: the parent left this descriptor open for us, and names each one once.
            unsafe { OwnedFd::from_raw_fd(fd) }
        };
        let (rx, tx) = (fd(&arguments[0]), fd(&arguments[1]));
        let rings = (!arguments[2].is_empty()).then(|| fd(&arguments[2]));
        Ends { rx, tx, asks: false, rings }
    }
}

/// Both sides of a fresh link.
pub fn pair(kind: Kind) -> (Ends, Ends) {
    let [to_us, to_them] = match kind {
        Kind::RingSleeping | Kind::RingSpinning => {
            [(); 2].map(|()| twice(Doorbell::new().unwrap().try_clone().unwrap()))
        }
        Kind::Eventfd => {
            [(); 2].map(|()| twice(EventFd::new().unwrap().as_fd().try_clone_to_owned().unwrap()))
        }
        Kind::Futex => {
            let memory = memfd_create("futex", MFdFlags::MFD_CLOEXEC).unwrap();
            ftruncate(&memory, 4096).unwrap();
            [twice(memory.try_clone().unwrap()), twice(memory)]
        }
        Kind::Socket => {
            let flags = SockFlag::SOCK_CLOEXEC;
            let (ours, theirs) =
                socketpair(AddressFamily::Unix, SockType::SeqPacket, None, flags).unwrap();
            [(ours.try_clone().unwrap(), theirs.try_clone().unwrap()), (theirs, ours)]
        }
        Kind::Pipe => [(); 2].map(|()| pipe().unwrap()),
    };
    let made = matches!(kind, Kind::RingSleeping | Kind::RingSpinning)
        .then(|| RingPair::create("sepal-bench-rings", &identity()).expect("make rings"));
    let rings = || made.as_ref().map(|made| made.try_clone().expect("copy a descriptor"));
    let ours = Ends { rx: to_us.0, tx: to_them.1, asks: true, rings: rings() };
    let theirs = Ends { rx: to_them.0, tx: to_us.1, asks: false, rings: rings() };
    (ours, theirs)
}

/// Opens one side.
pub fn open(kind: Kind, ends: Ends) -> Box<dyn Link> {
    match kind {
        Kind::RingSleeping => Box::new(Rings::open(ends, Duration::ZERO)),
        Kind::RingSpinning => Box::new(Rings::open(ends, MAX_SPIN)),
        Kind::Eventfd => Box::new(Bells::open(ends)),
        Kind::Futex => Box::new(Futex::open(ends)),
        Kind::Socket | Kind::Pipe => Box::new(Bytes { ends }),
    }
}

fn twice(fd: OwnedFd) -> (OwnedFd, OwnedFd) {
    (fd.try_clone().expect("copy a descriptor"), fd)
}

fn identity() -> RingIdentity {
    RingIdentity {
        worker: WorkerId::solo(GroupId(0)),
        worker_generation: Generation(1),
        netd_generation: Generation(1),
    }
}

/// The rings, as netd (which asks) and a worker use them.
struct Rings {
    producer: Producer<RingHandle>,
    consumer: Consumer<RingHandle>,
    rx: Doorbell,
    tx: Doorbell,
    spin: Duration,
}

impl Rings {
    fn open(ends: Ends, spin: Duration) -> Rings {
        let rings = ends.rings.expect("a link with rings");
        let pair = RingPair::open(rings, &identity()).expect("open the rings");
        let (producer, consumer) = if ends.asks {
            pair.netd_end()
        } else {
            let (consumer, producer) = pair.worker_end();
            (producer, consumer)
        };
        let (rx, tx) = (
            Doorbell::from_fd(ends.rx).expect("a bell"),
            Doorbell::from_fd(ends.tx).expect("a bell"),
        );
        Rings { producer, consumer, rx, tx, spin }
    }
}

impl Link for Rings {
    fn send(&mut self, entry: &Entry) {
        while let Err(error) = self.producer.push(*entry) {
            assert!(matches!(error, PushError::Full(_)), "{error}");
            std::thread::yield_now();
        }
        self.producer.ring_if_sleeping(&self.tx).expect("ring");
    }

    fn receive(&mut self) -> Entry {
        loop {
            if let Some(entry) = self.consumer.pop().expect("a sound ring") {
                return entry;
            }
            let wake = self.consumer.wait(&self.rx, self.spin, DEADLINE).expect("wait");
            assert_ne!(wake, Wake::TimedOut, "wake-up lost");
        }
    }
}

/// Two blocking eventfds and nothing else.
struct Bells {
    rx: EventFd,
    tx: EventFd,
}

impl Bells {
    fn open(ends: Ends) -> Bells {
        // SAFETY: pair() made this descriptor as an eventfd.
        let rx = unsafe { EventFd::from_owned_fd(ends.rx) };
        // SAFETY: as above.
        let tx = unsafe { EventFd::from_owned_fd(ends.tx) };
        Bells { rx, tx }
    }
}

impl Link for Bells {
    fn send(&mut self, _: &Entry) {
        self.tx.write(1).expect("ring");
    }

    fn receive(&mut self) -> Entry {
        self.rx.read().expect("wait");
        [0; 8]
    }
}

/// Two counters in shared memory, each waited for with a futex.
struct Futex {
    memory: NonNull<[AtomicU32; 2]>,
    ours: usize,
    seen: u32,
}

impl Futex {
    fn open(ends: Ends) -> Futex {
        let len = 4096.try_into().expect("not zero");
        let protection = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice; it is kept until the process
        // ends.
        let memory = unsafe { mmap(None, len, protection, MapFlags::MAP_SHARED, &ends.rx, 0) };
        Futex { memory: memory.expect("map").cast(), ours: usize::from(ends.asks), seen: 0 }
    }

    fn word(&self, index: usize) -> &AtomicU32 {
        // SAFETY: the mapping is a page, lives until the process ends, and holds atomics alone.
        let words = unsafe { self.memory.as_ref() };
        &words[index]
    }

    fn call(&self, index: usize, operation: libc::c_int, value: u32) {
        let (word, none) = (self.word(index).as_ptr(), std::ptr::null::<libc::timespec>());
        // SAFETY: the word is mapped; a wake or a wait without timeout touches no other memory of
        // this process.
        let done = unsafe { libc::syscall(libc::SYS_futex, word, operation, value, none) };
        assert!(
            done >= 0 || matches!(Errno::last(), Errno::EAGAIN | Errno::EINTR),
            "futex: {}",
            Errno::last()
        );
    }
}

impl Link for Futex {
    fn send(&mut self, _: &Entry) {
        let theirs = 1 - self.ours;
        self.word(theirs).fetch_add(1, Ordering::Release);
        self.call(theirs, libc::FUTEX_WAKE, 1);
    }

    fn receive(&mut self) -> Entry {
        while self.word(self.ours).load(Ordering::Acquire) == self.seen {
            self.call(self.ours, libc::FUTEX_WAIT, self.seen);
        }
        self.seen = self.seen.wrapping_add(1);
        [0; 8]
    }
}

/// 64-byte messages through a socket, or as bytes through a pipe.
struct Bytes {
    ends: Ends,
}

impl Link for Bytes {
    fn send(&mut self, entry: &Entry) {
        let mut bytes = [0; 64];
        for (place, word) in bytes.as_chunks_mut().0.iter_mut().zip(entry) {
            *place = word.to_ne_bytes();
        }
        assert_eq!(write(&self.ends.tx, &bytes), Ok(64));
    }

    fn receive(&mut self) -> Entry {
        let mut bytes = [0; 64];
        // Writes of 64 bytes to a pipe are whole, and so are the reads, since nothing else is
        // written.
        assert_eq!(read(&self.ends.rx, &mut bytes), Ok(64));
        let words = bytes.as_chunks().0;
        std::array::from_fn(|index| u64::from_ne_bytes(words[index]))
    }
}
