//! What figures are told apart by.

use serde::{Deserialize, Serialize};

use super::page::{Label, LabelPair, Sample, Samples};
use crate::ids::WorkerId;
use crate::job::WorkKind;

/// Declares the values of one label, each with its name in reports.
macro_rules! kinds {
    (
        $(#[$of_kind:meta])*
        enum $kind:ident as $label:literal {
            $($(#[$of_word:meta])* $word:ident = $name:literal,)*
        }
    ) => {
        $(#[$of_kind])*
        #[derive(
            Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
        )]
        pub enum $kind {
            $($(#[$of_word])* #[serde(rename = $name)] $word,)*
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

        impl Label for $kind {
            const LABEL: &'static str = $label;

            fn value(&self) -> String {
                self.name().to_owned()
            }
        }
    };
}

kinds! {
    /// Why requests of peers were not served as asked, as netd counts it.
    enum Trouble as "kind" {
        /// A block, an adapter or an RPC that is not served here.
        NotServed = "not_served",
        /// It makes no sense: bytes, metadata, shapes or values.
        Malformed = "malformed",
        /// It is over a limit: tokens, rows, length, bytes.
        TooLarge = "too_large",
        /// There is no KV cache for it.
        NoMemory = "no_memory",
        /// It, or the silence between two of its messages, took too long.
        TimedOut = "timed_out",
        /// Its caller went away before the answer, or took none of it.
        Abandoned = "abandoned",
        /// A step pushed by another server that belongs to no session here, or cannot be its next.
        Push = "push",
        /// It failed on this side.
        Failed = "failed",
        /// A record of the DHT that holds nonsense, or is of a clock that is far off, or is over the
        /// bounds of the store: dropped.
        BadRecord = "bad_record",
        /// Its peer holds as much KV cache as it may while others want some.
        OverShare = "over_share",
    }
}

kinds! {
    /// Parts of the time that a step spends in the server.
    enum StepPart as "part" {
        /// From the last byte of the request until the answer is ready to be sent.
        Total = "total",
        /// What of that netd spends on the messages: reading and converting the request, handing
        /// the job over, converting and writing the answer. Total less the two below.
        Network = "network",
        /// Waiting in the workers.
        Queue = "queue",
        /// Being computed.
        Compute = "compute",
    }
}

kinds! {
    /// What became of a step that another server pushed to a session.
    enum PushedStep as "outcome" {
        /// It came before the client's copy and was answered.
        First = "first",
        /// It came after the client's copy and was dropped.
        Late = "late",
        /// It came first, and the client's copy has other values.
        Differs = "differs",
    }
}

kinds! {
    /// What the server tells the swarm of itself.
    #[derive(Default)]
    enum Announcement as "state" {
        /// Nothing.
        #[default]
        Nothing = "nothing",
        /// It will serve soon.
        Joining = "joining",
        /// Clients can come.
        Online = "online",
        Offline = "offline",
    }
}

/// 1 for the state that it is, 0 for all others.
impl Samples for Announcement {
    fn samples(&self, labels: &mut Vec<LabelPair>, samples: &mut Vec<Sample>) {
        for state in Announcement::ALL {
            labels.push((Announcement::LABEL, state.value()));
            (state == *self).samples(labels, samples);
            labels.pop();
        }
    }
}

impl Label for WorkKind {
    const LABEL: &'static str = "kind";

    fn value(&self) -> String {
        self.name().to_owned()
    }
}

impl Label for WorkerId {
    const LABEL: &'static str = "worker";

    fn value(&self) -> String {
        self.to_string()
    }
}
