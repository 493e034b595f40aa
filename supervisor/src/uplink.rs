//! What children say, read within bounds. `ipc-channel` reserves the length that a message announces
//! and takes the descriptors for granted that a message should bring; one packet of a child that a peer
//! has taken over would end the supervisor. The supervisor therefore reads the packets of children
//! itself, and `ipc-channel` sees those that are whole, short and what they should be.
//!
//! ```text
//! packet of ipc-channel:  its length | length of the message | message     two words of 8 bytes
//! child's first packet:   Exchange, with two descriptors: of the channel down, of the channel up
//! every later packet:     a message, without descriptors, in one packet
//! ```
//! The first packet goes on to a one-shot server of `ipc-channel` within this process, which alone can
//! make an `IpcSender` of a descriptor.

use std::fs::Permissions;
use std::io;
use std::marker::PhantomData;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use ipc_channel::SerDeError;
use ipc_channel::ipc::{IpcMessage, IpcOneShotServer, IpcSender};
use nix::sys::socket::{
    AddressFamily, Backlog, SockFlag, SockType, UnixAddr, bind, connect, listen, socket,
};
use serde::{Deserialize, Serialize};
use shared::bootstrap::{
    DescriptorError, Exchange, FromChild, Packet, ToChild, recv_packet, send_packet,
};

/// Longest message of a child; the longest that one sends has some KiB.
pub const MAX_MESSAGE_BYTES: usize = 128 << 10;

/// The two lengths before a message.
const HEADER_BYTES: usize = 2 * size_of::<usize>();

/// An exchange as ipc-channel writes it: the first channel of the packet, then the second. It ends the
/// process when a message names a channel that did not come.
const EXCHANGE: &[u8] = &[0, 1];

/// Descriptors that a packet may bring before it is refused.
const MAX_DESCRIPTORS: usize = 8;

/// Why nothing more is read of a child.
#[derive(Debug, thiserror::Error)]
pub enum Refused {
    /// The child closed its end.
    #[error("the channel is closed")]
    Closed,
    #[error("cannot read the channel")]
    System(#[from] io::Error),
    /// A message is longer than any that children send.
    #[error("a message of {0} bytes was announced, expected at most {MAX_MESSAGE_BYTES}")]
    TooLong(usize),
    /// A packet is not one of ipc-channel.
    #[error("a packet of {packet} bytes announces {announced}")]
    Malformed {
        /// Bytes that came.
        packet: usize,
        /// Bytes that it says it has.
        announced: usize,
    },
    /// A packet brings other descriptors than it should.
    #[error("a packet brings {got} descriptors, expected {expected}")]
    Descriptors {
        /// Number that came.
        got: usize,
        /// Number that should.
        expected: usize,
    },
    /// The bytes mean nothing.
    #[error("a message means nothing")]
    Content(#[from] SerDeError),
    /// The first packet is no exchange of channels.
    #[error("the first packet brings no channels")]
    Exchange,
}

impl From<DescriptorError> for Refused {
    fn from(error: DescriptorError) -> Refused {
        match error {
            DescriptorError::Closed => Refused::Closed,
            DescriptorError::Os(error) => Refused::System(error),
            other => Refused::System(io::Error::other(other)),
        }
    }
}

/// Where one child connects, once.
#[derive(Debug)]
pub struct Listener {
    socket: OwnedFd,
    /// Removed with the value.
    folder: tempfile::TempDir,
}

impl Listener {
    /// A socket in a folder of its own, which others cannot enter whatever the umask is.
    ///
    /// # Errors
    /// When the process is out of descriptors, or the temporary folder cannot be written.
    pub fn bind() -> io::Result<Listener> {
        let own = Permissions::from_mode(0o700);
        let folder = tempfile::Builder::new().permissions(own).tempdir()?;
        let socket =
            socket(AddressFamily::Unix, SockType::SeqPacket, SockFlag::SOCK_CLOEXEC, None)?;
        bind(socket.as_raw_fd(), &UnixAddr::new(&path_in(folder.path()))?)?;
        listen(&socket, Backlog::new(1)?)?;
        Ok(Listener { socket, folder })
    }

    /// Name of the server, for the child.
    pub fn path(&self) -> PathBuf {
        path_in(self.folder.path())
    }

    /// Waits for the child and takes its channels.
    pub fn accept<Down, Up>(self) -> Result<(IpcSender<ToChild<Down>>, Uplink<Up>), Refused>
    where
        Down: Serialize + for<'de> Deserialize<'de>,
        Up: Serialize + for<'de> Deserialize<'de>,
    {
        // A listener of std takes sockets of any kind.
        let (child, _) = UnixListener::from(self.socket).accept()?;
        let (packet, mut fds) = receive(&child)?;
        if fds.len() != 2 {
            return Err(Refused::Descriptors { got: fds.len(), expected: 2 });
        }
        let down = sender::<Down, Up>(&packet, &fds)?;
        let up = fds.pop().ok_or(Refused::Exchange)?;
        Ok((down, Uplink { socket: up, _messages: PhantomData }))
    }
}

fn path_in(folder: &Path) -> PathBuf {
    folder.join("socket")
}

/// The channel down of an exchange, whose packet was checked.
fn sender<Down, Up>(packet: &[u8], fds: &[OwnedFd]) -> Result<IpcSender<ToChild<Down>>, Refused>
where
    Down: Serialize + for<'de> Deserialize<'de>,
    Up: Serialize + for<'de> Deserialize<'de>,
{
    let is_socket = |fd: &OwnedFd| {
        let link = std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd()));
        link.is_ok_and(|link| link.to_string_lossy().starts_with("socket:"))
    };
    if packet.get(HEADER_BYTES..) != Some(EXCHANGE) || !fds.iter().all(is_socket) {
        return Err(Refused::Exchange);
    }
    let (server, name) = IpcOneShotServer::<Exchange<Down, Up>>::new()?;
    let to = socket(AddressFamily::Unix, SockType::SeqPacket, SockFlag::SOCK_CLOEXEC, None);
    let to = to.map_err(io::Error::from)?;
    let address = UnixAddr::new(name.as_str()).map_err(io::Error::from)?;
    connect(to.as_raw_fd(), &address).map_err(io::Error::from)?;
    let fds: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
    send_packet(to.as_fd(), packet, &fds)?;
    let (_, Exchange { down, .. }) = server.accept().map_err(|_| Refused::Exchange)?;
    Ok(down)
}

