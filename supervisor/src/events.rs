//! The poll loop: turns what happens into [`Event`]s for the tree and carries out its [`Action`]s. One thread; it never
//! waits on one child. It sleeps in `poll` on
//!
//! - the signalfd of SIGINT, SIGTERM and SIGHUP, which are blocked for the whole process;
//! - an eventfd that the readers of control channels ring;
//! - one pidfd per process, readable once the process has ended;
//!
//! until the tree's next deadline or the next reading of the board. The end of a process is reported to the tree after
//! everything the process had said: it is reaped at once, and reported when its channel has run dry.

mod compose;

use std::collections::VecDeque;
use std::io::{self, IsTerminal};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use shared::config::{Device, LogFormat, ServeConfig};
use shared::control::{Capacity, DeviceMemory, FromNetd, FromPrepare, Rating};
use shared::exit::ExitReason;
use shared::ids::{Generation, WorkerId};
use shared::model::ModelFacts;
use shared::shm::board::{ChildState, Phase};
use shared::shm::pair::RingIdentity;
use tracing::{error, info, warn};

use crate::channel::{Heard, Wake};
use crate::instance::Instance;
use crate::plan::Share;
use crate::running::{Running, slot_of};
use crate::segments::{MakeError, Segments};
use crate::sizing::{self, Memory};
use crate::tree::{Action, Beat, ChildId, End, Event, Policy, State, Tree, Up};

/// Messages of one child taken in before the others get their turn.
const TURN: usize = 64;

/// How long the channel of a reaped process may take to run dry; its reader has only to read what the kernel holds.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// Runs the tree of `config` to its end.
///
/// # Errors
/// When the loop itself cannot go on: descriptors are used up or the board cannot be made. Children die with the process.
pub fn run(config: ServeConfig, instance: &Instance) -> Result<ExitReason, LoopError> {
    Driver::new(config, instance)?.run()
}

