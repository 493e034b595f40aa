//! The board: one segment per instance in which every process shows what it does. The supervisor
//! judges from it whether a child hangs; `sepal status`, health, metrics and the demo read it, also
//! while netd is down.
//!
//! Every field has one writer, so that no stores race:
//!
//! | Part | Writer | When |
//! | --- | --- | --- |
//! | header | supervisor ([`Board`]) | once, at creation |
//! | seat (role, pid, generation, worker, state, span) | supervisor ([`Board`]) | at changes of state |
//! | report (phase, progress, counters, PeerID, port) | the child in the seat ([`BoardWriter`]) | as it works |
//!
//! Between two children, after the reap of the first, the supervisor zeroes the report. Fields are
//! read one by one: a snapshot is not a transaction, except that all of a child's fields are of one
//! generation. Numbers are counters and gauges for people and for the watchdog; nothing is decided
//! from them that could lose data.

use std::time::Duration;

use nix::time::{ClockId, clock_gettime};

use super::layout::{
    BOARD_MAGIC, BOARD_SLOTS, BoardLayout, ChildSlot, LAYOUT_VERSION, ReportPart, TEXT_BYTES,
    TROUBLES, Text,
};
use super::segment::{NamedSegment, SegmentError};
use super::sync::{AtomicU64, Ordering, fence};
use crate::block::Span;
use crate::control::{BoardSeat, Role};
use crate::ids::{Generation, GroupId, Rank, WorkerId, WorldSize};

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
        "segment {name} holds no board of layout version {LAYOUT_VERSION}: magic \
         {magic:#018x}, version {version}"
    )]
    NoBoard {
        /// Name of the segment.
        name: String,
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
        /// The slot.
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

/// State of a child as the supervisor sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u64)]
pub enum ChildState {
    /// Nothing was said yet.
    Unset = 0,
    /// Spawned, not ready.
    Starting = 1,
    /// Serves.
    Ready = 2,
    /// Was told to finish.
    Draining = 3,
    /// Died; will be started again after a pause.
    Backoff = 4,
    /// Will not be started again: its configuration or its device is at fault.
    Held = 5,
    /// Ended for good.
    Gone = 6,
    /// A value that this build does not know.
    Unknown = u64::MAX,
}

impl ChildState {
    const ALL: [ChildState; 7] = [
        ChildState::Unset,
        ChildState::Starting,
        ChildState::Ready,
        ChildState::Draining,
        ChildState::Backoff,
        ChildState::Held,
        ChildState::Gone,
    ];

    fn from_word(word: u64) -> ChildState {
        Self::ALL
            .into_iter()
            .find(|&state| state as u64 == word)
            .unwrap_or(ChildState::Unknown)
    }

    /// Its name in reports.
    pub fn name(self) -> &'static str {
        match self {
            ChildState::Unset => "unset",
            ChildState::Starting => "starting",
            ChildState::Ready => "ready",
            ChildState::Draining => "draining",
            ChildState::Backoff => "backoff",
            ChildState::Held => "held",
            ChildState::Gone => "gone",
            ChildState::Unknown => "unknown",
        }
    }
}

/// What a child is busy with. Progress is expected in all but [`Phase::Idle`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u64)]
pub enum Phase {
    /// Nothing to do: the progress counter may stand still for ever.
    Idle = 0,
    /// Reading weights; one progress per tensor.
    Loading = 1,
    /// Making kernels ready; one progress per module.
    Compiling = 2,
    /// Measuring throughput; one progress per repetition.
    Measuring = 3,
    /// Computing; one progress per unit.
    Unit = 4,
    /// netd's reactor; one progress per heartbeat.
    Reactor = 5,
    /// Reading and converting a checkpoint; one progress per tensor or piece of a download.
    Preparing = 6,
    /// A value that this build does not know.
    Unknown = u64::MAX,
}

impl Phase {
    const ALL: [Phase; 7] = [
        Phase::Idle,
        Phase::Loading,
        Phase::Compiling,
        Phase::Measuring,
        Phase::Unit,
        Phase::Reactor,
        Phase::Preparing,
    ];

    fn from_word(word: u64) -> Phase {
        Self::ALL
            .into_iter()
            .find(|&phase| phase as u64 == word)
            .unwrap_or(Phase::Unknown)
    }

    /// Its name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Phase::Idle => "idle",
            Phase::Loading => "loading",
            Phase::Compiling => "compiling",
            Phase::Measuring => "measuring",
            Phase::Unit => "unit",
            Phase::Reactor => "reactor",
            Phase::Preparing => "preparing",
            Phase::Unknown => "unknown",
        }
    }
}

