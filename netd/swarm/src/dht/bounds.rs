//! The bounds of the DHT as rows of a table.

use std::time::Duration;

use super::{answer, driver, lookup, node, routing, storage};
use node::welcome;
use resource_manager::bounds::{Bound, bytes, count, time};
use storage::StorageLimits;

/// The bounds of a node of the DHT.
#[must_use]
pub fn bounds() -> Vec<Bound> {
    [records(), requests(), neighbours()].concat()
}

fn seconds(seconds: f64) -> String {
    Duration::try_from_secs_f64(seconds).map(time).unwrap_or_default()
}

/// Both the store and the cache of copies have these.
fn records() -> Vec<Bound> {
    let limits = StorageLimits::default();
    vec![
        Bound::new(
            "DHT records, in the store and in the cache each",
            format!(
                "{} keys, {}; {} per peer",
                count(limits.max_keys),
                bytes(limits.max_total_bytes),
                bytes(limits.max_peer_bytes)
            ),
            "the largest peer of the largest IP net loses the record that ends first",
        ),
        Bound::new(
            "entries under one DHT key",
            count(limits.max_subkeys),
            "first-hand ones replace others, then those of the net that has most there; else refused",
        ),
        Bound::new("a DHT value, and a subkey", bytes(limits.max_value_bytes), "refused"),
        Bound::new(
            "charge for a DHT record beside its bytes",
            bytes(storage::ENTRY_OVERHEAD),
            "counts for its peer",
        ),
        Bound::new("life of a DHT record of others", seconds(limits.max_horizon_s), "cut"),
        Bound::new("expiration of a DHT record ahead", seconds(storage::MAX_AHEAD_S), "refused"),
    ]
}

fn requests() -> Vec<Bound> {
    vec![
        Bound::new(
            "fields of a DHT request",
            count(driver::MAX_FIELDS),
            "refused before it is decoded",
        ),
        Bound::new("items of one store", count(answer::MAX_ITEMS), "refused"),
        Bound::new("keys of one find", count(answer::MAX_FOUND_KEYS), "refused"),
        Bound::new(
            "values in the answer to one find",
            format!(
                "{}; {} looked at",
                bytes(answer::MAX_FOUND_BYTES),
                bytes(answer::MAX_COPIED_BYTES)
            ),
            "the largest entries are left out",
        ),
        Bound::new(
            "call-backs for peers that join",
            count(node::MAX_CALL_BACKS),
            "answered as not reachable",
        ),
        Bound::new(
            "callers that are pinged before they enter the routing table",
            format!(
                "{}; {} of one net",
                count(node::verify::MAX_VERIFYING),
                count(node::verify::MAX_VERIFYING_OF_NET)
            ),
            "others wait for their next call",
        ),
        Bound::new("calls of the DHT under way", count(driver::MAX_CALLS), "they wait"),
        Bound::new(
            "time of a call, and of an operation",
            format!("{}, {}", time(driver::CALL_TIMEOUT), time(driver::OPERATION_TIMEOUT)),
            "it fails",
        ),
        Bound::new(
            "nodes asked about one key",
            format!("{}; the {} nearest count", count(lookup::MAX_VISITS), count(lookup::BEAM)),
            "the lookup ends",
        ),
    ]
}

fn neighbours() -> Vec<Bound> {
    vec![
        Bound::new(
            "routing table of the DHT",
            format!(
                "{} nodes, {} per bucket",
                count(routing::MAX_NODES),
                count(routing::BUCKET_SIZE)
            ),
            "newcomers wait as replacements",
        ),
        Bound::new(
            "records that a new neighbour is given",
            format!(
                "{} once in {}; {} a minute for all",
                bytes(welcome::MAX_WELCOME_BYTES),
                seconds(welcome::WELCOME_PERIOD_S),
                bytes(welcome::MAX_WELCOME_BYTES_PER_MINUTE)
            ),
            "nothing more is sent",
        ),
        Bound::new(
            "peers remembered that were welcomed",
            count(welcome::MAX_WELCOMED),
            "nobody is welcomed",
        ),
        Bound::new(
            "difference of clocks when joining",
            seconds(node::MAX_CLOCK_SKEW_S),
            "the join fails",
        ),
    ]
}
