//! Every bound of the node that is neither part of a [`ProtocolSpec`] nor of the [`ResourceManager`],
//! and what becomes of inbound RPC streams beyond theirs.

use std::{collections::HashMap, sync::Arc, time::Duration};

use libp2p::PeerId;
use parking_lot::Mutex;
use resource_manager::{
    ResourceManager,
    streams::{StreamBounds, StreamPermit},
};

use super::config::{ProtocolKind, ProtocolSpec};

/// With more connections than this, idle ones are closed. The same number as in p2pd.
pub(super) const TRIM_ABOVE_CONNECTIONS: usize = 512;
/// A younger connection is not closed: its peer may be about to use it. As in p2pd.
pub(super) const TRIM_GRACE: Duration = Duration::from_secs(120);
/// How often a connection is probed, and how long an answer may take: a dead machine says nothing,
/// and a slow link may have megabytes queued before the probe.
pub(super) const PING_PERIOD: Duration = Duration::from_secs(30);
/// With more connections than this, young ones are closed, too.
pub(super) const CROWDED_ABOVE_CONNECTIONS: usize = 576;
/// The age from which a connection is closed when it is crowded.
pub(super) const CROWDED_GRACE: Duration = Duration::from_secs(3);
/// Streams of one connection whose protocol is still being negotiated.
pub(super) const MAX_NEGOTIATING_STREAMS: usize = 128;
/// Negotiation of one stream, as in go-libp2p.
pub(super) const NEGOTIATION_TIMEOUT: Duration = Duration::from_secs(10);
/// TCP, security and muxer handshake of one connection.
pub(super) const CONNECTION_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a connection without streams is kept: DHT traffic is sporadic, re-dialling costs a
/// lookup.
pub(super) const IDLE_CONNECTION_TIMEOUT: Duration = Duration::from_secs(3600);
/// Addresses kept of one identified peer.
pub(super) const MAX_ADDRESSES_PER_PEER: usize = 16;
/// Outbound streams of one connection that wait for their negotiation.
pub(super) const MAX_OPENING_STREAMS: usize = 256;
/// Calls that wait for a connection to be made.
pub(super) const MAX_WAITING_CALLS: usize = 1024;
/// Commands under way to the swarm's task.
pub(super) const COMMAND_QUEUE: usize = 256;
/// Inbound RPCs under way to their handler.
pub(super) const INBOUND_QUEUE: usize = 256;
/// A unary request must be complete by then: 4 MiB over a slow link.
pub(super) const UNARY_REQUEST_TIMEOUT: Duration = Duration::from_secs(60);
/// A unary request of which nothing came for this long is given up: what is reserved for it is missing to
/// others.
pub(super) const UNARY_STALL_TIMEOUT: Duration = Duration::from_secs(10);
/// What is reserved for the frames of a stream is missing to others: without a byte for so long, the
/// stream is given up. While others wait for room it needs [`LEAST_FRAME_BYTES`] in that time.
pub(super) const FRAME_STALL_TIMEOUT: Duration = Duration::from_secs(10);
/// The least of a frame that must come in [`FRAME_STALL_TIMEOUT`] while others wait: 1 Mbit/s.
pub(super) const LEAST_FRAME_BYTES: usize = 1250 << 10;
/// Streams of one connection, each with a first window of 256 KiB.
pub(super) const MAX_STREAMS_PER_CONNECTION: usize = 256;
/// What the window of one stream may grow by: a line of 1 Gbit/s with a round trip of 100 ms is full with 12.5 MB.
pub(super) const MAX_WINDOW_GROWTH_OF_STREAM_BYTES: u32 = 16 << 20;
/// What the windows of all streams of one connection may grow by. A stream takes at most half of what is left.
pub(super) const MAX_WINDOW_GROWTH_BYTES: usize = 64 << 20;
/// A write that makes no progress for this long has failed.
pub(super) const WRITE_STALL_TIMEOUT: Duration = Duration::from_secs(60);
/// After the last byte was sent, how long the peer's end of stream is waited for.
pub(super) const LINGER_TIMEOUT: Duration = Duration::from_secs(5);
/// After the last answer, how long the caller's own end is waited for before the stream is closed.
pub(super) const CALLER_END_TIMEOUT: Duration = Duration::from_secs(1);
/// One lookup of a peer by its id.
pub(super) const LOOKUP_TIMEOUT: Duration = Duration::from_secs(20);
/// After a dial of a peer failed, how long lookups leave it out. As go-libp2p does at first.
pub(super) const LOOKUP_PAUSE: Duration = Duration::from_secs(5);
/// Such peers that are remembered.
pub(super) const MAX_UNREACHED_PEERS: usize = 1024;
/// How often the routing table is refreshed.
pub(super) const BOOTSTRAP_PERIOD: Duration = Duration::from_secs(300);
/// First pause before an initial peer that is not connected is dialled again; doubles.
pub(super) const REDIAL_MIN: Duration = Duration::from_secs(1);
/// Longest pause before an initial peer that is not connected is dialled again.
pub(super) const REDIAL_MAX: Duration = Duration::from_secs(60);
/// Relay service: peers that others may reach through this node. As in p2pd.
pub(super) const MAX_RESERVATIONS: usize = 128;
/// Relay service: reservations of one peer, over several connections.
pub(super) const MAX_RESERVATIONS_PER_PEER: usize = 4;
/// Relay service: circuits at once.
pub(super) const MAX_CIRCUITS: usize = 256;
/// Relay service: circuits at once from or to one peer. As in p2pd.
pub(super) const MAX_CIRCUITS_PER_PEER: usize = 16;
/// Relay service: life of a circuit. As in p2pd.
pub(super) const MAX_CIRCUIT_DURATION: Duration = Duration::from_secs(30 * 60);
/// Relay service: bytes of a circuit in each direction. As in p2pd.
pub(super) const MAX_CIRCUIT_BYTES: u64 = 4 << 30;
/// Relays that a node behind a NAT wants to be reachable through. As in go-libp2p.
pub(super) const WANTED_RELAYS: usize = 2;
/// Peers remembered that offer to relay.
pub(super) const MAX_RELAY_CANDIDATES: usize = 64;
/// First pause before a relay that failed is asked again; doubles.
pub(super) const RELAY_BACKOFF_MIN: Duration = Duration::from_secs(5);
/// Longest pause before a relay that failed is asked again. As in go-libp2p.
pub(super) const RELAY_BACKOFF_MAX: Duration = Duration::from_secs(3600);
/// How often missing relays are looked for.
pub(super) const RELAY_PERIOD: Duration = Duration::from_secs(5);
/// Callers that wait for a peer to introduce itself.
pub(super) const MAX_WAITING_FOR_INTRODUCTIONS: usize = 64;
/// How long closing all connections may take.
pub(super) const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(2);

