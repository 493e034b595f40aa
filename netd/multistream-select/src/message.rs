//! The four messages of the negotiation and their bytes. Pure; no stream here.

use crate::ProtocolError;

/// Longest accepted or sent message, in bytes, with its line feed. The longest name in use on a
/// Petals swarm has 47 bytes; go-libp2p itself sets no limit below 64 KiB.
pub const MAX_MESSAGE_BYTES: usize = 1024;

const HEADER: &str = "/multistream/1.0.0";
const NOT_AVAILABLE: &str = "na";
const LIST: &str = "ls";

/// One line of the negotiation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Message {
    /// First message of each side.
    Header,
    /// A proposal (from the dialer) or a confirmation (from the listener).
    Name(String),
    /// The proposed protocol is not served.
    NotAvailable,
    /// Asks for the names of all protocols.
    List,
}

impl Message {
    /// Makes a proposal or a confirmation of `name`.
    ///
    /// # Errors
    ///
    /// [`ProtocolError::InvalidProtocol`] if [`is_valid_name`] says no.
    pub(crate) fn name(name: &str) -> Result<Self, ProtocolError> {
        if is_valid_name(name) {
            Ok(Self::Name(name.to_owned()))
        } else {
            Err(ProtocolError::InvalidProtocol)
        }
    }

    /// Appends length, text and line feed to `out`.
    pub(crate) fn encode(&self, out: &mut Vec<u8>) {
        let text = match self {
            Self::Header => HEADER,
            Self::Name(name) => name,
            Self::NotAvailable => NOT_AVAILABLE,
            Self::List => LIST,
        };
        encode_length(text.len() + 1, out);
        out.extend_from_slice(text.as_bytes());
        out.push(b'\n');
    }

    /// Reads the message from its line, line feed included, length excluded.
    ///
    /// # Errors
    ///
    /// [`ProtocolError::InvalidMessage`] if the line feed is missing;
    /// [`ProtocolError::InvalidProtocol`] if the text is not a valid name either.
    pub(crate) fn decode(line: &[u8]) -> Result<Self, ProtocolError> {
        let text = line.strip_suffix(b"\n").ok_or(ProtocolError::InvalidMessage)?;
        let text = std::str::from_utf8(text).map_err(|_| ProtocolError::InvalidProtocol)?;
        match text {
            HEADER => Ok(Self::Header),
            NOT_AVAILABLE => Ok(Self::NotAvailable),
            LIST => Ok(Self::List),
            name => Self::name(name),
        }
    }
}

/// Whether `name` can be negotiated: not empty, one line, not one of the words of the negotiation
/// itself, and short enough for one message. A leading slash is not asked for.
pub(crate) fn is_valid_name(name: &str) -> bool {
    !name.is_empty()
        && name.len() < MAX_MESSAGE_BYTES
        && !name.contains('\n')
        && ![HEADER, NOT_AVAILABLE, LIST].contains(&name)
}

/// Appends `length` as an unsigned LEB128 varint.
fn encode_length(mut length: usize, out: &mut Vec<u8>) {
    while length > 0x7f {
        out.push((length & 0x7f) as u8 | 0x80);
        length >>= 7;
    }
    out.push(length as u8);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes_of(message: &Message) -> Vec<u8> {
        let mut out = Vec::new();
        message.encode(&mut out);
        out
    }

    #[test]
    fn messages_have_the_bytes_of_the_specification() {
        assert_eq!(bytes_of(&Message::Header), b"\x13/multistream/1.0.0\n");
        assert_eq!(bytes_of(&Message::NotAvailable), b"\x03na\n");
        assert_eq!(bytes_of(&Message::List), b"\x03ls\n");
        let ping = Message::name("DHTProtocol.rpc_ping").expect("bare names are valid");
        assert_eq!(bytes_of(&ping), b"\x15DHTProtocol.rpc_ping\n");
    }

    #[test]
    fn a_long_name_has_a_length_of_two_bytes() {
        let name = "x".repeat(200);
        let bytes = bytes_of(&Message::name(&name).expect("valid"));
        assert_eq!(&bytes[..2], &[0xc9, 0x01]);
        assert_eq!(bytes.len(), 203);
    }

    #[test]
    fn reserved_empty_and_multi_line_names_are_refused() {
        for name in ["", "na", "ls", "/multistream/1.0.0", "a\nb", "\n"] {
            assert!(Message::name(name).is_err(), "{name:?} was accepted");
        }
        assert!(Message::name(&"x".repeat(MAX_MESSAGE_BYTES)).is_err());
        assert!(Message::name(&"x".repeat(MAX_MESSAGE_BYTES - 1)).is_ok());
    }

    #[test]
    fn a_line_without_line_feed_is_no_message() {
        assert!(Message::decode(b"na").is_err());
        assert!(Message::decode(b"").is_err());
        assert!(Message::decode(b"\n").is_err());
        assert!(Message::decode(b"\xff\n").is_err());
    }
}
