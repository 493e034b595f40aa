//! Messages between the supervisor and its children, one pair of types per role. They travel over
//! `ipc-channel`; the descriptors that belong to a message travel over the child's descriptor
//! socket under the tag that the message names, and are sent before it.
//!
//! ```text
//! prepare:  Init -> Surveyed -> Span -> Progress* -> Prepared -> exit 0
//!           for what is left of a group after a loss: Init (of this group) -> Surveyed -> Drain -> exit 0
//! netd:     Init -> Listening -> Model -> ProposedSpan -> (WorkerUp | WorkerDown | Shrink | a move)* -> Drain -> exit 0
//! a move:   Move -> WorkerUp of the new blocks -> Moved -> Vacated; without memory for both Move -> MakeRoom -> Vacated -> WorkerUp of the
//!           new blocks -> Online; or MoveFailed, or Stays
//! a pause:  Pause -> Vacated -> WorkerDown of all workers -> Resume -> WorkerUp -> Online
//! worker:   Init -> Ready -> (Link -> Linked)* -> Drain -> exit 0
//! ```
//!
//! The ranks of a group (tensor parallelism) are workers that start, link and end as one. netd knows
//! the group by the id of rank 0, which alone has rings. The other ranks get the arena of each netd
//! before rank 0 gets its rings (`Link`), and are told to `Drain` after rank 0 has ended.
//!
//! `Link` and `WorkerUp` are the two ends of one pair of rings. A new netd or a new worker gets new
//! rings; netd is told of a worker's end (`WorkerDown`) only after the worker was reaped, since
//! only then nothing writes its pages and slots. `WorkerDown` without a restart may name a worker,
//! or a generation, that netd was never told was up: it is not coming. The supervisor, which knows
//! every worker and its blocks, says what is left of the span then (`Shrink`); netd keeps its
//! process, its connections and the sessions on those blocks. A netd that starts later is told so
//! from the beginning (`NetdInit::served`). When nothing is left it gets `Drain`.
//! A netd that finds nonsense in a worker's rings says so (`BrokenRings`), and the supervisor kills
//! the worker. netd gets nothing between `Init` and its `Listening`, and nothing about workers
//! before `Model`.

use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::block::Span;
use crate::config::{Device, LogConfig, NetdConfig, PrepareConfig, WorkerConfig};
use crate::exit::ExitReason;
use crate::ids::{Generation, WorkerId};
use crate::model::{ModelFacts, RankShare};
use crate::network::NetworkRate;
use crate::processor::Seats;
pub use crate::role::Role;
use crate::sandbox::Confinement;
use crate::survey::{Capacity, Survey};
use crate::warpgroups::Warpgroups;

/// Tag of a bundle of descriptors on the descriptor socket; counts up from 1 for each child.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FdTag(pub u64);

/// What every child is told first, as JSON in the first packet of its descriptor socket.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Birth {
    /// Build of the parent; a child of another build refuses to run.
    pub build: String,
    /// Its role, which must be the one of the subcommand.
    pub role: Role,
    /// Name of the one-shot `ipc-channel` server that waits for the child.
    pub server: String,
    /// Process id of the parent, to notice that it died in between.
    pub parent_pid: u32,
    /// How often this child was started.
    pub generation: Generation,
    /// Which worker, for the log.
    pub worker: Option<WorkerId>,
    pub log: LogConfig,
    /// What it may touch.
    pub confinement: Confinement,
}

/// Where a child reports to on the board, and how often. The descriptor of the board is the last one
/// of its first message.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct BoardSeat {
    /// Index of the child's slot.
    pub slot: u32,
    /// Longest time between two heartbeats of the thread that does the child's work.
    pub heartbeat: Duration,
}

