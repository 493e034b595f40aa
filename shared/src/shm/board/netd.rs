//! What netd alone has to tell: open sessions, the last minute, the swarm, what is announced.
//!
//! A session's row is written by the task of the session; its rate, and everything else here, by
//! the task that sums up figures each second. A row is read like a seat: its number, its fields, its
//! number again.

use std::time::Duration;

use super::super::layout::{
    COVERED_BLOCKS, FigureWords, NetdPart, SESSION_ROWS, STEP_PARTS, SessionWords,
};
use super::super::sync::{AtomicU64, Ordering, fence};
use super::view::{narrow, split};
use super::{Announcement, BoardWriter};
use crate::block::Span;
use crate::clock::monotonic_ns;

/// An open session, as it begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SessionShape {
    /// Its number, which counts up from 1 over all sessions.
    pub number: u64,
    /// Its first block.
    pub first_block: u32,
    /// How many blocks it has.
    pub blocks: u32,
    pub rows: u32,
    /// Tokens that each of them may have.
    pub max_length: u32,
}

/// An open session at about one time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SessionSnapshot {
    /// What it began with.
    pub shape: SessionShape,
    /// How long it is open.
    pub age: Duration,
    /// Tokens in the cache, per row.
    pub length: u32,
    /// Steps answered.
    pub steps: u64,
    /// How long ago the last of them was answered.
    pub idle: Duration,
    /// Tokens per second over the last seconds, per row, times 1000.
    pub rate_milli: u64,
}

/// Median and 99th percentile of the steps of the last minute.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Quantiles {
    /// Median.
    pub p50: Duration,
    /// 99th percentile.
    pub p99: Duration,
}

/// What happened in the last minute, or since netd was started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Minute {
    /// Time that this is about.
    pub time: Duration,
    /// Steps answered.
    pub steps: u64,
    /// Tokens in them.
    pub tokens: u64,
    /// Their times, in the order of [`super::StepPart::ALL`].
    pub quantiles: [Quantiles; STEP_PARTS],
    /// Decode units that workers ran.
    pub units: u64,
    /// Rows in them.
    pub rows: u64,
}

/// What the server announces.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Announced {
    pub state: Announcement,
    pub span: Option<Span>,
    /// The throughput by which servers choose blocks.
    pub throughput: f64,
    /// Tokens through one block, one at a time; 0 = unknown.
    pub inference_rps: f64,
    /// Tokens through one block, many at a time; 0 = unknown.
    pub forward_rps: f64,
    /// Tokens through the network; 0 = unknown.
    pub network_rps: f64,
}

/// Who serves a block of the model.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct BlockCoverage {
    /// Servers that are online, this one included.
    pub servers: u32,
    pub throughput: f32,
}

/// Who serves the blocks of the model.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Coverage {
    /// How long ago it was read of the swarm; `None` = never.
    pub age: Option<Duration>,
    /// Each block, from the first of the model on; at most [`COVERED_BLOCKS`].
    pub blocks: Vec<BlockCoverage>,
}

/// Single figures of netd.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct NetdFigures {
    /// The last minute.
    pub minute: Minute,
    /// Tokens of KV cache in all.
    pub kv_tokens_total: u64,
    /// Sessions that wait for KV cache.
    pub kv_waiting: u64,
    /// Sessions without a stream whose KV cache is kept for a while.
    pub sessions_parked: u64,
    /// Peers that are connected.
    pub peers: u64,
    pub announced: Announced,
}

/// All that netd tells.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct NetdSnapshot {
    /// Single figures.
    pub figures: NetdFigures,
    /// Open sessions, the oldest first; at most [`SESSION_ROWS`].
    pub sessions: Vec<SessionSnapshot>,
    pub coverage: Coverage,
}

impl NetdSnapshot {
    pub(super) fn of(part: &NetdPart) -> NetdSnapshot {
        let now = monotonic_ns();
        let mut sessions: Vec<_> =
            part.sessions.iter().filter_map(|words| session(words, now)).collect();
        sessions.sort_by_key(|session| session.shape.number);
        NetdSnapshot { figures: figures(&part.figures), sessions, coverage: coverage(part, now) }
    }
}

fn load(word: &AtomicU64) -> u64 {
    word.load(Ordering::Relaxed)
}

fn nanos(word: &AtomicU64) -> Duration {
    Duration::from_nanos(load(word))
}

fn since(word: &AtomicU64, now: u64) -> Duration {
    Duration::from_nanos(now.saturating_sub(load(word)))
}

