//! Composition root of `sepal`: which subcommand runs which role. Everything else is in the crates.

use std::process::ExitCode;

use shared::exit::ExitReason;
use supervisor::cli::{self, Command};

fn main() -> ExitCode {
    let command = match cli::parse(std::env::args_os(), &|name| std::env::var(name).ok()) {
        Ok(command) => command,
        Err(error) => return code(error.report()),
    };
    code(match command {
        Command::Serve { config, notes } => supervisor::serve(*config, &notes),
        Command::Status(options) => supervisor::report::run(&options),
        Command::Role { .. } | Command::Dht(_) | Command::Generate(_) | Command::Demo(_) => {
            eprintln!("sepal: this build was made without that part");
            ExitReason::BadConfig
        }
    })
}

fn code(reason: ExitReason) -> ExitCode {
    ExitCode::from(reason.code())
}
