//! What the driver tells the node, and what the node wants done.

use super::*;

/// Names a request of another node until it is answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct InboundId(pub u64);
/// Names a call of ours until it is answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct CallId(pub u64);
/// Names an operation that the owner asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct OperationId(pub u64);

/// A request, in either direction.
#[derive(Clone, Debug, PartialEq)]
pub enum DhtRequest {
    /// `rpc_ping`.
    Ping(PingRequest),
    /// `rpc_store`.
    Store(StoreRequest),
    /// `rpc_find`.
    Find(FindRequest),
}

/// A response, in either direction.
#[derive(Clone, Debug, PartialEq)]
pub enum Response {
    /// To a ping.
    Ping(PingResponse),
    /// To a store.
    Store(StoreResponse),
    /// To a find.
    Find(FindResponse),
}

/// What happens to a node.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "moved once, on its way to or from the driver")]
pub enum DhtEvent {
    /// Another node asks.
    Inbound {
        /// To be given back with the reply.
        id: InboundId,
        /// Authenticated caller.
        from: PeerId,
        /// Where it is connected from.
        net: Net,
        request: DhtRequest,
    },
    /// A call of ours ended; `None` if it failed or took too long.
    Answered { call: CallId, response: Option<Response> },
    /// Enter the swarm through these peers; none means a new swarm.
    Join {
        /// Name for the result.
        id: OperationId,
        /// Peers that are connected already.
        peers: Vec<PeerId>,
    },
    /// Read keys.
    Get {
        /// Name for the result.
        id: OperationId,
        keys: Vec<DhtId>,
        /// Whether to ask the whole beam and unite what it says, rather than stop at the first
        /// live value.
        latest: bool,
    },
    /// Write items.
    Store {
        /// Name for the result.
        id: OperationId,
        items: Vec<(DhtId, Item)>,
    },
    /// Time passes; once per second or so.
    Tick,
}

/// What a node wants done.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "moved once, on its way to or from the driver")]
pub enum DhtAction {
    /// Call a peer, and report the answer or its absence within 3 s.
    Call {
        /// To be given back with the answer.
        call: CallId,
        peer: PeerId,
        /// With what.
        request: DhtRequest,
    },
    /// Answer a request.
    Reply {
        id: InboundId,
        /// With what, or with which error text.
        response: Result<Response, String>,
    },
    Joined {
        id: OperationId,
        /// Whether we are in.
        result: Result<(), JoinError>,
    },
    Found {
        id: OperationId,
        /// What is alive under each key, in the order asked.
        found: Vec<(DhtId, Option<StoredValue>)>,
    },
    Stored {
        id: OperationId,
        /// Nodes that accepted each item, in the order given.
        accepted: Vec<usize>,
    },
}

/// Why a node cannot enter the swarm.
#[derive(Clone, Debug, PartialEq, Error)]
pub enum JoinError {
    /// Nobody answered.
    #[error("no initial peer answers ({0} asked)")]
    NoAnswer(usize),
    /// An initial peer could not call us.
    #[error(
        "initial peer {0} cannot reach this node: check the listen port, the announced address and the firewall"
    )]
    NotReachable(PeerId),
    /// Clocks differ.
    #[error(
        "the clock of this machine differs from that of initial peer {peer} by {skew_s:.1} s, at most 3 s are allowed"
    )]
    ClockSkew {
        peer: PeerId,
        /// Seconds by which the peer is ahead.
        skew_s: f64,
    },
}
