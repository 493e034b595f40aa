//! Why a process of Sepal ended: one value per decision that the supervisor takes about restarting
//! it. The same numbers are the documented exit codes of `sepal`; none but [`ExitReason::Clean`] is
//! 0.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Reason of an orderly exit, told to the parent through the exit code.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[repr(u8)]
pub enum ExitReason {
    /// Did what was asked, or drained after a signal.
    Clean = 0,
    /// An error without a better name; worth another try.
    Failed = 1,
    /// Wrong flags, model folder or settings: trying again cannot help. (2 is also what the flag
    /// parser uses.)
    BadConfig = 2,
    /// The device failed or vanished.
    DeviceLost = 10,
    /// Not enough memory for what was asked.
    OutOfMemory = 11,
    /// Parent and child are different builds, or a segment has another layout.
    ProtocolMismatch = 12,
    /// The parent went away; the child follows.
    ParentGone = 13,
    /// Another run holds the instance, the port or the identity.
    Busy = 14,
    /// Children kept dying faster than the restart intensity allows.
    RestartLimit = 15,
    /// A checkpoint file was changed or cut short while it was served.
    WeightsChanged = 16,
    /// The model's source could not be reached; trying again later may help.
    Unreachable = 17,
    /// The supervisor ended the group of the worker, since another rank of it died or hung.
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
    const ALL: [ExitReason; 12] = [
        ExitReason::Clean,
        ExitReason::Failed,
        ExitReason::BadConfig,
        ExitReason::DeviceLost,
        ExitReason::OutOfMemory,
        ExitReason::ProtocolMismatch,
        ExitReason::ParentGone,
        ExitReason::Busy,
        ExitReason::RestartLimit,
        ExitReason::WeightsChanged,
        ExitReason::Unreachable,
        ExitReason::GroupAborted,
    ];

    /// The exit code of the process.
    pub fn code(self) -> u8 {
        self as u8
    }

    /// The reason behind an exit code; `None` for codes that Sepal never uses.
    pub fn from_code(code: i32) -> Option<ExitReason> {
        Self::ALL.into_iter().find(|r| i32::from(r.code()) == code)
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

impl fmt::Display for ExitReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            ExitReason::Clean => "clean",
            ExitReason::Failed => "failed",
            ExitReason::BadConfig => "bad configuration",
            ExitReason::DeviceLost => "device lost",
            ExitReason::OutOfMemory => "out of memory",
            ExitReason::ProtocolMismatch => "protocol mismatch",
            ExitReason::ParentGone => "parent gone",
            ExitReason::Busy => "busy",
            ExitReason::RestartLimit => "restart limit",
            ExitReason::WeightsChanged => "weights changed",
            ExitReason::Unreachable => "model source unreachable",
            ExitReason::GroupAborted => "group aborted",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_clean_is_zero_and_codes_round_trip() {
        for reason in ExitReason::ALL {
            assert_eq!(reason.code() == 0, reason == ExitReason::Clean);
            assert_eq!(ExitReason::from_code(i32::from(reason.code())), Some(reason));
        }
        assert_eq!(ExitReason::from_code(101), None);
    }
}
