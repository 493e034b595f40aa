//! What is known of this server's speed and of how it is reached, from the first record to a
//! changed one.

use p2p::P2p;
use shared::config::Throughput;
use shared::network::{NetworkRate, RateSource};
use tokio::sync::oneshot;

use super::*;
use crate::http::stand_in::{StandIn, answer};
use crate::network_rate::{self, NetworkLink, RateFile};
use crate::rpc::tests::rig::HIDDEN;

fn span() -> Span {
    Span::new(0, BLOCKS).unwrap()
}

fn rps(network: NetworkRate) -> f64 {
    network.bits_per_s / (16.0 * HIDDEN as f64)
}

fn assumed() -> f64 {
    rps(network_rate::of(None, None, &NetworkLink::of_system()))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_joins_announces_what_was_measured_earlier() {
    let node = bootstrap_node().await;
    let mut supervisor = Supervisor::new(node.addrs.clone(), |_| {});
    let kept = Capacity { inference_rps: 5.0, forward_rps: 40.0 };
    let (peer_id, _) = supervisor.proposed(Some(kept)).await;
    let joining = until_state(&node, &peer_id, ServerState::Joining).await;
    assert_eq!((joining.inference_rps, joining.forward_rps), (Some(5.0), Some(40.0)));
    assert_eq!(joining.throughput, 40.0 / 2.5);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_that_was_never_measured_joins_with_the_throughput_of_its_network() {
    let node = bootstrap_node().await;
    let mut supervisor = Supervisor::new(node.addrs.clone(), |_| {});
    let (peer_id, _) = supervisor.proposed(None).await;
    let joining = until_state(&node, &peer_id, ServerState::Joining).await;
    assert_eq!((joining.throughput, joining.forward_rps), (assumed(), None));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_network_is_measured_with_others_and_announced_and_kept() {
    let node = bootstrap_node().await;
    let folder = tempfile::tempdir().unwrap();
    let file = RateFile::new(folder.path());
    let mut supervisor = Supervisor::new(node.addrs.clone(), |init| {
        init.config.rates_dir = Some(folder.path().to_owned());
    });
    let (peer_id, _) = supervisor.proposed(None).await;
    supervisor.start_worker(0, 1, span()).await;
    supervisor.online().await;
    let link = NetworkLink::of_system();
    let measured = until_record(&node, &peer_id, |info| {
        let kept = file.kept(&link);
        let network = kept.map(|kept| network_rate::of(None, Some(kept), &link));
        let near = |one: f64, other: f64| (one / other - 1.0).abs() < 1e-9;
        let announced = network.zip(info.network_rps);
        announced.is_some_and(|(network, announced)| near(announced, rps(network)))
    })
    .await;
    assert_eq!(measured.state, ServerState::Online);
    assert_eq!(file.kept(&link).unwrap().source, RateSource::Peers);

    // The next start begins with it.
    let mut second = Supervisor::new(node.addrs.clone(), |init| {
        init.config.rates_dir = Some(folder.path().to_owned());
    });
    let (peer_id, _) = second.proposed(None).await;
    let joining = until_state(&node, &peer_id, ServerState::Joining).await;
    // A number that went through a file may have lost its last bit.
    let (before, now) = (measured.network_rps.unwrap(), joining.network_rps.unwrap());
    assert!((now / before - 1.0).abs() < 1e-9, "{now} {before}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_the_operator_says_is_announced_and_nothing_is_measured() {
    let node = bootstrap_node().await;
    let mut supervisor = Supervisor::new(node.addrs.clone(), |init| {
        init.config.link_bits_per_s = Some(16.0 * HIDDEN as f64);
    });
    let (peer_id, _) = supervisor.proposed(None).await;
    supervisor.start_worker(0, 1, span()).await;
    let online = until_state(&node, &peer_id, ServerState::Online).await;
    assert_eq!((online.network_rps, online.throughput), (Some(1.0), 1.0));

    // What may be sent bounds it, and whoever bounds it is spared the measurement.
    let mut bounded = Supervisor::new(node.addrs.clone(), |init| {
        init.config.max_upload_bits_per_s = Some(2e6);
    });
    let (peer_id, _) = bounded.proposed(None).await;
    let joining = until_state(&node, &peer_id, ServerState::Joining).await;
    assert_eq!(joining.network_rps, Some(2e6 / (16.0 * HIDDEN as f64)));

    // Beside a given throughput the network does not matter, as in Petals.
    let mut fixed = Supervisor::new(node.addrs.clone(), |init| {
        init.config.throughput = Throughput::Fixed(7.0);
    });
    let (peer_id, _) = fixed.proposed(None).await;
    let joining = until_state(&node, &peer_id, ServerState::Joining).await;
    assert_eq!((joining.network_rps, joining.throughput), (None, 7.0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dry_run_tells_its_figures_and_nobody_else() {
    let node = bootstrap_node().await;
    let mut supervisor = Supervisor::new(node.addrs.clone(), |init| {
        init.config.throughput = Throughput::DryRun;
    });
    let (peer_id, _) = supervisor.proposed(None).await;
    supervisor.start_worker(0, 1, span()).await;
    let rated = tokio::time::timeout(3 * DEADLINE, supervisor.from.recv()).await;
    let Ok(Some(FromNetd::Rated(rating))) = rated else { panic!("{rated:?}") };
    assert_eq!(rating.capacity.forward_rps, 100.0);
    assert_eq!((rating.throughput, rating.blocks), (40.0, BLOCKS));
    assert!(matches!(rating.network.source, RateSource::Peers | RateSource::Link));
    assert_eq!(record(&node, &peer_id, 1).await, None);

    // Without anybody to measure with.
    let mut alone = Supervisor::new(Vec::new(), |init| {
        init.config.throughput = Throughput::DryRun;
        init.config.link_bits_per_s = Some(16.0 * HIDDEN as f64);
    });
    alone.proposed(None).await;
    alone.start_worker(0, 1, span()).await;
    let FromNetd::Rated(rating) = alone.hear().await else { panic!("no rating") };
    assert_eq!(rating.network.source, RateSource::Operator);
    assert_eq!((rating.network_rps, rating.throughput), (1.0, 1.0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_monitor_is_asked_before_clients_can_come() {
    let monitor = StandIn::start(|number, _| {
        let success = number > 0;
        let body = format!("{{\"success\": {success}, \"message\": \"\", \"your_ip\": \"\"}}");
        answer("200 OK", body.as_bytes())
    })
    .await;
    let url = monitor.url.clone();
    let mut supervisor = Supervisor::new(Vec::new(), |init| init.config.monitor = Some(url));
    let (peer_id, _) = supervisor.proposed(None).await;
    assert_eq!(monitor.requests(), [], "not before there is something to serve");
    supervisor.start_worker(0, 1, span()).await;
    supervisor.online().await;
    let asked: Vec<String> = monitor.requests().into_iter().map(|one| one.0).collect();
    assert_eq!(asked, vec![format!("GET /api/v1/is_reachable/{peer_id}"); 2]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_the_monitor_cannot_reach_ends_with_advice() {
    let monitor = StandIn::start(|_, _| {
        let body = br#"{"success": false, "message": "no way", "your_ip": "1.2.3.4"}"#;
        answer("200 OK", body)
    })
    .await;
    let url = monitor.url.clone();
    let mut supervisor = Supervisor::new(Vec::new(), |init| init.config.monitor = Some(url));
    supervisor.proposed(None).await;
    supervisor.start_worker(0, 1, span()).await;
    let fatal = supervisor.fatal().await;
    assert_eq!(fatal.reason, ExitReason::BadConfig);
    assert!(fatal.message.contains("no way"), "{}", fatal.message);
    assert!(fatal.message.contains("--public_ip 1.2.3.4 --port 31337"));
}

/// What [`serve`] does, with a hand on the node.
async fn tapped(inbox: Inbox, outbox: NetdOutbox, tap: oneshot::Sender<P2p>) -> Stop {
    let mut messages = Messages::new(inbox);
    let FromSupervisor { message, fds } = messages.next().await.unwrap();
    let ToNetd::Init(init) = message else { panic!("{message:?}") };
    let arena = map_arena(&init, fds.into_iter().next().unwrap()).unwrap();
    let (online, service) = watch::channel(None);
    let resumption = Resumption::new(None, Duration::ZERO);
    let means = Means { arena, resumption, telemetry: Arc::default(), online };
    let joined = join::join(&init, service).await.unwrap();
    tap.send(joined.p2p.clone()).unwrap();
    offer_blocks(&mut messages, &outbox, *init, joined, means).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_record_follows_when_peers_can_no_longer_dial_this_server_and_when_they_can_again() {
    let node = bootstrap_node().await;
    let (tap, tapped_node) = oneshot::channel();
    let folder = tempfile::tempdir().unwrap();
    let config = NetdConfig {
        link_bits_per_s: Some(16.0 * HIDDEN as f64),
        ..config(folder.path(), node.addrs.clone())
    };
    let mut supervisor = Supervisor::with(
        folder,
        config,
        |_| {},
        |inbox, outbox| tokio::spawn(tapped(inbox, outbox, tap)),
    );
    let (peer_id, _) = supervisor.proposed(None).await;
    let p2p = tapped_node.await.unwrap();
    supervisor.start_worker(0, 1, span()).await;
    let online = until_state(&node, &peer_id, ServerState::Online).await;
    assert_eq!((online.using_relay, online.throughput), (Some(false), 1.0));
    // As when AutoNAT finds it out.
    p2p.set_reachable(false).await;
    let relayed = until_record(&node, &peer_id, |info| info.using_relay == Some(true)).await;
    assert_eq!((relayed.state, relayed.throughput), (ServerState::Online, 0.2));
    assert_eq!(relayed.cache_tokens_left, online.cache_tokens_left);
    p2p.set_reachable(true).await;
    let direct = until_record(&node, &peer_id, |info| info.using_relay == Some(false)).await;
    assert_eq!(direct.throughput, 1.0);
}
