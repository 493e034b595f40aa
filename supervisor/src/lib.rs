//! The process tree of Sepal: starts netd, prepare and the workers, watches them, restarts them,
//! ends them, and reports. Knows children, descriptors, exit codes and time; no tensors, no peers,
//! nothing async.
//!
//! | module | is |
//! | --- | --- |
//! | [`tree`] | what to do: a pure state machine |
//! | [`events`] | the poll loop that drives it |
//! | [`child_process`], [`channel`], [`uplink`], [`spawn`], [`segments`] | one child, its control channel, its process; shared memory |
//! | [`cache_folder`] | whether the cache folder may be used where there is no home |
//! | [`instance`] | the name of a run, and what tells a live run from a dead one |
//! | [`placement`], [`sizing`] | which device serves which blocks, and how many fit |
//! | [`devices`] | the devices that serve when none was named, and what is known of their warpgroups |
//! | [`status`], [`report`] | the socket that `sepal status` asks, and what it is told |
//! | [`handover`] | how one executable hands a run over to the next |
//! | [`listener`] | the listening sockets of `--metrics` and `--web` |
//! | [`weights`] | the files of the weights, open |
//! | [`web`] | the page of `--web`, which a gateway of its own process serves |
//! | [`feed`] | what happens, for the program that started the server |
//! | [`restarts`] | why children were started again |
//! | [`service`] | what a service manager such as systemd is told |
//! | [`terminal`] | what a person at a terminal sees in place of the log |
#![deny(unsafe_code)]

pub mod cache_folder;
pub mod channel;
pub mod child_process;
pub mod devices;
pub mod events;
pub mod feed;
#[cfg(test)]
mod fuzz;
pub mod handover;
pub mod inherited_fds;
pub mod instance;
mod instants;
pub mod listener;
pub mod placement;
pub mod report;
pub mod restarts;
pub mod segments;
pub mod service;
pub mod sizing;
pub mod spawn;
pub mod status;
pub mod terminal;
pub mod tree;
pub mod uplink;
pub mod web;
pub mod weights;

use std::ffi::OsString;

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use shared::bootstrap::{LogIdentity, init_logging};
use shared::config::ServeConfig;
use shared::error_chain::with_causes;
use shared::exit::ExitReason;
use tracing::{debug, error, info, warn};

use crate::events::RunOutcome;
pub use crate::events::{Reread, changed};
use crate::feed::Feed;
use crate::handover::Handover;
use crate::instance::Instance;

/// Runs an instance to its end: returns when every child is reaped and every segment removed. Call
/// it on the main thread of a process that does nothing else: it blocks SIGINT, SIGTERM and SIGHUP
/// for good, and children die with the thread. `notes` are logged first; what goes wrong is in the
/// log. `reread` reads the settings again after SIGHUP.
pub fn serve(config: ServeConfig, notes: &[String], reread: Reread<'_>) -> ExitReason {
    let identity = LogIdentity { role: "supervisor", worker: None, generation: None };
    if let Err(error) = init_logging(&config.log, identity) {
        eprintln!("sepal: {}", with_causes(&error));
        return ExitReason::BadConfig;
    }
    notes.iter().for_each(|note| warn!("{note}"));
    let mut feed = feed_of(&config);
    let outcome = run(config, &mut feed, reread);
    ended(outcome, feed, std::env::args_os().collect())
}

/// Goes on with the run that another executable handed over to this one, in this process, to its end.
/// `state` is the number of the descriptor that it left.
pub fn resume(state: i32, reread: Reread<'_>) -> ExitReason {
    let state = match handover::take(state) {
        Ok(state) => state,
        Err(error) => {
            eprintln!("sepal: {}", with_causes(&error));
            return ExitReason::ProtocolMismatch;
        }
    };
    let identity = LogIdentity { role: "supervisor", worker: None, generation: None };
    if let Err(error) = init_logging(&state.config.log, identity) {
        eprintln!("sepal: {}", with_causes(&error));
        return ExitReason::BadConfig;
    }
    let mut feed = feed_of(&state.config);
    let arguments = state.arguments.clone();
    let outcome = go_on(state, &mut feed, reread);
    ended(outcome, feed, arguments)
}

