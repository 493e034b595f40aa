//! Flags about logging, of all commands that log.

use std::io::IsTerminal;

use clap::Args;
use shared::config::{LogConfig, LogFormat};

use super::Env;

/// What is logged unless the operator says otherwise. libp2p warns of things that are no trouble
/// here, such as a new swarm without peers.
pub const DEFAULT_LOG: &str = "info,libp2p_swarm=warn,libp2p_kad=error";

/// The same for a person at a terminal, whom the supervisor tells what matters.
pub const TERMINAL_LOG: &str = "warn,libp2p_kad=error";

/// The same for a command whose answer is what it prints.
pub const QUIET_LOG: &str = "warn";

/// How to log.
#[derive(Debug, Args)]
#[command(rename_all = "snake_case", next_help_heading = "Logging")]
pub struct LogArgs {
    /// Log filter: a level, or a list such as info,netd=debug [env: SEPAL_LOG]
    #[arg(long, value_name = "FILTER")]
    log: Option<String>,
    /// Format of the log: terminal (progress and the events that matter), text (every event with its
    /// time and process) or json [default: terminal on a terminal without --log, else text]
    #[arg(long, value_name = "FORMAT")]
    log_format: Option<LogFormat>,
}

impl LogArgs {
    /// How to log; `default` is the filter unless the operator says otherwise.
    pub fn resolve(self, env: Env<'_>, default: &str) -> LogConfig {
        let filter = self.log.or_else(|| env.get("SEPAL_LOG"));
        let for_a_person = filter.is_none() && std::io::stderr().is_terminal();
        let format = self.log_format.unwrap_or(match for_a_person {
            true => LogFormat::Terminal,
            false => LogFormat::Text,
        });
        let default = if format == LogFormat::Terminal { TERMINAL_LOG } else { default };
        LogConfig { filter: filter.unwrap_or_else(|| default.to_owned()), format }
    }
}
