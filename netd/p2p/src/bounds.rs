//! The bounds of the node as rows of a table, and those of the protocols that it serves.

use resource_manager::{
    bounds::{Bound, bytes, count, time},
    circuits::{DEFAULT_RELAY_BYTES_PER_S, RELAY_PART_OF_NETWORK, SAVED},
    connection_limits::{
        MAX_CONNECTIONS_PER_NET, MAX_CONNECTIONS_PER_PEER, MAX_PENDING_CONNECTIONS_PER_KNOWN_NET,
        MAX_PENDING_CONNECTIONS_PER_NET, MAX_PENDING_INBOUND, MAX_PENDING_OUTBOUND,
        MAX_RESERVED_PER_NET, Places, RESERVED_PENDING,
    },
    dials::{MAX_PORTS_PER_NET, MAX_PORTS_PER_PEER, MAX_TARGETS, MEMORY as DIAL_MEMORY},
    first_byte::FIRST_BYTE_TIMEOUT,
    memory::{FIRST_WINDOW_BYTES, GROWTH_BYTES, UNARY_BYTES, WINDOW_BYTES},
    peerstore::{
        MAX_KNOWN_SERVERS, MAX_SESSION_PEERS, MAX_SESSION_PEERS_PER_NET, SESSION_PEER_MEMORY,
    },
    pools::PoolBounds,
};

use super::{
    config::ProtocolSpec, frame::DEFAULT_MAX_FRAME_BYTES, limits::*, muxer::MAX_ARRIVED,
    unary_call::MAX_UNARY_BYTES,
};

/// The bounds of a node, whatever it serves.
#[must_use]
pub fn bounds() -> Vec<Bound> {
    [connections(), handshakes(), upkeep(), streams(), requests(), dials(), relay()].concat()
}

/// The streams that a node serves of these protocols.
#[must_use]
pub fn of_protocols(protocols: &[ProtocolSpec]) -> Vec<Bound> {
    let row = |spec: &ProtocolSpec| {
        let (peer, total) = (count(spec.max_inbound_per_peer), count(spec.max_inbound_total));
        let what = format!("streams of `{}`", spec.name);
        Bound::new(what, format!("{peer} per peer, {total} in all"), "the stream is reset")
    };
    protocols.iter().map(row).collect()
}

fn connections() -> Vec<Bound> {
    let places = Places::DEFAULT;
    let reserved = places.for_sessions + places.for_servers;
    vec![
        Bound::new("connections", count(places.total), "refused"),
        Bound::new("inbound connections", count(places.inbound), "closed after the handshake"),
        Bound::new(
            "the last inbound connections, reserved for peers with a session",
            count(places.for_sessions),
            "closed after the handshake",
        ),
        Bound::new(
            "those before them, reserved for such peers and known servers",
            count(places.for_servers),
            "closed after the handshake",
        ),
        Bound::new("outbound connections", count(places.outbound()), "refused"),
        Bound::new("connections of one peer", count(MAX_CONNECTIONS_PER_PEER), "refused"),
        Bound::new(
            "inbound connections of one public IP net",
            format!(
                "{}, and {} of the {reserved} reserved ones",
                count(MAX_CONNECTIONS_PER_NET),
                MAX_RESERVED_PER_NET
            ),
            "closed after the handshake",
        ),
        Bound::new(
            "peers remembered because of a session",
            format!(
                "{} per public IP net, {} in all",
                count(MAX_SESSION_PEERS_PER_NET),
                count(MAX_SESSION_PEERS)
            ),
            "the one idle longest is forgotten, else the newcomer",
        ),
        Bound::new(
            "memory of such a peer after its session",
            time(SESSION_PEER_MEMORY),
            "it is a stranger",
        ),
        Bound::new("known servers", count(MAX_KNOWN_SERVERS), "newcomers are strangers"),
    ]
}

fn handshakes() -> Vec<Bound> {
    vec![
        Bound::new(
            "inbound handshakes",
            format!(
                "{}, the last {RESERVED_PENDING} for nets of peers with a session",
                count(MAX_PENDING_INBOUND)
            ),
            "closed",
        ),
        Bound::new(
            "inbound handshakes of one public IP net",
            format!(
                "{MAX_PENDING_CONNECTIONS_PER_NET}, or {MAX_PENDING_CONNECTIONS_PER_KNOWN_NET} where a peer with a session is"
            ),
            "closed",
        ),
        Bound::new(
            "time to the first byte of an inbound connection",
            time(FIRST_BYTE_TIMEOUT),
            "closed",
        ),
        Bound::new("time of a handshake", time(CONNECTION_TIMEOUT), "closed"),
    ]
}

fn upkeep() -> Vec<Bound> {
    vec![
        Bound::new(
            "connections before idle ones are closed",
            format!(
                "{TRIM_ABOVE_CONNECTIONS}; {CROWDED_ABOVE_CONNECTIONS} for those older than {}",
                time(CROWDED_GRACE)
            ),
            "idle ones are closed, strangers first",
        ),
        Bound::new("time without a stream", time(IDLE_CONNECTION_TIMEOUT), "closed"),
        Bound::new("time to the answer of a ping", time(PING_PERIOD), "closed at the second one"),
        Bound::new(
            "addresses remembered of one peer",
            count(MAX_ADDRESSES_PER_PEER),
            "the others are dropped",
        ),
    ]
}

