//! Attacks on a running server, each beside a genuine client that must notice nothing but a delay. Each
//! prints what the processes of the server used.

mod beside;
mod wire;

use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use crate::harness::demo::{BLOCKS, HIDDEN, demo_model};
use crate::harness::peer::{Peer, noise};
use crate::harness::{self, DEADLINE, Sepal};
use beside::beside;
use bytes::Bytes;
use libp2p::core::muxing::SubstreamBox;
use p2p::{CallError, Keypair, PeerId};
use prost::Message;
use swarm::dht::id::DhtId;
use swarm::dht::storage::tag_of;
use swarm::names;
use swarm::wire::messages::{NodeInfo, PingRequest, StoreRequest, StoreResponse};
use swarm::wire::records::{ServerInfo, ServerState};
use tokio::task::JoinSet;
use wire::Wire;

const PREFIX: &str = "demo";
/// Longest message of a unary call.
const UNARY_BYTES: usize = 4 << 20;

fn serve() -> Sepal {
    Sepal::serve(&demo_model(), PREFIX, &[])
}

/// Where the server listens, without its name.
fn socket_of(addr: &str) -> SocketAddr {
    let parts: Vec<&str> = addr.split('/').collect();
    let [_, "ip4", ip, "tcp", port, ..] = parts[..] else { panic!("{addr}") };
    format!("{ip}:{port}").parse().expect("an address")
}

fn now() -> f64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).expect("a clock").as_secs_f64()
}

/// Requests that are said at once to begin with. Of many each would stand still for long where we are slow,
/// and the server gives up what does.
const FIRST_AT_ONCE: usize = 4;

/// Streams on which a request was said, and those on which it is being said until this is dropped.
struct Said {
    whole: Vec<SubstreamBox>,
    _saying: JoinSet<Option<SubstreamBox>>,
}

