//! Sessions on one server, over the real protocol, and what they measured:
//!
//! ```text
//! cargo run --release -p lab --bin load -- ADDRESS PREFIX START:END
//!     [SESSIONS[xPEERS]]... [--seconds N] [--prompt N] [--steps N]
//! ```
//!
//! One line for each number of sessions, in order; several lines of one run are what one compares.
//! Works against any server that speaks Petals' protocol. Ends with 1 if anything failed.

#![forbid(unsafe_code)]

use std::process::ExitCode;
use std::time::Duration;

use client::load::{LoadConfig, run};

struct Args {
    config: LoadConfig,
    /// Sessions and peers of each run.
    runs: Vec<(usize, usize)>,
}

fn parse(mut args: impl Iterator<Item = String>) -> Result<Args, String> {
    let mut next = |what: &str| args.next().ok_or(format!("{what} is missing"));
    let number = |text: String| text.parse::<usize>().map_err(|e| format!("{text}: {e}"));
    let server = next("ADDRESS")?;
    let prefix = next("PREFIX")?;
    let blocks = next("START:END")?;
    let (start, end) = blocks.split_once(':').ok_or("blocks are START:END")?;
    let block = |text: &str| text.parse().map_err(|e| format!("{text}: {e}"));
    let mut config = LoadConfig {
        server: server.parse().map_err(|e| format!("{server}: {e}"))?,
        prefix,
        blocks: block(start)?..block(end)?,
        sessions: 1,
        peers: 1,
        duration: Duration::from_secs(10),
        prompt_tokens: 8,
        steps: 120,
    };
    let mut runs = Vec::new();
    while let Ok(word) = next("") {
        match word.as_str() {
            "--seconds" => {
                config.duration = Duration::from_secs(number(next("seconds")?)? as u64);
            }
            "--prompt" => config.prompt_tokens = number(next("tokens")?)?,
            "--steps" => config.steps = number(next("steps")?)?,
            runs_of => {
                let (sessions, peers) = runs_of.split_once('x').unwrap_or((runs_of, "1"));
                runs.push((number(sessions.into())?, number(peers.into())?));
            }
        }
    }
    if runs.is_empty() {
        runs.push((1, 1));
    }
    Ok(Args { config, runs })
}

fn main() -> ExitCode {
    let args = match parse(std::env::args().skip(1)) {
        Ok(args) => args,
        Err(why) => {
            eprintln!("load: {why}");
            return ExitCode::from(2);
        }
    };
    let runtime = match tokio::runtime::Runtime::new() {
        Ok(runtime) => runtime,
        Err(error) => {
            eprintln!("load: cannot start the reactor: {error}");
            return ExitCode::FAILURE;
        }
    };
    let mut failed = false;
    for (sessions, peers) in args.runs {
        let config = LoadConfig { sessions, peers, ..args.config.clone() };
        match runtime.block_on(run(&config)) {
            Ok(report) => {
                println!("{sessions} sessions: {}", report.line());
                report.texts.iter().for_each(|text| println!("  {text}"));
                failed |= report.errors + report.differing > 0;
            }
            Err(error) => {
                let why = std::error::Error::source(&error).map(|why| format!(": {why}"));
                eprintln!("load: {error}{}", why.unwrap_or_default());
                failed = true;
            }
        }
    }
    ExitCode::from(u8::from(failed))
}
