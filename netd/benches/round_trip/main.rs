//! What it costs netd to ask a worker, without any computing: round trips of single jobs over the
//! production path (netd's link on its reactor, rings, a worker in a process of its own) beside the
//! bare eventfd between the same two processes; and the time of a decode step inside the server.
//! `cargo bench -p netd --bench round_trip`.
//!
//! The program starts itself as the other process. Each process is pinned to its own core where
//! there are two. The ways take turns in rounds, so that a change in the load of the machine hits
//! all of them; what counts is the ratio.
#![forbid(unsafe_code)]

mod steps;

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use netd::workers::arena::{self, ArenaMemory, SlotClass};
use netd::workers::job::Holds;
use netd::workers::link::WorkerLink;
use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::sys::signal::Signal;
use nix::unistd::Pid;
use shared::block::Span;
use shared::control::WorkerUp;
use shared::ids::Generation;
use shared::job::WorkKind;
use shared::shm::arena::ArenaMap;
use shared::shm::doorbell::{Doorbell, MAX_SPIN};
use shared::shm::segment::MemfdSegment;
use testkit::link::{FakeWorker, LinkParts, another, identity};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

const ROUNDS: usize = 10;
const ROUND_TRIPS: usize = 2_000;
const WARM_UP: usize = 200;
/// Blocks of the worker.
pub const BLOCKS: u32 = 4;
const FIRST: Generation = Generation(1);
/// Pages per block that the worker claims to have.
pub const KV_PAGES: u32 = 128;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match arguments[..] {
        ["bare", core] => answer_bells(core),
        ["worker", core, spin] => answer_jobs(core, spin == "spin"),
        ["client", core, addr] => steps::client(core, addr),
        _ => measure(),
    }
}

/// A way there and back.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    /// Two threads that sleep in epoll, the least that two processes can do.
    Threads,
    /// The asking side is a task on netd's reactor.
    Reactor,
    /// netd's link and a worker that sleeps.
    Link,
    /// netd's link and a worker that spins.
    LinkSpinning,
}

impl Way {
    const ALL: [Way; 4] = [Way::Threads, Way::Reactor, Way::Link, Way::LinkSpinning];

    fn name(self) -> &'static str {
        match self {
            Way::Threads => "bare eventfds, threads",
            Way::Reactor => "bare eventfds, reactor",
            Way::Link => "link, worker sleeps",
            Way::LinkSpinning => "link, worker spins",
        }
    }
}

fn measure() {
    let (first, last) = cores();
    pin(first);
    let runtime = netd::run::reactor().expect("a reactor");
    let mut samples: [Vec<Duration>; 4] = Default::default();
    for _ in 0..ROUNDS {
        for (way, times) in Way::ALL.into_iter().zip(&mut samples) {
            let task = round_trips(way, last);
            let round = runtime.block_on(async { tokio::spawn(task).await });
            times.extend(round.expect("a round"));
        }
    }
    samples.iter_mut().for_each(|times| times.sort_unstable());
    let bare = micros(percentile(&samples[1], 50));
    println!("round trip of one job, nothing computed; cores {first} and {last}");
    println!("  {:<28}{:>10}{:>10}{:>22}", "", "p50 us", "p99 us", "x bare on the reactor");
    for (way, times) in Way::ALL.into_iter().zip(&samples) {
        let (p50, p99) = (micros(percentile(times, 50)), micros(percentile(times, 99)));
        println!("  {:<28}{p50:>10.1}{p99:>10.1}{:>22.2}", way.name(), p50 / bare);
    }
    runtime.block_on(async { tokio::spawn(steps::measure(last)).await }).expect("steps");
}

async fn round_trips(way: Way, core: usize) -> Vec<Duration> {
    match way {
        Way::Threads => bare_threads(core),
        Way::Reactor => bare_reactor(core).await,
        Way::Link => link(core, false).await,
        Way::LinkSpinning => link(core, true).await,
    }
}

fn bare_threads(core: usize) -> Vec<Duration> {
    let other = Other::start(&["bare", &core.to_string()]);
    let trip = || {
        other.there.ring().expect("ring");
        while !other.back.wait(Duration::from_secs(1)).expect("wait") {}
    };
    (0..WARM_UP).for_each(|_| trip());
    (0..ROUND_TRIPS)
        .map(|_| {
            let start = Instant::now();
            trip();
            start.elapsed()
        })
        .collect()
}

async fn bare_reactor(core: usize) -> Vec<Duration> {
    let other = Other::start(&["bare", &core.to_string()]);
    let back = watched(another(&other.back));
    let mut times = Vec::with_capacity(WARM_UP + ROUND_TRIPS);
    for _ in 0..WARM_UP + ROUND_TRIPS {
        let start = Instant::now();
        other.there.ring().expect("ring");
        back.readable().await.expect("a ring").clear_ready();
        times.push(start.elapsed());
    }
    times.split_off(WARM_UP)
}

