//! One child as the tree sees it: its state with its times, how it ended, and whether it is started
//! again.

use std::collections::VecDeque;
use std::fmt;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use shared::config::RestartConfig;
use shared::control::{DeathCause, Role};
use shared::exit::{ExitReason, Verdict};
use shared::ids::{Generation, Rank, WorkerId};

/// Time after which a process that was sent SIGKILL and is still there counts as unkillable.
pub const KILL_PATIENCE: Duration = Duration::from_secs(10);

/// Time a process may stay after it closed its control channel.
pub const CLOSED_PATIENCE: Duration = Duration::from_secs(5);

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum ChildId {
    /// The reader of checkpoints.
    Prepare,
    Netd,
    Worker(WorkerId),
}

impl ChildId {
    /// The child of this role; a worker needs its id.
    pub fn of(role: Role, worker: Option<WorkerId>) -> Option<ChildId> {
        match role {
            Role::Prepare => Some(ChildId::Prepare),
            Role::Netd => Some(ChildId::Netd),
            Role::Worker => worker.map(ChildId::Worker),
        }
    }

    pub fn role(self) -> Role {
        match self {
            ChildId::Prepare => Role::Prepare,
            ChildId::Netd => Role::Netd,
            ChildId::Worker(_) => Role::Worker,
        }
    }
}

impl fmt::Display for ChildId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ChildId::Prepare => f.write_str("prepare"),
            ChildId::Netd => f.write_str("netd"),
            ChildId::Worker(worker) => write!(f, "gpu-worker {worker}"),
        }
    }
}

/// Where a child is in its life cycle.
///
/// ```text
/// Waiting -> Starting -> Ready -> Draining -> Gone
///               |  ^       |          |
///               v  |       v          |     (reaped, wanted)
///              Backoff <---+          |
///               |                     |
///               +--> Held             |     (reaped, not to be started again)
///  Starting | Ready | Draining -> Unkillable  (SIGKILL without effect)
///  Starting | Ready | Draining -> Reaped      (until the other ranks of the group are reaped too)
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, strum::IntoStaticStr)]
#[strum(serialize_all = "lowercase")]
pub enum Lifecycle {
    /// Not to be started yet.
    Waiting,
    /// Spawned, not ready.
    Starting {
        /// Since when.
        #[serde(with = "crate::instants")]
        since: Instant,
    },
    /// Serves.
    Ready {
        /// Since when.
        #[serde(with = "crate::instants")]
        since: Instant,
    },
    /// Was told to finish.
    Draining {
        #[serde(with = "crate::instants")]
        until: Instant,
    },
    /// Reaped, while other ranks of its group are not.
    Reaped,
    /// Reaped; to be started again.
    Backoff {
        #[serde(with = "crate::instants")]
        until: Instant,
    },
    /// Reaped; not started again.
    Held { reason: ExitReason },
    /// Does not die.
    Unkillable,
    /// Reaped, and not wanted any more.
    Gone,
}

impl Lifecycle {
    /// One word for the log.
    pub fn name(&self) -> &'static str {
        self.into()
    }
}

/// How a process ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ExitStatus {
    /// It exited with this code.
    Code(i32),
    /// A signal killed it.
    Signal(i32),
    /// It could not be started.
    NotStarted {
        /// Why, for the restart decision.
        reason: ExitReason,
        /// One sentence for the operator.
        message: String,
    },
}

impl ExitStatus {
    /// The reason that decides about a restart. Signals are never a matter of configuration.
    pub fn reason(&self) -> ExitReason {
        match self {
            ExitStatus::Code(code) => ExitReason::from_code(*code).unwrap_or(ExitReason::Failed),
            ExitStatus::Signal(_) => ExitReason::Failed,
            ExitStatus::NotStarted { reason, .. } => *reason,
        }
    }
}

impl fmt::Display for ExitStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ExitStatus::Code(code) => match ExitReason::from_code(*code) {
                Some(reason) => write!(f, "exit {code} ({reason})"),
                None => write!(f, "exit {code}"),
            },
            ExitStatus::Signal(number) => match nix::sys::signal::Signal::try_from(*number) {
                Ok(signal) => f.write_str(signal.as_str()),
                Err(_) => write!(f, "signal {number}"),
            },
            ExitStatus::NotStarted { .. } => f.write_str("not started"),
        }
    }
}

/// A reading of a child's place on the board.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Beat {
    pub progress: u64,
    /// How long the counter may stand still now; `None` while another timeout holds.
    pub limit: Option<Duration>,
    /// The rank of its group that it waits for.
    pub waits_for: Option<Rank>,
}

