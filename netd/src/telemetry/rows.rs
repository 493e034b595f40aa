//! The rows of open sessions on the board. A session takes a free row when it opens; when all are
//! taken it runs without one, and is counted all the same.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;
use shared::block::BlockIndex;
use shared::shm::board::{BoardWriter, SessionShape};
use shared::shm::layout::SESSION_ROWS;

#[derive(Debug, Default)]
pub(super) struct Rows {
    board: Option<Arc<BoardWriter>>,
    opened: AtomicU64,
    taken: Mutex<Vec<bool>>,
}

/// An open session, shown until it is dropped.
#[derive(Debug)]
pub struct ShownSession {
    rows: Arc<Rows>,
    row: Option<usize>,
    steps: u64,
}

impl Rows {
    pub(super) fn on(board: Arc<BoardWriter>) -> Rows {
        Rows { board: Some(board), taken: Mutex::new(vec![false; SESSION_ROWS]), ..Rows::default() }
    }

    pub(super) fn board(&self) -> Option<&Arc<BoardWriter>> {
        self.board.as_ref()
    }

    pub(super) fn opened(&self) -> u64 {
        self.opened.load(Ordering::Relaxed)
    }

    pub(super) fn open(
        rows: &Arc<Rows>,
        blocks: &[BlockIndex],
        batch: u32,
        max_length: u32,
    ) -> ShownSession {
        let number = rows.opened.fetch_add(1, Ordering::Relaxed) + 1;
        let row = rows.take();
        if let (Some(row), Some(board)) = (row, &rows.board) {
            let shape = SessionShape {
                number,
                first_block: blocks.iter().map(|block| block.0).min().unwrap_or(0),
                blocks: u32::try_from(blocks.len()).unwrap_or(u32::MAX),
                rows: batch,
                max_length,
            };
            board.open_session(row, &shape);
        }
        ShownSession { rows: rows.clone(), row, steps: 0 }
    }

    fn take(&self) -> Option<usize> {
        let mut taken = self.taken.lock();
        let row = taken.iter().position(|taken| !taken)?;
        taken[row] = true;
        Some(row)
    }
}

impl ShownSession {
    /// A step was answered, after which the cache holds `length` tokens per row.
    pub fn stepped(&mut self, length: u32) {
        self.steps += 1;
        if let (Some(row), Some(board)) = (self.row, &self.rows.board) {
            board.stepped(row, length, self.steps);
        }
    }
}

impl Drop for ShownSession {
    fn drop(&mut self) {
        let (Some(row), Some(board)) = (self.row, &self.rows.board) else { return };
        board.close_session(row);
        let mut taken = self.rows.taken.lock();
        if let Some(taken) = taken.get_mut(row) {
            *taken = false;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use shared::control::{BoardSeat, Role};
    use shared::ids::Generation;
    use shared::shm::board::{Board, Occupant};

    use super::*;

    #[test]
    fn sessions_beyond_the_rows_are_counted_and_not_shown() {
        let board = Board::create("x", 0).unwrap();
        let generation = Generation(1);
        board.assign(0, &Occupant { role: Role::Netd, generation, worker: None }).unwrap();
        let seat = BoardSeat { slot: 0, heartbeat: Duration::from_secs(1) };
        let writer = BoardWriter::open(board.try_clone().unwrap(), &seat, generation).unwrap();
        let rows = Arc::new(Rows::on(Arc::new(writer)));
        let open = || Rows::open(&rows, &[BlockIndex(4), BlockIndex(5)], 2, 64);
        let mut sessions: Vec<ShownSession> = (0..SESSION_ROWS + 3).map(|_| open()).collect();
        sessions.iter_mut().for_each(|session| session.stepped(9));
        assert_eq!(rows.opened(), SESSION_ROWS as u64 + 3);
        let shown = board.view().netd().sessions;
        assert_eq!(shown.len(), SESSION_ROWS);
        let first = shown[0];
        assert_eq!((first.shape.number, first.shape.first_block, first.shape.blocks), (1, 4, 2));
        assert_eq!((first.length, first.steps), (9, 1));
        sessions.truncate(1);
        sessions.push(open());
        let numbers: Vec<u64> =
            board.view().netd().sessions.iter().map(|session| session.shape.number).collect();
        assert_eq!(numbers, [1, SESSION_ROWS as u64 + 4]);
    }
}
