//! Flags of the processes that `sepal` starts of itself, beside those of the crates that carry them out.

use clap::Args;
use shared::control::Role;

use super::Command;

#[derive(Debug, Args)]
pub struct CudaDevicesArgs {
    /// The process that waits for the answer
    #[arg(long)]
    pub parent: u32,
}

#[derive(Debug, Args)]
pub struct RoleArgs {
    /// Descriptor inherited from the supervisor
    #[arg(long)]
    bootstrap: i32,
}

impl RoleArgs {
    /// What is asked for.
    pub fn command(self, role: Role) -> Command {
        Command::Role { role, bootstrap: self.bootstrap }
    }
}
