//! What the driver does for a service manager: takes the step that makes the run ready, and tells
//! how it goes.

use std::time::{Duration, Instant};

use super::{TreeDriver, operator};
use crate::devices::subprocess::Subprocess;

/// Longest time of the step: a server under load lets it wait for the KV cache.
const PROBE_TIMEOUT: Duration = Duration::from_secs(60);

impl TreeDriver<'_> {
    /// Clients can come at `addrs`.
    pub(super) fn service_online(&mut self, addrs: &[String]) {
        self.addrs = addrs.to_vec();
        if let Some(service) = &mut self.service {
            service.online(Instant::now());
        }
    }

    /// Starts or ends the step, and tells what is due.
    pub(super) fn serve_manager(&mut self) {
        let (now, is_leaving) = (Instant::now(), self.is_leaving());
        let Some(service) = &mut self.service else { return };
        if self.tree.is_ending() && !is_leaving {
            service.stopping();
            self.probe = None;
        }
        if service.starts_probe(now) {
            self.probe = Some(self.start_probe());
        }
        let outcome = self.probe.as_mut().and_then(|probe| match probe {
            Ok(process) => process.poll().map(|end| end.and_then(|output| output.complaint())),
            Err(why) => Some(Err(why.clone())),
        });
        if outcome.is_some() {
            self.probe = None;
        }
        let goes_on = self.tree.goes_on();
        let Some(service) = &mut self.service else { return };
        if let Some(outcome) = outcome {
            service.probed(outcome, now);
        }
        service.feed(goes_on, now);
    }

    /// Tells the manager what `sepal status` says, in a line.
    pub(super) fn show_service(&mut self) {
        let Some(service) = &mut self.service else { return };
        let report = operator::report(&self.segments, &self.tree, &self.config);
        service.show(report.line(), Instant::now());
    }

    /// A client of its own process, which sends a token through all blocks.
    fn start_probe(&self) -> Result<Subprocess, String> {
        let (facts, prefix) = self.known_model()?;
        let span = self.span.ok_or("no blocks are served yet")?;
        let prefix = format!("--dht_prefix={prefix}");
        let (blocks, width) = (span.to_string(), facts.hidden_size.to_string());
        let peers = self.own_addresses();
        let mut arguments =
            vec!["probe", &prefix, "--blocks", &blocks, "--hidden_size", &width, "--peers"];
        arguments.extend(peers.iter().map(String::as_str));
        Subprocess::start(&arguments, PROBE_TIMEOUT)
    }
}
