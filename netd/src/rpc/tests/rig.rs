//! A whole netd but for the swarm: real libp2p over loopback, real rings and a real arena, and a
//! worker that is a thread.
//!
//! The worker computes something that can be checked by hand: every element grows by the number of
//! blocks, and element 0 of a token becomes the sum of element 0 over all tokens of its row up to
//! it, read through the page table; for gradients see [`compute_gradients`]. Its pages outlive its
//! generations, like a kv segment.

use std::collections::HashMap;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use bytes::Bytes;
use p2p::{CallError, P2p, P2pConfig, PeerId, RpcStream};
use prost::Message;
use shared::block::{BlockIndex, Span};
use shared::control::{DeathCause, WorkerUp};
use shared::ids::{Generation, GroupId, PageId, WorkerId};
use shared::job::{Completion, JobBody, JobLimits, WorkKind};
use shared::limits::Limits;
use shared::model::{ModelFacts, PAGE_TOKENS};
use shared::shm::arena::ArenaMap;
use shared::shm::pair::RingIdentity;
use shared::shm::segment::MemfdSegment;
use shared::survey::Capacity;
use swarm::names;
use swarm::wire::messages::{ExpertRequest, ExpertResponse, Tensor};
use swarm::wire::metadata::StepMetadata;
use swarm::wire::tensor::{WireDtype, dummy_tensor, raw_tensor};
use testkit::link::{FakeWorker, LinkParts};
use tokio::sync::watch;

use crate::membership::reachability::{self, Checker};
use crate::rpc::dispatch::Router;
use crate::rpc::{Service, ServiceParts, Timeouts, protocols};
use crate::sessions::admission::KvMemory;
use crate::sessions::pool::Pool;
use crate::sessions::queue::WaitQueue;
use crate::sessions::shares::NetOf;
use crate::workers::Workers;
use crate::workers::arena::{self, ArenaMemory};
use crate::workers::link::Broken;

pub const HIDDEN: usize = 64;
pub const BLOCKS: u32 = 4;
pub const PREFIX: &str = "tiny-llama-hf";
pub const DEADLINE: Duration = Duration::from_secs(60);
pub const KV_PAGES: u32 = 1536;
const ARENA_BYTES: u64 = 4 << 20;

/// What a fake worker does with its next jobs.
#[derive(Debug, Default)]
pub struct Orders {
    /// Computes nothing.
    pub paused: AtomicBool,
    /// A paused worker has taken a job.
    pub holds: AtomicBool,
    /// Ends without an answer when it takes a job with this many tokens; 0 never.
    pub dies_at_tokens: AtomicU32,
    /// Ends now.
    pub killed: AtomicBool,
    /// Is a worker whose pages end with it, as netd is told.
    pub loses_kv: AtomicBool,
}

type Cells = HashMap<(BlockIndex, PageId), [f32; PAGE_TOKENS]>;

/// What outlives a generation of the worker.
#[derive(Debug, Default)]
pub struct Memory {
    pub cells: Mutex<Cells>,
    pub jobs: Mutex<Vec<JobBody>>,
    pub orders: Orders,
}

pub struct Worker {
    id: WorkerId,
    span: Span,
    pub generation: Generation,
    pub memory: Arc<Memory>,
    link: Option<Linked>,
}

impl Worker {
    pub fn id(&self) -> WorkerId {
        self.id
    }

    /// Whether its thread has ended by itself.
    pub fn dead(&self) -> bool {
        self.link.as_ref().is_some_and(|link| link.thread.is_finished())
    }
}

pub struct Rig {
    pub service: Arc<Service>,
    pub client: P2p,
    pub server: PeerId,
    pub workers: Vec<Worker>,
    pub draining: watch::Sender<bool>,
    pub broken: tokio::sync::mpsc::Receiver<Broken>,
    pub arena: MemfdSegment,
    pub node: P2p,
    pub address: p2p::Multiaddr,
}

pub fn facts() -> ModelFacts {
    let adapters = vec!["org/first".into(), "org/second".into()];
    ModelFacts { num_blocks: BLOCKS, adapters, ..testkit::facts::facts() }
}

pub fn limits() -> Limits {
    Limits { inference_max_length: 8192, attn_cache_tokens: 16384, max_batch_size: 1024 }
}

