//! What `sepal doctor` learns of the network: joins the swarm as a node of its own with a fresh
//! identity, which announces nothing and leaves at once, and asks the Hub. The judgement is the
//! command's.

mod facts;
mod hub;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use futures::future::join_all;
use p2p::task;
use p2p::{
    Inbound, Keypair, Multiaddr, P2p, P2pConfig, P2pError, PeerId, Protocol, Traversal, identity,
};
use prost::Message;
use shared::config::NetdConfig;
use shared::error_chain::with_causes;
use swarm::dht::driver::unix_now;
use swarm::names;
use swarm::wire::messages::{PingRequest, PingResponse};
use tokio::sync::{mpsc, watch};
use tokio::time::timeout;

use crate::join::{self, NodeSettings, addresses};
use crate::membership::rate::serve::Counterpart;
use crate::membership::reachability::{self, Checker};
use crate::rpc::Service;
use crate::rpc::dispatch::Router;

pub use facts::{HubFacts, HubQuestion, ModelState, SwarmFacts, TokenState};
pub use hub::observe as hub;

/// Time to reach a first peer.
const JOIN_LIMIT: Duration = Duration::from_secs(10);
/// Time for all that is asked of the swarm.
const LIMIT: Duration = Duration::from_secs(30);
/// Peers whose clocks are read.
const CLOCKS: usize = 8;
/// Time for a peer to tell its clock.
const CLOCK_LIMIT: Duration = Duration::from_secs(5);
/// Time for a router to answer.
const ROUTER_WAIT: Duration = Duration::from_secs(4);
/// Time for a first relay.
const RELAY_WAIT: Duration = Duration::from_secs(6);
/// Answers slower than this say little about a clock.
const MAX_ROUND_TRIP_S: f64 = 2.0;

/// The PeerID of an identity file; `None` if there is no such file.
///
/// # Errors
/// When the file holds no key.
pub fn peer_id(path: &Path) -> Result<Option<String>, String> {
    match path.try_exists() {
        Ok(false) => Ok(None),
        _ => identity::load(path)
            .map(|key| Some(key.public().to_peer_id().to_base58()))
            .map_err(|error| with_causes(&error)),
    }
}

/// Starts a node of its own with a fresh identity, joins the swarm and asks peers. Waits for at most half a minute.
///
/// # Errors
/// Why the swarm could not be joined.
pub fn swarm(config: &NetdConfig) -> Result<SwarmFacts, String> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .map_err(|error| format!("cannot start the network node: {error}"))?;
    let outcome = runtime.block_on(async { timeout(LIMIT, observe(config)).await });
    runtime.shutdown_timeout(Duration::from_millis(500));
    outcome.unwrap_or_else(|_| Err(format!("the swarm did not answer within {LIMIT:?}")))
}

async fn observe(config: &NetdConfig) -> Result<SwarmFacts, String> {
    let settings = settings(config)?;
    let (p2p, inbound, on_other_port) =
        started(&settings).await.map_err(|error| error.to_string())?;
    let (_, no_blocks) = watch::channel(None::<Arc<Service>>);
    let router = Router {
        checker: Checker::new(p2p.clone()),
        counterpart: Counterpart::new(p2p.clone()),
        service: no_blocks,
    };
    let (_, no_dht) = watch::channel(None);
    task::spawn(router.run(inbound, join::serve_dht(no_dht)));
    let facts = ask(&p2p, &settings).await;
    p2p.shutdown().await;
    facts.map(|facts| SwarmFacts { on_other_port, ..facts })
}