/// What follows a death.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Next {
    /// Start again then.
    Restart(#[serde(with = "crate::instants")] Instant),
    /// Do not start again.
    Hold(ExitReason),
}

/// One child.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Child {
    pub id: ChildId,
    /// Generation of the present or the last process; 0 before the first.
    pub generation: Generation,
    /// Where it is in its life.
    pub state: Lifecycle,
    /// Whether a process exists that was not reaped.
    pub alive: bool,
    /// When it was sent SIGKILL.
    #[serde(with = "crate::instants::option")]
    pub killed: Option<Instant>,
    /// Whether it was killed for what it did to others: then it, and perhaps its work, is to
    /// blame.
    pub guilty: bool,
    /// Whether it was killed for nobody's fault: on request, or with a rank that was killed so.
    pub excused: bool,
    /// What it said about its own failure.
    pub complaint: Option<String>,
    #[serde(with = "crate::instants::option")]
    closed: Option<Instant>,
    #[serde(with = "crate::instants::option")]
    ready_since: Option<Instant>,
    #[serde(with = "crate::instants::list")]
    deaths: VecDeque<Instant>,
    /// Deaths that do not count.
    #[serde(with = "crate::instants::list")]
    kills: VecDeque<Instant>,
    /// Deaths in a row that were its own fault.
    failures: u32,
    still: Option<Stillness>,
}

/// A progress counter that does not move.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct Stillness {
    progress: u64,
    /// For how long it has not moved while the supervisor ran.
    stood: Duration,
    #[serde(with = "crate::instants")]
    seen: Instant,
}

impl Child {
    /// A child that was never started.
    pub fn new(id: ChildId) -> Child {
        Child::after(id, Generation(0))
    }

    /// A child whose first generation is the one after `last`.
    pub fn after(id: ChildId, last: Generation) -> Child {
        Child {
            id,
            generation: last,
            state: Lifecycle::Waiting,
            alive: false,
            killed: None,
            guilty: false,
            excused: false,
            complaint: None,
            closed: None,
            ready_since: None,
            deaths: VecDeque::new(),
            kills: VecDeque::new(),
            failures: 0,
            still: None,
        }
    }

    /// A new process begins; returns its generation.
    pub fn start(&mut self, now: Instant) -> Generation {
        self.generation = self.generation.next();
        self.state = Lifecycle::Starting { since: now };
        self.alive = true;
        self.killed = None;
        self.guilty = false;
        self.excused = false;
        self.complaint = None;
        self.closed = None;
        self.ready_since = None;
        self.still = None;
        self.generation
    }

    /// Its failures so far count no more.
    pub fn forget_deaths(&mut self) {
        self.deaths.clear();
        self.failures = 0;
    }

    /// Whether `generation` is a process that exists.
    pub fn is(&self, generation: Generation) -> bool {
        self.alive && self.generation == generation
    }

    /// Whether it serves and is not about to be killed.
    pub fn is_ready(&self) -> bool {
        self.alive && self.killed.is_none() && matches!(self.state, Lifecycle::Ready { .. })
    }

    /// Whether a message to it makes sense.
    pub fn is_reachable(&self) -> bool {
        self.alive
            && self.killed.is_none()
            && matches!(self.state, Lifecycle::Starting { .. } | Lifecycle::Ready { .. })
    }

    /// It reported ready.
    pub fn ready(&mut self, now: Instant) {
        if matches!(self.state, Lifecycle::Starting { .. }) {
            self.state = Lifecycle::Ready { since: now };
            self.ready_since = Some(now);
        }
    }

    /// Its control channel closed.
    pub fn channel_closed(&mut self, now: Instant) {
        self.closed.get_or_insert(now);
    }

    /// Its process was reaped. Decides what follows, for a child that is wanted:
    /// - no restart when trying again cannot help, or after too many deaths within the window, of
    ///   which those of a worker by a signal from outside do not count; too many of those only make
    ///   the pause long;
    /// - a restart at once after a kill from outside, and after the first failure of one that had
    ///   served: nothing speaks against the next try;
    /// - else one after a pause that doubles with each failure in a row; a life longer than the
    ///   window ends the row.
    pub fn reaped(&mut self, end: &ExitStatus, now: Instant, policy: &RestartConfig) -> Next {
        self.alive = false;
        let reason = end.reason();
        if reason.verdict() == Verdict::Hold {
            return Next::Hold(reason);
        }
        if self.counts(end) {
            self.deaths.push_back(now);
        } else if !self.excused {
            self.kills.push_back(now);
        }
        while self.deaths.front().is_some_and(|&death| now.duration_since(death) > policy.window) {
            self.deaths.pop_front();
        }
        while self.kills.front().is_some_and(|&kill| now.duration_since(kill) > policy.window) {
            self.kills.pop_front();
        }
        if self.deaths.len() > usize::try_from(policy.max_restarts).unwrap_or(usize::MAX) {
            return Next::Hold(ExitReason::RestartLimit);
        }
        let served = self.ready_since.map(|since| now.duration_since(since));
        self.failures = match served {
            Some(_) if self.cause(end) == DeathCause::Outside => 0,
            Some(served) if served > policy.window => 1,
            _ => self.failures.saturating_add(1),
        };
        if self.kills.len() > usize::try_from(policy.max_restarts).unwrap_or(usize::MAX) {
            // Whatever kills it does so again and again.
            return Next::Restart(now + policy.backoff_max);
        }
        let doublings = match self.failures {
            0 => return Next::Restart(now),
            1 if served.is_some() => return Next::Restart(now),
            failures => (failures - 1).min(20),
        };
        Next::Restart(
            now + policy.backoff_min.saturating_mul(1 << doublings).min(policy.backoff_max),
        )
    }

