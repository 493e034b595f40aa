//! The board: one segment per instance in which every process shows what it does. The supervisor
//! judges from it whether a child hangs, and answers `sepal status` from it, also while netd is down.
//!
//! Every field has one writer, so that no stores race:
//!
//! | Part | Writer | When |
//! | --- | --- | --- |
//! | header | supervisor ([`Board`]) | once, at creation |
//! | seat (role, pid, generation, worker, state, span) | supervisor ([`Board`]) | at changes of state |
//! | restarts by role and reason | supervisor ([`Board`]) | at deaths |
//! | report (phase, progress, PeerID, port) | the child in the seat ([`BoardWriter`]) | as it works |
//! | work (jobs, tokens, times, batches, device) | the worker in the seat | as it works |
//! | [`Figures`](crate::figures::Figures), as bytes | netd | each second |
//!
//! Between two children, after the reap of the first, the supervisor zeroes what the child wrote. Fields are
//! read one by one: a snapshot is not a transaction, except that all of a child's fields are of one
//! generation. Numbers are counters and gauges for people and for the watchdog; nothing is decided
//! from them that could lose data.

use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;

use super::layout::{
    BOARD_MAGIC, BOARD_SLOTS, BoardLayout, ChildSlot, LAYOUT_VERSION, ReportPart, TEXT_BYTES, Text,
};
use super::segment::{SegmentError, SmallSegment};
use super::sync::{AtomicU64, Ordering, fence};
use crate::block::Span;
use crate::clock::monotonic_ns;
use crate::control::{BoardSeat, Role};
use crate::ids::{Generation, GroupId, Rank, WorkerId, WorldSize};

mod figures;
mod view;
mod words;
mod work;
mod writer;

pub use view::{BoardSnapshot, BoardView, ChildSnapshot};
pub use words::{ChildState, Phase, RestartReason};
pub use writer::BoardWriter;

/// The board in `/proc/PID/maps` and in messages.
const BOARD_NAME: &str = "sepal-board";

const BOARD_BYTES: usize = size_of::<BoardLayout>();

/// Times that a snapshot of one child is begun again when the child is replaced meanwhile.
const SNAPSHOT_TRIES: u32 = 4;

/// Why a board could not be made or opened.
#[derive(Debug, thiserror::Error)]
pub enum BoardError {
    /// The segment could not be made or mapped.
    #[error(transparent)]
    Segment(#[from] SegmentError),
    /// The segment holds something else, or the board of another build.
    #[error(
        "segment {BOARD_NAME} holds no board of layout version {LAYOUT_VERSION}: magic \
         {magic:#018x}, version {version}"
    )]
    NoBoard {
        /// Magic found.
        magic: u64,
        /// Layout version found.
        version: u64,
    },
    /// There is no such child slot.
    #[error("board has {BOARD_SLOTS} child slots and no slot {0}")]
    NoSlot(u32),
    /// The seat belongs to another generation: this process is stale.
    #[error("seat {slot} of the board belongs to generation {found}, not to {expected}")]
    Stale {
        slot: u32,
        /// Generation of the process that asked.
        expected: Generation,
        /// Generation on the board.
        found: Generation,
    },
    /// A text is longer than its place.
    #[error("text of {0} bytes does not fit the {TEXT_BYTES} bytes it has on the board")]
    LongText(usize),
}

/// Who takes a seat.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Occupant {
    pub role: Role,
    /// How often this child was started.
    pub generation: Generation,
    /// Which worker, if it is one.
    pub worker: Option<WorkerId>,
}

/// The supervisor's board.
#[derive(Debug)]
pub struct Board {
    view: BoardView,
}

impl Board {
    /// Makes the board of `instance`, with all seats vacant.
    ///
    /// # Errors
    /// [`BoardError::Segment`] when the segment cannot be made, [`BoardError::LongText`] for a long
    /// instance name.
    pub fn create(instance: &str, started_unix_s: u64) -> Result<Board, BoardError> {
        check_text(instance)?;
        let segment = SmallSegment::create(BOARD_NAME, BOARD_BYTES)?;
        let board = Board { view: BoardView::of(segment) };
        let header = &board.view.layout().header;
        header.version.store(LAYOUT_VERSION, Ordering::Relaxed);
        header.supervisor_pid.store(std::process::id().into(), Ordering::Relaxed);
        header.started_unix_s.store(started_unix_s, Ordering::Relaxed);
        header.instance.publish(instance)?;
        // SYNC POINT board.magic: publishes the header to the load in BoardView::open().
        header.magic.store(BOARD_MAGIC, Ordering::Release);
        Ok(board)
    }

    /// The board that this process made before it became another executable, as it is.
    ///
    /// # Errors
    /// [`BoardError::Segment`] when it cannot be mapped, [`BoardError::NoBoard`] when it is no board of
    /// this build.
    pub fn adopt(fd: OwnedFd) -> Result<Board, BoardError> {
        let segment = SmallSegment::adopt(BOARD_NAME, fd, BOARD_BYTES)?;
        Ok(Board { view: BoardView::checked(segment)? })
    }