/// Supervisor to prepare.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[expect(clippy::large_enum_variant, reason = "one is sent in a life")]
pub enum ToPrepare {
    /// Look at the model and tell its facts. Descriptors under `fds`: the board.
    Init {
        /// What to read.
        config: PrepareConfig,
        /// Where to report progress.
        board: BoardSeat,
        /// The devices that will serve, in their groups and in the order of ranks, for what they hold
        /// and what is kept of them.
        groups: Vec<Vec<Device>>,
        /// Settings of their workers.
        worker: WorkerConfig,
        /// Tag of the descriptors.
        fds: FdTag,
    },
    /// Make these blocks ready and write their manifest to `manifest`.
    Span {
        span: Span,
        /// Path of the manifest to write.
        manifest: PathBuf,
        /// Blocks of each group of devices, to be kept for later starts.
        cut: Vec<u32>,
    },
    /// Stop.
    Drain,
}

/// The CUDA devices that the driver names, as JSON on standard output of the process that asked it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CudaDevices {
    /// Version of CUDA that the driver supports: 1000 × major + 10 × minor.
    pub driver_version: u32,
    /// One for each ordinal from 0 on, or why it cannot be used.
    pub devices: Vec<Result<CudaDevice, String>>,
}

/// A CUDA device, as the driver describes it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CudaDevice {
    /// Name and compute capability.
    pub name: String,
    /// What tells it from all other devices.
    pub uuid: [u8; 16],
    /// Whether it has warpgroups.
    pub has_warpgroups: bool,
}

/// What prepare does with a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum PrepareStage {
    /// Fetches it from the Hub.
    Downloading,
    /// Checks it, and converts what is not stored as it is served.
    Converting,
}

/// How far the preparation of a span is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Progress {
    /// What is done with the present block.
    pub stage: PrepareStage,
    /// Number of the present block within the span, from 1.
    pub block: u32,
    /// Blocks of the span.
    pub blocks: u32,
    /// Bytes that this stage has finished, over all blocks so far.
    pub bytes_done: u64,
    /// Bytes of this stage over all blocks, estimated from the blocks seen so far; 0 while unknown.
    pub bytes_total: u64,
}

/// Prepare to supervisor.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum FromPrepare {
    /// The model is readable: what is known of it and of the devices.
    Surveyed(Box<Survey>),
    /// How far the blocks are.
    Progress(Progress),
    /// The manifest is written and every file it names is complete.
    Prepared,
    /// The process is about to exit for this reason.
    Failed {
        /// Why, for the restart decision.
        reason: ExitReason,
        /// One sentence for the operator.
        message: String,
    },
}

/// Supervisor to worker.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum ToWorker {
    /// Load the span. Descriptors under `fds`: the kv segment, the board. Those of a group come before
    /// them, those of the weights after them.
    Init(Box<WorkerInit>),
    /// Serve jobs from these rings; whatever older rings held is dropped. Descriptors under `fds`:
    /// arena, rings, doorbell of the submission ring, doorbell of the completion ring. To a rank
    /// other than 0: what rank 0 publishes of this netd reads from this arena, the only descriptor;
    /// rank 0 gets its rings when all other ranks have acknowledged.
    Link(LinkInit),
    /// Finish what runs and exit.
    Drain,
}

/// First message to a worker.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct WorkerInit {
    /// Where to report progress.
    pub board: BoardSeat,
    /// This worker's generation.
    pub generation: Generation,
    /// Which worker this is.
    pub worker: WorkerId,
    /// The device it owns.
    pub device: Device,
    /// Where its compute threads run.
    pub seats: Seats,
    /// Its blocks, for life.
    pub span: Span,
    pub model: ModelFacts,
    /// The files of its weights.
    pub weights: WeightsInit,
    /// Pages per block in the kv segment.
    pub kv_pages: u32,
    /// Whether the pages are in the kv segment too, and outlive the worker. Always, where the
    /// segment is all there is.
    pub kv_survives: bool,
    /// Bytes that a job for gradients may keep of its blocks ([`ModelFacts::gradient_bytes`]).
    pub gradient_bytes: u64,
    pub config: WorkerConfig,
    /// Whether to measure throughput before reporting ready.
    pub measure: bool,
    /// What is known of the warpgroups of a CUDA device. The emulator finds it out by itself.
    pub warpgroups: Warpgroups,
    /// The group of several workers of which it is a rank.
    pub group: Option<GroupInit>,
    /// Tag of the descriptors.
    pub fds: FdTag,
}

