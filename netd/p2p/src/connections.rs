//! What is known of each open connection, and which ones to close when there are too many. Pure.

use std::{collections::HashMap, net::IpAddr};

use libp2p::{Multiaddr, PeerId, core::ConnectedPoint, swarm::ConnectionId};
use resource_manager::{
    addresses::{Scope, ip_of, scope},
    peerstore::PeerStanding,
};
use tokio::time::Instant;

use super::{
    addresses::{is_dialable, without_peer},
    limits::{
        CROWDED_ABOVE_CONNECTIONS, CROWDED_GRACE, MAX_ADDRESSES_PER_PEER, TRIM_ABOVE_CONNECTIONS,
        TRIM_GRACE,
    },
};

/// What is known first hand of a peer that is connected.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Introduction {
    /// IP addresses that it is connected from, relays apart.
    pub seen_at: Vec<IpAddr>,
    /// Addresses that it says it can be dialled at, without `/p2p/ID`; a bounded number.
    pub announced: Vec<Multiaddr>,
}

/// All open connections.
#[derive(Debug, Default)]
pub(super) struct Connections {
    open: HashMap<ConnectionId, Connection>,
}

#[derive(Debug)]
struct Connection {
    peer: PeerId,
    since: Instant,
    /// How far away the peer is, if its address tells.
    scope: Option<Scope>,
    /// The address that we reached the peer at; `None` if it reached us.
    dialed: Option<Multiaddr>,
    /// Whether it goes through a relay.
    relayed: bool,
    /// Where the peer is, unless a relay is between.
    ip: Option<IpAddr>,
    /// What the peer said of itself; `None` until it has.
    announced: Option<Vec<Multiaddr>>,
}

impl Connections {
    pub(super) fn established(
        &mut self,
        id: ConnectionId,
        peer: PeerId,
        endpoint: &ConnectedPoint,
        now: Instant,
    ) {
        let remote = endpoint.get_remote_address();
        let connection = Connection {
            peer,
            since: now,
            scope: scope(remote),
            dialed: endpoint.is_dialer().then(|| without_peer(remote.clone())),
            relayed: endpoint.is_relayed(),
            ip: (!endpoint.is_relayed()).then(|| ip_of(remote)).flatten(),
            announced: None,
        };
        self.open.insert(id, connection);
    }

    pub(super) fn closed(&mut self, id: ConnectionId) {
        self.open.remove(&id);
    }

    /// Remembers what a peer said of itself over a connection.
    pub(super) fn introduced(&mut self, id: ConnectionId, announced: &[Multiaddr]) {
        if let Some(connection) = self.open.get_mut(&id) {
            let bounded = announced.iter().take(MAX_ADDRESSES_PER_PEER);
            connection.announced = Some(bounded.cloned().map(without_peer).collect());
        }
    }

    /// What a peer said of itself; `None` if it has not yet, or is not connected.
    pub(super) fn introduction(&self, peer: &PeerId) -> Option<Introduction> {
        let of_peer = || self.open.values().filter(|other| other.peer == *peer);
        let latest = of_peer().filter(|other| other.announced.is_some());
        let announced =
            latest.max_by_key(|other| other.since).and_then(|other| other.announced.clone())?;
        let mut seen_at: Vec<IpAddr> = of_peer().filter_map(|other| other.ip).collect();
        seen_at.sort_unstable();
        seen_at.dedup();
        Some(Introduction { seen_at, announced })
    }

    /// The address that we reached the peer of a connection at; `None` if it reached us, or a relay
    /// is between.
    pub(super) fn dialed_directly(&self, id: ConnectionId) -> Option<Multiaddr> {
        let connection = self.open.get(&id).filter(|connection| !connection.relayed)?;
        connection.dialed.clone()
    }

    /// Addresses worth keeping of a peer that announced some over a connection: first those that it
    /// was reached at, then the announced ones that could work from here; a bounded number.
    pub(super) fn addresses(&self, id: ConnectionId, announced: Vec<Multiaddr>) -> Vec<Multiaddr> {
        let Some(connection) = self.open.get(&id) else {
            return Vec::new();
        };
        let peer = connection.peer;
        // A way through a relay is the peer's own to announce: it changes with the relay.
        let dialed = self.open.values().filter(|other| other.peer == peer && !other.relayed);
        let mut addrs: Vec<Multiaddr> = dialed.filter_map(|other| other.dialed.clone()).collect();
        let usable = announced.into_iter().filter(|addr| is_dialable(addr, connection.scope));
        for addr in usable.map(without_peer) {
            if !addrs.contains(&addr) {
                addrs.push(addr);
            }
        }
        addrs.truncate(MAX_ADDRESSES_PER_PEER);
        addrs
    }

    /// Connections to close because there are more than [`TRIM_ABOVE_CONNECTIONS`], of those that
    /// nobody uses and that are not brand new: first strangers, those who have not even introduced
    /// themselves before the others, then the oldest. Where it is crowded, a connection is no longer new after
    /// [`CROWDED_GRACE`].
    pub(super) fn surplus(
        &self,
        now: Instant,
        is_used: impl Fn(&PeerId) -> bool,
        standing: impl Fn(&PeerId) -> PeerStanding,
    ) -> Vec<ConnectionId> {
        let surplus = self.open.len().saturating_sub(TRIM_ABOVE_CONNECTIONS);
        if surplus == 0 {
            return Vec::new();
        }
        let crowded = self.open.len() > CROWDED_ABOVE_CONNECTIONS;
        let grace = if crowded { CROWDED_GRACE } else { TRIM_GRACE };
        let mut idle: Vec<(PeerStanding, bool, Instant, ConnectionId)> = self
            .open
            .iter()
            .filter(|(_, connection)| now.duration_since(connection.since) >= grace)
            .filter(|(_, connection)| !is_used(&connection.peer))
            .map(|(id, connection)| {
                let is_introduced = connection.announced.is_some();
                (standing(&connection.peer), is_introduced, connection.since, *id)
            })
            .collect();
        idle.sort_unstable();
        idle.into_iter().map(|(.., id)| id).take(surplus).collect()
    }
}

