//! What the driver does for a service manager: takes the step that makes the run ready, and tells
//! how it goes. Also starts the page of the swarm, a client of this server as that step is.

use std::time::{Duration, Instant};

use shared::control::Role;
use shared::model::ModelFacts;

use super::{Driver, operator};
use crate::devices::subprocess::Subprocess;
use crate::web::Shown;

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

    /// Starts the page of the swarm once clients can come, and ends it with the run.
    pub(super) fn follow_web(&mut self) {
        let now = Instant::now();
        if self.tree.is_ending() {
            return self.web.stop(now);
        }
        self.web.look(now);
        if self.addrs.is_empty() || !self.web.is_due(now) {
            return;
        }
        let Ok((facts, prefix)) = self.known_model() else { return };
        let prefix = prefix.to_owned();
        let shown = Shown {
            prepare: &self.config.prepare,
            prefix: &prefix,
            num_blocks: facts.num_blocks,
            peers: &self.own_addresses(),
            log: &self.config.log,
        };
        self.web.start(&shown, now);
    }

    /// What is served, and under which prefix.
    fn known_model(&self) -> Result<(&ModelFacts, &str), String> {
        let facts = self.facts.as_ref().ok_or("the model is not known yet")?;
        let prefix = self.config.netd.dht_prefix.as_ref().or(facts.dht_prefix.as_ref());
        Ok((facts, prefix.ok_or("the model has no DHT prefix")?))
    }

    /// Where this server is reached from this machine.
    fn own_addresses(&self) -> Vec<String> {
        let children = self.segments.board.view().snapshot().children;
        let netd = children.into_iter().find(|child| child.role == Some(Role::Netd));
        let known = netd.and_then(|netd| netd.net_port.zip(netd.peer_id));
        let own = known.map_or_else(Vec::new, |(port, peer)| {
            local_addresses(&self.config.netd.host_maddrs, port, &peer)
        });
        if own.is_empty() { self.addrs.clone() } else { own }
    }
}

/// Where a server that listens on `hosts` is reached from this machine. Its announced addresses may
/// lead back here only through a router that does not do that.
fn local_addresses(hosts: &[String], port: u16, peer: &str) -> Vec<String> {
    let local = |host: &String| {
        let parts: Vec<&str> = host.split('/').collect();
        let ["", net, address, "tcp", _] = parts[..] else { return None };
        let address = match address {
            "0.0.0.0" => "127.0.0.1",
            "::" => "::1",
            address => address,
        };
        Some(format!("/{net}/{address}/tcp/{port}/p2p/{peer}"))
    };
    hosts.iter().filter_map(local).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_is_reached_where_it_listens() {
        let hosts = ["/ip4/0.0.0.0/tcp/0", "/ip6/::/tcp/0", "/ip4/10.0.0.5/tcp/31337", "/dns/x"];
        let found = local_addresses(&hosts.map(str::to_owned), 31337, "Qm");
        let wanted = ["/ip4/127.0.0.1/", "/ip6/::1/", "/ip4/10.0.0.5/"];
        assert_eq!(found, wanted.map(|start| format!("{start}tcp/31337/p2p/Qm")));
    }
}
