//! The counting of connections: pure.

use std::{collections::HashMap, fmt, hash::Hash};

use libp2p::{PeerId, swarm::ConnectionId};

use super::{
    super::{nets::Net, peerstore::PeerStanding},
    MAX_CONNECTIONS, MAX_CONNECTIONS_PER_NET, MAX_CONNECTIONS_PER_PEER, MAX_INBOUND_CONNECTIONS,
    MAX_PENDING_CONNECTIONS_PER_KNOWN_NET, MAX_PENDING_CONNECTIONS_PER_NET, MAX_PENDING_INBOUND,
    MAX_PENDING_OUTBOUND, MAX_RESERVED_PER_NET, RESERVED_FOR_SERVERS, RESERVED_FOR_SESSIONS,
    RESERVED_PENDING,
};

/// Why a connection is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refused {
    /// A net has as many connections as it may have.
    NetFull { net: Net, limit: usize },
    /// All nets together have as many as peers of this standing may fill.
    Full { standing: PeerStanding, limit: usize },
    /// A peer has as many as it may have.
    PeerFull { limit: usize },
    /// We have as many of our own as we may have.
    OwnFull { limit: usize },
    /// As many of our own dials are under way as may be.
    Dials { limit: usize },
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NetFull { net, limit } => {
                write!(f, "net {net:?} has {limit} inbound connections already")
            }
            Self::Full { standing, limit } => {
                write!(f, "{limit} inbound connections are open already, peer is {standing:?}")
            }
            Self::PeerFull { limit } => write!(f, "peer has {limit} connections already"),
            Self::OwnFull { limit } => write!(f, "{limit} outbound connections are open already"),
            Self::Dials { limit } => write!(f, "{limit} dials are under way already"),
        }
    }
}

impl std::error::Error for Refused {}

/// How many connections there may be.
#[derive(Clone, Copy, Debug)]
pub struct Places {
    /// In both directions.
    pub total: usize,
    /// Inbound ones.
    pub inbound: usize,
    /// The last inbound ones, for peers with a session.
    pub for_sessions: usize,
    /// The last inbound ones before those, for servers and peers with a session.
    pub for_servers: usize,
}

impl Places {
    /// Those of a node.
    pub const DEFAULT: Self = Self {
        total: MAX_CONNECTIONS,
        inbound: MAX_INBOUND_CONNECTIONS,
        for_sessions: RESERVED_FOR_SESSIONS,
        for_servers: RESERVED_FOR_SERVERS,
    };

    /// What peers of this standing leave to others.
    fn kept_from(&self, standing: PeerStanding) -> usize {
        match standing {
            PeerStanding::Stranger => self.for_sessions + self.for_servers,
            PeerStanding::Server => self.for_sessions,
            PeerStanding::Session => 0,
        }
    }

    /// Outbound connections: the reserve is inbound.
    pub fn outbound(&self) -> usize {
        self.total.saturating_sub(self.for_sessions + self.for_servers)
    }
}

/// Connections and dials, by net, class and peer. It holds nothing of a peer whose connections are
/// closed.
#[derive(Debug)]
pub(super) struct ConnectionCounts {
    places: Places,
    open: HashMap<ConnectionId, Counted>,
    by_net: HashMap<(Net, Class), usize>,
    by_class: HashMap<Class, usize>,
    by_peer: HashMap<PeerId, usize>,
}

/// How a connection is counted.
#[derive(Clone, Copy, Debug)]
struct Counted {
    net: Net,
    class: Class,
    /// Known after the handshake.
    peer: Option<PeerId>,
}

/// Which place a connection takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Class {
    /// Inbound, in its handshake.
    Pending,
    /// Inbound, where everybody may be.
    General,
    /// Inbound, where only peers that are known may be.
    Reserved,
    /// Outbound, not made yet.
    Dialing,
    Outbound,
}

impl ConnectionCounts {
    pub(super) fn new(places: Places) -> Self {
        Self {
            places,
            open: HashMap::new(),
            by_net: HashMap::new(),
            by_class: HashMap::new(),
            by_peer: HashMap::new(),
        }
    }

    /// Admits a connection to its handshake. `is_known`: a peer with a session is or was in its net.
    pub(super) fn admit_pending(
        &mut self,
        id: ConnectionId,
        net: Net,
        is_known: bool,
    ) -> Result<(), Refused> {
        let limit = match is_known {
            true => MAX_PENDING_CONNECTIONS_PER_KNOWN_NET,
            false => MAX_PENDING_CONNECTIONS_PER_NET,
        };
        if has_bound(net) && self.of_net(net, Class::Pending) >= limit {
            return Err(Refused::NetFull { net, limit });
        }
        let (kept, standing) = match is_known {
            true => (0, PeerStanding::Session),
            false => (RESERVED_PENDING, PeerStanding::Stranger),
        };
        let limit = MAX_PENDING_INBOUND - kept;
        if self.of(Class::Pending) >= limit {
            return Err(Refused::Full { standing, limit });
        }
        self.put(id, net, Class::Pending);
        Ok(())
    }