/// Why requests of peers were not served as asked, as netd counts it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(usize)]
pub enum Trouble {
    /// A block, an adapter or an RPC that is not served here.
    NotServed = 0,
    /// It makes no sense: bytes, metadata, shapes or values.
    Malformed = 1,
    /// It is over a limit: tokens, rows, length, bytes.
    TooLarge = 2,
    /// There is no KV cache for it.
    NoMemory = 3,
    /// It, or the silence between two of its messages, took too long.
    TimedOut = 4,
    /// Its caller went away before the answer, or took none of it.
    Abandoned = 5,
    /// A step pushed by another server that belongs to no session here, or cannot be its next.
    Push = 6,
    /// It failed on this side.
    Failed = 7,
    /// A record of the DHT that holds nonsense, or is of a clock that is far off, or is over the bounds of the store: dropped.
    BadRecord = 8,
    /// Its peer holds as much KV cache as it may while others want some.
    OverShare = 9,
}

impl Trouble {
    /// All kinds, in the order of the board.
    pub const ALL: [Trouble; TROUBLES] = [
        Trouble::NotServed,
        Trouble::Malformed,
        Trouble::TooLarge,
        Trouble::NoMemory,
        Trouble::TimedOut,
        Trouble::Abandoned,
        Trouble::Push,
        Trouble::Failed,
        Trouble::BadRecord,
        Trouble::OverShare,
    ];

    /// Its name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Trouble::NotServed => "not_served",
            Trouble::Malformed => "malformed",
            Trouble::TooLarge => "too_large",
            Trouble::NoMemory => "no_memory",
            Trouble::TimedOut => "timed_out",
            Trouble::Abandoned => "abandoned",
            Trouble::Push => "push",
            Trouble::Failed => "failed",
            Trouble::BadRecord => "bad_record",
            Trouble::OverShare => "over_share",
        }
    }
}

/// Who takes a seat.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Occupant {
    /// Its role.
    pub role: Role,
    /// How often this child was started.
    pub generation: Generation,
    /// Which worker, if it is one.
    pub worker: Option<WorkerId>,
}

/// The supervisor's board. Owns the name.
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
    pub fn create(name: &str, instance: &str, started_unix_s: u64) -> Result<Board, BoardError> {
        check_text(instance)?;
        let board = Board {
            view: BoardView {
                segment: NamedSegment::create(name, BOARD_BYTES)?,
            },
        };
        let header = &board.view.layout().header;
        header.version.store(LAYOUT_VERSION, Ordering::Relaxed);
        header
            .supervisor_pid
            .store(std::process::id().into(), Ordering::Relaxed);
        header
            .started_unix_s
            .store(started_unix_s, Ordering::Relaxed);
        header.instance.publish(instance)?;
        // SYNC POINT board.magic: publishes the header to the load in BoardView::open().
        header.magic.store(BOARD_MAGIC, Ordering::Release);
        Ok(board)
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
        let worker = occupant
            .worker
            .unwrap_or_else(|| WorkerId::solo(GroupId(0)));
        seat.role.store(role_word(occupant.role), Ordering::Relaxed);
        seat.pid.store(0, Ordering::Relaxed);
        seat.state
            .store(ChildState::Starting as u64, Ordering::Relaxed);
        seat.group.store(worker.group.0.into(), Ordering::Relaxed);
        seat.rank.store(worker.rank.0.into(), Ordering::Relaxed);
        seat.world_size.store(
            occupant
                .worker
                .map_or(0, |worker| worker.world_size.0.into()),
            Ordering::Relaxed,
        );
        seat.span_start.store(0, Ordering::Relaxed);
        seat.span_end.store(0, Ordering::Relaxed);
        // SYNC POINT board.generation: publishes the seat to the load in child_snapshot() and
        // BoardWriter::open().
        seat.generation
            .store(occupant.generation.0.into(), Ordering::Release);
        Ok(())
    }

    /// Empties the seat at `slot`, whose child must have been reaped; it is in no snapshot any
    /// more.
    ///
    /// # Errors
    /// [`BoardError::NoSlot`].
    pub fn vacate(&self, slot: u32) -> Result<(), BoardError> {
        self.view
            .child(slot)?
            .seat
            .generation
            .store(0, Ordering::Relaxed);
        Ok(())
    }

    /// Shows the process id of the child at `slot`.
    ///
    /// # Errors
    /// [`BoardError::NoSlot`].
    pub fn set_pid(&self, slot: u32, pid: u32) -> Result<(), BoardError> {
        self.view
            .child(slot)?
            .seat
            .pid
            .store(pid.into(), Ordering::Relaxed);
        Ok(())
    }

    /// Shows the state of the child at `slot`.
    ///
    /// # Errors
    /// [`BoardError::NoSlot`].
    pub fn set_state(&self, slot: u32, state: ChildState) -> Result<(), BoardError> {
        self.view
            .child(slot)?
            .seat
            .state
            .store(state as u64, Ordering::Relaxed);
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
        seat.span_start
            .store(span.start().0.into(), Ordering::Relaxed);
        // SYNC POINT board.span: publishes the start to the load of the end in child_snapshot().
        seat.span_end.store(span.end().0.into(), Ordering::Release);
        Ok(())
    }

    /// Everything on the board.
    pub fn view(&self) -> &BoardView {
        &self.view
    }
}

