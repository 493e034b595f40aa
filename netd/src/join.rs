//! Entering the swarm: identity, libp2p node, DHT node, and the handlers of inbound RPCs.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use p2p::task;
use p2p::{
    Inbound, Keypair, Multiaddr, P2p, P2pConfig, P2pError, PeerId, Protocol, RELAY_PART_OF_NETWORK,
    Scope, Traversal, UnaryResponder, identity,
};
use shared::config::NetdConfig;
use shared::control::NetdInit;
use shared::error_chain::with_causes;
use shared::exit::ExitReason;
use shared::ids::Generation;
use shared::network::NetworkRate;
use swarm::dht::driver::{self, Dht, DhtConfig, DhtError};
use swarm::dht::storage::StorageLimits;
use swarm::names;
use tokio::sync::{mpsc, watch};
use tokio::time::timeout;
use tracing::{info, warn};

use crate::fatal_error::Fatal;
use crate::membership::rate::{self, serve::Counterpart};
use crate::membership::reachability::{self, Checker};
use crate::network_rate;
use crate::rpc::dispatch::Router;
use crate::rpc::{self, Service};

/// Calls under way per lookup until the model is known; Petals' servers use as many as the model
/// has blocks.
const LOOKUP_WORKERS: usize = 32;

/// How long a server that cannot be dialled waits for its first relay before it goes on without.
const RELAY_WAIT: Duration = Duration::from_secs(15);

/// How long a server that cannot be dialled waits for a router that may forward its port.
const ROUTER_WAIT: Duration = Duration::from_secs(5);

/// A node that listens and has joined.
#[derive(Clone, Debug)]
pub struct Joined {
    pub p2p: P2p,
    pub dht: Dht,
    /// PeerID in base58.
    pub peer_id: String,
    /// Full addresses with `/p2p/PEERID`: those announced if any are configured, else those
    /// listened on.
    pub addrs: Vec<String>,
    /// Whether others reach it through relays only, as it turned out when joining.
    pub using_relay: bool,
}

impl Joined {
    /// Whether others reach it through relays only, by the last that is known: AutoNAT may change
    /// its mind.
    pub fn relayed_now(&self) -> bool {
        match *self.p2p.reachable().borrow() {
            Some(reachable) => !reachable,
            None => self.using_relay,
        }
    }

    /// The first TCP port of the addresses; 0 if there is none.
    pub fn port(&self) -> u16 {
        let addrs = self.addrs.iter().filter_map(|addr| addr.parse().ok());
        addrs.filter_map(|addr: Multiaddr| tcp_port(&addr)).next().unwrap_or(0)
    }
}

/// Settings common to netd and a bare DHT node.
#[derive(Clone, Debug)]
pub struct NodeSettings {
    pub keypair: Keypair,
    pub listen: Vec<Multiaddr>,
    /// What it announces instead.
    pub announce: Vec<Multiaddr>,
    /// Through whom it enters.
    pub initial_peers: Vec<Multiaddr>,
    /// What it does about NATs.
    pub traversal: Traversal,
    /// Whether it asks peers if they can dial it, and becomes a client of the DHT if not.
    pub check_reachability: bool,
    /// Time to listen and to reach a first peer, and then for that peer to answer.
    pub startup_timeout: Duration,
    /// Most bytes per second that it sends to all peers together.
    pub max_upload_bytes_per_s: Option<u64>,
    /// Bytes that requests of all peers together may hold.
    pub request_memory: u64,
}

/// Makes the key that `--identity_path` names, if it is not there: the daemon may read it, but not
/// write beside it. What fails, the daemon says.
pub fn make_identity(config: &NetdConfig) {
    if let Some(path) = &config.identity_path {
        let _ = identity::load_or_create(path);
    }
}

/// The nearest nets on which peers may have this node dial.
pub fn nearest(dials_private_nets: bool) -> Scope {
    match dials_private_nets {
        true => Scope::Machine,
        false => Scope::World,
    }
}

/// Bytes per second of the circuits of others: what the operator allows, or else a part of the network's
/// speed.
pub fn relay_bytes_per_s(allowed_bits_per_s: Option<f64>, network: NetworkRate) -> u64 {
    let part = || network.bits_per_s / RELAY_PART_OF_NETWORK as f64;
    // Between 1 bit and some Tbit per second: nothing that matters is cut.
    (allowed_bits_per_s.unwrap_or_else(part) / 8.0).max(1.0) as u64
}

