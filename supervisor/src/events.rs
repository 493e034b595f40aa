//! The poll loop: turns what happens into [`TreeEvent`]s for the tree and carries out its [`Action`]s.
//! One thread; it never waits on one child. It sleeps in `poll` on
//!
//! - the signalfd of SIGINT, SIGTERM and SIGHUP, which are blocked for the whole process;
//! - an eventfd that the readers of control channels ring, and threads that open files of weights;
//! - the socket that `sepal status` and orders come over;
//! - one pidfd per process, readable once the process has ended;
//!
//! until the tree's next deadline or the next reading of the board. The end of a process is
//! reported to the tree after everything the process had said: it is reaped at once, and reported
//! when its channel has run dry.

mod clients;
mod compose;
mod confine;
mod display;
mod examine;
mod liveness;
mod operator;
mod reload;
mod service;
mod upgrade;
mod weights;

use std::collections::VecDeque;
use std::ffi::OsString;
use std::io;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use liveness::Liveness;
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use shared::config::{Device, ServeConfig};
use shared::control::FromNetd;
use shared::error_chain::with_causes;
use shared::exit::ExitReason;
use shared::ids::{Generation, GroupId, Rank, WorkerId};
use shared::model::ModelFacts;
use shared::shm::pair::RingIdentity;
use shared::survey::DeviceMemory;
use tracing::{error, warn};

use crate::channel::{Heard, Wake};
use crate::child_process::{ChildProcess, slot_of};
use crate::devices::Examination;
use crate::devices::subprocess::Subprocess;
use crate::feed::Feed;
use crate::instance::Instance;
use crate::listener::{self, ListeningSocket};
use crate::placement::DeviceShare;
use crate::restarts::Deaths;
use crate::segments::{MakeError, Segments};
use crate::service::Service;
use crate::sizing::{self, InstanceMemory};
use crate::status::StatusSocket;
use crate::terminal::Screen;
use crate::tree::{Action, Beat, ChildId, ExitStatus, Policy, Tree, TreeEvent, Up};
use crate::web::Web;
use crate::weights::Weights;

/// Messages of one child that are taken in one round of the loop.
const MESSAGES_PER_ROUND: usize = 64;

/// How long the channel of a reaped process may take to run dry; its reader has only to read what
/// the kernel holds.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// Time between two looks at the step that makes the run ready, and at tests of devices.
const PROBE_PACE: Duration = Duration::from_millis(50);

/// Runs the tree of `config` to its end; tells `feed` what happens.
///
/// # Errors
/// When the loop itself cannot go on: descriptors are used up or the board cannot be made. Children
/// die with the process.
pub fn run(
    config: ServeConfig,
    instance: &Instance,
    feed: &mut Option<Feed>,
    reread: Reread<'_>,
) -> Result<RunOutcome, LoopError> {
    TreeDriver::new(config, instance, feed, reread)?.run()
}

pub use reload::{Reread, changed};
pub use upgrade::resume;
use upgrade::{Upgrade, UpgradeNotes};

/// How a run ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RunOutcome {
    /// Why, which becomes the exit code.
    pub reason: ExitReason,
    /// What the operator must do, in one sentence, unless the run ended as it was asked to.
    pub complaint: Option<String>,
    /// The executable that this process is to become now.
    pub successor: Option<PathBuf>,
}