fn timeouts() -> Timeouts {
    Timeouts { request: DEADLINE, session: 3 * DEADLINE, step: 2 * DEADLINE, max_alloc: DEADLINE }
}

async fn node(
    listen: bool,
    initial_peers: Vec<p2p::Multiaddr>,
) -> (P2p, tokio::sync::mpsc::Receiver<p2p::Inbound>) {
    let mut all = protocols();
    all.push(reachability::protocol());
    let config = match listen {
        true => P2pConfig::on_loopback(initial_peers, all, DEADLINE),
        false => P2pConfig::of_caller(initial_peers, DEADLINE),
    };
    P2p::start(config).await.unwrap()
}

/// How a rig differs from the usual one.
pub struct Shape {
    pub spans: Vec<Span>,
    pub arena_bytes: u64,
    pub timeouts: Timeouts,
    pub limits: Limits,
    pub compression: shared::config::Compression,
    pub gradient_bytes: u64,
}

impl Default for Shape {
    fn default() -> Shape {
        let spans = vec![Span::new(0, BLOCKS).unwrap()];
        Shape {
            spans,
            arena_bytes: ARENA_BYTES,
            timeouts: timeouts(),
            limits: limits(),
            compression: shared::config::Compression::None,
            gradient_bytes: shared::model::GRADIENT_BYTES,
        }
    }
}

impl Rig {
    pub async fn new() -> Rig {
        Rig::shaped(Shape::default()).await
    }

    pub async fn shaped(shape: Shape) -> Rig {
        let segment =
            MemfdSegment::create("sepal-nettest-arena", shape.arena_bytes as usize).unwrap();
        let plan = arena::plan(shape.arena_bytes, HIDDEN as u64 * 4).unwrap();
        let memory = ArenaMemory::new(ArenaMap::map(&segment).unwrap(), plan);
        let span = Span::new(0, BLOCKS).unwrap();
        let pool = Pool::new(span, KV_PAGES, shape.limits.attn_cache_tokens);
        let (draining, drained) = watch::channel(false);
        let (workers, broken) = Workers::new(memory);
        let (server, inbound) = node(true, Vec::new()).await;
        let service = Arc::new(Service::new(ServiceParts {
            prefix: PREFIX.into(),
            facts: facts(),
            limits: shape.limits,
            span,
            workers: Arc::new(workers),
            kv: KvMemory::new(
                WaitQueue::new(pool, 1.0, NetOf::default()),
                facts().kv_token_bytes() as u64,
            ),
            timeouts: shape.timeouts,
            compression: shape.compression,
            gradient_bytes: shape.gradient_bytes,
            p2p: server.clone(),
            dht_client_mode: false,
            draining: drained,
            telemetry: Arc::default(),
            resumption: crate::rpc::resumption::Resumption::new(None, Duration::ZERO),
        }));
        let (_, serving) = watch::channel(Some(service.clone()));
        let router = Router {
            checker: Checker::new(server.clone()),
            counterpart: crate::membership::rate::serve::Counterpart::new(server.clone()),
            service: serving,
        };
        tokio::spawn(
            router.run(inbound, |_, protocol, _, _| panic!("{protocol} is not of this rig")),
        );
        let peer = server.peer_id();
        let address = server.listen_addrs().await[0].clone().with_p2p(peer).unwrap();
        let (client, _) = node(false, vec![address.clone()]).await;
        let mut rig = Rig {
            service,
            client,
            server: peer,
            workers: Vec::new(),
            draining,
            broken,
            arena: segment,
            node: server,
            address,
        };
        for (index, span) in shape.spans.into_iter().enumerate() {
            rig.workers.push(Worker {
                id: WorkerId::solo(GroupId(index as u16)),
                span,
                generation: Generation(0),
                memory: Arc::default(),
                link: None,
            });
            rig.start(index);
        }
        rig
    }

    /// Starts the next generation of a worker.
    pub fn start(&mut self, index: usize) {
        let worker = &mut self.workers[index];
        worker.generation = worker.generation.next();
        worker.memory.orders.killed.store(false, Ordering::SeqCst);
        let identity = RingIdentity {
            worker: worker.id,
            worker_generation: worker.generation,
            netd_generation: Generation(1),
        };
        let linked = link_worker(identity, worker.span, worker.memory.clone(), &self.arena);
        let [submission, completion] = linked.parts.bells();
        let rings = linked.parts.rings();
        self.service.workers.up(&linked.up, rings, submission, completion).unwrap();
        worker.link = Some(linked);
    }

