//! A child's ends of its control channel. They outlive the supervisor's executable: before a supervisor
//! hands over to a new one in the same process, it asks each child to hold its messages back
//! ([`ToChild::Hold`]). The old channel closes with the old executable, and the child connects to the
//! channel that the new one names on the socket for descriptors. A child's role notices nothing.
//!
//! ```text
//! supervisor                          child
//!   Hold -------------------------->    holds its messages back from now on
//!   <------------------------ Held     the last message on this channel
//!   (becomes another executable: the channel closes)
//!   Attach { server } -------------->   connects there, sends what it held
//! ```
//! If there is no other executable after all, [`ToChild::GoOn`] ends the wait on the same channel.

use std::sync::Arc;
use std::time::{Duration, Instant};

use ipc_channel::IpcError;
use ipc_channel::TryRecvError;
use ipc_channel::ipc::{self, IpcReceiver, IpcSender};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tracing::{debug, warn};

use super::{DescriptorSocket, Exchange};

/// How long a child whose channel closed waits for the next executable of its supervisor.
const ATTACH_TIMEOUT: Duration = Duration::from_secs(60);

/// Messages that a child holds back at most; the next one fails, as on a closed channel.
const MAX_HELD: usize = 4096;

/// What goes down a control channel.
#[derive(Debug, Serialize, Deserialize)]
#[serde(bound(serialize = "Down: Serialize", deserialize = "Down: Deserialize<'de>"))]
pub enum ToChild<Down> {
    /// For the role.
    Message(Down),
    /// Send nothing until you are attached to another channel.
    Hold,
    /// Send on this channel again.
    GoOn,
}

impl<Down> From<Down> for ToChild<Down> {
    fn from(message: Down) -> ToChild<Down> {
        ToChild::Message(message)
    }
}

/// What goes up a control channel.
#[derive(Debug, Serialize, Deserialize)]
#[serde(bound(serialize = "Up: Serialize", deserialize = "Up: Deserialize<'de>"))]
pub enum FromChild<Up> {
    /// Of the role.
    Message(Up),
    /// Nothing follows on this channel, unless you say [`ToChild::GoOn`].
    Held,
}

/// Where a child finds its next channel: a packet on the socket for descriptors.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Attach {
    /// Name of the one-shot server.
    pub server: String,
}

/// A message cannot be sent: the supervisor is gone, or holds the child back for too long.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the control channel is closed")]
pub struct Closed;

/// Where a child's messages go. May block when the supervisor does not read; never send from a reactor
/// thread.
#[derive(Debug)]
pub struct ControlSender<Up>(Arc<Mutex<Outgoing<Up>>>);

#[derive(Debug)]
struct Outgoing<Up> {
    channel: IpcSender<FromChild<Up>>,
    /// What was not sent since [`ToChild::Hold`].
    held: Option<Vec<Up>>,
}

impl<Up> Clone for ControlSender<Up> {
    fn clone(&self) -> ControlSender<Up> {
        ControlSender(Arc::clone(&self.0))
    }
}

impl<Up: Serialize + for<'de> Deserialize<'de>> ControlSender<Up> {
    fn new(channel: IpcSender<FromChild<Up>>) -> ControlSender<Up> {
        ControlSender(Arc::new(Mutex::new(Outgoing { channel, held: None })))
    }

    /// Sends a message, or keeps it until the supervisor listens again.
    pub fn send(&self, message: Up) -> Result<(), Closed> {
        let mut out = self.0.lock();
        match &mut out.held {
            None => out.channel.send(FromChild::Message(message)).map_err(|_| Closed),
            Some(held) if held.len() < MAX_HELD => {
                held.push(message);
                Ok(())
            }
            Some(_) => Err(Closed),
        }
    }

    /// Nothing follows on the present channel.
    fn hold(&self) {
        let mut out = self.0.lock();
        if out.held.is_none() {
            out.held = Some(Vec::new());
        }
        // A channel that is closed shows when it is read.
        let _ = out.channel.send(FromChild::Held);
    }

    fn is_holding(&self) -> bool {
        self.0.lock().held.is_some()
    }

    /// Sends what was held, and all that follows, on `channel` or the present one.
    fn go_on(&self, channel: Option<IpcSender<FromChild<Up>>>) {
        let mut out = self.0.lock();
        if let Some(channel) = channel {
            out.channel = channel;
        }
        for message in out.held.take().into_iter().flatten() {
            if out.channel.send(FromChild::Message(message)).is_err() {
                // The reader finds the channel closed.
                return;
            }
        }
    }
}

