//! What a child process is.

use serde::{Deserialize, Serialize};
use strum::IntoStaticStr;

/// Role of a child process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, IntoStaticStr)]
#[strum(serialize_all = "lowercase")]
pub enum Role {
    Netd,
    /// A worker that owns one device.
    #[strum(to_string = "gpu-worker")]
    Worker,
    /// The short-lived reader of checkpoints.
    Prepare,
}

impl Role {
    /// The hidden subcommand of `sepal` that runs the role, and its name in logs.
    pub fn name(self) -> &'static str {
        self.into()
    }
}
