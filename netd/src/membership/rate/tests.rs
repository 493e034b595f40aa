//! Real nodes on loopback measure with one another.

use std::time::Duration;

use bytes::Bytes;
use p2p::{CallError, Inbound, Multiaddr, P2p, P2pConfig, Protocol, ProtocolSpec};
use shared::network::RateSource;
use swarm::dht::driver::{Dht, DhtConfig};
use swarm::dht::storage::StorageLimits;
use tokio::sync::mpsc;

use super::serve::Counterpart;
use super::*;
use crate::http::stand_in::{StandIn, answer};
use crate::network_rate::{NetworkLink, RateFile};

/// No wait is longer; nothing is asserted about it.
const DEADLINE: Duration = Duration::from_secs(120);

fn block_on<T>(future: impl Future<Output = T>) -> T {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async { tokio::time::timeout(DEADLINE, future).await.expect("hangs") })
}

struct Node {
    p2p: P2p,
    counterpart: Counterpart,
}

async fn start(initial_peers: Vec<Multiaddr>, protocols: Vec<ProtocolSpec>) -> Node {
    let config = P2pConfig::on_loopback(initial_peers, protocols, DEADLINE);
    let (p2p, inbound) = P2p::start(config).await.unwrap();
    let counterpart = Counterpart::new(p2p.clone());
    tokio::spawn(answer_all(inbound, counterpart.clone()));
    Node { p2p, counterpart }
}

async fn answer_all(mut inbound: mpsc::Receiver<Inbound>, counterpart: Counterpart) {
    while let Some(rpc) = inbound.recv().await {
        if let Inbound::Stream { peer, stream, .. } = rpc {
            let counterpart = counterpart.clone();
            tokio::spawn(async move { counterpart.serve(peer, stream).await });
        }
    }
}

async fn addr(node: &Node) -> Multiaddr {
    let addr = node.p2p.listen_addrs().await.pop().unwrap();
    addr.with(Protocol::P2p(node.p2p.peer_id()))
}

fn dht(node: &Node) -> Dht {
    let config = DhtConfig {
        client_mode: true,
        initial_peers: Vec::new(),
        num_workers: 1,
        strict: false,
        limits: StorageLimits::default(),
    };
    Dht::start(node.p2p.clone(), config)
}

#[test]
fn two_servers_measure_each_other_and_one_without_peers_measures_nobody() {
    block_on(async {
        let first = start(Vec::new(), vec![protocol()]).await;
        assert_eq!(with_peers(&first.p2p, Vec::new()).await, None);
        let second = start(vec![addr(&first).await], vec![protocol()]).await;
        let rate = with_peers(&second.p2p, Vec::new()).await.unwrap();
        assert!(rate > 0.0 && rate.is_finite(), "{rate}");
        assert_eq!(first.counterpart.figures().served, 2, "down and up");
        // A known peer is dialled, and may be one that is connected already.
        let third = start(Vec::new(), vec![protocol()]).await;
        third.p2p.add_address(first.p2p.peer_id(), addr(&first).await).await;
        assert!(with_peers(&third.p2p, vec![first.p2p.peer_id()]).await.is_some());
    });
}

#[test]
fn peers_that_do_not_know_the_protocol_or_have_lent_enough_are_passed_over() {
    block_on(async {
        let stranger = start(Vec::new(), Vec::new()).await;
        let lender = start(Vec::new(), vec![protocol()]).await;
        let peers = vec![addr(&stranger).await, addr(&lender).await];
        let asker = start(peers, vec![protocol()]).await;
        asker.p2p.connect(addr(&stranger).await).await.unwrap();
        asker.p2p.connect(addr(&lender).await).await.unwrap();
        for _ in 0..2 {
            assert!(with_peers(&asker.p2p, Vec::new()).await.is_some());
        }
        assert_eq!(with_peers(&asker.p2p, Vec::new()).await, None, "it has lent enough");
        let figures = lender.counterpart.figures();
        assert_eq!((figures.served, figures.refused), (4, 1));
    });
}

