//! SIGHUP: reads the settings again. What can change while the server runs does; the rest is named. If
//! another executable lies where this one was started from, the run is upgraded to it.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, Instant};

use shared::config::{LogFormat, ServeConfig};
use tracing::{info, warn};

use super::Driver;
use crate::tree::Event;

/// Settings that a running server takes over.
const TAKEN_OVER: [&str; 5] =
    ["drain_timeout", "max_restarts", "restart_window", "retry_after", "start_timeout"];

/// How long open sessions may keep netd from being replaced after a reload, as with `sepal upgrade`.
const UPGRADE_PATIENCE: Duration = Duration::from_secs(60);

/// Reads the settings that a command line, whose first element is the program's name, gives now.
pub type Reread<'a> = &'a dyn Fn(&[OsString]) -> Result<Settings, String>;

/// What holds now, as flags, environment and files give it.
#[derive(Debug)]
pub struct Settings {
    /// For the parts of the server that can change.
    pub config: ServeConfig,
    /// Every setting by its name, with its value and where that comes from.
    pub shown: BTreeMap<String, String>,
}

impl Settings {
    /// The names of the settings that differ.
    pub fn changed(&self, before: &Settings) -> Vec<String> {
        let names: BTreeSet<&String> = self.shown.keys().chain(before.shown.keys()).collect();
        let differs = |name: &&String| self.shown.get(*name) != before.shown.get(*name);
        names.into_iter().filter(differs).cloned().collect()
    }
}

impl Driver<'_> {
    /// A terminal that closes ends the run; anybody else who sends SIGHUP changed the settings.
    pub(super) fn hung_up(&mut self) {
        if self.config.log.format == LogFormat::Terminal {
            return self.pending.push_back(Event::Stop);
        }
        let now = Instant::now();
        if let Some(service) = &mut self.service {
            service.reloading(now);
        }
        match (self.reread)(&self.arguments) {
            Ok(settings) => self.take_over(settings),
            Err(error) => {
                let error = error.trim().trim_start_matches("error: ");
                warn!("cannot read the settings again, the running server keeps its own: {error}");
            }
        }
        if self.is_outdated()
            && let Err(why) = self.begin_upgrade(None, UPGRADE_PATIENCE)
        {
            warn!("another executable was installed, but no upgrade begins: {why}");
        }
    }

    /// Whether another executable lies where this one was started from.
    fn is_outdated(&self) -> bool {
        let identity = |path: &Path| {
            let file = std::fs::metadata(path).ok()?;
            Some((file.dev(), file.ino(), file.mtime()))
        };
        let installed = self.executable.as_deref().and_then(identity);
        installed.is_some_and(|file| Some(file) != identity(Path::new("/proc/self/exe")))
    }

    fn take_over(&mut self, settings: Settings) {
        let Some(before) = &self.settings else {
            return warn!("cannot tell which settings changed: restart to apply them");
        };
        let changed = settings.changed(before);
        let (taken, others): (Vec<String>, Vec<String>) =
            changed.into_iter().partition(|name| TAKEN_OVER.contains(&name.as_str()));
        let restart = settings.config.restart;
        // Children beat as often as they were told at their start.
        let hang_timeout = self.config.restart.hang_timeout;
        self.config.restart = shared::config::RestartConfig { hang_timeout, ..restart };
        self.config.drain_timeout = settings.config.drain_timeout;
        self.tree.set_limits(self.config.restart, self.config.drain_timeout);
        match (taken.is_empty(), others.is_empty()) {
            (true, true) => info!("settings read again: nothing changed"),
            (false, _) => info!(changed = %taken.join(", "), "settings read again"),
            (true, false) => {}
        }
        if !others.is_empty() {
            let others = others.join(", ");
            return warn!(changed = %others, "these settings need a restart of the server");
        }
        self.settings = Some(settings);
    }
}
