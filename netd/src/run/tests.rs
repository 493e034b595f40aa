//! The daemon's life against a supervisor in the same process, with real segments, sockets and DHT
//! nodes.

use std::path::Path;
use std::sync::atomic::Ordering::SeqCst;

use prost::Message;
use shared::block::Span;
use shared::config::{NetdConfig, SpanChoice, Throughput};
use shared::control::{BoardSeat, DeathCause, FdTag, Role};
use shared::ids::{Generation, GroupId, WorkerId};
use shared::shm::board::{Board, Occupant};
use shared::shm::pair::RingIdentity;
use shared::shm::sessions::SESSIONS_BYTES;
use shared::survey::Capacity;
use swarm::wire::messages::ExpertUid;
use swarm::wire::records::{ServerInfo, ServerState};
use swarm::{names, view};
use testkit::configs::netd_config;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use super::*;
use crate::dht_node;
use crate::rpc::tests::rig::{self, BLOCKS, DEADLINE, Linked, Memory, facts, hidden, until};

mod moves;
mod readiness;

/// A supervisor around one netd.
struct Supervisor {
    board: Board,
    arena: MemfdSegment,
    memory: Arc<Memory>,
    folder: tempfile::TempDir,
    to: mpsc::Sender<FromSupervisor>,
    from: mpsc::Receiver<FromNetd>,
    netd: JoinHandle<Stop>,
    workers: Vec<Linked>,
}

/// What netd is told of the model.
fn model(kept: Option<Capacity>) -> ToNetd {
    ToNetd::Model { facts: facts(), fits: None, kept }
}

const ARENA_BYTES: u64 = 4 << 20;

pub(crate) fn config(folder: &Path, initial_peers: Vec<String>) -> NetdConfig {
    NetdConfig {
        dht_prefix: Some(rig::PREFIX.into()),
        identity_path: Some(folder.join("identity")),
        public_name: Some("tests".into()),
        ..netd_config(initial_peers)
    }
}

impl Supervisor {
    fn new(initial_peers: Vec<String>, change: impl FnOnce(&mut NetdInit)) -> Supervisor {
        let folder = tempfile::tempdir().unwrap();
        let config = config(folder.path(), initial_peers);
        Supervisor::start(folder, config, change)
    }

    fn start(
        folder: tempfile::TempDir,
        config: NetdConfig,
        change: impl FnOnce(&mut NetdInit),
    ) -> Supervisor {
        Supervisor::with(folder, config, change, |inbox, outbox| {
            tokio::spawn(async move { daemon(inbox, &outbox).await })
        })
    }

    /// Around what `run` makes of the two ends.
    fn with(
        folder: tempfile::TempDir,
        config: NetdConfig,
        change: impl FnOnce(&mut NetdInit),
        run: impl FnOnce(Inbox, NetdOutbox) -> JoinHandle<Stop>,
    ) -> Supervisor {
        let board = Board::create("test", 0).unwrap();
        let mut init = NetdInit {
            has_metrics: false,
            board: BoardSeat { slot: 0, heartbeat: Duration::from_millis(100) },
            generation: Generation(1),
            config,
            previous_addrs: Vec::new(),
            arena_bytes: ARENA_BYTES,
            served: None,
            retired: Vec::new(),
            whole: None,
            paused: false,
            fds: FdTag(1),
        };
        change(&mut init);
        let occupant = Occupant { role: Role::Netd, generation: init.generation, worker: None };
        board.assign(0, &occupant).unwrap();
        let arena = MemfdSegment::create("sepal-nettest-arena", ARENA_BYTES as usize).unwrap();
        let (to, inbox) = mpsc::channel(8);
        let (outbox, from) = mpsc::channel(8);
        let sessions = MemfdSegment::create("sepal-nettest-sessions", SESSIONS_BYTES).unwrap();
        let fds = [arena.try_clone(), board.try_clone(), sessions.try_clone()];
        let fds = fds.map(Result::unwrap).into();
        to.try_send(FromSupervisor { message: ToNetd::Init(Box::new(init)), fds }).unwrap();
        let netd = run(inbox, NetdOutbox::of(outbox));
        let memory = Arc::default();
        Supervisor { board, arena, memory, folder, to, from, netd, workers: Vec::new() }
    }

