//! Latency and throughput of the rings between two processes, on the code that `serve` runs, beside
//! what the system itself offers: a bare eventfd, a bare futex, a Unix SEQPACKET socket and a pipe.
//! `cargo bench -p shared --bench ring`.
//!
//! The program starts itself as the other process. Both are pinned, to different cores where there
//! are two, since a wake-up on the same core and one across cores differ more than what is
//! compared. The links take turns in rounds, so that a change in the load of the machine hits all
//! of them.

mod links;

use std::alloc::{GlobalAlloc, Layout, System};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::sys::signal::Signal;
use nix::unistd::Pid;

use links::{Kind, Link};

const ROUNDS: usize = 10;
const ROUND_TRIPS: usize = 2_000;
const WARM_UP: usize = 200;
const STREAMED: u64 = 1_000_000;

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    match arguments.iter().position(|argument| argument == "--answer") {
        Some(at) => answer(&arguments[at + 1..]),
        None => measure(),
    }
}

fn measure() {
    let cores = cores();
    let (first, last) = (cores[0], cores[cores.len() - 1]);
    if first != last {
        println!("round trip, each process on its own core");
        table(&Kind::ALL, Cores { asking: first, answering: last });
    }
    println!("round trip, both processes on one core");
    let sleeping: Vec<Kind> =
        Kind::ALL.into_iter().filter(|&kind| kind != Kind::RingSpinning).collect();
    table(&sleeping, Cores { asking: first, answering: first });

    println!("one way, each process on its own core");
    println!("  {:<28}{:>12}{:>12}", "64-byte entries", "ns each", "million/s");
    for kind in [Kind::RingSpinning, Kind::Socket, Kind::Pipe] {
        let each = stream(kind, Cores { asking: first, answering: last });
        println!("  {:<28}{:>12.1}{:>12.2}", kind.name(), each * 1e9, 1e-6 / each);
    }
}

/// Where the two processes run.
#[derive(Clone, Copy)]
struct Cores {
    asking: usize,
    answering: usize,
}

fn table(kinds: &[Kind], cores: Cores) {
    let mut samples = vec![Vec::new(); kinds.len()];
    let mut allocations = vec![0; kinds.len()];
    for _ in 0..ROUNDS {
        for (index, &kind) in kinds.iter().enumerate() {
            let (times, allocated) = round_trips(kind, cores);
            samples[index].extend(times);
            allocations[index] += allocated;
        }
    }
    samples.iter_mut().for_each(|times| times.sort_unstable());
    let bare = kinds.iter().position(|&kind| kind == Kind::Eventfd).expect("eventfd is measured");
    let bare = micros(percentile(&samples[bare], 50));
    println!(
        "  {:<28}{:>12}{:>12}{:>12}{:>14}",
        "", "p50 us", "p99 us", "x eventfd", "allocations"
    );
    for (index, kind) in kinds.iter().enumerate() {
        let (p50, p99) = (percentile(&samples[index], 50), percentile(&samples[index], 99));
        let (p50, p99) = (micros(p50), micros(p99));
        let (name, count) = (kind.name(), allocations[index]);
        println!("  {name:<28}{p50:>12.2}{p99:>12.2}{:>12.2}{count:>14}", p50 / bare);
    }
    println!();
}

/// Round trip times over a fresh link of `kind`, and how often this process allocated meanwhile.
fn round_trips(kind: Kind, cores: Cores) -> (Vec<Duration>, u64) {
    let (mut link, peer) = connect(kind, cores, 0);
    let mut times = Vec::with_capacity(ROUND_TRIPS);
    for _ in 0..WARM_UP {
        link.send(&[1; 8]);
        link.receive();
    }
    let before = ALLOCATIONS.load(Ordering::Relaxed);
    for number in 0..ROUND_TRIPS as u64 {
        let start = Instant::now();
        link.send(&[number; 8]);
        let answer = link.receive();
        times.push(start.elapsed());
        assert!(!kind.carries_payload() || answer == [number; 8], "{} lost an entry", kind.name());
    }
    let allocated = ALLOCATIONS.load(Ordering::Relaxed) - before;
    end(peer);
    (times, allocated)
}

/// Seconds for each of many entries sent one way.
fn stream(kind: Kind, cores: Cores) -> f64 {
    let (mut link, peer) = connect(kind, cores, STREAMED);
    let start = Instant::now();
    for number in 0..STREAMED {
        link.send(&[number; 8]);
    }
    link.receive();
    let each = start.elapsed().as_secs_f64() / STREAMED as f64;
    end(peer);
    each
}

/// Starts the other process; it answers every entry, or with `streamed` above 0 only the last of so
/// many.
fn connect(kind: Kind, cores: Cores, streamed: u64) -> (Box<dyn Link>, Child) {
    let (ours, theirs) = links::pair(kind);
    // The other process inherits the core of this one, and moves to its own.
    pin(cores.asking);
    let peer = Command::new(std::env::current_exe().expect("own path"))
        .args(["--answer", kind.name(), &streamed.to_string(), &cores.answering.to_string()])
        .args(theirs.arguments())
        .stdin(Stdio::null())
        .spawn()
        .expect("start the other process");
    drop(theirs);
    (links::open(kind, ours), peer)
}

fn end(mut peer: Child) {
    peer.kill().expect("end the other process");
    peer.wait().expect("reap the other process");
}

/// The other process.
fn answer(arguments: &[String]) {
    nix::sys::prctl::set_pdeathsig(Signal::SIGKILL).expect("die with the parent");
    let kind = Kind::from_name(&arguments[0]);
    let streamed: u64 = arguments[1].parse().expect("a number of entries");
    pin(arguments[2].parse().expect("a core"));
    let mut link = links::open(kind, links::Ends::from_arguments(&arguments[3..]));
    loop {
        for number in 1..streamed {
            let entry = link.receive();
            assert_eq!(entry, [number - 1; 8], "{} lost an entry", kind.name());
        }
        let entry = link.receive();
        link.send(&entry);
    }
}

/// The cores that this process may use.
fn cores() -> Vec<usize> {
    let allowed = sched_getaffinity(Pid::from_raw(0)).expect("read the allowed cores");
    (0..CpuSet::count()).filter(|&core| allowed.is_set(core) == Ok(true)).collect()
}

/// Pins this process to a core.
fn pin(core: usize) {
    let mut set = CpuSet::new();
    set.set(core).expect("a core that exists");
    sched_setaffinity(Pid::from_raw(0), &set).expect("pin to a core");
}

fn percentile(sorted: &[Duration], percent: usize) -> Duration {
    sorted[(sorted.len() - 1) * percent / 100]
}

fn micros(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

/// The system's allocator, counting.
struct Counting;

// SAFETY: everything is passed on to `System` unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller keeps the contract of `GlobalAlloc::alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: the caller keeps the contract of `GlobalAlloc::dealloc`.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;