/// Where a child's messages come from.
#[derive(Debug)]
pub struct Uplink<Up> {
    socket: OwnedFd,
    _messages: PhantomData<fn() -> Up>,
}

impl<Up: Serialize + for<'de> Deserialize<'de>> Uplink<Up> {
    /// Waits for the next message.
    ///
    /// # Errors
    /// [`Refused`]; nothing that follows can be trusted then.
    pub fn recv(&self) -> Result<FromChild<Up>, Refused> {
        let (mut packet, fds) = receive(&self.socket)?;
        if !fds.is_empty() {
            return Err(Refused::Descriptors { got: fds.len(), expected: 0 });
        }
        Ok(IpcMessage::from_data(packet.split_off(HEADER_BYTES)).to()?)
    }
}

/// Takes the next packet, which must hold one whole message, and its descriptors.
fn receive(socket: &impl AsFd) -> Result<(Vec<u8>, Vec<OwnedFd>), Refused> {
    let mut packet = vec![0; HEADER_BYTES + MAX_MESSAGE_BYTES];
    let Packet { len, fds, is_whole } =
        recv_packet::<MAX_DESCRIPTORS>(socket.as_fd(), &mut packet, None)?;
    packet.truncate(len);
    let word = |at: usize| {
        let bytes = packet.get(at..at + size_of::<usize>());
        bytes.and_then(|bytes| bytes.try_into().ok()).map(usize::from_le_bytes)
    };
    let (fragment, total) = (word(0).unwrap_or(0), word(size_of::<usize>()).unwrap_or(0));
    if total > MAX_MESSAGE_BYTES {
        return Err(Refused::TooLong(total));
    }
    if len < HEADER_BYTES || fragment != len || total != len - HEADER_BYTES || !is_whole {
        return Err(Refused::Malformed { packet: len, announced: fragment.max(total) });
    }
    Ok((packet, fds))
}

#[cfg(test)]
mod tests {
    use std::thread::{self, JoinHandle};

    use nix::sys::socket::{MsgFlags, send, socketpair};
    use shared::control::{FromWorker, ToWorker};
    use shared::ids::Generation;

    use super::*;

    type Accepted = Result<(IpcSender<ToChild<ToWorker>>, Uplink<FromWorker>), Refused>;

    /// A supervisor that waits, and a child's connection to it.
    fn connected() -> (JoinHandle<Accepted>, OwnedFd) {
        let listener = Listener::bind().unwrap();
        let path = listener.path();
        let accepts = thread::spawn(|| listener.accept());
        let child = socket(AddressFamily::Unix, SockType::SeqPacket, SockFlag::empty(), None);
        let child = child.unwrap();
        connect(child.as_raw_fd(), &UnixAddr::new(&path).unwrap()).unwrap();
        (accepts, child)
    }

    fn packet(fragment: usize, total: usize, data: &[u8]) -> Vec<u8> {
        [&fragment.to_le_bytes()[..], &total.to_le_bytes(), data].concat()
    }

    /// The packet that ipc-channel makes of a message.
    fn proper(data: &[u8]) -> Vec<u8> {
        packet(HEADER_BYTES + data.len(), data.len(), data)
    }