/// RPCs of peers that came to nothing, by what was wrong with them, since the start of the node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct InboundFigures {
    /// More streams at once than a peer, or all peers, may have.
    pub too_many: u64,
    /// A unary request longer than its bound.
    pub too_large: u64,
    /// A unary request whose bytes are not of the protocol.
    pub malformed: u64,
    /// A unary request that was not complete in time, or a frame that came too slowly.
    pub too_slow: u64,
    /// A frame of a stream beyond its bound, or of no known kind; its handler hears of it, too.
    pub bad_frames: u64,
    /// A caller that took no byte of its answer for too long.
    pub stalled: u64,
    /// Records of the DHT that were not taken in or not believed; see
    /// [`super::P2p::count_bad_records`].
    pub bad_records: u64,
}

/// The bounds of a node on what peers send: its protocols, what they may hold, and what was refused.
#[derive(Debug)]
pub(super) struct InboundLimits {
    protocols: Box<[ProtocolSpec]>,
    refusals: Mutex<Refusals>,
    resources: ResourceManager,
}

#[derive(Debug, Default)]
struct Refusals {
    withdrawn: Vec<&'static str>,
    figures: InboundFigures,
}

impl InboundLimits {
    /// `memory`: bytes that frames of streams may take.
    pub(super) fn new(protocols: Vec<ProtocolSpec>, memory: u64) -> Arc<Self> {
        Arc::new(Self {
            protocols: protocols.into(),
            refusals: Mutex::default(),
            resources: ResourceManager::new(memory),
        })
    }