/// Where the supervisor's messages come from, in order. Read it on the thread that takes descriptors.
#[derive(Debug)]
pub struct ControlReceiver<Down, Up> {
    channel: Mutex<IpcReceiver<ToChild<Down>>>,
    sender: ControlSender<Up>,
    descriptors: DescriptorSocket,
}

impl<Down, Up> ControlReceiver<Down, Up>
where
    Down: Serialize + for<'de> Deserialize<'de>,
    Up: Serialize + for<'de> Deserialize<'de>,
{
    /// Waits for the next message.
    ///
    /// # Errors
    /// [`IpcError::Disconnected`]: the supervisor is gone.
    pub fn recv(&self) -> Result<Down, IpcError> {
        loop {
            let received = self.channel.lock().recv();
            if let Some(message) = self.take(received)? {
                return Ok(message);
            }
        }
    }

    /// The next message, if there is one.
    ///
    /// # Errors
    /// [`TryRecvError::Empty`], or as [`ControlReceiver::recv`].
    pub fn try_recv(&self) -> Result<Down, TryRecvError> {
        self.try_recv_timeout(Duration::ZERO)
    }

    /// Waits for the next message for so long.
    ///
    /// # Errors
    /// [`TryRecvError::Empty`], or as [`ControlReceiver::recv`].
    pub fn try_recv_timeout(&self, patience: Duration) -> Result<Down, TryRecvError> {
        let until = Instant::now() + patience;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            let received = match left.is_zero() {
                true => self.channel.lock().try_recv(),
                false => self.channel.lock().try_recv_timeout(left),
            };
            let received = match received {
                Err(TryRecvError::Empty) => return Err(TryRecvError::Empty),
                Err(TryRecvError::IpcError(error)) => Err(error),
                Ok(received) => Ok(received),
            };
            if let Some(message) = self.take(received).map_err(TryRecvError::IpcError)? {
                return Ok(message);
            }
        }
    }

    /// What the role is to see of it; `None` for what it need not know.
    fn take(&self, received: Result<ToChild<Down>, IpcError>) -> Result<Option<Down>, IpcError> {
        match received {
            Ok(ToChild::Message(message)) => return Ok(Some(message)),
            Ok(ToChild::Hold) => self.sender.hold(),
            Ok(ToChild::GoOn) => self.sender.go_on(None),
            Err(IpcError::Disconnected) => self.attach()?,
            Err(error) => return Err(error),
        }
        Ok(None)
    }

    /// The channel closed: connects to the next one, if the supervisor has said that one comes.
    fn attach(&self) -> Result<(), IpcError> {
        if !self.sender.is_holding() {
            return Err(IpcError::Disconnected);
        }
        let attach = match self.descriptors.recv_attach(ATTACH_TIMEOUT) {
            Ok(attach) => attach,
            Err(error) => {
                debug!(%error, "no further executable of the supervisor");
                return Err(IpcError::Disconnected);
            }
        };
        let (receiver, sender) = connect(attach.server).map_err(|error| {
            warn!(%error, "cannot connect to the next executable of the supervisor");
            IpcError::Disconnected
        })?;
        *self.channel.lock() = receiver;
        self.sender.go_on(Some(sender));
        Ok(())
    }
}

/// A child's ends of a channel.
type Ends<Down, Up> = (IpcReceiver<ToChild<Down>>, IpcSender<FromChild<Up>>);

/// Makes a channel and hands its far ends to the one-shot server of this name.
fn connect<Down, Up>(server: String) -> std::io::Result<Ends<Down, Up>>
where
    Down: Serialize + for<'de> Deserialize<'de>,
    Up: Serialize + for<'de> Deserialize<'de>,
{
    let (down, receiver) = ipc::channel()?;
    let (sender, up) = ipc::channel()?;
    let server = IpcSender::<Exchange<Down, Up>>::connect(server)?;
    server.send(Exchange { down, up }).map_err(std::io::Error::other)?;
    Ok((receiver, sender))
}

