//! The transformer RPCs of Petals: what peers ask of the blocks served here. One file per RPC;
//! [`compute`] is what they have in common, [`dispatch`] gives each inbound stream its handler.
//!
//! Semantics follow `petals/server/handler.py` and `block_functions.py`. Everything that a peer
//! sends is bounded: concurrent streams per protocol and peer by [`protocols`], frames by
//! [`Service::max_request_bytes`], the bytes that they hold by [`p2p::MemoryPurpose`], batch, tokens and session
//! length by the model's limits, KV memory by admission, arena memory by its queue. Large
//! requests wait in a queue that is fair among peers ([`admission_queue`]). What is not served as asked is counted by
//! kind ([`ErrorCounts`]).

pub mod admission_queue;
mod backward;
pub mod compute;
pub(crate) mod dial_budget;
pub mod dispatch;
mod error_counts;
mod failure;
mod forward;
pub(crate) mod inference;
mod info;
mod passes;
mod push;
pub(crate) mod push_client;
pub(crate) mod registry;
pub mod reply;
pub(crate) mod request;
pub mod resumption;

use std::sync::{Arc, Weak};
use std::time::Duration;

use p2p::{P2p, ProtocolKind, ProtocolSpec};
use parking_lot::Mutex;
use shared::block::{BlockIndex, Span};
use shared::config::NetdConfig;
use shared::figures::Trouble;
use shared::limits::Limits;
use shared::model::ModelFacts;
use swarm::names;
use swarm::wire::messages::Compression;
use swarm::wire::metadata::RequestMetadata;
use swarm::wire::uid;
use tokio::sync::watch;

use crate::sessions::admission::KvMemory;
use crate::telemetry::Telemetry;
use crate::workers::Workers;
use admission_queue::AdmissionQueue;
pub use error_counts::ErrorCounts;
pub use failure::Failure;
use push_client::PushClient;
use registry::Registry;
use resumption::Resumption;

/// What we call ourselves in records and `rpc_info`: the version of Petals whose behaviour this is.
pub const PETALS_VERSION: &str = "2.3.0.dev2";

/// The transformer RPCs with their bounds: sessions cost a task and little memory each, forward
/// requests hold tensors.
pub fn protocols() -> Vec<ProtocolSpec> {
    let spec = |name, kind, max_inbound_per_peer, max_inbound_total| ProtocolSpec {
        name,
        kind,
        max_inbound_per_peer,
        max_inbound_total,
    };
    vec![
        spec(names::INFO, ProtocolKind::Unary, 32, 512),
        spec(names::FORWARD, ProtocolKind::Unary, 128, 512),
        spec(names::FORWARD_STREAM, ProtocolKind::Stream, 64, 256),
        spec(names::BACKWARD, ProtocolKind::Unary, 128, 512),
        spec(names::BACKWARD_STREAM, ProtocolKind::Stream, 64, 256),
        spec(names::INFERENCE, ProtocolKind::Stream, 256, 1024),
        spec(names::PUSH, ProtocolKind::Unary, 256, 512),
        spec(names::PUSH_STREAM, ProtocolKind::Stream, 256, 1024),
    ]
}

/// How long things may take.
#[derive(Clone, Copy, Debug)]
pub struct Timeouts {
    /// One forward or backward request.
    pub request: Duration,
    pub session: Duration,
    /// Silence between two steps.
    pub step: Duration,
    /// Waiting for KV memory, whatever the client asks.
    pub max_alloc: Duration,
}

impl From<&NetdConfig> for Timeouts {
    fn from(config: &NetdConfig) -> Timeouts {
        Timeouts {
            request: config.request_timeout,
            session: config.session_timeout,
            step: config.step_timeout,
            max_alloc: config.max_alloc_timeout,
        }
    }
}

