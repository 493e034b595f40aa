//! `sepal pause`, `sepal resume` and `sepal restart`: orders to a running instance.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use indicatif::ProgressBar;
use shared::exit::ExitReason;
use supervisor::instance::LiveInstance;
use supervisor::report::Pause;
use supervisor::status::{InstanceAnswer, InstanceRequest, ask, order};

use super::{StatusError, as_owner, ended, only};

/// Time between two looks whether a pause has begun.
const LOOK_PERIOD: Duration = Duration::from_millis(100);

/// Time that workers may take to end after the last session.
const WORKERS_PATIENCE: Duration = Duration::from_secs(60);

/// An order and whom it is for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OrderOptions {
    /// Which instance; `None` = the only one.
    pub instance: Option<String>,
    /// Folder of the instances.
    pub runtime_dir: PathBuf,
    /// What is to be done.
    pub request: InstanceRequest,
    /// Whether to return at once instead of waiting until the devices are free.
    pub no_wait: bool,
}

/// Gives the order; what follows goes to standard output, errors to standard error.
pub fn run(options: &OrderOptions) -> ExitReason {
    ended(as_owner(&options.runtime_dir).and_then(|()| give(options)))
}

fn give(options: &OrderOptions) -> Result<(), StatusError> {
    let live = only(options.instance.as_deref(), &options.runtime_dir)?;
    let silent = |source| StatusError::Silent { name: live.name.clone(), source };
    match order(&live.status_socket, &options.request).map_err(silent)? {
        InstanceAnswer::Refused { error } => {
            return Err(StatusError::Refused { name: live.name, error });
        }
        InstanceAnswer::Accepted | InstanceAnswer::Report(_) => {}
    }
    match &options.request {
        InstanceRequest::Pause { .. } if options.no_wait => {
            println!("instance {}: pausing", live.name)
        }
        InstanceRequest::Pause { patience_s } => {
            let patience = Duration::from_secs(*patience_s) + WORKERS_PATIENCE;
            wait_for_pause(&live, patience)?;
            println!("instance {}: paused, its devices are free", live.name);
        }
        InstanceRequest::Resume => println!("instance {}: resuming", live.name),
        InstanceRequest::Restart { worker } => {
            println!("instance {}: restarting worker {worker}", live.name);
        }
        InstanceRequest::Upgrade { .. } if options.no_wait => {
            println!("instance {}: upgrading", live.name)
        }
        InstanceRequest::Upgrade { .. } => {
            let build = wait_for_upgrade(&live)?;
            println!("instance {}: upgraded, every process is of build {build}", live.name);
        }
        InstanceRequest::Report { .. } => {}
    }
    Ok(())
}

/// Waits until nothing is left to be upgraded; returns the build that runs then.
fn wait_for_upgrade(live: &LiveInstance) -> Result<String, StatusError> {
    let bar = ProgressBar::new_spinner();
    let mut silent_since = None;
    loop {
        std::thread::sleep(LOOK_PERIOD);
        bar.tick();
        let report = match ask(&live.status_socket, true) {
            Ok(report) => report,
            // Between two executables that share nothing.
            Err(source) => {
                let since = *silent_since.get_or_insert_with(Instant::now);
                if since.elapsed() < WORKERS_PATIENCE {
                    continue;
                }
                return Err(StatusError::Silent { name: live.name.clone(), source });
            }
        };
        silent_since = None;
        if let Some(error) = report.upgrade_failure {
            return Err(StatusError::Refused { name: live.name.clone(), error });
        }
        match report.upgrade {
            Some(stage) => bar.set_message(stage),
            None if report.ready => {
                bar.finish_and_clear();
                return Ok(report.build);
            }
            None => bar.set_message("starting"),
        }
    }
}

fn wait_for_pause(live: &LiveInstance, patience: Duration) -> Result<(), StatusError> {
    let refused =
        |error: &str| StatusError::Refused { name: live.name.clone(), error: error.to_owned() };
    // Drawn on a terminal alone.
    let bar = ProgressBar::new_spinner();
    bar.set_message("waiting for sessions and workers to end");
    let since = Instant::now();
    loop {
        let silent = |source| StatusError::Silent { name: live.name.clone(), source };
        let report = ask(&live.status_socket, true).map_err(silent)?;
        bar.tick();
        if report.pause == Pause::Paused.name() {
            bar.finish_and_clear();
            return Ok(());
        }
        if report.pause == Pause::No.name() {
            return Err(refused("resumed before the pause had begun"));
        }
        if since.elapsed() > patience {
            return Err(refused("workers did not end in time; see sepal status"));
        }
        std::thread::sleep(LOOK_PERIOD);
    }
}
