//! What the words of the board mean.

use super::TROUBLES;

/// State of a child as the supervisor sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u64)]
pub enum ChildState {
    /// Nothing was said yet.
    Unset = 0,
    /// Spawned, not ready.
    Starting = 1,
    /// Serves.
    Ready = 2,
    /// Was told to finish.
    Draining = 3,
    /// Died; will be started again after a pause.
    Backoff = 4,
    /// Will not be started again: its configuration or its device is at fault.
    Held = 5,
    /// Ended for good.
    Gone = 6,
    /// A value that this build does not know.
    Unknown = u64::MAX,
}

impl ChildState {
    const ALL: [ChildState; 7] = [
        ChildState::Unset,
        ChildState::Starting,
        ChildState::Ready,
        ChildState::Draining,
        ChildState::Backoff,
        ChildState::Held,
        ChildState::Gone,
    ];

    pub(super) fn from_word(word: u64) -> ChildState {
        Self::ALL
            .into_iter()
            .find(|&state| state as u64 == word)
            .unwrap_or(ChildState::Unknown)
    }

    /// Its name in reports.
    pub fn name(self) -> &'static str {
        match self {
            ChildState::Unset => "unset",
            ChildState::Starting => "starting",
            ChildState::Ready => "ready",
            ChildState::Draining => "draining",
            ChildState::Backoff => "backoff",
            ChildState::Held => "held",
            ChildState::Gone => "gone",
            ChildState::Unknown => "unknown",
        }
    }
}

/// What a child is busy with. Progress is expected in all but [`Phase::Idle`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u64)]
pub enum Phase {
    /// Nothing to do: the progress counter may stand still for ever.
    Idle = 0,
    /// Reading weights; one progress per tensor.
    Loading = 1,
    /// Making kernels ready; one progress per module.
    Compiling = 2,
    /// Measuring throughput; one progress per repetition.
    Measuring = 3,
    /// Computing; one progress per unit.
    Unit = 4,
    /// netd's reactor; one progress per heartbeat.
    Reactor = 5,
    /// Reading and converting a checkpoint; one progress per tensor or piece of a download.
    Preparing = 6,
    /// A value that this build does not know.
    Unknown = u64::MAX,
}

impl Phase {
    const ALL: [Phase; 7] = [
        Phase::Idle,
        Phase::Loading,
        Phase::Compiling,
        Phase::Measuring,
        Phase::Unit,
        Phase::Reactor,
        Phase::Preparing,
    ];

    pub(super) fn from_word(word: u64) -> Phase {
        Self::ALL
            .into_iter()
            .find(|&phase| phase as u64 == word)
            .unwrap_or(Phase::Unknown)
    }

    /// Its name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Phase::Idle => "idle",
            Phase::Loading => "loading",
            Phase::Compiling => "compiling",
            Phase::Measuring => "measuring",
            Phase::Unit => "unit",
            Phase::Reactor => "reactor",
            Phase::Preparing => "preparing",
            Phase::Unknown => "unknown",
        }
    }
}

/// Why requests of peers were not served as asked, as netd counts it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(usize)]
pub enum Trouble {
    /// A block, an adapter or an RPC that is not served here.
    NotServed = 0,
    /// It makes no sense: bytes, metadata, shapes or values.
    Malformed = 1,
    /// It is over a limit: tokens, rows, length, bytes.
    TooLarge = 2,
    /// There is no KV cache for it.
    NoMemory = 3,
    /// It, or the silence between two of its messages, took too long.
    TimedOut = 4,
    /// Its caller went away before the answer, or took none of it.
    Abandoned = 5,
    /// A step pushed by another server that belongs to no session here, or cannot be its next.
    Push = 6,
    /// It failed on this side.
    Failed = 7,
    /// A record of the DHT that holds nonsense, or is of a clock that is far off, or is over the bounds of the store: dropped.
    BadRecord = 8,
    /// Its peer holds as much KV cache as it may while others want some.
    OverShare = 9,
}

impl Trouble {
    /// All kinds, in the order of the board.
    pub const ALL: [Trouble; TROUBLES] = [
        Trouble::NotServed,
        Trouble::Malformed,
        Trouble::TooLarge,
        Trouble::NoMemory,
        Trouble::TimedOut,
        Trouble::Abandoned,
        Trouble::Push,
        Trouble::Failed,
        Trouble::BadRecord,
        Trouble::OverShare,
    ];

    /// Its name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Trouble::NotServed => "not_served",
            Trouble::Malformed => "malformed",
            Trouble::TooLarge => "too_large",
            Trouble::NoMemory => "no_memory",
            Trouble::TimedOut => "timed_out",
            Trouble::Abandoned => "abandoned",
            Trouble::Push => "push",
            Trouble::Failed => "failed",
            Trouble::BadRecord => "bad_record",
            Trouble::OverShare => "over_share",
        }
    }
}
