//! What the driver does for a service manager: takes the step that makes the run ready, and tells
//! how it goes.

use std::time::{Duration, Instant};

use crate::devices::subprocess::Subprocess;
use crate::report::InstanceReport;

use super::Driver;

/// Longest time of the step: a server under load lets it wait for the KV cache.
const PROBE_TIMEOUT: Duration = Duration::from_secs(60);

impl Driver<'_> {
    /// Clients can come at `addrs`.
    pub(super) fn service_online(&mut self, addrs: &[String]) {
        self.addrs = addrs.to_vec();
        if let Some(service) = &mut self.service {
            service.online(Instant::now());
        }
    }

    /// Starts or ends the step, and tells what is due.
    pub(super) fn serve_manager(&mut self) {
        let now = Instant::now();
        if self.service.as_mut().is_some_and(|service| service.starts_probe(now)) {
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
        if self.tree.is_ending() {
            service.stopping();
        }
        service.feed(goes_on, now);
    }

    /// Tells the manager what `sepal status` says, in a line.
    pub(super) fn show_service(&mut self) {
        let Some(service) = &mut self.service else { return };
        let board = self.segments.board.view();
        let held = |worker| self.tree.has(worker);
        service.show(InstanceReport::of(board.snapshot(), held).line());
    }

    /// A client of its own process, which sends a token through all blocks.
    fn start_probe(&self) -> Result<Subprocess, String> {
        let (Some(facts), Some(span)) = (&self.facts, self.span) else {
            return Err("the model is not known yet".to_owned());
        };
        let prefix = self.config.netd.dht_prefix.as_ref().or(facts.dht_prefix.as_ref());
        let prefix = prefix.ok_or("the model has no DHT prefix")?;
        let (blocks, width) = (span.to_string(), facts.hidden_size.to_string());
        let mut arguments =
            vec!["probe", "--dht_prefix", prefix, "--blocks", &blocks, "--hidden_size", &width];
        arguments.push("--peers");
        arguments.extend(self.addrs.iter().map(String::as_str));
        Subprocess::start(&arguments, PROBE_TIMEOUT)
    }
}
