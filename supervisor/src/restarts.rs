//! Why children were started again: the reason of each death, for the counters of the board, and the
//! last one of each child in words. Pure but for the kernel's count of processes that it killed for
//! lack of memory.

use std::collections::HashMap;

use nix::libc::{SIGHUP, SIGINT, SIGKILL, SIGQUIT, SIGTERM};
use shared::exit::ExitReason;
use shared::ids::Generation;
use shared::shm::board::RestartReason;

use crate::tree::{ChildId, ExitStatus};

/// Signals that come from outside: a fault of a process ends it by others.
const FROM_OUTSIDE: [i32; 5] = [SIGKILL, SIGTERM, SIGINT, SIGHUP, SIGQUIT];

/// The kernel's counters, of which `oom_kill` is one.
const COUNTERS: &str = "/proc/vmstat";

/// How a child died last.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Death {
    /// The reason, as it is counted.
    pub reason: RestartReason,
    /// The same in words.
    pub text: String,
}

/// Deaths of all children.
#[derive(Debug)]
pub struct Deaths {
    /// What the supervisor killed, and why.
    killed: HashMap<ChildId, (Generation, String)>,
    last: HashMap<ChildId, Death>,
    /// Processes that the kernel has killed for lack of memory.
    oom_kills: u64,
}

impl Default for Deaths {
    fn default() -> Deaths {
        Deaths { killed: HashMap::new(), last: HashMap::new(), oom_kills: oom_kills() }
    }
}

impl Deaths {
    /// The supervisor is about to kill a child.
    pub fn killing(&mut self, id: ChildId, generation: Generation, why: &str) {
        // The first reason is that of the death; others come while the process ends.
        match self.killed.get(&id) {
            Some((known, _)) if *known == generation => {}
            _ => drop(self.killed.insert(id, (generation, why.to_owned()))),
        }
    }

    /// Time has passed: what the kernel killed until now was none of the children.
    pub fn look(&mut self) {
        self.oom_kills = oom_kills();
    }

    /// A child was reaped.
    pub fn died(&mut self, id: ChildId, generation: Generation, end: &ExitStatus) {
        let now = if *end == ExitStatus::Signal(SIGKILL) { oom_kills() } else { self.oom_kills };
        let killed = self.killed.remove(&id).filter(|(of, _)| *of == generation);
        let killed = killed.map(|(_, why)| why);
        let reason = reason(end, killed.as_deref(), now > self.oom_kills);
        self.oom_kills = now;
        if *end == ExitStatus::Code(0) {
            // Done: what starts it again has new work for it.
            self.last.remove(&id);
            return;
        }
        let text = killed.unwrap_or_else(|| end.to_string());
        self.last.insert(id, Death { reason, text });
    }

    /// How a child died last; `None` if it never did, or ended in order.
    pub fn last(&self, id: ChildId) -> Option<&Death> {
        self.last.get(&id)
    }
}

/// What a death counts as. `killed`: why the supervisor killed the child, if it did.
fn reason(end: &ExitStatus, killed: Option<&str>, lacked_memory: bool) -> RestartReason {
    match (killed, end) {
        (Some(why), _) if why.starts_with("rank ") => RestartReason::Group,
        (Some(why), _) if why.starts_with("hangs") || why.starts_with("was not ready") => {
            RestartReason::Hang
        }
        (Some(_), _) => RestartReason::Other,
        (None, ExitStatus::Signal(signal)) if FROM_OUTSIDE.contains(signal) => {
            match lacked_memory && *signal == SIGKILL {
                true => RestartReason::OutOfMemory,
                false => RestartReason::Signal,
            }
        }
        (None, ExitStatus::Signal(_)) => RestartReason::Crash,
        (None, ExitStatus::NotStarted { .. }) => RestartReason::Other,
        (None, ExitStatus::Code(_)) => match end.reason() {
            ExitReason::OutOfMemory => RestartReason::OutOfMemory,
            ExitReason::DeviceLost => RestartReason::Device,
            ExitReason::GroupAborted => RestartReason::Group,
            _ => RestartReason::Exit,
        },
    }
}

/// 0 where the kernel does not tell.
fn oom_kills() -> u64 {
    let text = std::fs::read_to_string(COUNTERS).unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("oom_kill "));
    line.and_then(|count| count.trim().parse().ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use nix::libc::{SIGABRT, SIGSEGV};

    use super::*;

    #[test]
    fn each_death_has_its_reason() {
        let signal = ExitStatus::Signal;
        let code = |reason: ExitReason| ExitStatus::Code(i32::from(reason.code()));
        for (end, killed, lacked_memory, expected) in [
            (signal(SIGKILL), None, false, RestartReason::Signal),
            (signal(SIGKILL), None, true, RestartReason::OutOfMemory),
            (signal(SIGTERM), None, true, RestartReason::Signal),
            (signal(SIGSEGV), None, false, RestartReason::Crash),
            (signal(SIGABRT), None, false, RestartReason::Crash),
            (signal(SIGKILL), Some("hangs: no progress for 2000 ms"), false, RestartReason::Hang),
            (signal(SIGKILL), Some("rank 1 of its group ended"), false, RestartReason::Group),
            (signal(SIGKILL), Some("floods its control channel"), false, RestartReason::Other),
            (code(ExitReason::OutOfMemory), None, false, RestartReason::OutOfMemory),
            (code(ExitReason::DeviceLost), None, false, RestartReason::Device),
            (code(ExitReason::Failed), None, false, RestartReason::Exit),
        ] {
            assert_eq!(reason(&end, killed, lacked_memory), expected, "{end} {killed:?}");
        }
    }

    #[test]
    fn a_kill_explains_the_death_of_its_generation_alone() {
        let mut deaths = Deaths::default();
        let (id, first, second) = (ChildId::Netd, Generation(1), Generation(2));
        assert_eq!(deaths.last(id), None);
        deaths.killing(id, first, "hangs: no progress for 2000 ms");
        deaths.killing(id, first, "no longer needed");
        deaths.died(id, first, &ExitStatus::Signal(SIGKILL));
        let text = |deaths: &Deaths| deaths.last(id).map(|death| death.text.clone());
        assert_eq!(text(&deaths).as_deref(), Some("hangs: no progress for 2000 ms"));
        deaths.died(id, second, &ExitStatus::Signal(SIGSEGV));
        assert_eq!(deaths.last(id).map(|death| death.reason), Some(RestartReason::Crash));
        assert_eq!(text(&deaths).as_deref(), Some("SIGSEGV"));
        deaths.died(id, Generation(3), &ExitStatus::Code(0));
        assert_eq!(text(&deaths), None);
    }
}