fn feed_of(config: &ServeConfig) -> Option<Feed> {
    config.events.then(Feed::to_stdout).transpose().unwrap_or_else(|error| {
        warn!(%error, "no thread for --events: nothing is printed");
        None
    })
}

/// The end of a run, or of its executable.
fn ended(outcome: RunOutcome, feed: Option<Feed>, arguments: Vec<OsString>) -> ExitReason {
    let RunOutcome { mut reason, mut complaint, successor } = outcome;
    if let Some(path) = successor {
        info!(path = %path.display(), "starting the new executable");
        let error = handover::start_anew(&path, arguments);
        reason = ExitReason::Failed;
        complaint = Some(format!("cannot start {}: {error}", path.display()));
    }
    // The last line says what to do.
    if let Some(complaint) = &complaint {
        error!("{complaint}");
    }
    if let Some(feed) = feed {
        feed.end(reason, complaint.as_deref());
    }
    reason
}

/// Runs what another executable handed over, once there is a log.
fn go_on(mut state: Handover, feed: &mut Option<Feed>, reread: Reread<'_>) -> RunOutcome {
    let failed =
        |reason, complaint| RunOutcome { reason, complaint: Some(complaint), successor: None };
    let name = std::mem::take(&mut state.instance);
    let lock = match state.lock.take() {
        Ok(lock) => lock,
        Err(error) => return failed(ExitReason::Failed, format!("no lock was left: {error}")),
    };
    let instance = match Instance::adopt(&state.config.runtime_dir, name, lock) {
        Ok(instance) => instance,
        Err(error) => return failed(error.exit_reason(), with_causes(&error)),
    };
    keep_sockets_in(&instance);
    let (version, pid) = (env!("CARGO_PKG_VERSION"), std::process::id());
    info!(instance = instance.name(), pid, version, before = state.build.version, "taking over");
    finish(events::resume(state, &instance, feed, reread), &instance)
}

fn finish(outcome: Result<RunOutcome, events::LoopError>, instance: &Instance) -> RunOutcome {
    let outcome = outcome.unwrap_or_else(|error| RunOutcome {
        reason: error.exit_reason(),
        complaint: Some(with_causes(&error)),
        successor: None,
    });
    if outcome.successor.is_some() {
        instance.leave_key();
    }
    info!(reason = %outcome.reason, code = outcome.reason.code(), "ended");
    outcome
}

/// Sockets of starting children go into our own folder, where a later start finds what a killed run
/// left. Only the first server of a process can say so; for others they stay in the system's folder.
fn keep_sockets_in(instance: &Instance) {
    if tempfile::env::override_temp_dir(&instance.folder()).is_err() {
        debug!("temporary folder is set already");
    }
}

/// Runs an instance once there is a log.
fn run(mut config: ServeConfig, feed: &mut Option<Feed>, reread: Reread<'_>) -> RunOutcome {
    let failed =
        |reason, complaint| RunOutcome { reason, complaint: Some(complaint), successor: None };
    if let Err(why) = devices::choose(&mut config) {
        return failed(ExitReason::BadConfig, why);
    }
    let instance = match Instance::claim(&config.runtime_dir, config.instance.as_deref()) {
        Ok(instance) => instance,
        Err(error) => return failed(error.exit_reason(), with_causes(&error)),
    };
    keep_sockets_in(&instance);
    set_file_limit(config.file_limit);
    config.netd.identity_path.get_or_insert_with(|| instance.key());
    if config.netd.request_memory == 0 {
        config.netd.request_memory = sizing::request_memory(config.max_memory_bytes);
    }
    let (version, pid) = (env!("CARGO_PKG_VERSION"), std::process::id());
    info!(instance = instance.name(), pid, version, model = config.prepare.model, "serving");
    for device in placement::crowded(&config.devices, config.world_size) {
        warn!(%device, "ranks of a group share one CUDA device: they compute in turns");
    }
    finish(events::run(config, &instance, feed, reread), &instance)
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