    /// The names that are offered to peers.
    pub(super) fn names(&self) -> Vec<&'static str> {
        let refusals = self.refusals.lock();
        let names = self.protocols.iter().map(|spec| spec.name);
        names.filter(|name| !refusals.withdrawn.contains(name)).collect()
    }

    /// What peers hold of this node.
    pub(super) fn resources(&self) -> &ResourceManager {
        &self.resources
    }

    /// What was refused so far.
    pub(super) fn figures(&self) -> InboundFigures {
        self.refusals.lock().figures
    }

    /// Counts one more.
    pub(super) fn count(&self, add: impl FnOnce(&mut InboundFigures)) {
        add(&mut self.refusals.lock().figures);
    }

    /// Counts a failed write if the peer took nothing for too long.
    pub(super) fn written<T>(&self, outcome: std::io::Result<T>) -> std::io::Result<T> {
        if matches!(&outcome, Err(error) if error.kind() == std::io::ErrorKind::TimedOut) {
            self.count(|figures| figures.stalled += 1);
        }
        outcome
    }

    /// Offers these no more. Streams that were negotiated go on.
    pub(super) fn withdraw(&self, names: &[&'static str]) {
        self.refusals.lock().withdrawn.extend_from_slice(names);
    }

    /// Counts one more stream of `peer`; `None` if a bound is reached or the protocol is not ours.
    pub(super) fn admit(
        self: &Arc<Self>,
        peer: PeerId,
        name: &'static str,
    ) -> Option<(ProtocolKind, Permit)> {
        let spec = self.protocols.iter().find(|spec| spec.name == name)?;
        let bounds =
            StreamBounds { per_peer: spec.max_inbound_per_peer, total: spec.max_inbound_total };
        let admitted = self.resources.streams().admit(peer, name, bounds);
        if admitted.is_none() {
            self.count(|figures| figures.too_many += 1);
        }
        Some((spec.kind, Permit { limits: Arc::clone(self), _counted: admitted? }))
    }
}

/// One admitted stream; counts until it is dropped.
#[derive(Debug)]
pub(super) struct Permit {
    limits: Arc<InboundLimits>,
    _counted: StreamPermit,
}

impl Permit {
    /// Where it counts.
    pub(super) fn limits(&self) -> &Arc<InboundLimits> {
        &self.limits
    }
}

/// Counts our own calls and RPC streams per peer, so that their connections are not closed as idle.
#[derive(Debug, Default)]
pub(super) struct Calls {
    per_peer: Mutex<HashMap<PeerId, usize>>,
}

impl Calls {
    /// Counts one more, until the result is dropped.
    pub(super) fn begin(self: &Arc<Self>, peer: PeerId) -> CallGuard {
        *self.per_peer.lock().entry(peer).or_default() += 1;
        CallGuard { calls: Arc::clone(self), peer }
    }

    /// Whether any call to this peer is under way.
    pub(super) fn under_way(&self, peer: &PeerId) -> bool {
        self.per_peer.lock().contains_key(peer)
    }
}

/// One call under way.
#[derive(Debug)]
pub(super) struct CallGuard {
    calls: Arc<Calls>,
    peer: PeerId,
}

impl Drop for CallGuard {
    fn drop(&mut self) {
        let mut per_peer = self.calls.per_peer.lock();
        let left = per_peer.get(&self.peer).copied().unwrap_or(0).saturating_sub(1);
        if left == 0 {
            per_peer.remove(&self.peer);
        } else {
            per_peer.insert(self.peer, left);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn streams_beyond_the_bounds_are_refused_and_counted() {
        let (name, kind) = ("a", ProtocolKind::Unary);
        let spec = ProtocolSpec { name, kind, max_inbound_per_peer: 1, max_inbound_total: 2 };
        let (limits, peer) = (InboundLimits::new(vec![spec], 1 << 20), PeerId::random());
        let first = limits.admit(peer, "a").expect("free");
        assert!(limits.admit(peer, "a").is_none(), "second of one peer");
        assert!(limits.admit(peer, "b").is_none(), "unknown protocol");
        assert_eq!(limits.figures().too_many, 1);
        drop(first);
        assert!(limits.admit(peer, "a").is_some());
    }

    #[test]
    fn calls_are_under_way_until_the_last_one_ends() {
        let (calls, peer) = (Arc::<Calls>::default(), PeerId::random());
        let first = calls.begin(peer);
        let second = calls.begin(peer);
        drop(first);
        assert!(calls.under_way(&peer));
        drop(second);
        assert!(!calls.under_way(&peer));
    }
}
