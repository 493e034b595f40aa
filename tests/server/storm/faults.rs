//! The faults of a storm: which comes when, decided by a seed, and how it is done.

use std::fs;
use std::path::{Path, PathBuf};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::harness::{Sepal, children_of, command_line, wait_for};

/// The least number of other faults between two deaths that count as the worker's own.
const OWN_DEATHS_APART: usize = 8;
/// Each fault once comes first.
const FIRST: [Fault; 6] = [
    Fault::KillWorker,
    Fault::FreezeWorker,
    Fault::CrashWorker(nix::libc::SIGSEGV),
    Fault::KillNetd,
    Fault::StarveWorker,
    Fault::Upgrade,
];

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

/// Draws faults and pauses from a seed. No draw depends on time.
pub struct Script {
    state: u64,
    count: usize,
    last_crash: usize,
    has_groups: bool,
}

impl Script {
    pub fn new(seed: u64, has_groups: bool) -> Script {
        Script { state: seed ^ 0x9e37_79b9_7f4a_7c15, count: 0, last_crash: 0, has_groups }
    }

    /// A number below `limit` (splitmix64).
    fn draw(&mut self, limit: u64) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % limit
    }

    /// Steps of all sessions until the next fault: one of four comes into what the one before left.
    pub fn pause(&mut self) -> u64 {
        let (steps, soon) = (20 + self.draw(150), self.draw(4) == 0);
        if soon { 0 } else { steps }
    }

    /// The next fault. The same numbers are drawn whatever the machine allows, so that a seed means the
    /// same everywhere.
    pub fn fault(&mut self) -> Fault {
        let (kind, signal) = (self.draw(100), self.draw(2));
        let drawn = match kind {
            0..50 => Fault::KillWorker,
            50..72 => Fault::FreezeWorker,
            72..84 => Fault::CrashWorker([nix::libc::SIGSEGV, nix::libc::SIGABRT][signal as usize]),
            84..90 => Fault::StarveWorker,
            90..95 => Fault::KillNetd,
            _ => Fault::Upgrade,
        };
        let fault = FIRST.get(self.count).copied().unwrap_or(drawn);
        self.count += 1;
        match fault {
            Fault::CrashWorker(_)
                if self.last_crash > 0 && self.count - self.last_crash < OWN_DEATHS_APART =>
            {
                Fault::KillWorker
            }
            Fault::CrashWorker(_) => {
                self.last_crash = self.count;
                fault
            }
            Fault::StarveWorker if !self.has_groups => Fault::KillWorker,
            _ => fault,
        }
    }
}

/// Does it, once there is somebody to do it to; false if the server refused.
pub fn strike(sepal: &Sepal, fault: Fault, group: Option<&MemoryGroup>) -> bool {
    let to = |role: &str, harm: &dyn Fn(Pid) -> bool| {
        let is_of_role = |pid: &Pid| {
            let line = command_line(*pid);
            line.contains(" gen ") && line.contains(role)
        };
        wait_for(role, || {
            let victim = children_of(sepal.pid()).into_iter().find(is_of_role)?;
            harm(victim).then_some(true)
        })
    };
    let signal = |role: &str, signal: Signal| to(role, &|pid| kill(pid, signal).is_ok());
    match fault {
        Fault::KillWorker => signal("gpu-worker", Signal::SIGKILL),
        Fault::FreezeWorker => signal("gpu-worker", Signal::SIGSTOP),
        Fault::CrashWorker(number) => {
            signal("gpu-worker", Signal::try_from(number).expect("a signal"))
        }
        Fault::KillNetd => signal("netd", Signal::SIGKILL),
        Fault::StarveWorker => {
            group.is_some_and(|group| to("gpu-worker", &|worker| group.starve(worker)))
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
        let all = Path::new("/sys/fs/cgroup");
        let controllers = fs::read_to_string(all.join("cgroup.subtree_control")).ok()?;
        if !controllers.split_whitespace().any(|name| name == "memory") {
            return None;
        }
        let folder = all.join(format!("sepal-storm-{}", std::process::id()));
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
