//! What goes into the tree and what comes out of it: policy, events, actions.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use shared::block::Span;
use shared::config::{Device, RestartConfig, SpanChoice};
use shared::control::{FromNetd, FromPrepare, FromWorker, ToNetd};
use shared::exit::ExitReason;
use shared::ids::{Generation, GroupId, Rank, WorkerId};
use shared::model::ModelFacts;
use shared::survey::Capacity;

use super::child::{Beat, ChildId, ExitStatus, Lifecycle};
use crate::placement::{DeviceShare, Placement};
use crate::sizing::InstanceMemory;

/// What the tree needs to know of the configuration.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Policy {
    /// When children are restarted.
    pub restart: RestartConfig,
    /// How long netd may take to end.
    pub drain_timeout: Duration,
    /// Groups of devices and their shares of the span.
    pub shares: Vec<DeviceShare>,
    /// How earlier starts cut the model among them.
    pub cuts: Vec<Vec<u32>>,
    /// The blocks asked for.
    pub span: SpanChoice,
    /// The device that serves in the place of one that keeps failing.
    pub fallback: Option<Device>,
    /// What they may take.
    pub memory: InstanceMemory,
    /// Usual time between two readings of the board.
    pub pace: Duration,
}

/// A message from a child.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Up {
    Prepare(FromPrepare),
    Netd(FromNetd),
    Worker(FromWorker),
}

/// What happened. Events of a process that is not the present one of its child are stale and change
/// nothing.
#[derive(Clone, Debug)]
pub enum TreeEvent {
    /// Begin.
    Start,
    Said(ChildId, Generation, Up),
    /// A child's process was reaped, after everything it had said.
    Ended(ChildId, Generation, ExitStatus),
    /// A child closed its control channel.
    Closed(ChildId, Generation),
    /// A child does not read, or floods its channel; what it was, for the log.
    Unruly(ChildId, Generation, &'static str),
    /// A reading of the board.
    Beat(ChildId, Generation, Beat),
    /// The answer to [`Action::AskRoom`]: why there is no room, if there is none.
    Room(Span, Option<String>),
    /// The answer to [`Action::Examine`]: what is wrong with the device, if anything is.
    Examined(Device, Option<String>),
    /// No session is open.
    Idle,
    /// Another executable handed the run over to this one: its processes are to be replaced. netd waits
    /// for so long until no session is open.
    HandedOver(Duration),
    /// The operator asks for something that [`Tree::refusal`](super::Tree::refusal) has nothing
    /// against.
    Ordered(Order),
    /// SIGTERM or SIGINT.
    Stop,
    /// Time passed.
    Tick,
}

/// What the operator may ask of a running instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// End the sessions within this time and the workers after them, and stay connected.
    Pause(Duration),
    /// Start the workers again.
    Resume,
    /// Replace the process of a worker, with its group.
    Restart(WorkerId),
}

/// What is to be told to a child; the driver adds names and descriptors.
#[derive(Clone, Debug, PartialEq)]
pub enum Down {
    /// First message, with the settings of the role.
    Init(Init),
    /// To prepare: make this span ready.
    Span(Span),
    /// To a worker: serve the new rings shared with this netd; to a rank other than 0: read from its
    /// arena.
    Link { netd: Generation },
    /// To netd: a worker acknowledged its rings, and the other ranks of its group their arena.
    WorkerUp {
        /// The part of the plan of the worker, or of its group.
        placement: Placement,
        generation: Generation,
        capacity: Capacity,
    },
    /// To netd, as it is: what comes with descriptors is composed by the driver.
    Netd(ToNetd),
    /// Finish.
    Drain,
}

/// The variable part of a role's first message.
#[derive(Clone, Debug, PartialEq)]
pub enum Init {
    /// For prepare: the devices in their groups.
    Prepare(Vec<Vec<Device>>),
    /// For netd.
    Netd {
        /// Where the generation before listened.
        previous_addrs: Vec<String>,
        /// Span of workers that are loaded or loading.
        served: Option<Span>,
        /// The same with the blocks of devices that are tried again.
        whole: Option<Span>,
        /// Spans announced earlier in this run that are not served any more.
        retired: Vec<Span>,
        /// Whether the operator has paused the instance.
        paused: bool,
    },
    /// For a worker.
    Worker {
        /// The part of the plan of its group.
        placement: Placement,
        /// Its rank in the group.
        rank: Rank,
        /// The blocks of the instance that its own are a part of: their manifest names its files.
        whole: Span,
        facts: ModelFacts,
        /// Whether it is to do without the warpgroups of its device.
        by_warps: bool,
    },
}

/// What is to be done, in order.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// Start a process. If that fails, `Ended` with [`ExitStatus::NotStarted`] follows.
    Spawn(ChildId, Generation),
    Tell(ChildId, Down),
    /// SIGKILL, for this reason.
    Kill(ChildId, Generation, String),
    /// Rings of this worker are of no more use: one of their ends is dead.
    DropRings {
        worker: WorkerId,
        generation: Generation,
        netd: Generation,
    },
    /// Every wait in this group of several workers is to fail: one of them is dead, or about to be.
    AbortGroup(GroupId, Generation),
    /// All workers of this group of several are reaped: their common segment is of no more use.
    DropGroup(GroupId, Generation),
    /// This worker has ended for good: its kv segment is of no more use.
    DropWorker(WorkerId),
    /// See whether workers of these blocks fit into memory beside the present ones, and say so with
    /// [`TreeEvent::Room`].
    AskRoom(Span),
    /// Test this device, and say what is wrong with it with [`TreeEvent::Examined`].
    Examine(Device),
    /// A child changed its state: show and log it.
    Show {
        child: ChildId,
        generation: Generation,
        state: Lifecycle,
        /// Why, if there is something to say.
        why: String,
    },
    /// Log what keeps the server from something better; it goes on.
    Note(String),
    /// Log what the operator must act on.
    Complain(String),
    /// Clients can come.
    Online {
        span: Span,
        /// netd's PeerID.
        peer_id: String,
        addrs: Vec<String>,
    },
    /// All processes are of this executable.
    Upgraded,
    /// The pause has begun: no worker is left, and the devices are free.
    Paused,
    /// No process is left; return this.
    Finish(ExitReason),
}

impl Action {
    /// Tell netd what needs no descriptors.
    pub(super) fn tell_netd(message: ToNetd) -> Action {
        Action::Tell(ChildId::Netd, Down::Netd(message))
    }
}
