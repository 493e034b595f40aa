//! Figures for people: what netd counts of a server and its part of the swarm. A figure is one field
//! here, and its documentation is its help.
//!
//! ```text
//!   netd: counters ──> Figures ── once a second, as JSON ──> board ──> supervisor ──> sepal status, sepal top
//!                         └────── at each scrape ───────> Page ──> /metrics
//! ```
//!
//! A reader of another build leaves out what it does not know and takes zero for what is not there, so
//! a new field changes no format. What workers count lies on the board as words
//! ([`crate::shm::board`]) and is read into the structs of [`server`].

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::job::WorkKind;
use server::RestartCount;

mod kinds;
mod page;
pub mod server;

pub use kinds::{Announcement, PushedStep, StepPart, Trouble};
pub use page::{Buckets, Export, Family, Metric, MetricKind, Page, Sample, Value};

/// Sessions that are shown; all are counted.
pub const MAX_SESSIONS: usize = 128;

/// Blocks of the model whose servers are shown; the largest known models have 126.
pub const MAX_COVERED_BLOCKS: usize = 256;

page::figures! {
    /// Figures of one server.
    pub struct Figures {
        /// Time that the last scrape took.
        pub scrape_s: f64 => Gauge("sepal_scrape_duration", "seconds"),
        /// What happened in the last minute.
        pub minute: Minute => shown,
        /// What was answered since netd was started.
        pub served: ServedFigures => figures,
        /// Open sessions, the oldest first; at most [`MAX_SESSIONS`].
        pub sessions: Vec<SessionFigures> => shown,
        /// Sessions and refused requests.
        pub clients: ClientFigures => figures,
        /// Sessions that lost their connection.
        pub resumption: ResumptionFigures => figures,
        /// The KV cache, in tokens times blocks.
        pub kv: KvFigures => figures,
        /// Peers that are connected.
        pub peers: u64 => Gauge("sepal_peers"),
        /// What the server tells the swarm.
        pub announced: AnnouncedFigures => figures,
        /// What passed the libp2p node.
        pub network: NetworkFigures => figures,
        /// The node of the DHT.
        pub dht: DhtNodeFigures => figures,
        /// Processes that were started again; those that happened, as the supervisor counts them.
        pub restarts: Vec<RestartCount> => shown,
        /// The servers of each block of the model, if they were read: while somebody asks, netd reads
        /// them every half minute.
        pub coverage: Option<Coverage> => shown,
        /// Where metrics are served, as the supervisor knows it.
        pub metrics: Option<String> => shown,
        /// Where the page of the swarm is served, while it runs.
        pub web: Option<String> => shown,
    }
}

page::figures! {
    /// Requests that were answered.
    pub struct ServedFigures {
        /// Requests answered: steps of sessions, forward and backward passes.
        pub requests: BTreeMap<WorkKind, u64> => Counter("sepal_requests"),
        /// Tokens of answered requests, all sequences.
        pub tokens: BTreeMap<WorkKind, u64> => Counter("sepal_tokens"),
        /// Steps pushed by the server before: first (answered before the client's copy came), late
        /// (dropped), differs (from the client's copy).
        pub pushed: BTreeMap<PushedStep, u64> => Counter("sepal_pushed_steps"),
        /// Time of a step in this server from its request to its answer, and its parts: network
        /// (messages and hand-over in netd), queue and compute (workers).
        #[serde(skip)]
        pub step_times: BTreeMap<StepPart, Buckets> => Histogram("sepal_step_duration", "seconds"),
    }
}

page::figures! {
    /// Sessions, and requests that were not served.
    pub struct ClientFigures {
        /// Inference sessions that are open.
        pub sessions: u64 => Gauge("sepal_sessions"),
        /// Inference sessions that were admitted.
        pub opened: u64 => Counter("sepal_sessions_opened"),
        /// 1 while clients can come, as /readyz says.
        pub ready: bool => Gauge("sepal_ready"),
        /// Requests of peers that were not served as asked, and records dropped.
        pub refused: BTreeMap<Trouble, u64> => Counter("sepal_refused_requests"),
    }
}

page::figures! {
    /// What became of sessions that can be resumed.
    pub struct ResumptionFigures {
        /// Sessions that their clients resumed.
        pub resumed: u64 => Counter("sepal_sessions_resumed"),
        /// Sessions taken over from a network daemon that died.
        pub restored: u64 => Counter("sepal_sessions_restored"),
        /// Parked sessions that were freed before their clients came.
        pub expired: u64 => Counter("sepal_sessions_expired"),
    }
}

page::figures! {
    /// The KV cache, in tokens times blocks.
    pub struct KvFigures {
        /// Size of the KV cache in tokens times blocks.
        pub tokens_total: u64 => Gauge("sepal_kv_cache_tokens"),
        /// Tokens times blocks of the KV cache that no session holds.
        pub tokens_free: u64 => Gauge("sepal_kv_cache_free_tokens"),
        /// Sessions that wait for KV cache.
        pub waiting: u64 => Gauge("sepal_kv_cache_waiting_sessions"),
        /// Sessions that had to wait for KV cache.
        pub waits: u64 => Counter("sepal_kv_cache_waits"),
        /// Time that sessions waited for KV cache.
        pub wait_s: f64 => Counter("sepal_kv_cache_wait", "seconds"),
        /// Sessions without a stream that are kept for their clients.
        pub parked: u64 => Gauge("sepal_sessions_parked"),
    }
}

