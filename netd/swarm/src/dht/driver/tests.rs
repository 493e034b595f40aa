//! Real nodes on loopback.

use super::*;
use crate::dht::storage::Timed;
use crate::wire::msgpack::Value;
use p2p::Protocol;
use p2p::{Inbound, P2pConfig};
use std::future::Future;
use tokio::time::timeout;

/// No wait in a test is longer; nothing is asserted about it.
const DEADLINE: Duration = Duration::from_secs(60);

fn block_on<F: Future>(future: F) -> F::Output {
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().expect("runtime");
    runtime.block_on(async { timeout(DEADLINE, future).await.expect("hangs") })
}

/// A node that serves its RPCs, joined through `initial_peers`.
async fn start(
    initial_peers: Vec<Multiaddr>,
    client_mode: bool,
) -> Result<(Dht, Multiaddr), DhtError> {
    let (dht, address) = start_alone(initial_peers, client_mode, 0).await;
    dht.join(DEADLINE).await.map(|()| (dht, address))
}

/// A node that has not joined, and serves its RPCs once it has failed `failures` requests.
async fn start_alone(
    initial_peers: Vec<Multiaddr>,
    client_mode: bool,
    failures: usize,
) -> (Dht, Multiaddr) {
    let protocols = if client_mode { Vec::new() } else { protocols() };
    let config = P2pConfig::on_loopback(initial_peers.clone(), protocols, DEADLINE);
    let config = P2pConfig { kad_server: !client_mode, ..config };
    let (p2p, mut inbound) = P2p::start(config).await.expect("p2p starts");
    let address =
        p2p.listen_addrs().await.pop().expect("listens").with(Protocol::P2p(p2p.peer_id()));
    let limits = StorageLimits::default();
    let dht = Dht::start(
        p2p,
        DhtConfig { client_mode, initial_peers, num_workers: 4, strict: true, limits },
    );
    let served = dht.clone();
    tokio::spawn(async move {
        let mut to_fail = failures;
        while let Some(Inbound::Unary { peer, protocol, request, responder }) = inbound.recv().await
        {
            if to_fail > 0 {
                to_fail -= 1;
                responder
                    .respond(Err("RuntimeError('not yet')".into()))
                    .await
                    .expect("asker waits");
                continue;
            }
            let dht = served.clone();
            tokio::spawn(async move {
                responder.respond(dht.handle_inbound(protocol, peer, request).await).await
            });
        }
    });
    (dht, address)
}

fn entry(key: &str, subkey: &str, value: &str) -> (DhtId, Item) {
    let timed = Timed { value: Value::str(value).encode().into(), expiration: unix_now() + 600.0 };
    (DhtId::of_text(key), Item::Entry(Value::str(subkey).encode().into(), timed))
}

fn values(stored: &Option<StoredValue>) -> Vec<Value> {
    let Some(StoredValue::Dictionary(dictionary)) = stored else {
        return Vec::new();
    };
    let decode = |timed: &Timed| {
        Value::decode(&timed.value, crate::wire::msgpack::Limits::SMALL).expect("value")
    };
    dictionary.iter().map(|(_, timed)| decode(timed)).collect()
}

#[test]
fn records_travel_between_real_nodes() {
    block_on(async {
        // Each joins through all earlier ones: this is about records, not about finding addresses.
        let (first, address) = start(Vec::new(), false).await.unwrap();
        let mut addresses = vec![address];
        let (second, address) = start(addresses.clone(), false).await.unwrap();
        addresses.push(address);
        let (third, address) = start(addresses.clone(), false).await.unwrap();
        addresses.push(address);
        let (client, _) = start(addresses, true).await.unwrap();
        assert_eq!(
            second.store_many(vec![entry("model.0", "b", "from second")]).await.unwrap(),
            [3]
        );
        assert_eq!(
            client.store_many(vec![entry("model.0", "a", "from client")]).await.unwrap(),
            [3]
        );
        let expected = [Value::str("from client"), Value::str("from second")];
        for reader in [&first, &second, &third, &client] {
            let keys = vec![DhtId::of_text("model.0"), DhtId::of_text("model.1")];
            let found = reader.get_many(keys, true).await.unwrap();
            assert_eq!(values(&found[0]), expected);
            assert_eq!(found[1], None);
        }
        assert_eq!(first.stats().await.unwrap().known_nodes, 2);
        assert_eq!(client.stats().await.unwrap().known_nodes, 3);
        assert_eq!(third.random_lookup().await.unwrap(), 2);
        third.ping(first.p2p.peer_id()).await.unwrap();
    });
}

