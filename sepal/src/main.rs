//! The executable `sepal`: all that it does is in the library beside it, which other programs use too.
#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    shared::bootstrap::abort_on_panic();
    ExitCode::from(sepal::run_command(std::env::args_os()).code())
}
