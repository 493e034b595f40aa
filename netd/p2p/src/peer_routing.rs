//! Kademlia as peer routing. Records of others are never stored: nothing of Petals uses them.
//!
//! Lookups dial from ports of their own. From the listening port, a dial that is under way to a peer
//! behind a firewall meets the peer's own dial of us: that makes a TCP connection of which both ends
//! believe that they dialled, and no peer of go-libp2p can use it.
//!
//! A peer that was dialled in vain stays in libp2p's routing table, and a refresh of the table asks it
//! once for each bucket, up to 255 times in a row. Lookups leave such a peer out for a while, as those
//! of go-libp2p do.

use std::{
    collections::HashMap,
    task::{Context, Poll},
};

use libp2p::{
    Multiaddr, PeerId,
    core::{Endpoint, transport::PortUse},
    kad,
    swarm::{
        ConnectionDenied, ConnectionId, DialError, DialFailure, FromSwarm, NetworkBehaviour,
        THandler, THandlerInEvent, THandlerOutEvent, ToSwarm, dial_opts::DialOpts,
    },
};
use tokio::time::Instant;

use super::limits::{BOOTSTRAP_PERIOD, LOOKUP_PAUSE, LOOKUP_TIMEOUT, MAX_UNREACHED_PEERS};

type Kad = kad::Behaviour<kad::store::MemoryStore>;

/// [`kad::Behaviour`] that does not dial a peer again shortly after a dial of it failed.
pub(super) struct PeerRouting {
    kad: Kad,
    /// Peers whose last dial failed, and when.
    unreached: HashMap<PeerId, Instant>,
}

impl PeerRouting {
    pub(super) fn new(own: PeerId, is_server: bool) -> PeerRouting {
        let mut config = kad::Config::new(kad::PROTOCOL_NAME);
        config
            .set_query_timeout(LOOKUP_TIMEOUT)
            .set_periodic_bootstrap_interval(Some(BOOTSTRAP_PERIOD))
            .set_record_filtering(kad::StoreInserts::FilterBoth)
            .set_kbucket_inserts(kad::BucketInserts::Manual);
        let mut kad = Kad::with_config(own, kad::store::MemoryStore::new(own), config);
        kad.set_mode(Some(mode(is_server)));
        PeerRouting { kad, unreached: HashMap::new() }
    }

    /// Whether others may ask this node.
    pub(super) fn set_server(&mut self, is_server: bool) {
        self.kad.set_mode(Some(mode(is_server)));
    }

    /// Asks for the peers that are closest to `peer`.
    pub(super) fn look_up(&mut self, peer: PeerId) -> kad::QueryId {
        self.kad.get_closest_peers(peer)
    }

    /// Notes an address of a peer.
    pub(super) fn add_address(&mut self, peer: &PeerId, addr: Multiaddr) {
        self.kad.add_address(peer, addr);
    }

    /// Notes the addresses of a peer in place of what is known.
    pub(super) fn replace_addresses(&mut self, peer: &PeerId, addrs: Vec<Multiaddr>) {
        // Each insertion has the table refreshed.
        if self.addresses(*peer) == addrs {
            return;
        }
        self.kad.remove_peer(peer);
        for addr in addrs {
            self.kad.add_address(peer, addr);
        }
    }

    /// The addresses of a peer that are known.
    pub(super) fn addresses(&mut self, peer: PeerId) -> Vec<Multiaddr> {
        let Some(bucket) = self.kad.kbucket(peer) else { return Vec::new() };
        let entry = bucket.iter().find(|entry| *entry.node.key.preimage() == peer);
        entry.iter().flat_map(|entry| entry.node.value.iter()).cloned().collect()
    }

    fn is_unreached(&self, peer: &PeerId, now: Instant) -> bool {
        self.unreached.get(peer).is_some_and(|at| now < *at + LOOKUP_PAUSE)
    }

    fn note_unreached(&mut self, peer: PeerId, now: Instant) {
        if self.unreached.len() >= MAX_UNREACHED_PEERS {
            self.unreached.retain(|_, at| now < *at + LOOKUP_PAUSE);
        }
        if self.unreached.len() < MAX_UNREACHED_PEERS {
            self.unreached.insert(peer, now);
        }
    }
}

fn mode(is_server: bool) -> kad::Mode {
    if is_server { kad::Mode::Server } else { kad::Mode::Client }
}

impl NetworkBehaviour for PeerRouting {
    type ConnectionHandler = <Kad as NetworkBehaviour>::ConnectionHandler;
    type ToSwarm = kad::Event;

    fn handle_pending_inbound_connection(
        &mut self,
        id: ConnectionId,
        local: &Multiaddr,
        remote: &Multiaddr,
    ) -> Result<(), ConnectionDenied> {
        self.kad.handle_pending_inbound_connection(id, local, remote)
    }

