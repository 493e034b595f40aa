//! SIGHUP: reads the settings again. What can change while the server runs does; the rest is named. If
//! another executable lies where this one was started from, the run is upgraded to it.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::{Map, Value};
use shared::config::{LogFormat, ServeConfig};
use tracing::{info, warn};

use super::TreeDriver;
use crate::tree::TreeEvent;

/// Settings that a running server takes over.
const TAKEN_OVER: [&str; 5] =
    ["drain_timeout", "max_restarts", "restart_window", "retry_after", "start_timeout"];

/// How long open sessions may keep netd from being replaced after a reload, as with `sepal upgrade`.
const UPGRADE_PATIENCE: Duration = Duration::from_secs(60);

/// Reads the settings that a command line, whose first element is the program's name, gives now.
pub type Reread<'a> = &'a dyn Fn(&[OsString]) -> Result<ServeConfig, String>;

/// Parts of the settings that have settings of their own.
const PARTS: [&str; 6] = ["netd", "worker", "prepare", "hub", "restart", "log"];

/// Fields that follow from others.
const DERIVED: [&str; 2] = ["rates_dir", "measure_anew"];

/// Fields beside those of their flag.
const OF_FLAGS: [(&str, &str); 2] = [("automatic", "device"), ("uuids", "device")];

/// The flags of what differs between two readings of the settings.
pub fn changed(before: &ServeConfig, after: &ServeConfig) -> BTreeSet<String> {
    let fields = |config| match serde_json::to_value(config) {
        Ok(Value::Object(fields)) => fields,
        _ => Map::new(),
    };
    let mut names = BTreeSet::new();
    add_changed(&mut names, &fields(before), &fields(after));
    names
}

fn add_changed(
    names: &mut BTreeSet<String>,
    before: &Map<String, Value>,
    after: &Map<String, Value>,
) {
    for (name, value) in after {
        match (value, before.get(name)) {
            (Value::Object(after), Some(Value::Object(before))) if PARTS.contains(&&**name) => {
                add_changed(names, before, after);
            }
            (value, before) if before != Some(value) && !DERIVED.contains(&&**name) => {
                let flag = OF_FLAGS.iter().find(|(field, _)| field == name);
                names.insert(flag.map_or(name.as_str(), |(_, flag)| flag).to_owned());
            }
            _ => {}
        }
    }
}

impl TreeDriver<'_> {
    /// A terminal that closes ends the run; anybody else who sends SIGHUP changed the settings.
    pub(super) fn hung_up(&mut self) {
        if self.config.log.format == LogFormat::Terminal {
            return self.pending.push_back(TreeEvent::Stop);
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

    fn take_over(&mut self, settings: ServeConfig) {
        let Some(before) = &self.settings else {
            return warn!("cannot tell which settings changed: restart to apply them");
        };
        let changed = changed(before, &settings);
        let (taken, others): (Vec<String>, Vec<String>) =
            changed.into_iter().partition(|name| TAKEN_OVER.contains(&name.as_str()));
        let restart = settings.restart;
        // Children beat as often as they were told at their start.
        let hang_timeout = self.config.restart.hang_timeout;
        self.config.restart = shared::config::RestartConfig { hang_timeout, ..restart };
        self.config.drain_timeout = settings.drain_timeout;
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

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use shared::config::{QuantChoice, SpanChoice};

    use super::*;
    use testkit::configs::serve_config;

    #[test]
    fn what_differs_is_named_by_its_flag() {
        let before = serve_config();
        assert!(changed(&before, &before).is_empty());
        let mut after = before.clone();
        after.restart.window = Duration::from_secs(7);
        after.netd.span = SpanChoice::Count(2);
        after.netd.use_upnp = !before.netd.use_upnp;
        after.prepare.hub.is_plain_http_allowed = true;
        after.prepare.quant_type = QuantChoice::Named(after.prepare.quant_type.quant_type());
        after.worker.measure_anew = true;
        after.file_limit += 1;
        let names: Vec<String> = changed(&before, &after).into_iter().collect();
        assert_eq!(
            names,
            [
                "allow_plain_http",
                "increase_file_limit",
                "no_upnp",
                "num_blocks",
                "quant_type",
                "restart_window"
            ]
        );
    }
}
