//! The daemon's life, from the supervisor's first message to its end.
//!
//! ```text
//!   Init ─> arena, identity, libp2p, DHT ─> Listening      nothing is served yet: RPCs are refused with a text
//!   Model ─> limits, span ─> ProposedSpan                   announced JOINING
//!   WorkerUp* until the span is covered ─> Online           announced ONLINE, sessions are admitted
//!   WorkerDown{restarting} ─> jobs wait, clients see a pause
//!   WorkerDown{!restarting}, Unkillable ─> sessions on it fail; a WorkerUp of the same blocks ─> announced again
//!   a move to other blocks ─> see `span_move`
//!   Shrink ─> the blocks that are lost announced OFFLINE, the rest ONLINE; sessions on the rest go on
//!   Pause, Resume ─> see `span_move`
//!   Replace ─> clients are told or come back, running steps finish ─> exit 0, the next generation takes over
//!   Drain ─> announced OFFLINE, running steps finish ─> exit 0
//!   control channel closed ─> exit "parent gone"
//! ```

mod messages;
mod readiness;
mod serving;
mod span_move;

use std::convert::Infallible;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use p2p::task;
use shared::block::Span;
use shared::bootstrap::Bootstrap;
use shared::config::SpanChoice;
use shared::control::{FromNetd, NetdInit, ToNetd, WorkerUp};
use shared::exit::ExitReason;
use shared::model::ModelFacts;
use shared::shm::arena::ArenaMap;
use shared::shm::board::{BoardWriter, Phase};
use shared::shm::doorbell::Doorbell;
use shared::shm::segment::MemfdSegment;
use shared::shm::sessions::{SESSIONS_BYTES, SessionRecords};
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, MissedTickBehavior};
use tracing::{debug, error, info, warn};

use crate::control::{self, FromSupervisor, Inbox, NetdOutbox};
use crate::fatal_error::Fatal;
use crate::figures;
use crate::join::{self, Joined};
use crate::membership::{coverage, rebalance};
use crate::metrics;
use crate::offer::{self, Offer};
use crate::rpc::resumption::Resumption;
use crate::rpc::{Service, ServiceParts, Timeouts, reply};
use crate::sessions::admission::KvMemory;
use crate::sessions::pool::Pool;
use crate::sessions::pressure::MemoryPressure;
use crate::sessions::queue::WaitQueue;
use crate::sessions::shares::NetOf;
use crate::telemetry::Telemetry;
use crate::workers::Workers;
use crate::workers::arena::{self, ArenaMemory};
use crate::workers::link::Broken;
use crate::workers::tally::Tally;
use messages::{Messages, unexpected};
use readiness::Readiness;
use span_move::{Coming, HoldOff, Leaving, MoveProgress};

/// Threads of the reactor: RPCs of many peers on large machines, and never more than the workers
/// can spare.
const REACTOR_THREADS: std::ops::RangeInclusive<usize> = 2..=4;
/// Conversions of large tensors at once.
const BLOCKING_THREADS: usize = 8;
/// How long an end may take for the last announcement.
const FAREWELL: Duration = Duration::from_secs(5);
/// How long the last answers may take on their way.
const LAST_WORDS: Duration = Duration::from_secs(1);
/// How long running steps may take to finish before the next generation takes over: those of decoding
/// do, and what is cut off is computed again.
const REPLACE_LIMIT: Duration = Duration::from_millis(200);
/// How long the last answers of one that is replaced may take on their way: nobody may wait for long.
const REPLACE_WORDS: Duration = Duration::from_millis(50);
/// How long running steps may take to finish in a drain. The supervisor has a limit of its own.
const DRAIN_LIMIT: Duration = Duration::from_secs(60);

/// Why the daemon stops.
#[derive(Debug)]
enum Stop {
    Drained,
    ParentGone,
    Fatal(Fatal),
}

impl From<Fatal> for Stop {
    fn from(fatal: Fatal) -> Stop {
        Stop::Fatal(fatal)
    }
}