/// The blocks served here, and all that it takes to serve them. One per run, shared by all
/// handlers.
#[derive(Debug)]
pub struct Service {
    /// Prefix of the module uids.
    pub prefix: String,
    pub facts: ModelFacts,
    /// Bounds on requests.
    pub limits: Limits,
    /// Who computes the blocks.
    pub workers: Arc<Workers>,
    pub kv: KvMemory,
    /// How long things may take.
    pub timeouts: Timeouts,
    /// What is counted of its work.
    pub telemetry: Arc<Telemetry>,
    /// Requests that were not served as asked.
    pub troubles: Arc<ErrorCounts>,
    /// Large jobs that wait for their turn.
    pub admission_queue: AdmissionQueue,
    /// Compression of answers unless a request asks for another.
    compression: Compression,
    push_client: PushClient,
    /// What a worker may keep during one request for gradients.
    gradient_bytes: u64,
    /// Whether it is only a client of the DHT, as a server that is reached through relays.
    pub dht_client_mode: bool,
    /// True once the server is ending: running steps finish, sessions end after them.
    pub draining: watch::Receiver<bool>,
    span: Mutex<Span>,
    max_request_bytes: u64,
    registry: Registry,
    /// Sessions that can be resumed.
    pub resumption: Resumption,
    /// The service of the blocks that this server has just left.
    before: Mutex<Weak<Service>>,
}

/// What a [`Service`] is made of.
#[derive(Debug)]
pub struct ServiceParts {
    /// Prefix of the module uids.
    pub prefix: String,
    pub facts: ModelFacts,
    /// Bounds on requests.
    pub limits: Limits,
    pub span: Span,
    pub workers: Arc<Workers>,
    pub kv: KvMemory,
    /// How long things may take.
    pub timeouts: Timeouts,
    /// Compression of answers.
    pub compression: shared::config::Compression,
    /// What a worker may keep during one request for gradients, if that is more than a block
    /// needs.
    pub gradient_bytes: u64,
    /// The node, for pushes to other servers.
    pub p2p: P2p,
    /// Whether this server is only a client of the DHT.
    pub dht_client_mode: bool,
    /// Turns true when the server is ending.
    pub draining: watch::Receiver<bool>,
    /// What is counted of its work.
    pub telemetry: Arc<Telemetry>,
    /// Sessions that can be resumed.
    pub resumption: Resumption,
}

impl Service {
    /// A service without sessions.
    pub fn new(parts: ServiceParts) -> Service {
        Service::counting(parts, Arc::default())
    }

    fn counting(parts: ServiceParts, troubles: Arc<ErrorCounts>) -> Service {
        let ServiceParts {
            prefix,
            facts,
            limits,
            span,
            workers,
            kv,
            timeouts,
            compression,
            gradient_bytes,
            p2p,
            dht_client_mode,
            draining,
            telemetry,
            resumption,
        } = parts;
        let max_request_bytes = request_bytes(&facts, &limits, span);
        p2p.make_room_for(max_request_bytes);
        let push_client = PushClient::new(p2p, &prefix, troubles.clone());
        Service {
            prefix,
            facts,
            limits,
            workers,
            kv,
            timeouts,
            telemetry,
            troubles,
            admission_queue: AdmissionQueue::default(),
            compression: reply::wire(compression),
            push_client,
            gradient_bytes,
            dht_client_mode,
            draining,
            span: Mutex::new(span),
            max_request_bytes,
            registry: Registry::default(),
            resumption,
            before: Mutex::default(),
        }
    }

    /// A service of other blocks in place of `before`, whose sessions go on. What `before` alone
    /// serves is still given to it, for callers who have not heard of the move, until
    /// [`Self::forget_before`].
    pub fn after(parts: ServiceParts, before: &Arc<Service>) -> Service {
        Service {
            registry: before.registry.clone(),
            before: Mutex::new(Arc::downgrade(before)),
            ..Service::counting(parts, before.troubles.clone())
        }
    }

    /// Nothing more goes to the service before this one.
    pub fn forget_before(&self) {
        *self.before.lock() = Weak::new();
    }

    /// The service before this one, if it serves `chain` and this one does not.
    fn before(&self, chain: &str) -> Option<Arc<Service>> {
        let before = self.before.lock().upgrade()?;
        let its_own = self.blocks(chain).is_err() && before.blocks(chain).is_ok();
        its_own.then_some(before)
    }