/// Why the poll loop could not go on.
#[derive(Debug, thiserror::Error)]
pub enum LoopError {
    /// The system refused something that the loop cannot do without.
    #[error("cannot {0}")]
    System(&'static str, #[source] io::Error),
    /// The board could not be made.
    #[error(transparent)]
    Board(#[from] MakeError),
    /// The kernel cannot confine children as it was asked to, or others can write to the cache folder.
    #[error("{0}")]
    Unsafe(String),
}

impl LoopError {
    /// The reason with which the process should exit.
    pub fn exit_reason(&self) -> ExitReason {
        match self {
            LoopError::System(..) => ExitReason::Failed,
            LoopError::Board(_) => ExitReason::OutOfMemory,
            LoopError::Unsafe(_) => ExitReason::BadConfig,
        }
    }
}

/// What a run is made of, made now or handed over by another executable.
struct RunParts {
    tree: Tree,
    pending: VecDeque<TreeEvent>,
    processes: Vec<ChildProcess>,
    segments: Segments,
    weights: Weights,
    status: StatusSocket,
    metrics: ListeningSocket,
    page: ListeningSocket,
    leaving_pages: Vec<i32>,
    wake: Wake,
    arguments: Vec<OsString>,
}

struct TreeDriver<'a> {
    config: ServeConfig,
    instance: &'a Instance,
    tree: Tree,
    pending: VecDeque<TreeEvent>,
    processes: Vec<ChildProcess>,
    segments: Segments,
    weights: Weights,
    /// Workers that wait for files of weights.
    waiting: Vec<weights::WaitingWorker>,
    facts: Option<ModelFacts>,
    /// The blocks that clients are told of.
    span: Option<shared::block::Span>,
    /// What a person at a terminal sees in place of the log.
    screen: Option<Screen>,
    /// The program that started this run, if it wants to hear of it.
    feed: &'a mut Option<Feed>,
    /// What the operator must do, the latest sentence of the tree.
    complaint: Option<String>,
    wake: Wake,
    status: StatusSocket,
    signals: SignalFd,
    reread: Reread<'a>,
    /// The settings as they were read at the start, and those taken over since.
    settings: Option<ServeConfig>,
    liveness: Liveness,
    next_reading: Instant,
    /// A service manager that wants to hear of the run.
    service: Option<Service>,
    /// The step before the run is called ready, or why there is none.
    probe: Option<Result<Subprocess, String>>,
    /// Tests of devices that failed.
    examinations: Vec<(Device, Examination)>,
    /// An upgrade before the executable changes.
    upgrade: Option<Upgrade>,
    notes: UpgradeNotes,
    /// Where this executable was found.
    executable: Option<PathBuf>,
    /// Arguments of this process, `sepal serve ...`.
    arguments: Vec<OsString>,
    /// Where clients reach this server.
    addrs: Vec<String>,
    /// The socket that netd answers requests for metrics on.
    metrics: ListeningSocket,
    /// The page of the swarm.
    web: Web,
    deaths: Deaths,
    finished: Option<ExitReason>,
}

/// What `poll` said.
struct Ready {
    signal: bool,
    wake: bool,
    status: bool,
    /// Per child in `processes`.
    ended: Vec<bool>,
}

impl<'a> TreeDriver<'a> {
    fn new(
        config: ServeConfig,
        instance: &'a Instance,
        feed: &'a mut Option<Feed>,
        reread: Reread<'a>,
    ) -> Result<TreeDriver<'a>, LoopError> {
        let policy = Policy {
            restart: config.restart,
            drain_timeout: config.drain_timeout,
            shares: DeviceShare::groups(&config.devices, config.world_size),
            cuts: Vec::new(),
            span: config.netd.span,
            fallback: config.fallback,
            memory: InstanceMemory::of(&config),
            pace: Liveness::of(config.restart.hang_timeout).pace,
        };
        let started = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        let parts = RunParts {
            tree: Tree::new(policy),
            pending: VecDeque::from([TreeEvent::Start]),
            processes: Vec::new(),
            segments: Segments::new(instance, started.map_or(0, |since| since.as_secs()))?,
            weights: Weights::default(),
            status: StatusSocket::bind(&instance.status_socket())
                .map_err(|e| LoopError::System("create the status socket", e))?,
            metrics: ListeningSocket::new(listener::METRICS, config.metrics),
            page: ListeningSocket::new(listener::PAGE, config.web),
            leaving_pages: Vec::new(),
            wake: Wake::new().map_err(|e| LoopError::System("make an eventfd", e))?,
            arguments: std::env::args_os().collect(),
        };
        TreeDriver::of_parts(config, instance, feed, reread, parts)
    }