/// Runs the network daemon until it is drained, its parent is gone, or it cannot go on.
pub fn run(bootstrap: Bootstrap) -> ExitReason {
    let ends = match bootstrap.connect::<ToNetd, FromNetd>() {
        Ok(ends) => ends,
        Err(error) => {
            error!(%error, "cannot connect to the supervisor");
            return error.exit_reason();
        }
    };
    let (inbox, outbox, writer) = match control::start(ends) {
        Ok(started) => started,
        Err(error) => {
            error!(%error, "cannot start the control threads");
            return ExitReason::Failed;
        }
    };
    let runtime = match reactor() {
        Ok(runtime) => runtime,
        Err(error) => {
            error!(%error, "cannot start the reactor");
            return ExitReason::Failed;
        }
    };
    let reason = runtime.block_on(async {
        match daemon(inbox, &outbox).await {
            Stop::Drained => ExitReason::Clean,
            Stop::ParentGone => ExitReason::ParentGone,
            Stop::Fatal(Fatal { reason, message }) => {
                // The supervisor logs the sentence, once.
                debug!(%reason, "{message}");
                outbox.send(FromNetd::Failed { reason, message }).await;
                reason
            }
        }
    });
    runtime.shutdown_timeout(Duration::from_secs(1));
    drop(outbox);
    if reason != ExitReason::ParentGone {
        writer.finish();
    }
    info!(%reason, "ended");
    reason
}

/// A reactor for netd or a DHT node.
///
/// # Errors
/// When the system has no threads or descriptors left.
pub fn reactor() -> std::io::Result<tokio::runtime::Runtime> {
    let cores = std::thread::available_parallelism().map_or(2, usize::from);
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(cores.clamp(*REACTOR_THREADS.start(), *REACTOR_THREADS.end()))
        .max_blocking_threads(BLOCKING_THREADS)
        .enable_all()
        .build()
}

async fn daemon(inbox: Inbox, outbox: &NetdOutbox) -> Stop {
    match serve(inbox, outbox).await {
        Ok(never) => match never {},
        Err(stop) => stop,
    }
}

async fn serve(inbox: Inbox, outbox: &NetdOutbox) -> Result<Infallible, Stop> {
    let mut messages = Messages::new(inbox);
    let FromSupervisor { message, mut fds } = messages.next().await.ok_or(Stop::ParentGone)?;
    let metrics = (fds.len() > control::INIT_FDS).then(|| fds.pop()).flatten();
    let (ToNetd::Init(init), Ok([arena, board, sessions])) =
        (message, <[_; control::INIT_FDS]>::try_from(fds))
    else {
        let message =
            "the supervisor's first message is not Init with arena, board and session records"
                .to_owned();
        return Err(Fatal { reason: ExitReason::ProtocolMismatch, message }.into());
    };
    let board = Arc::new(open_board(&init, board)?);
    let telemetry = Arc::new(Telemetry::on(board.clone()));
    let (online, service) = watch::channel(None);
    task::spawn(figures::show(telemetry.clone(), service.clone()));
    if let Some(socket) = metrics {
        metrics::start(socket, telemetry.clone(), service.clone());
    }
    let resumption = Resumption::new(map_records(sessions), init.config.session_grace);
    let means = Means { arena: map_arena(&init, arena)?, resumption, telemetry, online };
    // Before the swarm is joined: the supervisor watches from the beginning.
    tokio::select! {
        end = join_and_offer(&mut messages, outbox, init, means, service) => end,
        never = beat(&board) => match never {},
    }
}

/// What a daemon serves with, whatever the model and the span.
struct Means {
    arena: ArenaMap,
    /// Sessions that can be resumed, over all services of a run.
    resumption: Resumption,
    telemetry: Arc<Telemetry>,
    /// The present service, which RPCs look up.
    online: watch::Sender<Option<Arc<Service>>>,
}

