//! What a child process is.

use serde::{Deserialize, Serialize};

/// Role of a child process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Role {
    Netd,
    /// A worker that owns one device.
    Worker,
    /// The short-lived reader of checkpoints.
    Prepare,
}

impl Role {
    /// The hidden subcommand of `sepal` that runs the role, and its name in logs.
    pub fn name(self) -> &'static str {
        match self {
            Role::Netd => "netd",
            Role::Worker => "gpu-worker",
            Role::Prepare => "prepare",
        }
    }
}
