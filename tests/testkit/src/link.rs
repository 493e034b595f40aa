//! A link between netd and a worker, as a supervisor makes it, and a worker's end of it that a test
//! drives.

use std::os::fd::OwnedFd;
use std::time::Duration;

use shared::block::Span;
use shared::control::{FdTag, LinkInit, WorkerUp};
use shared::ids::{Generation, JobId};
use shared::job::{Completion, Entry, JobDescriptor};
use shared::shm::doorbell::Doorbell;
use shared::shm::pair::{NetdEnd, RingHandle, RingIdentity, RingPair};
use shared::shm::ring::{Consumer, Producer};
use shared::shm::segment::MemfdSegment;
use shared::survey::Capacity;

use crate::process::{unique, worker_id};

/// Bytes of an arena that no test chose the size of.
pub const ARENA_BYTES: usize = 4 << 20;

/// The rings of the worker of all tests.
pub fn identity(worker_generation: Generation, netd_generation: Generation) -> RingIdentity {
    RingIdentity { worker: worker_id(), worker_generation, netd_generation }
}

/// Another handle of a doorbell.
pub fn another(bell: &Doorbell) -> Doorbell {
    Doorbell::from_fd(bell.try_clone().unwrap()).unwrap()
}

/// What a supervisor makes for a link.
pub struct LinkParts {
    pub identity: RingIdentity,
    pub arena: MemfdSegment,
    pub submission_bell: Doorbell,
    pub completion_bell: Doorbell,
    rings: RingPair,
}

impl LinkParts {
    /// The link of [`worker_id`], over an arena of its own.
    pub fn new(worker_generation: Generation, netd_generation: Generation) -> LinkParts {
        let arena = MemfdSegment::create(&unique("arena"), ARENA_BYTES).unwrap();
        LinkParts::over(identity(worker_generation, netd_generation), &arena)
    }

    /// A link over the arena of a netd that may have others.
    pub fn over(identity: RingIdentity, arena: &MemfdSegment) -> LinkParts {
        let clone = arena.try_clone().unwrap();
        LinkParts {
            identity,
            arena: MemfdSegment::from_fd("sepal-test-arena", clone, arena.len()).unwrap(),
            submission_bell: Doorbell::new().unwrap(),
            completion_bell: Doorbell::new().unwrap(),
            rings: RingPair::create(&unique("rings"), &identity).unwrap(),
        }
    }

    /// Another descriptor of the segment of the rings.
    pub fn rings(&self) -> OwnedFd {
        self.rings.try_clone().unwrap()
    }

    /// Other handles of the doorbells: that of submissions, that of completions.
    pub fn bells(&self) -> [Doorbell; 2] {
        [&self.submission_bell, &self.completion_bell].map(another)
    }

    fn init(&self) -> LinkInit {
        let RingIdentity { worker_generation, netd_generation, .. } = self.identity;
        let (arena_bytes, fds) = (self.arena.len() as u64, FdTag(netd_generation.0.into()));
        LinkInit { netd_generation, worker_generation, arena_bytes, fds }
    }

    /// The message and the descriptors for the worker.
    pub fn for_worker(&self) -> (LinkInit, Vec<OwnedFd>) {
        let arena = self.arena.try_clone().unwrap();
        (self.init(), [arena].into_iter().chain(self.for_netd()).collect())
    }

    /// The descriptors for netd.
    pub fn for_netd(&self) -> Vec<OwnedFd> {
        let bells = [&self.submission_bell, &self.completion_bell];
        [self.rings()].into_iter().chain(bells.map(|bell| bell.try_clone().unwrap())).collect()
    }

    /// What netd is told of a worker of `span` that keeps its pages.
    pub fn worker_up(&self, span: Span, kv_pages: u32) -> WorkerUp {
        WorkerUp {
            worker: self.identity.worker,
            span,
            kv_pages,
            kv_survives: true,
            kv_version: 1,
            capacity: Capacity::default(),
            link: self.init(),
        }
    }

    pub fn netd_end(&self) -> NetdEnd {
        RingPair::open(self.rings(), &self.identity).unwrap().netd_end()
    }

    pub fn worker(&self) -> FakeWorker {
        FakeWorker::open(self.rings(), &self.identity, self.bells())
    }
}

/// A worker's end of the rings, which answers as the test wants.
pub struct FakeWorker {
    identity: RingIdentity,
    jobs: Consumer<RingHandle>,
    completions: Producer<RingHandle>,
    bells: [Doorbell; 2],
}

impl FakeWorker {
    /// Opens what [`LinkParts::rings`] and [`LinkParts::bells`] gave.
    pub fn open(rings: OwnedFd, identity: &RingIdentity, bells: [Doorbell; 2]) -> FakeWorker {
        let (jobs, completions) = RingPair::open(rings, identity).unwrap().worker_end();
        FakeWorker { identity: *identity, jobs, completions, bells }
    }

    /// Waits for jobs: so long awake, so long asleep.
    pub fn wait(&mut self, spin: Duration, timeout: Duration) {
        self.jobs.wait(&self.bells[0], spin, timeout).unwrap();
    }

    /// The next job, if one is there.
    pub fn take(&mut self) -> Option<JobDescriptor> {
        Some(JobDescriptor::decode(&self.jobs.pop().unwrap()?).unwrap())
    }

    /// The completion of a job that took no time.
    pub fn completion(&self, id: JobId) -> Completion {
        let RingIdentity { worker_generation, netd_generation, .. } = self.identity;
        let (queue_ns, compute_ns) = (0, 1);
        Completion { id, worker_generation, netd_generation, result: Ok(()), queue_ns, compute_ns }
    }

    /// Posts whatever entry, and wakes netd.
    pub fn post(&mut self, entry: Entry) {
        self.completions.push(entry).unwrap();
        self.completions.ring_if_sleeping(&self.bells[1]).unwrap();
    }
}
