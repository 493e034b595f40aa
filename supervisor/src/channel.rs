//! The control channel to one child. `ipc-channel` blocks, so each child has two threads:
//!
//! ```text
//! poll loop --outbox (bounded)--> writer thread --IpcSender--> child
//! poll loop <--inbox (bounded)--- reader thread <---Uplink------- child
//!     ^------ wake (eventfd) ------'
//! ```
//!
//! The reader takes packets of bounded length ([`Uplink`]). It first waits for the child to connect to the one-shot server, and starts the writer
//! then; messages can be put into the outbox before that. A full outbox means a child that does not
//! read; more than [`MAX_MESSAGES_PER_S`] messages mean a child that floods the channel, and the
//! reader stops listening. Both ends close when the process is gone, whatever the other side does:
//! [`Channel::abandon`] wakes a reader whose child will never connect.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, TryRecvError, TrySendError, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

use ipc_channel::ipc::IpcSender;
use nix::sys::eventfd::{EfdFlags, EventFd};
use serde::{Deserialize, Serialize};
use shared::bootstrap::{FromChild, ToChild};
use shared::control::{Role, ToNetd, ToPrepare, ToWorker};
use shared::error_chain::with_causes;
use tracing::warn;

use crate::tree::Up;
use crate::uplink::{Listener, Refused, Uplink};

/// Messages to a child that wait for it. A child reads at once; even a netd with every worker
/// restarting gets fewer.
const OUTBOX: usize = 256;

/// Messages from a child that wait for the poll loop, which never blocks.
const INBOX: usize = 64;

/// More messages of one child in a second mean a fault. Prepare reports once per block, and models
/// have at most 4096.
pub const MAX_MESSAGES_PER_S: u32 = 10_000;

/// What the reader of a child found.
#[derive(Debug)]
pub enum Heard {
    Message(Up),
    /// The child holds its messages back, as it was asked to; nothing follows until it goes on.
    Held,
    /// The child closed its end, or never opened it; nothing follows.
    Closed,
    /// The child talked without end and is not listened to any more.
    Flooded,
    /// The child sent what is no message, or none that is that long; nothing follows.
    Garbled,
}

/// Wakes the poll loop.
#[derive(Clone, Debug)]
pub struct Wake(Arc<EventFd>);

impl Wake {
    /// A new one, not rung.
    ///
    /// # Errors
    /// When the process is out of descriptors.
    pub fn new() -> io::Result<Wake> {
        let flags = EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK;
        Ok(Wake(Arc::new(EventFd::from_flags(flags)?)))
    }

    /// Makes the descriptor readable. A counter at its limit is readable already.
    pub fn ring(&self) {
        let _ = self.0.write(1);
    }

    /// Makes the descriptor unreadable again.
    pub fn clear(&self) {
        let _ = self.0.read();
    }
}

impl AsFd for Wake {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Messages for a child, by its role.
#[derive(Debug)]
enum ChildOutbox {
    Prepare(SyncSender<ToChild<ToPrepare>>),
    Netd(SyncSender<ToChild<ToNetd>>),
    Worker(SyncSender<ToChild<ToWorker>>),
}

/// A message for a child.
#[derive(Debug)]
pub enum Message {
    /// For prepare.
    Prepare(ToPrepare),
    /// For netd.
    Netd(ToNetd),
    /// For a worker.
    Worker(ToWorker),
}

/// The poll loop's side of a control channel.
#[derive(Debug)]
pub struct Channel {
    outbox: ChildOutbox,
    inbox: Receiver<Heard>,
    server: String,
}

impl Channel {
    /// Makes the one-shot server and the reader of a child of `role`.
    ///
    /// # Errors
    /// When the process is out of descriptors or threads, or the temporary folder cannot be
    /// written.
    pub fn open(role: Role, wake: &Wake) -> io::Result<Channel> {
        match role {
            Role::Prepare => open(wake, ChildOutbox::Prepare, Up::Prepare),
            Role::Netd => open(wake, ChildOutbox::Netd, Up::Netd),
            Role::Worker => open(wake, ChildOutbox::Worker, Up::Worker),
        }
    }

    /// Name of the one-shot server, for the child's birth.
    pub fn server(&self) -> &str {
        &self.server
    }

    /// Puts a message into the outbox; false if the child does not read or the message is not for
    /// its role.
    pub fn send(&self, message: Message) -> bool {
        match (&self.outbox, message) {
            (ChildOutbox::Prepare(outbox), Message::Prepare(message)) => {
                put(outbox, message.into())
            }
            (ChildOutbox::Netd(outbox), Message::Netd(message)) => put(outbox, message.into()),
            (ChildOutbox::Worker(outbox), Message::Worker(message)) => put(outbox, message.into()),
            _ => false,
        }
    }

