//! Figures of a server in its report: sessions, the last minute, the KV cache, restarts, what is
//! announced, and how well the swarm serves each block.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use shared::control::Role;
use shared::job::WorkKind;
use shared::shm::board::{
    BATCH_BOUNDS, BoardSnapshot, Coverage, DeviceFigures, Minute, NetdFigures, RestartReason,
    SessionSnapshot, StepPart, WorkSnapshot,
};

/// Figures of one server.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Figures {
    /// The last minute.
    pub minute: MinuteReport,
    /// Open sessions, the oldest first; at most 128.
    pub sessions: Vec<SessionReport>,
    pub kv: KvReport,
    /// Peers that are connected.
    pub peers: u64,
    /// What the server tells the swarm.
    pub announced: AnnouncedReport,
    /// Processes that were started again, by role and reason; those that happened.
    pub restarts: Vec<RestartCount>,
    /// The servers of each block of the model, if they were read: while somebody asks, netd reads
    /// them every half minute.
    pub coverage: Option<CoverageReport>,
    /// Where metrics are served.
    pub metrics: Option<String>,
    /// Where the page of the swarm is served, while it runs.
    pub web: Option<String>,
}

/// What happened in the last minute, or since netd was started.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct MinuteReport {
    /// Seconds that this is about.
    pub seconds: f64,
    /// Steps answered.
    pub steps: u64,
    /// The same per second.
    pub steps_per_s: f64,
    /// Tokens in them per second, all sequences.
    pub tokens_per_s: f64,
    /// Mean number of sequences that a worker computed together in decode steps.
    pub mean_batch: f64,
    /// Times of steps in this server: total, network, queue, compute.
    pub latency: Vec<LatencyReport>,
}

/// Times of a part of steps.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LatencyReport {
    pub part: String,
    /// Median in milliseconds.
    pub p50_ms: f64,
    /// 99th percentile in milliseconds.
    pub p99_ms: f64,
}

/// An open session.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SessionReport {
    /// Its number, counted from 1 since netd was started.
    pub number: u64,
    pub span: String,
    pub rows: u32,
    /// Tokens in the cache, per sequence.
    pub length: u32,
    /// Tokens that it may have, per sequence.
    pub max_length: u32,
    /// Steps answered.
    pub steps: u64,
    /// Seconds since it began.
    pub age_s: f64,
    /// Seconds since its last step.
    pub idle_s: f64,
    /// Tokens per second and sequence, over the last ten seconds.
    pub tokens_per_s: f64,
}

/// The KV cache, in tokens times blocks.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct KvReport {
    pub tokens_total: u64,
    /// What no session holds.
    pub tokens_free: u64,
    /// Sessions that wait for some.
    pub waiting: u64,
    /// Sessions that lost their connection, whose part is kept for `--session_grace`.
    pub parked: u64,
}

/// What the server tells the swarm.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct AnnouncedReport {
    pub state: String,
    pub span: Option<String>,
    pub throughput: f64,
    /// Tokens per second through one block, one at a time; 0 = not announced.
    pub inference_rps: f64,
    /// Tokens per second through one block, many at a time; 0 = not announced.
    pub forward_rps: f64,
    /// Tokens per second through the network; 0 = not announced.
    pub network_rps: f64,
}

/// Restarts of one kind of process for one reason.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RestartCount {
    /// Which kind of process.
    pub role: String,
    pub reason: String,
    pub count: u64,
}

/// Who serves the blocks of the model.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct CoverageReport {
    /// Seconds since it was read.
    pub age_s: f64,
    /// Each block of the model, from the first on; at most 256.
    pub blocks: Vec<BlockReport>,
}

/// Who serves one block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct BlockReport {
    /// Servers that are online, this one included.
    pub servers: u32,
    pub throughput: f32,
}

/// Jobs of one kind that a worker answered.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkReport {
    pub kind: String,
    pub jobs: u64,
    /// Tokens in them, all sequences.
    pub tokens: u64,
    /// Time that they waited in the worker.
    pub queued_us: u64,
    /// Time that they were computed.
    pub computed_us: u64,
}

/// Units of decode steps of about one size.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BatchReport {
    /// Most sequences of such a unit; `None` = more than those before.
    pub up_to: Option<u64>,
    pub units: u64,
}

/// How a device is, where NVML tells.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct DeviceReport {
    /// Bytes of its memory in use, by any process.
    pub memory_used: Option<u64>,
    /// Bytes of its memory.
    pub memory_total: Option<u64>,
    /// Temperature in degrees Celsius.
    pub celsius: Option<u32>,
    /// Power draw.
    pub watts: Option<f64>,
}

