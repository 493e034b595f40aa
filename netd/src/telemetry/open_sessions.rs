//! Open sessions. The oldest are shown one by one; all are counted.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use shared::block::BlockIndex;
use shared::figures::{MAX_SESSIONS, SessionFigures};

/// All open sessions, by their numbers.
#[derive(Debug, Default)]
pub(super) struct OpenSessions {
    opened: AtomicU64,
    open: Mutex<BTreeMap<u64, Arc<OpenSession>>>,
}

/// An open session. Its task alone writes it, once a step and without a lock.
#[derive(Debug)]
struct OpenSession {
    first_block: u32,
    blocks: u32,
    rows: u32,
    max_length: u32,
    began: Instant,
    length: AtomicU32,
    steps: AtomicU64,
    /// When the last step was answered, in nanoseconds after `began`.
    last_step_ns: AtomicU64,
}

/// An open session, shown until it is dropped.
#[derive(Debug)]
pub struct ShownSession {
    all: Arc<OpenSessions>,
    number: u64,
    session: Arc<OpenSession>,
}

impl OpenSessions {
    pub(super) fn opened(&self) -> u64 {
        self.opened.load(Ordering::Relaxed)
    }

    pub(super) fn open(
        all: &Arc<OpenSessions>,
        blocks: &[BlockIndex],
        rows: u32,
        max_length: u32,
    ) -> ShownSession {
        let number = all.opened.fetch_add(1, Ordering::Relaxed) + 1;
        let session = Arc::new(OpenSession {
            first_block: blocks.iter().map(|block| block.0).min().unwrap_or(0),
            blocks: u32::try_from(blocks.len()).unwrap_or(u32::MAX),
            rows,
            max_length,
            began: Instant::now(),
            length: AtomicU32::new(0),
            steps: AtomicU64::new(0),
            last_step_ns: AtomicU64::new(0),
        });
        all.open.lock().insert(number, session.clone());
        ShownSession { all: all.clone(), number, session }
    }

    /// The oldest sessions, without their rates.
    pub(super) fn figures(&self) -> Vec<SessionFigures> {
        let open = self.open.lock();
        open.iter().take(MAX_SESSIONS).map(|(number, of)| of.figures(*number)).collect()
    }
}

impl OpenSession {
    fn figures(&self, number: u64) -> SessionFigures {
        let age = self.began.elapsed();
        let last = Duration::from_nanos(self.last_step_ns.load(Ordering::Relaxed));
        let end = u64::from(self.first_block) + u64::from(self.blocks);
        SessionFigures {
            number,
            span: format!("{}:{end}", self.first_block),
            rows: self.rows,
            length: self.length.load(Ordering::Relaxed),
            max_length: self.max_length,
            steps: self.steps.load(Ordering::Relaxed),
            age_s: age.as_secs_f64(),
            idle_s: age.saturating_sub(last).as_secs_f64(),
            tokens_per_s: 0.0,
        }
    }
}

impl ShownSession {
    /// A step was answered, after which the cache holds `length` tokens per row.
    pub fn stepped(&mut self, length: u32) {
        let session = &self.session;
        let nanos = u64::try_from(session.began.elapsed().as_nanos()).unwrap_or(u64::MAX);
        session.length.store(length, Ordering::Relaxed);
        session.steps.fetch_add(1, Ordering::Relaxed);
        session.last_step_ns.store(nanos, Ordering::Relaxed);
    }
}

impl Drop for ShownSession {
    fn drop(&mut self) {
        self.all.open.lock().remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sessions_beyond_the_most_are_counted_and_not_shown() {
        let all = Arc::new(OpenSessions::default());
        let open = || OpenSessions::open(&all, &[BlockIndex(4), BlockIndex(5)], 2, 64);
        let mut sessions: Vec<ShownSession> = (0..MAX_SESSIONS + 3).map(|_| open()).collect();
        sessions.iter_mut().for_each(|session| session.stepped(9));
        assert_eq!(all.opened(), MAX_SESSIONS as u64 + 3);
        let shown = all.figures();
        assert_eq!(shown.len(), MAX_SESSIONS);
        let first = &shown[0];
        assert_eq!((first.number, first.span.as_str(), first.rows), (1, "4:6", 2));
        assert_eq!((first.length, first.max_length, first.steps), (9, 64, 1));
        assert!(first.idle_s <= first.age_s);
        sessions.truncate(1);
        sessions.push(open());
        let numbers: Vec<u64> = all.figures().iter().map(|session| session.number).collect();
        assert_eq!(numbers, [1, MAX_SESSIONS as u64 + 4]);
    }
}
