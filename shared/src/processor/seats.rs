//! Where the threads of a worker run.

use nix::errno::Errno;
use nix::sched::{CpuSet, sched_setaffinity};
use nix::unistd::Pid;
use serde::{Deserialize, Serialize};

use super::{Core, shown};

/// The CPUs of a worker's compute threads.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Seats {
    /// Wherever the process may run.
    #[default]
    Anywhere,
    /// All threads on any of these CPUs.
    Among(Vec<u32>),
    /// Each thread on a CPU of its own, in this order.
    Each(Vec<u32>),
}

impl Seats {
    /// Any of the CPUs of `cores`.
    pub(super) fn among(cores: &[&Core]) -> Seats {
        let mut cpus: Vec<u32> = cores.iter().flat_map(|core| core.cpus.clone()).collect();
        cpus.sort_unstable();
        if cpus.is_empty() { Seats::Anywhere } else { Seats::Among(cpus) }
    }

    /// A core for each of so many threads, if there are as many; else [`among`](Self::among) them.
    pub(super) fn each(cores: &[&Core], threads: usize) -> Seats {
        if threads != cores.len() || cores.is_empty() {
            return Seats::among(cores);
        }
        Seats::Each(cores.iter().filter_map(|core| core.cpus.first()).copied().collect())
    }

    /// Keeps this thread, and the threads that it will start, on the CPUs of all threads.
    ///
    /// # Errors
    /// The system's, for example when none of the CPUs is online any more.
    pub fn take_all(&self) -> nix::Result<()> {
        match self {
            Seats::Anywhere => Ok(()),
            Seats::Among(cpus) | Seats::Each(cpus) => stay_on(cpus),
        }
    }

    /// Keeps this thread on the CPU of compute thread `index`; those it starts later too, unless they
    /// [take all](Self::take_all).
    ///
    /// # Errors
    /// The system's.
    pub fn take(&self, index: usize) -> nix::Result<()> {
        match self {
            Seats::Each(cpus) => cpus.get(index).map_or(Ok(()), |cpu| stay_on(&[*cpu])),
            Seats::Anywhere | Seats::Among(_) => Ok(()),
        }
    }
}

/// For people: `one thread on each of CPUs 0-7`.
impl std::fmt::Display for Seats {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let list = |cpus: &[u32]| {
            let mut cpus = cpus.to_vec();
            cpus.sort_unstable();
            shown(&cpus)
        };
        match self {
            Seats::Anywhere => f.write_str("threads on any CPU"),
            Seats::Among(cpus) => write!(f, "threads on any of CPUs {}", list(cpus)),
            Seats::Each(cpus) => write!(f, "one thread on each of CPUs {}", list(cpus)),
        }
    }
}

fn stay_on(cpus: &[u32]) -> nix::Result<()> {
    let mut set = CpuSet::new();
    // CPUs beyond what the mask can name are left out.
    let named = cpus.iter().filter(|&&cpu| set.set(cpu as usize).is_ok()).count();
    if named == 0 {
        return Err(Errno::EINVAL);
    }
    sched_setaffinity(Pid::from_raw(0), &set)
}