/// The board as anybody may read it.
#[derive(Debug)]
pub struct BoardView {
    segment: NamedSegment,
}

/// All of the board at about one time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BoardSnapshot {
    /// Name of the instance.
    pub instance: String,
    /// Process id of the supervisor.
    pub supervisor_pid: u32,
    /// When the supervisor started, seconds since 1970.
    pub started_unix_s: u64,
    /// The seats that are taken.
    pub children: Vec<ChildSnapshot>,
}

/// One child at about one time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChildSnapshot {
    /// Its slot.
    pub slot: u32,
    /// How often it was started.
    pub generation: Generation,
    /// Its role; `None` if this build does not know it.
    pub role: Option<Role>,
    /// Its process id; 0 before it was spawned.
    pub pid: u32,
    /// Its state.
    pub state: ChildState,
    /// Which worker, if it is one.
    pub worker: Option<WorkerId>,
    /// What it serves, if that is known.
    pub span: Option<Span>,
    /// What it is busy with.
    pub phase: Phase,
    /// Counts up whenever something got done.
    pub progress: u64,
    /// When the phase began, CLOCK_MONOTONIC.
    pub phase_started_ns: u64,
    /// How long the progress counter may stand still in this phase; zero = for ever.
    pub phase_limit: Duration,
    /// Jobs answered.
    pub jobs_done: u64,
    /// Time that those jobs waited in the worker, in all.
    pub queued: Duration,
    /// Time that those jobs were computed, in all.
    pub computed: Duration,
    /// Sessions open (netd).
    pub sessions_open: u64,
    /// Tokens of KV cache not leased (netd).
    pub kv_tokens_free: u64,
    /// Requests that were not served as asked, by [`Trouble`] (netd).
    pub troubles: [u64; TROUBLES],
    /// Port of the swarm (netd).
    pub net_port: Option<u16>,
    /// PeerID in base58 (netd).
    pub peer_id: Option<String>,
}

impl BoardView {
    /// Maps the board that the supervisor made.
    ///
    /// # Errors
    /// [`BoardError::Segment`] when it is gone, [`BoardError::NoBoard`] when it is no board of this
    /// build.
    pub fn open(name: &str) -> Result<BoardView, BoardError> {
        let view = BoardView {
            segment: NamedSegment::open(name, BOARD_BYTES)?,
        };
        let header = &view.layout().header;
        // SYNC POINT board.magic: after this load the header is visible; pairs with the store in
        // Board::create().
        let magic = header.magic.load(Ordering::Acquire);
        let version = header.version.load(Ordering::Relaxed);
        if (magic, version) != (BOARD_MAGIC, LAYOUT_VERSION) {
            return Err(BoardError::NoBoard {
                name: name.to_owned(),
                magic,
                version,
            });
        }
        Ok(view)
    }

    /// Name of the segment.
    pub fn name(&self) -> &str {
        self.segment.name()
    }

    /// Everything on the board.
    pub fn snapshot(&self) -> BoardSnapshot {
        let header = &self.layout().header;
        let slots = 0..u32::try_from(BOARD_SLOTS).expect("a board has few slots");
        BoardSnapshot {
            instance: header.instance.text().unwrap_or_default(),
            supervisor_pid: narrow(header.supervisor_pid.load(Ordering::Relaxed)),
            started_unix_s: header.started_unix_s.load(Ordering::Relaxed),
            children: slots.filter_map(|slot| self.child_snapshot(slot)).collect(),
        }
    }