#[test]
fn callers_that_break_the_protocol_get_nothing_and_hostile_answers_count_for_nothing() {
    block_on(async {
        let callee = start(Vec::new(), vec![protocol()]).await;
        let caller = start(vec![addr(&callee).await], Vec::new()).await;
        // What the callee says to these words. Streams that were broken off count against the bound
        // of streams for another moment, in which nothing is said.
        let say = async |words: Vec<u8>| {
            let peer = callee.p2p.peer_id();
            let mut stream = caller.p2p.open_stream(peer, PROTOCOL, DEADLINE).await?;
            stream.send(words.into()).await?;
            stream.recv().await
        };
        for words in [b"X".to_vec(), Vec::new(), b"DD".to_vec(), vec![0; CHUNK_BYTES + 1]] {
            let answer = say(words.clone()).await;
            assert!(!matches!(answer, Ok(Some(_))), "{:?}", words.get(..2));
        }
        // So many are lent to one peer, whatever comes of them.
        let refused = loop {
            match say(vec![DOWN]).await {
                Err(CallError::Remote(text)) => break text,
                _ => tokio::time::sleep(Duration::from_millis(10)).await,
            }
        };
        assert_eq!(refused, "no more measurements for now");
        assert_eq!(callee.counterpart.figures().served, 4);

        // A callee that agrees, then claims more than it was sent, and sends nothing of its own.
        let config = P2pConfig::on_loopback(Vec::new(), vec![protocol()], DEADLINE);
        let (liar, mut inbound) = P2p::start(config).await.unwrap();
        tokio::spawn(async move {
            while let Some(Inbound::Stream { mut stream, .. }) = inbound.recv().await {
                let _ = stream.recv().await;
                let _ = stream.send(Bytes::from_static(&[AGREED])).await;
                let _ = stream.recv().await;
                let claim = u64::MAX.to_le_bytes();
                let _ = stream.send(Bytes::copy_from_slice(&claim)).await;
                stream.finish().await;
            }
        });
        let at = liar.listen_addrs().await.pop().unwrap();
        let asker = start(vec![at.with(Protocol::P2p(liar.peer_id()))], Vec::new()).await;
        assert_eq!(with_peers(&asker.p2p, Vec::new()).await, None);
    });
}

#[test]
fn a_measurement_is_kept_and_taken_until_another_is_asked_for() {
    block_on(async {
        let folder = tempfile::tempdir().unwrap();
        let file = RateFile::new(folder.path());
        let first = start(Vec::new(), vec![protocol()]).await;
        let second = start(vec![addr(&first).await], vec![protocol()]).await;
        let mut settings =
            MeasurementSettings { file: Some(file.clone()), service: None, take_kept: true };
        let lock = file.lock().unwrap();
        let dht = dht(&second);
        assert_eq!(once(&settings, &second.p2p, &dht).await, MeasurementOutcome::Busy);
        drop(lock);
        let MeasurementOutcome::Rate(rate) = once(&settings, &second.p2p, &dht).await else {
            panic!("no rate")
        };
        assert_eq!(rate.source, RateSource::Peers);
        assert_eq!(file.kept(&NetworkLink::of_system()), Some(rate));
        assert_eq!(once(&settings, &second.p2p, &dht).await, MeasurementOutcome::Rate(rate));
        assert_eq!(first.counterpart.figures().served, 2, "asked once");
        settings.take_kept = false;
        assert!(matches!(once(&settings, &second.p2p, &dht).await, MeasurementOutcome::Rate(_)));
        assert_eq!(first.counterpart.figures().served, 4, "and again when told");
    });
}

#[test]
fn a_service_is_asked_only_when_named_and_peers_when_it_fails() {
    block_on(async {
        let service = StandIn::start(|_, path| match path {
            "/down" => answer("200 OK", &vec![7; 3 << 20]),
            "/up" => answer("200 OK", b"thanks"),
            "/empty" => answer("200 OK", b""),
            _ => answer("503 Service Unavailable", b""),
        })
        .await;
        let first = start(Vec::new(), vec![protocol()]).await;
        let second = start(vec![addr(&first).await], vec![protocol()]).await;
        let dht = dht(&second);
        let at = |down: &str, up: &str| MeasurementSettings {
            file: None,
            service: Some((format!("{}{down}", service.url), format!("{}{up}", service.url))),
            take_kept: true,
        };
        let source =
            async |settings: MeasurementSettings| match once(&settings, &second.p2p, &dht).await {
                MeasurementOutcome::Rate(rate) => Some(rate.source),
                _ => None,
            };
        assert_eq!(source(at("/down", "/up")).await, Some(RateSource::Url));
        let asked: Vec<(String, usize)> = service.requests();
        assert_eq!(asked[0].0, "GET /down");
        assert!(asked[1].0 == "POST /up" && asked[1].1 >= 2 << 20, "{asked:?}");
        assert_eq!(first.counterpart.figures().served, 0, "peers were left alone");
        assert_eq!(source(at("/none", "/up")).await, Some(RateSource::Peers));
        assert_eq!(source(at("/empty", "/up")).await, Some(RateSource::Peers));
        let none = MeasurementSettings { file: None, service: None, take_kept: true };
        let before = service.requests().len();
        assert_eq!(once(&none, &second.p2p, &dht).await, MeasurementOutcome::Nobody, "lent enough");
        assert_eq!(service.requests().len(), before);
    });
}