    pub(super) fn admit_dial(&mut self, id: ConnectionId) -> Result<(), Refused> {
        let limit = MAX_PENDING_OUTBOUND;
        if self.of(Class::Dialing) >= limit {
            return Err(Refused::Dials { limit });
        }
        self.put(id, Net::Unknown, Class::Dialing);
        Ok(())
    }

    /// Admits a connection that we made to `peer`.
    pub(super) fn admit_outbound(
        &mut self,
        id: ConnectionId,
        net: Net,
        peer: PeerId,
    ) -> Result<(), Refused> {
        self.closed(id);
        let outbound = self.of(Class::Outbound);
        let total = outbound + self.of(Class::General) + self.of(Class::Reserved);
        let limit = self.places.outbound();
        if outbound >= limit || total >= self.places.total {
            return Err(Refused::OwnFull { limit });
        }
        self.check(&peer)?;
        self.put(id, net, Class::Outbound);
        self.is_of(id, peer);
        Ok(())
    }

    /// Admits a connection that `peer` made, after its handshake.
    pub(super) fn admit_inbound(
        &mut self,
        id: ConnectionId,
        net: Net,
        peer: PeerId,
        standing: PeerStanding,
    ) -> Result<(), Refused> {
        self.closed(id);
        self.check(&peer)?;
        self.admit(id, net, standing)?;
        self.is_of(id, peer);
        Ok(())
    }

    /// Whether a peer may have one more connection: both sides may dial at once.
    fn check(&self, peer: &PeerId) -> Result<(), Refused> {
        let limit = MAX_CONNECTIONS_PER_PEER;
        match self.by_peer.get(peer) {
            Some(&open) if open >= limit => Err(Refused::PeerFull { limit }),
            _ => Ok(()),
        }
    }

    fn is_of(&mut self, id: ConnectionId, peer: PeerId) {
        if let Some(counted) = self.open.get_mut(&id) {
            counted.peer = Some(peer);
            *self.by_peer.entry(peer).or_default() += 1;
        }
    }

    fn admit(&mut self, id: ConnectionId, net: Net, standing: PeerStanding) -> Result<(), Refused> {
        self.closed(id);
        let inbound = self.of(Class::General) + self.of(Class::Reserved);
        let total = inbound + self.of(Class::Outbound);
        let fits = |standing| {
            let kept = self.places.kept_from(standing);
            inbound + kept < self.places.inbound && total + kept < self.places.total
        };
        if !fits(standing) {
            let limit = self.places.inbound.saturating_sub(self.places.kept_from(standing));
            return Err(Refused::Full { standing, limit });
        }
        let of_net = self.of_net(net, Class::General);
        let net_is_full = has_bound(net) && of_net >= MAX_CONNECTIONS_PER_NET;
        let class = match fits(PeerStanding::Stranger) && !net_is_full {
            true => Class::General,
            false if standing == PeerStanding::Stranger => {
                return Err(Refused::NetFull { net, limit: MAX_CONNECTIONS_PER_NET });
            }
            false => Class::Reserved,
        };
        let reserved = self.of_net(net, Class::Reserved);
        if class == Class::Reserved && net.is_public() && reserved >= MAX_RESERVED_PER_NET {
            return Err(Refused::NetFull { net, limit: of_net + reserved });
        }
        self.put(id, net, class);
        Ok(())
    }

    fn put(&mut self, id: ConnectionId, net: Net, class: Class) {
        self.closed(id);
        *self.by_net.entry((net, class)).or_default() += 1;
        *self.by_class.entry(class).or_default() += 1;
        self.open.insert(id, Counted { net, class, peer: None });
    }

    /// A connection is gone, wherever it was.
    pub(super) fn closed(&mut self, id: ConnectionId) {
        let Some(Counted { net, class, peer }) = self.open.remove(&id) else {
            return;
        };
        one_less(&mut self.by_class, &class);
        one_less(&mut self.by_net, &(net, class));
        if let Some(peer) = peer {
            one_less(&mut self.by_peer, &peer);
        }
    }

    fn of(&self, class: Class) -> usize {
        self.by_class.get(&class).copied().unwrap_or(0)
    }

    fn of_net(&self, net: Net, class: Class) -> usize {
        self.by_net.get(&(net, class)).copied().unwrap_or(0)
    }
}