/// The bits of a rate; one that is no rate reads as zero.
fn rate(word: &AtomicU64) -> f64 {
    Some(f64::from_bits(load(word))).filter(|rate| rate.is_finite() && *rate >= 0.0).unwrap_or(0.0)
}

fn session(words: &SessionWords, now: u64) -> Option<SessionSnapshot> {
    // SYNC POINT board.session: after this load the fields of that session are visible; pairs with
    // open_session().
    let number = words.number.load(Ordering::Acquire);
    if number == 0 {
        return None;
    }
    let (first_block, blocks) = split(load(&words.blocks));
    let (rows, max_length) = split(load(&words.shape));
    let snapshot = SessionSnapshot {
        shape: SessionShape { number, first_block, blocks, rows, max_length },
        age: since(&words.started_ns, now),
        length: narrow(load(&words.length)),
        steps: load(&words.steps),
        idle: since(&words.last_step_ns, now),
        rate_milli: load(&words.rate_milli),
    };
    // SYNC POINT board.session: had a field above come from a later session, the load below would
    // see another number; pairs with the fence in open_session().
    fence(Ordering::Acquire);
    (load(&words.number) == number).then_some(snapshot)
}

fn figures(words: &FigureWords) -> NetdFigures {
    let quantiles =
        words.quantiles.each_ref().map(|[p50, p99]| Quantiles { p50: nanos(p50), p99: nanos(p99) });
    let (start, count) = split(load(&words.announced_blocks));
    NetdFigures {
        minute: Minute {
            time: nanos(&words.minute_ns),
            steps: load(&words.minute_steps),
            tokens: load(&words.minute_tokens),
            quantiles,
            units: load(&words.minute_units),
            rows: load(&words.minute_rows),
        },
        kv_tokens_total: load(&words.kv_tokens_total),
        kv_waiting: load(&words.kv_waiting),
        sessions_parked: load(&words.sessions_parked),
        peers: load(&words.peers),
        announced: Announced {
            state: Announcement::from_word(load(&words.announced_state)),
            span: Span::new(start, start.saturating_add(count)).ok(),
            throughput: rate(&words.throughput),
            inference_rps: rate(&words.inference_rps),
            forward_rps: rate(&words.forward_rps),
            network_rps: rate(&words.network_rps),
        },
    }
}

fn coverage(part: &NetdPart, now: u64) -> Coverage {
    // SYNC POINT board.coverage: after this load the words of the blocks are visible; pairs with
    // set_coverage().
    let blocks = part.figures.model_blocks.load(Ordering::Acquire);
    if blocks == 0 {
        return Coverage::default();
    }
    let shown = usize::try_from(blocks).unwrap_or(COVERED_BLOCKS);
    let block = |word: &AtomicU64| {
        let (servers, bits) = split(load(word));
        let throughput = Some(f32::from_bits(bits)).filter(|rate| rate.is_finite() && *rate >= 0.0);
        BlockCoverage { servers, throughput: throughput.unwrap_or(0.0) }
    };
    Coverage {
        age: Some(since(&part.figures.covered_ns, now)),
        blocks: part.coverage.iter().take(shown).map(block).collect(),
    }
}

/// Two halves of a word.
fn joined(upper: u32, lower: u32) -> u64 {
    u64::from(upper) << 32 | u64::from(lower)
}

impl BoardWriter {
    /// Shows a session in `row`, which must be free: the caller keeps account of the rows.
    pub fn open_session(&self, row: usize, shape: &SessionShape) {
        let Some(words) = self.netd().sessions.get(row) else { return };
        let store = |word: &AtomicU64, value| word.store(value, Ordering::Relaxed);
        let now = monotonic_ns();
        store(&words.number, 0);
        // SYNC POINT board.session: the 0 is visible before any of the stores below; pairs with the
        // fence in session().
        fence(Ordering::Release);
        store(&words.started_ns, now);
        store(&words.blocks, joined(shape.first_block, shape.blocks));
        store(&words.shape, joined(shape.rows, shape.max_length));
        store(&words.length, 0);
        store(&words.steps, 0);
        store(&words.last_step_ns, now);
        store(&words.rate_milli, 0);
        // SYNC POINT board.session: publishes the fields to the load in session().
        words.number.store(shape.number, Ordering::Release);
    }

