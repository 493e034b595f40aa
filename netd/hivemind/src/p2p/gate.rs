//! How many inbound connections there may be, in their handshake and afterwards, by IP net and by
//! what their peer is worth. The counting is pure; the behaviour only feeds it.
//!
//! ```text
//!   0            general           640      704      768   inbound connections
//!   |------------------------------|--------|--------|
//!    everybody                      servers, sessions: at most 16 of a public net
//!                                            sessions
//! ```
//! The PeerID is known only after the handshake: before it, nets of peers with a session have a
//! reserve, afterwards the peers themselves.
//!
//! The bounds by net hold for public nets. Loopback and private nets are the operator's own, where a
//! whole swarm may share one address; there only the bounds of all nets together hold.

use std::{
    collections::HashMap,
    convert::Infallible,
    fmt,
    sync::Arc,
    task::{Context, Poll},
};

use libp2p::{
    Multiaddr, PeerId,
    core::{Endpoint, transport::PortUse},
    swarm::{
        ConnectionClosed, ConnectionDenied, ConnectionId, DialFailure, FromSwarm, ListenFailure,
        NetworkBehaviour, THandler, THandlerInEvent, THandlerOutEvent, ToSwarm, dummy,
    },
};

use super::{
    addresses::ip_of,
    known::Standing,
    limits::{
        InboundLimits, MAX_CONNECTIONS, MAX_CONNECTIONS_PER_NET, MAX_INBOUND_CONNECTIONS,
        MAX_PENDING_CONNECTIONS_PER_KNOWN_NET, MAX_PENDING_CONNECTIONS_PER_NET,
        MAX_PENDING_INBOUND, MAX_RESERVED_PER_NET, RESERVED_FOR_SERVERS, RESERVED_FOR_SESSIONS,
        RESERVED_PENDING,
    },
    nets::Net,
};

/// Why a connection is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Refused {
    /// A net has as many connections as it may have.
    NetFull { net: Net, limit: usize },
    /// All nets together have as many as peers of this standing may fill.
    Full { standing: Standing, limit: usize },
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
        }
    }
}

impl std::error::Error for Refused {}

/// How many connections there may be.
#[derive(Clone, Copy, Debug)]
pub(super) struct Places {
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
    pub(super) const DEFAULT: Self = Self {
        total: MAX_CONNECTIONS,
        inbound: MAX_INBOUND_CONNECTIONS,
        for_sessions: RESERVED_FOR_SESSIONS,
        for_servers: RESERVED_FOR_SERVERS,
    };

    /// What peers of this standing leave to others.
    fn kept_from(&self, standing: Standing) -> usize {
        match standing {
            Standing::Stranger => self.for_sessions + self.for_servers,
            Standing::Server => self.for_sessions,
            Standing::Session => 0,
        }
    }

    /// Outbound connections: the reserve is inbound.
    pub(super) fn outbound(&self) -> usize {
        self.total.saturating_sub(self.for_sessions + self.for_servers)
    }
}

/// Open connections, by net and class.
#[derive(Debug)]
struct Counts {
    places: Places,
    open: HashMap<ConnectionId, (Net, Class)>,
    by_net: HashMap<(Net, Class), usize>,
    by_class: HashMap<Class, usize>,
}

/// which place a connection takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Class {
    /// Inbound, in its handshake.
    Pending,
    /// Inbound, where everybody may be.
    General,
    /// Inbound, where only peers that are known may be.
    Reserved,
    /// Outbound.
    Outbound,
}

impl Counts {
    fn new(places: Places) -> Self {
        Self { places, open: HashMap::new(), by_net: HashMap::new(), by_class: HashMap::new() }
    }

    /// Admits a connection to its handshake. `is_known`: a peer with a session is or was in its net.
    fn admit_pending(&mut self, id: ConnectionId, net: Net, is_known: bool) -> Result<(), Refused> {
        let limit = match is_known {
            true => MAX_PENDING_CONNECTIONS_PER_KNOWN_NET,
            false => MAX_PENDING_CONNECTIONS_PER_NET,
        };
        if has_bound(net) && self.of_net(net, Class::Pending) >= limit {
            return Err(Refused::NetFull { net, limit });
        }
        let limit = MAX_PENDING_INBOUND as usize - RESERVED_PENDING;
        if !is_known && self.of(Class::Pending) >= limit {
            return Err(Refused::Full { standing: Standing::Stranger, limit });
        }
        self.put(id, net, Class::Pending);
        Ok(())
    }