page::figures! {
    /// What the server tells the swarm.
    pub struct AnnouncedFigures {
        /// 1 for the state that this server announces.
        pub state: Announcement => Gauge("sepal_announced_state"),
        /// The blocks, as `START:END`.
        pub span: Option<String> => shown,
        /// Blocks that this server announces.
        pub blocks: u64 => Gauge("sepal_announced_blocks"),
        /// First block that this server announces.
        pub first_block: u32 => Gauge("sepal_announced_first_block"),
        /// Throughput that this server announces, in tokens per second: of all it serves, of one block
        /// (inference, forward), of its network; 0 = not announced.
        pub throughput: f64 => Gauge("sepal_announced_throughput"; of = "total"),
        /// Tokens per second through one block, one at a time.
        pub inference_rps: f64 => Gauge("sepal_announced_throughput"; of = "inference"),
        /// Tokens per second through one block, many at a time.
        pub forward_rps: f64 => Gauge("sepal_announced_throughput"; of = "forward"),
        /// Tokens per second through the network.
        pub network_rps: f64 => Gauge("sepal_announced_throughput"; of = "network"),
    }
}

page::figures! {
    /// What passed the libp2p node.
    pub struct NetworkFigures {
        /// What came and went on connections straight to the peer.
        pub direct: RpcBytes => figures(path = "direct"),
        /// What came and went through relays.
        pub relayed: RpcBytes => figures(path = "relay"),
        /// Circuits that peers opened through this server as their relay.
        pub circuits: u64 => Counter("sepal_relayed_circuits"),
        /// Bytes that these circuits carried, both directions together.
        pub circuit_bytes: u64 => Counter("sepal_relayed", "bytes"),
    }
}

page::figures! {
    /// RPCs on connections of one kind.
    pub struct RpcBytes {
        /// Bytes of RPCs, by whether they pass a relay.
        pub received: u64 => Counter("sepal_network", "bytes"; direction = "in"),
        /// Bytes that were written to peers.
        pub sent: u64 => Counter("sepal_network", "bytes"; direction = "out"),
    }
}

page::figures! {
    /// What the node of the DHT has done so far, and what it holds.
    pub struct DhtNodeFigures {
        /// Nodes in the routing table of the DHT.
        pub nodes: u64 => Gauge("sepal_dht_nodes"),
        /// Records of the DHT that this server keeps for the swarm.
        pub records: u64 => Gauge("sepal_dht_records"),
        /// Size of these records.
        pub record_bytes: u64 => Gauge("sepal_dht_records_size", "bytes"),
        /// Lookups of keys in the DHT.
        pub lookups: u64 => Counter("sepal_dht_lookups"),
        /// Records that this server wrote to the DHT.
        pub stores: u64 => Counter("sepal_dht_stores"),
        /// Calls to other nodes of the DHT.
        pub calls: u64 => Counter("sepal_dht_calls"),
        /// Calls to other nodes of the DHT that came to nothing.
        pub failed_calls: u64 => Counter("sepal_dht_failed_calls"),
        /// Records of this server that a DHT node refused, since somebody else wrote a later one in
        /// its name.
        pub refused_renewals: u64 => Counter("sepal_dht_refused_renewals"),
        /// Records of others that were dropped to make room in the DHT store.
        pub evicted: u64 => Counter("sepal_dht_evicted_records"),
    }
}

/// What happened in the last minute, or since netd was started.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Minute {
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
    /// Times of steps in this server, in the order of [`StepPart::ALL`].
    pub latency: Vec<Latency>,
}

impl Default for Minute {
    fn default() -> Minute {
        let nothing = |part| Latency { part, p50_ms: 0.0, p99_ms: 0.0 };
        Minute {
            seconds: 0.0,
            steps: 0,
            steps_per_s: 0.0,
            tokens_per_s: 0.0,
            mean_batch: 0.0,
            latency: StepPart::ALL.map(nothing).into(),
        }
    }
}

/// Times of a part of steps.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Latency {
    pub part: StepPart,
    /// Median in milliseconds.
    pub p50_ms: f64,
    /// 99th percentile in milliseconds.
    pub p99_ms: f64,
}

/// An open session.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct SessionFigures {
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

/// Who serves the blocks of the model.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Coverage {
    /// Seconds since it was read.
    pub age_s: f64,
    /// Each block of the model, from the first on; at most [`MAX_COVERED_BLOCKS`].
    pub blocks: Vec<BlockCoverage>,
}

/// Who serves one block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct BlockCoverage {
    /// Servers that are online, this one included.
    pub servers: u32,
    pub throughput: f32,
}

/// Why bytes are no figures.
#[derive(Debug, thiserror::Error)]
pub enum FiguresError {
    /// They are of another form.
    #[error("the figures of netd cannot be read")]
    Malformed(#[from] serde_json::Error),
    /// There is more in them than netd shows.
    #[error(
        "the figures of netd have {sessions} sessions and {blocks} blocks: expected at most \
         {MAX_SESSIONS} and {MAX_COVERED_BLOCKS}"
    )]
    TooMany { sessions: usize, blocks: usize },
}

impl Figures {
    /// What netd wrote, which is trusted in nothing.
    ///
    /// # Errors
    /// [`FiguresError`]
    pub fn decode(bytes: &[u8]) -> Result<Figures, FiguresError> {
        let figures: Figures = serde_json::from_slice(bytes)?;
        let sessions = figures.sessions.len();
        let blocks = figures.coverage.as_ref().map_or(0, |coverage| coverage.blocks.len());
        match sessions <= MAX_SESSIONS && blocks <= MAX_COVERED_BLOCKS {
            true => Ok(figures),
            false => Err(FiguresError::TooMany { sessions, blocks }),
        }
    }

    pub fn encode(&self) -> Vec<u8> {
        serde_json::to_vec(self).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests;
