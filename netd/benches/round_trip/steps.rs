//! Decode steps through a whole server on loopback: libp2p, session, page tables, arena, rings and
//! back. The worker computes nothing; the client is a process of its own, on the worker's core,
//! which sleeps while the server works.

use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use netd::membership::rate::serve::Counterpart;
use netd::membership::reachability::{self, Checker};
use netd::rpc::dispatch::Router;
use netd::rpc::resumption::Resumption;
use netd::rpc::{Service, ServiceParts, Timeouts, protocols};
use netd::sessions::admission::KvMemory;
use netd::sessions::pool::Pool;
use netd::sessions::queue::WaitQueue;
use netd::sessions::shares::NetOf;
use netd::workers::Workers;
use netd::workers::arena::{self, ArenaMemory};
use p2p::{P2p, P2pConfig};
use prost::Message;
use shared::block::Span;
use shared::limits::Limits;
use shared::model::ModelFacts;
use shared::shm::arena::ArenaMap;
use shared::shm::segment::MemfdSegment;
use swarm::names;
use swarm::wire::messages::ExpertRequest;
use swarm::wire::metadata::StepMetadata;
use swarm::wire::tensor::{WireDtype, dummy_tensor, raw_tensor};
use swarm::wire::uid;
use testkit::facts::facts;
use tokio::sync::watch;

use crate::{BLOCKS, KV_PAGES, Worker, end_with_parent, micros, percentile};

const STEPS: u32 = 900;
const HIDDEN: usize = 192;
const PREFIX: &str = "bench";
const ARENA_BYTES: u64 = 16 << 20;
const LIMIT: Duration = Duration::from_secs(60);

/// Serves one client and prints what the server counted. The worker and the client run on `core`.
pub async fn measure(core: usize) {
    let worker = Worker::start(core, false);
    let arena = MemfdSegment::create("sepal-bench-arena", ARENA_BYTES as usize).expect("an arena");
    let plan = arena::plan(ARENA_BYTES, HIDDEN as u64 * 4).expect("a plan");
    let arena = ArenaMemory::new(ArenaMap::map(&arena).expect("map"), plan);
    let (workers, _broken) = Workers::new(arena);
    let [submission, completion] = worker.parts.bells();
    workers.up(&worker.up(), worker.parts.rings(), submission, completion).expect("linked");
    let (_draining, drained) = watch::channel(false);
    let mut served = protocols();
    served.push(reachability::protocol());
    let config = P2pConfig::on_loopback(Vec::new(), served, LIMIT);
    let (server, inbound) = P2p::start(config).await.expect("a node");
    let service = Arc::new(service(workers, server.clone(), drained));
    let (_online, serving) = watch::channel(Some(service.clone()));
    let router = Router {
        checker: Checker::new(server.clone()),
        counterpart: Counterpart::new(server.clone()),
        service: serving,
    };
    tokio::spawn(router.run(inbound, |_, _, _, _| {}));
    let addr =
        server.listen_addrs().await[0].clone().with_p2p(server.peer_id()).expect("an address");
    println!("\none decode step over loopback, nothing computed");
    println!("  {:<28}{:>10}{:>10}", "", "p50 us", "p99 us");
    let client = tokio::task::spawn_blocking(move || {
        Command::new("/proc/self/exe")
            .args(["client", &core.to_string(), &addr.to_string()])
            .stdin(Stdio::null())
            .status()
    });
    let status = client.await.expect("the client").expect("the client");
    assert!(status.success(), "the client failed");
    let figures = service.telemetry.figures();
    let (p50, p99) = (micros(figures.p50), micros(figures.p99));
    println!("  {:<28}{p50:>10.0}{p99:>10.0}   {} steps", "inside the server", figures.count);
    server.shutdown().await;
}

fn service(workers: Workers, p2p: P2p, draining: watch::Receiver<bool>) -> Service {
    let span = Span::new(0, BLOCKS).expect("a span");
    let facts = ModelFacts { num_blocks: BLOCKS, hidden_size: HIDDEN as u32, ..facts() };
    let limits =
        Limits { inference_max_length: 1024, attn_cache_tokens: 1024, max_batch_size: 1024 };
    let pool = Pool::new(span, KV_PAGES, limits.attn_cache_tokens);
    Service::new(ServiceParts {
        prefix: PREFIX.into(),
        kv: KvMemory::new(
            WaitQueue::new(pool, 1.0, NetOf::default()),
            facts.kv_token_bytes() as u64,
        ),
        facts,
        limits,
        span,
        workers: Arc::new(workers),
        timeouts: Timeouts { request: LIMIT, session: LIMIT, step: LIMIT, max_alloc: LIMIT },
        compression: shared::config::Compression::None,
        gradient_bytes: shared::model::GRADIENT_BYTES,
        p2p,
        dht_client_mode: false,
        draining,
        telemetry: Arc::default(),
        resumption: Resumption::new(None, Duration::ZERO),
    })
}

/// The client's process: one session, [`STEPS`] tokens, each step when the one before is answered.
pub fn client(core: &str, addr: &str) {
    end_with_parent(core);
    let runtime = netd::run::reactor().expect("a reactor");
    let mut times = runtime.block_on(generate(addr));
    times.sort_unstable();
    let (p50, p99) = (micros(percentile(&times, 50)), micros(percentile(&times, 99)));
    println!("  {:<28}{p50:>10.0}{p99:>10.0}", "as the client sees it");
}

async fn generate(addr: &str) -> Vec<Duration> {
    let addr: p2p::Multiaddr = addr.parse().expect("an address");
    let config = P2pConfig::of_caller(vec![addr.clone()], LIMIT);
    let (p2p, _inbound) = P2p::start(config).await.expect("a node");
    let server = p2p.connect(addr).await.expect("connected");
    let mut stream = p2p.open_stream(server, names::INFERENCE, LIMIT).await.expect("a session");
    let hidden = raw_tensor(&[1, 1, HIDDEN], WireDtype::F32, vec![0u8; 4 * HIDDEN].into());
    let hidden = hidden.expect("a tensor");
    let mut times = Vec::new();
    for step in 0..STEPS {
        let step_id = step.to_string();
        let metadata = StepMetadata {
            session_id: "bench",
            step_id: &step_id,
            open: (step == 0).then_some((STEPS, None)),
            next_servers: &[],
            start_from_position: None,
            wants_times: false,
        };
        let request = ExpertRequest {
            uid: uid::chain(PREFIX, 0..BLOCKS),
            tensors: vec![
                hidden.clone(),
                dummy_tensor(WireDtype::F32),
                dummy_tensor(WireDtype::I64),
            ],
            metadata: metadata.encode().into(),
        };
        let bytes = request.encode_to_vec();
        let start = Instant::now();
        stream.send(bytes.into()).await.expect("sent");
        let answer = stream.recv().await.expect("an answer");
        assert!(answer.is_some(), "the server closed");
        times.push(start.elapsed());
    }
    times
}
