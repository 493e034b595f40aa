//! Time of a sum over the two processes of a group, on the code that `serve` runs, beside a memory
//! copy of the same size. `cargo bench -p shared --bench all_reduce`.
//!
//! The program starts itself as the other rank. Both are pinned, to different cores where there are
//! two. Sums that spin, sums that sleep, and copies take turns in rounds, so that a change in the
//! load of the machine hits all of them. A time is that of one call on rank 0, which waits for rank
//! 1 as often as rank 1 waits for it.

#![forbid(unsafe_code)]

use std::hint::black_box;
use std::os::fd::AsFd;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::sys::signal::Signal;
use nix::unistd::Pid;

use shared::bootstrap::DescriptorSocket;
use shared::control::FdTag;
use shared::ids::{Generation, GroupId, Rank, WorldSize};
use shared::shm::doorbell::MAX_SPIN;
use shared::shm::group::{GroupMap, GroupMember, GroupOwner, GroupShape, WaitPolicy};

const ROUNDS: usize = 10;
const WARM_UP: usize = 50;

/// A decode step's message at a hidden size of 4096, and one of prefill.
const SIZES: [Size; 2] = [
    Size { name: "16 KB", values: 4096, sums: 2000 },
    Size { name: "1 MB", values: 262_144, sums: 100 },
];

/// Values of an exchange buffer: with 256 KB, four buffers stay in the caches of two cores.
const EXCHANGE_VALUES: usize = 65_536;

const SHAPE: GroupShape = GroupShape {
    group: GroupId(0),
    generation: Generation(1),
    world_size: WorldSize(2),
    exchange_values: EXCHANGE_VALUES,
    log_bytes: 4096,
};

const TAG: FdTag = FdTag(1);
const DEADLINE: Duration = Duration::from_secs(20);

struct Size {
    name: &'static str,
    values: usize,
    sums: usize,
}

/// What is measured.
#[derive(Clone, Copy)]
enum Kind {
    Copy,
    Spinning,
    Asleep,
}

impl Kind {
    const ALL: [Kind; 3] = [Kind::Copy, Kind::Spinning, Kind::Asleep];

    fn name(self) -> &'static str {
        match self {
            Kind::Copy => "memory copy",
            Kind::Spinning => "all-reduce, spinning up to 50 us",
            Kind::Asleep => "all-reduce, asleep",
        }
    }
}

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    match arguments.iter().position(|argument| argument == "--follow") {
        Some(at) => follow(&arguments[at + 1..]),
        None => measure(),
    }
}

fn measure() {
    let cores = cores();
    let (first, last) = (cores[0], cores[cores.len() - 1]);
    if first == last {
        println!("one core alone: sums do not spin");
    }
    let kinds = if first == last { &[Kind::Copy, Kind::Asleep][..] } else { &Kind::ALL };
    for size in &SIZES {
        let mut samples = vec![Vec::new(); kinds.len()];
        for _ in 0..ROUNDS {
            for (times, &kind) in samples.iter_mut().zip(kinds) {
                times.extend(round(kind, size, first, last));
            }
        }
        table(size, kinds, samples);
    }
}

fn table(size: &Size, kinds: &[Kind], mut samples: Vec<Vec<Duration>>) {
    samples.iter_mut().for_each(|times| times.sort_unstable());
    let copy = micros(percentile(&samples[0], 50));
    println!("{}", size.name);
    println!("  {:<36}{:>12}{:>12}{:>12}", "", "p50 us", "p99 us", "x copy");
    for (kind, times) in kinds.iter().zip(&samples) {
        let (p50, p99) = (micros(percentile(times, 50)), micros(percentile(times, 99)));
        println!("  {:<36}{p50:>12.2}{p99:>12.2}{:>12.2}", kind.name(), p50 / copy);
    }
    println!();
}

fn round(kind: Kind, size: &Size, core: usize, other: usize) -> Vec<Duration> {
    pin(core);
    match kind {
        Kind::Copy => copies(size),
        Kind::Spinning => sums(size, MAX_SPIN, other),
        Kind::Asleep => sums(size, Duration::ZERO, other),
    }
}

fn copies(size: &Size) -> Vec<Duration> {
    let (mut from, mut to) = (vec![1.0f32; size.values], vec![0.0f32; size.values]);
    let mut copy = || {
        black_box(&mut from).fill(1.0);
        let start = Instant::now();
        black_box(&mut to).copy_from_slice(black_box(&from));
        start.elapsed()
    };
    (0..WARM_UP + size.sums).map(|_| copy()).skip(WARM_UP).collect()
}

fn sums(size: &Size, spin: Duration, other: usize) -> Vec<Duration> {
    let group = GroupOwner::create("sepal-bench-group", &SHAPE).expect("make a group");
    let mut peer = start(&group, size, spin, other);
    let (segment, bells) = (group.try_clone(), group.doorbells());
    let (segment, bells) = (segment.expect("a descriptor"), bells.expect("descriptors"));
    let map = GroupMap::open(segment, bells, &SHAPE, Rank(0)).expect("open the group");
    let mut member = member(&map, spin);
    let mut values = vec![0.0; size.values];
    let times = (0..WARM_UP + size.sums).map(|_| sum(&mut member, &mut values, 1.0));
    let times = times.skip(WARM_UP).collect();
    peer.kill().expect("end the other rank");
    peer.wait().expect("reap the other rank");
    times
}

/// Time of one sum.
fn sum(member: &mut GroupMember, values: &mut [f32], own: f32) -> Duration {
    black_box(&mut *values).fill(own);
    let start = Instant::now();
    member.all_reduce(values).expect("a sound group");
    let time = start.elapsed();
    assert!([values.first(), values.last()].into_iter().flatten().all(|&sum| sum == 3.0));
    time
}

fn member(map: &std::sync::Arc<GroupMap>, spin: Duration) -> GroupMember {
    let policy = WaitPolicy { spin, interval: DEADLINE, heartbeat: Box::new(|| ()) };
    GroupMember::new(map, policy).expect("a member")
}

/// Starts the other rank.
fn start(group: &GroupOwner, size: &Size, spin: Duration, core: usize) -> Child {
    let (ours, theirs) = DescriptorSocket::pair().expect("a socket");
    let (segment, bells) = (group.try_clone(), group.doorbells());
    let (segment, bells) = (segment.expect("a descriptor"), bells.expect("descriptors"));
    ours.send(TAG, &[segment.as_fd(), bells[0].as_fd(), bells[1].as_fd()]).expect("send");
    Command::new(std::env::current_exe().expect("own path"))
        .args(["--follow", &size.values.to_string()])
        .args([spin.as_micros().to_string(), core.to_string()])
        .stdin(Stdio::from(theirs))
        .spawn()
        .expect("start the other rank")
}

/// The other rank.
fn follow(arguments: &[String]) {
    nix::sys::prctl::set_pdeathsig(Signal::SIGKILL).expect("die with the parent");
    let number = |index: usize| arguments[index].parse::<usize>().expect("a number");
    pin(number(2));
    let socket = std::io::stdin().as_fd().try_clone_to_owned().expect("a socket");
    let fds = DescriptorSocket::from(socket).recv(TAG, 3, DEADLINE).expect("descriptors");
    let mut fds = fds.into_iter();
    let segment = fds.next().expect("a segment");
    let map = GroupMap::open(segment, fds.collect(), &SHAPE, Rank(1)).expect("open the group");
    let mut member = member(&map, Duration::from_micros(number(1) as u64));
    let mut values = vec![0.0; number(0)];
    loop {
        sum(&mut member, &mut values, 2.0);
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