    /// The child at `slot`; `None` for a vacant seat, one that is being taken right now, and a slot
    /// that does not exist.
    pub fn child_snapshot(&self, slot: u32) -> Option<ChildSnapshot> {
        let child = self.child(slot).ok()?;
        for _ in 0..SNAPSHOT_TRIES {
            // SYNC POINT board.generation: after this load the seat of that generation is visible;
            // pairs with assign().
            let generation = child.seat.generation.load(Ordering::Acquire);
            if generation == 0 {
                return None;
            }
            let snapshot = read_child(slot, narrow(generation), child);
            // SYNC POINT board.generation: had a field above come from a later assign(), the load
            // below would see that the generation changed; pairs with the fence in assign().
            fence(Ordering::Acquire);
            if child.seat.generation.load(Ordering::Relaxed) == generation {
                return Some(snapshot);
            }
        }
        None
    }

    fn child(&self, slot: u32) -> Result<&ChildSlot, BoardError> {
        self.layout()
            .children
            .get(slot as usize)
            .ok_or(BoardError::NoSlot(slot))
    }

    fn layout(&self) -> &BoardLayout {
        // SAFETY: the segment has BOARD_BYTES mapped, page-aligned bytes while `self` lives; the
        // layout is made of atomics alone, for which every content is valid and stores of other
        // processes are no data race.
        unsafe { self.segment.base().cast::<BoardLayout>().as_ref() }
    }
}

/// A child's own seat. Every method is one or two stores: no lock, no system call but the clock in
/// [`enter`](Self::enter).
#[derive(Debug)]
pub struct BoardWriter {
    view: BoardView,
    slot: u32,
}

impl BoardWriter {
    /// Opens the seat that the supervisor gave to this process. One process opens it once.
    ///
    /// # Errors
    /// [`BoardError::Stale`] when the seat belongs to another generation by now, else as
    /// [`BoardView::open`].
    pub fn open(seat: &BoardSeat, generation: Generation) -> Result<BoardWriter, BoardError> {
        let view = BoardView::open(&seat.name)?;
        let child = view.child(seat.slot)?;
        // SYNC POINT board.generation: pairs with assign().
        let found = Generation(narrow(child.seat.generation.load(Ordering::Acquire)));
        if found != generation {
            return Err(BoardError::Stale {
                slot: seat.slot,
                expected: generation,
                found,
            });
        }
        Ok(BoardWriter {
            view,
            slot: seat.slot,
        })
    }

    /// Begins a phase in which progress is made at least every `limit` (to the millisecond; zero =
    /// no limit).
    pub fn enter(&self, phase: Phase, limit: Duration) {
        let report = self.report();
        let limit_ms = u64::try_from(limit.as_millis()).unwrap_or(u64::MAX);
        report.phase_limit_ms.store(limit_ms, Ordering::Relaxed);
        report
            .phase_started_ns
            .store(monotonic_ns(), Ordering::Relaxed);
        add(&report.progress, 1);
        // SYNC POINT board.phase: publishes limit, start and progress to the load in read_child(),
        // so that a new phase is never judged by the limit of the one before.
        report.phase.store(phase as u64, Ordering::Release);
    }

    /// One unit, tensor, module or heartbeat is done.
    pub fn progress(&self) {
        add(&self.report().progress, 1);
    }

    /// One job was answered that had waited for `queue_ns` and was computed for `compute_ns`.
    pub fn job_done(&self, queue_ns: u64, compute_ns: u64) {
        let report = self.report();
        add(&report.queue_ns, queue_ns);
        add(&report.compute_ns, compute_ns);
        add(&report.jobs_done, 1);
    }

    /// Shows the number of open sessions.
    pub fn set_sessions_open(&self, sessions: u64) {
        self.report()
            .sessions_open
            .store(sessions, Ordering::Relaxed);
    }

    /// Shows the tokens of KV cache that are not leased.
    pub fn set_kv_tokens_free(&self, tokens: u64) {
        self.report()
            .kv_tokens_free
            .store(tokens, Ordering::Relaxed);
    }

    /// Shows how many requests were not served as asked, by [`Trouble`].
    pub fn set_troubles(&self, counts: [u64; TROUBLES]) {
        for (word, count) in self.report().troubles.iter().zip(counts) {
            word.store(count, Ordering::Relaxed);
        }
    }

    /// Shows the port of the swarm.
    pub fn set_net_port(&self, port: u16) {
        self.report().net_port.store(port.into(), Ordering::Relaxed);
    }