#[cfg(test)]
mod tests {
    use libp2p::core::{Endpoint, transport::PortUse};

    use super::*;

    fn addr(text: &str) -> Multiaddr {
        text.parse().expect("address")
    }

    fn strangers(_: &PeerId) -> PeerStanding {
        PeerStanding::Stranger
    }

    fn dialed(text: &str) -> ConnectedPoint {
        ConnectedPoint::Dialer {
            address: addr(text),
            role_override: Endpoint::Dialer,
            port_use: PortUse::Reuse,
        }
    }

    fn listened(text: &str) -> ConnectedPoint {
        let local_addr = addr("/ip4/10.0.0.1/tcp/1");
        ConnectedPoint::Listener { local_addr, send_back_addr: addr(text) }
    }

    #[test]
    fn reached_and_announced_addresses_are_kept_and_useless_ones_are_not() {
        let mut connections = Connections::default();
        let (peer, now) = (PeerId::random(), Instant::now());
        let [first, second, local] = [1, 2, 3].map(ConnectionId::new_unchecked);
        connections.established(first, peer, &listened("/ip4/10.0.0.2/tcp/5"), now);
        let reached = format!("/ip4/10.0.0.2/tcp/9/p2p/{peer}");
        connections.established(second, peer, &dialed(&reached), now);
        let announced = vec![
            addr("/ip4/127.0.0.1/tcp/9"),
            addr("/ip4/0.0.0.0/tcp/9"),
            addr("/ip4/1.2.3.4/tcp/0"),
            addr(&format!("/ip4/1.2.3.4/tcp/9/p2p/{peer}")),
            addr("/dns4/example.org/tcp/9"),
        ];
        assert_eq!(
            connections.addresses(first, announced.clone()),
            ["/ip4/10.0.0.2/tcp/9", "/ip4/1.2.3.4/tcp/9", "/dns4/example.org/tcp/9"].map(addr)
        );
        connections.closed(second);
        assert_eq!(connections.addresses(first, announced.clone()).len(), 2);
        assert!(connections.addresses(second, announced.clone()).is_empty());
        let here = PeerId::random();
        connections.established(local, here, &listened("/ip4/127.0.0.1/tcp/5"), now);
        assert!(connections.addresses(local, announced).contains(&addr("/ip4/127.0.0.1/tcp/9")));
        let far = ConnectionId::new_unchecked(4);
        connections.established(far, PeerId::random(), &listened("/ip4/5.6.7.8/tcp/5"), now);
        let mixed =
            ["/ip4/192.168.0.7/tcp/9", "/ip6/fe80::1/tcp/9", "/ip4/9.9.9.9/tcp/9"].map(addr);
        assert_eq!(connections.addresses(far, mixed.to_vec()), [addr("/ip4/9.9.9.9/tcp/9")]);
        let many = (1..100).map(|port| addr(&format!("/ip4/1.2.3.4/tcp/{port}"))).collect();
        assert_eq!(connections.addresses(local, many).len(), MAX_ADDRESSES_PER_PEER);
    }

    #[test]
    fn the_oldest_unused_connections_are_surplus() {
        let mut connections = Connections::default();
        let start = Instant::now();
        let mut peers = Vec::new();
        for number in 0..TRIM_ABOVE_CONNECTIONS + 3 {
            let peer = PeerId::random();
            let id = ConnectionId::new_unchecked(number);
            let since = start + TRIM_GRACE.mul_f64(number as f64 / 10_000.0);
            connections.established(id, peer, &listened("/ip4/1.2.3.4/tcp/5"), since);
            peers.push(peer);
        }
        let (none, later) = (start + TRIM_GRACE / 2, start + TRIM_GRACE * 2);
        assert!(connections.surplus(none, |_| false, strangers).is_empty(), "all are new");
        assert!(connections.surplus(later, |_| true, strangers).is_empty(), "all are used");
        let surplus = connections.surplus(later, |peer| *peer == peers[1], strangers);
        assert_eq!(surplus, [0, 2, 3].map(ConnectionId::new_unchecked));
        for id in surplus {
            connections.closed(id);
        }
        assert!(connections.surplus(later, |_| false, strangers).is_empty(), "few enough");
    }

    #[test]
    fn a_crowd_of_young_strangers_goes_before_those_who_introduced_themselves() {
        let mut connections = Connections::default();
        let start = Instant::now();
        let endpoint = listened("/ip4/127.0.0.1/tcp/5");
        for number in 0..768 {
            let id = ConnectionId::new_unchecked(number);
            connections.established(id, PeerId::random(), &endpoint, start);
            if number < 100 {
                connections.introduced(id, &[]);
            }
        }
        assert!(connections.surplus(start + CROWDED_GRACE / 2, |_| false, strangers).is_empty());
        let known: Vec<PeerId> = (700..768)
            .map(|number| connections.open[&ConnectionId::new_unchecked(number)].peer)
            .collect();
        let standing = |peer: &PeerId| match known.contains(peer) {
            true => PeerStanding::Server,
            false => PeerStanding::Stranger,
        };
        let surplus = connections.surplus(start + CROWDED_GRACE, |_| false, standing);
        assert_eq!(surplus.len(), 768 - TRIM_ABOVE_CONNECTIONS);
        let kept = (0..100).chain(700..768).map(ConnectionId::new_unchecked);
        assert!(kept.into_iter().all(|id| !surplus.contains(&id)));
    }
}
