//! What the words of the board mean.

use super::TROUBLES;

/// Declares the words of one kind, each with its value and its name in reports.
macro_rules! words {
    (
        $(#[$of_kind:meta])*
        enum $kind:ident: $repr:ident {
            $($(#[$of_word:meta])* $word:ident = $value:expr, $name:literal;)*
        }
    ) => {
        $(#[$of_kind])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr($repr)]
        pub enum $kind {
            $($(#[$of_word])* $word = $value,)*
        }

        impl $kind {
            /// All of them, in the order of their values.
            pub const ALL: [$kind; [$($name),*].len()] = [$($kind::$word),*];

            /// Its name in reports.
            pub fn name(self) -> &'static str {
                match self {
                    $($kind::$word => $name,)*
                }
            }
        }
    };
}

words! {
    /// State of a child as the supervisor sees it.
    enum ChildState: u64 {
        /// Nothing was said yet.
        Unset = 0, "unset";
        /// Spawned, not ready.
        Starting = 1, "starting";
        /// Serves.
        Ready = 2, "ready";
        /// Was told to finish.
        Draining = 3, "draining";
        /// Died; will be started again after a pause.
        Backoff = 4, "backoff";
        /// Will not be started again: its configuration or its device is at fault.
        Held = 5, "held";
        /// Ended for good.
        Gone = 6, "gone";
        /// A value that this build does not know.
        Unknown = u64::MAX, "unknown";
    }
}

impl ChildState {
    pub(super) fn from_word(word: u64) -> ChildState {
        Self::ALL.into_iter().find(|&state| state as u64 == word).unwrap_or(ChildState::Unknown)
    }
}

words! {
    /// What a child is busy with. Progress is expected in every phase.
    enum Phase: u64 {
        /// Nothing to do; one progress per heartbeat.
        Idle = 0, "idle";
        /// Reading weights; one progress per tensor.
        Loading = 1, "loading";
        /// Making kernels ready; one progress per module.
        Compiling = 2, "compiling";
        /// Measuring throughput; one progress per repetition.
        Measuring = 3, "measuring";
        /// Computing; one progress per unit.
        Unit = 4, "unit";
        /// netd's reactor; one progress per heartbeat.
        Reactor = 5, "reactor";
        /// Reading and converting a checkpoint; one progress per tensor or piece of a download.
        Preparing = 6, "preparing";
        /// A value that this build does not know.
        Unknown = u64::MAX, "unknown";
    }
}

impl Phase {
    pub(super) fn from_word(word: u64) -> Phase {
        Self::ALL.into_iter().find(|&phase| phase as u64 == word).unwrap_or(Phase::Unknown)
    }

    /// Whether a child in this phase gets ready, with a time limit of the phase's own.
    pub fn is_start(self) -> bool {
        matches!(self, Phase::Loading | Phase::Compiling | Phase::Measuring | Phase::Preparing)
    }
}

words! {
    /// Why requests of peers were not served as asked, as netd counts it.
    enum Trouble: usize {
        /// A block, an adapter or an RPC that is not served here.
        NotServed = 0, "not_served";
        /// It makes no sense: bytes, metadata, shapes or values.
        Malformed = 1, "malformed";
        /// It is over a limit: tokens, rows, length, bytes.
        TooLarge = 2, "too_large";
        /// There is no KV cache for it.
        NoMemory = 3, "no_memory";
        /// It, or the silence between two of its messages, took too long.
        TimedOut = 4, "timed_out";
        /// Its caller went away before the answer, or took none of it.
        Abandoned = 5, "abandoned";
        /// A step pushed by another server that belongs to no session here, or cannot be its next.
        Push = 6, "push";
        /// It failed on this side.
        Failed = 7, "failed";
        /// A record of the DHT that holds nonsense, or is of a clock that is far off, or is over the
        /// bounds of the store: dropped.
        BadRecord = 8, "bad_record";
        /// Its peer holds as much KV cache as it may while others want some.
        OverShare = 9, "over_share";
    }
}

const _: () = assert!(Trouble::ALL.len() == TROUBLES, "the board has a word for each");