    /// Ends a worker, as the supervisor reports it after the reap.
    pub fn kill(&mut self, index: usize, cause: DeathCause, restarting: bool) {
        let worker = &mut self.workers[index];
        worker.memory.orders.killed.store(true, Ordering::SeqCst);
        self.wait_for_death(index);
        self.report_death(index, cause, restarting);
    }

    /// Lets the worker's completion ring claim more entries than it can hold, and rings its bell.
    pub fn scribble(&self, index: usize) {
        /// Where the tail of the completion ring lies (`shared::shm::layout`).
        const COMPLETION_TAIL: u64 = 16896;
        let parts = &self.workers[index].link.as_ref().unwrap().parts;
        let segment = std::fs::File::from(parts.rings());
        segment.write_all_at(&(1u64 << 40).to_le_bytes(), COMPLETION_TAIL).unwrap();
        parts.completion_bell.ring().unwrap();
    }

    /// Waits until the worker has ended by itself.
    pub fn wait_for_death(&mut self, index: usize) {
        self.workers[index].link.take().unwrap().thread.join().unwrap();
    }

    pub fn report_death(&mut self, index: usize, cause: DeathCause, restarting: bool) {
        let worker = &self.workers[index];
        self.service.workers.down(worker.id, worker.generation, cause, restarting);
    }

    pub fn memory(&self) -> &Memory {
        &self.workers[0].memory
    }

    /// A rig and a session after its first step, for 30 tokens.
    pub async fn with_session() -> (Rig, Client) {
        let rig = Rig::new().await;
        let mut session = rig.session().await;
        session.open(hidden(1, &[1.0]), 30).await.unwrap();
        (rig, session)
    }

    pub async fn session(&self) -> Client {
        let stream =
            self.client.open_stream(self.server, names::INFERENCE, DEADLINE).await.unwrap();
        Client::of(stream)
    }

    /// One more peer, connected to the server.
    pub async fn peer(&self) -> P2p {
        node(false, vec![self.address.clone()]).await.0
    }

    pub async fn call(
        &self,
        protocol: &'static str,
        request: impl Message,
    ) -> Result<Bytes, String> {
        let request = request.encode_to_vec().into();
        match self.client.call_unary(self.server, protocol, request, DEADLINE).await {
            Ok(answer) => Ok(answer),
            Err(CallError::Remote(text)) => Err(text),
            Err(other) => panic!("{other}"),
        }
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        for worker in &mut self.workers {
            worker.memory.orders.killed.store(true, Ordering::SeqCst);
            if let Some(link) = worker.link.take() {
                let ended = link.thread.join();
                assert!(ended.is_ok() || std::thread::panicking(), "the fake worker panicked");
            }
        }
    }
}

/// A worker thread behind fresh rings, and what netd is told of it.
pub struct Linked {
    pub thread: JoinHandle<()>,
    pub parts: LinkParts,
    pub up: WorkerUp,
}

/// What the supervisor and a worker do to link it.
pub fn link_worker(
    identity: RingIdentity,
    span: Span,
    memory: Arc<Memory>,
    arena: &MemfdSegment,
) -> Linked {
    let parts = LinkParts::over(identity, arena);
    let up = WorkerUp {
        kv_survives: !memory.orders.loses_kv.load(Ordering::SeqCst),
        capacity: Capacity { inference_rps: 50.0, forward_rps: 100.0 },
        ..parts.worker_up(span, KV_PAGES)
    };
    let limits = JobLimits::of(&facts(), span, KV_PAGES, arena.len() as u64);
    let (worker, arena) = (parts.worker(), ArenaMap::map(arena).unwrap());
    let thread = std::thread::spawn(move || work(&memory, &limits, worker, &arena));
    Linked { thread, parts, up }
}