/// Says `request` on `streams` streams for each of `protocols`: on a few at once until the server has taken
/// `least` of them whole, then on all the others.
async fn say_on_all(
    wires: &[Arc<Wire>],
    streams: usize,
    protocols: &[&'static str],
    request: Vec<u8>,
    least: usize,
) -> Said {
    let (request, mut saying) = (Arc::new(request), JoinSet::new());
    let mut numbers = 0..streams * protocols.len();
    let mut say = |saying: &mut JoinSet<_>| {
        let number = numbers.next()?;
        let wire = wires[number / protocols.len() % wires.len()].clone();
        let (protocol, request) = (protocols[number % protocols.len()], request.clone());
        saying.spawn(async move { wire.say(protocol, &request).await });
        Some(())
    };
    (0..FIRST_AT_ONCE).for_each(|_| say(&mut saying).expect("more streams"));
    let mut whole = Vec::new();
    while whole.len() < least {
        let said = tokio::time::timeout(DEADLINE, saying.join_next()).await;
        let said = said.unwrap_or_else(|_| panic!("only {} requests were taken", whole.len()));
        whole.extend(said.expect("enough streams").expect("no panic"));
        let _ = say(&mut saying);
    }
    while say(&mut saying).is_some() {}
    Said { whole, _saying: saying }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_that_never_end_hold_what_one_peer_may_hold() {
    let sepal = serve();
    let addr = sepal.addr();
    let (harm, said) = beside(&sepal, "736 requests that lack their last byte", async {
        let keypair = Keypair::generate_ed25519();
        let mut request = vec![0x80, 0x80, 0x80, 0x02];
        request.resize(request.len() + UNARY_BYTES - 1, 0);
        let mut wires = Vec::new();
        for _ in 0..4 {
            wires.extend(Wire::connect(&addr, &keypair).await.map(Arc::new));
        }
        assert_eq!(wires.len(), 4);
        // As many as one peer may have at once.
        say_on_all(&wires, 736, &[names::FORWARD], request, 8).await
    })
    .await;
    println!("  {} of 736 requests were read to their last byte but one", said.whole.len());
    assert!(harm.netd_mib < 256, "{harm}");
    assert_eq!(sepal.terminate().code(), Some(0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn streams_that_never_end_hold_what_all_peers_may_hold() {
    const PEERS: usize = 64;
    let sepal = Sepal::serve(&demo_model(), PREFIX, &["--request_memory", "256MiB"]);
    let addr = sepal.addr();
    let (harm, said) = beside(&sepal, "512 frames of 64 peers that lack their last byte", async {
        let mut frame = vec![0];
        frame.extend((UNARY_BYTES as u64).to_be_bytes());
        frame.resize(frame.len() + UNARY_BYTES - 1, 0);
        let mut wires = Vec::new();
        for _ in 0..PEERS {
            let keypair = Keypair::generate_ed25519();
            wires.extend(Wire::connect(&addr, &keypair).await.map(Arc::new));
        }
        assert!(wires.len() > PEERS / 2, "{} connections", wires.len());
        let protocols = [names::INFERENCE, names::PUSH_STREAM];
        // Two pools of 64 MiB.
        say_on_all(&wires, 4 * PEERS, &protocols, frame, 32).await
    })
    .await;
    println!("  {} of 512 frames were read to their last byte but one", said.whole.len());
    // Two pools of 64 MiB, and what the connections hold unread.
    assert!(harm.netd_mib < 352, "{harm}");
    assert_eq!(sepal.terminate().code(), Some(0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_message_of_empty_tensors_costs_no_more_than_its_bytes() {
    let sepal = serve();
    let peer = Peer::connect(&sepal.addr(), PREFIX).await;
    let (harm, ()) = beside(&sepal, "sixteen messages of empty tensors", async {
        // Field 2 of ExpertRequest is a list of tensors.
        let message: Bytes = [0x12, 0x00].repeat(UNARY_BYTES / 2 - 512).into();
        for protocol in [names::FORWARD, names::BACKWARD] {
            for _ in 0..8 {
                let answer = peer.p2p.call_unary(peer.server, protocol, message.clone(), DEADLINE);
                let error = answer.await.expect_err("such a request makes no sense");
                assert!(matches!(error, CallError::Remote(_)), "{error}");
            }
        }
    })
    .await;
    assert!(harm.netd_mib < 64, "{harm}");
    assert_eq!(sepal.terminate().code(), Some(0));
}

/// Stores `items` entries of `bytes` under keys that no other call uses.
async fn store(
    peer: &Peer,
    round: usize,
    items: usize,
    bytes: usize,
) -> Result<Vec<bool>, CallError> {
    let key = |n: usize| {
        Bytes::from(DhtId::of_text(&format!("{}-{round}-{n}", peer.p2p.peer_id())).0.to_vec())
    };
    let request = StoreRequest {
        auth: None,
        keys: (0..items).map(key).collect(),
        subkeys: vec![Bytes::from_static(&[0xc0]); items],
        values: vec![vec![0; bytes].into(); items],
        expiration_time: vec![now() + 600.0; items],
        in_cache: vec![false; items],
        peer: None,
    };
    let request = request.encode_to_vec().into();
    let answer = peer.p2p.call_unary(peer.server, names::DHT_STORE, request, DEADLINE).await?;
    Ok(StoreResponse::decode(answer).expect("an answer").store_ok)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_store_stands_still_for_nobody_and_welcomes_no_stranger_twice() {
    /// A third more than the store holds.
    const ROUNDS: usize = 12;
    let sepal = serve();
    let mut peers = Vec::new();
    for _ in 0..8 {
        peers.push(Arc::new(Peer::connect(&sepal.addr(), PREFIX).await));
    }
    let (harm, ()) = beside(&sepal, "eight peers fill the DHT", async {
        let filling: Vec<_> = peers
            .iter()
            .cloned()
            .map(|peer| {
                tokio::spawn(async move {
                    let mut taken = 0;
                    for round in 0..ROUNDS {
                        // Later ones are refused or evict others: either is fine.
                        let stored = store(&peer, round, 1000, 300).await.unwrap_or_default();
                        taken += stored.into_iter().filter(|ok| *ok).count();
                    }
                    taken
                })
            })
            .collect();
        let mut taken = 0;
        for filled in filling {
            taken += filled.await.expect("no panic");
        }
        println!("  {taken} of {} entries were taken", 8 * 1000 * ROUNDS);
        assert!(taken > 1000, "{taken} entries were taken");
    })
    .await;
    assert!(harm.netd_mib < 256, "{harm}");

    let (harm, ()) = beside(&sepal, "60 pings with fresh node ids", async {
        let peer = &peers[0];
        for number in 0..60 {
            let node_id = Bytes::from(DhtId::of_text(&format!("stranger {number}")).0.to_vec());
            let peer_info = Some(NodeInfo { node_id });
            let ping = PingRequest { auth: None, peer: peer_info, validate: false };
            let request = ping.encode_to_vec().into();
            let answer = peer.p2p.call_unary(peer.server, names::DHT_PING, request, DEADLINE);
            answer.await.expect("pings are answered");
        }
    })
    .await;
    assert!(harm.netd_mib < 64, "{harm}");
    assert_eq!(sepal.terminate().code(), Some(0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nobody_speaks_in_the_name_of_a_server() {
    let sepal = serve();
    let peer = Peer::connect(&sepal.addr(), PREFIX).await;
    let server: PeerId = peer.server;
    let (_, store_ok) = beside(&sepal, "a record that says that the server is offline", async {
        let count = BLOCKS.len();
        // [state = OFFLINE, throughput] as msgpack.
        let offline = Bytes::from_static(&[0x92, 0x00, 0xcb, 0, 0, 0, 0, 0, 0, 0, 0]);
        let key = |block: u32| Bytes::from(DhtId::of_text(&format!("{PREFIX}.{block}")).0.to_vec());
        let request = StoreRequest {
            auth: None,
            keys: BLOCKS.map(key).collect(),
            subkeys: vec![tag_of(&server); count],
            values: vec![offline; count],
            expiration_time: vec![now() + 29.0 * 86_400.0; count],
            in_cache: vec![false; count],
            peer: None,
        };
        let request = request.encode_to_vec().into();
        let answer = peer.p2p.call_unary(server, names::DHT_STORE, request, DEADLINE).await;
        StoreResponse::decode(answer.expect("an answer")).expect("an answer").store_ok
    })
    .await;
    assert!(!store_ok.is_empty() && store_ok.iter().all(|ok| !ok), "{store_ok:?}");
    assert_eq!(sepal.terminate().code(), Some(0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connections_that_say_nothing_lock_nobody_out() {
    let sepal = serve();
    let (addr, socket) = (sepal.addr(), socket_of(&sepal.addr()));
    let (harm, _connections) = beside(&sepal, "silent and idle connections", async {
        let mut silent = Vec::new();
        for _ in 0..300 {
            silent.extend(TcpStream::connect_timeout(&socket, DEADLINE));
        }
        let mut idle = Vec::new();
        for _ in 0..150 {
            let keypair = Keypair::generate_ed25519();
            let connecting = tokio::time::timeout(DEADLINE, Wire::connect(&addr, &keypair));
            idle.extend(connecting.await.ok().flatten());
        }
        println!("  {} silent and {} idle connections", silent.len(), idle.len());
        // Some may be turned away.
        assert!(silent.len() == 300 && idle.len() >= 64);
        for _ in 0..5 {
            let late = Peer::connect(&addr, PREFIX).await;
            let mut session = late.session(BLOCKS, 8).await;
            let hidden = noise(&[2, 1, HIDDEN], 1);
            session.step(hidden, None).await.expect("a newcomer gets a session");
            session.close().await;
        }
        (silent, idle)
    })
    .await;
    assert!(harm.netd_mib < 256, "{harm}");
    assert_eq!(sepal.terminate().code(), Some(0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "waits for 5 s: .ci/long"]
async fn silent_sessions_keep_nobody_out() {
    /// Tokens per block; a session of the attacker has a sixteenth of them.
    const TOKENS: u32 = 16 * 256;
    let sepal = Sepal::serve(&demo_model(), PREFIX, &["--attn_cache_tokens", "4096"]);
    let open = async |peer: &Peer, tokens| {
        let mut session = peer.try_session(BLOCKS, tokens).await?;
        session.step(noise(&[1, 1, HIDDEN], 1), None).await.map(|_| session)
    };
    let hoarder = Peer::connect(&sepal.addr(), PREFIX).await;
    let mut held = Vec::new();
    while let Ok(session) = open(&hoarder, TOKENS / 16).await {
        held.push(session);
    }
    assert_eq!(held.len(), 16);
    // A client of Petals does not wait for memory, and comes again.
    let newcomer = Peer::connect(&sepal.addr(), PREFIX).await;
    let began = Instant::now();
    let mut session = loop {
        match open(&newcomer, TOKENS / 4).await {
            Ok(session) => break session,
            Err(error) => assert!(began.elapsed() < DEADLINE, "{error}"),
        }
        tokio::time::sleep(Duration::from_millis(500)).await;
    };
    println!("sixteen silent sessions: a newcomer was let in after {:?}", began.elapsed());
    session.step(noise(&[1, 1, HIDDEN], 2), None).await.expect("the newcomer goes on");
    let (mut ended, mut going_on) = (0, 0);
    for session in &mut held {
        match session.step(noise(&[1, 1, HIDDEN], 2), None).await {
            Ok(_) => going_on += 1,
            Err(error) => {
                assert!(error.to_string().contains("was silent"), "{error}");
                ended += 1;
            }
        }
    }
    assert_eq!((ended, going_on), (4, 12), "only what the newcomer needs");
    session.close().await;
    assert_eq!(sepal.terminate().code(), Some(0));
}

/// A record of a server that does not exist, and claims everything.
fn fake(blocks: std::ops::Range<u32>) -> Bytes {
    let mut info = ServerInfo::new(ServerState::Online, 1e9);
    (info.start_block, info.end_block) = (Some(blocks.start.into()), Some(blocks.end.into()));
    (info.inference_rps, info.forward_rps, info.network_rps) = (Some(1e9), Some(1e9), Some(1e9));
    info.cache_tokens_left = Some(1 << 40);
    info.encode().into()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hundred_servers_that_do_not_exist_stop_no_client() {
    let sepal = serve();
    let peer = Peer::connect(&sepal.addr(), PREFIX).await;
    let text = || harness::generate(&sepal, &demo_model(), PREFIX, "float32", "Once upon", 8);
    let genuine = tokio::task::block_in_place(text);
    let mut taken = 0;
    for _ in 0..100 {
        let nobody = tag_of(&PeerId::random());
        let key = |block: u32| Bytes::from(DhtId::of_text(&format!("{PREFIX}.{block}")).0.to_vec());
        let count = BLOCKS.len();
        let request = StoreRequest {
            auth: None,
            keys: BLOCKS.map(key).collect(),
            subkeys: vec![nobody; count],
            values: vec![fake(BLOCKS); count],
            expiration_time: vec![now() + 600.0; count],
            in_cache: vec![false; count],
            peer: None,
        };
        let request = request.encode_to_vec().into();
        let answer = peer.p2p.call_unary(peer.server, names::DHT_STORE, request, DEADLINE).await;
        let stored = StoreResponse::decode(answer.expect("an answer")).expect("an answer");
        taken += usize::from(stored.store_ok.iter().all(|ok| *ok));
    }
    assert_eq!(taken, 100, "anyone can announce servers");
    let began = Instant::now();
    assert_eq!(tokio::task::block_in_place(text), genuine);
    println!("a hundred records of nobody: a client began and ended within {:?}", began.elapsed());
    assert_eq!(sepal.terminate().code(), Some(0));
}
