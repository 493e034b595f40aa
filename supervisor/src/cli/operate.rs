//! Flags of the commands for running instances: `status`, `top`, `pause`, `resume`, `restart`.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;

use super::values::patience;
use super::{Env, runtime_dir};
use crate::status::{OrderOptions, Request, StatusOptions};

#[derive(Debug, Args)]
#[command(rename_all = "snake_case")]
pub(super) struct StatusArgs {
    #[command(flatten)]
    of: InstanceArgs,
    /// Print nothing, and exit with 0 only if clients can come: for health checks
    #[arg(long, conflicts_with = "json")]
    ready: bool,
    /// Print JSON instead of a table
    #[arg(long)]
    json: bool,
}

/// Which running instance.
#[derive(Debug, Args)]
#[command(rename_all = "snake_case")]
pub(super) struct InstanceArgs {
    /// Name of the instance [default: all for status, else the only one]
    #[arg(long, value_name = "NAME")]
    instance: Option<String>,
    /// Folder of the instances [default: $XDG_RUNTIME_DIR/sepal or /tmp/sepal-UID]
    #[arg(long, value_name = "DIR")]
    runtime_dir: Option<PathBuf>,
}

#[derive(Debug, Args)]
#[command(rename_all = "snake_case")]
pub(super) struct PauseArgs {
    #[command(flatten)]
    instance: InstanceArgs,
    /// How long open sessions may go on, in seconds
    #[arg(long, value_name = "SECONDS", default_value = "60", value_parser = patience)]
    patience: Duration,
    /// Return at once instead of waiting until the devices are free
    #[arg(long)]
    no_wait: bool,
}

#[derive(Debug, Args)]
pub(super) struct RestartArgs {
    /// The worker as in sepal status, such as 0.0
    worker: String,
    #[command(flatten)]
    instance: InstanceArgs,
}

impl InstanceArgs {
    pub(super) fn options(self, env: Env<'_>) -> StatusOptions {
        let runtime_dir = self.runtime_dir.unwrap_or_else(|| runtime_dir(env));
        StatusOptions { instance: self.instance, runtime_dir, ready: false, json: false }
    }

    /// An order that nobody waits for.
    pub(super) fn order(self, request: Request, env: Env<'_>) -> OrderOptions {
        let runtime_dir = self.runtime_dir.unwrap_or_else(|| runtime_dir(env));
        OrderOptions { instance: self.instance, runtime_dir, request, no_wait: true }
    }
}

impl StatusArgs {
    pub(super) fn options(self, env: Env<'_>) -> StatusOptions {
        StatusOptions { ready: self.ready, json: self.json, ..self.of.options(env) }
    }
}

impl PauseArgs {
    pub(super) fn order(self, env: Env<'_>) -> OrderOptions {
        let request = Request::Pause { patience_s: self.patience.as_secs() };
        OrderOptions { no_wait: self.no_wait, ..self.instance.order(request, env) }
    }
}

impl RestartArgs {
    pub(super) fn order(self, env: Env<'_>) -> OrderOptions {
        self.instance.order(Request::Restart { worker: self.worker }, env)
    }
}
