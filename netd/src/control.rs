//! The control channel: two threads that turn the blocking ends of `ipc-channel` into bounded tokio
//! channels. The reader also fetches the descriptors that belong to a message, in order.

use std::fmt::Display;
use std::os::fd::OwnedFd;
use std::thread::JoinHandle;
use std::time::Duration;

use shared::bootstrap::{ControlEnds, DescriptorSocket};
use shared::control::{FdTag, FromNetd, ToNetd};
use tokio::sync::mpsc;
use tracing::{debug, error};

/// Messages under way in one direction; the supervisor sends a handful per worker generation.
const QUEUE: usize = 64;

/// How long the descriptors of a message may lag behind it; they are sent before it.
const DESCRIPTOR_TIMEOUT: Duration = Duration::from_secs(5);

/// Of a linked worker: rings, doorbell of the submission ring, doorbell of the completion ring.
pub const WORKER_FDS: usize = 3;
/// The arena, the board and the session records; behind them comes the socket for metrics, if there
/// is one.
pub const INIT_FDS: usize = 3;

/// A message of the supervisor with its descriptors.
#[derive(Debug)]
pub struct FromSupervisor {
    pub message: ToNetd,
    /// What belongs to it.
    pub fds: Vec<OwnedFd>,
}

/// Receives; closed when the supervisor is gone.
pub type Inbox = mpsc::Receiver<FromSupervisor>;

/// Sends to the supervisor without blocking the reactor.
#[derive(Clone, Debug)]
pub struct NetdOutbox(mpsc::Sender<FromNetd>);

impl NetdOutbox {
    /// An outbox that is read in the same process.
    #[cfg(test)]
    pub fn of(sender: mpsc::Sender<FromNetd>) -> NetdOutbox {
        NetdOutbox(sender)
    }

    /// Queues a message; waits while the queue is full. A supervisor that is gone is noticed by the
    /// inbox.
    pub async fn send(&self, message: FromNetd) {
        if self.0.send(message).await.is_err() {
            debug!("supervisor is gone, message dropped");
        }
    }
}

/// The thread that writes; joined at the end so that the last message is out.
#[derive(Debug)]
pub struct ControlWriter(JoinHandle<()>);

impl ControlWriter {
    /// Waits until everything is written. All outboxes must be gone.
    pub fn finish(self) {
        if self.0.join().is_err() {
            error!("control writer panicked");
        }
    }
}

/// Starts both threads.
///
/// # Errors
/// When the system has no thread left.
pub fn start(
    ends: ControlEnds<ToNetd, FromNetd>,
) -> std::io::Result<(Inbox, NetdOutbox, ControlWriter)> {
    let (inbox_sender, inbox) = mpsc::channel(QUEUE);
    let (outbox, queue) = mpsc::channel(QUEUE);
    let (receiver, descriptors, sender) = (ends.receiver, ends.descriptors, ends.sender);
    std::thread::Builder::new()
        .name("control-read".into())
        .spawn(move || read(|| receiver.recv(), &descriptors, &inbox_sender))?;
    let writer = std::thread::Builder::new()
        .name("control-write".into())
        .spawn(move || write(|message| sender.send(message), queue))?;
    Ok((inbox, NetdOutbox(outbox), ControlWriter(writer)))
}

fn read<E: Display>(
    receive: impl Fn() -> Result<ToNetd, E>,
    descriptors: &DescriptorSocket,
    inbox: &mpsc::Sender<FromSupervisor>,
) {
    loop {
        // Closed, or of no more use, which comes to the same.
        let message = match receive() {
            Ok(message) => message,
            Err(error) => return debug!(%error, "control channel closed"),
        };
        let fds = match bundle(&message) {
            None => Vec::new(),
            Some((tag, count)) => match descriptors.recv(tag, count, DESCRIPTOR_TIMEOUT) {
                Ok(fds) => fds,
                Err(error) => return error!(%error, "message arrived without its descriptors"),
            },
        };
        if inbox.blocking_send(FromSupervisor { message, fds }).is_err() {
            return;
        }
    }
}

/// Which descriptors belong to a message.
fn bundle(message: &ToNetd) -> Option<(FdTag, usize)> {
    match message {
        ToNetd::Init(init) => Some((init.fds, INIT_FDS + usize::from(init.has_metrics))),
        ToNetd::WorkerUp(up) => Some((up.link.fds, WORKER_FDS)),
        ToNetd::Model { .. }
        | ToNetd::WorkerDown { .. }
        | ToNetd::WorkerUnkillable { .. }
        | ToNetd::Shrink(_)
        | ToNetd::MoveFailed { .. }
        | ToNetd::MakeRoom(_)
        | ToNetd::Grow(_)
        | ToNetd::Pause { .. }
        | ToNetd::Resume(_)
        | ToNetd::Replace
        | ToNetd::Drain => None,
    }
}

fn write<E: Display>(
    send: impl Fn(FromNetd) -> Result<(), E>,
    mut queue: mpsc::Receiver<FromNetd>,
) {
    while let Some(message) = queue.blocking_recv() {
        if let Err(error) = send(message) {
            return debug!(%error, "cannot send to the supervisor");
        }
    }
}
