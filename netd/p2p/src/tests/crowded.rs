//! A node that is full of strangers still has a place for those who matter to it.

use super::*;
use resource_manager::connection_limits::Places;

/// Six places for everybody, two more for servers, two more for peers with a session.
const PLACES: Places = Places { total: 40, inbound: 10, for_sessions: 2, for_servers: 2 };
const GENERAL: usize = 6;

/// A callee that answers, and whose places for everybody are taken.
async fn full() -> (P2p, Vec<Node>) {
    let (callee, inbound) = P2p::start_with(config(Vec::new()), PLACES).await.expect("start");
    echo(inbound);
    let mut strangers = Vec::new();
    for _ in 0..GENERAL {
        strangers.push(start(vec![full_address(&callee).await]).await);
    }
    until(|| async { callee.connected_peers().await.len() == GENERAL }).await;
    (callee, strangers)
}

/// A node of this identity that knows where the callee is. Whether it gets in, it finds out itself.
async fn visitor(callee: &P2p, keypair: &Keypair) -> P2p {
    let own = P2pConfig { keypair: keypair.clone(), ..config(Vec::new()) };
    let (visitor, _inbound) = P2p::start(own).await.expect("start");
    let addr = callee.listen_addrs().await.pop().expect("listens");
    visitor.add_address(callee.peer_id(), addr).await;
    visitor
}

async fn is_served(visitor: &P2p, callee: &P2p) -> bool {
    let call = visitor.call_unary(callee.peer_id(), UNARY, Bytes::from_static(b"x"), CALL);
    call.await.is_ok()
}

#[test]
fn a_client_whose_connection_broke_comes_back_to_a_node_full_of_strangers() {
    block_on(async {
        let (callee, inbound) = P2p::start_with(config(Vec::new()), PLACES).await.expect("start");
        echo(inbound);
        let keypair = Keypair::generate_ed25519();
        let client = visitor(&callee, &keypair).await;
        assert!(is_served(&client, &callee).await);
        let session = callee.mark_session(client.peer_id());
        client.shutdown().await;
        drop(session);
        let peer = client.peer_id();
        until(|| async { !callee.connected_peers().await.contains(&peer) }).await;
        let mut strangers = Vec::new();
        for _ in 0..GENERAL {
            strangers.push(start(vec![full_address(&callee).await]).await);
        }
        until(|| async { callee.connected_peers().await.len() == GENERAL }).await;

        let stranger = visitor(&callee, &Keypair::generate_ed25519()).await;
        assert!(!is_served(&stranger, &callee).await);
        for _ in 0..3 {
            let client = visitor(&callee, &keypair).await;
            assert!(is_served(&client, &callee).await);
            client.shutdown().await;
            until(|| async { !callee.connected_peers().await.contains(&peer) }).await;
        }
    });
}

#[test]
fn known_servers_find_a_place_in_a_full_node_and_leave_some_to_clients_with_sessions() {
    block_on(async {
        let (callee, _strangers) = full().await;
        let keys: [Keypair; 5] = std::array::from_fn(|_| Keypair::generate_ed25519());
        let peers = keys.each_ref().map(|key| key.public().to_peer_id());
        let [servers @ .., client] = &keys;
        callee.set_known_servers(peers[..4].iter().copied());
        let mut visitors = Vec::new();
        for (number, key) in servers.iter().enumerate() {
            visitors.push(visitor(&callee, key).await);
            assert_eq!(is_served(&visitors[number], &callee).await, number < PLACES.for_servers);
        }
        let _session = callee.mark_session(peers[4]);
        visitors.push(visitor(&callee, client).await);
        assert!(is_served(&visitors[4], &callee).await);
    });
}