    fn handle_established_inbound_connection(
        &mut self,
        id: ConnectionId,
        peer: PeerId,
        local: &Multiaddr,
        remote: &Multiaddr,
    ) -> Result<THandler<Self>, ConnectionDenied> {
        self.kad.handle_established_inbound_connection(id, peer, local, remote)
    }

    fn handle_pending_outbound_connection(
        &mut self,
        id: ConnectionId,
        peer: Option<PeerId>,
        addrs: &[Multiaddr],
        role: Endpoint,
    ) -> Result<Vec<Multiaddr>, ConnectionDenied> {
        self.kad.handle_pending_outbound_connection(id, peer, addrs, role)
    }

    fn handle_established_outbound_connection(
        &mut self,
        id: ConnectionId,
        peer: PeerId,
        addr: &Multiaddr,
        role: Endpoint,
        port: PortUse,
    ) -> Result<THandler<Self>, ConnectionDenied> {
        self.kad.handle_established_outbound_connection(id, peer, addr, role, port)
    }

    fn on_swarm_event(&mut self, event: FromSwarm) {
        match event {
            FromSwarm::ConnectionEstablished(established) => {
                self.unreached.remove(&established.peer_id);
            }
            FromSwarm::DialFailure(DialFailure {
                peer_id: Some(peer),
                error: DialError::Transport(_),
                ..
            }) => self.note_unreached(peer, Instant::now()),
            _ => {}
        }
        self.kad.on_swarm_event(event);
    }

    fn on_connection_handler_event(
        &mut self,
        peer: PeerId,
        id: ConnectionId,
        event: THandlerOutEvent<Self>,
    ) {
        self.kad.on_connection_handler_event(peer, id, event);
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<ToSwarm<kad::Event, THandlerInEvent<Self>>> {
        loop {
            let opts = match self.kad.poll(cx) {
                Poll::Ready(ToSwarm::Dial { opts }) => opts,
                other => return other,
            };
            let Some(peer) = opts.get_peer_id() else {
                return Poll::Ready(ToSwarm::Dial { opts });
            };
            if !self.is_unreached(&peer, Instant::now()) {
                let opts = DialOpts::peer_id(peer).allocate_new_port().build();
                return Poll::Ready(ToSwarm::Dial { opts });
            }
            // The lookup goes on without it.
            self.kad.on_swarm_event(FromSwarm::DialFailure(DialFailure {
                peer_id: Some(peer),
                error: &DialError::Aborted,
                connection_id: opts.connection_id(),
            }));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::task::Waker;

    use super::*;

    /// Refreshes the table until nothing is left to do: whom that dials, each time in vain, and how many
    /// lookups it takes.
    fn refresh(routing: &mut PeerRouting) -> (Vec<PeerId>, usize) {
        routing.kad.bootstrap().expect("a peer is known");
        let (mut dialled, mut lookups) = (Vec::new(), 0);
        loop {
            match routing.poll(&mut Context::from_waker(Waker::noop())) {
                Poll::Ready(ToSwarm::Dial { opts }) => {
                    let peer = opts.get_peer_id();
                    dialled.extend(peer);
                    routing.on_swarm_event(FromSwarm::DialFailure(DialFailure {
                        peer_id: peer,
                        error: &DialError::Transport(Vec::new()),
                        connection_id: opts.connection_id(),
                    }));
                }
                Poll::Ready(ToSwarm::GenerateEvent(kad::Event::OutboundQueryProgressed {
                    ..
                })) => lookups += 1,
                Poll::Ready(_) => {}
                Poll::Pending => return (dialled, lookups),
            }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn lookups_do_not_dial_a_peer_that_left_again_and_again() {
        let own = PeerId::random();
        // One that is near: a refresh looks up an id in each bucket from its own on.
        let distance =
            |peer: &PeerId| kad::KBucketKey::from(own).distance(&kad::KBucketKey::from(*peer));
        let is_near = |peer: &PeerId| distance(peer).ilog2().is_some_and(|bits| bits < 248);
        let gone = std::iter::repeat_with(PeerId::random).find(is_near).expect("one of 256");
        let mut routing = PeerRouting::new(own, true);
        routing.add_address(&gone, "/ip4/127.0.0.1/tcp/4001".parse().expect("address"));
        let (dialled, lookups) = refresh(&mut routing);
        assert_eq!(dialled, [gone], "in {lookups} lookups");
        assert!(lookups > 7, "{lookups}");
        tokio::time::advance(LOOKUP_PAUSE / 2).await;
        assert_eq!(refresh(&mut routing).0, []);
        tokio::time::advance(LOOKUP_PAUSE).await;
        assert_eq!(refresh(&mut routing).0, [gone]);
    }
}