    async fn tell(&self, message: ToNetd) {
        self.to.send(FromSupervisor { message, fds: Vec::new() }).await.unwrap();
    }

    async fn hear(&mut self) -> FromNetd {
        tokio::time::timeout(DEADLINE, self.from.recv()).await.unwrap().unwrap()
    }

    async fn listening(&mut self) -> (String, Vec<String>) {
        match self.hear().await {
            FromNetd::Listening { peer_id, addrs } => (peer_id, addrs),
            other => panic!("{other:?}"),
        }
    }

    /// Up to the span that netd proposes, with the id of its peer.
    async fn proposed(&mut self, kept: Option<Capacity>) -> (String, Span) {
        let (peer_id, _) = self.listening().await;
        self.tell(model(kept)).await;
        match self.hear().await {
            FromNetd::ProposedSpan(span) => (peer_id, span),
            other => panic!("{other:?}"),
        }
    }

    async fn online(&mut self) {
        assert!(matches!(self.hear().await, FromNetd::Online));
    }

    /// Starts the worker of a group.
    async fn start_worker(&mut self, group: u16, generation: u32, span: Span) {
        let identity = RingIdentity {
            worker: WorkerId::solo(GroupId(group)),
            worker_generation: Generation(generation),
            netd_generation: Generation(1),
        };
        self.memory.orders.killed.store(false, SeqCst);
        let linked = rig::link_worker(identity, span, self.memory.clone(), &self.arena);
        let (message, fds) = (ToNetd::WorkerUp(linked.up.clone()), linked.parts.for_netd());
        self.to.send(FromSupervisor { message, fds }).await.unwrap();
        self.workers.push(linked);
    }

    fn end_workers(&mut self) {
        self.memory.orders.killed.store(true, SeqCst);
        for linked in self.workers.drain(..) {
            linked.thread.join().unwrap();
        }
    }

    /// Tells that this generation of the worker of group 0 is gone.
    async fn tell_down(&self, generation: u32, restarting: bool) {
        let (worker, cause) = (WorkerId::solo(GroupId(0)), DeathCause::Outside);
        let generation = Generation(generation);
        self.tell(ToNetd::WorkerDown { worker, generation, cause, restarting }).await;
    }

    async fn drained(&mut self) {
        self.tell(ToNetd::Drain).await;
        assert!(matches!(self.ended().await, Stop::Drained));
    }

    async fn ended(&mut self) -> Stop {
        tokio::time::timeout(DEADLINE, &mut self.netd).await.unwrap().unwrap()
    }

    async fn fatal(&mut self) -> Fatal {
        match self.ended().await {
            Stop::Fatal(fatal) => fatal,
            other => panic!("{other:?}"),
        }
    }
}

impl Drop for Supervisor {
    fn drop(&mut self) {
        self.end_workers();
    }
}

async fn bootstrap_node() -> Joined {
    dht_node::start(&dht_node::DhtNodeConfig::on_loopback(Vec::new())).await.unwrap()
}

async fn record(node: &Joined, peer_id: &str, block: usize) -> Option<ServerInfo> {
    let blocks = view::read_blocks(&node.dht, rig::PREFIX, 0..BLOCKS).await.unwrap();
    blocks[block].get(peer_id).cloned()
}

async fn until_state(node: &Joined, peer_id: &str, state: ServerState) -> ServerInfo {
    until_record(node, peer_id, |info| info.state == state).await
}

