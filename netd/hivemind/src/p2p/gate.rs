//! How many inbound connections an IP net may have, in their handshake and afterwards. The counting
//! is pure; the behaviour only feeds it.
//!
//! The bounds hold for public nets. Loopback and private nets are the operator's own, where a whole
//! swarm may share one address; there only the bounds of all nets together hold.

use std::{
    collections::HashMap,
    convert::Infallible,
    fmt,
    task::{Context, Poll},
};

use libp2p::{
    Multiaddr, PeerId,
    core::{Endpoint, transport::PortUse},
    swarm::{
        ConnectionClosed, ConnectionDenied, ConnectionId, FromSwarm, ListenFailure,
        NetworkBehaviour, THandler, THandlerInEvent, THandlerOutEvent, ToSwarm, dummy,
    },
};

use super::{
    addresses::ip_of,
    limits::{MAX_CONNECTIONS_PER_NET, MAX_PENDING_CONNECTIONS_PER_NET},
    nets::Net,
};

/// A net has as many connections as it may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct NetFull {
    net: Net,
    limit: usize,
}

impl fmt::Display for NetFull {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "net {:?} has {} inbound connections already", self.net, self.limit)
    }
}

impl std::error::Error for NetFull {}

/// Inbound connections, by net.
#[derive(Debug, Default)]
struct NetCounts {
    open: HashMap<ConnectionId, (Net, Stage)>,
    counts: HashMap<(Net, Stage), usize>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Stage {
    Pending,
    Established,
}

impl NetCounts {
    /// Counts a connection in a stage, and no longer in an earlier one.
    fn admit(&mut self, id: ConnectionId, net: Net, stage: Stage) -> Result<(), NetFull> {
        self.closed(id);
        let limit = match stage {
            Stage::Pending => MAX_PENDING_CONNECTIONS_PER_NET,
            Stage::Established => MAX_CONNECTIONS_PER_NET,
        };
        let count = self.counts.entry((net, stage)).or_default();
        if net.is_public() && net != Net::Unknown && *count >= limit {
            return Err(NetFull { net, limit });
        }
        *count += 1;
        self.open.insert(id, (net, stage));
        Ok(())
    }

    /// A connection is gone, in whatever stage.
    fn closed(&mut self, id: ConnectionId) {
        let Some(key) = self.open.remove(&id) else {
            return;
        };
        if let Some(count) = self.counts.get_mut(&key) {
            *count = count.saturating_sub(1);
            if *count == 0 {
                self.counts.remove(&key);
            }
        }
    }
}

/// Refuses inbound connections of nets that have too many.
#[derive(Debug, Default)]
pub(super) struct Behaviour {
    counts: NetCounts,
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
        let admitted = self.counts.admit(id, net_of(remote), Stage::Pending);
        admitted.map_err(ConnectionDenied::new)
    }

    fn handle_established_inbound_connection(
        &mut self,
        id: ConnectionId,
        _: PeerId,
        _: &Multiaddr,
        remote: &Multiaddr,
    ) -> Result<THandler<Self>, ConnectionDenied> {
        let admitted = self.counts.admit(id, net_of(remote), Stage::Established);
        admitted.map(|()| dummy::ConnectionHandler).map_err(ConnectionDenied::new)
    }

    fn handle_established_outbound_connection(
        &mut self,
        _: ConnectionId,
        _: PeerId,
        _: &Multiaddr,
        _: Endpoint,
        _: PortUse,
    ) -> Result<THandler<Self>, ConnectionDenied> {
        Ok(dummy::ConnectionHandler)
    }

    fn on_swarm_event(&mut self, event: FromSwarm<'_>) {
        if let FromSwarm::ConnectionClosed(ConnectionClosed { connection_id, .. })
        | FromSwarm::ListenFailure(ListenFailure { connection_id, .. }) = event
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

    #[test]
    fn one_public_net_cannot_take_the_places_of_others() {
        let mut counts = NetCounts::default();
        let id = ConnectionId::new_unchecked;
        for number in 0..MAX_PENDING_CONNECTIONS_PER_NET {
            counts.admit(id(number), net(5, 1), Stage::Pending).expect("free");
        }
        let full = counts.admit(id(9999), net(5, 1), Stage::Pending);
        assert_eq!(full, Err(NetFull { net: net(5, 1), limit: MAX_PENDING_CONNECTIONS_PER_NET }));
        counts.admit(id(9998), net(5, 2), Stage::Pending).expect("another net");
        // Whoever finishes its handshake makes room for the next.
        counts.admit(id(0), net(5, 1), Stage::Established).expect("free");
        counts.admit(id(9999), net(5, 1), Stage::Pending).expect("free again");
        for number in (0..MAX_PENDING_CONNECTIONS_PER_NET).chain([9998, 9999]) {
            counts.closed(id(number));
        }
        assert!(counts.open.is_empty() && counts.counts.is_empty());
    }

    #[test]
    fn private_nets_share_the_bounds_of_all() {
        let mut counts = NetCounts::default();
        for number in 0..4 * MAX_CONNECTIONS_PER_NET {
            let id = ConnectionId::new_unchecked(number);
            counts.admit(id, net(10, 1), Stage::Established).expect("private");
        }
    }
}