    /// Asks the child to hold its messages back, which it acknowledges with [`Heard::Held`], or to go
    /// on; false if it does not read.
    pub fn hold(&self, holds: bool) -> bool {
        match &self.outbox {
            ChildOutbox::Prepare(outbox) => put(outbox, held(holds)),
            ChildOutbox::Netd(outbox) => put(outbox, held(holds)),
            ChildOutbox::Worker(outbox) => put(outbox, held(holds)),
        }
    }

    /// The next thing heard, if there is one. After [`Heard::Closed`] it stays closed.
    pub fn next(&self) -> Option<Heard> {
        match self.inbox.try_recv() {
            Ok(heard) => Some(heard),
            Err(TryRecvError::Empty) => None,
            Err(TryRecvError::Disconnected) => Some(Heard::Closed),
        }
    }

    /// The process was reaped: if it had not connected, the reader still waits for it. A connection
    /// of our own, closed at once, ends that. When the child had connected, the server's socket
    /// is gone and there is nothing to do (and a failed attempt of ipc-channel would leak a
    /// descriptor).
    pub fn abandon(&self) {
        if Path::new(&self.server).exists() {
            drop(IpcSender::<()>::connect(self.server.clone()));
        }
    }
}

fn held<T>(holds: bool) -> ToChild<T> {
    if holds { ToChild::Hold } else { ToChild::GoOn }
}

/// A message that cannot be put because the writer is gone is not the child's fault: its end is on
/// the way.
fn put<T>(outbox: &SyncSender<T>, message: T) -> bool {
    !matches!(outbox.try_send(message), Err(TrySendError::Full(_)))
}

fn open<Down, Message>(
    wake: &Wake,
    outbox: fn(SyncSender<ToChild<Down>>) -> ChildOutbox,
    wrap: fn(Message) -> Up,
) -> io::Result<Channel>
where
    Down: Serialize + for<'de> Deserialize<'de> + Send + 'static,
    Message: Serialize + for<'de> Deserialize<'de> + Send + 'static,
{
    let listener = Listener::bind()?;
    let server = listener.path().to_string_lossy().into_owned();
    let (to_writer, from_loop) = sync_channel(OUTBOX);
    let (to_loop, inbox) = sync_channel(INBOX);
    let wake = wake.clone();
    thread::Builder::new().name("control-reader".into()).spawn(move || {
        match listener.accept() {
            Ok((down, up)) => {
                if spawn_writer(down, from_loop).is_ok() {
                    read(&up, wrap, &to_loop, &wake);
                }
            }
            Err(refused) => refuse(&refused, &to_loop),
        }
        // Dropping the sender is what says "closed"; the poll loop has to look.
        drop(to_loop);
        wake.ring();
    })?;
    Ok(Channel { outbox: outbox(to_writer), inbox, server })
}

fn spawn_writer<Down>(
    child: IpcSender<ToChild<Down>>,
    from_loop: Receiver<ToChild<Down>>,
) -> io::Result<()>
where
    Down: Serialize + Send + 'static,
{
    // Ends when the poll loop drops the outbox, or when the child is gone; either closes the
    // channel.
    thread::Builder::new().name("control-writer".into()).spawn(move || {
        while let Ok(message) = from_loop.recv() {
            if child.send(message).is_err() {
                return;
            }
        }
    })?;
    Ok(())
}

/// Tells of a child that sent what it must not. A channel that is closed or broken speaks for itself.
fn refuse(refused: &Refused, to_loop: &SyncSender<Heard>) {
    if !matches!(refused, Refused::Closed | Refused::System(_)) {
        warn!(error = with_causes(refused), "refused what a child sent");
        // A poll loop that is gone hears nothing.
        let _ = to_loop.send(Heard::Garbled);
    }
}

fn read<Message>(
    child: &Uplink<Message>,
    wrap: fn(Message) -> Up,
    to_loop: &SyncSender<Heard>,
    wake: &Wake,
) where
    Message: Serialize + for<'de> Deserialize<'de>,
{
    let mut budget = Budget::new(Instant::now());
    loop {
        let message = match child.recv() {
            Ok(message) => message,
            Err(refused) => return refuse(&refused, to_loop),
        };
        let heard = if budget.spend(Instant::now()) {
            match message {
                FromChild::Message(message) => Heard::Message(wrap(message)),
                FromChild::Held => Heard::Held,
            }
        } else {
            Heard::Flooded
        };
        let last = matches!(heard, Heard::Flooded);
        if to_loop.send(heard).is_err() {
            return;
        }
        wake.ring();
        if last {
            return;
        }
    }
}

/// Messages that may still come in the present second.
struct Budget {
    since: Instant,
    left: u32,
}

impl Budget {
    fn new(now: Instant) -> Budget {
        Budget { since: now, left: MAX_MESSAGES_PER_S }
    }

