//! `sepal` whose workers compute nothing and take a stated time: a laboratory tries states and block times of large models with it on any
//! machine. Everything else (supervisor, netd, prepare, the other commands) is that of `sepal`.
//!
//! The times are in the config.json of the model, under [`times::KEY`]; `tests/swarm/lab` writes such models.
#![forbid(unsafe_code)]

mod device;
mod times;
mod worker;

use std::process::ExitCode;

use shared::bootstrap::{Bootstrap, abort_on_panic};
use shared::control::Role;
use supervisor::cli::{self, Command};

fn main() -> ExitCode {
    abort_on_panic();
    let is_worker = cli::parse(std::env::args_os(), &|name| std::env::var(name).ok());
    let reason = match is_worker {
        Ok(Command::Role { role: Role::Worker, bootstrap }) => {
            match Bootstrap::from_fd(bootstrap, Role::Worker) {
                Ok(bootstrap) => worker::run(bootstrap),
                Err(error) => error.exit_reason(),
            }
        }
        _ => sepal::run_command(std::env::args_os()),
    };
    ExitCode::from(reason.code())
}