#[test]
fn unreachable_swarm_is_named() {
    block_on(async {
        let nobody: Multiaddr = "/ip4/127.0.0.1/tcp/1".parse().unwrap();
        let (dht, _) = start(Vec::new(), false).await.unwrap();
        let lonely = Dht { initial_peers: [nobody].into(), ..dht };
        let error = lonely.join(DEADLINE).await.unwrap_err();
        assert!(
            error.to_string().starts_with("cannot reach any of the initial peers: "),
            "{error}"
        );
    });
}

#[test]
fn initial_peers_that_do_not_answer_are_asked_again_until_patience_is_over() {
    block_on(async {
        let (_slow, address) = start_alone(Vec::new(), false, 3).await;
        let (dht, _) = start_alone(vec![address], false, 0).await;
        let error = dht.join(Duration::ZERO).await.unwrap_err();
        assert_eq!(error.to_string(), "cannot join the swarm: no initial peer answers (1 asked)");
        dht.join(DEADLINE).await.unwrap();
        assert_eq!(dht.stats().await.unwrap().known_nodes, 1);
    });
}

#[test]
fn malformed_requests_are_refused() {
    block_on(async {
        let (dht, _) = start(Vec::new(), false).await.unwrap();
        let ask = |protocol: &'static str| {
            dht.handle_inbound(protocol, PeerId::random(), Bytes::from_static(b"\xff"))
        };
        assert!(
            ask(DHT_FIND).await.unwrap_err().starts_with("ValueError('cannot read the request")
        );
        assert!(ask("DHTProtocol.rpc_other").await.unwrap_err().contains("does not serve"));
    });
}

#[test]
fn records_of_clocks_that_are_off_and_records_of_nonsense_are_dropped_and_counted() {
    block_on(async {
        let (first, address) = start(Vec::new(), false).await.unwrap();
        let (second, _) = start(vec![address], false).await.unwrap();
        let item = |subkey: &str, value: &'static [u8], expiration: f64| {
            let value = Bytes::from_static(value);
            let tag = Value::str(subkey).encode().into();
            Item::Entry(tag, Timed { value, expiration })
        };
        let counted = |dht: &Dht| dht.p2p.inbound_figures().bad_records;
        let key = DhtId::of_text("tiny.0");
        // A clock that is years ahead, and one that is years behind: nothing of either is kept.
        for expiration in [unix_now() + 1e8, unix_now() - 1e8, f64::NAN, f64::INFINITY] {
            let stored = second.store_many(vec![(key, item("early", b"x", expiration))]);
            // Refused, or not even sent.
            drop(stored.await);
            let found = first.get_many(vec![key], true).await.unwrap();
            assert!(found[0].is_none(), "{expiration}");
        }
        assert!(counted(&first) >= 1, "the one that would stay for years");
        // Kept as any other, and dropped by whoever reads it.
        let garbage = item("no peer", b"\xff", unix_now() + 600.0);
        let own = item(
            &PeerId::random().to_base58(),
            b"\x93\x02\xcb\x7f\xf8\x00\x00\x00\x00\x00\x00\x80",
            unix_now() + 600.0,
        );
        let accepted = second.store_many(vec![(key, garbage), (key, own)]).await;
        assert_eq!(accepted.unwrap().len(), 2);
        let before = counted(&first);
        let view = crate::view::read(&first, "tiny", 0..1).await.unwrap();
        assert_eq!((view.blocks[0].len(), view.dropped), (0, 2));
        assert_eq!(counted(&first), before + 2);
    });
}
