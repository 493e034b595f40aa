//! Real nodes on loopback ask each other whether they can be dialled.

use super::*;
use p2p::Inbound;
use std::net::TcpListener;
use tokio::net::TcpSocket;
use tokio::sync::mpsc;

/// No wait is longer; nothing is asserted about it.
const DEADLINE: Duration = Duration::from_secs(60);

/// No time passes meanwhile, for callers that ask too often least of all.
fn block_on<T>(future: impl Future<Output = T>) -> T {
    let mut runtime = tokio::runtime::Builder::new_current_thread();
    let runtime = runtime.enable_all().build().expect("runtime");
    runtime.block_on(async {
        let _clock = crate::clock::stop();
        timeout(DEADLINE, future).await.expect("hangs")
    })
}

fn config(initial_peers: Vec<Multiaddr>) -> P2pConfig {
    P2pConfig::on_loopback(initial_peers, vec![protocol()], DEADLINE)
}

struct Node {
    p2p: P2p,
    checker: Checker,
}

fn serve(p2p: P2p, mut inbound: mpsc::Receiver<Inbound>) -> Node {
    let checker = Checker::new(p2p.clone());
    let served = checker.clone();
    tokio::spawn(async move {
        while let Some(Inbound::Unary { peer, request, responder, .. }) = inbound.recv().await {
            let checker = served.clone();
            tokio::spawn(async move {
                let answer = checker.answer(peer, request).await;
                let _ = responder.respond(answer).await;
            });
        }
    });
    Node { p2p, checker }
}

async fn start(config: P2pConfig) -> Node {
    let (p2p, inbound) = P2p::start(config).await.expect("start");
    serve(p2p, inbound)
}

async fn addr(node: &Node) -> Multiaddr {
    let addr = node.p2p.listen_addrs().await.pop().expect("listens");
    addr.with(Protocol::P2p(node.p2p.peer_id()))
}

#[test]
fn a_listening_peer_is_dialled_back_and_found_reachable() {
    block_on(async {
        let callee = start(config(Vec::new())).await;
        let caller = start(config(vec![addr(&callee).await])).await;
        let answer = check_direct(&caller.p2p, vec![callee.p2p.peer_id()]).await;
        assert_eq!(answer, Some(true));
        assert_eq!(callee.checker.figures().reachable, 1);
        // The probe said who it dialled, and nothing of it stays.
        assert_eq!(
            callee.p2p.connected_peers().await,
            [caller.p2p.peer_id()],
            "the probe is another node"
        );
    });
}

#[test]
fn a_peer_that_announces_what_nobody_answers_at_is_not_reachable() {
    block_on(async {
        let callee = start(config(Vec::new())).await;
        // Nobody listens at a port that is only bound.
        let closed = TcpSocket::new_v4().expect("a socket");
        closed.bind("127.0.0.1:0".parse().expect("address")).expect("bind");
        let announce = vec![multiaddr(closed.local_addr().expect("address"))];
        let behind_nat = P2pConfig { announce, ..config(vec![addr(&callee).await]) };
        let caller = start(behind_nat).await;
        let answer = check_direct(&caller.p2p, vec![callee.p2p.peer_id()]).await;
        assert_eq!(answer, Some(false));
        assert_eq!(callee.checker.figures().unreachable, 1);
    });
}

#[test]
fn nobody_is_dialled_who_is_not_the_caller_at_its_own_address() {
    block_on(async {
        let callee = start(config(Vec::new())).await;
        // A victim: anything that accepts connections, on another address of this machine.
        let victim = TcpListener::bind("127.0.0.2:0").expect("bind");
        victim.set_nonblocking(true).expect("nonblocking");
        let announce = vec![multiaddr(victim.local_addr().expect("address"))];
        let attacker = P2pConfig { announce, ..config(vec![addr(&callee).await]) };
        let attacker = start(attacker).await;
        let asked = callee.p2p.peer_id();
        assert_eq!(check_direct(&attacker.p2p, vec![asked]).await, Some(false));
        let third = PeerId::random();
        assert_eq!(ask(&attacker.p2p, asked, third).await, Some(false));
        assert_eq!(callee.checker.figures().refused, 1);
        // The kernel takes a connection when it is dialled, before anybody could know that it fails.
        assert!(victim.accept().is_err(), "the victim was dialled");
    });
}

#[test]
fn callers_that_ask_too_often_are_refused_and_nothing_is_concluded() {
    block_on(async {
        let callee = start(config(Vec::new())).await;
        let caller = start(config(vec![addr(&callee).await])).await;
        let (me, asked) = (caller.p2p.peer_id(), callee.p2p.peer_id());
        assert_eq!(ask(&caller.p2p, asked, me).await, Some(true));
        assert_eq!(ask(&caller.p2p, asked, me).await, None);
        assert_eq!(check_direct(&caller.p2p, vec![asked]).await, None);
        assert_eq!(check_direct(&caller.p2p, Vec::new()).await, None);
        assert_eq!(callee.checker.figures().refused, 2);
        // About itself it always answers.
        assert_eq!(ask(&caller.p2p, asked, asked).await, Some(true));
        let garbage = callee.checker.answer(me, Bytes::from_static(&[0xff])).await;
        assert!(garbage.is_err());
    });
}

#[test]
fn recent_callers_are_bounded_and_forgotten() {
    let mut shared = ReachabilityState::default();
    let (now, peer) = (Instant::now(), PeerId::random());
    assert!(shared.admit(peer, now));
    assert!(!shared.admit(peer, now + PROBE_PERIOD / 2));
    assert!(shared.admit(peer, now + PROBE_PERIOD));
    while shared.recent.len() < MAX_RECENT {
        assert!(shared.admit(PeerId::random(), now + PROBE_PERIOD));
    }
    assert!(!shared.admit(PeerId::random(), now + PROBE_PERIOD));
    assert!(shared.admit(PeerId::random(), now + 2 * PROBE_PERIOD));
    assert_eq!(shared.recent.len(), 1);
}

#[test]
fn only_plain_tcp_addresses_at_a_seen_ip_are_dialled() {
    block_on(async {
        let introduction = Introduction {
            seen_at: vec!["127.0.0.1".parse().expect("ip")],
            announced: [
                "/ip4/127.0.0.1/tcp/1",
                "/ip4/127.0.0.1/tcp/1",
                "/ip4/127.0.0.1/tcp/0",
                "/ip4/127.0.0.1/udp/1/quic-v1",
                "/ip4/127.0.0.3/tcp/1",
                "/dns4/localhost/tcp/2",
                "/ip4/127.0.0.1/tcp/3/p2p-circuit",
                "/ip4/127.0.0.1/tcp/4",
                "/ip4/127.0.0.1/tcp/5",
                "/ip4/127.0.0.1/tcp/6",
            ]
            .map(|text| text.parse().expect("address"))
            .to_vec(),
        };
        let ports: Vec<u16> = dialable(&introduction).await.iter().map(SocketAddr::port).collect();
        assert_eq!(ports, [1, 2, 4, 5]);
    });
}
