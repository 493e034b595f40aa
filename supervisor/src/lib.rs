//! The process tree of Sepal: starts netd, prepare and the workers, watches them, restarts them,
//! ends them, and reports. Knows children, descriptors, exit codes and time; no tensors, no peers,
//! nothing async.
//!
//! | module | is |
//! | --- | --- |
//! | [`tree`] | what to do: a pure state machine |
//! | [`events`] | the poll loop that drives it |
//! | [`child_process`], [`channel`], [`spawn`], [`segments`] | one child, its control channel, its process; shared memory |
//! | [`instance`] | the name of a run, and what tells a live run from a dead one |
//! | [`placement`], [`sizing`] | which device serves which blocks, and how many fit |
//! | [`plan`] | `sepal plan`: what a run would serve |
//! | [`cli`] | flags and environment |
//! | [`devices`] | the devices that serve when none was named, and what is known of their warpgroups |
//! | [`status`], [`report`] | `sepal status` with the socket that it asks, and what it shows |
//! | [`metrics`] | the listening socket of `--metrics`, which netd answers |
//! | [`feed`] | what happens, for the program that started the server |
//! | [`restarts`] | why children were started again |
//! | [`doctor`] | `sepal doctor` |
//! | [`service`] | what a service manager such as systemd is told |
//! | [`top`] | `sepal top`, the live view on a terminal |
//! | [`terminal`] | what a person at a terminal sees in place of the log |
#![deny(unsafe_code)]

pub mod channel;
pub mod child_process;
pub mod cli;
pub mod devices;
pub mod doctor;
pub mod events;
pub mod feed;
pub mod instance;
pub mod metrics;
pub mod placement;
pub mod plan;
pub mod report;
pub mod restarts;
pub mod segments;
pub mod service;
pub mod sizing;
pub mod spawn;
pub mod status;
pub mod terminal;
pub mod top;
pub mod tree;

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use shared::bootstrap::{Identity, init_logging};
use shared::causes::with_causes;
use shared::config::ServeConfig;
use shared::exit::ExitReason;
use tracing::{debug, error, info, warn};

use crate::events::Outcome;
use crate::feed::Feed;
use crate::instance::Instance;

/// Runs an instance to its end: returns when every child is reaped and every segment removed. Call
/// it on the main thread of a process that does nothing else: it blocks SIGINT, SIGTERM and SIGHUP
/// for good, and children die with the thread. `notes` are logged first; what goes wrong is in the
/// log.
pub fn serve(config: ServeConfig, notes: &[String]) -> ExitReason {
    let identity = Identity { role: "supervisor", worker: None, generation: None };
    if let Err(error) = init_logging(&config.log, identity) {
        eprintln!("sepal: {}", with_causes(&error));
        return ExitReason::BadConfig;
    }
    cli::log_notes(notes);
    let mut feed = config.events.then(Feed::to_stdout).transpose().unwrap_or_else(|error| {
        warn!(%error, "no thread for --events: nothing is printed");
        None
    });
    let Outcome { reason, complaint } = run(config, &mut feed);
    // The last line says what to do.
    if let Some(complaint) = &complaint {
        error!("{complaint}");
    }
    if let Some(feed) = feed {
        feed.end(reason, complaint.as_deref());
    }
    reason
}

/// Runs an instance once there is a log.
fn run(mut config: ServeConfig, feed: &mut Option<Feed>) -> Outcome {
    let failed = |reason, complaint| Outcome { reason, complaint: Some(complaint) };
    if let Err(why) = devices::choose(&mut config) {
        return failed(ExitReason::BadConfig, why);
    }
    let instance = match Instance::claim(&config.runtime_dir, config.instance.as_deref()) {
        Ok(instance) => instance,
        Err(error) => return failed(error.exit_reason(), with_causes(&error)),
    };
    // Sockets of starting children go into our own folder, where a later start finds what a killed
    // run left. Only the first server of a process can say so; for others they stay in the
    // system's folder.
    if tempfile::env::override_temp_dir(&instance.folder()).is_err() {
        debug!("temporary folder is set already");
    }
    set_file_limit(config.file_limit);
    config.netd.identity_path.get_or_insert_with(|| instance.folder().join("identity"));
    let (version, pid) = (env!("CARGO_PKG_VERSION"), std::process::id());
    info!(instance = instance.name(), pid, version, model = config.prepare.model, "serving");
    for device in cli::crowded(&config.devices, config.world_size) {
        warn!(%device, "ranks of a group share one CUDA device: they compute in turns");
    }
    let outcome = events::run(config, &instance, feed)
        .unwrap_or_else(|error| failed(error.exit_reason(), with_causes(&error)));
    info!(reason = %outcome.reason, code = outcome.reason.code(), "ended");
    outcome
}

/// Sets the soft limit of open files to `wanted`, which children inherit (`run_server.py`,
/// `increase_file_limit`).
///
/// # Discrepancies
/// Petals sets both limits to the number, lowering them if they were higher; here a higher limit
/// stays.
fn set_file_limit(wanted: u64) {
    let raised = getrlimit(Resource::RLIMIT_NOFILE).and_then(|(soft, hard)| {
        if soft >= wanted {
            Ok(())
        } else {
            setrlimit(Resource::RLIMIT_NOFILE, wanted, hard.max(wanted))
        }
    });
    if let Err(error) = raised {
        warn!(%error, wanted, "cannot raise the limit of open files; lower --increase_file_limit");
    }
}
