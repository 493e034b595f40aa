//! Twenty real nodes of the DHT on loopback, of which one after the other leaves and is replaced,
//! while servers keep their records alive and readers read them. `tests/soak churn` runs the same
//! for ten minutes.

use std::time::{Duration, Instant};

use hivemind::dht::driver::unix_now;
use hivemind::dht::id::DhtId;
use hivemind::dht::storage::{Item, Stored, Timed};
use hivemind::wire::msgpack::Value;
use netd::dht_node;
use netd::join::Joined;
use shared::config::DhtNodeConfig;
use tokio::time::{interval, timeout};

const NODES: usize = 20;
const BLOCKS: usize = 24;
/// Servers: their records are written anew twice in a record's life, as Petals does.
const SERVERS: usize = 4;
const LIFE: Duration = Duration::from_secs(60);
/// One node leaves and one comes in this time.
const CHURN: Duration = Duration::from_secs(5);
const DEADLINE: Duration = Duration::from_secs(60);

async fn node(initial_peers: Vec<String>) -> Joined {
    let config = DhtNodeConfig {
        host_maddrs: vec!["/ip4/127.0.0.1/tcp/0".into()],
        announce_maddrs: Vec::new(),
        initial_peers,
        identity_path: None,
        use_relay: true,
        relay_bits_per_s: 100e6,
        use_auto_relay: false,
        use_upnp: false,
        dials_private_nets: true,
        refresh_period: DEADLINE,
        startup_timeout: DEADLINE,
    };
    dht_node::start(&config).await.expect("a node starts")
}

fn key(block: usize) -> DhtId {
    DhtId::of_text(&format!("churn.{block}"))
}

/// Writes the records of one server over `through`.
async fn announce(through: &Joined, server: usize) {
    let subkey = Value::str(format!("server{server}")).encode();
    let item = |block| {
        let timed = Timed {
            value: Value::str(format!("block {block}")).encode().into(),
            expiration: unix_now() + LIFE.as_secs_f64(),
        };
        (key(block), Item::Entry(subkey.clone().into(), timed))
    };
    let items = (0..BLOCKS).map(item).collect();
    let accepted = through.dht.store_many(items).await.expect("store");
    assert!(accepted.iter().all(|count| *count > 0), "{accepted:?}");
}

/// Records that should be there and are not, as (block, server).
async fn lost(reader: &Joined) -> Vec<(usize, usize)> {
    let found = reader.dht.get_many((0..BLOCKS).map(key).collect(), true);
    let found = found.await.expect("get");
    let entries = |stored: &Option<Stored>| match stored {
        Some(Stored::Dictionary(entries)) => entries.iter().map(|(tag, _)| tag.to_vec()).collect(),
        _ => Vec::new(),
    };
    let mut lost = Vec::new();
    for (block, stored) in found.iter().enumerate() {
        let tags: Vec<Vec<u8>> = entries(stored);
        for server in 0..SERVERS {
            if !tags.contains(&Value::str(format!("server{server}")).encode()) {
                lost.push((block, server));
            }
        }
    }
    lost
}

/// Resident memory in MiB, and open descriptors of this process.
fn usage() -> (usize, usize) {
    let status = std::fs::read_to_string("/proc/self/status").expect("status");
    let line = status.lines().find(|line| line.starts_with("VmRSS:"));
    let kib = line.and_then(|line| line.split_whitespace().nth(1));
    let kib: usize = kib.and_then(|kib| kib.parse().ok()).expect("VmRSS");
    let descriptors = std::fs::read_dir("/proc/self/fd").expect("fd").count();
    (kib / 1024, descriptors)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn records_outlive_the_nodes_that_keep_them() {
    let seconds = std::env::var("SEPAL_SOAK_SECONDS").ok();
    let length = Duration::from_secs(seconds.map_or(30, |text| text.parse().expect("seconds")));
    let mut nodes = vec![node(Vec::new()).await];
    while nodes.len() < NODES {
        let through = nodes[nodes.len() * 7919 % nodes.len()].addrs.clone();
        nodes.push(node(through).await);
    }
    for (server, through) in nodes.iter().enumerate().take(SERVERS) {
        announce(through, server).await;
    }
    let start = Instant::now();
    let mut churn = interval(CHURN);
    let mut refresh = interval(LIFE / 2 / SERVERS as u32);
    let mut report = interval(Duration::from_secs(30).min(length / 3));
    let (mut round, mut next_server, mut reads, mut replaced) = (0, 0, 0, 0);
    let mut usages = Vec::new();
    while start.elapsed() < length {
        tokio::select! {
            _ = churn.tick() => {
                // The oldest leaves without a word, a new one comes through any of the others.
                let leaving = nodes.remove(0);
                leaving.p2p.shutdown().await;
                drop(leaving);
                let through = &nodes[replaced * 5 % nodes.len()];
                nodes.push(node(through.addrs.clone()).await);
                replaced += 1;
            }
            _ = refresh.tick() => {
                announce(&nodes[nodes.len() / 2 + next_server], next_server).await;
                next_server = (next_server + 1) % SERVERS;
            }
            _ = report.tick() => {
                let (mib, descriptors) = usage();
                usages.push((mib, descriptors));
                println!("{:>4} s: {reads} reads, {replaced} nodes replaced, {mib} MiB, {descriptors} descriptors", start.elapsed().as_secs());
            }
            lost = timeout(DEADLINE, lost(&nodes[round % nodes.len()])) => {
                let lost = lost.expect("a read ends");
                assert!(lost.is_empty(), "after {replaced} replaced nodes, lost (block, server): {lost:?}");
                reads += 1;
                round += 1;
            }
        }
    }
    assert!(reads > 0 && replaced > 0, "{reads} reads, {replaced} replaced");
    println!(
        "{reads} reads of {} records, none lost; {replaced} nodes replaced; (MiB, descriptors): {usages:?}",
        BLOCKS * SERVERS
    );
    // Flat: the second half needs no more than the first, within the noise of connections under
    // way.
    let half = usages.len() / 2;
    let most = |part: &[(usize, usize)]| {
        let mib = part.iter().map(|usage| usage.0).max().unwrap_or(0);
        (mib, part.iter().map(|usage| usage.1).max().unwrap_or(0))
    };
    let (early, late) = (most(&usages[..=half]), most(&usages[half..]));
    assert!(late.0 <= early.0 + early.0 / 4 + 32, "memory grows: {usages:?}");
    assert!(late.1 <= early.1 + early.1 / 4 + 64, "descriptors grow: {usages:?}");
}
