//! What clients of this server need that the driver starts itself: the step that makes the run ready
//! ([`super::service`]) and the page of the swarm.

use std::time::Instant;

use shared::control::Role;
use shared::model::ModelFacts;

use super::TreeDriver;
use crate::web::Shown;

impl TreeDriver<'_> {
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
            sandbox: self.config.sandbox,
        };
        self.web.start(&shown, now);
    }

    /// What is served, and under which prefix.
    pub(super) fn known_model(&self) -> Result<(&ModelFacts, &str), String> {
        let facts = self.facts.as_ref().ok_or("the model is not known yet")?;
        let prefix = self.config.netd.dht_prefix.as_ref().or(facts.dht_prefix.as_ref());
        Ok((facts, prefix.ok_or("the model has no DHT prefix")?))
    }

    /// Where this server is reached from this machine.
    pub(super) fn own_addresses(&self) -> Vec<String> {
        let children = self.segments.board.view().children();
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