    /// A driver of what was made now, or handed over by another executable.
    fn of_parts(
        config: ServeConfig,
        instance: &'a Instance,
        feed: &'a mut Option<Feed>,
        reread: Reread<'a>,
        parts: RunParts,
    ) -> Result<TreeDriver<'a>, LoopError> {
        let liveness = Liveness::of(config.restart.hang_timeout);
        // From here on a signal ends the run in order.
        let signals = take_signals().map_err(|e| LoopError::System("take signals", e.into()))?;
        let RunParts { tree, mut pending, processes, segments, weights, status, .. } = parts;
        let RunParts { metrics, page, leaving_pages, wake, arguments, .. } = parts;
        if let Some(parent) = config.end_with
            && !ends_with(parent)?
        {
            warn!(parent, "parent process is gone, stopping");
            pending = VecDeque::from([TreeEvent::Stop]);
        }
        let now = Instant::now();
        Ok(TreeDriver {
            tree,
            pending,
            processes,
            segments,
            weights,
            waiting: Vec::new(),
            facts: None,
            span: None,
            screen: Self::screen_for(config.log.format, &config.prepare.model),
            feed,
            complaint: None,
            status,
            wake,
            signals,
            settings: reread(&arguments).ok(),
            reread,
            liveness,
            next_reading: now + liveness.pace,
            service: Service::of_environment(now),
            probe: None,
            examinations: Vec::new(),
            upgrade: None,
            notes: UpgradeNotes::default(),
            executable: std::env::current_exe().ok(),
            arguments,
            addrs: Vec::new(),
            metrics,
            web: Web::new(page, leaving_pages, now),
            deaths: Deaths::default(),
            finished: None,
            config,
            instance,
        })
    }

    fn run(mut self) -> Result<RunOutcome, LoopError> {
        self.prepare_confinement().map_err(LoopError::Unsafe)?;
        loop {
            self.work_off();
            if let Some(reason) = self.finished {
                let complaint = self.complaint.take().filter(|_| reason != ExitReason::Clean);
                return Ok(RunOutcome { reason, complaint, successor: self.successor() });
            }
            self.follow_web();
            let ready = self.sleep()?;
            if ready.wake {
                self.wake.clear();
                self.hear();
            }
            if ready.status {
                self.serve_operator();
            }
            while ready.signal
                && let Ok(Some(signal)) = self.signals.read_signal()
            {
                match i32::try_from(signal.ssi_signo) {
                    Ok(nix::libc::SIGHUP) => self.hung_up(),
                    _ => self.pending.push_back(TreeEvent::Stop),
                }
            }
            self.reap(&ready.ended)?;
            self.report_ends();
            self.read_board();
            self.serve_manager();
            self.follow_examinations();
            self.follow_upgrade();
            self.follow_weights();
            self.pending.push_back(TreeEvent::Tick);
        }
    }

    /// Feeds the tree until it has nothing left to do.
    fn work_off(&mut self) {
        if self.is_holding() {
            return;
        }
        while let Some(event) = self.pending.pop_front() {
            if let TreeEvent::Said(_, _, up) = &event {
                self.heard(up);
            }
            for action in self.tree.on(event, Instant::now()) {
                self.act(action);
            }
        }
    }

    /// What the driver itself needs of what a child says.
    fn heard(&mut self, up: &Up) {
        match up {
            Up::Prepare(message) => self.heard_prepare(message),
            Up::Netd(FromNetd::Rated(rating)) => {
                self.tell_rating(rating);
                self.pending.push_back(TreeEvent::Stop);
            }
            _ => {}
        }
    }

    fn sleep(&self) -> Result<Ready, LoopError> {
        let mut fds = vec![
            PollFd::new(self.signals.as_fd(), PollFlags::POLLIN),
            PollFd::new(self.wake.as_fd(), PollFlags::POLLIN),
        ];
        let before = fds.len();
        fds.extend(self.status.waits_on().map(|socket| PollFd::new(socket, PollFlags::POLLIN)));
        let callers = fds.len() - before;
        let alive = |child: &&ChildProcess| child.end.is_none();
        fds.extend(
            self.processes
                .iter()
                .filter(alive)
                .map(|child| PollFd::new(child.process.as_fd(), PollFlags::POLLIN)),
        );
        fds.extend(self.web.waits_on().map(|page| PollFd::new(page, PollFlags::POLLIN)));
        match poll(&mut fds, self.timeout()) {
            Ok(_) | Err(Errno::EINTR) => {}
            Err(errno) => return Err(LoopError::System("poll", errno.into())),
        }
        let mut ready = fds.iter().map(|fd| fd.any().unwrap_or(false));
        let (signal, wake) = (ready.next().unwrap_or(false), ready.next().unwrap_or(false));
        let status = ready.by_ref().take(callers).fold(false, |any, ready| any | ready);
        let ended =
            self.processes.iter().map(|child| child.end.is_none() && ready.next().unwrap_or(false));
        Ok(Ready { signal, wake, status, ended: ended.collect() })
    }

    fn timeout(&self) -> PollTimeout {
        let words =
            self.processes.iter().filter_map(|child| Some(child.end.as_ref()?.1 + LAST_WORDS));
        let service = self.service.as_ref().and_then(Service::deadline);
        let is_probing =
            self.probe.is_some() || !self.examinations.is_empty() || self.upgrade.is_some();
        let probe = is_probing.then(|| Instant::now() + PROBE_PACE);
        let page = self.web.deadline(Instant::now()).filter(|_| !self.addrs.is_empty());
        let due = self.tree.deadline().into_iter().chain(words).chain(service).chain(probe);
        let due = due.chain(page).chain([self.next_reading]).min();
        let left = due.unwrap_or(self.next_reading).saturating_duration_since(Instant::now());
        // Rounded up, so that the loop does not spin through the last millisecond.
        let millis = if left.is_zero() { 0 } else { left.as_millis().saturating_add(1) };
        PollTimeout::try_from(millis).unwrap_or(PollTimeout::MAX)
    }

    /// Takes in what the children said, a bounded number of messages from each. A child that has
    /// more to say gets another round.
    fn hear(&mut self) {
        for child in &mut self.processes {
            for taken in 1..=MESSAGES_PER_ROUND {
                if child.closed {
                    break;
                }
                let (id, generation) = (child.id, child.generation);
                match child.channel.next() {
                    None => break,
                    Some(Heard::Message(up)) => {
                        self.pending.push_back(TreeEvent::Said(id, generation, up));
                    }
                    Some(Heard::Held) => child.is_held = true,
                    Some(Heard::Flooded) => {
                        self.pending.push_back(TreeEvent::Unruly(
                            id,
                            generation,
                            "floods its control channel",
                        ));
                    }
                    Some(Heard::Garbled) => {
                        self.pending.push_back(TreeEvent::Unruly(
                            id,
                            generation,
                            "sent garbage on its control channel",
                        ));
                    }
                    Some(Heard::Closed) => {
                        child.closed = true;
                        self.pending.push_back(TreeEvent::Closed(id, generation));
                    }
                }
                if taken == MESSAGES_PER_ROUND {
                    self.wake.ring();
                }
            }
        }
    }

    fn reap(&mut self, ended: &[bool]) -> Result<(), LoopError> {
        for (child, _) in self.processes.iter_mut().zip(ended).filter(|(_, ended)| **ended) {
            let end = child.process.reap().map_err(|e| LoopError::System("reap a child", e))?;
            if let Some(end) = end {
                child.end = Some((end, Instant::now()));
                child.channel.abandon();
            }
        }
        Ok(())
    }

    fn report_ends(&mut self) {
        let now = Instant::now();
        let over = |child: &mut ChildProcess| {
            child.end.as_ref().is_some_and(|(_, at)| child.closed || now >= *at + LAST_WORDS)
        };
        for child in self.processes.extract_if(.., over) {
            if let Some((end, _)) = child.end {
                let end = child.fault.unwrap_or(end);
                self.deaths.died(child.id, child.generation, &end);
                self.pending.push_back(TreeEvent::Ended(child.id, child.generation, end));
            }
        }
    }

    fn read_board(&mut self) {
        let now = Instant::now();
        if now < self.next_reading {
            return;
        }
        self.next_reading = now + self.liveness.pace;
        self.status.resume();
        if self.processes.iter().all(|child| child.end.is_none()) {
            self.deaths.look();
        }
        for child in self.processes.iter().filter(|child| child.end.is_none()) {
            let Some(shown) = self.segments.board.view().child_snapshot(child.slot) else {
                continue;
            };
            let beat = Beat {
                progress: shown.progress,
                limit: self.liveness.limit(&shown),
                waits_for: self.waits_for(child.id, child.generation),
            };
            self.pending.push_back(TreeEvent::Beat(child.id, child.generation, beat));
        }
        self.show_service();
        self.look_for_sessions();
    }

    /// The rank that a worker of a group of several waits for.
    fn waits_for(&self, id: ChildId, generation: Generation) -> Option<Rank> {
        let ChildId::Worker(worker) = id else {
            return None;
        };
        let group = self.segments.made_group(worker.group, generation)?;
        group.waits().get(usize::from(worker.rank.0)).copied().flatten()
    }

    /// Has every wait in a group fail. A group that was not made has no waits.
    fn abort_group(&self, id: GroupId, generation: Generation) {
        let group = self.segments.made_group(id, generation);
        if let Some(Err(error)) = group.map(|group| group.abort()) {
            warn!(group = %id, %error, "cannot ring the doorbells of a group");
        }
    }

    fn act(&mut self, action: Action) {
        match action {
            Action::Spawn(id, generation) => self.spawn(id, generation),
            Action::Tell(id, down) => self.tell(id, down),
            Action::Kill(id, generation, why) => self.kill(id, generation, &why),
            Action::DropRings { worker, generation, netd } => {
                self.segments.drop_rings(rings_of(worker, generation, netd));
            }
            Action::AbortGroup(group, generation) => self.abort_group(group, generation),
            Action::DropGroup(group, generation) => self.segments.drop_group(group, generation),
            Action::DropWorker(worker) => {
                self.segments.drop_kv(worker);
                self.weights.keep(&self.tree.served_spans());
            }
            Action::AskRoom(span) => {
                let why_not = self.no_room(span);
                self.pending.push_back(TreeEvent::Room(span, why_not));
            }
            Action::Examine(device) => self.examine(device),
            Action::Note(text) => warn!("{text}"),
            Action::Show { child, generation, state, why } => {
                self.show(child, generation, state, &why)
            }
            Action::Complain(text) => self.complain(text),
            Action::Online { span, peer_id, addrs } => {
                self.span = Some(span);
                self.announce(span, &peer_id, &addrs);
                self.service_online(&addrs);
            }
            Action::Upgraded => self.upgraded(),
            Action::Paused => self.show_paused(),
            Action::Finish(reason) => self.finished = Some(reason),
        }
    }

    /// Why workers of `span` do not fit beside the present ones, if they do not. Memory of devices
    /// shows only when a worker takes it, and is then the worker's failure.
    fn no_room(&self, span: shared::block::Span) -> Option<String> {
        let facts = self.facts.as_ref()?;
        let devices = self.tree.shares().iter().flat_map(|share| &share.devices);
        let with_memory = devices.clone().filter(|device| !device.is_processor());
        let memory = InstanceMemory {
            available_bytes: sizing::available_bytes(),
            workers: devices.count() as u64,
            netd: self.config.netd.clone(),
            kv_mirror: self.config.worker.kv_mirror,
            // It has what it takes already.
            has_page: false,
            devices: with_memory
                .map(|&device| DeviceMemory { device, free_bytes: 0, work_bytes: 0 })
                .collect(),
            nodes: Vec::new(),
            ranks: self.tree.ranks().to_vec(),
        };
        let blocks = |span: shared::block::Span| span.block_count() as u64;
        memory.no_room_beside(
            facts,
            self.span.map(blocks),
            blocks(span),
            self.config.max_memory_bytes,
        )
    }

    /// The child's slot on the board.
    fn slot_of(&self, id: ChildId) -> u32 {
        slot_of(id, self.tree.most_ranks())
    }

    fn spawn(&mut self, id: ChildId, generation: Generation) {
        if let (true, Some(death)) = (generation > Generation(1), self.deaths.last(id)) {
            self.segments.board.count_restart(id.role(), death.reason);
        }
        match ChildProcess::start(
            id,
            generation,
            self.slot_of(id),
            &self.config.log,
            self.confinement(id),
            &self.segments.board,
            &self.wake,
        ) {
            Ok(child) => self.processes.push(child),
            Err(error) => {
                let end = ExitStatus::NotStarted {
                    reason: ExitReason::Failed,
                    message: with_causes(&error),
                };
                self.pending.push_back(TreeEvent::Ended(id, generation, end));
            }
        }
    }

    fn kill(&mut self, id: ChildId, generation: Generation, why: &str) {
        self.note_kill(id, generation, why);
        self.deaths.killing(id, generation, why);
        let is = |child: &&ChildProcess| {
            child.id == id && child.generation == generation && child.end.is_none()
        };
        if let Some(Err(error)) = self.processes.iter().find(is).map(|child| child.process.kill()) {
            error!(child = %id, %error, "cannot kill a child");
        }
    }
}

/// Blocks the signals that stop a run, for this thread and all that it will start, and takes them
/// as a descriptor.
fn take_signals() -> nix::Result<SignalFd> {
    let mut mask = SigSet::empty();
    [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP]
        .into_iter()
        .for_each(|signal| mask.add(signal));
    mask.thread_block()?;
    SignalFd::with_flags(&mask, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK)
}

/// Asks the kernel for SIGTERM when the thread that started this process ends. False if `parent` is
/// not there any more.
fn ends_with(parent: u32) -> Result<bool, LoopError> {
    nix::sys::prctl::set_pdeathsig(Signal::SIGTERM)
        .map_err(|e| LoopError::System("ask to end with the parent", e.into()))?;
    Ok(u32::try_from(nix::unistd::getppid().as_raw()) == Ok(parent))
}

fn rings_of(
    worker: WorkerId,
    worker_generation: Generation,
    netd_generation: Generation,
) -> RingIdentity {
    RingIdentity { worker, worker_generation, netd_generation }
}