/// Counts one less, and forgets what is counted when nothing is left.
fn one_less<K: Eq + Hash>(counts: &mut HashMap<K, usize>, key: &K) {
    if let Some(count) = counts.get_mut(key) {
        *count = count.saturating_sub(1);
        if *count == 0 {
            counts.remove(key);
        }
    }
}

/// Whether the bounds by net hold: peers behind relays have no net of their own.
fn has_bound(net: Net) -> bool {
    net.is_public() && net != Net::Unknown
}

#[cfg(test)]
mod tests {
    use super::*;

    fn net(a: u8, last: u8) -> Net {
        Net::of([a, 6, 7, last].into())
    }

    fn id(number: usize) -> ConnectionId {
        ConnectionId::new_unchecked(number)
    }

    #[test]
    fn one_public_net_cannot_take_the_places_of_others() {
        let mut counts = ConnectionCounts::new(Places::DEFAULT);
        for number in 0..MAX_PENDING_CONNECTIONS_PER_NET {
            counts.admit_pending(id(number), net(5, 1), false).expect("free");
        }
        let full = counts.admit_pending(id(9999), net(5, 1), false);
        let limit = MAX_PENDING_CONNECTIONS_PER_NET;
        assert_eq!(full, Err(Refused::NetFull { net: net(5, 1), limit }));
        counts.admit_pending(id(9998), net(5, 2), false).expect("another net");
        // Whoever finishes its handshake makes room for the next.
        counts.admit(id(0), net(5, 1), PeerStanding::Stranger).expect("free");
        counts.admit_pending(id(9999), net(5, 1), false).expect("free again");
        for number in (0..MAX_PENDING_CONNECTIONS_PER_NET).chain([9998, 9999]) {
            counts.closed(id(number));
        }
        assert!(counts.open.is_empty() && counts.by_net.is_empty());
    }

    #[test]
    fn private_nets_share_the_bounds_of_all() {
        let mut counts = ConnectionCounts::new(Places::DEFAULT);
        for number in 0..4 * MAX_CONNECTIONS_PER_NET {
            counts.admit(id(number), net(10, 1), PeerStanding::Stranger).expect("private");
        }
    }

    /// Connections of strangers from as many nets as it takes, until one is refused.
    fn full_of_strangers() -> (ConnectionCounts, usize) {
        let mut counts = ConnectionCounts::new(Places::DEFAULT);
        for number in 0.. {
            let net = Net::of([5, 1, (number >> 8) as u8, number as u8].into());
            if counts.admit(id(number), net, PeerStanding::Stranger).is_err() {
                return (counts, number);
            }
        }
        unreachable!("there is a bound")
    }

    #[test]
    fn the_last_places_are_for_servers_and_the_very_last_for_peers_with_a_session() {
        let (mut counts, admitted) = full_of_strangers();
        let reserved = RESERVED_FOR_SERVERS + RESERVED_FOR_SESSIONS;
        assert_eq!(admitted, MAX_INBOUND_CONNECTIONS - reserved);
        let mut fill = |standing: PeerStanding, from: usize| {
            let of = |number: usize| Net::of([6, 1, standing as u8, number as u8].into());
            (0..1000).take_while(|n| counts.admit(id(from + n), of(*n), standing).is_ok()).count()
        };
        assert_eq!(fill(PeerStanding::Server, 1000), RESERVED_FOR_SERVERS);
        assert_eq!(fill(PeerStanding::Session, 2000), RESERVED_FOR_SESSIONS);
        let limit = MAX_INBOUND_CONNECTIONS;
        let standing = PeerStanding::Session;
        let full = counts.admit(id(3000), net(7, 1), standing);
        assert_eq!(full, Err(Refused::Full { standing, limit }));
        counts.closed(id(2000));
        counts.admit(id(3000), net(7, 1), standing).expect("one is free");
    }

    #[test]
    fn one_public_net_takes_few_of_the_reserved_places() {
        let (mut counts, _) = full_of_strangers();
        let of_net =
            |n: &usize| counts.admit(id(1000 + n), net(9, 1), PeerStanding::Session).is_ok();
        assert_eq!((0..1000).take_while(of_net).count(), MAX_RESERVED_PER_NET);
        counts.admit(id(3000), net(9, 2), PeerStanding::Session).expect("another net");
    }

    #[test]
    fn a_known_peer_finds_a_place_in_a_net_that_is_full_of_strangers() {
        let mut counts = ConnectionCounts::new(Places::DEFAULT);
        let pending = MAX_PENDING_CONNECTIONS_PER_NET;
        for number in 0..MAX_CONNECTIONS_PER_NET {
            counts.admit(id(number), net(5, 1), PeerStanding::Stranger).expect("free");
        }
        assert!(counts.admit(id(500), net(5, 1), PeerStanding::Stranger).is_err());
        counts.admit(id(500), net(5, 1), PeerStanding::Session).expect("reserved");
        (0..pending).for_each(|n| counts.put(id(1000 + n), net(5, 1), Class::Pending));
        assert!(counts.admit_pending(id(501), net(5, 1), false).is_err());
        counts.admit_pending(id(501), net(5, 1), true).expect("a session is there");
    }