    /// Whether a death speaks against the child: not that of a worker by a signal from outside, or on
    /// request.
    pub fn counts(&self, end: &ExitStatus) -> bool {
        let is_signal = matches!(end, ExitStatus::Signal(_)) && self.killed.is_none();
        let from_outside = is_signal && self.cause(end) == DeathCause::Outside;
        !(self.excused || (from_outside && matches!(self.id, ChildId::Worker(_))))
    }

    /// Whose fault the death is: nobody's, when the child was killed from outside or by us for
    /// taking too long, or was told to end; its own, when it was killed for writing nonsense.
    pub fn cause(&self, end: &ExitStatus) -> DeathCause {
        use nix::libc::{SIGHUP, SIGINT, SIGKILL, SIGQUIT, SIGTERM};
        let outside = match end {
            ExitStatus::Signal(signal) => {
                [SIGKILL, SIGTERM, SIGINT, SIGHUP, SIGQUIT].contains(signal)
            }
            ExitStatus::Code(_) => {
                [ExitReason::Clean, ExitReason::ParentGone].contains(&end.reason())
            }
            ExitStatus::NotStarted { .. } => true,
        };
        if self.guilty {
            DeathCause::SelfInflicted
        } else if outside || self.killed.is_some() {
            DeathCause::Outside
        } else {
            DeathCause::SelfInflicted
        }
    }

    /// Judges a reading of the board: the time for which the child has made no progress, if that
    /// is too long. `pace` is the usual time between two readings. After a longer gap the
    /// supervisor itself stood still, and perhaps the child with it: two paces of the gap count,
    /// so that more readings follow before the child is judged.
    pub fn beat(&mut self, beat: Beat, now: Instant, pace: Duration) -> Option<Duration> {
        let stood = match &self.still {
            Some(still) if still.progress == beat.progress && beat.limit.is_some() => {
                still.stood + now.duration_since(still.seen).min(pace.saturating_mul(2))
            }
            _ => Duration::ZERO,
        };
        self.still = Some(Stillness { progress: beat.progress, stood, seen: now });
        beat.limit.filter(|&limit| stood > limit).map(|_| stood)
    }

    /// For how long its counter has not moved.
    pub fn stood(&self) -> Duration {
        self.still.map_or(Duration::ZERO, |still| still.stood)
    }

    /// When something is due if nothing happens.
    pub fn deadline(&self, policy: &RestartConfig) -> Option<Instant> {
        if let (true, Some(killed)) = (self.alive, self.killed) {
            return (self.state != Lifecycle::Unkillable).then_some(killed + KILL_PATIENCE);
        }
        let by_state = match self.state {
            Lifecycle::Starting { since } => Some(since + policy.start_timeout),
            Lifecycle::Draining { until } | Lifecycle::Backoff { until } => Some(until),
            _ => None,
        };
        let closed = self.closed.filter(|_| self.alive).map(|closed| closed + CLOSED_PATIENCE);
        by_state.into_iter().chain(closed).min()
    }

    /// Why it should be killed now, if it should.
    pub fn overdue(&self, now: Instant, policy: &RestartConfig) -> Option<String> {
        if !self.alive || self.killed.is_some() {
            return None;
        }
        if self.closed.is_some_and(|closed| now >= closed + CLOSED_PATIENCE) {
            return Some("closed its control channel but did not exit".to_owned());
        }
        match self.state {
            Lifecycle::Starting { since } if now >= since + policy.start_timeout => Some(format!(
                "was not ready within {:?}; see --start_timeout",
                policy.start_timeout
            )),
            Lifecycle::Draining { until } if now >= until => {
                Some("did not drain in time".to_owned())
            }
            _ => None,
        }
    }
}