/// Joins as `init` says. RPCs on blocks are refused until `service` has one.
///
/// # Errors
/// [`Fatal`] with a sentence for the operator.
pub async fn join(
    init: &NetdInit,
    service: watch::Receiver<Option<Arc<Service>>>,
) -> Result<Joined, Fatal> {
    let config = &init.config;
    let path = config.identity_path.as_deref();
    let path = path.ok_or_else(|| Fatal::bad_config("the supervisor gave no identity file"))?;
    let keypair =
        identity::load_or_create(path).map_err(|error| Fatal::bad_config(with_causes(&error)))?;
    let settings = NodeSettings {
        keypair,
        listen: addresses("host_maddrs", &config.host_maddrs)?,
        announce: addresses("announce_maddrs", &config.announce_maddrs)?,
        initial_peers: addresses("initial_peers", &config.initial_peers)?,
        traversal: Traversal {
            auto_relay: config.use_auto_relay,
            upnp: config.use_upnp,
            nearest: nearest(config.dials_private_nets),
            ..Traversal::SERVER
        },
        check_reachability: true,
        startup_timeout: config.startup_timeout,
        // Settings are at least a bit per second and at most a billion megabits.
        max_upload_bytes_per_s: config.max_upload_bits_per_s.map(|bits| (bits / 8.0) as u64),
        request_memory: config.request_memory,
    };
    let protocols = rpc::protocols();
    let (p2p, inbound) = match kept_port(&settings.listen, &init.previous_addrs) {
        None => start(&settings, protocols).await,
        Some(listen) => {
            let kept = NodeSettings { listen, ..settings.clone() };
            match start(&kept, protocols.clone()).await {
                Err(P2pError::PortInUse { addr }) => {
                    warn!(%addr, "previous port is in use, listening on another");
                    start(&settings, protocols).await
                }
                started => started,
            }
        }
    }
    .map_err(|error| fatal(&error, init.generation))?;
    p2p.relay_at(relay_bytes_per_s(config.relay_bits_per_s, network_rate::known(config)));
    enter(p2p, inbound, &settings, service).await.map_err(|error| {
        let reason = first_time_config(init.generation);
        Fatal { reason, message: error.to_string() }
    })
}

/// Starts the libp2p node, with the DHT's RPCs and the reachability check beside `protocols`.
///
/// # Errors
/// [`P2pError`]; its text is for the operator.
pub async fn start(
    settings: &NodeSettings,
    mut protocols: Vec<p2p::ProtocolSpec>,
) -> Result<(P2p, mpsc::Receiver<Inbound>), P2pError> {
    protocols.extend(driver::protocols());
    protocols.push(reachability::protocol());
    protocols.push(rate::protocol());
    P2p::start(P2pConfig {
        keypair: settings.keypair.clone(),
        listen: settings.listen.clone(),
        announce: settings.announce.clone(),
        initial_peers: settings.initial_peers.clone(),
        kad_server: true,
        protocols,
        traversal: settings.traversal,
        startup_timeout: settings.startup_timeout,
        max_upload_bytes_per_s: settings.max_upload_bytes_per_s,
        request_memory: settings.request_memory,
    })
    .await
}

/// Starts the DHT node and the handlers, and joins.
///
/// # Errors
/// [`DhtError`]; its text is for the operator.
pub async fn enter(
    p2p: P2p,
    inbound: mpsc::Receiver<Inbound>,
    settings: &NodeSettings,
    service: watch::Receiver<Option<Arc<Service>>>,
) -> Result<Joined, DhtError> {
    let (joined, dht) = watch::channel(None);
    let router = Router {
        checker: Checker::new(p2p.clone()),
        counterpart: Counterpart::new(p2p.clone()),
        service,
    };
    // Peers call back while this node joins.
    task::spawn(router.run(inbound, serve_dht(dht)));
    let using_relay = settings.check_reachability
        && !settings.initial_peers.is_empty()
        && is_unreachable(&p2p, settings).await?;
    if using_relay {
        await_relay(&p2p, settings.traversal).await;
    }
    let dht = start_dht(&p2p, settings, using_relay);
    joined.send_replace(Some(dht.clone()));
    dht.join(settings.startup_timeout).await?;
    let id = p2p.peer_id();
    let mut bare = match settings.announce.is_empty() {
        true => p2p.listen_addrs().await,
        false => settings.announce.clone(),
    };
    bare.extend(p2p.relayed_addrs().borrow().iter().cloned());
    let full = |addr: Multiaddr| addr.clone().with_p2p(id).unwrap_or(addr).to_string();
    let addrs = bare.into_iter().map(full).collect();
    Ok(Joined { peer_id: id.to_base58(), addrs, using_relay, p2p, dht })
}

