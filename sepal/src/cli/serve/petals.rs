//! Flags of `run_server` that change nothing here.

use std::path::PathBuf;

use clap::{Args, Command};

use crate::cli::layers::{Layered, Origin};

/// Heading of the flags without effect. What is declared under it is accepted and noted, with its
/// help as the reason.
pub const NO_EFFECT: &str = "Petals flags without effect";

/// Flags that tune machinery that Sepal does not have, or does better without being told. The help
/// of each begins with "No effect" and says why: it is also the note that whoever gives the flag
/// finds in the log.
#[derive(Debug, Args)]
#[command(rename_all = "snake_case", next_help_heading = NO_EFFECT)]
pub struct UnusedArgs {
    /// No effect: one process handles all requests
    #[arg(long, value_name = "N")]
    num_handlers: Option<u32>,
    /// No effect: workers prefetch on their own
    #[arg(long, value_name = "N")]
    prefetch_batches: Option<u32>,
    /// No effect: results are not copied between processes
    #[arg(long, value_name = "N")]
    sender_threads: Option<u32>,
    /// No effect, as in Petals: all ready requests are computed together
    #[arg(long, value_name = "TOKENS")]
    min_batch_size: Option<u32>,
    /// No effect: prefill is cut at fixed positions, and its memory does not grow with the prompt
    #[arg(long, value_name = "BYTES")]
    max_chunk_size_bytes: Option<u64>,
    /// No effect: Sepal runs no Python modules
    #[arg(long, value_name = "FILE")]
    custom_module_path: Option<PathBuf>,
}

/// A sentence for each flag that was given although it changes nothing.
pub fn notes(command: &Command, layered: &Layered) -> Vec<String> {
    let unused = command.get_arguments().filter(|arg| {
        arg.get_help_heading() == Some(NO_EFFECT)
            && layered.origin(arg.get_id().as_str()) != Origin::Default
    });
    let note = |arg: &clap::Arg| {
        let help = arg.get_help().map(ToString::to_string).unwrap_or_default();
        let why = help.trim_start_matches("No effect").trim_start_matches([',', ':', ' ']);
        format!("--{} has no effect: {why}", arg.get_id())
    };
    unused.map(note).collect()
}
