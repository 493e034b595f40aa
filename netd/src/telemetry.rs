//! What netd counts of its work: steps and their times, requests, tokens, open sessions. Counters on
//! the path of a step are atomics without locks. Figures of the last minute are summed up once a
//! second ([`minute`]), and `crate::figures` gathers all of it.
//!
//! The counters live as long as the process, over all services of a run.

pub mod histogram;
pub mod minute;
mod open_sessions;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use p2p::P2p;
use parking_lot::Mutex;
use shared::block::BlockIndex;
use shared::figures::{
    AnnouncedFigures, BlockCoverage, Coverage, PushedStep, ServedFigures, SessionFigures, StepPart,
};
use shared::job::WorkKind;
use shared::shm::board::BoardWriter;
use shared::shm::layout::WORK_KINDS;
use swarm::dht::driver::Dht;
use tokio::time::Instant;

use crate::workers::link::JobTimes;
use histogram::{Histogram, Histograms};
use open_sessions::OpenSessions;
pub use open_sessions::ShownSession;

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

#[derive(Debug, Default)]
struct AnsweredCounts {
    requests: AtomicU64,
    tokens: AtomicU64,
}

/// All counters of this process.
#[derive(Debug, Default)]
pub struct Telemetry {
    board: Option<Arc<BoardWriter>>,
    parts: [Histogram; StepPart::ALL.len()],
    answered: [AnsweredCounts; WORK_KINDS],
    pushed: [AtomicU64; PushedStep::ALL.len()],
    sessions: Arc<OpenSessions>,
    announced: Mutex<AnnouncedFigures>,
    /// Who serves the blocks of the model, and when that was read.
    coverage: Mutex<Option<(Instant, Vec<BlockCoverage>)>>,
    /// How long the last scrape took; 0 before the first.
    scrape_ns: AtomicU64,
    swarm: OnceLock<(P2p, Dht)>,
}

impl Telemetry {
    /// Counters that are shown on `board`.
    pub fn on(board: Arc<BoardWriter>) -> Telemetry {
        Telemetry { board: Some(board), ..Telemetry::default() }
    }

    /// The board, if there is one.
    pub fn board(&self) -> Option<&Arc<BoardWriter>> {
        self.board.as_ref()
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

    /// What was answered so far.
    pub fn served(&self) -> ServedFigures {
        let load = |count: &AtomicU64| count.load(Ordering::Relaxed);
        let answered = || WorkKind::ALL.into_iter().zip(&self.answered);
        let times = self.histograms();
        ServedFigures {
            requests: answered().map(|(kind, of)| (kind, load(&of.requests))).collect(),
            tokens: answered().map(|(kind, of)| (kind, load(&of.tokens))).collect(),
            pushed: PushedStep::ALL.into_iter().zip(self.pushed.iter().map(load)).collect(),
            step_times: StepPart::ALL.into_iter().zip(times.map(|times| times.figures())).collect(),
        }
    }

    /// Tokens of all steps so far.
    pub fn step_tokens(&self) -> u64 {
        let steps =
            WorkKind::ALL.into_iter().zip(&self.answered).filter(|(kind, _)| kind.is_step());
        steps.map(|(_, of)| of.tokens.load(Ordering::Relaxed)).sum()
    }

    /// A session opens; it is shown until the value is dropped.
    pub fn session(&self, blocks: &[BlockIndex], rows: u32, max_length: u32) -> ShownSession {
        OpenSessions::open(&self.sessions, blocks, rows, max_length)
    }

    /// Sessions that were opened.
    pub fn sessions_opened(&self) -> u64 {
        self.sessions.opened()
    }

    /// The oldest open sessions, without their rates.
    pub fn open_sessions(&self) -> Vec<SessionFigures> {
        self.sessions.figures()
    }

    /// Times of all steps, in the order of [`StepPart::ALL`].
    pub fn histograms(&self) -> [Histograms; StepPart::ALL.len()] {
        self.parts.each_ref().map(Histogram::read)
    }

    /// Figures over all steps so far.
    pub fn figures(&self) -> StepFigures {
        let [total, ..] = self.histograms();
        let at = |share| total.quantile(share);
        StepFigures { count: total.count(), p50: at(0.5), p99: at(0.99) }
    }

    /// Notes what the server tells the swarm of itself.
    pub fn set_announced(&self, announced: AnnouncedFigures) {
        *self.announced.lock() = announced;
    }

    /// What the server tells the swarm of itself.
    pub fn announced(&self) -> AnnouncedFigures {
        self.announced.lock().clone()
    }

    /// Notes who serves the blocks of the model now.
    pub fn set_coverage(&self, blocks: Vec<BlockCoverage>) {
        let mut coverage = self.coverage.lock();
        *coverage = Some((Instant::now(), blocks));
    }

    /// Who serves the blocks of the model, if that was read.
    pub fn coverage(&self) -> Option<Coverage> {
        let coverage = self.coverage.lock();
        let (at, blocks) = coverage.as_ref()?;
        Some(Coverage { age_s: at.elapsed().as_secs_f64(), blocks: blocks.clone() })
    }

    /// How long ago a person asked how the swarm looks; `None` = never.
    pub fn viewed_ago(&self) -> Option<Duration> {
        self.board.as_ref()?.viewed_ago()
    }

    /// Notes how long a scrape took.
    pub fn scraped(&self, took: Duration) {
        let nanos = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        self.scrape_ns.store(nanos, Ordering::Relaxed);
    }

    /// How long the last scrape took.
    pub fn scrape_time(&self) -> Duration {
        Duration::from_nanos(self.scrape_ns.load(Ordering::Relaxed))
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
        let ServedFigures { requests, tokens, .. } = telemetry.served();
        for (kind, counts) in [(WorkKind::Decode, (1, 3)), (WorkKind::Prefill, (1, 40))] {
            assert_eq!((requests[&kind], tokens[&kind]), counts);
        }
        assert_eq!(telemetry.figures().count, 2);
    }
}
