//! The role `prepare`: what it says to the supervisor, and in what order.

use std::path::Path;
use std::time::{Duration, Instant};

use ipc_channel::TryRecvError;
use model::cuts::CutFile;
use model::rates::{RateCache, slowest};
use model::shards::Shard;
use shared::block::Span;
use shared::bootstrap::{Bootstrap, ControlEnds};
use shared::causes::with_causes;
use shared::config::{Device, PrepareConfig, WorkerConfig};
use shared::control::{BoardSeat, FdTag, FromPrepare, ToPrepare};
use shared::exit::ExitReason;
use shared::model::RankShare;
use shared::shm::board::{BoardWriter, Phase};
use tracing::{debug, error, info, warn};

use crate::devices::{self, device_memory};
use crate::error::PrepareError;
use crate::groups;
use crate::inspect::Inspected;
use crate::progress::Tracker;

/// Longest time without progress: one tensor of the largest models (a few GB) from a slow disk.
const TENSOR_LIMIT: Duration = Duration::from_secs(300);

/// Descriptors are sent before the message that names them.
const DESCRIPTOR_TIMEOUT: Duration = Duration::from_secs(10);

type Ends = ControlEnds<ToPrepare, FromPrepare>;

/// Runs the role until the model is ready, cannot be made ready, or the parent is gone.
pub fn run(bootstrap: Bootstrap) -> ExitReason {
    let ends = match bootstrap.connect::<ToPrepare, FromPrepare>() {
        Ok(ends) => ends,
        Err(failure) => {
            error!(error = with_causes(&failure), "cannot connect to the supervisor");
            return failure.exit_reason();
        }
    };
    match serve(&ends) {
        Ok(()) => ExitReason::Clean,
        Err(Ending::ParentGone) => ExitReason::ParentGone,
        Err(Ending::Failed(reason, message)) => {
            debug!(%reason, message, "prepare failed");
            // The supervisor logs the sentence; without a supervisor nobody is left to read it.
            let _ = ends.sender.send(FromPrepare::Failed { reason, message });
            reason
        }
    }
}

/// Why the role ends before its work is done.
enum Ending {
    ParentGone,
    Failed(ExitReason, String),
}

impl From<PrepareError> for Ending {
    fn from(error: PrepareError) -> Ending {
        Ending::Failed(error.exit_reason(), error.to_string())
    }
}

/// Inspects the model, waits for the span to serve, and makes its blocks ready. Ends early,
/// without an error, when the supervisor drains the role.
fn serve(ends: &Ends) -> Result<(), Ending> {
    let Some(init) = init(ends)? else {
        return Ok(());
    };
    let board = &init.board;
    board.enter(Phase::Preparing, TENSOR_LIMIT);
    let inspected = Inspected::new(&init.config)?;
    let facts = inspected.facts.clone();
    let shards = report_shares(ends, &init, &inspected)?;
    report_memory(ends, &init, &inspected, &shards)?;
    info!(model = facts.name, model_type = facts.model_type, dtype = %facts.dtype, blocks = facts.num_blocks, "model inspected");
    let cuts = report_rates(ends, &init, &inspected)?;
    // The phase comes first: a supervisor that has the facts counts on heartbeats.
    board.enter(Phase::Idle, Duration::ZERO);
    send(ends, FromPrepare::Inspected(facts))?;
    let (span, path, cut) = match next_order(ends, board) {
        Ok(ToPrepare::Span { span, manifest, cut }) => (span, manifest, cut),
        Ok(ToPrepare::Drain) => return Ok(()),
        Ok(ToPrepare::Init { .. }) => return Err(out_of_order("Span")),
        Err(_) => return Err(Ending::ParentGone),
    };
    board.enter(Phase::Preparing, TENSOR_LIMIT);
    if init.groups.iter().flatten().count() > 1
        && let Err(error) = cuts.keep(&cut)
    {
        warn!(%error, "cannot save the cut among the devices; a restart decides anew");
    }
    make_ready(ends, board, inspected, span, &path)
}

/// Reports the memory of each device that has its own. `shards` are those of all ranks, in the order
/// of the devices; none where a device has whole blocks.
fn report_memory(
    ends: &Ends,
    init: &Init,
    inspected: &Inspected,
    shards: &[Option<Shard>],
) -> Result<(), Ending> {
    let whole = &inspected.spec;
    let held = |index: usize| {
        let shard = shards.get(index).and_then(Option::as_ref);
        shard.map_or(whole, |shard| &shard.spec).clone()
    };
    let memory = device_memory(&init.groups.concat(), init.worker.device_bytes, whole, held);
    let memory = memory.map_err(|(ordinal, failure)| {
        let (reason, message) = failure.told(ordinal);
        Ending::Failed(reason, message)
    })?;
    for one in &memory {
        let (free_bytes, work_bytes) = (one.free_bytes, one.work_bytes);
        info!(device = %one.device, free_bytes, work_bytes, "measured device memory");
    }
    if memory.is_empty() {
        return Ok(());
    }
    send(ends, FromPrepare::Devices(memory))
}

