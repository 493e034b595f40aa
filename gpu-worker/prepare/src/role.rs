//! The role `prepare`: what it says to the supervisor, and in what order.

use std::path::Path;
use std::time::{Duration, Instant};

use ipc_channel::TryRecvError;
use shared::block::Span;
use shared::bootstrap::{Bootstrap, ControlEnds};
use shared::config::{Device, PrepareConfig, WorkerConfig};
use shared::control::{BoardSeat, FdTag, FromPrepare, ToPrepare};
use shared::error_chain::with_causes;
use shared::exit::ExitReason;
use shared::shm::board::{BoardWriter, Phase};
use tracing::{debug, error, info, warn};

use crate::error::PrepareError;
use crate::inspect::Inspected;
use crate::progress::Tracker;
use crate::survey::survey;

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
    let (survey, cuts) = survey(&inspected, &init.groups, &init.worker)?;
    let facts = &survey.facts;
    info!(model = facts.name, model_type = facts.model_type, dtype = %facts.dtype, blocks = facts.num_blocks, "model inspected");
    // The phase comes first: a supervisor that has the survey counts on heartbeats.
    board.enter(Phase::Idle, Duration::ZERO);
    send(ends, FromPrepare::Surveyed(Box::new(survey)))?;
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