fn work(memory: &Memory, limits: &JobLimits, mut worker: FakeWorker, arena: &ArenaMap) {
    let orders = &memory.orders;
    while !orders.killed.load(Ordering::SeqCst) {
        worker.wait(Duration::ZERO, Duration::from_millis(5));
        while let Some(job) = worker.take() {
            // A job that was taken while the order came is held as well.
            while orders.paused.load(Ordering::SeqCst) {
                orders.holds.store(true, Ordering::SeqCst);
                if orders.killed.load(Ordering::SeqCst) {
                    return;
                }
                std::thread::sleep(Duration::from_millis(1));
            }
            let mut bytes = vec![0u8; job.body.len as usize];
            arena.read(job.body.offset, &mut bytes).unwrap();
            let body = JobBody::decode(&bytes, limits);
            if let Ok(body) = &body {
                memory.jobs.lock().unwrap().push(body.clone());
                compute(memory, body, arena);
                if body.tokens == orders.dies_at_tokens.load(Ordering::SeqCst) {
                    return;
                }
            }
            let (result, done) = (body.map(drop), worker.completion(job.id));
            worker.post(Completion { result, queue_ns: 1, compute_ns: 2, ..done }.encode());
        }
    }
}

/// The gradient of the input is twice that of the output per block, plus the input itself; the
/// gradient of a prompt is the prompt, plus 100 × its block, plus 10 × its row.
fn compute_gradients(body: &JobBody, arena: &ArenaMap) {
    let (batch, count) = (body.batch as usize, body.blocks.len());
    let mut values = vec![0f32; batch * body.tokens as usize * HIDDEN];
    let mut gradients = values.clone();
    arena.read(body.input.offset, &mut values).unwrap();
    let output_gradient = body.output_gradient.unwrap();
    arena.read(output_gradient.offset, &mut gradients).unwrap();
    for (gradient, value) in gradients.iter_mut().zip(values) {
        *gradient = *gradient * 2f32.powi(count as i32) + value;
    }
    arena.write(body.output.offset, &gradients).unwrap();
    let Some(prompts) = body.prompts else { return };
    let row_len = prompts.tokens as usize * HIDDEN;
    let mut given = vec![0f32; count * prompts.batch as usize * row_len];
    arena.read(prompts.slot.offset, &mut given).unwrap();
    let mut result = Vec::new();
    for (block, rows) in body.blocks.iter().zip(given.chunks(given.len() / count)) {
        for row in 0..batch {
            let from = row % prompts.batch as usize * row_len;
            let values = rows[from..from + row_len].iter();
            result.extend(values.map(|value| value + (100 * block.0 as usize + 10 * row) as f32));
        }
    }
    let slot = body.prompt_gradient.unwrap();
    arena.write(slot.offset, &result).unwrap();
}

fn compute(memory: &Memory, body: &JobBody, arena: &ArenaMap) {
    if body.kind == WorkKind::Backward {
        return compute_gradients(body, arena);
    }
    let (batch, tokens) = (body.batch as usize, body.tokens as usize);
    let mut values = vec![0f32; batch * tokens * HIDDEN];
    arena.read(body.input.offset, &mut values).unwrap();
    let mut cells = memory.cells.lock().unwrap();
    for copy in &body.pages.copies {
        for block in &body.blocks {
            let source = cells[&(*block, copy.source)];
            let target = cells.entry((*block, copy.destination)).or_insert([f32::NAN; PAGE_TOKENS]);
            let count = copy.tokens as usize;
            target[..count].copy_from_slice(&source[..count]);
        }
    }
    for (row, all) in values.chunks_mut(tokens * HIDDEN).enumerate() {
        if body.kind.is_step() {
            let prefix = body.pages.prefixes[row] as usize;
            for (token, state) in all.chunks_mut(HIDDEN).enumerate() {
                let at = |position: usize| {
                    (body.pages.tables[row][position / PAGE_TOKENS], position % PAGE_TOKENS)
                };
                for block in &body.blocks {
                    let (page, cell) = at(prefix + token);
                    let page = cells.entry((*block, page)).or_insert([f32::NAN; PAGE_TOKENS]);
                    page[cell] = state[0];
                }
                let sum = (0..=prefix + token).map(|position| {
                    let (page, cell) = at(position);
                    cells[&(body.blocks[0], page)][cell]
                });
                state[0] = sum.sum();
            }
        }
        all.iter_mut().for_each(|value| *value += body.blocks.len() as f32);
    }
    arena.write(body.output.offset, &values).unwrap();
}

