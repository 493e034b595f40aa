//! One live child process as the driver holds it: the process, its control channel, its descriptor
//! socket, its seat.

use std::io;
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use shared::bootstrap::{Attach, DescriptorSocket, build_id};
use shared::config::LogConfig;
use shared::control::{Birth, BoardSeat, FdTag, Role};
use shared::error_chain::with_causes;
use shared::ids::{Generation, WorkerId};
use shared::sandbox::Confinement;
use shared::shm::board::{Board, BoardError, Occupant};

use tracing::warn;

use crate::channel::{Channel, Message, Wake};
use crate::handover::HandedChild;
use crate::inherited_fds::Handed;
use crate::spawn::{Process, TITLE};
use crate::tree::{ChildId, ExitStatus};

/// Why a child could not be started.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The system refused a process, a thread or a descriptor.
    #[error("cannot start {child}")]
    System {
        child: ChildId,
        #[source]
        source: io::Error,
    },
    /// It has no place on the board.
    #[error(transparent)]
    Board(#[from] BoardError),
}

/// A process that was spawned and whose end was not reported to the tree yet.
#[derive(Debug)]
pub struct ChildProcess {
    pub id: ChildId,
    pub generation: Generation,
    /// Its slot on the board.
    pub slot: u32,
    pub process: Process,
    pub channel: Channel,
    /// How it ended, and when it was reaped; from then on its process id may name another process.
    pub end: Option<(ExitStatus, Instant)>,
    /// Whether its control channel is closed.
    pub closed: bool,
    /// Whether it holds its messages back.
    pub is_held: bool,
    /// What kept it from beginning, on our side; takes the place of how it ended.
    pub fault: Option<ExitStatus>,
    descriptors: DescriptorSocket,
    last_tag: u64,
}

/// What became of a bundle of descriptors.
enum Bundled {
    /// It was sent under this tag.
    Under(FdTag),
    /// The child has gone.
    Gone,
    /// The child does not keep up.
    Behind,
}

impl ChildProcess {
    /// Starts a process and gives it its birth and its seat.
    ///
    /// # Errors
    /// [`StartError`]; nothing is left behind.
    pub fn start(
        id: ChildId,
        generation: Generation,
        slot: u32,
        log: &LogConfig,
        confinement: Confinement,
        board: &Board,
        wake: &Wake,
    ) -> Result<ChildProcess, StartError> {
        let system = |source| StartError::System { child: id, source };
        let (role, worker) = (role_of(id), worker_of(id));
        board.assign(slot, &Occupant { role, generation, worker })?;
        let channel = Channel::open(role, wake).map_err(system)?;
        let (descriptors, theirs) = DescriptorSocket::pair().map_err(system)?;
        let birth = Birth {
            build: build_id(),
            role,
            server: channel.server().to_owned(),
            parent_pid: std::process::id(),
            generation,
            worker,
            log: log.clone(),
            confinement,
        };
        let spawned = descriptors
            .send_birth(&birth)
            .and_then(|()| Process::spawn(role, &title_of(id, generation), &theirs));
        let process = spawned.map_err(|source| {
            channel.abandon();
            system(source)
        })?;
        board.set_pid(slot, process.pid())?;
        Ok(ChildProcess {
            id,
            generation,
            slot,
            process,
            channel,
            end: None,
            closed: false,
            is_held: false,
            fault: None,
            descriptors,
            last_tag: 0,
        })
    }

    /// Duplicates what the next executable needs of it.
    ///
    /// # Errors
    /// When the process is out of descriptors.
    pub fn hand_over(&self, handed: &mut Handed) -> io::Result<HandedChild> {
        let (pid, pidfd) = self.process.try_clone()?;
        Ok(HandedChild {
            id: self.id,
            generation: self.generation,
            slot: self.slot,
            pid,
            pidfd: handed.put(pidfd),
            descriptors: handed.put(self.descriptors.try_clone()?.into()),
            last_tag: self.last_tag,
        })
    }

