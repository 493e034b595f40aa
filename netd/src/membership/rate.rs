//! What the network of this server carries each way, measured with other servers of the swarm and
//! with nobody else.
//!
//! ```text
//!   ONLINE and idle ── lock, kept? ──> up to 4 servers agree ──> all send at once (4 s, 32 MiB each at most)
//!                                                           ──> then all are sent to, and say what has arrived
//!        best mean of each way, the smaller of the two ──> kept for a week, announced
//! ```
//!
//! Several servers at once, since one may have a slower link than ours: their sum is what our link
//! carried at least. What counts is what has arrived, so a peer cannot make us believe in more than
//! it really sent or took. Only direct connections are used; and where any peer is connected at an
//! address of the whole world, only such peers: a neighbour on the same cable says nothing about
//! the way to the swarm.
//!
//! A server that is asked ([`serve::Counterpart`]) lends bounded bytes and time to each peer, and
//! to all of them in an hour. One that refuses is passed over; when nobody agrees it is tried again
//! later, and until then the rate is what [`crate::network_rate`] says.
//!
//! # Discrepancies
//! Petals asks speedtest.net. A service of the operator's choice can be named (`url`).

mod ask;
mod keep;
mod meter;
pub mod serve;
mod url;

use std::time::Duration;

pub use ask::with_peers;
pub use keep::{MeasurementOutcome, MeasurementSettings, keep, once};
use p2p::{ProtocolKind, ProtocolSpec};

/// The protocol. Peers that are no Sepal servers do not know it.
///
/// Frames of the caller: one byte, `DOWN` or `UP`; after `AGREED` came back, `GO`; then in the
/// direction asked for, frames of at most `CHUNK_BYTES`. For `UP` the callee answers with the bytes
/// that have arrived so far, 8 bytes, little endian.
pub const PROTOCOL: &str = "/sepal/rate/1";

/// The callee is to send.
const DOWN: u8 = b'D';
/// The caller wants to send.
const UP: u8 = b'U';
/// The callee agrees.
const AGREED: u8 = b'A';
/// The caller has found everybody it wants, and the clock runs.
const GO: u8 = b'G';

/// Bytes of a frame.
const CHUNK_BYTES: usize = 64 << 10;
/// Bytes of one transfer at most. Four servers fill a gigabit for a second.
pub(crate) const MAX_BYTES: u64 = 32 << 20;
/// Time of one transfer at most: TCP and yamux have opened their windows after the first second.
pub(crate) const MAX_TIME: Duration = Duration::from_secs(4);
/// Received bytes between two answers.
const ACK_BYTES: u64 = 256 << 10;

/// The protocol with its bounds, for [`p2p::P2pConfig::protocols`].
#[must_use]
pub fn protocol() -> ProtocolSpec {
    ProtocolSpec {
        name: PROTOCOL,
        kind: ProtocolKind::Stream,
        max_inbound_per_peer: 2,
        max_inbound_total: 8,
    }
}

#[cfg(test)]
mod tests;