    /// Shows the PeerID. Once in the life of a process.
    ///
    /// # Errors
    /// [`BoardError::LongText`] when it has more than [`TEXT_BYTES`] bytes.
    pub fn set_peer_id(&self, peer_id: &str) -> Result<(), BoardError> {
        self.report().peer_id.publish(peer_id)
    }

    fn report(&self) -> &ReportPart {
        &self
            .view
            .child(self.slot)
            .expect("open() found the slot")
            .report
    }
}

/// CLOCK_MONOTONIC in nanoseconds: the clock of all times on the board, the same in all processes.
pub fn monotonic_ns() -> u64 {
    let now = clock_gettime(ClockId::CLOCK_MONOTONIC).expect("Linux has a monotonic clock");
    u64::try_from(Duration::from(now).as_nanos()).unwrap_or(u64::MAX)
}

impl ReportPart {
    fn reset(&self) {
        let words = [
            &self.phase,
            &self.progress,
            &self.phase_started_ns,
            &self.phase_limit_ms,
            &self.jobs_done,
            &self.queue_ns,
            &self.compute_ns,
            &self.sessions_open,
            &self.kv_tokens_free,
            &self.net_port,
            &self.peer_id.len,
        ];
        for word in words.into_iter().chain(&self.troubles) {
            word.store(0, Ordering::Relaxed);
        }
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
        bytes.extend(
            self.words
                .iter()
                .flat_map(|word| word.load(Ordering::Relaxed).to_le_bytes()),
        );
        let text = bytes.get(..len).filter(|text| !text.is_empty())?;
        String::from_utf8(text.to_vec()).ok()
    }
}

fn read_child(slot: u32, generation: u32, child: &ChildSlot) -> ChildSnapshot {
    let (seat, report) = (&child.seat, &child.report);
    let load = |word: &AtomicU64| word.load(Ordering::Relaxed);
    // SYNC POINT board.phase: pairs with BoardWriter::enter().
    let phase = Phase::from_word(report.phase.load(Ordering::Acquire));
    // SYNC POINT board.span: pairs with Board::set_span().
    let span_end = seat.span_end.load(Ordering::Acquire);
    ChildSnapshot {
        slot,
        generation: Generation(generation),
        role: role_from_word(load(&seat.role)),
        pid: narrow(load(&seat.pid)),
        state: ChildState::from_word(load(&seat.state)),
        worker: (load(&seat.world_size) > 0).then(|| WorkerId {
            group: GroupId(narrow_u16(load(&seat.group))),
            rank: Rank(narrow_u16(load(&seat.rank))),
            world_size: WorldSize(narrow_u16(load(&seat.world_size))),
        }),
        span: Span::new(narrow(load(&seat.span_start)), narrow(span_end)).ok(),
        phase,
        progress: load(&report.progress),
        phase_started_ns: load(&report.phase_started_ns),
        phase_limit: Duration::from_millis(load(&report.phase_limit_ms)),
        jobs_done: load(&report.jobs_done),
        queued: Duration::from_nanos(load(&report.queue_ns)),
        computed: Duration::from_nanos(load(&report.compute_ns)),
        sessions_open: load(&report.sessions_open),
        kv_tokens_free: load(&report.kv_tokens_free),
        troubles: report.troubles.each_ref().map(load),
        net_port: u16::try_from(load(&report.net_port))
            .ok()
            .filter(|&port| port > 0),
        peer_id: report.peer_id.text(),
    }
}

/// Adds to a counter that this process alone writes.
fn add(counter: &AtomicU64, amount: u64) {
    counter.store(
        counter.load(Ordering::Relaxed).wrapping_add(amount),
        Ordering::Relaxed,
    );
}

fn check_text(text: &str) -> Result<(), BoardError> {
    if text.len() <= TEXT_BYTES {
        Ok(())
    } else {
        Err(BoardError::LongText(text.len()))
    }
}

fn role_word(role: Role) -> u64 {
    match role {
        Role::Netd => 1,
        Role::Worker => 2,
        Role::Prepare => 3,
    }
}

fn role_from_word(word: u64) -> Option<Role> {
    [Role::Netd, Role::Worker, Role::Prepare]
        .into_iter()
        .find(|&role| role_word(role) == word)
}

/// A number from the board as what it is shown as; one that does not fit was never written by this
/// build.
fn narrow(word: u64) -> u32 {
    u32::try_from(word).unwrap_or(u32::MAX)
}

fn narrow_u16(word: u64) -> u16 {
    u16::try_from(word).unwrap_or(u16::MAX)
}

#[cfg(test)]
mod tests;