/// The record, as soon as it is as wanted.
async fn until_record(
    node: &Joined,
    peer_id: &str,
    wanted: impl Fn(&ServerInfo) -> bool,
) -> ServerInfo {
    let deadline = tokio::time::Instant::now() + 3 * DEADLINE;
    loop {
        let found = record(node, peer_id, 1).await;
        match found {
            Some(info) if wanted(&info) => return info,
            last => assert!(tokio::time::Instant::now() < deadline, "still {last:?}"),
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_goes_from_joining_to_online_to_offline() {
    let node = bootstrap_node().await;
    let mut supervisor = Supervisor::new(node.addrs.clone(), |_| {});
    let (peer_id, addrs) = supervisor.listening().await;
    assert!(addrs[0].ends_with(&format!("/p2p/{peer_id}")), "{addrs:?}");
    let peer = peer_id.parse().unwrap();
    let early = ExpertUid::default().encode_to_vec();
    let early = node.p2p.call_unary(peer, names::INFO, early.into(), DEADLINE).await;
    assert!(early.unwrap_err().to_string().contains("does not serve any block now"));

    supervisor.tell(model(None)).await;
    let span = Span::new(0, BLOCKS).unwrap();
    assert!(
        matches!(supervisor.hear().await, FromNetd::ProposedSpan(proposed) if proposed == span)
    );
    let joining = until_state(&node, &peer_id, ServerState::Joining).await;
    assert_eq!((joining.start_block, joining.end_block), (Some(0), Some(4)));

    supervisor.start_worker(0, 1, span).await;
    supervisor.online().await;
    let online = until_state(&node, &peer_id, ServerState::Online).await;
    assert_eq!(online.cache_tokens_left, Some(2 * 16384 * 4));
    assert_eq!((online.inference_rps, online.forward_rps), (Some(50.0), Some(100.0)));
    assert_eq!(online.throughput, 100.0 / 2.5);
    assert_eq!(online.torch_dtype.as_deref(), Some("float32"));
    assert_eq!(
        (online.quant_type.as_deref(), online.public_name.as_deref()),
        (Some("none"), Some("tests"))
    );

    let stream = node.p2p.open_stream(peer, names::INFERENCE, DEADLINE).await.unwrap();
    let mut session = rig::Client::of(stream);
    assert!(session.open(hidden(1, &[1.0]), 30).await.is_ok());
    until(|| {
        let figures = supervisor.board.view().figures();
        figures.is_some_and(|of| of.clients.sessions == 1 && of.kv.tokens_free == 65536 - 120)
    })
    .await;
    let seat = supervisor.board.view().child_snapshot(0).unwrap();
    assert_eq!(seat.peer_id.as_ref(), Some(&peer_id));
    assert!(addrs[0].contains(&format!("/tcp/{}/", seat.net_port.unwrap())), "{addrs:?}");

    supervisor.drained().await;
    assert_eq!(session.answer().await, Err("this server is shutting down".into()));
    assert_eq!(record(&node, &peer_id, 3).await.unwrap().state, ServerState::Offline);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_that_comes_back_goes_unnoticed_and_one_that_does_not_fails_its_sessions() {
    let node = bootstrap_node().await;
    let mut supervisor = Supervisor::new(node.addrs.clone(), |_| {});
    let (peer_id, span) = supervisor.proposed(None).await;
    supervisor.start_worker(0, 1, span).await;
    supervisor.online().await;
    let stream =
        node.p2p.open_stream(peer_id.parse().unwrap(), names::INFERENCE, DEADLINE).await.unwrap();
    let mut session = rig::Client::of(stream);
    session.open(hidden(1, &[1.0]), 30).await.unwrap();
    supervisor.end_workers();
    supervisor.tell_down(1, true).await;
    let message = session.message(hidden(1, &[2.0]), None, None, None);
    session.send(&message).await;
    supervisor.start_worker(0, 2, span).await;
    assert_eq!(rig::firsts(&session.answer().await.unwrap()), [7.0]);
    until_state(&node, &peer_id, ServerState::Online).await;
    supervisor.end_workers();
    supervisor.tell_down(2, false).await;
    let message = session.message(hidden(1, &[3.0]), None, None, None);
    session.send(&message).await;
    let error = session.answer().await.unwrap_err();
    assert!(error.contains("will not be restarted"), "{error}");
    drop(std::mem::replace(&mut supervisor.to, mpsc::channel(1).0));
    assert!(matches!(supervisor.ended().await, Stop::ParentGone));
    until_state(&node, &peer_id, ServerState::Offline).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_left_after_a_loss_is_announced_and_served() {
    let node = bootstrap_node().await;
    let mut supervisor = Supervisor::new(node.addrs.clone(), |_| {});
    let (peer_id, _) = supervisor.proposed(None).await;
    supervisor.start_worker(0, 1, Span::new(0, 1).unwrap()).await;
    let rest = Span::new(1, 4).unwrap();
    supervisor.start_worker(1, 1, rest).await;
    supervisor.online().await;
    until_state(&node, &peer_id, ServerState::Online).await;
    supervisor.tell_down(1, false).await;
    supervisor.tell(ToNetd::Shrink(rest)).await;
    supervisor.online().await;
    let look = async {
        while record(&node, &peer_id, 0).await.unwrap().state != ServerState::Offline {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(DEADLINE, look).await.unwrap();
    let online = until_state(&node, &peer_id, ServerState::Online).await;
    assert_eq!((online.start_block, online.end_block), (Some(1), Some(4)));
    let peer = peer_id.parse().unwrap();
    for (block, served) in [(0, false), (1, true)] {
        let uid = format!("{}.{block}", rig::PREFIX);
        let request = ExpertUid { uid }.encode_to_vec().into();
        let answer = node.p2p.call_unary(peer, names::INFO, request, DEADLINE).await;
        assert_eq!(answer.is_ok(), served, "block {block}: {answer:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_next_generation_keeps_peer_id_port_and_span() {
    let mut first = Supervisor::new(Vec::new(), |_| {});
    let (peer_id, addrs) = first.listening().await;
    first.drained().await;
    let folder = std::mem::replace(&mut first.folder, tempfile::tempdir().unwrap());
    let config = config(folder.path(), Vec::new());
    let served = Span::new(1, 3).unwrap();
    let mut second = Supervisor::start(folder, config, |init| {
        init.generation = Generation(2);
        init.previous_addrs = addrs.clone();
        init.served = Some(served);
    });
    assert_eq!(second.listening().await, (peer_id, addrs));
    second.tell(model(None)).await;
    assert!(matches!(second.hear().await, FromNetd::ProposedSpan(span) if span == served));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_second_server_takes_the_blocks_that_nobody_serves() {
    let node = bootstrap_node().await;
    let mut first = Supervisor::new(node.addrs.clone(), |init| {
        init.config.span = SpanChoice::Fixed(Span::new(0, 2).unwrap());
        init.config.throughput = Throughput::Fixed(10.0);
    });
    let (peer_id, _) = first.proposed(None).await;
    until_state(&node, &peer_id, ServerState::Joining).await;
    let mut second =
        Supervisor::new(node.addrs.clone(), |init| init.config.span = SpanChoice::Count(2));
    assert_eq!(second.proposed(None).await.1, Span::new(2, 4).unwrap());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bad_settings_end_with_one_sentence_that_names_the_value() {
    let mut supervisor = Supervisor::new(Vec::new(), |init| {
        init.config.span = SpanChoice::Fixed(Span::new(2, 9).unwrap());
    });
    supervisor.listening().await;
    supervisor.tell(model(None)).await;
    let fatal = supervisor.fatal().await;
    assert_eq!(fatal.reason, ExitReason::BadConfig);
    assert!(fatal.message.contains("2:9") && fatal.message.contains("0:4"), "{}", fatal.message);

    let mut supervisor = Supervisor::new(Vec::new(), |init| init.config.dht_prefix = None);
    supervisor.listening().await;
    supervisor.tell(model(None)).await;
    let fatal = supervisor.fatal().await;
    assert!(
        fatal.message.contains("--dht_prefix NAME") && fatal.message.contains("tiny"),
        "{}",
        fatal.message
    );

    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    let mut supervisor = Supervisor::new(Vec::new(), |init| {
        init.config.host_maddrs = vec![format!("/ip4/127.0.0.1/tcp/{port}")];
    });
    let fatal = supervisor.fatal().await;
    assert_eq!(fatal.reason, ExitReason::Busy);
    assert!(fatal.message.contains(&port.to_string()), "{}", fatal.message);

    let nobody = "/ip4/127.0.0.1/tcp/9/p2p/12D3KooWEyoppNCUx8Yx66oV9fJnriXwCcXwDDUA2kj6vnc6iDEp";
    let mut supervisor = Supervisor::new(vec![nobody.into()], |_| {});
    let fatal = supervisor.fatal().await;
    assert_eq!(fatal.reason, ExitReason::BadConfig);
    assert!(fatal.message.contains("127.0.0.1/tcp/9"), "{}", fatal.message);

    let mut supervisor = Supervisor::new(Vec::new(), |init| init.arena_bytes += 4096);
    assert!(supervisor.fatal().await.message.contains("instead of 4198400"));
}