/// Hands requests of the DHT to its node, once there is one.
pub(crate) fn serve_dht(
    joined: watch::Receiver<Option<Dht>>,
) -> impl Fn(PeerId, &'static str, Bytes, UnaryResponder) {
    move |peer, protocol, request, responder| {
        let dht = joined.borrow().clone();
        task::spawn(async move {
            let outcome = match dht {
                Some(dht) => dht.handle_inbound(protocol, peer, request).await,
                None => Err("RuntimeError('this node is still joining')".to_owned()),
            };
            // Fails only when the caller has gone.
            let _ = responder.respond(outcome).await;
        });
    }
}

/// Starts a DHT node on `p2p`, which joins when it is told to.
pub(crate) fn start_dht(p2p: &P2p, settings: &NodeSettings, client_mode: bool) -> Dht {
    let config = DhtConfig {
        client_mode,
        initial_peers: settings.initial_peers.clone(),
        num_workers: LOOKUP_WORKERS,
        strict: false,
        limits: StorageLimits::default(),
    };
    Dht::start(p2p.clone(), config)
}

/// Asks peers whether they can dial this node, as a client of the DHT whom nobody relies on yet. If
/// they cannot, it stops serving what only nodes that can be dialled serve. Source:
/// `Server.__init__` in `petals/server/server.py`.
async fn is_unreachable(p2p: &P2p, settings: &NodeSettings) -> Result<bool, DhtError> {
    let dht = start_dht(p2p, settings, true);
    dht.join(settings.startup_timeout).await?;
    let mut answer = reachability::check_direct(p2p, dht.peers().await?).await;
    if answer == Some(false) && router_forwards(p2p).await {
        info!("router forwards a port, checking reachability again");
        answer = reachability::check_direct(p2p, dht.peers().await?).await;
    }
    if let Some(reachable) = answer {
        p2p.set_reachable(reachable).await;
    }
    let unreachable = answer == Some(false);
    if unreachable {
        let mut only_direct: Vec<&'static str> =
            driver::protocols().iter().map(|spec| spec.name).collect();
        only_direct.push(names::REACHABILITY_CHECK);
        p2p.withdraw(only_direct).await;
    }
    let way = if unreachable { "via relays" } else { "directly" };
    info!(way, "server is accessible");
    Ok(unreachable)
}

/// Waits for the router's answer, and until peers may be asked again.
async fn router_forwards(p2p: &P2p) -> bool {
    let mut forwarded = p2p.forwarded();
    let answer = async { forwarded.wait_for(Option::is_some).await.ok().and_then(|one| *one) };
    let forwards = timeout(ROUTER_WAIT, answer).await == Ok(Some(true));
    if forwards {
        tokio::time::sleep(reachability::ASK_AGAIN).await;
    }
    forwards
}

/// Waits for the first relay, so that whoever hears of this server can dial it; not for ever.
async fn await_relay(p2p: &P2p, traversal: Traversal) {
    let mut relayed = p2p.relayed_addrs();
    let reserved = async { relayed.wait_for(|addrs| !addrs.is_empty()).await.is_ok() };
    if !traversal.auto_relay {
        warn!(
            "peers cannot dial this server, and --no_auto_relay forbids relays: forward its port (--public_ip, --port)"
        );
    } else if !timeout(RELAY_WAIT, reserved).await.unwrap_or(false) {
        warn!(
            "peers cannot dial this server, and it has no relay yet: wait, or forward its port (--public_ip, --port)"
        );
    }
}