    /// Gives the seat at `slot` to a child that is about to be spawned. The child that sat there
    /// must have been reaped.
    ///
    /// # Errors
    /// [`BoardError::NoSlot`].
    pub fn assign(&self, slot: u32, occupant: &Occupant) -> Result<(), BoardError> {
        let child = self.view.child(slot)?;
        let seat = &child.seat;
        // A reader that sees generation 0, or another than before, reads again.
        seat.generation.store(0, Ordering::Relaxed);
        // SYNC POINT board.generation: the 0 is visible before any of the stores below; pairs with
        // the fence in BoardView::child_snapshot().
        fence(Ordering::Release);
        child.report.reset();
        child.work.reset();
        if occupant.role == Role::Netd {
            self.view.layout().figures.reset();
        }
        let worker = occupant.worker.unwrap_or_else(|| WorkerId::solo(GroupId(0)));
        seat.role.store(role_word(occupant.role), Ordering::Relaxed);
        seat.pid.store(0, Ordering::Relaxed);
        seat.state.store(ChildState::Starting as u64, Ordering::Relaxed);
        seat.group.store(worker.group.0.into(), Ordering::Relaxed);
        seat.rank.store(worker.rank.0.into(), Ordering::Relaxed);
        seat.world_size.store(
            occupant.worker.map_or(0, |worker| worker.world_size.0.into()),
            Ordering::Relaxed,
        );
        seat.span_start.store(0, Ordering::Relaxed);
        seat.span_end.store(0, Ordering::Relaxed);
        // SYNC POINT board.generation: publishes the seat to the load in child_snapshot() and
        // BoardWriter::open().
        seat.generation.store(occupant.generation.0.into(), Ordering::Release);
        Ok(())
    }

    /// Empties the seat at `slot`, whose child must have been reaped; it is in no snapshot any
    /// more.
    ///
    /// # Errors
    /// [`BoardError::NoSlot`].
    pub fn vacate(&self, slot: u32) -> Result<(), BoardError> {
        self.view.child(slot)?.seat.generation.store(0, Ordering::Relaxed);
        Ok(())
    }

    pub fn count_restart(&self, role: Role, reason: RestartReason) {
        let counts = self.view.layout().supervisor.restarts.get(role_index(role));
        if let Some(count) = counts.and_then(|row| row.get(reason as usize)) {
            writer::add(count, 1);
        }
    }

    /// A person asks how the swarm looks.
    pub fn viewed(&self) {
        self.view.layout().supervisor.viewed_ns.store(monotonic_ns(), Ordering::Relaxed);
    }

    /// Shows the process id of the child at `slot`.
    ///
    /// # Errors
    /// [`BoardError::NoSlot`].
    pub fn set_pid(&self, slot: u32, pid: u32) -> Result<(), BoardError> {
        self.view.child(slot)?.seat.pid.store(pid.into(), Ordering::Relaxed);
        Ok(())
    }

    /// Shows the state of the child at `slot`.
    ///
    /// # Errors
    /// [`BoardError::NoSlot`].
    pub fn set_state(&self, slot: u32, state: ChildState) -> Result<(), BoardError> {
        self.view.child(slot)?.seat.state.store(state as u64, Ordering::Relaxed);
        Ok(())
    }

    /// Shows the span that the child at `slot` serves.
    ///
    /// # Errors
    /// [`BoardError::NoSlot`].
    pub fn set_span(&self, slot: u32, span: Span) -> Result<(), BoardError> {
        let seat = &self.view.child(slot)?.seat;
        // The end is 0 while the start changes, which reads as no span.
        seat.span_end.store(0, Ordering::Relaxed);
        seat.span_start.store(span.start().0.into(), Ordering::Relaxed);
        // SYNC POINT board.span: publishes the start to the load of the end in child_snapshot().
        seat.span_end.store(span.end().0.into(), Ordering::Release);
        Ok(())
    }

    /// Another descriptor of the board, for a child that reports on it.
    ///
    /// # Errors
    /// When the process is out of descriptors.
    pub fn try_clone(&self) -> io::Result<OwnedFd> {
        self.view.segment.try_clone()
    }

    /// Everything on the board.
    pub fn view(&self) -> &BoardView {
        &self.view
    }
}

impl Text {
    fn publish(&self, text: &str) -> Result<(), BoardError> {
        check_text(text)?;
        let mut bytes = [0; TEXT_BYTES];
        bytes[..text.len()].copy_from_slice(text.as_bytes());
        for (word, chunk) in self.words.iter().zip(bytes.as_chunks::<8>().0) {
            word.store(u64::from_le_bytes(*chunk), Ordering::Relaxed);
        }
        // SYNC POINT board.text: publishes the bytes to the load in text().
        self.len.store(text.len() as u64, Ordering::Release);
        Ok(())
    }

    fn text(&self) -> Option<String> {
        // SYNC POINT board.text: after this load the bytes are visible; pairs with publish().
        let len = usize::try_from(self.len.load(Ordering::Acquire)).ok()?;
        let mut bytes = Vec::with_capacity(TEXT_BYTES);
        bytes.extend(self.words.iter().flat_map(|word| word.load(Ordering::Relaxed).to_le_bytes()));
        let text = bytes.get(..len).filter(|text| !text.is_empty())?;
        String::from_utf8(text.to_vec()).ok()
    }
}

fn check_text(text: &str) -> Result<(), BoardError> {
    if text.len() <= TEXT_BYTES { Ok(()) } else { Err(BoardError::LongText(text.len())) }
}

fn role_word(role: Role) -> u64 {
    role_index(role) as u64 + 1
}

fn role_index(role: Role) -> usize {
    match role {
        Role::Netd => 0,
        Role::Worker => 1,
        Role::Prepare => 2,
    }
}

#[cfg(test)]
mod tests;
