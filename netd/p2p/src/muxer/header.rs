//! The header of yamux's frames.
//!
//! ```text
//!   0         1      2       4           8        12
//!   +---------+------+-------+-----------+--------+------------- - -
//!   | version | kind | flags | stream id | length | data, if kind 0
//!   +---------+------+-------+-----------+--------+------------- - -
//! ```
//!
//! Source: <https://github.com/hashicorp/yamux/blob/master/spec.md>.

use std::io;

pub(super) const HEADER_BYTES: usize = 12;

/// Opens a stream.
pub(super) const SYN: u16 = 1;
/// Confirms a stream.
pub(super) const ACK: u16 = 2;
/// The sender has no more data.
pub(super) const FIN: u16 = 4;
/// The stream is gone.
pub(super) const RST: u16 = 8;

/// What a frame is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FrameKind {
    /// The length counts the bytes that follow.
    Data,
    /// The length is credit for the receiver.
    Window,
    /// The length is a number to be sent back.
    Ping,
    /// The length is the reason of the end.
    GoAway,
}

/// The header of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Header {
    pub kind: FrameKind,
    pub flags: u16,
    /// Zero for the connection.
    pub stream: u32,
    pub length: u32,
}

impl Header {
    pub(super) const fn of(kind: FrameKind, flags: u16, stream: u32, length: u32) -> Self {
        Self { kind, flags, stream, length }
    }

    /// Whether one of these flags is set.
    pub(super) fn has(self, flags: u16) -> bool {
        self.flags & flags != 0
    }

    pub(super) fn encode(self) -> [u8; HEADER_BYTES] {
        let kind = match self.kind {
            FrameKind::Data => 0,
            FrameKind::Window => 1,
            FrameKind::Ping => 2,
            FrameKind::GoAway => 3,
        };
        let [f0, f1] = self.flags.to_be_bytes();
        let [s0, s1, s2, s3] = self.stream.to_be_bytes();
        let [l0, l1, l2, l3] = self.length.to_be_bytes();
        [0, kind, f0, f1, s0, s1, s2, s3, l0, l1, l2, l3]
    }

    /// # Errors
    ///
    /// [`io::ErrorKind::InvalidData`] for an unknown version or kind.
    pub(super) fn decode(bytes: [u8; HEADER_BYTES]) -> io::Result<Self> {
        let [version, kind, f0, f1, s0, s1, s2, s3, l0, l1, l2, l3] = bytes;
        let kind = match (version, kind) {
            (0, 0) => FrameKind::Data,
            (0, 1) => FrameKind::Window,
            (0, 2) => FrameKind::Ping,
            (0, 3) => FrameKind::GoAway,
            _ => return Err(broken("unknown version or kind of a frame")),
        };
        Ok(Self {
            kind,
            flags: u16::from_be_bytes([f0, f1]),
            stream: u32::from_be_bytes([s0, s1, s2, s3]),
            length: u32::from_be_bytes([l0, l1, l2, l3]),
        })
    }
}

/// The peer broke the protocol: the connection ends.
pub(super) fn broken(what: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}