    /// Serves `span` from now on, a part of the blocks of its pool: the workers of the others are
    /// gone. Sessions on those fail with their next step.
    pub fn serve(&self, span: Span) {
        *self.span.lock() = span;
    }

    /// Requests that were not served as asked, in the order of [`Trouble::ALL`], those included
    /// that never reached a handler.
    pub fn all_troubles(&self) -> [u64; Trouble::ALL.len()] {
        let mut counts = self.troubles.counts();
        let refused = self.push_client.p2p().inbound_figures();
        for (trouble, count) in [
            (Trouble::Malformed, refused.malformed),
            (Trouble::TooLarge, refused.too_large + refused.too_many),
            (Trouble::TimedOut, refused.too_slow),
            (Trouble::BadRecord, refused.bad_records),
        ] {
            counts[trouble as usize] += count;
        }
        counts
    }

    /// Sessions that are open.
    pub fn open_sessions(&self) -> usize {
        self.registry.open()
    }

    /// Whether clients can come: all blocks have a worker, and the server is not ending.
    ///
    /// # Errors
    /// With what is missing, in a sentence.
    pub fn ready(&self) -> Result<(), &'static str> {
        let span = *self.span.lock();
        match (*self.draining.borrow(), self.workers.cover(span)) {
            (true, _) => Err("the server is draining"),
            (false, false) => Err("blocks wait for their worker"),
            (false, true) => Ok(()),
        }
    }

    /// RPCs that are being served, sessions included. A drain waits for them.
    pub fn active(&self) -> usize {
        self.registry.active()
    }

    /// The most bytes of one request: hidden states, gradients and prompts as float32, and room for
    /// headers.
    pub fn max_request_bytes(&self) -> u64 {
        self.max_request_bytes
    }

    /// The blocks that a chain of uids names.
    ///
    /// # Errors
    /// `Remote peer does not serve X` for the first uid that is not served (petals `handler.py`,
    /// `_check_uids`).
    fn blocks(&self, chain: &str) -> Result<Vec<BlockIndex>, Failure> {
        let mut blocks = Vec::new();
        for text in chain.split(' ') {
            let block = self.served(text).filter(|_| blocks.len() < uid::MAX_CHAIN);
            blocks.push(block.ok_or_else(|| Failure::not_served(text))?);
        }
        Ok(blocks)
    }

    /// The adapter that a request asks for.
    ///
    /// # Errors
    /// `adapter X not found` (petals `backend.py`, `AdapterContextMixin`).
    fn adapter(&self, metadata: &RequestMetadata) -> Result<Option<u32>, Failure> {
        let Some(wanted) = &metadata.active_adapter else {
            return Ok(None);
        };
        let names = self.facts.adapters.iter();
        let found = (0..).zip(names).find(|(_, name)| *name == wanted);
        found.map(|(index, _)| Some(index)).ok_or_else(|| Failure::no_adapter(wanted))
    }

    fn served(&self, uid: &str) -> Option<BlockIndex> {
        let index = uid.strip_prefix(self.prefix.as_str())?.strip_prefix('.')?;
        let digits = !index.is_empty() && index.bytes().all(|byte| byte.is_ascii_digit());
        let block = BlockIndex(index.parse().ok().filter(|_| digits)?);
        let span = *self.span.lock();
        span.contains(block).then_some(block)
    }
}

/// Hidden states of the largest batch, gradients and prompts of the same size again, all as
/// float32, and room for headers; at least what a unary call may carry, at most 1 GiB.
fn request_bytes(facts: &ModelFacts, limits: &Limits, span: Span) -> u64 {
    let hidden = u64::from(limits.max_batch_size) * u64::from(facts.hidden_size) * 4;
    let room = (1 << 20) + 64 * span.block_count() as u64;
    (3 * hidden + room).clamp(4 << 20, 1 << 30)
}

#[cfg(test)]
pub(crate) mod tests;
