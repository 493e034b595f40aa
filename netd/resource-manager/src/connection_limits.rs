//! How many connections there may be: inbound ones, in their handshake and afterwards, by IP net and by
//! what their peer is worth; outbound ones and dials; all of one peer. The counting is pure
//! (`counts`); the behaviour only feeds it.
//!
//! It takes the place of `libp2p-connection-limits`, which remembers every PeerID that was ever connected.
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

mod counts;

use std::{
    convert::Infallible,
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

use super::{addresses::ip_of, nets::Net, peerstore::Peerstore};
use counts::ConnectionCounts;
pub use counts::{Places, Refused};

/// Connections in total. p2pd trims its own at 512.
pub const MAX_CONNECTIONS: usize = 1024;
/// Inbound connections; the rest is kept for ours.
pub const MAX_INBOUND_CONNECTIONS: usize = 768;
/// The last inbound connections: for peers with a session alone.
pub const RESERVED_FOR_SESSIONS: usize = 64;
/// The last inbound connections before those: for peers with a session and known servers.
pub const RESERVED_FOR_SERVERS: usize = 64;
/// Reserved connections of one public IP net, also beyond [`MAX_CONNECTIONS_PER_NET`]: sessions and
/// records of servers are cheap to those who want to fill the reserve.
pub const MAX_RESERVED_PER_NET: usize = 16;
/// Connections with one peer: both sides may dial at once, over several addresses.
pub const MAX_CONNECTIONS_PER_PEER: usize = 8;
/// Our own dials under way.
pub const MAX_PENDING_OUTBOUND: usize = 128;
/// Inbound connections in their handshake: silent ones stay for [`FIRST_BYTE_TIMEOUT`](super::first_byte::FIRST_BYTE_TIMEOUT), some KiB
/// each, and a hundred new ones a second must leave the others in.
pub const MAX_PENDING_INBOUND: usize = 1536;
/// The last of them: for IP nets of peers with a session.
pub const RESERVED_PENDING: usize = 128;
/// Inbound connections in their handshake of one public IP net.
pub const MAX_PENDING_CONNECTIONS_PER_NET: usize = 48;
/// The same where a peer with a session is or was.
pub const MAX_PENDING_CONNECTIONS_PER_KNOWN_NET: usize = 96;
/// Inbound connections of one public IP net: clients behind one NAT share it.
pub const MAX_CONNECTIONS_PER_NET: usize = 128;

/// Refuses connections and dials that find no place.
#[derive(Debug)]
pub struct Behaviour {
    counts: ConnectionCounts,
    peers: Arc<Peerstore>,
}

impl Behaviour {
    /// `peers` knows which ones matter.
    #[must_use]
    pub fn new(peers: Arc<Peerstore>, places: Places) -> Self {
        Self { counts: ConnectionCounts::new(places), peers }
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
        let is_known = self.peers.has_session_in(net);
        self.counts.admit_pending(id, net, is_known).map_err(ConnectionDenied::new)
    }

    fn handle_established_inbound_connection(
        &mut self,
        id: ConnectionId,
        peer: PeerId,
        _: &Multiaddr,
        remote: &Multiaddr,
    ) -> Result<THandler<Self>, ConnectionDenied> {
        let standing = self.peers.standing(&peer);
        let admitted = self.counts.admit_inbound(id, net_of(remote), peer, standing);
        admitted.map(|()| dummy::ConnectionHandler).map_err(ConnectionDenied::new)
    }

    fn handle_pending_outbound_connection(
        &mut self,
        id: ConnectionId,
        _: Option<PeerId>,
        _: &[Multiaddr],
        _: Endpoint,
    ) -> Result<Vec<Multiaddr>, ConnectionDenied> {
        let admitted = self.counts.admit_dial(id);
        admitted.map(|()| Vec::new()).map_err(ConnectionDenied::new)
    }

    fn handle_established_outbound_connection(
        &mut self,
        id: ConnectionId,
        peer: PeerId,
        addr: &Multiaddr,
        _: Endpoint,
        _: PortUse,
    ) -> Result<THandler<Self>, ConnectionDenied> {
        let admitted = self.counts.admit_outbound(id, net_of(addr), peer);
        admitted.map(|()| dummy::ConnectionHandler).map_err(ConnectionDenied::new)
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
