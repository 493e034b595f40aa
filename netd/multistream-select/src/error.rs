//! What can go wrong in a negotiation. Shapes and conversions are those `libp2p-swarm` matches on.

use std::{error::Error, fmt, io};

/// The remote or the stream broke the negotiation.
#[derive(Debug)]
#[non_exhaustive]
pub enum ProtocolError {
    /// The stream failed, or ended within a message.
    IoError(io::Error),
    /// A message was malformed, too long, or not allowed at this point.
    InvalidMessage,
    /// A protocol name is empty, too long, reserved, not UTF-8 or contains a line feed.
    InvalidProtocol,
    /// The dialer proposed more protocols than a listener is willing to answer.
    TooManyProtocols,
}

impl fmt::Display for ProtocolError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::IoError(_) => f.write_str("stream failed during protocol negotiation"),
            Self::InvalidMessage => f.write_str("invalid message in protocol negotiation"),
            Self::InvalidProtocol => f.write_str("invalid protocol name"),
            Self::TooManyProtocols => f.write_str("too many protocols proposed"),
        }
    }
}

impl Error for ProtocolError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match self {
            Self::IoError(error) => Some(error),
            _ => None,
        }
    }
}

impl From<io::Error> for ProtocolError {
    fn from(error: io::Error) -> Self {
        Self::IoError(error)
    }
}

impl From<ProtocolError> for io::Error {
    fn from(error: ProtocolError) -> Self {
        match error {
            ProtocolError::IoError(error) => error,
            other => io::Error::new(io::ErrorKind::InvalidData, other),
        }
    }
}

/// Why no protocol was agreed upon.
#[derive(Debug)]
pub enum NegotiationError {
    /// The remote or the stream broke the negotiation.
    ProtocolError(ProtocolError),
    /// The two sides have no protocol in common, or the dialer ended the negotiation.
    Failed,
}

impl fmt::Display for NegotiationError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::ProtocolError(_) => f.write_str("protocol negotiation broke"),
            Self::Failed => f.write_str("no protocol agreed upon"),
        }
    }
}

impl Error for NegotiationError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match self {
            Self::ProtocolError(error) => Some(error),
            Self::Failed => None,
        }
    }
}

impl From<ProtocolError> for NegotiationError {
    fn from(error: ProtocolError) -> Self {
        Self::ProtocolError(error)
    }
}

impl From<io::Error> for NegotiationError {
    fn from(error: io::Error) -> Self {
        Self::ProtocolError(ProtocolError::IoError(error))
    }
}

impl From<NegotiationError> for io::Error {
    fn from(error: NegotiationError) -> Self {
        match error {
            NegotiationError::ProtocolError(error) => error.into(),
            NegotiationError::Failed => io::Error::other(error),
        }
    }
}
