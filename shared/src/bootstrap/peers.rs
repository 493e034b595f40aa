//! The socket between two ranks of a group, over which each tells the other where its memory is.
//! The supervisor makes a pair for every two ranks of a generation and keeps none of the ends, so
//! that the end of a rank shows at all others. A message is one packet: some bytes, and at most
//! one descriptor.
//!
//! What arrives is an allegation: it is bounded here, and judged by who asked for it.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use super::descriptors::{DescriptorError, DescriptorSocket, recv_packet, send_packet};

/// Most bytes of a message between ranks.
pub const MAX_PEER_BYTES: usize = 256;

/// Why nothing can be said to another rank, or understood of it.
#[derive(Debug, thiserror::Error)]
pub enum PeerError {
    /// The other end is closed: the rank has ended.
    #[error("the other rank has ended")]
    Closed,
    /// What came is longer than a message, empty, or has several descriptors.
    #[error(
        "the other rank sent {bytes} bytes with {descriptors} descriptors, which is no message"
    )]
    Malformed {
        /// Bytes that came, as far as they were read.
        bytes: usize,
        /// Descriptors that came.
        descriptors: usize,
    },
    /// The operating system refused.
    #[error(transparent)]
    Socket(DescriptorError),
}

/// What another rank sent.
#[derive(Debug)]
pub struct PeerMessage {
    /// At least one byte, at most [`MAX_PEER_BYTES`].
    pub bytes: Vec<u8>,
    /// Close-on-exec. What it is of is not known.
    pub fd: Option<OwnedFd>,
}

/// One end of the socket between two ranks.
#[derive(Debug)]
pub struct PeerSocket(OwnedFd);

impl From<OwnedFd> for PeerSocket {
    fn from(fd: OwnedFd) -> PeerSocket {
        PeerSocket(fd)
    }
}

impl PeerSocket {
    /// A connected pair, both ends close-on-exec.
    ///
    /// # Errors
    /// When the process has no descriptors left.
    pub fn pair() -> io::Result<(OwnedFd, OwnedFd)> {
        let (one, other) = DescriptorSocket::pair()?;
        Ok((one.into(), other))
    }

    /// Sends a message without waiting; the caller keeps its copy of `fd`.
    ///
    /// # Errors
    /// [`PeerError::Closed`], or [`PeerError::Socket`] when the other end reads nothing.
    pub fn send(&self, bytes: &[u8], fd: Option<BorrowedFd<'_>>) -> Result<(), PeerError> {
        let fds: Vec<BorrowedFd<'_>> = fd.into_iter().collect();
        send_packet(self.0.as_fd(), bytes, &fds).map_err(sort)
    }

    /// The next message, if one comes within `timeout`.
    ///
    /// # Errors
    /// [`PeerError`], also for a message that no rank sends.
    pub fn recv(&self, timeout: Duration) -> Result<Option<PeerMessage>, PeerError> {
        let mut bytes = vec![0; MAX_PEER_BYTES];
        let mut packet = match recv_packet::<2>(self.0.as_fd(), &mut bytes, Some(timeout)) {
            Err(DescriptorError::TimedOut) => return Ok(None),
            taken => taken.map_err(sort)?,
        };
        let descriptors = packet.fds.len();
        if !packet.is_whole || packet.len == 0 || descriptors > 1 {
            return Err(PeerError::Malformed { bytes: packet.len, descriptors });
        }
        bytes.truncate(packet.len);
        Ok(Some(PeerMessage { bytes, fd: packet.fds.pop() }))
    }
}

fn sort(error: DescriptorError) -> PeerError {
    match error {
        DescriptorError::Closed => PeerError::Closed,
        other => PeerError::Socket(other),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOON: Duration = Duration::from_millis(1);
    const LONG: Duration = Duration::from_secs(60);

    fn pair() -> (PeerSocket, PeerSocket) {
        let (one, other) = PeerSocket::pair().unwrap();
        (one.into(), other.into())
    }

    #[test]
    fn a_message_arrives_with_its_descriptor_and_silence_is_no_error() {
        let (one, other) = pair();
        assert!(other.recv(SOON).unwrap().is_none());
        let file = tempfile::tempfile().unwrap();
        one.send(b"offer", Some(file.as_fd())).unwrap();
        one.send(b"none", None).unwrap();
        let offer = other.recv(LONG).unwrap().unwrap();
        assert_eq!((&offer.bytes[..], offer.fd.is_some()), (&b"offer"[..], true));
        let none = other.recv(LONG).unwrap().unwrap();
        assert_eq!((&none.bytes[..], none.fd.is_some()), (&b"none"[..], false));
    }

    #[test]
    fn the_end_of_a_rank_shows_after_what_it_sent() {
        let (one, other) = pair();
        one.send(b"last", None).unwrap();
        drop(one);
        assert!(other.recv(LONG).unwrap().is_some());
        assert!(matches!(other.recv(LONG), Err(PeerError::Closed)));
        assert!(matches!(other.send(b"x", None), Err(PeerError::Closed)));
    }

    #[test]
    fn too_many_bytes_or_descriptors_are_refused() {
        let (one, other) = pair();
        one.send(&[7; MAX_PEER_BYTES + 1], None).unwrap();
        one.send(&[7; MAX_PEER_BYTES], None).unwrap();
        assert!(matches!(other.recv(LONG), Err(PeerError::Malformed { .. })));
        assert_eq!(other.recv(LONG).unwrap().unwrap().bytes.len(), MAX_PEER_BYTES);
        let file = tempfile::tempfile().unwrap();
        send_packet(one.0.as_fd(), b"two", &[file.as_fd(), file.as_fd()]).unwrap();
        let two = other.recv(LONG).unwrap_err();
        assert!(matches!(two, PeerError::Malformed { descriptors: 2, .. }), "{two}");
        send_packet(one.0.as_fd(), b"", &[file.as_fd()]).unwrap();
        assert!(matches!(other.recv(LONG), Err(PeerError::Malformed { bytes: 0, .. })));
    }
}