/// The files of a worker's weights, open: the worker opens no path.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct WeightsInit {
    /// Where the manifest that prepare wrote was opened, for messages.
    pub manifest: PathBuf,
    /// Indexes in the manifest of the files that hold the worker's blocks.
    pub files: Vec<u32>,
    /// Tag of the descriptors, which are sent after those of the message: the manifest, then the files
    /// in this order ([`recv_all`](crate::bootstrap::DescriptorSocket::recv_all)).
    pub fds: FdTag,
}

/// What a worker needs to join a group of several.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct GroupInit {
    /// The devices, in the order of ranks.
    pub devices: Vec<Device>,
    /// What each rank holds of a block, in the order of ranks.
    pub shares: Vec<RankShare>,
    /// Values of an exchange buffer.
    pub exchange_values: usize,
    /// Bytes of the plan log.
    pub log_bytes: usize,
    /// Whether every thread of every worker has a core of its own, so that a rank may spin while it
    /// waits for another.
    pub may_spin: bool,
    /// Tag of its descriptors, which are sent before those of the message: the segment of this
    /// generation, the doorbells of all ranks in their order, and where
    /// [`has_sockets`](Self::has_sockets) the ends of the sockets to all other ranks in their order
    /// ([`PeerSocket`](crate::bootstrap::PeerSocket)).
    pub fds: FdTag,
}

impl GroupInit {
    /// Whether the ranks have sockets to each other: only where their devices have memory of their
    /// own, of which each tells the others.
    pub fn has_sockets(&self) -> bool {
        self.devices.iter().any(|device| !device.is_processor())
    }
}

/// One end of a pair of rings.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LinkInit {
    /// Generation of netd at the other end.
    pub netd_generation: Generation,
    /// Generation of the worker at this end.
    pub worker_generation: Generation,
    /// Length of the arena in bytes.
    pub arena_bytes: u64,
    /// Tag of the descriptors.
    pub fds: FdTag,
}

/// Worker to supervisor.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum FromWorker {
    /// Weights are loaded; jobs can come.
    Ready(Capacity),
    /// Serves the rings of this netd generation and has abandoned all older ones.
    Linked { netd_generation: Generation },
    /// The process is about to exit for this reason.
    Failed {
        /// Why, for the restart decision.
        reason: ExitReason,
        /// One sentence for the operator.
        message: String,
    },
}

/// What a server announces of its speed.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Rating {
    /// What the slowest worker measured.
    pub capacity: Capacity,
    /// The network each way, and how that is known.
    pub network: NetworkRate,
    /// Tokens per second of hidden states that it carries.
    pub network_rps: f64,
    /// Tokens per second through the blocks and the network.
    pub throughput: f64,
    /// Blocks served.
    pub blocks: u32,
}

/// Supervisor to netd.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum ToNetd {
    /// Start listening. Descriptors under `fds`: the arena, the board, the session records.
    Init(Box<NetdInit>),
    /// The model that is served.
    Model {
        facts: ModelFacts,
        /// Where the whole model was asked for and does not fit into memory: blocks that do.
        fits: Option<u32>,
        /// What workers measured at an earlier start: stands for what they have not measured yet.
        kept: Option<Capacity>,
    },
    /// A worker is linked. Descriptors under `fds`: rings, doorbell of the submission ring, doorbell
    /// of the completion ring.
    WorkerUp(WorkerUp),
    /// A worker is dead and reaped: nothing of it touches pages or slots any more.
    WorkerDown {
        worker: WorkerId,
        /// The generation that died.
        generation: Generation,
        /// Whose fault it was.
        cause: DeathCause,
        /// Whether another generation will come.
        restarting: bool,
    },
    /// A worker was killed and does not die: what its jobs name stays out of use for ever.
    WorkerUnkillable { worker: WorkerId, generation: Generation },
    /// Workers are gone for good: serve and announce these blocks only.
    Shrink(Span),
    /// A worker that was gone is up again: serve and announce these blocks, which hold the present
    /// ones.
    Grow(Span),
    /// There is no memory for the new workers beside the present ones: announce the new place as
    /// joining, end the sessions, say `Vacated`. The new workers are told with `WorkerUp` then.
    MakeRoom(Span),
    /// The move that netd asked for is off: the blocks before it are served again.
    MoveFailed {
        /// Where it would have gone.
        to: Span,
        /// Why, for the log.
        why: String,
    },
    /// The operator wants the devices: announce OFFLINE, refuse new sessions, end those that are
    /// open after `patience`, say `Vacated`. The connections stay.
    Pause {
        /// How long open sessions may go on.
        patience: Duration,
    },
    /// The pause is over: announce these blocks as joining. Their workers are told with `WorkerUp`.
    Resume(Span),
    /// Another generation takes this one's place at once: finish running steps, keep sessions that can be
    /// resumed, tell the clients of others, exit. Nothing is announced to the swarm.
    Replace,
    /// Announce OFFLINE, finish the sessions' running steps, exit.
    Drain,
}