/// Reports what each rank holds of a block, where several devices share it. Returns the shards of
/// all ranks.
fn report_shares(
    ends: &Ends,
    init: &Init,
    inspected: &Inspected,
) -> Result<Vec<Option<Shard>>, Ending> {
    if init.groups.iter().all(|devices| devices.len() < 2) {
        return Ok(Vec::new());
    }
    let (mut shards, mut groups) = (Vec::new(), Vec::new());
    for devices in &init.groups {
        if devices.len() < 2 {
            shards.push(None);
            groups.push(Vec::new());
            continue;
        }
        let rates = devices::speeds(devices, &inspected.facts, &init.worker);
        let names = devices::names(devices, &init.worker);
        let of_group = groups::shards(inspected, &names, &rates)?;
        let ranks: Vec<RankShare> =
            of_group.iter().map(|shard| groups::of_rank(inspected, shard)).collect();
        info!(?devices, ?ranks, "shared the blocks among the ranks of a group");
        for (device, _) in devices.iter().zip(&ranks).filter(|(_, rank)| rank.is_slow) {
            warn!(%device, "the inputs of its matrices are cut beside multiples of 64: it computes slowly");
        }
        groups.push(ranks);
        shards.extend(of_group.into_iter().map(Some));
    }
    send(ends, FromPrepare::Groups(groups))?;
    Ok(shards)
}

/// Reports the throughput of an earlier start, and the relative speeds of several devices with the
/// cuts that were saved for them. Returns where the cuts are saved.
fn report_rates(ends: &Ends, init: &Init, inspected: &Inspected) -> Result<CutFile, Ending> {
    let Init { config, groups, worker, .. } = init;
    let facts = &inspected.facts;
    if let Some(folder) = worker.rates_dir.as_ref().filter(|_| !worker.measure_anew) {
        let cache = RateCache::new(folder, Duration::ZERO);
        let rates = cache.kept(facts, groups.iter().map(Vec::as_slice), worker);
        if let Some(kept) = rates.and_then(|rates| slowest(&rates)) {
            send(ends, FromPrepare::Kept(kept))?;
        }
    }
    let names = devices::group_names(groups, worker);
    let cuts = CutFile::new(&config.cache_dir, facts, &names);
    let devices = groups.concat();
    if devices.len() > 1 {
        let rates = devices::speeds(&devices, facts, worker);
        info!(?rates, "compared the speeds of the devices");
        send(ends, FromPrepare::Speeds { rates, cuts: cuts.read() })?;
    }
    Ok(cuts)
}

/// Downloads and converts the blocks of `span`, and writes their manifest to `path`. Stops at the
/// next message of the supervisor, which can only be a drain.
fn make_ready(
    ends: &Ends,
    board: &BoardWriter,
    mut inspected: Inspected,
    span: Span,
    path: &Path,
) -> Result<(), Ending> {
    let mut tracker = Tracker::default();
    let made = inspected.make_ready(span, |progress| {
        board.progress();
        if let Some(told) = tracker.record(progress, Instant::now()) {
            // A supervisor that is gone closes the other channel too.
            let _ = ends.sender.send(FromPrepare::Progress(told));
        }
        match ends.receiver.try_recv() {
            Err(TryRecvError::Empty) => Ok(()),
            _ => Err(PrepareError::Stopped),
        }
    });
    let manifest = match made {
        Ok(manifest) => manifest,
        Err(PrepareError::Stopped) => return Ok(()),
        Err(failure) => return Err(failure.into()),
    };
    manifest.write(path).map_err(|e| Ending::Failed(ExitReason::Failed, with_causes(&e)))?;
    info!(%span, manifest = %path.display(), "span prepared");
    send(ends, FromPrepare::Prepared)
}

/// Waits for the next message, with a heartbeat.
fn next_order(ends: &Ends, board: &BoardWriter) -> Result<ToPrepare, Ending> {
    loop {
        match ends.receiver.try_recv_timeout(board.heartbeat()) {
            Err(TryRecvError::Empty) => board.progress(),
            received => return received.map_err(|_| Ending::ParentGone),
        }
    }
}

/// The supervisor's first message.
struct Init {
    config: PrepareConfig,
    board: BoardWriter,
    groups: Vec<Vec<Device>>,
    worker: WorkerConfig,
}

/// Receives the first message. `None`: a drain came instead.
fn init(ends: &Ends) -> Result<Option<Init>, Ending> {
    match ends.receiver.recv() {
        Ok(ToPrepare::Init { config, board, groups, worker, fds }) => {
            let board = open_board(ends, &board, fds)?;
            Ok(Some(Init { config, board, groups, worker }))
        }
        Ok(ToPrepare::Drain) => Ok(None),
        Ok(ToPrepare::Span { .. }) => Err(out_of_order("Init")),
        Err(_) => Err(Ending::ParentGone),
    }
}

fn open_board(ends: &Ends, seat: &BoardSeat, fds: FdTag) -> Result<BoardWriter, Ending> {
    let failed =
        |e: &dyn std::error::Error| Ending::Failed(ExitReason::ProtocolMismatch, with_causes(e));
    let mut fds = ends.descriptors.recv(fds, 1, DESCRIPTOR_TIMEOUT).map_err(|e| failed(&e))?;
    let board = fds.pop().ok_or_else(|| out_of_order("Init with the board"))?;
    BoardWriter::open(board, seat, ends.birth.generation).map_err(|e| failed(&e))
}

fn out_of_order(expected: &str) -> Ending {
    Ending::Failed(
        ExitReason::ProtocolMismatch,
        format!("the supervisor sent another message than {expected}"),
    )
}

fn send(ends: &Ends, message: FromPrepare) -> Result<(), Ending> {
    ends.sender.send(message).map_err(|_| Ending::ParentGone)
}