async fn join_and_offer(
    messages: &mut Messages,
    outbox: &NetdOutbox,
    init: Box<NetdInit>,
    means: Means,
    service: watch::Receiver<Option<Arc<Service>>>,
) -> Result<Infallible, Stop> {
    let joined = messages.meanwhile(join::join(&init, service)).await??;
    if let Some(board) = means.telemetry.board() {
        board.set_net_port(joined.port());
        if let Err(error) = board.set_peer_id(&joined.peer_id) {
            warn!(%error, "cannot write the PeerID to the board");
        }
    }
    let p2p = joined.p2p.clone();
    means.telemetry.entered(p2p.clone(), joined.dht.clone());
    let stop = offer_blocks(messages, outbox, *init, joined, means).await;
    p2p.shutdown().await;
    Err(stop)
}

/// From Listening to the end.
async fn offer_blocks(
    messages: &mut Messages,
    outbox: &NetdOutbox,
    mut init: NetdInit,
    joined: Joined,
    means: Means,
) -> Stop {
    let (peer_id, addrs) = (joined.peer_id.clone(), joined.addrs.clone());
    outbox.send(FromNetd::Listening { peer_id, addrs }).await;
    let (facts, fits, kept) = match messages.next().await.map(|from| from.message) {
        Some(ToNetd::Model { facts, fits, kept }) => (facts, fits, kept),
        Some(ToNetd::Drain) => return Stop::Drained,
        Some(other) => return unexpected(&other, "Model").into(),
        None => return Stop::ParentGone,
    };
    init.config.span = fits.map_or(init.config.span, SpanChoice::Count);
    let choice = messages.meanwhile(offer::choose(&init, &facts, &joined)).await;
    let offer = match choice {
        Ok(Ok(offer)) => offer.keeping(kept.unwrap_or_default()),
        Ok(Err(fatal)) => return fatal.into(),
        Err(stop) => return stop,
    };
    outbox.send(FromNetd::ProposedSpan(offer.span)).await;
    match Daemon::new(init, facts, offer, joined, means) {
        Ok(daemon) => daemon.run(messages, outbox).await,
        Err(fatal) => fatal.into(),
    }
}

/// The arena for hidden states of the model.
fn plan_arena(init: &NetdInit, facts: &ModelFacts, arena: ArenaMap) -> Result<ArenaMemory, Fatal> {
    let compression = init.config.compression;
    if !reply::possible(facts.dtype, compression) {
        return Err(Fatal::bad_config(format!(
            "invalid --compression {}: not defined for {}; give another --compression or another --torch_dtype",
            compression,
            facts.dtype.name()
        )));
    }
    let row_bytes = u64::from(facts.hidden_size) * facts.dtype.size_bytes() as u64;
    let plan = arena::plan(init.arena_bytes, row_bytes);
    let plan = plan.map_err(|error| Fatal::bad_config(error.to_string()))?;
    Ok(ArenaMemory::new(arena, plan))
}

fn open_board(init: &NetdInit, fd: OwnedFd) -> Result<BoardWriter, Fatal> {
    let board = BoardWriter::open(fd, &init.board, init.generation).map_err(|error| Fatal {
        reason: ExitReason::ProtocolMismatch,
        message: error.to_string(),
    })?;
    board.enter(Phase::Reactor, Duration::ZERO);
    Ok(board)
}

fn map_arena(init: &NetdInit, fd: OwnedFd) -> Result<ArenaMap, Fatal> {
    let bytes = usize::try_from(init.arena_bytes).unwrap_or(usize::MAX);
    let segment = MemfdSegment::from_fd("sepal-arena", fd, bytes);
    let map = segment.and_then(|segment| ArenaMap::map(&segment));
    map.map_err(|error| Fatal { reason: ExitReason::OutOfMemory, message: error.to_string() })
}

/// Without the records netd serves all the same, and keeps no session for its client.
fn map_records(fd: OwnedFd) -> Option<SessionRecords> {
    let segment = MemfdSegment::from_fd("sepal-sessions", fd, SESSIONS_BYTES);
    let map = segment.and_then(|segment| SessionRecords::map(&segment));
    map.inspect_err(|error| warn!(%error, "cannot map the session records, keeping no sessions"))
        .ok()
}

