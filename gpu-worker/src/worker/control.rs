//! The control thread: turns messages of the supervisor into commands and wakes the executor.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use shared::bootstrap::{ControlEnds, ControlReceiver, ControlSender, DescriptorSocket};
use shared::control::{FromWorker, LinkInit, ToWorker, WorkerInit};
use shared::error_chain::with_causes;
use shared::exit::ExitReason;
use shared::ids::{Generation, Rank, WorkerId};
use shared::shm::doorbell::Doorbell;
use shared::shm::group::GroupMap;

use super::{DESCRIPTOR_TIMEOUT, lost, out_of_order};
use crate::executor::{ExecutorCommand, Exit};
use crate::link::{ARENA_LINK_DESCRIPTORS, ArenaLink, LINK_DESCRIPTORS, LinkError, NetdLink};

/// Messages of the supervisor that may wait for the end of a unit; more make the control thread
/// wait.
const MAX_COMMANDS: usize = 16;

/// How a worker opens its links, and how it is woken.
pub(super) trait Opener: Send + 'static {
    /// What it opens.
    type Link: Send + 'static;

    /// Descriptors of a link.
    const DESCRIPTORS: usize;

    /// Opens a link of this `generation` of a worker. The executor is woken through it once it has
    /// the link.
    fn open(
        &mut self,
        init: &LinkInit,
        worker: WorkerId,
        generation: Generation,
        fds: Vec<OwnedFd>,
    ) -> Result<Self::Link, LinkError>;

    /// Wakes the executor, which may sleep on what was opened before.
    fn wake(&mut self) -> io::Result<()>;
}

/// Of a worker that gets jobs from netd: it sleeps on the doorbell of its rings.
#[derive(Debug, Default)]
pub(super) struct Rings {
    bell: Option<Doorbell>,
    next: Option<Doorbell>,
}

impl Opener for Rings {
    type Link = NetdLink;

    const DESCRIPTORS: usize = LINK_DESCRIPTORS;

    fn open(
        &mut self,
        init: &LinkInit,
        worker: WorkerId,
        generation: Generation,
        fds: Vec<OwnedFd>,
    ) -> Result<NetdLink, LinkError> {
        let link = NetdLink::open(init, worker, generation, fds)?;
        self.next = Some(Doorbell::from_fd(link.submission_bell.try_clone()?)?);
        Ok(link)
    }

    fn wake(&mut self) -> io::Result<()> {
        // It may sleep on the old bell until it has seen the command, and on the new one after
        // that.
        self.bell.as_ref().map_or(Ok(()), Doorbell::ring)?;
        if self.next.is_some() {
            self.bell = self.next.take();
        }
        Ok(())
    }
}

/// Of a rank that follows another: it reads from the arena of netd, and sleeps on its doorbell of
/// the group.
#[derive(Debug)]
pub(super) struct Arenas {
    pub(super) map: Arc<GroupMap>,
    pub(super) rank: Rank,
}

impl Opener for Arenas {
    type Link = ArenaLink;

    const DESCRIPTORS: usize = ARENA_LINK_DESCRIPTORS;

    fn open(
        &mut self,
        init: &LinkInit,
        _worker: WorkerId,
        generation: Generation,
        fds: Vec<OwnedFd>,
    ) -> Result<ArenaLink, LinkError> {
        ArenaLink::open(init, generation, fds)
    }

    fn wake(&mut self) -> io::Result<()> {
        self.map.ring(self.rank)
    }
}

/// Where the executor's commands come from, and where its messages go.
type Channels<L> = (Receiver<ExecutorCommand<L>>, ControlSender<FromWorker>);

/// Starts the thread. Gives what the executor obeys, and where it answers.
pub(super) fn start<O: Opener>(
    init: &WorkerInit,
    ends: ControlEnds<ToWorker, FromWorker>,
    opener: O,
) -> Result<Channels<O::Link>, Exit> {
    let ControlEnds { receiver, sender, descriptors, .. } = ends;
    let (commands, inbox) = sync_channel(MAX_COMMANDS);
    let (worker, generation, seats) = (init.worker, init.generation, init.seats.clone());
    let control = Control { commands, descriptors, worker, generation, opener };
    let spawned = std::thread::Builder::new().name("control".to_owned()).spawn(move || {
        // It waits for messages, and takes no time of a compute thread.
        let _ = seats.take_all();
        control.listen(&receiver);
    });
    match spawned {
        Ok(_) => Ok((inbox, sender)),
        Err(failure) => Err(Exit {
            reason: ExitReason::Failed,
            message: format!("cannot start the control thread: {failure}"),
        }),
    }
}

struct Control<O: Opener> {
    commands: SyncSender<ExecutorCommand<O::Link>>,
    descriptors: DescriptorSocket,
    worker: WorkerId,
    generation: Generation,
    opener: O,
}

impl<O: Opener> Control<O> {
    fn listen(mut self, receiver: &ControlReceiver<ToWorker, FromWorker>) {
        loop {
            let command = match receiver.recv() {
                Ok(ToWorker::Link(init)) => match self.open(&init) {
                    Ok(link) => ExecutorCommand::Link(Box::new(link)),
                    Err(failure) => {
                        ExecutorCommand::End(ExitReason::ProtocolMismatch, with_causes(&failure))
                    }
                },
                Ok(ToWorker::Drain) => ExecutorCommand::Drain,
                Ok(ToWorker::Init(_)) => end(out_of_order()),
                Err(failure) => end(lost(&failure)),
            };
            let last = matches!(command, ExecutorCommand::End(..));
            if self.commands.send(command).is_err() || self.opener.wake().is_err() || last {
                return;
            }
        }
    }

    fn open(&mut self, init: &LinkInit) -> Result<O::Link, LinkError> {
        let fds = self
            .descriptors
            .recv(init.fds, O::DESCRIPTORS, DESCRIPTOR_TIMEOUT)
            .map_err(|e| LinkError::Doorbell(io::Error::other(e)))?;
        self.opener.open(init, self.worker, self.generation, fds)
    }
}

fn end<L>(end: Exit) -> ExecutorCommand<L> {
    ExecutorCommand::End(end.reason, end.message)
}
