//! Flags of the commands for running instances: `status`, `top`, `pause`, `resume`, `restart`.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use supervisor::handover::HandoverOptions;
use supervisor::status::{InstanceRequest, MAX_PATIENCE};

use crate::status::{OrderOptions, StatusOptions};

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
    #[arg(long, value_name = "DIR", required = false)]
    runtime_dir: PathBuf,
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

#[derive(Debug, Args)]
#[command(rename_all = "snake_case")]
pub(super) struct UpgradeArgs {
    /// The new executable [default: the one at the path from which the server was started]
    #[arg(long, value_name = "PATH")]
    to: Option<PathBuf>,
    #[command(flatten)]
    instance: InstanceArgs,
    /// How long open sessions may keep netd from being replaced, in seconds: it ends their connections
    #[arg(long, value_name = "SECONDS", default_value = "60", value_parser = patience)]
    patience: Duration,
    /// Return at once instead of waiting until the new build serves
    #[arg(long)]
    no_wait: bool,
}

/// What a supervisor asks of the executable that it becomes.
#[derive(Debug, Args)]
pub(super) struct HandoverArgs {
    /// Say which build this is, and whether it reads the state on standard input
    #[arg(long, conflicts_with = "resume")]
    describe: bool,
    /// The descriptor of the state to go on with
    #[arg(long, value_name = "FD", required_unless_present = "describe")]
    resume: Option<i32>,
    /// Arguments of the process, for whoever lists it
    #[arg(last = true)]
    arguments: Vec<std::ffi::OsString>,
}

impl HandoverArgs {
    pub(super) fn options(self) -> HandoverOptions {
        self.resume.map_or(HandoverOptions::Describe, HandoverOptions::Resume)
    }
}

impl InstanceArgs {
    pub(super) fn options(self) -> StatusOptions {
        let InstanceArgs { instance, runtime_dir } = self;
        StatusOptions { instance, runtime_dir, ready: false, json: false }
    }

    /// An order that nobody waits for.
    pub(super) fn order(self, request: InstanceRequest) -> OrderOptions {
        let InstanceArgs { instance, runtime_dir } = self;
        OrderOptions { instance, runtime_dir, request, no_wait: true }
    }
}

impl StatusArgs {
    pub(super) fn options(self) -> StatusOptions {
        StatusOptions { ready: self.ready, json: self.json, ..self.of.options() }
    }
}

impl PauseArgs {
    pub(super) fn order(self) -> OrderOptions {
        let request = InstanceRequest::Pause { patience_s: self.patience.as_secs() };
        OrderOptions { no_wait: self.no_wait, ..self.instance.order(request) }
    }
}

impl UpgradeArgs {
    pub(super) fn order(self) -> Result<OrderOptions, String> {
        let absolute = |path: PathBuf| {
            std::path::absolute(&path)
                .map_err(|error| format!("invalid --to {}: {error}", path.display()))
        };
        let path = self.to.map(absolute).transpose()?;
        let request = InstanceRequest::Upgrade { path, patience_s: self.patience.as_secs() };
        Ok(OrderOptions { no_wait: self.no_wait, ..self.instance.order(request) })
    }
}

impl RestartArgs {
    pub(super) fn order(self) -> OrderOptions {
        self.instance.order(InstanceRequest::Restart { worker: self.worker })
    }
}

/// A time that open sessions may take: whole seconds, 0 for none.
fn patience(text: &str) -> Result<Duration, String> {
    let most = MAX_PATIENCE;
    let time = text.parse().ok().map(Duration::from_secs).filter(|time| *time <= most);
    time.ok_or_else(|| format!("expected whole seconds, 0 to {}", most.as_secs()))
}