/// The same, as a role uses it.
pub(super) fn open<Down, Up>(
    server: String,
    descriptors: &DescriptorSocket,
) -> std::io::Result<(ControlReceiver<Down, Up>, ControlSender<Up>)>
where
    Down: Serialize + for<'de> Deserialize<'de>,
    Up: Serialize + for<'de> Deserialize<'de>,
{
    let descriptors = descriptors.try_clone()?;
    let (receiver, sender) = connect(server)?;
    let sender = ControlSender::new(sender);
    let channel = Mutex::new(receiver);
    Ok((ControlReceiver { channel, sender: sender.clone(), descriptors }, sender))
}

#[cfg(test)]
mod tests {
    use ipc_channel::ipc::IpcOneShotServer;

    use super::*;

    type Server = IpcOneShotServer<Exchange<u32, u32>>;

    /// The supervisor's ends.
    struct Far {
        down: IpcSender<ToChild<u32>>,
        up: IpcReceiver<FromChild<u32>>,
    }

    fn accept(server: Server) -> Far {
        let (_, Exchange { down, up }) = server.accept().unwrap();
        Far { down, up }
    }

    /// A child and its supervisor; its end of the socket for descriptors.
    fn child() -> (ControlReceiver<u32, u32>, ControlSender<u32>, Far, DescriptorSocket) {
        let (ours, theirs) = DescriptorSocket::pair().unwrap();
        let (server, name) = Server::new().unwrap();
        let accepted = std::thread::spawn(|| accept(server));
        let (receiver, sender) = open(name, &theirs.into()).unwrap();
        (receiver, sender, accepted.join().unwrap(), ours)
    }

    fn said(far: &Far) -> Option<u32> {
        match far.up.try_recv_timeout(Duration::from_secs(60)).expect("a message in time") {
            FromChild::Message(said) => Some(said),
            FromChild::Held => None,
        }
    }

    #[test]
    fn what_is_said_meanwhile_reaches_the_next_executable_in_order() {
        let (receiver, sender, first, socket) = child();
        sender.send(1).unwrap();
        first.down.send(ToChild::Message(10)).unwrap();
        first.down.send(ToChild::Hold).unwrap();
        assert_eq!(receiver.recv().unwrap(), 10);
        let role = std::thread::spawn(move || (receiver.recv().unwrap(), receiver.recv().unwrap()));
        assert_eq!((said(&first), said(&first)), (Some(1), None));
        sender.send(2).unwrap();
        sender.send(3).unwrap();
        assert!(first.up.try_recv().is_err(), "nothing follows");
        drop(first);

        let (server, name) = Server::new().unwrap();
        socket.send_attach(&Attach { server: name }).unwrap();
        let second = accept(server);
        assert_eq!((said(&second), said(&second)), (Some(2), Some(3)));
        second.down.send(ToChild::Message(20)).unwrap();
        second.down.send(ToChild::Message(21)).unwrap();
        assert_eq!(role.join().unwrap(), (20, 21));
        sender.send(4).unwrap();
        assert_eq!(said(&second), Some(4));
    }

    #[test]
    fn without_another_executable_the_same_channel_goes_on() {
        let (receiver, sender, far, _socket) = child();
        far.down.send(ToChild::Hold).unwrap();
        far.down.send(ToChild::Message(1)).unwrap();
        assert_eq!(receiver.recv().unwrap(), 1);
        sender.send(5).unwrap();
        assert_eq!(said(&far), None);
        far.down.send(ToChild::GoOn).unwrap();
        far.down.send(ToChild::Message(2)).unwrap();
        assert_eq!(receiver.recv().unwrap(), 2);
        assert_eq!(said(&far), Some(5));
    }

    #[test]
    fn a_supervisor_that_is_gone_ends_the_channel() {
        let (receiver, _, far, socket) = child();
        drop(far);
        assert!(matches!(receiver.recv(), Err(IpcError::Disconnected)));
        // Even if it had meant to hand over.
        let (receiver, _, far, other) = child();
        far.down.send(ToChild::Hold).unwrap();
        drop((far, other));
        assert!(matches!(receiver.recv(), Err(IpcError::Disconnected)));
        drop(socket);
    }

    #[test]
    fn a_child_that_is_held_forever_keeps_no_more_than_it_may() {
        let (receiver, sender, far, _socket) = child();
        far.down.send(ToChild::Hold).unwrap();
        far.down.send(ToChild::Message(1)).unwrap();
        receiver.recv().unwrap();
        let kept = (0..).take_while(|number| sender.send(*number).is_ok()).count();
        assert_eq!(kept, MAX_HELD);
    }
}
