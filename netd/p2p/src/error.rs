//! Errors of the node, of calls to peers, and of calls from peers.

use std::{io, time::Duration};

use libp2p::{Multiaddr, PeerId, core::upgrade::NegotiationError, swarm::DialError};
use shared::error_chain::root_cause;

/// The node could not be started, or cannot do what was asked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum P2pError {
    /// Somebody else listens on the port.
    #[error(
        "cannot listen on {addr}: the port is in use; stop the program that uses it or choose another port"
    )]
    PortInUse {
        /// The address as configured.
        addr: Multiaddr,
    },
    /// The operating system or libp2p refuses the listen address.
    #[error("cannot listen on {addr}: {reason}")]
    Listen {
        /// The address as configured.
        addr: Multiaddr,
        reason: String,
    },
    /// Not one of the initial peers could be connected.
    #[error(
        "cannot join the swarm, no initial peer answers: {failures}; check the addresses, that \
         these peers run and that no firewall is between, or start a new swarm without initial peers"
    )]
    InitialPeersUnreachable {
        /// Address and reason of each, separated by semicolons.
        failures: String,
    },
    /// The address cannot be dialled, or whoever answers there is not the peer it names.
    #[error("cannot connect to {addr}: {reason}")]
    Unreachable {
        /// The address that was dialled.
        addr: Multiaddr,
        reason: String,
    },
    /// The keys do not suit the secure channel, or the process has no more descriptors or timers.
    #[error("cannot set up the network transport: {0}")]
    Transport(String),
    /// The node was shut down.
    #[error("the network node has been shut down")]
    Stopped,
}

/// A call to a peer failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CallError {
    /// There is no connection to the peer and none could be made; nothing was sent.
    #[error("cannot reach peer {peer}: {reason}")]
    Unreachable { peer: PeerId, reason: String },
    /// The peer does not serve the protocol.
    #[error("peer does not serve {0}")]
    NotSupported(&'static str),
    /// The peer's handler answered with this error text.
    #[error("remote error: {0}")]
    Remote(String),
    /// No answer in time; the call was cancelled.
    #[error("no answer within {0:?}")]
    Timeout(Duration),
    /// The stream or the connection ended before the answer was complete.
    #[error("the peer closed the stream before the answer was complete")]
    Closed,
    /// A message exceeds its bound; one of ours was not sent, one of theirs was not read.
    #[error("message of {bytes} bytes exceeds the limit of {limit} bytes")]
    TooLarge {
        /// Announced or encoded length.
        bytes: u64,
        limit: u64,
    },
    /// The peer does not follow the protocol.
    #[error("malformed answer: {0}")]
    Malformed(&'static str),
}

/// Reading from a peer's RPC stream ended before the peer said so.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InboundError {
    /// The caller closed or lost the stream: it has given up, the work is to be stopped.
    #[error("cancelled by the caller")]
    Cancelled,
    /// The caller does not follow the protocol; [`InboundStream::fail`](super::InboundStream::fail)
    /// it with this text.
    #[error("malformed request: {0}")]
    Malformed(&'static str),
    /// A frame came too slowly for what is reserved for it.
    #[error(
        "request came too slowly: {bytes} bytes within {within:?}, at least {least} are needed"
    )]
    TooSlow {
        bytes: usize,
        /// What had to come.
        least: usize,
        /// In which time.
        within: Duration,
    },
    /// A frame exceeds its bound and was not read.
    #[error("request of {bytes} bytes exceeds the limit of {limit} bytes")]
    TooLarge {
        /// Announced length.
        bytes: u64,
        limit: u64,
    },
}

impl From<io::Error> for CallError {
    /// Any failure of a stream whose protocol was confirmed: there is nothing to tell them apart by.
    fn from(_: io::Error) -> Self {
        Self::Closed
    }
}

impl CallError {
    /// A failure of a stream whose protocol was proposed together with the request: the peer may
    /// have rejected it.
    pub(super) fn of_stream(error: &io::Error, protocol: &'static str) -> Self {
        let cause = error.get_ref().and_then(|cause| cause.downcast_ref());
        match cause {
            Some(NegotiationError::Failed) => Self::NotSupported(protocol),
            _ => Self::Closed,
        }
    }
}

/// One line of what a dial failed with.
pub(super) fn brief(error: &DialError) -> String {
    match error {
        DialError::Transport(failures) => {
            let last = failures.iter().map(|(_, error)| root_cause(error)).next_back();
            last.unwrap_or_else(|| "no address works".to_owned())
        }
        DialError::WrongPeerId { obtained, .. } => {
            format!("another peer answers there: {obtained}")
        }
        DialError::NoAddresses => "no address is known".to_owned(),
        DialError::LocalPeerId { .. } => "this is the node itself".to_owned(),
        DialError::Denied { cause } => root_cause(cause),
        other => root_cause(other),
    }
}