fn settings(config: &NetdConfig) -> Result<NodeSettings, String> {
    let read = |name, texts: &[String]| addresses(name, texts).map_err(|fatal| fatal.message);
    Ok(NodeSettings {
        // Never the server's own: the swarm would take this node for it.
        keypair: Keypair::generate_ed25519(),
        listen: read("host_maddrs", &config.host_maddrs)?,
        announce: read("announce_maddrs", &config.announce_maddrs)?,
        initial_peers: read("initial_peers", &config.initial_peers)?,
        traversal: Traversal {
            relay_service: false,
            autonat: false,
            auto_relay: config.use_auto_relay,
            upnp: config.use_upnp,
            nearest: join::nearest(config.dials_private_nets),
            ..Traversal::SERVER
        },
        check_reachability: true,
        startup_timeout: config.startup_timeout.min(JOIN_LIMIT),
        max_upload_bytes_per_s: None,
        request_memory: P2pConfig::REQUEST_MEMORY,
    })
}

/// Starts the node, on another port if the configured one is in use; the last value says so.
async fn started(
    settings: &NodeSettings,
) -> Result<(P2p, mpsc::Receiver<Inbound>, bool), P2pError> {
    match join::start(settings, Vec::new()).await {
        Ok((p2p, inbound)) => Ok((p2p, inbound, false)),
        Err(P2pError::PortInUse { .. }) => {
            let listen = settings.listen.iter().map(on_any_port).collect();
            let other = NodeSettings { listen, announce: Vec::new(), ..settings.clone() };
            let (p2p, inbound) = join::start(&other, Vec::new()).await?;
            Ok((p2p, inbound, true))
        }
        Err(error) => Err(error),
    }
}

fn on_any_port(addr: &Multiaddr) -> Multiaddr {
    let open = |part: Protocol<'static>| match part {
        Protocol::Tcp(_) => Protocol::Tcp(0),
        other => other,
    };
    addr.iter().map(|part| open(part.acquire())).collect()
}

/// What the node asks once it is connected.
async fn ask(p2p: &P2p, settings: &NodeSettings) -> Result<SwarmFacts, String> {
    let mut facts =
        SwarmFacts { initial_peers: settings.initial_peers.len(), ..SwarmFacts::default() };
    if settings.initial_peers.is_empty() {
        facts.forwarded = forwarded(p2p).await;
        return Ok(facts);
    }
    let dht = join::start_dht(p2p, settings, true);
    dht.join(settings.startup_timeout).await.map_err(|error| error.to_string())?;
    let known = dht.peers().await.map_err(|error| error.to_string())?;
    let mut peers = p2p.connected_peers().await;
    facts.connected = peers.len();
    facts.known = known.len();
    peers.extend(known.iter().filter(|peer| !peers.contains(peer)).copied().collect::<Vec<_>>());
    peers.truncate(CLOCKS);
    let (clocks, reachable, forwarded) = tokio::join!(
        join_all(peers.iter().map(|peer| clock_ahead(p2p, *peer))),
        reachability::check_direct(p2p, known.clone()),
        forwarded(p2p),
    );
    facts.clock_ahead_s = clocks.into_iter().flatten().collect();
    (facts.reachable, facts.forwarded) = (reachable, forwarded);
    if facts.reachable == Some(false) && facts.forwarded == Some(true) {
        tokio::time::sleep(reachability::ASK_AGAIN).await;
        facts.reachable = reachability::check_direct(p2p, known).await;
    }
    if facts.reachable == Some(false) && settings.traversal.auto_relay {
        facts.relayed = Some(relayed(p2p).await);
    }
    Ok(facts)
}

/// Whether a router forwards the port; `None` if none was asked or said so in time.
async fn forwarded(p2p: &P2p) -> Option<bool> {
    let mut forwarded = p2p.forwarded();
    let answer = async { forwarded.wait_for(Option::is_some).await.ok().and_then(|one| *one) };
    timeout(ROUTER_WAIT, answer).await.ok().flatten()
}

async fn relayed(p2p: &P2p) -> bool {
    p2p.set_reachable(false).await;
    let mut relayed = p2p.relayed_addrs();
    let reserved = async { relayed.wait_for(|addrs| !addrs.is_empty()).await.is_ok() };
    timeout(RELAY_WAIT, reserved).await.unwrap_or(false)
}