    /// Goes on with a child of the executable before: tells it where its next channel is.
    ///
    /// # Errors
    /// [`StartError::System`].
    pub fn adopt(handed: HandedChild, wake: &Wake) -> Result<ChildProcess, StartError> {
        let HandedChild { id, generation, slot, pid, mut pidfd, mut descriptors, last_tag } =
            handed;
        let system = |source| StartError::System { child: id, source };
        let process = Process::adopt(pid, pidfd.take().map_err(system)?);
        let descriptors = DescriptorSocket::from(descriptors.take().map_err(system)?);
        let channel = Channel::open(role_of(id), wake).map_err(system)?;
        if let Err(error) = descriptors.send_attach(&Attach { server: channel.server().to_owned() })
        {
            // It has ended, or is stuck: either shows soon.
            warn!(child = %id, %error, "cannot tell a child where its next channel is");
        }
        Ok(ChildProcess {
            id,
            generation,
            slot,
            process,
            channel,
            end: None,
            closed: false,
            is_held: false,
            fault: None,
            descriptors,
            last_tag,
        })
    }

    /// Where the child reports, and how often.
    pub fn seat(&self, heartbeat: Duration) -> BoardSeat {
        BoardSeat { slot: self.slot, heartbeat }
    }

    /// Sends `fds`, then the message made with their tag. False means that the child does not keep
    /// up; a child that has gone is no fault here, its end is on the way.
    pub fn deliver(
        &mut self,
        fds: &[BorrowedFd<'_>],
        message: impl FnOnce(FdTag) -> Message,
    ) -> bool {
        self.deliver_all([fds], |[tag]| message(tag))
    }

    /// The same for a message with several bundles, which are sent in this order.
    pub fn deliver_all<const N: usize>(
        &mut self,
        bundles: [&[BorrowedFd<'_>]; N],
        message: impl FnOnce([FdTag; N]) -> Message,
    ) -> bool {
        let mut tags = [FdTag(0); N];
        for (tag, fds) in tags.iter_mut().zip(bundles) {
            *tag = match self.bundle(fds) {
                Bundled::Under(tag) => tag,
                Bundled::Gone => return true,
                Bundled::Behind => return false,
            };
        }
        self.channel.send(message(tags))
    }

    fn bundle(&mut self, fds: &[BorrowedFd<'_>]) -> Bundled {
        use shared::bootstrap::DescriptorError;
        if self.end.is_some() {
            return Bundled::Gone;
        }
        self.last_tag += 1;
        let tag = FdTag(self.last_tag);
        match self.descriptors.send_all(tag, fds) {
            Ok(()) => Bundled::Under(tag),
            Err(DescriptorError::Closed) => Bundled::Gone,
            Err(error) => {
                let error = with_causes(&error);
                warn!(child = %self.id, count = fds.len(), error, "cannot pass descriptors");
                Bundled::Behind
            }
        }
    }

    /// Sends a message that has no descriptors.
    pub fn tell(&self, message: Message) -> bool {
        self.end.is_some() || self.channel.send(message)
    }
}

/// The child's slot on the board, where groups have at most `ranks` ranks.
pub fn slot_of(id: ChildId, ranks: usize) -> u32 {
    match id {
        ChildId::Prepare => 0,
        ChildId::Netd => 1,
        ChildId::Worker(WorkerId { group, rank, .. }) => {
            let ranks = u32::try_from(ranks.max(1)).unwrap_or(u32::MAX);
            let first = u32::from(group.0).saturating_mul(ranks).saturating_add(2);
            first.saturating_add(rank.0.into())
        }
    }
}

fn role_of(id: ChildId) -> Role {
    match id {
        ChildId::Prepare => Role::Prepare,
        ChildId::Netd => Role::Netd,
        ChildId::Worker(_) => Role::Worker,
    }
}

fn worker_of(id: ChildId) -> Option<WorkerId> {
    match id {
        ChildId::Worker(worker) => Some(worker),
        ChildId::Prepare | ChildId::Netd => None,
    }
}

fn title_of(id: ChildId, generation: Generation) -> String {
    format!("{TITLE}{id} gen {generation}")
}
