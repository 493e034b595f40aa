//! Why a process of Sepal ended: one value per decision that the supervisor takes about restarting
//! it. The same numbers are the documented exit codes of `sepal`; none but [`ExitReason::Clean`] is
//! 0.

use serde::{Deserialize, Serialize};
use strum::{Display, FromRepr};

/// Reason of an orderly exit, told to the parent through the exit code.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, Display, FromRepr)]
#[strum(serialize_all = "lowercase")]
#[repr(u8)]
pub enum ExitReason {
    /// Did what was asked, or drained after a signal.
    Clean = 0,
    /// An error without a better name; worth another try.
    Failed = 1,
    /// Wrong flags, model folder or settings: trying again cannot help. (2 is also what the flag
    /// parser uses.)
    #[strum(to_string = "bad configuration")]
    BadConfig = 2,
    /// The device failed or vanished.
    #[strum(to_string = "device lost")]
    DeviceLost = 10,
    /// Not enough memory for what was asked.
    #[strum(to_string = "out of memory")]
    OutOfMemory = 11,
    /// Parent and child are different builds, or a segment has another layout.
    #[strum(to_string = "protocol mismatch")]
    ProtocolMismatch = 12,
    /// The parent went away; the child follows.
    #[strum(to_string = "parent gone")]
    ParentGone = 13,
    /// Another run holds the instance, the port or the identity.
    Busy = 14,
    /// Children kept dying faster than the restart intensity allows.
    #[strum(to_string = "restart limit")]
    RestartLimit = 15,
    /// A checkpoint file was changed or cut short while it was served.
    #[strum(to_string = "weights changed")]
    WeightsChanged = 16,
    /// The model's source could not be reached; trying again later may help.
    #[strum(to_string = "model source unreachable")]
    Unreachable = 17,
    /// The supervisor ended the group of the worker, since another rank of it died or hung.
    #[strum(to_string = "group aborted")]
    GroupAborted = 18,
}

/// What the supervisor does about a child that ended with a reason.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Nothing: it was meant to end.
    Done,
    /// Start it again after a pause.
    Restart,
    /// Do not start it again; tell the operator.
    Hold,
}

impl ExitReason {
    /// The exit code of the process.
    pub fn code(self) -> u8 {
        self as u8
    }

    /// The reason behind an exit code; `None` for codes that Sepal never uses.
    pub fn from_code(code: i32) -> Option<ExitReason> {
        u8::try_from(code).ok().and_then(ExitReason::from_repr)
    }

    /// What follows for a child that serves (a worker or netd).
    pub fn verdict(self) -> Verdict {
        match self {
            ExitReason::Clean => Verdict::Done,
            ExitReason::BadConfig
            | ExitReason::ProtocolMismatch
            | ExitReason::Busy
            | ExitReason::WeightsChanged
            | ExitReason::Unreachable => Verdict::Hold,
            _ => Verdict::Restart,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_clean_is_zero_and_codes_round_trip() {
        let reasons: Vec<ExitReason> = (0..=255).filter_map(ExitReason::from_code).collect();
        assert_eq!(reasons.len(), 12);
        for reason in reasons {
            assert_eq!(reason.code() == 0, reason == ExitReason::Clean);
            assert_eq!(ExitReason::from_code(i32::from(reason.code())), Some(reason));
        }
        assert_eq!(ExitReason::from_code(256), None);
        assert_eq!(ExitReason::from_code(101), None);
    }
}