/// Seconds that this machine's clock is ahead of that of `peer`, who is not told who asks.
async fn clock_ahead(p2p: &P2p, peer: PeerId) -> Option<f64> {
    let request = PingRequest { auth: None, peer: None, validate: false };
    let sent = unix_now();
    let answer = p2p.call_unary(peer, names::DHT_PING, request.encode_to_vec().into(), CLOCK_LIMIT);
    let theirs = PingResponse::decode(answer.await.ok()?).ok()?.dht_time;
    ahead(sent, unix_now(), theirs)
}

/// How far the middle between `sent` and `received` is ahead of `theirs`; `None` for an answer that
/// took too long or is no time.
fn ahead(sent: f64, received: f64, theirs: f64) -> Option<f64> {
    let is_prompt = (0.0..=MAX_ROUND_TRIP_S).contains(&(received - sent));
    let is_time = theirs.is_finite() && theirs > 0.0;
    (is_prompt && is_time).then(|| (sent + received) / 2.0 - theirs)
}

#[cfg(test)]
mod tests {
    use testkit::configs::netd_config as config;

    use super::*;
    use crate::dht_node;

    #[test]
    fn a_clock_is_compared_with_the_middle_of_the_round_trip() {
        assert_eq!(ahead(100.0, 101.0, 90.5), Some(10.0));
        assert_eq!(ahead(100.0, 100.0, 103.0), Some(-3.0));
        for (sent, received, theirs) in
            [(100.0, 103.0, 100.0), (100.0, 99.0, 100.0), (100.0, 100.0, f64::NAN), (1.0, 1.0, 0.0)]
        {
            assert_eq!(ahead(sent, received, theirs), None, "{sent} {received} {theirs}");
        }
    }

    #[test]
    fn a_node_learns_clocks_and_reachability_from_a_swarm_and_leaves_it() {
        let runtime = tokio::runtime::Runtime::new().unwrap();
        let first = runtime
            .block_on(dht_node::start(&dht_node::DhtNodeConfig::on_loopback(Vec::new())))
            .unwrap();
        let facts = swarm(&config(first.addrs.clone())).unwrap();
        assert_eq!((facts.initial_peers, facts.connected, facts.known), (first.addrs.len(), 1, 1));
        assert!(facts.clock_ahead_s.len() == 1 && facts.clock_ahead_s[0].abs() < 1.0, "{facts:?}");
        assert_eq!((facts.reachable, facts.forwarded), (Some(true), Some(false)));
        assert!(!facts.on_other_port && facts.relayed.is_none());
        let alone = runtime.block_on(async { first.dht.stats().await.unwrap().known_nodes });
        assert_eq!(alone, 0, "the node was a client of the DHT");
        // The port of a server that runs is in use: the node takes another.
        let taken = format!("/ip4/127.0.0.1/tcp/{}", first.port());
        let busy = NetdConfig { host_maddrs: vec![taken], ..config(first.addrs.clone()) };
        assert!(swarm(&busy).unwrap().on_other_port);
    }

    #[test]
    fn a_swarm_that_nobody_answers_for_is_named() {
        let nobody =
            "/ip4/127.0.0.1/tcp/9/p2p/12D3KooWEyoppNCUx8Yx66oV9fJnriXwCcXwDDUA2kj6vnc6iDEp";
        let why = swarm(&config(vec![nobody.to_owned()])).unwrap_err();
        assert!(why.contains("127.0.0.1/tcp/9"), "{why}");
        let bad = NetdConfig { host_maddrs: vec!["here".into()], ..config(Vec::new()) };
        assert!(swarm(&bad).unwrap_err().contains("invalid host_maddrs \"here\""));
    }

    #[test]
    fn the_peer_id_of_an_identity_file_is_read_and_no_file_is_made() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("identity");
        assert_eq!(peer_id(&path), Ok(None));
        let made = identity::load_or_create(&path).unwrap().public().to_peer_id().to_base58();
        assert_eq!(peer_id(&path), Ok(Some(made)));
        let bad = folder.path().join("bad");
        std::fs::write(&bad, "hello").unwrap();
        assert!(peer_id(&bad).unwrap_err().contains("bad"));
    }
}
