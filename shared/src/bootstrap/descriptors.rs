//! The socket between the supervisor and one child that carries what `ipc-channel` cannot name: the
//! child's birth, then bundles of descriptors. Each bundle is one packet: its tag (8 bytes, little
//! endian) with the descriptors attached. Bundles arrive in the order of the messages that name
//! them, so a wrong tag or count is an error, never skipped.

use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{
    AddressFamily, ControlMessage, ControlMessageOwned, MsgFlags, SockFlag, SockType, UnixAddr,
    recvmsg, send, sendmsg, socketpair,
};

use serde::{Deserialize, Serialize};

use super::control::Attach;
use crate::control::{Birth, FdTag};

/// Most descriptors in one packet; the kernel takes 253. The largest bundle of one packet is that of a
/// group of 15 ranks: its segment, 15 doorbells, 14 sockets. Files of weights come in several packets.
pub const MAX_BUNDLE: usize = 128;

/// Longest text in bytes: a birth holds two names, a filter and a few numbers.
const MAX_TEXT_BYTES: usize = 16 * 1024;

/// Why a bundle of descriptors could not be sent or taken.
#[derive(Debug, thiserror::Error)]
pub enum DescriptorError {
    /// The other end is closed.
    #[error("the other end of the descriptor socket is closed")]
    Closed,
    /// Nothing came in time, or the other end does not take what is sent.
    #[error("the other end of the descriptor socket does not keep up")]
    TimedOut,
    /// What came is not what the message announced.
    #[error("expected {count} descriptors under tag {tag}, got {got_count} under tag {got_tag:?}")]
    Mismatch {
        /// Tag asked for.
        tag: u64,
        /// Number asked for.
        count: usize,
        /// Tag that came; `None` = the packet was malformed.
        got_tag: Option<u64>,
        /// Number that came.
        got_count: usize,
    },
    /// More than [`MAX_BUNDLE`] descriptors.
    #[error("a bundle of {0} descriptors is larger than {MAX_BUNDLE}")]
    TooMany(usize),
    /// The operating system refused.
    #[error("cannot pass descriptors between processes")]
    Os(#[source] io::Error),
}

/// One end of the socket that carries descriptors.
#[derive(Debug)]
pub struct DescriptorSocket(OwnedFd);

impl From<OwnedFd> for DescriptorSocket {
    fn from(fd: OwnedFd) -> DescriptorSocket {
        DescriptorSocket(fd)
    }
}

impl From<DescriptorSocket> for OwnedFd {
    fn from(socket: DescriptorSocket) -> OwnedFd {
        socket.0
    }
}

impl AsFd for DescriptorSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl DescriptorSocket {
    /// A connected pair: the supervisor's end, and the end that a child inherits. Both are
    /// close-on-exec.
    ///
    /// # Errors
    /// When the process has no descriptors left.
    pub fn pair() -> io::Result<(DescriptorSocket, OwnedFd)> {
        let (ours, theirs) =
            socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC)?;
        Ok((DescriptorSocket(ours), theirs))
    }

    /// Another descriptor of the same end.
    ///
    /// # Errors
    /// When the process has no descriptors left.
    pub fn try_clone(&self) -> io::Result<DescriptorSocket> {
        self.0.try_clone().map(DescriptorSocket)
    }

    /// Writes the first packet, without waiting.
    ///
    /// # Errors
    /// When the birth is too long or the socket refuses it.
    pub fn send_birth(&self, birth: &Birth) -> io::Result<()> {
        self.send_text(birth)
    }

    /// Reads the first packet.
    pub(super) fn recv_birth(&self, timeout: Duration) -> io::Result<Birth> {
        self.recv_text(timeout)
    }

    /// Tells a child that holds its messages back where to send them, without waiting.
    ///
    /// # Errors
    /// When the socket refuses it.
    pub fn send_attach(&self, attach: &Attach) -> io::Result<()> {
        self.send_text(attach)
    }

    /// Reads where the next channel is.
    pub(super) fn recv_attach(&self, timeout: Duration) -> io::Result<Attach> {
        self.recv_text(timeout)
    }

    fn send_text(&self, value: &impl Serialize) -> io::Result<()> {
        let bytes = serde_json::to_vec(value)?;
        if bytes.len() > MAX_TEXT_BYTES {
            return Err(io::Error::other(format!(
                "a message of {} bytes exceeds {MAX_TEXT_BYTES}",
                bytes.len()
            )));
        }
        send(self.0.as_raw_fd(), &bytes, MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL)?;
        Ok(())
    }

    fn recv_text<T: for<'de> Deserialize<'de>>(&self, timeout: Duration) -> io::Result<T> {
        let mut bytes = vec![0; MAX_TEXT_BYTES];
        let packet = recv_packet::<1>(self.0.as_fd(), &mut bytes, Some(timeout));
        let packet = packet.map_err(io::Error::other)?;
        if !packet.is_whole {
            return Err(io::Error::other("the message is too long"));
        }
        bytes.truncate(packet.len);
        Ok(serde_json::from_slice(&bytes)?)
    }

