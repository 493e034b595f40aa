//! What a child writes into its own seat.

use super::view::narrow;
use super::*;

/// A child's own seat. Every method is one or two stores: no lock, no system call but the clock in
/// [`enter`](Self::enter).
#[derive(Debug)]
pub struct BoardWriter {
    view: BoardView,
    slot: u32,
    heartbeat: Duration,
}

impl BoardWriter {
    /// Opens the seat that the supervisor gave to this process on the board behind `fd`. One
    /// process opens it once.
    ///
    /// # Errors
    /// [`BoardError::Segment`] when the board cannot be mapped, [`BoardError::NoBoard`] when it is
    /// no board of this build, [`BoardError::Stale`] when the seat belongs to another generation
    /// by now.
    pub fn open(
        fd: OwnedFd,
        seat: &BoardSeat,
        generation: Generation,
    ) -> Result<BoardWriter, BoardError> {
        let view = BoardView::open(fd)?;
        let child = view.child(seat.slot)?;
        // SYNC POINT board.generation: pairs with assign().
        let found = Generation(narrow(child.seat.generation.load(Ordering::Acquire)));
        if found != generation {
            return Err(BoardError::Stale { slot: seat.slot, expected: generation, found });
        }
        Ok(BoardWriter { view, slot: seat.slot, heartbeat: seat.heartbeat })
    }

    /// Longest time that the thread of the child's work may wait before it calls
    /// [`progress`](Self::progress).
    pub fn heartbeat(&self) -> Duration {
        self.heartbeat
    }

    /// Begins a phase. `limit`, to the millisecond, is the longest time between two calls of
    /// [`progress`](Self::progress) in a phase of the start ([`Phase::is_start`]; zero = no limit).
    /// In all other phases `--hang_timeout` holds and `limit` is zero.
    pub fn enter(&self, phase: Phase, limit: Duration) {
        let report = self.report();
        let limit_ms = u64::try_from(limit.as_millis()).unwrap_or(u64::MAX);
        report.phase_limit_ms.store(limit_ms, Ordering::Relaxed);
        report.phase_started_ns.store(monotonic_ns(), Ordering::Relaxed);
        add(&report.progress, 1);
        // SYNC POINT board.phase: publishes limit, start and progress to the load in read_child(),
        // so that a new phase is never judged by the limit of the one before.
        report.phase.store(phase as u64, Ordering::Release);
    }

    /// One unit, tensor, module or heartbeat is done.
    pub fn progress(&self) {
        add(&self.report().progress, 1);
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

    /// Everything on the board, as others show it too.
    pub fn view(&self) -> &BoardView {
        &self.view
    }

    pub(super) fn child(&self) -> &ChildSlot {
        self.view.child(self.slot).expect("open() found the slot")
    }

    fn report(&self) -> &ReportPart {
        &self.child().report
    }
}

impl ReportPart {
    pub(super) fn reset(&self) {
        let words = [
            &self.phase,
            &self.progress,
            &self.phase_started_ns,
            &self.phase_limit_ms,
            &self.net_port,
            &self.peer_id.len,
        ];
        for word in words {
            word.store(0, Ordering::Relaxed);
        }
    }
}

/// Adds to a counter that this process alone writes.
pub(super) fn add(counter: &AtomicU64, amount: u64) {
    counter.store(counter.load(Ordering::Relaxed).wrapping_add(amount), Ordering::Relaxed);
}
