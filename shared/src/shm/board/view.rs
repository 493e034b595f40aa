//! What readers see of the board.

use super::figures::LastFigures;
use super::*;
use crate::figures::Figures;
use crate::figures::server::{RestartCount, ServerFigures, WorkerFigures};

/// The board as anybody may read it.
#[derive(Debug)]
pub struct BoardView {
    pub(super) segment: SmallSegment,
    pub(super) last: LastFigures,
}

/// All of the board at about one time.
#[derive(Clone, Debug, PartialEq)]
pub struct BoardSnapshot {
    /// Name of the instance.
    pub instance: String,
    /// Process id of the supervisor.
    pub supervisor_pid: u32,
    /// When the supervisor started, seconds since 1970.
    pub started_unix_s: u64,
    /// The seats that are taken.
    pub children: Vec<ChildSnapshot>,
    /// What netd shows while it runs, and restarts.
    pub figures: Figures,
}

/// One child at about one time.
#[derive(Clone, Debug, PartialEq)]
pub struct ChildSnapshot {
    pub slot: u32,
    /// How often it was started.
    pub generation: Generation,
    /// Its role; `None` if this build does not know it.
    pub role: Option<Role>,
    /// Its process id; 0 before it was spawned.
    pub pid: u32,
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
    /// How long the progress counter may stand still in a phase of the start; zero = for ever.
    pub phase_limit: Duration,
    /// What it computed (workers).
    pub work: WorkerFigures,
    /// Port of the swarm (netd).
    pub net_port: Option<u16>,
    /// PeerID in base58 (netd).
    pub peer_id: Option<String>,
}

impl BoardView {
    /// Maps the board that the supervisor made.
    ///
    /// # Errors
    /// [`BoardError::Segment`] when it cannot be mapped, [`BoardError::NoBoard`] when it is no
    /// board of this build.
    pub(super) fn open(fd: OwnedFd) -> Result<BoardView, BoardError> {
        BoardView::checked(SmallSegment::open(BOARD_NAME, fd, BOARD_BYTES)?)
    }

    pub(super) fn of(segment: SmallSegment) -> BoardView {
        BoardView { segment, last: LastFigures::default() }
    }

    /// The view of a board in this segment, which was made earlier.
    pub(super) fn checked(segment: SmallSegment) -> Result<BoardView, BoardError> {
        let view = BoardView::of(segment);
        let header = &view.layout().header;
        // SYNC POINT board.magic: after this load the header is visible; pairs with the store in
        // Board::create().
        let magic = header.magic.load(Ordering::Acquire);
        let version = header.version.load(Ordering::Relaxed);
        if (magic, version) != (BOARD_MAGIC, LAYOUT_VERSION) {
            return Err(BoardError::NoBoard { magic, version });
        }
        Ok(view)
    }

    /// Everything on the board.
    pub fn snapshot(&self) -> BoardSnapshot {
        let header = &self.layout().header;
        let children = self.children();
        let restarts = self.restarts().into_iter().filter(|of| of.count > 0).collect();
        let shown = running_netd(&children).map(|netd| self.figures_of(netd)).unwrap_or_default();
        BoardSnapshot {
            instance: header.instance.text().unwrap_or_default(),
            supervisor_pid: narrow(header.supervisor_pid.load(Ordering::Relaxed)),
            started_unix_s: header.started_unix_s.load(Ordering::Relaxed),
            figures: Figures { restarts, metrics: None, web: None, ..shown },
            children,
        }
    }

    /// The seats that are taken.
    pub fn children(&self) -> Vec<ChildSnapshot> {
        let slots = 0..u32::try_from(BOARD_SLOTS).expect("a board has few slots");
        slots.filter_map(|slot| self.child_snapshot(slot)).collect()
    }

    /// What netd shows; `None` while it does not run.
    pub fn figures(&self) -> Option<Figures> {
        running_netd(&self.children()).map(|netd| self.figures_of(netd))
    }

    /// What supervisor and workers count.
    pub fn server_figures(&self) -> ServerFigures {
        let worker = |child: ChildSnapshot| {
            let id = child.worker.filter(|_| child.role == Some(Role::Worker))?;
            // Rank 0 of a group speaks for all of its ranks.
            let batches = child.work.batches.filter(|_| id.rank == Rank(0));
            let ready = child.state == ChildState::Ready;
            Some((id, WorkerFigures { ready, batches, ..child.work }))
        };
        ServerFigures {
            started_unix_s: self.layout().header.started_unix_s.load(Ordering::Relaxed),
            build: true,
            restarts: self.restarts(),
            workers: self.children().into_iter().filter_map(worker).collect(),
        }
    }

    /// Restarts by role and reason, those included that did not happen.
    pub fn restarts(&self) -> Vec<RestartCount> {
        let counts = &self.layout().supervisor.restarts;
        let roles = [Role::Netd, Role::Worker, Role::Prepare].into_iter().zip(counts);
        let count = |role: Role, reason: RestartReason, count: &AtomicU64| RestartCount {
            role: role.name().to_owned(),
            reason: reason.name().to_owned(),
            count: count.load(Ordering::Relaxed),
        };
        let of_role = |(role, row): (Role, &'_ [AtomicU64; RestartReason::ALL.len()])| {
            let reasons = RestartReason::ALL.into_iter().zip(row);
            reasons.map(|(reason, word)| count(role, reason, word)).collect::<Vec<_>>()
        };
        roles.flat_map(of_role).collect()
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

    pub(super) fn child(&self, slot: u32) -> Result<&ChildSlot, BoardError> {
        self.layout().children.get(slot as usize).ok_or(BoardError::NoSlot(slot))
    }

    pub(super) fn layout(&self) -> &BoardLayout {
        // SAFETY: the segment has BOARD_BYTES mapped, page-aligned bytes while `self` lives; the
        // layout is made of atomics alone, for which every content is valid and stores of other
        // processes are no data race.
        unsafe { self.segment.base().cast::<BoardLayout>().as_ref() }
    }
}

/// The generation of the netd that runs, if one of these children is it.
fn running_netd(children: &[ChildSnapshot]) -> Option<Generation> {
    let is_netd = |child: &&ChildSnapshot| child.role == Some(Role::Netd);
    let netd = children.iter().find(is_netd)?;
    let runs = [ChildState::Starting, ChildState::Ready, ChildState::Draining];
    runs.contains(&netd.state).then_some(netd.generation)
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
        work: child.work.figures(),
        net_port: u16::try_from(load(&report.net_port)).ok().filter(|&port| port > 0),
        peer_id: report.peer_id.text(),
    }
}

fn role_from_word(word: u64) -> Option<Role> {
    [Role::Netd, Role::Worker, Role::Prepare].into_iter().find(|&role| role_word(role) == word)
}

/// A number from the board as what it is shown as; one that does not fit was never written by this
/// build.
pub(super) fn narrow(word: u64) -> u32 {
    u32::try_from(word).unwrap_or(u32::MAX)
}

fn narrow_u16(word: u64) -> u16 {
    u16::try_from(word).unwrap_or(u16::MAX)
}