    /// Sends `fds` under `tag` without waiting; the caller keeps its own copies.
    ///
    /// # Errors
    /// [`DescriptorError::TimedOut`] when the other end left so many bundles unread that the socket
    /// is full.
    pub fn send(&self, tag: FdTag, fds: &[BorrowedFd<'_>]) -> Result<(), DescriptorError> {
        if fds.len() > MAX_BUNDLE {
            return Err(DescriptorError::TooMany(fds.len()));
        }
        send_packet(self.0.as_fd(), &tag.0.to_le_bytes(), fds)
    }

    /// Takes the next bundle, which must be the `count` descriptors sent under `tag`; they are
    /// close-on-exec.
    ///
    /// # Errors
    /// [`DescriptorError::Mismatch`] when another tag or number came (what came is closed),
    /// [`DescriptorError::TimedOut`] when nothing came within `timeout`,
    /// [`DescriptorError::Closed`] when nothing can come.
    pub fn recv(
        &self,
        tag: FdTag,
        count: usize,
        timeout: Duration,
    ) -> Result<Vec<OwnedFd>, DescriptorError> {
        let mut bytes = [0; 8];
        let packet = recv_packet::<MAX_BUNDLE>(self.0.as_fd(), &mut bytes, Some(timeout))?;
        let is_tag = packet.is_whole && packet.len == bytes.len();
        let (got_tag, fds) = (is_tag.then(|| u64::from_le_bytes(bytes)), packet.fds);
        match got_tag == Some(tag.0) && fds.len() == count {
            true => Ok(fds),
            false => {
                Err(DescriptorError::Mismatch { tag: tag.0, count, got_tag, got_count: fds.len() })
            }
        }
    }

    /// [`send`](Self::send) of any number of descriptors, in packets of [`MAX_BUNDLE`] under one tag.
    ///
    /// # Errors
    /// As there. What was sent before the failure stays sent.
    pub fn send_all(&self, tag: FdTag, fds: &[BorrowedFd<'_>]) -> Result<(), DescriptorError> {
        fds.chunks(MAX_BUNDLE).try_for_each(|packet| self.send(tag, packet))
    }

    /// Takes what [`send_all`](Self::send_all) sent, which must be `count` descriptors.
    ///
    /// # Errors
    /// As [`recv`](Self::recv), for each packet.
    pub fn recv_all(
        &self,
        tag: FdTag,
        count: usize,
        timeout: Duration,
    ) -> Result<Vec<OwnedFd>, DescriptorError> {
        let mut fds = Vec::new();
        while fds.len() < count {
            fds.extend(self.recv(tag, MAX_BUNDLE.min(count - fds.len()), timeout)?);
        }
        Ok(fds)
    }
}

/// A packet that was taken from a socket.
#[derive(Debug)]
pub struct Packet {
    /// Bytes that were filled.
    pub len: usize,
    /// Its descriptors, close-on-exec; some may be lost where the packet is not whole.
    pub fds: Vec<OwnedFd>,
    /// Whether nothing of it was cut off.
    pub is_whole: bool,
}

/// Sends a packet without waiting; the caller keeps its own copies of the descriptors.
///
/// # Errors
/// [`DescriptorError::TimedOut`] when the socket is full, [`DescriptorError::Closed`] when nobody
/// can read the packet.
pub fn send_packet(
    socket: BorrowedFd<'_>,
    bytes: &[u8],
    fds: &[BorrowedFd<'_>],
) -> Result<(), DescriptorError> {
    let raw: Vec<RawFd> = fds.iter().map(AsRawFd::as_raw_fd).collect();
    let rights = [ControlMessage::ScmRights(&raw)];
    let control = if raw.is_empty() { &[][..] } else { &rights[..] };
    let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
    sendmsg::<UnixAddr>(socket.as_raw_fd(), &[IoSlice::new(bytes)], control, flags, None)
        .map_err(sort_error)?;
    Ok(())
}

/// Waits for the next packet, without end if there is no `timeout`. What exceeds `bytes`, or the room of
/// `FDS` descriptors, is cut off.
///
/// # Errors
/// [`DescriptorError::TimedOut`] when nothing came, [`DescriptorError::Closed`] when nothing can.
pub fn recv_packet<const FDS: usize>(
    socket: BorrowedFd<'_>,
    bytes: &mut [u8],
    timeout: Option<Duration>,
) -> Result<Packet, DescriptorError> {
    wait_readable(socket, timeout)?;
    let mut iov = [IoSliceMut::new(bytes)];
    let mut space = nix::cmsg_space!([RawFd; FDS]);
    let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_CMSG_CLOEXEC;
    let message = recvmsg::<UnixAddr>(socket.as_raw_fd(), &mut iov, Some(&mut space), flags)
        .map_err(sort_error)?;
    let (len, flags) = (message.bytes, message.flags);
    let mut fds = Vec::new();
    for control in message.cmsgs().map_err(sort_error)? {
        if let ControlMessageOwned::ScmRights(raw) = control {
            // SAFETY: the kernel has just made these descriptors for this process and nothing
            // else knows them.
            fds.extend(raw.into_iter().map(|fd| unsafe { OwnedFd::from_raw_fd(fd) }));
        }
    }
    if len == 0 && fds.is_empty() {
        return Err(DescriptorError::Closed);
    }
    let is_whole = !flags.intersects(MsgFlags::MSG_TRUNC | MsgFlags::MSG_CTRUNC);
    Ok(Packet { len, fds, is_whole })
}

/// Waits until there is a packet, or the other end is closed.
fn wait_readable(socket: BorrowedFd<'_>, timeout: Option<Duration>) -> Result<(), DescriptorError> {
    let deadline = timeout.map(|timeout| Instant::now() + timeout);
    let left = || deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
    loop {
        let millis = left().map_or(PollTimeout::NONE, |left| {
            PollTimeout::try_from(left.as_millis().saturating_add(1)).unwrap_or(PollTimeout::MAX)
        });
        match poll(&mut [PollFd::new(socket, PollFlags::POLLIN)], millis) {
            Ok(0) | Err(nix::errno::Errno::EINTR) if left() != Some(Duration::ZERO) => {}
            Ok(0) => return Err(DescriptorError::TimedOut),
            Ok(_) => return Ok(()),
            Err(e) => return Err(DescriptorError::Os(e.into())),
        }
    }
}

fn sort_error(errno: nix::errno::Errno) -> DescriptorError {
    use nix::errno::Errno;
    match errno {
        Errno::EAGAIN | Errno::ETOOMANYREFS => DescriptorError::TimedOut,
        Errno::EPIPE | Errno::ECONNRESET | Errno::ENOTCONN => DescriptorError::Closed,
        other => DescriptorError::Os(other.into()),
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::{Read, Seek, Write};

    use super::*;

    const SOON: Duration = Duration::from_millis(1);
    const LONG: Duration = Duration::from_secs(60);

    fn pair() -> (DescriptorSocket, DescriptorSocket) {
        let (ours, theirs) = DescriptorSocket::pair().unwrap();
        (ours, theirs.into())
    }

    #[test]
    fn a_descriptor_arrives_open_and_close_on_exec() {
        let (ours, theirs) = pair();
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(b"kv").unwrap();
        ours.send(FdTag(7), &[file.as_fd()]).unwrap();
        drop(file);

        let fd = theirs.recv(FdTag(7), 1, LONG).unwrap().remove(0);
        let flags = nix::fcntl::fcntl(&fd, nix::fcntl::FcntlArg::F_GETFD).unwrap();
        assert_eq!(flags, nix::libc::FD_CLOEXEC);
        let (mut file, mut text) = (File::from(fd), String::new());
        file.rewind().unwrap();
        file.read_to_string(&mut text).unwrap();
        assert_eq!(text, "kv");
    }

    #[test]
    fn a_wrong_tag_or_count_is_refused_and_named() {
        let (ours, theirs) = pair();
        let file = tempfile::tempfile().unwrap();
        ours.send(FdTag(1), &[file.as_fd()]).unwrap();
        ours.send(FdTag(2), &[file.as_fd(), file.as_fd()]).unwrap();
        let wrong_tag = theirs.recv(FdTag(9), 1, LONG).unwrap_err();
        assert!(
            matches!(wrong_tag, DescriptorError::Mismatch { got_tag: Some(1), got_count: 1, .. }),
            "{wrong_tag}"
        );
        let wrong_count = theirs.recv(FdTag(2), 1, LONG).unwrap_err();
        assert!(matches!(
            wrong_count,
            DescriptorError::Mismatch { got_tag: Some(2), got_count: 2, .. }
        ));
    }

    #[test]
    fn silence_times_out_and_a_closed_end_is_told_apart() {
        let (ours, theirs) = pair();
        assert!(matches!(theirs.recv(FdTag(1), 1, SOON), Err(DescriptorError::TimedOut)));
        drop(ours);
        assert!(matches!(theirs.recv(FdTag(1), 1, LONG), Err(DescriptorError::Closed)));
        assert!(matches!(theirs.send(FdTag(1), &[]), Err(DescriptorError::Closed)));
    }

    #[test]
    fn a_sender_never_waits_for_a_reader_that_does_not_read() {
        let (ours, _theirs) = pair();
        let file = tempfile::tempfile().unwrap();
        let refused = (0..100_000).find_map(|tag| ours.send(FdTag(tag), &[file.as_fd()]).err());
        assert!(matches!(refused, Some(DescriptorError::TimedOut)), "{refused:?}");
    }
}
