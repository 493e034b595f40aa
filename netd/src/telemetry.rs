//! What netd counts of its work: steps and their times, requests, tokens, open sessions. Counters on
//! the path of a step are atomics without locks; a session writes its own row of the board. Figures
//! of the last minute are summed up once a second ([`minute`]), and `crate::metrics` shows all of
//! it to Prometheus.
//!
//! The counters live as long as the process, over all services of a run.

pub mod histogram;
pub mod minute;
mod rows;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use p2p::P2p;
use parking_lot::Mutex;
use shared::block::BlockIndex;
use shared::job::WorkKind;
use shared::shm::board::{Announced, BoardWriter, StepPart};
use shared::shm::layout::{STEP_PARTS, WORK_KINDS};
use swarm::dht::driver::Dht;

use crate::workers::link::JobTimes;
use histogram::{Histogram, Histograms};
use rows::Rows;
pub use rows::ShownSession;

/// Steps so far, and their times.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepFigures {
    /// Steps answered.
    pub count: u64,
    /// Median.
    pub p50: Duration,
    /// 99th percentile.
    pub p99: Duration,
}

/// Requests of one kind that were answered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Answered {
    /// Requests: steps, or forward and backward passes.
    pub requests: u64,
    /// Tokens of all their rows.
    pub tokens: u64,
}

/// What became of a step that another server pushed to a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PushedStep {
    /// It came before the client's copy and was answered.
    First,
    /// It came after the client's copy and was dropped.
    Late,
    /// It came first, and the client's copy has other values.
    Differs,
}

impl PushedStep {
    /// All of them.
    pub const ALL: [PushedStep; 3] = [PushedStep::First, PushedStep::Late, PushedStep::Differs];

    /// As metrics name it.
    pub fn name(self) -> &'static str {
        match self {
            PushedStep::First => "first",
            PushedStep::Late => "late",
            PushedStep::Differs => "differs",
        }
    }
}

#[derive(Debug, Default)]
struct AnsweredCounts {
    requests: AtomicU64,
    tokens: AtomicU64,
}

/// All counters of this process.
#[derive(Debug, Default)]
pub struct Telemetry {
    parts: [Histogram; STEP_PARTS],
    answered: [AnsweredCounts; WORK_KINDS],
    pushed: [AtomicU64; PushedStep::ALL.len()],
    rows: Arc<Rows>,
    announced: Mutex<Announced>,
    swarm: OnceLock<(P2p, Dht)>,
}

impl Telemetry {
    /// Counters whose sessions are shown on `board`.
    pub fn on(board: Arc<BoardWriter>) -> Telemetry {
        Telemetry { rows: Arc::new(Rows::on(board)), ..Telemetry::default() }
    }

    /// The board, if there is one.
    pub fn board(&self) -> Option<&Arc<BoardWriter>> {
        self.rows.board()
    }

    /// A step of `batch` rows with `tokens` tokens each was answered `total` after the last byte of
    /// its request came. A message without tokens only rolls back; it is no step and not counted.
    pub fn step(&self, total: Duration, times: JobTimes, batch: u32, tokens: u32) {
        let all_tokens = u64::from(batch) * u64::from(tokens);
        if all_tokens == 0 {
            return;
        }
        let queue = Duration::from_nanos(times.queue_ns);
        let compute = Duration::from_nanos(times.compute_ns);
        let network = total.saturating_sub(queue).saturating_sub(compute);
        for (part, time) in [
            (StepPart::Total, total),
            (StepPart::Network, network),
            (StepPart::Queue, queue),
            (StepPart::Compute, compute),
        ] {
            if let Some(histogram) = self.parts.get(part as usize) {
                histogram.record(time);
            }
        }
        self.answered(WorkKind::of_step(batch, tokens), all_tokens);
    }

    /// A request of this kind was answered.
    pub fn answered(&self, kind: WorkKind, tokens: u64) {
        if let Some(counts) = self.answered.get(kind as usize) {
            counts.requests.fetch_add(1, Ordering::Relaxed);
            counts.tokens.fetch_add(tokens, Ordering::Relaxed);
        }
    }

    /// A pushed step came to this.
    pub fn pushed(&self, outcome: PushedStep) {
        if let Some(count) = self.pushed.get(outcome as usize) {
            count.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Pushed steps by what became of them, in the order of [`PushedStep::ALL`].
    pub fn all_pushed(&self) -> [u64; PushedStep::ALL.len()] {
        self.pushed.each_ref().map(|count| count.load(Ordering::Relaxed))
    }

    /// A session opens; it is shown until the value is dropped.
    pub fn session(&self, blocks: &[BlockIndex], rows: u32, max_length: u32) -> ShownSession {
        Rows::open(&self.rows, blocks, rows, max_length)
    }

    /// Sessions that were opened.
    pub fn sessions_opened(&self) -> u64 {
        self.rows.opened()
    }

    /// What was answered, by kind.
    pub fn all_answered(&self) -> [Answered; WORK_KINDS] {
        self.answered.each_ref().map(|counts| Answered {
            requests: counts.requests.load(Ordering::Relaxed),
            tokens: counts.tokens.load(Ordering::Relaxed),
        })
    }

    /// Times of all steps, in the order of [`StepPart::ALL`].
    pub fn histograms(&self) -> [Histograms; STEP_PARTS] {
        self.parts.each_ref().map(Histogram::read)
    }

    /// Figures over all steps so far.
    pub fn figures(&self) -> StepFigures {
        let [total, ..] = self.histograms();
        let at = |share| total.quantile(share);
        StepFigures { count: total.count(), p50: at(0.5), p99: at(0.99) }
    }

    /// Notes what the server tells the swarm of itself.
    pub fn set_announced(&self, announced: Announced) {
        *self.announced.lock() = announced;
    }

    /// What the server tells the swarm of itself.
    pub fn announced(&self) -> Announced {
        *self.announced.lock()
    }

    /// The swarm is entered through these.
    pub fn entered(&self, p2p: P2p, dht: Dht) {
        // Once in the life of a process.
        let _ = self.swarm.set((p2p, dht));
    }

    /// The nodes of libp2p and of the DHT, once the swarm is entered.
    pub fn swarm(&self) -> Option<&(P2p, Dht)> {
        self.swarm.get()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parts_of_a_step_add_up_to_its_time() {
        let telemetry = Telemetry::default();
        let times = JobTimes { queue_ns: 2_000_000, compute_ns: 5_000_000 };
        telemetry.step(Duration::from_millis(10), times, 3, 1);
        // Clocks of two processes may differ by a little: a part is never negative.
        telemetry.step(Duration::from_millis(1), times, 2, 20);
        // A message that only rolls back is no step.
        telemetry.step(Duration::from_millis(500), JobTimes::default(), 2, 0);
        let [total, network, queue, compute] =
            telemetry.histograms().map(|histogram| histogram.sum().as_millis());
        assert_eq!((total, network, queue, compute), (11, 3, 4, 10));
        let [decode, prefill, ..] = telemetry.all_answered();
        assert_eq!((decode.requests, decode.tokens), (1, 3));
        assert_eq!((prefill.requests, prefill.tokens), (1, 40));
        assert_eq!(telemetry.figures().count, 2);
    }
}
