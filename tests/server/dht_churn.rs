//! Seven real nodes of the DHT on loopback, of which one after the other leaves and is replaced,
//! while servers keep their records alive and readers read them. `tests/soak churn` runs the same
//! with twenty nodes for ten minutes, alone in its process, whose memory and descriptors must stay flat then.

use std::time::{Duration, Instant};

use netd::dht_node;
use netd::dht_node::DhtNodeConfig;
use netd::join::Joined;
use swarm::dht::driver::unix_now;
use swarm::dht::id::DhtId;
use swarm::dht::storage::{Item, StoredValue, Timed};
use swarm::wire::msgpack::Value;
use tokio::time::timeout;

use crate::harness::DEADLINE;

/// Nodes and blocks of the long form, and of the short one.
const LONG: (usize, usize) = (20, 24);
const SHORT: (usize, usize) = (7, 4);
/// Each renews its records once while so many nodes are replaced: fewer than keep a record.
const SERVERS: usize = 4;
/// Nothing expires meanwhile: records are lost with the nodes that keep them, or not at all.
const LIFE: Duration = Duration::from_secs(24 * 3600);
/// Nodes that are replaced in the short form: those that there were at first.
const REPLACED: usize = SHORT.0;
/// In the long form, one is replaced in this time.
const CHURN: Duration = Duration::from_secs(5);

async fn node(initial_peers: Vec<String>) -> Joined {
    dht_node::start(&DhtNodeConfig::on_loopback(initial_peers)).await.expect("a node starts")
}

fn key(block: usize) -> DhtId {
    DhtId::of_text(&format!("churn.{block}"))
}

/// Writes the records of one server over `through`.
async fn announce(through: &Joined, server: usize, blocks: usize) {
    let subkey = Value::str(format!("server{server}")).encode();
    let item = |block| {
        let timed = Timed {
            value: Value::str(format!("block {block}")).encode().into(),
            expiration: unix_now() + LIFE.as_secs_f64(),
        };
        (key(block), Item::Entry(subkey.clone().into(), timed))
    };
    let items = (0..blocks).map(item).collect();
    let accepted = through.dht.store_many(items).await.expect("store");
    assert!(accepted.iter().all(|count| *count > 0), "{accepted:?}");
}

/// Records that should be there and are not, as (block, server).
async fn lost(reader: &Joined, blocks: usize) -> Vec<(usize, usize)> {
    let found = reader.dht.get_many((0..blocks).map(key).collect(), true);
    let found = found.await.expect("get");
    let entries = |stored: &Option<StoredValue>| match stored {
        Some(StoredValue::Dictionary(entries)) => {
            entries.iter().map(|(tag, _)| tag.to_vec()).collect()
        }
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
#[ignore = "a soak: .ci/long soak"]
async fn records_outlive_the_nodes_that_keep_them() {
    let seconds = std::env::var("SEPAL_SOAK_SECONDS").ok();
    let length = seconds.map(|text| Duration::from_secs(text.parse().expect("seconds")));
    let (count, blocks) = if length.is_some() { LONG } else { SHORT };
    let mut nodes = vec![node(Vec::new()).await];
    while nodes.len() < count {
        let through = nodes[nodes.len() * 7919 % nodes.len()].addrs.clone();
        nodes.push(node(through).await);
    }
    for (server, through) in nodes.iter().enumerate().take(SERVERS) {
        announce(through, server, blocks).await;
    }
    let start = Instant::now();
    let goes_on = |replaced: usize| match length {
        None => replaced < REPLACED,
        Some(length) => start.elapsed() < length,
    };
    let (mut reads, mut replaced) = (0, 0);
    let mut usages = Vec::new();
    while goes_on(replaced) {
        // The oldest leaves without a word, a new one comes through any of the others.
        let leaving = nodes.remove(0);
        leaving.p2p.shutdown().await;
        drop(leaving);
        let through = &nodes[replaced * 5 % nodes.len()];
        nodes.push(node(through.addrs.clone()).await);
        replaced += 1;
        let renewed = replaced % SERVERS;
        announce(&nodes[nodes.len() / 2 + renewed], renewed, blocks).await;
        let next = Instant::now() + CHURN;
        loop {
            let lost = timeout(DEADLINE, lost(&nodes[reads % nodes.len()], blocks)).await;
            let lost = lost.expect("a read ends");
            assert!(
                lost.is_empty(),
                "after {replaced} replaced nodes, lost (block, server): {lost:?}"
            );
            reads += 1;
            if length.is_none() || Instant::now() >= next {
                break;
            }
        }
        let (mib, descriptors) = usage();
        usages.push((mib, descriptors));
        println!(
            "{:>4} s: {reads} reads, {replaced} nodes replaced, {mib} MiB, {descriptors} descriptors",
            start.elapsed().as_secs()
        );
    }
    println!("{reads} reads of {} records, none lost; {replaced} nodes replaced", blocks * SERVERS);
    // Flat: the second half needs no more than the first, within the noise of connections under
    // way. In the short form other tests use this process, too.
    if length.is_some() {
        let half = usages.len() / 2;
        let most = |part: &[(usize, usize)]| {
            let mib = part.iter().map(|usage| usage.0).max().unwrap_or(0);
            (mib, part.iter().map(|usage| usage.1).max().unwrap_or(0))
        };
        let (early, late) = (most(&usages[..=half]), most(&usages[half..]));
        assert!(late.0 <= early.0 + early.0 / 4 + 32, "memory grows: {usages:?}");
        assert!(late.1 <= early.1 + early.1 / 4 + 64, "descriptors grow: {usages:?}");
    }
}
