//! `sepal` whose workers compute nothing and take a stated time: a laboratory tries states and block times of large models with it on any
//! machine. Everything else (supervisor, netd, prepare, the other commands) is that of `sepal`.
//!
//! The times are in the config.json of the model, under [`times::KEY`]; `tests/swarm/lab` writes such models.
#![forbid(unsafe_code)]

mod device;
mod times;
mod worker;

use std::process::ExitCode;

use shared::bootstrap::abort_on_panic;

fn main() -> ExitCode {
    abort_on_panic();
    ExitCode::from(sepal::run_with_worker(std::env::args_os(), worker::run).code())
}