/// First message to netd.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct NetdInit {
    /// Where to report progress.
    pub board: BoardSeat,
    /// netd's generation.
    pub generation: Generation,
    /// Settings; `identity_path` is always filled in.
    pub config: NetdConfig,
    /// Listen addresses to take first: those of the generation before, so that the port stays.
    pub previous_addrs: Vec<String>,
    /// Length of the arena in bytes.
    pub arena_bytes: u64,
    /// Span served by an earlier generation; kept, since the weights are loaded.
    pub served: Option<Span>,
    /// The span with the blocks of devices that were put aside and may come back.
    pub whole: Option<Span>,
    /// Spans that earlier generations announced and that are not served any more: their records
    /// are taken back.
    pub retired: Vec<Span>,
    /// Whether the operator has paused the instance: nothing is announced before `Resume`.
    pub paused: bool,
    /// Whether a listening socket for metrics comes as the last descriptor.
    pub has_metrics: bool,
    /// Tag of the descriptors: arena, board, session records, and the socket.
    pub fds: FdTag,
}

/// A linked worker, as netd sees it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct WorkerUp {
    pub worker: WorkerId,
    pub span: Span,
    /// Pages per block in its kv segment.
    pub kv_pages: u32,
    /// Whether the next generation finds the pages of this one.
    pub kv_survives: bool,
    /// Which pages it has: the same number from two generations means the same pages.
    pub kv_version: u64,
    pub capacity: Capacity,
    pub link: LinkInit,
}

/// Whose fault a death was.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum DeathCause {
    /// A signal from outside, the OOM killer, or the supervisor's own kill: no job is to blame.
    Outside,
    /// The worker crashed by itself (abort, segmentation fault, error exit): a job in flight may be
    /// to blame.
    SelfInflicted,
}

/// Netd to supervisor.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum FromNetd {
    /// Listens and has joined the swarm.
    Listening {
        /// PeerID in base58.
        peer_id: String,
        /// Full addresses with `/p2p/PEERID`.
        addrs: Vec<String>,
    },
    /// The blocks to serve, chosen by what the swarm lacks.
    ProposedSpan(Span),
    /// Announced ONLINE: clients can come. Again after every `Shrink`.
    Online,
    /// The swarm needs this server at other blocks: make them ready and start workers for them
    /// beside the present ones. They are told with `WorkerUp` like all others; until `Moved`
    /// the present blocks are served.
    Move(Span),
    /// The new blocks are announced; the workers of the old ones are kept for their sessions.
    Moved(Span),
    /// The sessions of the old blocks are over: their workers can go.
    Vacated,
    /// What would be announced, in a dry run; instead of `Online`.
    Rated(Rating),
    /// The move is not wanted any more.
    Stays,
    /// What a worker wrote into its rings is nonsense, or they cannot be used any more: it has to
    /// be killed, so that its jobs go to the next generation. The worker is to blame
    /// (`DeathCause::SelfInflicted`), and perhaps a job.
    BrokenRings {
        worker: WorkerId,
        /// The generation whose rings they are.
        generation: Generation,
        message: String,
    },
    /// The process is about to exit for this reason.
    Failed {
        /// Why, for the restart decision.
        reason: ExitReason,
        /// One sentence for the operator.
        message: String,
    },
}