/// Hidden states of which element 0 is given for every token, and all others are 0.
pub fn hidden(batch: usize, firsts: &[f32]) -> Tensor {
    let states = firsts.iter().flat_map(|first| {
        let mut state = [0f32; HIDDEN];
        state[0] = *first;
        state
    });
    let bytes: Vec<u8> = states.flat_map(f32::to_le_bytes).collect();
    raw_tensor(&[batch, firsts.len() / batch.max(1), HIDDEN], WireDtype::F32, bytes.into()).unwrap()
}

/// Element 0 of every token of a float32 tensor.
pub fn firsts(tensor: &Tensor) -> Vec<f32> {
    let value = |bytes: &[u8]| f32::from_le_bytes(bytes[..4].try_into().unwrap());
    tensor.buffer.chunks(4 * HIDDEN).map(value).collect()
}

pub fn uids(blocks: std::ops::Range<u32>) -> String {
    swarm::wire::uid::chain(PREFIX, blocks)
}

/// One session of a client.
pub struct Client {
    pub stream: RpcStream,
    pub id: String,
    steps: u32,
}

impl Client {
    pub fn steps(&self) -> u32 {
        self.steps
    }

    pub fn of(stream: RpcStream) -> Client {
        Client { stream, id: uuid::Uuid::new_v4().to_string(), steps: 0 }
    }

    /// The message of a step as Petals' client sends it.
    pub fn message(
        &mut self,
        states: Tensor,
        open: Option<u32>,
        start: Option<u32>,
        hypo: Option<&[i64]>,
    ) -> ExpertRequest {
        self.steps += 1;
        let step_id = format!("step-{}", self.steps);
        let metadata = StepMetadata {
            session_id: &self.id,
            step_id: &step_id,
            open: open.map(|length| (length, None)),
            next_servers: &[],
            start_from_position: start,
            wants_times: false,
        };
        let hypo = hypo.map_or_else(
            || dummy_tensor(WireDtype::I64),
            |ids| {
                let bytes: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
                raw_tensor(&[ids.len()], WireDtype::I64, bytes.into()).unwrap()
            },
        );
        ExpertRequest {
            uid: uids(0..BLOCKS),
            tensors: vec![states, dummy_tensor(WireDtype::F32), hypo],
            metadata: metadata.encode().into(),
        }
    }

    pub async fn send(&mut self, request: &ExpertRequest) {
        self.stream.send(request.encode_to_vec().into()).await.unwrap();
    }

    /// The next answer: a tensor, or the text of an error.
    pub async fn answer(&mut self) -> Result<Tensor, String> {
        match tokio::time::timeout(DEADLINE, self.stream.recv()).await.expect("an answer in time") {
            Ok(Some(bytes)) => {
                let mut response = ExpertResponse::decode(bytes).unwrap();
                assert_eq!(response.tensors.len(), 1);
                Ok(response.tensors.remove(0))
            }
            Ok(None) => Err("closed".into()),
            Err(CallError::Remote(text)) => Err(text),
            Err(other) => panic!("{other}"),
        }
    }

    pub async fn ask(&mut self, request: &ExpertRequest) -> Result<Tensor, String> {
        self.send(request).await;
        self.answer().await
    }

    /// A first step over `states`.
    pub async fn open(&mut self, states: Tensor, length: u32) -> Result<Tensor, String> {
        let message = self.message(states, Some(length), Some(0), None);
        self.ask(&message).await
    }

    pub async fn step(
        &mut self,
        states: Tensor,
        start: Option<u32>,
        hypo: Option<&[i64]>,
    ) -> Result<Tensor, String> {
        let message = self.message(states, None, start, hypo);
        self.ask(&message).await
    }

    /// Ends the session as Petals' client does, and waits for the server's close.
    pub async fn close(mut self) {
        self.send(&ExpertRequest::default()).await;
        let _ = self.stream.finish().await;
        assert_eq!(self.answer().await, Err("closed".into()));
        self.stream.close().await;
    }
}

/// Waits until `done`; the condition must come true by itself.
pub async fn until(done: impl Fn() -> bool) {
    let poll = async {
        while !done() {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    tokio::time::timeout(DEADLINE, poll).await.expect("the condition comes true in time");
}
