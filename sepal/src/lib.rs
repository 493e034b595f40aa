//! Sepal, a server for the Petals swarm, hosted by another program.
//!
//! A server is several processes, so that a fault of a device or of the network reaches no other part.
//! All of them are the hosting program's own executable, started again: [`init`] turns such a process
//! into what it was started as. Its first line of `main` is therefore `sepal::init()`.
//!
//! ```no_run
//! use futures::StreamExt;
//! use sepal::{Event, Server};
//!
//! fn main() -> anyhow::Result<()> {
//!     sepal::init();
//!     let mut server = Server::builder("meta-llama/Llama-3.1-8B")
//!         .devices(["cuda:0", "cuda:1"])
//!         .initial_peers(["/ip4/203.0.113.7/tcp/31337/p2p/Qm..."])
//!         .limit("attn_cache_tokens", 65536)
//!         .start()?;
//!     let mut events = server.events();
//!     let drain = server.drainer();
//!     let runtime = tokio::runtime::Runtime::new()?;
//!     runtime.spawn(async move {
//!         while let Some(event) = events.next().await {
//!             match event {
//!                 Event::Online { span, .. } => println!("serving blocks {span}"),
//!                 Event::Complaint { text } => eprintln!("{text}"),
//!                 _ => {}
//!             }
//!         }
//!     });
//!     runtime.block_on(async {
//!         tokio::select! {
//!             outcome = server.run() => println!("{}", outcome?),
//!             _ = tokio::signal::ctrl_c() => {
//!                 drain.drain()?;
//!                 println!("{}", server.run().await?);
//!             }
//!         }
//!         Ok(())
//!     })
//! }
//! ```
//!
//! The server of an embedding program and `sepal serve` are the same thing: settings become flags, so
//! both read, check and explain every value alike. `sepal status` and `sepal top` show either.
// For others: everything public is explained.
#![warn(missing_docs)]
#![forbid(unsafe_code)]

mod builder;
mod cli;
mod commands;
mod doctor;
mod fetch;
mod plan;
mod server;
mod status;
mod top;

pub use builder::Builder;
pub use server::{Drainer, Events, HostError, LogTo, Outcome, Server};
pub use shared::block::Span;
pub use shared::control::PrepareStage;
pub use shared::exit::ExitReason;
pub use supervisor::feed::{Event, ProcessState};
pub use supervisor::spawn::TITLE;

use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;

use shared::bootstrap::Bootstrap;

/// Carries out the work of a server's process and ends, if this process was started as one; else
/// returns at once.
///
/// Call it first in `main`, before the program starts threads or a runtime and reads its arguments. A
/// program that hosts a server and does not call it would start itself again as itself.
#[allow(
    clippy::disallowed_methods,
    reason = "the role has returned; the rest of the host is not to run"
)]
pub fn init() {
    let title = std::env::args_os().next().unwrap_or_default();
    if title.as_bytes().starts_with(TITLE.as_bytes()) {
        std::process::exit(run_command(std::env::args_os()).code().into());
    }
    server::CALLED.store(true, std::sync::atomic::Ordering::Release);
}

/// Runs `sepal` with these arguments, of which the first is the program's name; says why it ended.
///
/// What is wrong with an argument is printed. Call it on the main thread of a process that does nothing
/// else.
pub fn run_command(arguments: impl Iterator<Item = OsString>) -> ExitReason {
    run_with_worker(arguments, gpu_worker::run)
}

/// [`run_command`] with other workers, for laboratories.
pub fn run_with_worker(
    arguments: impl Iterator<Item = OsString>,
    worker: fn(Bootstrap) -> ExitReason,
) -> ExitReason {
    match cli::parse(arguments, &|name| std::env::var(name).ok()) {
        Ok(command) => commands::run(command, worker),
        Err(error) => error.report(),
    }
}