    #[test]
    fn handshakes_of_strangers_leave_some_to_nets_with_a_session() {
        let mut counts = ConnectionCounts::new(Places::DEFAULT);
        let of = |number: usize| Net::of([5, 1, (number >> 8) as u8, number as u8].into());
        let admitted = (0..).take_while(|n| counts.admit_pending(id(*n), of(*n), false).is_ok());
        let admitted = admitted.count();
        assert_eq!(admitted, MAX_PENDING_INBOUND - RESERVED_PENDING);
        counts.admit_pending(id(9999), net(7, 1), true).expect("a session is there");
    }

    #[test]
    fn our_own_connections_do_not_shrink_the_reserve() {
        let mut counts = ConnectionCounts::new(Places::DEFAULT);
        let outbound = Places::DEFAULT.outbound();
        (0..outbound).for_each(|n| counts.put(id(n), net(8, 1), Class::Outbound));
        assert!(counts.admit(id(5000), net(7, 1), PeerStanding::Stranger).is_err());
        let reserved = RESERVED_FOR_SERVERS + RESERVED_FOR_SESSIONS;
        for number in 0..reserved {
            let net = Net::of([6, 1, 1, number as u8].into());
            counts.admit(id(6000 + number), net, PeerStanding::Session).expect("reserved");
        }
    }

    #[test]
    fn peers_that_come_and_go_leave_nothing_behind() {
        let mut counts = ConnectionCounts::new(Places::DEFAULT);
        for number in 0..20_000 {
            let (peer, id) = (PeerId::random(), id(number));
            let standing = PeerStanding::Stranger;
            match number % 3 {
                0 => counts.admit_inbound(id, net(5, 1), peer, standing).expect("free"),
                1 => counts.admit_outbound(id, net(5, 1), peer).expect("free"),
                _ => counts.admit_dial(id).expect("free"),
            }
            counts.closed(id);
        }
        let left = counts.open.len() + counts.by_net.len() + counts.by_peer.len();
        assert_eq!((left, counts.by_class.len()), (0, 0));
    }

    #[test]
    fn a_peer_has_so_many_connections_in_both_directions_together() {
        let mut counts = ConnectionCounts::new(Places::DEFAULT);
        let (peer, other) = (PeerId::random(), PeerId::random());
        for number in 0..MAX_CONNECTIONS_PER_PEER {
            match number % 2 {
                0 => counts.admit_inbound(id(number), net(10, 1), peer, PeerStanding::Session),
                _ => counts.admit_outbound(id(number), net(10, 1), peer),
            }
            .expect("free");
        }
        let full = Err(Refused::PeerFull { limit: MAX_CONNECTIONS_PER_PEER });
        assert_eq!(counts.admit_outbound(id(100), net(10, 1), peer), full);
        let again = counts.admit_inbound(id(100), net(10, 1), peer, PeerStanding::Session);
        assert_eq!(again, full);
        counts.admit_outbound(id(101), net(10, 1), other).expect("another peer");
        counts.closed(id(3));
        counts.admit_outbound(id(100), net(10, 1), peer).expect("one is free");
    }

    #[test]
    fn our_own_dials_and_connections_are_bounded() {
        let mut counts = ConnectionCounts::new(Places::DEFAULT);
        let dials = (0..9999).take_while(|n| counts.admit_dial(id(*n)).is_ok()).count();
        assert_eq!(dials, MAX_PENDING_OUTBOUND);
        // A dial that became a connection makes room for the next.
        counts.admit_outbound(id(0), net(8, 1), PeerId::random()).expect("free");
        counts.admit_dial(id(9999)).expect("one is free");
        let mut connect =
            |n: usize| counts.admit_outbound(id(20_000 + n), net(8, 1), PeerId::random());
        let own = (0..9999).map_while(|n| connect(n).ok()).count();
        assert_eq!(own + 1, Places::DEFAULT.outbound());
    }

    #[test]
    fn handshakes_of_all_nets_together_are_bounded() {
        let mut counts = ConnectionCounts::new(Places::DEFAULT);
        let of = |number: usize| Net::of([5, 1, (number >> 8) as u8, number as u8].into());
        let admitted = (0..).take_while(|n| counts.admit_pending(id(*n), of(*n), true).is_ok());
        assert_eq!(admitted.count(), MAX_PENDING_INBOUND);
    }
}
