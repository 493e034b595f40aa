//! The faults of a storm: which comes when, decided by a seed, and how it is done.

use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::harness::{Sepal, children_of, command_line};

/// The least time between two deaths that count as the worker's own.
const OWN_DEATHS_APART: Duration = Duration::from_secs(10);

/// What is done to the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Fault {
    KillWorker,
    FreezeWorker,
    /// A crash of the worker's own: SIGSEGV or SIGABRT.
    CrashWorker(i32),
    /// The OOM killer takes the worker.
    StarveWorker,
    KillNetd,
    Upgrade,
}

impl Fault {
    pub fn name(self) -> &'static str {
        match self {
            Fault::KillWorker => "SIGKILL of a worker",
            Fault::FreezeWorker => "SIGSTOP of a worker",
            Fault::CrashWorker(nix::libc::SIGSEGV) => "SIGSEGV of a worker",
            Fault::CrashWorker(_) => "SIGABRT of a worker",
            Fault::StarveWorker => "OOM of a worker",
            Fault::KillNetd => "SIGKILL of netd",
            Fault::Upgrade => "upgrade",
        }
    }
}

/// Draws faults and pauses from a seed.
pub struct Script {
    state: u64,
    last_crash: Option<Instant>,
    has_groups: bool,
}

impl Script {
    pub fn new(seed: u64, has_groups: bool) -> Script {
        Script { state: seed ^ 0x9e37_79b9_7f4a_7c15, last_crash: None, has_groups }
    }

    /// A number below `limit` (splitmix64).
    fn draw(&mut self, limit: u64) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % limit
    }

    /// From 0.3 to 1.5 s.
    pub fn pause(&mut self) -> Duration {
        Duration::from_millis(300 + self.draw(1201))
    }

    /// The next fault. The same numbers are drawn whatever the machine allows, so that a seed means the
    /// same everywhere.
    pub fn fault(&mut self, now: Instant) -> Fault {
        let (kind, signal) = (self.draw(100), self.draw(2));
        let may_crash = self.last_crash.is_none_or(|last| now - last >= OWN_DEATHS_APART);
        match kind {
            0..50 => Fault::KillWorker,
            50..72 => Fault::FreezeWorker,
            72..84 if may_crash => {
                self.last_crash = Some(now);
                Fault::CrashWorker([nix::libc::SIGSEGV, nix::libc::SIGABRT][signal as usize])
            }
            84..90 if self.has_groups => Fault::StarveWorker,
            90..95 => Fault::KillNetd,
            95..100 => Fault::Upgrade,
            _ => Fault::KillWorker,
        }
    }
}

/// Does it; false if there was nobody to do it to.
pub fn strike(sepal: &Sepal, fault: Fault, group: Option<&MemoryGroup>) -> bool {
    let signal = |role: &str, signal: Signal| {
        let of_role = |pid: &Pid| command_line(*pid).contains(role);
        let pid = children_of(sepal.pid()).into_iter().find(of_role);
        pid.is_some_and(|pid| kill(pid, signal).is_ok())
    };
    match fault {
        Fault::KillWorker => signal("gpu-worker", Signal::SIGKILL),
        Fault::FreezeWorker => signal("gpu-worker", Signal::SIGSTOP),
        Fault::CrashWorker(number) => {
            signal("gpu-worker", Signal::try_from(number).expect("a signal"))
        }
        Fault::KillNetd => signal("netd", Signal::SIGKILL),
        Fault::StarveWorker => {
            let of_role = |pid: &Pid| command_line(*pid).contains("gpu-worker");
            let worker = children_of(sepal.pid()).into_iter().find(of_role);
            worker.zip(group).is_some_and(|(worker, group)| group.starve(worker))
        }
        Fault::Upgrade => upgrade(sepal),
    }
}

/// Asks the server to hand over to the executable that it runs, and waits for it.
fn upgrade(sepal: &Sepal) -> bool {
    // Sessions are always open, so that waiting for their end gains nothing.
    let output = sepal.upgrade(None, &["--patience", "1"]);
    if !output.status.success() {
        println!("  upgrade refused: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    output.status.success()
}

/// A control group in which whoever needs memory is killed.
pub struct MemoryGroup(PathBuf);

impl MemoryGroup {
    /// Makes one, where the machine lets this user.
    pub fn make() -> Option<MemoryGroup> {
        let folder = PathBuf::from(format!("/sys/fs/cgroup/sepal-storm-{}", std::process::id()));
        fs::create_dir(&folder).ok()?;
        let group = MemoryGroup(folder);
        let limits = [("memory.max", "65536"), ("memory.swap.max", "0")];
        let set = |(name, value)| fs::write(group.0.join(name), value);
        limits.into_iter().all(|limit| set(limit).is_ok()).then_some(group)
    }

    /// What it holds is not counted here, but the next page that it touches is.
    fn starve(&self, pid: Pid) -> bool {
        fs::write(self.0.join("cgroup.procs"), pid.to_string()).is_ok()
    }
}

impl Drop for MemoryGroup {
    fn drop(&mut self) {
        // It is empty once its processes were reaped.
        let _ = fs::remove_dir(&self.0);
    }
}