/// Shows on the board that the reactor works: polled by its main task, and each heartbeat goes
/// through one of its threads first.
async fn beat(board: &BoardWriter) -> Infallible {
    let mut interval = tokio::time::interval(board.heartbeat());
    interval.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        interval.tick().await;
        if tokio::spawn(async {}).await.is_ok() {
            board.progress();
        }
    }
}

/// Shows a person who looks how well the blocks of the model are served.
fn watch_coverage(offer: &Offer, facts: &ModelFacts, joined: &Joined, telemetry: &Arc<Telemetry>) {
    if !offer.is_dry_run() {
        let (dht, prefix) = (joined.dht.clone(), offer.prefix.clone());
        task::spawn(coverage::keep(dht, prefix, facts.num_blocks, telemetry.clone()));
    }
}

/// Logs what was computed, again and again.
async fn report(tally: Arc<Tally>, interval: Duration) {
    let start = Instant::now() + interval;
    let mut beat = tokio::time::interval_at(start, interval);
    loop {
        beat.tick().await;
        for line in tally.report(interval) {
            info!("{line}");
        }
    }
}

/// A daemon that knows its model and its span.
struct Daemon {
    init: NetdInit,
    facts: ModelFacts,
    offer: Offer,
    joined: Joined,
    workers: Arc<Workers>,
    /// Whose rings cannot be used any more.
    broken: mpsc::Receiver<Broken>,
    online: watch::Sender<Option<Arc<Service>>>,
    draining: watch::Sender<bool>,
    announced: offer::Announced,
    /// The workers' pages and what they measured, as they came up.
    ups: Vec<WorkerUp>,
    /// A move that is not announced yet.
    coming: Option<Coming>,
    /// What was left, as long as its sessions last.
    leaving: Option<Leaving>,
    /// Whether the new place is being announced.
    switching: bool,
    /// A worker came in place of one that was announced, since the last announcement.
    has_new: bool,
    hold_off: HoldOff,
    /// The offer before this one, until this one is online; when both had no room beside each
    /// other.
    came_from: Option<Offer>,
    /// The span that may be left now.
    present: watch::Sender<Option<Span>>,
    /// Spans that would be better.
    wishes: mpsc::Receiver<rebalance::Wish>,
    progress: mpsc::Sender<MoveProgress>,
    progressed: mpsc::Receiver<MoveProgress>,
    readiness: Readiness,
    /// Whether the operator has paused the instance.
    is_paused: bool,
    /// The present span with the blocks of workers that are gone and may come back.
    whole: Span,
    /// Whether the machine is short of memory.
    memory: MemoryPressure,
    telemetry: Arc<Telemetry>,
    /// Sessions that can be resumed, over all services of a run.
    resumption: Resumption,
    /// Why it cannot go on.
    fatal: Option<Fatal>,
}

impl Daemon {
    fn new(
        init: NetdInit,
        facts: ModelFacts,
        offer: Offer,
        joined: Joined,
        means: Means,
    ) -> Result<Daemon, Fatal> {
        let Means { arena, resumption, telemetry, online } = means;
        let (workers, broken) = Workers::new(plan_arena(&init, &facts, arena)?);
        let announced = match offer.is_dry_run() || init.paused {
            true => offer::Announced::none(),
            false => offer.announce_joining(&joined),
        };
        let readiness = Readiness::new(&init, &offer);
        if let Some(interval) = init.config.stats_report_interval {
            task::spawn(report(workers.tally().clone(), interval));
        }
        for span in &init.retired {
            // Ends by itself once the records are taken back or have expired.
            drop(offer.at(*span).take_back(&joined, offer.span));
        }
        let draining = watch::Sender::new(false);
        let ups = Vec::new();
        let present = watch::Sender::new(None);
        let (wish, wishes) = mpsc::channel(1);
        let (progress, progressed) = mpsc::channel(4);
        let balance = offer.balance(&init);
        if balance.moves(offer.span.block_count()) {
            let shown = present.subscribe();
            task::spawn(rebalance::watch(joined.dht.clone(), balance, shown, wish));
        }
        watch_coverage(&offer, &facts, &joined, &telemetry);
        Ok(Daemon {
            readiness,
            is_paused: init.paused,
            memory: MemoryPressure::of_this_process(),
            whole: init.whole.unwrap_or(offer.span),
            telemetry,
            resumption,
            fatal: None,
            coming: None,
            leaving: None,
            switching: false,
            has_new: false,
            hold_off: HoldOff::default(),
            came_from: None,
            present,
            wishes,
            progress,
            progressed,
            init,
            facts,
            offer,
            joined,
            workers: Arc::new(workers),
            broken,
            online,
            draining,
            announced,
            ups,
        })
    }

