//! What the words of the board mean.

use super::super::layout::RESTART_REASONS;

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
    /// Why a child was started again.
    enum RestartReason: usize {
        /// Somebody outside sent it a signal.
        Signal = 0, "signal";
        /// The kernel ran out of memory and killed it, or it got no memory.
        OutOfMemory = 1, "out_of_memory";
        /// It stood still, and the supervisor killed it.
        Hang = 2, "hang";
        /// It crashed: a fault of its own ended it by a signal.
        Crash = 3, "crash";
        Device = 4, "device";
        /// It said why it cannot go on, and ended.
        Exit = 5, "exit";
        /// Another rank of its group ended.
        Group = 6, "group";
        /// Anything else: it could not be started, or broke its control channel.
        Other = 7, "other";
    }
}

const _: () = assert!(RestartReason::ALL.len() == RESTART_REASONS, "the board has words for each");