/// Why the poll loop could not go on.
#[derive(Debug, thiserror::Error)]
pub enum LoopError {
    /// The system refused something that the loop cannot do without.
    #[error("{0}")]
    System(&'static str, #[source] io::Error),
    /// The board could not be made.
    #[error(transparent)]
    Board(#[from] MakeError),
}

impl LoopError {
    /// The reason with which the process should exit.
    pub fn exit_reason(&self) -> ExitReason {
        match self {
            LoopError::System(..) => ExitReason::Failed,
            LoopError::Board(_) => ExitReason::OutOfMemory,
        }
    }
}

struct Driver<'a> {
    config: ServeConfig,
    instance: &'a Instance,
    tree: Tree,
    pending: VecDeque<Event>,
    running: Vec<Running>,
    segments: Segments,
    facts: Option<ModelFacts>,
    /// What workers measured at an earlier start.
    kept: Option<Capacity>,
    /// The blocks that clients are told of.
    span: Option<shared::block::Span>,
    wake: Wake,
    signals: SignalFd,
    pace: Duration,
    next_reading: Instant,
    finished: Option<ExitReason>,
}

/// What `poll` said.
struct Ready {
    signal: bool,
    wake: bool,
    /// Per process in `running`.
    ended: Vec<bool>,
}

impl<'a> Driver<'a> {
    fn new(config: ServeConfig, instance: &'a Instance) -> Result<Driver<'a>, LoopError> {
        let pace = (config.restart.hang_timeout / 4)
            .clamp(Duration::from_millis(50), Duration::from_secs(5));
        let policy = Policy {
            restart: config.restart,
            drain_timeout: config.drain_timeout,
            shares: config
                .devices
                .iter()
                .map(|&device| Share {
                    device,
                    weight: 1.0,
                })
                .collect(),
            span: config.netd.span,
            memory: Memory {
                available_bytes: sizing::within(sizing::available_bytes(), config.max_memory_bytes),
                workers: config.devices.len() as u64,
                netd: config.netd.clone(),
                kv_mirror: config.worker.kv_mirror,
                devices: Vec::new(),
            },
            pace,
        };
        // Before anything is made that has to be removed: from here on a signal ends the run in order.
        let signals = take_signals().map_err(|e| LoopError::System("take signals", e.into()))?;
        let first = match config.end_with {
            Some(parent) if !ends_with(parent)? => {
                warn!(parent, "the process that this run was to end with is gone");
                Event::Stop
            }
            _ => Event::Start,
        };
        let now = Instant::now();
        let started = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        Ok(Driver {
            tree: Tree::new(policy),
            pending: VecDeque::from([first]),
            running: Vec::new(),
            segments: Segments::new(instance, started.map_or(0, |since| since.as_secs()))?,
            facts: None,
            kept: None,
            span: None,
            wake: Wake::new().map_err(|e| LoopError::System("make an eventfd", e))?,
            signals,
            pace,
            next_reading: now + pace,
            finished: None,
            config,
            instance,
        })
    }

    fn run(mut self) -> Result<ExitReason, LoopError> {
        loop {
            self.work_off();
            if let Some(reason) = self.finished {
                return Ok(reason);
            }
            let ready = self.sleep()?;
            if ready.wake {
                self.wake.clear();
                self.hear();
            }
            while ready.signal && matches!(self.signals.read_signal(), Ok(Some(_))) {
                self.pending.push_back(Event::Stop);
            }
            self.reap(&ready.ended)?;
            self.report_ends();
            self.read_board();
            self.pending.push_back(Event::Tick);
        }
    }

    /// Feeds the tree until it has nothing left to do.
    fn work_off(&mut self) {
        while let Some(event) = self.pending.pop_front() {
            for action in self.tree.on(event, Instant::now()) {
                self.act(action);
            }
        }
    }

    fn sleep(&self) -> Result<Ready, LoopError> {
        let mut fds = vec![
            PollFd::new(self.signals.as_fd(), PollFlags::POLLIN),
            PollFd::new(self.wake.as_fd(), PollFlags::POLLIN),
        ];
        let alive = |running: &&Running| running.end.is_none();
        fds.extend(
            self.running
                .iter()
                .filter(alive)
                .map(|running| PollFd::new(running.process.as_fd(), PollFlags::POLLIN)),
        );
        match poll(&mut fds, self.timeout()) {
            Ok(_) | Err(Errno::EINTR) => {}
            Err(errno) => return Err(LoopError::System("poll", errno.into())),
        }
        let mut ready = fds.iter().map(|fd| fd.any().unwrap_or(false));
        let (signal, wake) = (ready.next().unwrap_or(false), ready.next().unwrap_or(false));
        let ended = self
            .running
            .iter()
            .map(|running| running.end.is_none() && ready.next().unwrap_or(false));
        Ok(Ready {
            signal,
            wake,
            ended: ended.collect(),
        })
    }

    fn timeout(&self) -> PollTimeout {
        let words = self
            .running
            .iter()
            .filter_map(|running| Some(running.end.as_ref()?.1 + LAST_WORDS));
        let due = self
            .tree
            .deadline()
            .into_iter()
            .chain(words)
            .chain([self.next_reading])
            .min();
        let left = due
            .unwrap_or(self.next_reading)
            .saturating_duration_since(Instant::now());
        // Rounded up, so that the loop does not spin through the last millisecond.
        let millis = if left.is_zero() {
            0
        } else {
            left.as_millis().saturating_add(1)
        };
        PollTimeout::try_from(millis).unwrap_or(PollTimeout::MAX)
    }

    /// Takes in what the children said, each in its turn; whoever has more to say rings for another round.
    fn hear(&mut self) {
        for running in &mut self.running {
            for turn in 0..TURN {
                if running.closed {
                    break;
                }
                let (id, generation) = (running.id, running.generation);
                match running.channel.next() {
                    None => break,
                    Some(Heard::Message(up)) => {
                        match &up {
                            Up::Prepare(FromPrepare::Kept(capacity)) => self.kept = Some(*capacity),
                            Up::Netd(FromNetd::Rated(rating)) => {
                                tell(rating);
                                self.pending.push_back(Event::Stop);
                            }
                            _ => {}
                        }
                        self.pending.push_back(Event::Said(id, generation, up))
                    }
                    Some(Heard::Flooded) => {
                        self.pending
                            .push_back(Event::Unruly(id, generation, "talks without end"));
                    }
                    Some(Heard::Closed) => {
                        running.closed = true;
                        self.pending.push_back(Event::Closed(id, generation));
                    }
                }
                if turn + 1 == TURN {
                    self.wake.ring();
                }
            }
        }
    }

    fn reap(&mut self, ended: &[bool]) -> Result<(), LoopError> {
        for (running, _) in self
            .running
            .iter_mut()
            .zip(ended)
            .filter(|(_, ended)| **ended)
        {
            let end = running
                .process
                .reap()
                .map_err(|e| LoopError::System("reap a child", e))?;
            if let Some(end) = end {
                running.end = Some((end, Instant::now()));
                running.channel.abandon();
            }
        }
        Ok(())
    }

    fn report_ends(&mut self) {
        let now = Instant::now();
        let over = |running: &mut Running| {
            running
                .end
                .as_ref()
                .is_some_and(|(_, at)| running.closed || now >= *at + LAST_WORDS)
        };
        for running in self.running.extract_if(.., over) {
            if let Some((end, _)) = running.end {
                let end = running.fault.unwrap_or(end);
                self.pending
                    .push_back(Event::Ended(running.id, running.generation, end));
            }
        }
    }

    fn read_board(&mut self) {
        let now = Instant::now();
        if now < self.next_reading {
            return;
        }
        self.next_reading = now + self.pace;
        let patience = self.config.restart.hang_timeout;
        for running in self.running.iter().filter(|running| running.end.is_none()) {
            let Some(child) = self
                .segments
                .board
                .view()
                .child_snapshot(slot_of(running.id))
            else {
                continue;
            };
            // A phase without a limit may stand still for ever; one with a limit stands for what its child knows of itself.
            let judged = child.phase != Phase::Idle && !child.phase_limit.is_zero();
            let limit = judged.then(|| child.phase_limit.max(patience));
            let beat = Beat {
                progress: child.progress,
                limit,
            };
            self.pending
                .push_back(Event::Beat(running.id, running.generation, beat));
        }
    }

    fn act(&mut self, action: Action) {
        match action {
            Action::Spawn(id, generation) => self.spawn(id, generation),
            Action::Tell(id, down) => self.tell(id, down),
            Action::Kill(id, generation, why) => self.kill(id, generation, &why),
            Action::DropRings {
                worker,
                generation,
                netd,
            } => {
                self.segments.drop_rings(rings_of(worker, generation, netd));
            }
            Action::DropWorker(worker) => self.segments.drop_kv(worker),
            Action::AskRoom(span) => {
                let why_not = self.no_room(span);
                self.pending.push_back(Event::Room(span, why_not));
            }
            Action::Note(text) => warn!("{text}"),
            Action::Show {
                child,
                generation,
                state,
                why,
            } => self.show(child, generation, state, &why),
            Action::Complain(text) => error!("{text}"),
            Action::Online {
                span,
                peer_id,
                addrs,
            } => {
                self.span = Some(span);
                self.announce(span, &peer_id, &addrs);
            }
            Action::Finish(reason) => self.finished = Some(reason),
        }
    }

    /// Why workers of `span` do not fit beside the present ones, if they do not. Memory of devices shows only when a worker
    /// takes it, and is then the worker's failure.
    fn no_room(&self, span: shared::block::Span) -> Option<String> {
        let facts = self.facts.as_ref()?;
        let with_memory = self.config.devices.iter().filter(|&&d| d != Device::Cpu);
        let memory = Memory {
            available_bytes: sizing::available_bytes(),
            workers: self.config.devices.len() as u64,
            netd: self.config.netd.clone(),
            kv_mirror: self.config.worker.kv_mirror,
            devices: with_memory
                .map(|&device| DeviceMemory {
                    device,
                    free_bytes: 0,
                    work_bytes: 0,
                })
                .collect(),
        };
        let blocks = |span: shared::block::Span| span.block_count() as u64;
        memory.no_room_beside(
            facts,
            self.span.map(blocks),
            blocks(span),
            self.config.max_memory_bytes,
        )
    }

    fn spawn(&mut self, id: ChildId, generation: Generation) {
        match Running::start(
            id,
            generation,
            &self.config.log,
            &self.segments.board,
            &self.wake,
        ) {
            Ok(running) => self.running.push(running),
            Err(error) => {
                let end = End::NotStarted {
                    reason: ExitReason::Failed,
                    message: chain(&error),
                };
                self.pending.push_back(Event::Ended(id, generation, end));
            }
        }
    }

    fn kill(&mut self, id: ChildId, generation: Generation, why: &str) {
        warn!(child = %id, generation = generation.0, why, "killing");
        let is = |running: &&Running| {
            running.id == id && running.generation == generation && running.end.is_none()
        };
        if let Some(Err(error)) = self
            .running
            .iter()
            .find(is)
            .map(|running| running.process.kill())
        {
            error!(child = %id, %error, "cannot kill");
        }
    }

    fn show(&self, id: ChildId, generation: Generation, state: State, why: &str) {
        let shown = match state {
            State::Waiting => ChildState::Unset,
            State::Starting { .. } => ChildState::Starting,
            State::Ready { .. } => ChildState::Ready,
            State::Draining { .. } => ChildState::Draining,
            State::Backoff { .. } => ChildState::Backoff,
            State::Held { .. } | State::Unkillable => ChildState::Held,
            State::Gone => ChildState::Gone,
        };
        if let Err(error) = self.segments.board.set_state(slot_of(id), shown) {
            warn!(child = %id, %error, "cannot show a state");
        }
        let why = (!why.is_empty()).then_some(tracing::field::display(why));
        if matches!(
            state,
            State::Backoff { .. } | State::Held { .. } | State::Unkillable
        ) {
            warn!(child = %id, generation = generation.0, why, "{}", state.name());
        } else {
            let pid = self
                .running
                .iter()
                .find(|running| running.id == id)
                .map(|running| running.process.pid());
            info!(child = %id, generation = generation.0, pid, why, "{}", state.name());
        }
    }

    fn announce(&self, span: shared::block::Span, peer_id: &str, addrs: &[String]) {
        info!(state = %"ONLINE", %span, peer_id = %peer_id, addrs = %addrs.join(" "), "clients can come");
        let for_people = self.config.log.format == LogFormat::Text && io::stderr().is_terminal();
        if let (Some(addr), true) = (addrs.first(), for_people) {
            let model = &self.config.prepare.model;
            let prefix = self.config.netd.dht_prefix.as_deref();
            let flag = prefix
                .map(|prefix| format!("--dht_prefix {prefix} "))
                .unwrap_or_default();
            let argument = prefix
                .map(|prefix| format!(", dht_prefix={prefix:?}"))
                .unwrap_or_default();
            info!("try: sepal generate {model} {flag}--initial_peers {addr} --prompt 'Hello'");
            info!(
                "or with Petals: AutoDistributedModelForCausalLM.from_pretrained({model:?}, \
                 initial_peers=[{addr:?}]{argument})"
            );
        }
    }
}

/// Blocks the signals that stop a run, for this thread and all that it will start, and takes them as a descriptor.
/// What a dry run was for.
fn tell(rating: &Rating) {
    let Rating {
        capacity,
        network,
        network_rps,
        throughput,
        blocks,
    } = rating;
    info!(
        inference_rps = capacity.inference_rps,
        forward_rps = capacity.forward_rps,
        network_rps,
        network_mbps = network.mbps(),
        network = %network.source,
        throughput,
        blocks,
        "measured; ending the dry run"
    );
}

fn take_signals() -> nix::Result<SignalFd> {
    let mut mask = SigSet::empty();
    [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP]
        .into_iter()
        .for_each(|signal| mask.add(signal));
    mask.thread_block()?;
    SignalFd::with_flags(&mask, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK)
}

/// Asks the kernel for SIGTERM when the thread that started this process ends. False if `parent` is not there any more.
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
    RingIdentity {
        worker,
        worker_generation,
        netd_generation,
    }
}

/// An error with its causes, in one line.
pub fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text.push_str(": ");
        text.push_str(&error.to_string());
        cause = error.source();
    }
    text
}