/// Reads multiaddrs from settings.
///
/// # Errors
/// Names the one that cannot be read and the form that is expected.
pub fn addresses(setting: &str, texts: &[String]) -> Result<Vec<Multiaddr>, Fatal> {
    let parse = |text: &String| {
        text.parse::<Multiaddr>().map_err(|error| {
            Fatal::bad_config(format!(
                "invalid {setting} {text:?}: {error}; \
                 expected a multiaddr such as /ip4/127.0.0.1/tcp/31337 or /dns/example.org/tcp/31337/p2p/PEERID"
            ))
        })
    };
    texts.iter().map(parse).collect()
}

/// The listen addresses with the port that the generation before had, where the settings leave it
/// open.
fn kept_port(listen: &[Multiaddr], previous: &[String]) -> Option<Vec<Multiaddr>> {
    let mut previous = previous.iter().filter_map(|addr| addr.parse::<Multiaddr>().ok());
    let port = previous.find_map(|addr| tcp_port(&addr)).filter(|port| *port != 0)?;
    if !listen.iter().any(|addr| tcp_port(addr) == Some(0)) {
        return None;
    }
    let keep = |part: Protocol<'static>| match part {
        Protocol::Tcp(0) => Protocol::Tcp(port),
        other => other,
    };
    let fill = |addr: &Multiaddr| addr.iter().map(|part| keep(part.acquire())).collect();
    Some(listen.iter().map(fill).collect())
}

fn tcp_port(addr: &Multiaddr) -> Option<u16> {
    addr.iter().find_map(|part| match part {
        Protocol::Tcp(port) => Some(port),
        _ => None,
    })
}

fn fatal(error: &P2pError, generation: Generation) -> Fatal {
    let reason = match error {
        P2pError::PortInUse { .. } => ExitReason::Busy,
        P2pError::Listen { .. } => ExitReason::BadConfig,
        P2pError::InitialPeersUnreachable { .. } => first_time_config(generation),
        _ => ExitReason::Failed,
    };
    Fatal { reason, message: error.to_string() }
}

/// Peers that cannot be reached at the very first start are taken for a mistake; later the network
/// may come back.
fn first_time_config(generation: Generation) -> ExitReason {
    if generation.0 <= 1 { ExitReason::BadConfig } else { ExitReason::Failed }
}

#[cfg(test)]
mod tests {
    use shared::network::RateSource;

    use super::*;

    #[test]
    fn circuits_get_what_the_operator_says_or_a_quarter_of_the_network() {
        let network = NetworkRate { bits_per_s: 80e6, source: RateSource::Operator };
        assert_eq!(relay_bytes_per_s(None, network), 2_500_000);
        assert_eq!(relay_bytes_per_s(Some(400e6), network), 50_000_000);
        let none = NetworkRate { bits_per_s: 1.0, ..network };
        assert_eq!(relay_bytes_per_s(None, none), 1);
    }

    fn addrs(texts: &[&str]) -> Vec<Multiaddr> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    }

    #[test]
    fn the_port_of_the_generation_before_is_kept_where_it_is_left_open() {
        let previous = vec![
            "/ip4/192.0.2.1/tcp/4321/p2p/12D3KooWEyoppNCUx8Yx66oV9fJnriXwCcXwDDUA2kj6vnc6iDEp"
                .into(),
        ];
        let kept = kept_port(&addrs(&["/ip4/0.0.0.0/tcp/0", "/ip6/::/tcp/0"]), &previous);
        assert_eq!(kept, Some(addrs(&["/ip4/0.0.0.0/tcp/4321", "/ip6/::/tcp/4321"])));
        assert_eq!(kept_port(&addrs(&["/ip4/0.0.0.0/tcp/31337"]), &previous), None);
        assert_eq!(kept_port(&addrs(&["/ip4/0.0.0.0/tcp/0"]), &[]), None);
    }

    #[test]
    fn a_bad_address_is_named_with_the_form_expected() {
        let fatal = addresses("initial_peers", &["127.0.0.1:31337".into()]).unwrap_err();
        assert_eq!(fatal.reason, ExitReason::BadConfig);
        assert!(
            fatal.message.contains("invalid initial_peers \"127.0.0.1:31337\"")
                && fatal.message.contains("/ip4/")
        );
    }
}