    fn send_with(to: &OwnedFd, bytes: &[u8], fds: &[&OwnedFd]) {
        let fds: Vec<BorrowedFd<'_>> = fds.iter().map(|fd| fd.as_fd()).collect();
        send_packet(to.as_fd(), bytes, &fds).unwrap();
    }

    /// A supervisor's end of a channel up, and the raw end of the child.
    fn uplink() -> (Uplink<FromWorker>, OwnedFd) {
        let (ours, theirs) =
            socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::empty()).unwrap();
        (Uplink { socket: ours, _messages: PhantomData }, theirs)
    }

    #[test]
    fn a_child_of_ipc_channel_is_understood() {
        let listener = Listener::bind().unwrap();
        let name = listener.path().to_str().unwrap().to_owned();
        let child = thread::spawn(move || {
            let (down, receiver) = ipc_channel::ipc::channel::<ToChild<ToWorker>>().unwrap();
            let (sender, up) = ipc_channel::ipc::channel::<FromChild<FromWorker>>().unwrap();
            let server = IpcSender::connect(name).unwrap();
            server.send(Exchange { down, up }).unwrap();
            let linked = FromWorker::Linked { netd_generation: Generation(3) };
            sender.send(FromChild::Message(linked)).unwrap();
            receiver.recv().unwrap()
        });
        let (down, up) = listener.accept::<ToWorker, FromWorker>().unwrap();
        let FromChild::Message(FromWorker::Linked { netd_generation }) = up.recv().unwrap() else {
            panic!("another message");
        };
        assert_eq!(netd_generation, Generation(3));
        down.send(ToChild::Message(ToWorker::Drain)).unwrap();
        assert!(matches!(child.join().unwrap(), ToChild::Message(ToWorker::Drain)));
        assert!(matches!(up.recv(), Err(Refused::Closed)));
    }

    #[test]
    fn absurd_lengths_are_refused_before_anything_is_reserved() {
        let far = HEADER_BYTES + 4;
        for (bytes, expected) in [
            (packet(far, usize::MAX, b"abcd"), "18446744073709551615 bytes was announced"),
            (packet(far, 1 << 40, b"abcd"), "1099511627776 bytes was announced"),
            (packet(far, MAX_MESSAGE_BYTES, b"abcd"), "announces 131072"),
            (packet(far, 0, b"abcd"), "packet of 20 bytes"),
            (packet(usize::MAX, 4, b"abcd"), "announces 18446744073709551615"),
            (packet(0, 4, b"abcd"), "packet of 20 bytes"),
            (vec![7; 3], "packet of 3 bytes"),
            (proper(&vec![7; MAX_MESSAGE_BYTES + 1]), "131073 bytes was announced"),
            (proper(b"\xff\xff\xff\xff\xff"), "means nothing"),
        ] {
            let (up, child) = uplink();
            send(child.as_raw_fd(), &bytes, MsgFlags::empty()).unwrap();
            let error = up.recv().unwrap_err().to_string();
            assert!(error.contains(expected), "{error}, not {expected}");
        }
    }

    #[test]
    fn descriptors_that_nobody_asked_for_are_closed_and_refused() {
        let (up, child) = uplink();
        let (watched, given) =
            socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::empty()).unwrap();
        send_with(&child, &proper(b"\x00"), &[&given, &given]);
        drop(given);
        let refused = up.recv().unwrap_err();
        assert!(matches!(refused, Refused::Descriptors { got: 2, expected: 0 }), "{refused}");
        let mut byte = [0];
        let read = nix::sys::socket::recv(watched.as_raw_fd(), &mut byte, MsgFlags::empty());
        assert_eq!(read, Ok(0), "no copy of it is left");
    }

    #[test]
    fn a_first_packet_that_is_no_exchange_is_refused() {
        let file = OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
        let (socket, _other) =
            socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::empty()).unwrap();
        let cases: [(&[u8], &[&OwnedFd]); 5] = [
            (b"\x00\x01", &[]),
            (b"\x00\x01", &[&socket]),
            (b"\x00\x01", &[&file, &file]),
            (b"\xff\xff\xff\xff\xff\xff", &[&socket, &socket]),
            (b"\x07\x09", &[&socket, &socket]),
        ];
        for (data, fds) in cases {
            let (accepts, child) = connected();
            send_with(&child, &proper(data), fds);
            assert!(accepts.join().unwrap().is_err(), "{data:?}");
        }
        let (accepts, child) = connected();
        send(child.as_raw_fd(), &packet(20, usize::MAX, b"abcd"), MsgFlags::empty()).unwrap();
        assert!(matches!(accepts.join().unwrap(), Err(Refused::TooLong(usize::MAX))));
    }
}