    /// The session in `row` has answered `steps` steps and holds `length` tokens per row.
    pub fn stepped(&self, row: usize, length: u32, steps: u64) {
        if let Some(words) = self.netd().sessions.get(row) {
            words.length.store(length.into(), Ordering::Relaxed);
            words.steps.store(steps, Ordering::Relaxed);
            words.last_step_ns.store(monotonic_ns(), Ordering::Relaxed);
        }
    }

    /// Shows the rate of the session in `row`, in tokens per 1000 seconds and row.
    pub fn set_rate(&self, row: usize, rate_milli: u64) {
        if let Some(words) = self.netd().sessions.get(row) {
            words.rate_milli.store(rate_milli, Ordering::Relaxed);
        }
    }

    /// The session in `row` has ended.
    pub fn close_session(&self, row: usize) {
        if let Some(words) = self.netd().sessions.get(row) {
            words.number.store(0, Ordering::Relaxed);
        }
    }

    /// Number and length of the session in each row; 0 for a free one.
    pub fn session_lengths(&self) -> [(u64, u64); SESSION_ROWS] {
        let sessions = &self.netd().sessions;
        sessions.each_ref().map(|words| (load(&words.number), load(&words.length)))
    }

    /// Shows single figures.
    pub fn set_figures(&self, figures: &NetdFigures) {
        let words = &self.netd().figures;
        let store = |word: &AtomicU64, value| word.store(value, Ordering::Relaxed);
        let nanos = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        let NetdFigures { minute, announced, .. } = figures;
        store(&words.minute_ns, nanos(minute.time));
        store(&words.minute_steps, minute.steps);
        store(&words.minute_tokens, minute.tokens);
        store(&words.minute_units, minute.units);
        store(&words.minute_rows, minute.rows);
        for ([p50, p99], of) in words.quantiles.iter().zip(&minute.quantiles) {
            store(p50, nanos(of.p50));
            store(p99, nanos(of.p99));
        }
        store(&words.kv_tokens_total, figures.kv_tokens_total);
        store(&words.kv_waiting, figures.kv_waiting);
        store(&words.sessions_parked, figures.sessions_parked);
        store(&words.peers, figures.peers);
        let span = announced
            .span
            .map_or((0, 0), |span| (span.start().0, span.end().0.saturating_sub(span.start().0)));
        store(&words.announced_state, announced.state as u64);
        store(&words.announced_blocks, joined(span.0, span.1));
        store(&words.throughput, announced.throughput.to_bits());
        store(&words.inference_rps, announced.inference_rps.to_bits());
        store(&words.forward_rps, announced.forward_rps.to_bits());
        store(&words.network_rps, announced.network_rps.to_bits());
    }

    /// Shows who serves the blocks of the model, from its first on.
    pub fn set_coverage(&self, blocks: &[BlockCoverage]) {
        let part = self.netd();
        for (word, block) in part.coverage.iter().zip(blocks) {
            word.store(joined(block.servers, block.throughput.to_bits()), Ordering::Relaxed);
        }
        part.figures.covered_ns.store(monotonic_ns(), Ordering::Relaxed);
        // SYNC POINT board.coverage: publishes the blocks to the load in coverage().
        part.figures.model_blocks.store(blocks.len() as u64, Ordering::Release);
    }

    /// How long ago a person asked how the swarm looks; `None` = never.
    pub fn viewed_ago(&self) -> Option<Duration> {
        let viewed = &self.view().layout().supervisor.viewed_ns;
        (load(viewed) > 0).then(|| since(viewed, monotonic_ns()))
    }

    fn netd(&self) -> &NetdPart {
        &self.view().layout().netd
    }
}

impl NetdPart {
    pub(super) fn reset(&self) {
        let reset = |word: &AtomicU64| word.store(0, Ordering::Relaxed);
        self.sessions.iter().for_each(|words| reset(&words.number));
        let figures = &self.figures;
        figures.quantiles.iter().flatten().for_each(reset);
        let minute = [
            &figures.minute_ns,
            &figures.minute_steps,
            &figures.minute_tokens,
            &figures.minute_units,
            &figures.minute_rows,
        ];
        let rest = [
            &figures.kv_tokens_total,
            &figures.kv_waiting,
            &figures.sessions_parked,
            &figures.peers,
            &figures.announced_state,
            &figures.announced_blocks,
            &figures.throughput,
            &figures.inference_rps,
            &figures.forward_rps,
            &figures.network_rps,
            &figures.model_blocks,
            &figures.covered_ns,
        ];
        minute.into_iter().chain(rest).for_each(reset);
    }
}