impl Figures {
    /// What a board shows; `tokens_free` is of its netd.
    pub fn of(board: &BoardSnapshot) -> Figures {
        let netd = &board.netd;
        let tokens_free = board.children.iter().map(|child| child.kv_tokens_free).sum();
        let NetdFigures { kv_tokens_total, kv_waiting, sessions_parked, peers, announced, minute } =
            netd.figures;
        Figures {
            minute: minute_report(&minute),
            sessions: netd.sessions.iter().map(session).collect(),
            kv: KvReport {
                tokens_total: kv_tokens_total,
                tokens_free,
                waiting: kv_waiting,
                parked: sessions_parked,
            },
            peers,
            announced: AnnouncedReport {
                state: announced.state.name().to_owned(),
                span: announced.span.map(|span| span.to_string()),
                throughput: announced.throughput,
                inference_rps: announced.inference_rps,
                forward_rps: announced.forward_rps,
                network_rps: announced.network_rps,
            },
            restarts: restarts(board),
            coverage: coverage(&netd.coverage),
            metrics: None,
            web: None,
        }
    }
}

fn per_second(count: u64, time: Duration) -> f64 {
    match time.is_zero() {
        true => 0.0,
        false => count as f64 / time.as_secs_f64(),
    }
}

fn minute_report(minute: &Minute) -> MinuteReport {
    let ms = |time: Duration| time.as_secs_f64() * 1e3;
    let latency = StepPart::ALL.into_iter().zip(minute.quantiles);
    MinuteReport {
        seconds: minute.time.as_secs_f64(),
        steps: minute.steps,
        steps_per_s: per_second(minute.steps, minute.time),
        tokens_per_s: per_second(minute.tokens, minute.time),
        mean_batch: minute.rows as f64 / minute.units.max(1) as f64,
        latency: latency
            .map(|(part, of)| LatencyReport {
                part: part.name().to_owned(),
                p50_ms: ms(of.p50),
                p99_ms: ms(of.p99),
            })
            .collect(),
    }
}

fn session(session: &SessionSnapshot) -> SessionReport {
    let shape = session.shape;
    let end = u64::from(shape.first_block) + u64::from(shape.blocks);
    SessionReport {
        number: shape.number,
        span: format!("{}:{end}", shape.first_block),
        rows: shape.rows,
        length: session.length,
        max_length: shape.max_length,
        steps: session.steps,
        age_s: session.age.as_secs_f64(),
        idle_s: session.idle.as_secs_f64(),
        tokens_per_s: session.rate_milli as f64 / 1e3,
    }
}

fn restarts(board: &BoardSnapshot) -> Vec<RestartCount> {
    let roles = [Role::Netd, Role::Worker, Role::Prepare];
    let pairs = roles.into_iter().flat_map(|role| RestartReason::ALL.map(|reason| (role, reason)));
    let counts = pairs.map(|(role, reason)| RestartCount {
        role: role.name().to_owned(),
        reason: reason.name().to_owned(),
        count: board.restarts.of(role, reason),
    });
    counts.filter(|of| of.count > 0).collect()
}

fn coverage(coverage: &Coverage) -> Option<CoverageReport> {
    let block = |of: &shared::shm::board::BlockCoverage| BlockReport {
        servers: of.servers,
        throughput: of.throughput,
    };
    Some(CoverageReport {
        age_s: coverage.age?.as_secs_f64(),
        blocks: coverage.blocks.iter().map(block).collect(),
    })
}

/// What a worker computed, by kind.
pub(super) fn work(work: &WorkSnapshot) -> Vec<WorkReport> {
    let micros = |time: Duration| u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
    let kinds = WorkKind::ALL.into_iter().zip(work.kinds);
    let report = kinds.map(|(kind, of)| WorkReport {
        kind: kind.name().to_owned(),
        jobs: of.jobs,
        tokens: of.tokens,
        queued_us: micros(of.queued),
        computed_us: micros(of.computed),
    });
    report.filter(|of| of.jobs > 0).collect()
}

/// The sizes of its decode units; none before the first.
pub(super) fn batches(work: &WorkSnapshot) -> Vec<BatchReport> {
    if work.decode_units() == 0 {
        return Vec::new();
    }
    let bounds = BATCH_BOUNDS.into_iter().map(Some).chain([None]);
    bounds.zip(work.batches).map(|(up_to, units)| BatchReport { up_to, units }).collect()
}

/// How its device is, if anything is known.
pub(super) fn device(figures: &DeviceFigures) -> Option<DeviceReport> {
    let report = DeviceReport {
        memory_used: figures.memory.map(|(used, _)| used),
        memory_total: figures.memory.map(|(_, total)| total),
        celsius: figures.celsius,
        watts: figures.milliwatts.map(|milliwatts| milliwatts as f64 / 1e3),
    };
    (report != DeviceReport::default()).then_some(report)
}
