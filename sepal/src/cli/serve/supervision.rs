//! Flags of `serve` about its own processes; Petals has none of them.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use shared::config::values::{metrics_addr, pause, seconds};
use shared::config::{Device, FaultPlan, RestartConfig, processor};
use shared::sandbox::SandboxMode;

#[derive(Debug, Args)]
#[command(rename_all = "snake_case", next_help_heading = "Supervision")]
pub struct SupervisionArgs {
    /// Name of this instance [default: the first free number]
    #[arg(long, value_name = "NAME")]
    pub(super) instance: Option<String>,
    /// Folder of the instances [default: $XDG_RUNTIME_DIR/sepal or /tmp/sepal-UID]
    #[arg(long, value_name = "DIR", required = false)]
    pub(super) runtime_dir: PathBuf,
    /// Time for running steps to finish after SIGTERM or Ctrl-C, in seconds
    #[arg(long, value_name = "SECONDS", default_value = "30", value_parser = seconds)]
    pub(super) drain_timeout: Duration,
    /// Time without a heartbeat after which a process is killed and restarted, in seconds
    #[arg(long, value_name = "SECONDS", default_value = "30", value_parser = seconds)]
    pub(super) hang_timeout: Duration,
    /// Time for a process to become ready (a worker loads its blocks), in seconds
    #[arg(long, value_name = "SECONDS", default_value = "1800", value_parser = seconds)]
    pub(super) start_timeout: Duration,
    /// Maximum restarts of one process within --restart_window
    #[arg(long, value_name = "N", default_value_t = 10)]
    pub(super) max_restarts: u32,
    /// Window of --max_restarts, in seconds
    #[arg(long, value_name = "SECONDS", default_value = "60", value_parser = seconds)]
    pub(super) restart_window: Duration,
    /// Time after which a device that was put aside (--max_restarts) is tried again, in seconds; doubles
    /// with each failure, up to an hour; 0 = never
    #[arg(long, value_name = "SECONDS", default_value = "60", value_parser = pause)]
    pub(super) retry_after: Duration,
    /// Confine the processes that meet peers and models to what their work needs, by Landlock and
    /// seccomp: off, on (as far as the kernel can), or require (else do not start)
    #[arg(long, value_name = "off|on|require", default_value = "on")]
    pub(super) sandbox: SandboxMode,
    /// Processor (cpu or cpu:N) that serves the blocks of a device that keeps failing, as many as fit
    /// in memory, until the device passes its self-test again [default: none, its blocks are OFFLINE]
    #[arg(long, value_name = "DEVICE", value_parser = processor)]
    pub(super) fallback_device: Option<Device>,
    /// Log statistics in hivemind's format with this period, in seconds [default: never]
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    pub(super) stats_report_interval: Option<Duration>,
    /// Serve metrics for Prometheus at /metrics, with /livez and /readyz, at this address; a port
    /// alone is one of 127.0.0.1 [default: none]
    #[arg(long, value_name = "ADDR", value_parser = metrics_addr)]
    pub(super) metrics: Option<SocketAddr>,
    /// Show the swarm in a browser at this address: its servers, what is missing, and a chat; a port alone
    /// is one of 127.0.0.1. The chat holds embeddings and head of the model in memory [default: none]
    #[arg(long, value_name = "ADDR", value_parser = metrics_addr)]
    pub(super) web: Option<SocketAddr>,
    /// Print what happens to the server on standard output, as lines of JSON
    #[arg(long)]
    pub(super) events: bool,
    /// A fault that each worker inflicts on itself: ACTION@POINT#JOB[xTIMES]
    #[arg(long, value_name = "FAULT", hide = true)]
    pub(super) inject_fault: Option<FaultPlan>,
    /// Seconds for the sample of warpgroups that a process takes of a CUDA device, once for each
    /// driver and build
    #[arg(long, value_name = "SECONDS", hide = true, default_value = "30", value_parser = seconds)]
    pub(super) sample_timeout: Duration,
    /// Drain when the process that started this one, which has this id, ends
    #[arg(long, value_name = "PID", hide = true)]
    pub(super) end_with: Option<u32>,
}

impl SupervisionArgs {
    /// When children are restarted.
    pub fn restart(&self) -> RestartConfig {
        RestartConfig {
            backoff_min: Duration::from_millis(100),
            backoff_max: Duration::from_secs(30),
            max_restarts: self.max_restarts,
            window: self.restart_window,
            retry_after: Some(self.retry_after).filter(|pause| !pause.is_zero()),
            hang_timeout: self.hang_timeout,
            start_timeout: self.start_timeout,
        }
    }
}
