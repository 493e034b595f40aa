//! All bounds on what peers can make the daemon hold or do, for the list in SECURITY.md. Those that
//! are settings are named by their flag.

use resource_manager::bounds::{Bound, bytes, count, time};
use shared::job::MAX_ROWS;
use shared::shm::sessions::SESSION_RECORDS;
use swarm::dht;
use swarm::wire::metadata::{MAX_ID_CHARS, MAX_NEXT_SERVERS};
use swarm::wire::uid::MAX_CHAIN;

use crate::membership::{rate, reachability, rebalance};
use crate::metrics::http;
use crate::rpc::{self, dial_budget, inference, push_client, registry, request, resumption};
use crate::sessions::{eviction, queue, session, shares};

/// The bounds, in the order of the list.
#[must_use]
pub fn bounds() -> Vec<Bound> {
    let mut protocols = dht::driver::protocols();
    protocols.extend(rpc::protocols());
    protocols.extend([reachability::protocol(), rate::protocol()]);
    let streams = p2p::of_protocols(&protocols);
    [p2p::bounds(), streams, dht::bounds(), requests(), sessions(), pushes(), favours()].concat()
}

fn requests() -> Vec<Bound> {
    vec![
        Bound::new(
            "fields and tensors of a request",
            count(request::MAX_FIELDS),
            "refused before it is decoded",
        ),
        Bound::new("blocks that a request names", count(MAX_CHAIN), "refused"),
        Bound::new("rows of a batch", count(MAX_ROWS as usize), "refused"),
        Bound::new(
            "length of a session id",
            format!("{} characters", count(MAX_ID_CHARS)),
            "refused",
        ),
        Bound::new(
            "time of a forward or backward request, and of a session",
            "`--request_timeout`, `--session_timeout`, `--step_timeout`",
            "it ends with an error",
        ),
    ]
}

fn sessions() -> Vec<Bound> {
    vec![
        Bound::new(
            "KV memory",
            "`--attn_cache_tokens`; of that `--max_kv_share` per peer",
            "sessions wait, or are refused",
        ),
        Bound::new("sessions that wait for KV memory", count(queue::MAX_WAITING), "refused"),
        Bound::new(
            "how often a waiting session is overtaken",
            count(queue::MAX_OVERTAKEN as usize),
            "it is the next",
        ),
        Bound::new(
            "silence of a session above its share while others want memory",
            time(eviction::MAX_SILENCE),
            "it ends, the client opens it again",
        ),
        Bound::new(
            "memory of refused claims",
            format!("{} peers for {}", count(shares::MAX_REFUSED), time(shares::CLAIM_LIFE)),
            "not remembered",
        ),
        Bound::new(
            "step ids remembered of a session",
            count(session::STEP_IDS_KEPT),
            "the oldest is forgotten",
        ),
        Bound::new(
            "sessions that can be resumed",
            format!(
                "{} per peer, {} in all",
                count(resumption::MAX_PER_PEER),
                count(SESSION_RECORDS)
            ),
            "they end with their stream",
        ),
        Bound::new(
            "life of a session without a stream",
            "`--session_grace`",
            "its memory is freed",
        ),
    ]
}

fn pushes() -> Vec<Bound> {
    vec![
        Bound::new(
            "pushed steps that wait for their session",
            count(registry::PUSHED_AHEAD),
            "dropped",
        ),
        Bound::new(
            "pushed steps without the client's copy",
            count(inference::copies::MAX_UNCONFIRMED),
            "no more are taken",
        ),
        Bound::new(
            "outputs under way to next servers",
            format!(
                "{} per session, {} in all",
                count(push_client::MAX_WAITING),
                bytes(push_client::MAX_PUSH_BYTES)
            ),
            "not pushed",
        ),
        Bound::new("time of a push", time(push_client::PUSH_TIMEOUT), "given up"),
        Bound::new(
            "next servers",
            format!(
                "{} per step, {} per session",
                count(MAX_NEXT_SERVERS),
                count(push_client::MAX_HOPS as usize)
            ),
            "refused; not pushed to",
        ),
        Bound::new(
            "next servers of one client that cannot be reached",
            format!("{} in {}", count(dial_budget::MAX_MISSES), time(dial_budget::MEMORY)),
            "not dialled",
        ),
        Bound::new(
            "clients that such servers are counted of",
            count(dial_budget::MAX_CLIENTS),
            "nobody's are dialled",
        ),
    ]
}

fn favours() -> Vec<Bound> {
    vec![
        Bound::new(
            "transfers that measure the network",
            format!(
                "{} at once, {} per peer in {}, {} per hour",
                count(rate::serve::MAX_AT_ONCE),
                count(rate::serve::MAX_PER_PEER),
                time(rate::serve::PEER_PERIOD),
                count(rate::serve::MAX_PER_HOUR)
            ),
            "refused",
        ),
        Bound::new(
            "one such transfer",
            format!(
                "{}, {}",
                bytes(usize::try_from(rate::MAX_BYTES).unwrap_or(usize::MAX)),
                time(rate::MAX_TIME)
            ),
            "ended",
        ),
        Bound::new(
            "dials for peers that ask whether they can be reached",
            format!(
                "{} at once, one per caller in {}, {} addresses each",
                count(reachability::MAX_PROBES),
                time(reachability::PROBE_PERIOD),
                count(reachability::MAX_DIALLED)
            ),
            "refused",
        ),
        Bound::new(
            "servers that placement looks at",
            count(rebalance::MAX_SERVERS),
            "the others are left out",
        ),
        Bound::new(
            "connections to `--metrics`",
            format!(
                "{} per address, {} in all; {} of header",
                count(http::MAX_PER_ADDRESS),
                count(http::MAX_CONNECTIONS),
                bytes(http::MAX_HEAD_BYTES)
            ),
            "closed",
        ),
    ]
}