async fn link(core: usize, spins: bool) -> Vec<Duration> {
    let worker = Worker::start(core, spins);
    let arena = MemfdSegment::create("sepal-bench-arena", 4 << 20).expect("an arena");
    let plan = arena::plan(4 << 20, 4096).expect("a plan");
    let arena = ArenaMemory::new(ArenaMap::map(&arena).expect("map"), plan);
    let slots = arena.reserve(&[64], SlotClass::Short).await.expect("a slot");
    let body = slots.slot(0);
    let holds = Arc::new(Holds { slots, pages: None });
    let (broken, _reports) = tokio::sync::mpsc::channel(1);
    let up = worker.up();
    let link = Arc::new(WorkerLink::new(up.worker, up.span, 0, broken));
    let [submission, completion] = worker.parts.bells();
    link.up(&up, worker.parts.rings(), submission, completion).expect("linked");
    let mut times = Vec::with_capacity(WARM_UP + ROUND_TRIPS);
    for _ in 0..WARM_UP + ROUND_TRIPS {
        let start = Instant::now();
        link.run(WorkKind::Decode, body, holds.clone()).await.expect("an answer");
        times.push(start.elapsed());
    }
    times.split_off(WARM_UP)
}

#[expect(
    deprecated,
    reason = "the replacement is unsafe for types that may change their descriptor; a Doorbell owns one for life"
)]
fn watched(bell: Doorbell) -> AsyncFd<Doorbell> {
    AsyncFd::with_interest(bell, Interest::READABLE).expect("watch a bell")
}

/// The other process; killed when dropped. Its standard input is the bell that it waits for, its
/// standard output the one that it rings; a worker finds its rings as standard error.
pub struct Other {
    child: Child,
    there: Doorbell,
    back: Doorbell,
}

impl Other {
    fn start(arguments: &[&str]) -> Other {
        let bells = [(); 2].map(|()| Doorbell::new().expect("a bell"));
        Other::start_with(arguments, bells, None)
    }

    /// With `error` as its standard error.
    fn start_with(arguments: &[&str], bells: [Doorbell; 2], error: Option<OwnedFd>) -> Other {
        let [there, back] = bells;
        let child = Command::new("/proc/self/exe")
            .args(arguments)
            .stdin(Stdio::from(there.try_clone().expect("a bell")))
            .stdout(Stdio::from(back.try_clone().expect("a bell")))
            .stderr(error.map_or_else(Stdio::inherit, Stdio::from))
            .spawn()
            .expect("start the other process");
        Other { child, there, back }
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A worker process that answers every job without looking at it.
pub struct Worker {
    _other: Other,
    /// Its link, for netd.
    pub parts: LinkParts,
}

impl Worker {
    /// Starts it on `core`.
    pub fn start(core: usize, spins: bool) -> Worker {
        let parts = LinkParts::new(FIRST, FIRST);
        let spin = if spins { "spin" } else { "sleep" };
        let arguments = ["worker", &core.to_string(), spin];
        let _other = Other::start_with(&arguments, parts.bells(), Some(parts.rings()));
        Worker { _other, parts }
    }

    /// What netd is told.
    pub fn up(&self) -> WorkerUp {
        self.parts.worker_up(Span::new(0, BLOCKS).expect("a span"), KV_PAGES)
    }
}

fn answer_bells(core: &str) {
    let [there, back] = inherited(core);
    loop {
        if there.wait(Duration::from_secs(1)).expect("wait") {
            back.ring().expect("ring");
        }
    }
}

fn answer_jobs(core: &str, spins: bool) {
    let bells = inherited(core);
    let rings = io::stderr().as_fd().try_clone_to_owned().expect("rings");
    let mut worker = FakeWorker::open(rings, &identity(FIRST, FIRST), bells);
    let spin = if spins { MAX_SPIN } else { Duration::ZERO };
    loop {
        worker.wait(spin, Duration::from_secs(1));
        while let Some(job) = worker.take() {
            worker.post(worker.completion(job.id).encode());
        }
    }
}

/// The bells of this process, which ends with its parent.
fn inherited(core: &str) -> [Doorbell; 2] {
    end_with_parent(core);
    let bell = |fd: io::Result<OwnedFd>| Doorbell::from_fd(fd.expect("a bell")).expect("a bell");
    [
        bell(io::stdin().as_fd().try_clone_to_owned()),
        bell(io::stdout().as_fd().try_clone_to_owned()),
    ]
}

/// Pins a child to its core, and has it killed with its parent.
pub fn end_with_parent(core: &str) {
    pin(core.parse().expect("a core"));
    nix::sys::prctl::set_pdeathsig(Signal::SIGKILL).expect("end with the parent");
}

/// The first and the last core that this process may use.
fn cores() -> (usize, usize) {
    let allowed = sched_getaffinity(Pid::from_raw(0)).expect("cores");
    let cores: Vec<usize> =
        (0..CpuSet::count()).filter(|&core| allowed.is_set(core).unwrap_or(false)).collect();
    (cores[0], cores[cores.len() - 1])
}

fn pin(core: usize) {
    let mut set = CpuSet::new();
    set.set(core).expect("a core");
    sched_setaffinity(Pid::from_raw(0), &set).expect("pin to a core");
}

/// The value below which `percent` of the sorted `times` lie.
pub fn percentile(times: &[Duration], percent: usize) -> Duration {
    times[(times.len() * percent / 100).min(times.len() - 1)]
}

/// In microseconds.
pub fn micros(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}
