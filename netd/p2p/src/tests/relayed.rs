//! Nodes that nobody can dial, reached through relays, all in this process.

use std::sync::atomic::{AtomicU64, Ordering};

use super::*;
use resource_manager::circuits::SAVED;

/// An address of its own, to listen on and to announce: a relay has to announce one.
fn memory_address() -> Multiaddr {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    Multiaddr::empty().with(Protocol::Memory(NEXT.fetch_add(1, Ordering::Relaxed)))
}

async fn relay(initial_peers: Vec<Multiaddr>) -> Node {
    let addr = memory_address();
    P2p::start(P2pConfig {
        listen: vec![addr.clone()],
        announce: vec![addr],
        traversal: Traversal { auto_relay: false, ..Traversal::SERVER },
        ..config(initial_peers)
    })
    .await
    .expect("start")
}

/// A node without a listener: like one behind a firewall that lets nobody in.
async fn hidden(initial_peers: Vec<Multiaddr>) -> Node {
    P2p::start(P2pConfig {
        listen: Vec::new(),
        traversal: Traversal::SERVER,
        ..config(initial_peers)
    })
    .await
    .expect("start")
}

async fn reserved(node: &P2p, count: usize) {
    let mut relayed = node.relayed_addrs();
    let enough = relayed.wait_for(|addrs| addrs.len() == count);
    drop(enough.await.expect("the node runs"));
}

#[test]
fn a_node_that_cannot_be_dialled_is_called_by_its_id_through_a_relay() {
    block_on(async {
        let (relay, _inbound) = relay(Vec::new()).await;
        let peers = vec![full_address(&relay).await];
        let (server, inbound) = hidden(peers.clone()).await;
        assert!(server.relayed_addrs().borrow().is_empty(), "not asked for");
        server.set_reachable(false).await;
        reserved(&server, 1).await;
        echo(inbound);
        let (client, _inbound) = P2p::start(P2pConfig {
            kad_server: false,
            traversal: Traversal::CLIENT,
            ..config(peers)
        })
        .await
        .expect("start");
        let large = Bytes::from(vec![7; 1 << 20]);
        let call = || client.call_unary(server.peer_id(), UNARY, large.clone(), CALL);
        // Until the relay has been told by the server where it is.
        until(|| async { call().await == Ok(large.clone()) }).await;
        assert!(server.listen_addrs().await.is_empty(), "circuits are no listeners");
    });
}

#[test]
fn a_circuit_is_no_faster_than_the_relay_lets_it_be() {
    block_on(async {
        let (relay, relay_inbound) = relay(Vec::new()).await;
        echo(relay_inbound);
        relay.relay_at(4_000_000_000);
        let peers = vec![full_address(&relay).await];
        let traversal = Traversal { use_relay: false, ..Traversal::SERVER };
        let hidden = P2pConfig { listen: Vec::new(), traversal, ..config(peers.clone()) };
        let (server, inbound) = P2p::start(hidden).await.expect("start");
        server.set_reachable(false).await;
        reserved(&server, 1).await;
        echo(inbound);
        let client = P2pConfig { traversal: Traversal::NONE, ..config(peers) };
        let (client, _inbound) = P2p::start(client).await.expect("start");
        let call = |bytes: usize| {
            let request = Bytes::from(vec![7; bytes]);
            let answer = client.call_unary(server.peer_id(), UNARY, request.clone(), CALL);
            async move { answer.await == Ok(request) }
        };
        until(|| call(100_000)).await;
        let rate = 200_000;
        relay.relay_at(rate);
        let before = relay.figures().circuit_bytes;
        let started = Instant::now();
        // There and back: what an idle relay has saved up, and then as much as the rate allows.
        let saved = usize::try_from(rate * SAVED.as_secs()).expect("bytes");
        assert!(call(saved / 2).await, "an answer");
        let burst = started.elapsed();
        assert!(burst < Duration::from_secs(1), "{burst:?}");
        assert!(call(200_000).await, "an answer");
        let carried = relay.figures().circuit_bytes - before;
        // Each way is read by the relay and written again, but only the peer's stream counts.
        assert!((2_400_000..2_600_000).contains(&carried), "{carried} bytes");
        let took = started.elapsed();
        let expected = Duration::from_millis(1900)..Duration::from_millis(2500);
        assert!(expected.contains(&took), "{took:?}");
        // What the relay itself answers is no circuit.
        relay.relay_at(1);
        let request = Bytes::from(vec![7; 500_000]);
        let direct = client.call_unary(relay.peer_id(), UNARY, request.clone(), CALL);
        assert_eq!(direct.await, Ok(request));
        assert!(relay.figures().circuit_bytes < before + 2_700_000);
    });
}

#[test]
fn a_relay_that_dies_is_replaced_by_another() {
    block_on(async {
        let mut relays = vec![relay(Vec::new()).await];
        let mut peers = vec![full_address(&relays[0].0).await];
        for _ in 0..2 {
            let next = relay(peers.clone()).await;
            peers.push(full_address(&next.0).await);
            relays.push(next);
        }
        let (server, _inbound) = hidden(peers).await;
        server.set_reachable(false).await;
        reserved(&server, 2).await;
        let used = server.relayed_addrs().borrow().clone();
        let of = |node: &P2p| {
            let id = node.peer_id();
            used.iter().any(|addr| addr.iter().any(|part| part == Protocol::P2p(id)))
        };
        let at = relays.iter().position(|(node, _)| of(node));
        let (dying, _) = relays.remove(at.expect("one of them is used"));
        let gone = dying.peer_id();
        dying.shutdown().await;
        let mut relayed = server.relayed_addrs();
        let replaced = relayed.wait_for(|addrs| {
            let dead = |addr: &Multiaddr| addr.iter().any(|part| part == Protocol::P2p(gone));
            addrs.len() == 2 && !addrs.iter().any(dead)
        });
        drop(replaced.await.expect("the node runs"));
    });
}

#[test]
fn protocols_that_are_withdrawn_are_not_spoken_any_more() {
    block_on(async {
        let ((caller, _), (callee, inbound)) = pair().await;
        echo(inbound);
        let call = || caller.call_unary(callee.peer_id(), UNARY, Bytes::new(), CALL);
        assert_eq!(call().await, Ok(Bytes::new()));
        callee.withdraw(vec![UNARY]).await;
        until(|| async { call().await == Err(CallError::NotSupported(UNARY)) }).await;
    });
}

#[test]
fn an_initial_peer_that_comes_back_is_noticed() {
    block_on_sockets(async {
        let (first, _inbound) = start(Vec::new()).await;
        let mut same = config(Vec::new());
        same.listen = vec![own_address(2)];
        let (bootstrap, _inbound) = P2p::start(same.clone()).await.expect("start");
        same.listen = bootstrap.listen_addrs().await;
        let peers = vec![full_address(&bootstrap).await, full_address(&first).await];
        let (node, _inbound) = start(peers).await;
        until(|| async { node.connected_peers().await.len() == 2 }).await;
        let mut back = node.reconnections();
        bootstrap.shutdown().await;
        until(|| async { node.connected_peers().await.len() == 1 }).await;
        assert_eq!(*back.borrow_and_update(), 0);
        let (_again, _inbound) = P2p::start(same).await.expect("the address is free");
        back.changed().await.expect("the node runs");
        assert_eq!(node.connected_peers().await.len(), 2);
    });
}