    fn spend(&mut self, now: Instant) -> bool {
        if now.duration_since(self.since) >= Duration::from_secs(1) {
            *self = Budget::new(now);
        }
        self.left = self.left.saturating_sub(1);
        self.left > 0
    }
}

#[cfg(test)]
mod tests {
    use ipc_channel::ipc::IpcReceiver;
    use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
    use shared::bootstrap::Exchange;
    use shared::control::FromWorker;
    use shared::ids::Generation;

    use super::*;

    type Ends = (IpcReceiver<ToChild<ToWorker>>, IpcSender<FromChild<FromWorker>>);

    fn connect(channel: &Channel) -> Ends {
        let (down, receiver) = ipc_channel::ipc::channel().unwrap();
        let (sender, up) = ipc_channel::ipc::channel().unwrap();
        let server = IpcSender::connect(channel.server().to_owned()).unwrap();
        server.send(Exchange { down, up }).unwrap();
        (receiver, sender)
    }

    fn hear(channel: &Channel, wake: &Wake) -> Heard {
        loop {
            if let Some(heard) = channel.next() {
                return heard;
            }
            let mut fds = [PollFd::new(wake.as_fd(), PollFlags::POLLIN)];
            assert_ne!(
                poll(&mut fds, PollTimeout::from(10_000u16)).unwrap(),
                0,
                "nothing was heard"
            );
            wake.clear();
        }
    }

    /// Ends the wait for a child that never connects; its socket is gone then.
    fn abandon(channel: &Channel, wake: &Wake) {
        channel.abandon();
        assert!(matches!(hear(channel, wake), Heard::Closed));
        assert!(!Path::new(channel.server()).exists());
    }

    #[test]
    fn messages_go_both_ways_and_may_be_sent_before_the_child_connects() {
        let wake = Wake::new().unwrap();
        let channel = Channel::open(Role::Worker, &wake).unwrap();
        assert!(channel.send(Message::Worker(ToWorker::Drain)));
        let (receiver, sender) = connect(&channel);
        assert!(matches!(receiver.recv().unwrap(), ToChild::Message(ToWorker::Drain)));
        let linked = FromWorker::Linked { netd_generation: Generation(3) };
        sender.send(FromChild::Message(linked)).unwrap();
        let Heard::Message(Up::Worker(FromWorker::Linked { netd_generation })) =
            hear(&channel, &wake)
        else {
            panic!("a worker's message")
        };
        assert_eq!(netd_generation, Generation(3));
        drop(sender);
        assert!(matches!(hear(&channel, &wake), Heard::Closed));
    }

    #[test]
    fn a_dropped_channel_disconnects_the_child() {
        let wake = Wake::new().unwrap();
        let channel = Channel::open(Role::Worker, &wake).unwrap();
        let (receiver, _sender) = connect(&channel);
        drop(channel);
        assert!(receiver.recv().is_err());
    }

    #[test]
    fn a_child_that_never_connects_is_abandoned() {
        let wake = Wake::new().unwrap();
        let channel = Channel::open(Role::Netd, &wake).unwrap();
        abandon(&channel, &wake);
    }

    #[test]
    fn a_child_that_does_not_read_fills_its_outbox() {
        let wake = Wake::new().unwrap();
        let channel = Channel::open(Role::Worker, &wake).unwrap();
        let sent =
            (0..=OUTBOX).take_while(|_| channel.send(Message::Worker(ToWorker::Drain))).count();
        assert_eq!(sent, OUTBOX);
        abandon(&channel, &wake);
    }

    #[test]
    fn a_message_for_another_role_is_refused() {
        let wake = Wake::new().unwrap();
        let channel = Channel::open(Role::Worker, &wake).unwrap();
        assert!(!channel.send(Message::Netd(ToNetd::Drain)));
        abandon(&channel, &wake);
    }

    #[test]
    fn the_budget_is_renewed_every_second() {
        let start = Instant::now();
        let mut budget = Budget::new(start);
        let within = (0..MAX_MESSAGES_PER_S * 2).take_while(|_| budget.spend(start)).count();
        assert_eq!(within, MAX_MESSAGES_PER_S as usize - 1);
        assert!(budget.spend(start + Duration::from_secs(1)));
    }
}