    async fn run(mut self, messages: &mut Messages, outbox: &NetdOutbox) -> Stop {
        let stop = self.run_until_stopped(messages, outbox).await;
        if !matches!(stop, Stop::Drained) {
            self.end_moves().await;
            self.announced.end(Instant::now() + FAREWELL).await;
        }
        stop
    }

    /// Handles messages, moves and failures until one of them ends the daemon.
    async fn run_until_stopped(&mut self, messages: &mut Messages, outbox: &NetdOutbox) -> Stop {
        let mut figures = tokio::time::interval(figures::INTERVAL);
        loop {
            tokio::select! {
                message = messages.next() => {
                    let Some(message) = message else { return Stop::ParentGone };
                    if let Err(stop) = self.on_message(message, outbox).await {
                        return stop;
                    }
                }
                _ = figures.tick() => {
                    self.update_figures();
                    self.watch_memory();
                    self.renew();
                    self.look_at_leaving(outbox).await;
                    self.show_present();
                }
                Some(wish) = self.wishes.recv() => self.wish(wish, outbox).await,
                Some(progress) = self.progressed.recv() => {
                    self.progressed(progress, outbox).await;
                    if let Some(fatal) = self.fatal.take() {
                        return fatal.into();
                    }
                }
                Some(Broken { worker, generation, message }) = self.broken.recv() => {
                    outbox.send(FromNetd::BrokenRings { worker, generation, message }).await;
                }
            }
        }
    }

    async fn on_message(&mut self, from: FromSupervisor, outbox: &NetdOutbox) -> Result<(), Stop> {
        let FromSupervisor { message, fds } = from;
        match message {
            ToNetd::WorkerUp(up) => {
                if self.worker_up(up, fds)? {
                    outbox.send(FromNetd::Online).await;
                }
            }
            ToNetd::WorkerDown { worker, generation, cause, restarting } => {
                let all = self.all_workers();
                all.for_each(|of| of.down(worker, generation, cause, restarting));
                self.ups.retain(|up| restarting || up.worker != worker);
                self.forget_left();
            }
            ToNetd::WorkerUnkillable { worker, generation } => {
                let all = self.all_workers();
                all.for_each(|of| of.unkillable(worker, generation));
                self.forget_left();
            }
            ToNetd::MakeRoom(to) => self.must_make_room(to),
            ToNetd::Pause { patience } => self.pause(patience, outbox).await,
            ToNetd::Resume(span) => self.resume(span),
            ToNetd::MoveFailed { to, why } => self.move_failed(to, &why),
            ToNetd::Shrink(rest) => {
                if self.shrink(rest).await {
                    outbox.send(FromNetd::Online).await;
                }
            }
            ToNetd::Grow(span) => {
                if self.grow(span) {
                    outbox.send(FromNetd::Online).await;
                }
            }
            ToNetd::Replace => {
                self.step_aside().await;
                return Err(Stop::Drained);
            }
            ToNetd::Drain => {
                self.drain().await;
                return Err(Stop::Drained);
            }
            other @ (ToNetd::Init(_) | ToNetd::Model { .. }) => {
                let expected = "WorkerUp, WorkerDown, Shrink, Grow, MoveFailed, Pause, Resume, Replace or Drain";
                return Err(unexpected(&other, expected).into());
            }
        }
        Ok(())
    }
}

#[cfg(test)]
pub(crate) mod tests;