fn streams() -> Vec<Bound> {
    vec![
        Bound::new(
            "streams of one connection",
            count(MAX_STREAMS_PER_CONNECTION),
            "refused by the multiplexer",
        ),
        Bound::new(
            "streams of one connection in negotiation",
            count(MAX_NEGOTIATING_STREAMS),
            "dropped",
        ),
        Bound::new("time of a negotiation", time(NEGOTIATION_TIMEOUT), "reset"),
        Bound::new(
            format!("first windows of streams that peers open, {} each", bytes(FIRST_WINDOW_BYTES)),
            pools(WINDOW_BYTES),
            "the stream is reset",
        ),
        Bound::new(
            "growth of windows while they are read",
            format!(
                "{} per stream, {} per connection, {}",
                bytes(MAX_WINDOW_GROWTH_OF_STREAM_BYTES as usize),
                bytes(MAX_WINDOW_GROWTH_BYTES),
                pools(GROWTH_BYTES)
            ),
            "windows stay as they are",
        ),
        Bound::new(
            "streams of one connection that have arrived and are not taken",
            count(MAX_ARRIVED),
            "the stream is reset",
        ),
        Bound::new("RPCs on their way to their handler", count(INBOUND_QUEUE), "they wait unread"),
    ]
}

fn requests() -> Vec<Bound> {
    let frame = usize::try_from(DEFAULT_MAX_FRAME_BYTES).unwrap_or(usize::MAX);
    vec![
        Bound::new("a unary request", bytes(MAX_UNARY_BYTES), "the stream is reset at the length"),
        Bound::new(
            "a frame of a stream",
            format!("{}; for blocks, what the largest request takes", bytes(frame)),
            "an error at the header",
        ),
        Bound::new(
            "unary requests that are read or computed",
            pools(UNARY_BYTES),
            "they wait unread",
        ),
        Bound::new(
            "first messages, steps, pushes and whole requests, each kind",
            "a quarter of `--request_memory`; of that half per public IP net, a quarter per peer",
            "they wait unread",
        ),
        Bound::new("time of a unary request", time(UNARY_REQUEST_TIMEOUT), "given up"),
        Bound::new("time without a byte of a unary request", time(UNARY_STALL_TIMEOUT), "given up"),
        Bound::new("time without a byte of a frame", time(FRAME_STALL_TIMEOUT), "given up"),
        Bound::new(
            "pace of a frame while others wait",
            format!("{} in {}", bytes(LEAST_FRAME_BYTES), time(FRAME_STALL_TIMEOUT)),
            "given up",
        ),
        Bound::new(
            "time in which a caller takes nothing of its answer",
            time(WRITE_STALL_TIMEOUT),
            "given up",
        ),
    ]
}

fn dials() -> Vec<Bound> {
    vec![
        Bound::new("our own dials under way", count(MAX_PENDING_OUTBOUND), "refused"),
        Bound::new(
            "ports without a peer that are dialled",
            format!(
                "{MAX_PORTS_PER_PEER} per peer and IP address, {MAX_PORTS_PER_NET} per public IP net, in {}",
                time(DIAL_MEMORY)
            ),
            "not dialled",
        ),
        Bound::new("such targets remembered", count(MAX_TARGETS), "new ones are not dialled"),
        Bound::new("calls that wait for a connection", count(MAX_WAITING_CALLS), "they fail"),
        Bound::new(
            "streams of one connection that we open at once",
            count(MAX_OPENING_STREAMS),
            "they fail",
        ),
        Bound::new("time of a lookup of a peer", time(LOOKUP_TIMEOUT), "it fails"),
        Bound::new(
            "peers remembered that lookups leave out",
            count(MAX_UNREACHED_PEERS),
            "they are dialled again at once",
        ),
    ]
}

fn relay() -> Vec<Bound> {
    let circuit = usize::try_from(MAX_CIRCUIT_BYTES).unwrap_or(usize::MAX);
    vec![
        Bound::new(
            "relay reservations",
            format!("{MAX_RESERVATIONS_PER_PEER} per peer, {} in all", count(MAX_RESERVATIONS)),
            "refused",
        ),
        Bound::new(
            "relay circuits",
            format!("{MAX_CIRCUITS_PER_PEER} per peer, {} in all", count(MAX_CIRCUITS)),
            "refused",
        ),
        Bound::new(
            "life and bytes of a circuit",
            format!("{}, {} in each direction", time(MAX_CIRCUIT_DURATION), bytes(circuit)),
            "closed",
        ),
        Bound::new(
            "bytes of circuits per second",
            format!(
                "`--relay_mbps`, or 1/{RELAY_PART_OF_NETWORK} of the announced network speed, {} until it is known, and what was left in the last {}; the same for each peer that wants more",
                bytes(usize::try_from(DEFAULT_RELAY_BYTES_PER_S).unwrap_or(usize::MAX)),
                time(SAVED),
            ),
            "they wait",
        ),
        Bound::new(
            "peers remembered that offer to relay",
            count(MAX_RELAY_CANDIDATES),
            "not remembered",
        ),
    ]
}

fn pools(PoolBounds { total, net, peer }: PoolBounds) -> String {
    let [total, net, peer] = [total, net, peer].map(bytes);
    format!("{peer} per peer, {net} per public IP net, {total} in all")
}