    /// Admits a connection after its handshake.
    fn admit(&mut self, id: ConnectionId, net: Net, standing: Standing) -> Result<(), Refused> {
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
        let class = match fits(Standing::Stranger) && !net_is_full {
            true => Class::General,
            false if standing == Standing::Stranger => {
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
        self.open.insert(id, (net, class));
    }

    /// A connection is gone, wherever it was.
    fn closed(&mut self, id: ConnectionId) {
        let Some((net, class)) = self.open.remove(&id) else {
            return;
        };
        if let Some(count) = self.by_class.get_mut(&class) {
            *count = count.saturating_sub(1);
        }
        if let Some(count) = self.by_net.get_mut(&(net, class)) {
            *count = count.saturating_sub(1);
            if *count == 0 {
                self.by_net.remove(&(net, class));
            }
        }
    }

    fn of(&self, class: Class) -> usize {
        self.by_class.get(&class).copied().unwrap_or(0)
    }

    fn of_net(&self, net: Net, class: Class) -> usize {
        self.by_net.get(&(net, class)).copied().unwrap_or(0)
    }
}

/// Whether the bounds by net hold: peers behind relays have no net of their own.
fn has_bound(net: Net) -> bool {
    net.is_public() && net != Net::Unknown
}

/// Refuses inbound connections that find no place.
#[derive(Debug)]
pub(super) struct Behaviour {
    counts: Counts,
    limits: Arc<InboundLimits>,
}

impl Behaviour {
    /// `limits` knows which peers matter.
    pub(super) fn new(limits: Arc<InboundLimits>, places: Places) -> Self {
        Self { counts: Counts::new(places), limits }
    }
}

/// Where a connection comes from; those through a relay have no net of their own.
fn net_of(remote: &Multiaddr) -> Net {
    ip_of(remote).map_or(Net::Unknown, Net::of)
}

impl NetworkBehaviour for Behaviour {
    type ConnectionHandler = dummy::ConnectionHandler;
    type ToSwarm = Infallible;

    fn handle_pending_inbound_connection(
        &mut self,
        id: ConnectionId,
        _: &Multiaddr,
        remote: &Multiaddr,
    ) -> Result<(), ConnectionDenied> {
        let net = net_of(remote);
        let is_known = self.limits.known().has_session_in(net);
        self.counts.admit_pending(id, net, is_known).map_err(ConnectionDenied::new)
    }

    fn handle_established_inbound_connection(
        &mut self,
        id: ConnectionId,
        peer: PeerId,
        _: &Multiaddr,
        remote: &Multiaddr,
    ) -> Result<THandler<Self>, ConnectionDenied> {
        let standing = self.limits.known().standing(&peer);
        let admitted = self.counts.admit(id, net_of(remote), standing);
        admitted.map(|()| dummy::ConnectionHandler).map_err(ConnectionDenied::new)
    }

    fn handle_established_outbound_connection(
        &mut self,
        id: ConnectionId,
        _: PeerId,
        addr: &Multiaddr,
        _: Endpoint,
        _: PortUse,
    ) -> Result<THandler<Self>, ConnectionDenied> {
        self.counts.put(id, net_of(addr), Class::Outbound);
        Ok(dummy::ConnectionHandler)
    }

    fn on_swarm_event(&mut self, event: FromSwarm<'_>) {
        if let FromSwarm::ConnectionClosed(ConnectionClosed { connection_id, .. })
        | FromSwarm::ListenFailure(ListenFailure { connection_id, .. })
        | FromSwarm::DialFailure(DialFailure { connection_id, .. }) = event
        {
            self.counts.closed(connection_id);
        }
    }

    fn on_connection_handler_event(
        &mut self,
        _: PeerId,
        _: ConnectionId,
        event: THandlerOutEvent<Self>,
    ) {
        match event {}
    }

    fn poll(&mut self, _: &mut Context<'_>) -> Poll<ToSwarm<Self::ToSwarm, THandlerInEvent<Self>>> {
        Poll::Pending
    }
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
        let mut counts = Counts::new(Places::DEFAULT);
        for number in 0..MAX_PENDING_CONNECTIONS_PER_NET {
            counts.admit_pending(id(number), net(5, 1), false).expect("free");
        }
        let full = counts.admit_pending(id(9999), net(5, 1), false);
        let limit = MAX_PENDING_CONNECTIONS_PER_NET;
        assert_eq!(full, Err(Refused::NetFull { net: net(5, 1), limit }));
        counts.admit_pending(id(9998), net(5, 2), false).expect("another net");
        // Whoever finishes its handshake makes room for the next.
        counts.admit(id(0), net(5, 1), Standing::Stranger).expect("free");
        counts.admit_pending(id(9999), net(5, 1), false).expect("free again");
        for number in (0..MAX_PENDING_CONNECTIONS_PER_NET).chain([9998, 9999]) {
            counts.closed(id(number));
        }
        assert!(counts.open.is_empty() && counts.by_net.is_empty());
    }

    #[test]
    fn private_nets_share_the_bounds_of_all() {
        let mut counts = Counts::new(Places::DEFAULT);
        for number in 0..4 * MAX_CONNECTIONS_PER_NET {
            counts.admit(id(number), net(10, 1), Standing::Stranger).expect("private");
        }
    }

    /// Connections of strangers from as many nets as it takes, until one is refused.
    fn full_of_strangers() -> (Counts, usize) {
        let mut counts = Counts::new(Places::DEFAULT);
        for number in 0.. {
            let net = Net::of([5, 1, (number >> 8) as u8, number as u8].into());
            if counts.admit(id(number), net, Standing::Stranger).is_err() {
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
        let mut fill = |standing: Standing, from: usize| {
            let of = |number: usize| Net::of([6, 1, standing as u8, number as u8].into());
            (0..1000).take_while(|n| counts.admit(id(from + n), of(*n), standing).is_ok()).count()
        };
        assert_eq!(fill(Standing::Server, 1000), RESERVED_FOR_SERVERS);
        assert_eq!(fill(Standing::Session, 2000), RESERVED_FOR_SESSIONS);
        let limit = MAX_INBOUND_CONNECTIONS;
        let standing = Standing::Session;
        let full = counts.admit(id(3000), net(7, 1), standing);
        assert_eq!(full, Err(Refused::Full { standing, limit }));
        counts.closed(id(2000));
        counts.admit(id(3000), net(7, 1), standing).expect("one is free");
    }

    #[test]
    fn one_public_net_takes_few_of_the_reserved_places() {
        let (mut counts, _) = full_of_strangers();
        let of_net = |n: &usize| counts.admit(id(1000 + n), net(9, 1), Standing::Session).is_ok();
        assert_eq!((0..1000).take_while(of_net).count(), MAX_RESERVED_PER_NET);
        counts.admit(id(3000), net(9, 2), Standing::Session).expect("another net");
    }

    #[test]
    fn a_known_peer_finds_a_place_in_a_net_that_is_full_of_strangers() {
        let mut counts = Counts::new(Places::DEFAULT);
        let pending = MAX_PENDING_CONNECTIONS_PER_NET;
        for number in 0..MAX_CONNECTIONS_PER_NET {
            counts.admit(id(number), net(5, 1), Standing::Stranger).expect("free");
        }
        assert!(counts.admit(id(500), net(5, 1), Standing::Stranger).is_err());
        counts.admit(id(500), net(5, 1), Standing::Session).expect("reserved");
        (0..pending).for_each(|n| counts.put(id(1000 + n), net(5, 1), Class::Pending));
        assert!(counts.admit_pending(id(501), net(5, 1), false).is_err());
        counts.admit_pending(id(501), net(5, 1), true).expect("a session is there");
    }

    #[test]
    fn handshakes_of_strangers_leave_some_to_nets_with_a_session() {
        let mut counts = Counts::new(Places::DEFAULT);
        let of = |number: usize| Net::of([5, 1, (number >> 8) as u8, number as u8].into());
        let admitted = (0..).take_while(|n| counts.admit_pending(id(*n), of(*n), false).is_ok());
        let admitted = admitted.count();
        assert_eq!(admitted, MAX_PENDING_INBOUND as usize - RESERVED_PENDING);
        counts.admit_pending(id(9999), net(7, 1), true).expect("a session is there");
    }

    #[test]
    fn our_own_connections_do_not_shrink_the_reserve() {
        let mut counts = Counts::new(Places::DEFAULT);
        let outbound = Places::DEFAULT.outbound();
        (0..outbound).for_each(|n| counts.put(id(n), net(8, 1), Class::Outbound));
        assert!(counts.admit(id(5000), net(7, 1), Standing::Stranger).is_err());
        let reserved = RESERVED_FOR_SERVERS + RESERVED_FOR_SESSIONS;
        for number in 0..reserved {
            let net = Net::of([6, 1, 1, number as u8].into());
            counts.admit(id(6000 + number), net, Standing::Session).expect("reserved");
        }
    }
}
