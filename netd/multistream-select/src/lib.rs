//! multistream-select 1.0: how two libp2p peers agree on the protocol of a connection or substream.
//!
//! This crate stands in for the crate of the same name that `libp2p-core` and `libp2p-swarm` use
//! (`[patch.crates-io]` in the workspace manifest) and offers the same API. The reason for its
//! existence: the stock crate refuses protocol names without a leading slash, and every RPC of
//! hivemind and Petals has such a name (`DHTProtocol.rpc_ping`). Here any non-empty UTF-8 name
//! without a line feed is a protocol. `README.md` compares the two crates.
//!
//! # The protocol
//!
//! Every message is a varint length followed by a line that ends in `\n`; the length counts the
//! `\n`.
//!
//! ```text
//!   dialer                                   listener
//!   /multistream/1.0.0  name-1  ---------->
//!                       <------------------  /multistream/1.0.0  na
//!   name-2              ------------------>
//!                       <------------------  name-2
//!   ... data of protocol name-2 in both directions ...
//! ```
//!
//! With [`Version::V1Lazy`] a dialer that has one name left does not wait for the answer: the
//! [`Negotiated`] stream sends header and name together with the first data and expects the
//! confirmation in front of the first data that it reads.
//!
//! # Bounds
//!
//! A message is at most [`MAX_MESSAGE_BYTES`] long, a listener answers at most
//! [`MAX_PROPOSALS`] proposals, and nothing is read beyond the negotiation, so what follows it
//! needs no buffer. No bytes from the remote can cause a panic.
//!
//! # Important Discrepancies
//!
//! - `ls` is answered with `na`, as go-multistream does; the stock crate sends a list.
//! - Header and first answer of the listener leave in one write when the proposal is already there.
//! - The last name is proposed lazily under [`Version::V1`] too if it has no leading slash. Such names
//!   are RPCs of hivemind: their callers send the request at once and learn of a rejection when they
//!   read the answer. libp2p's own protocols expect a rejection before the stream is theirs.
//!
//! Specification: <https://github.com/multiformats/multistream-select>,
//! <https://github.com/libp2p/specs/blob/master/connections/README.md#protocol-negotiation>.

#![forbid(unsafe_code)]

mod dialer;
mod error;
mod listener;
mod message;
mod message_io;
mod negotiated_stream;
#[cfg(test)]
mod pipe;
#[cfg(test)]
mod tests;

pub use self::{
    dialer::{DialerSelectFuture, dialer_select_proto},
    error::{NegotiationError, ProtocolError},
    listener::{ListenerSelectFuture, MAX_PROPOSALS, listener_select_proto},
    message::MAX_MESSAGE_BYTES,
    negotiated_stream::{Negotiated, NegotiatedComplete},
};

/// How a dialer negotiates. Both are the same on the wire; a listener need not know.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Version {
    /// The dialer waits for the confirmation before any data is sent: one round trip. Names without a
    /// leading slash do not wait.
    #[default]
    V1,
    /// The dialer sends its last remaining name together with the first data and reads the
    /// confirmation later: no round trip. A rejection then shows as an error of the first read.
    V1Lazy,
}
