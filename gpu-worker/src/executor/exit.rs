//! Why the executor ends, and which failures end it.

use std::io;

use kernels::ops::{GroupFailure, OpError};
use shared::error_chain::with_causes;
use shared::exit::ExitReason;
use shared::shm::group::GroupError;
use shared::shm::ring::RingCorrupt;

use crate::engine::EngineError;

/// Why the executor ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Exit {
    /// For the exit code.
    pub reason: ExitReason,
    /// One sentence for the operator; empty when all is well.
    pub message: String,
}

impl Exit {
    pub(super) fn clean() -> Exit {
        Exit { reason: ExitReason::Clean, message: String::new() }
    }

    pub(super) fn failed(message: impl Into<String>) -> Exit {
        Exit { reason: ExitReason::Failed, message: message.into() }
    }
}

impl From<RingCorrupt> for Exit {
    fn from(error: RingCorrupt) -> Exit {
        Exit::failed(error.to_string())
    }
}

impl From<io::Error> for Exit {
    fn from(error: io::Error) -> Exit {
        Exit::failed(format!("doorbell: {error}"))
    }
}

impl From<GroupError> for Exit {
    fn from(error: GroupError) -> Exit {
        match error {
            GroupError::Aborted => Exit {
                reason: ExitReason::GroupAborted,
                message: "another worker of the group died or hung".to_owned(),
            },
            other => Exit::failed(with_causes(&other)),
        }
    }
}

impl From<GroupFailure> for Exit {
    fn from(failure: GroupFailure) -> Exit {
        match failure {
            GroupFailure::Aborted => GroupError::Aborted.into(),
            fault => Exit::failed(OpError::Group(fault).to_string()),
        }
    }
}

impl From<OpError> for Exit {
    fn from(error: OpError) -> Exit {
        EngineError::from(error).into()
    }
}

impl From<EngineError> for Exit {
    fn from(error: EngineError) -> Exit {
        match error {
            EngineError::Op(OpError::Device(failure)) => Exit {
                reason: ExitReason::DeviceLost,
                message: format!("the device failed: {failure}"),
            },
            EngineError::Op(OpError::Group(failure)) => failure.into(),
            other => Exit::failed(format!("cannot compute a job that passed its checks: {other}")),
        }
    }
}
