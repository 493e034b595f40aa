//! Errors that end the daemon.

use shared::exit::ExitReason;

/// An end that the operator has to hear of.
#[derive(Debug)]
pub struct Fatal {
    /// What the supervisor is to do about it.
    pub reason: ExitReason,
    /// One sentence that names the values and what to do.
    pub message: String,
}

impl Fatal {
    /// Settings that cannot work.
    pub fn bad_config(message: impl Into<String>) -> Fatal {
        Fatal { reason: ExitReason::BadConfig, message: message.into() }
    }

    /// Something that may work the next time.
    pub fn failed(message: impl Into<String>) -> Fatal {
        Fatal { reason: ExitReason::Failed, message: message.into() }
    }
}
