//! This server's own records: [`records`] builds them, [`Announcer`] keeps them alive in the DHT.
//! Source: `ModuleAnnouncerThread` in `petals/server/server.py` and `declare_active_modules` in
//! `petals/utils/dht.py`.
//!
//! ```text
//!   status (watch) ── state changes ──> announce at once ─┐
//!                     period passes ──> announce again  ──┴─> store_many: every block's uid, and the index of models
//!                     a session's worth of cache came or went ──> announce again, after 10 s at the earliest
//!                     Offline ────────> announce once, end
//! ```

use p2p::task;
use std::ops::Range;
use std::time::Duration;
use swarm::dht::driver::{Dht, unix_now};
use swarm::dht::id::DhtId;
use swarm::dht::storage::{Item, Timed};
use swarm::wire::msgpack::Value;
use swarm::wire::records::{MODELS_KEY, ModelInfo, ServerInfo, ServerState};
use swarm::wire::uid::module_uid;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout_at};
use tracing::{info, warn};

/// Time to the next attempt after one that no node accepted.
const RETRY_PERIOD: Duration = Duration::from_secs(5);

/// Least time between two announcements for the sake of the free cache.
const CACHE_PERIOD: Duration = Duration::from_secs(10);

/// Longest wait for one store that something else waits for.
const STORE_PATIENCE: Duration = Duration::from_secs(10);

/// What stays the same while a server serves its span.
#[derive(Clone, Debug, PartialEq)]
pub struct AnnounceConfig {
    /// DHT prefix of the model; one that starts with `_` keeps the model out of the public index.
    pub prefix: String,
    /// Blocks served.
    pub blocks: Range<u32>,
    /// Our PeerID in base58.
    pub peer_id: String,
    /// The model's entry in the index of models.
    pub model: ModelInfo,
    /// The record without state, range, free cache and pings, which are filled in here.
    pub info: ServerInfo,
    /// Time between announcements.
    pub update_period: Duration,
    /// Life of a record.
    pub expiration: Duration,
    /// Free cache that comes and goes with a session, keys and values counted apart.
    pub session_tokens: u64,
}

/// What changes.
#[derive(Clone, Debug, PartialEq)]
pub struct ServerStatus {
    /// State of the server.
    pub state: ServerState,
    /// Free KV cache, keys and values counted apart.
    pub cache_tokens_left: Option<u64>,
    /// Seconds to likely next servers by PeerID.
    pub next_pings: Vec<(String, f64)>,
}

/// The items to store for a server in `status` at `now` (Unix seconds).
#[must_use]
pub fn records(config: &AnnounceConfig, status: &ServerStatus, now: f64) -> Vec<(DhtId, Item)> {
    let mut items = records_under(config, status, now, config.blocks.clone());
    if !config.prefix.starts_with('_') {
        let subkey = Value::str(&config.prefix).encode();
        let timed = timed(config, config.model.encode(), now);
        items.push((DhtId::of_text(MODELS_KEY), Item::Entry(subkey.into(), timed)));
    }
    items
}

fn timed(config: &AnnounceConfig, value: Vec<u8>, now: f64) -> Timed {
    Timed { value: value.into(), expiration: now + config.expiration.as_secs_f64() }
}

/// The server's record under the uids of the blocks `under`, which need not be those that it
/// claims, and not in the index.
#[must_use]
pub fn records_under(
    config: &AnnounceConfig,
    status: &ServerStatus,
    now: f64,
    under: impl IntoIterator<Item = u32>,
) -> Vec<(DhtId, Item)> {
    let offline = status.state == ServerState::Offline;
    let info = ServerInfo {
        state: status.state,
        start_block: Some(config.blocks.start.into()),
        end_block: Some(config.blocks.end.into()),
        cache_tokens_left: status.cache_tokens_left,
        next_pings: Some(if offline { Vec::new() } else { status.next_pings.clone() }),
        ..config.info.clone()
    };
    let subkey = Value::str(&config.peer_id).encode();
    let record = Item::Entry(subkey.into(), timed(config, info.encode(), now));
    let uid = |block| (DhtId::of_text(&module_uid(&config.prefix, block)), record.clone());
    under.into_iter().map(uid).collect()
}

/// Stores the record under `under` once; whether some node took each. Gives up after
/// `STORE_PATIENCE`.
pub async fn store_under(
    dht: &Dht,
    config: &AnnounceConfig,
    status: &ServerStatus,
    under: &[u32],
) -> bool {
    let items = records_under(config, status, unix_now(), under.iter().copied());
    if items.is_empty() {
        return true;
    }
    let stored = tokio::time::timeout(STORE_PATIENCE, dht.store_many(items)).await;
    matches!(stored, Ok(Ok(accepted)) if accepted.iter().all(|count| *count > 0))
}

/// Says OFFLINE under `under`, again and again until some node took each record or the earlier ones
/// have expired anyway.
pub async fn take_back(dht: Dht, config: AnnounceConfig, under: Vec<u32>) {
    let status = ServerStatus {
        state: ServerState::Offline,
        cache_tokens_left: None,
        next_pings: Vec::new(),
    };
    let deadline = Instant::now() + config.expiration;
    while !store_under(&dht, &config, &status, &under).await {
        if Instant::now() >= deadline {
            return;
        }
        tokio::time::sleep(RETRY_PERIOD).await;
    }
}

/// The task that announces a server until it is offline.
#[derive(Debug)]
pub struct Announcer {
    task: JoinHandle<()>,
    announced: watch::Receiver<Option<ServerState>>,
}

impl Announcer {
    /// Starts announcing what `status` says. To be called within a tokio runtime. The task ends
    /// after it announced [`ServerState::Offline`], which it also does when the sender of
    /// `status` is dropped.
    #[must_use]
    pub fn start(dht: Dht, config: AnnounceConfig, status: watch::Receiver<ServerStatus>) -> Self {
        let (announced_sender, announced) = watch::channel(None);
        let task = task::spawn(run(dht, config, status, announced_sender));
        Self { task, announced }
    }

    /// The state that nodes of the DHT last accepted for every block.
    #[must_use]
    pub fn announced(&self) -> watch::Receiver<Option<ServerState>> {
        self.announced.clone()
    }

    /// Stops announcing, and says nothing about it: somebody else goes on.
    pub fn stop(self) {
        self.task.abort();
    }

    /// Waits until the task has ended, at most until `deadline`: after the status became offline,
    /// so that clients learn of it. Whether it ended in time.
    pub async fn finished(self, deadline: Instant) -> bool {
        timeout_at(deadline, self.task).await.is_ok()
    }
}

async fn run(
    dht: Dht,
    config: AnnounceConfig,
    mut status: watch::Receiver<ServerStatus>,
    announced: watch::Sender<Option<ServerState>>,
) {
    let mut orphaned = false;
    let mut rejoined = dht.rejoined();
    loop {
        rejoined.mark_unchanged();
        let started = Instant::now();
        let mut current = status.borrow_and_update().clone();
        if orphaned {
            current.state = ServerState::Offline;
        }
        let stored = announce(&dht, &config, &current).await;
        if stored {
            announced.send_replace(Some(current.state));
        }
        if current.state == ServerState::Offline {
            return;
        }
        let period =
            if stored { config.update_period } else { config.update_period.min(RETRY_PERIOD) };
        if started.elapsed() > period {
            warn!(
                took_s = started.elapsed().as_secs_f64(),
                "announcing took longer than the update period"
            );
        }
        let changed = next_change(&mut status, &current, config.session_tokens, started);
        // The period ends, or the state changes; a sender that is gone means the server ends. Or
        // the node was away from the swarm, whose nodes may have lost these records
        // meanwhile.
        orphaned = tokio::select! {
            ended = timeout_at(started + period, changed) => matches!(ended, Ok(Err(_))),
            Ok(()) = rejoined.changed() => false,
        };
    }
}

/// Waits until the state is another than was told at `started`, or so much of the cache has come or gone
/// since that clients choose otherwise. The error says that the sender is gone.
async fn next_change(
    status: &mut watch::Receiver<ServerStatus>,
    told: &ServerStatus,
    session_tokens: u64,
    started: Instant,
) -> Result<(), watch::error::RecvError> {
    let is_other = |new: &ServerStatus| new.state != told.state;
    if let Ok(changed) = timeout_at(started + CACHE_PERIOD, status.wait_for(is_other)).await {
        return changed.map(drop);
    }
    let is_news = |new: &ServerStatus| is_other(new) || has_news(told, new, session_tokens);
    status.wait_for(is_news).await.map(drop)
}

/// Whether a session's worth of cache has come or gone.
fn has_news(told: &ServerStatus, new: &ServerStatus, session_tokens: u64) -> bool {
    let (told, new) = (told.cache_tokens_left, new.cache_tokens_left);
    told.zip(new).is_some_and(|(told, new)| told.abs_diff(new) >= session_tokens.max(1))
}

/// Stores the records; whether each was accepted somewhere.
async fn announce(dht: &Dht, config: &AnnounceConfig, status: &ServerStatus) -> bool {
    match dht.store_many(records(config, status, unix_now())).await {
        Ok(accepted) => {
            let refused = accepted.iter().filter(|count| **count == 0).count();
            if refused > 0 {
                warn!(refused, of = accepted.len(), "no DHT node accepted some records");
            }
            info!(state = ?status.state, blocks = ?config.blocks, "announced");
            refused == 0
        }
        Err(error) => {
            warn!(%error, "cannot announce this server");
            false
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dht_node;
    use swarm::view::read_blocks;

    fn config(prefix: &str, peer_id: &str) -> AnnounceConfig {
        AnnounceConfig {
            prefix: prefix.into(),
            blocks: 2..4,
            peer_id: peer_id.into(),
            model: ModelInfo { num_blocks: 6, repository: None },
            info: ServerInfo {
                version: Some("1".into()),
                ..ServerInfo::new(ServerState::Offline, 7.5)
            },
            update_period: Duration::from_secs(120),
            expiration: Duration::from_secs(240),
            session_tokens: 100,
        }
    }

    fn status(state: ServerState) -> ServerStatus {
        ServerStatus { state, cache_tokens_left: Some(512), next_pings: vec![("p".into(), 0.5)] }
    }

    fn decoded(item: &Item) -> ServerInfo {
        let Item::Entry(_, timed) = item else { panic!("{item:?}") };
        assert_eq!(timed.expiration, 1240.0);
        ServerInfo::decode(&timed.value).unwrap()
    }

    #[test]
    fn every_block_and_the_index_get_a_record() {
        let items = records(&config("tiny", "me"), &status(ServerState::Online), 1000.0);
        let keys: Vec<_> = items.iter().map(|(key, _)| *key).collect();
        assert_eq!(keys, ["tiny.2", "tiny.3", "_petals.models"].map(DhtId::of_text));
        let info = decoded(&items[0].1);
        assert_eq!(
            (info.state, info.start_block, info.end_block),
            (ServerState::Online, Some(2), Some(4))
        );
        assert_eq!((info.throughput, info.cache_tokens_left), (7.5, Some(512)));
        assert_eq!(info.next_pings, Some(vec![("p".into(), 0.5)]));
        assert_eq!(items[0].1, items[1].1);
        let Item::Entry(tag, timed) = &items[2].1 else { panic!() };
        assert_eq!(&tag[..], Value::str("tiny").encode());
        assert_eq!(ModelInfo::decode(&timed.value).unwrap().num_blocks, 6);
    }

    #[test]
    fn private_models_stay_out_of_the_index_and_offline_servers_have_no_pings() {
        let items = records(&config("_tiny", "me"), &status(ServerState::Offline), 1000.0);
        assert_eq!(items.len(), 2);
        assert_eq!(decoded(&items[0].1).next_pings, Some(Vec::new()));
    }

    #[test]
    fn records_live_as_long_as_asked_for() {
        let config = AnnounceConfig { expiration: Duration::from_secs(77), ..config("t", "me") };
        let items = records(&config, &status(ServerState::Online), 1000.0);
        assert!(
            items.iter().all(
                |(_, item)| matches!(item, Item::Entry(_, timed) if timed.expiration == 1077.0)
            )
        );
    }

    /// A node of the DHT that joined through `initial_peers`, and its address.
    async fn node(initial_peers: Vec<String>) -> (Dht, String) {
        let joined =
            dht_node::start(&dht_node::DhtNodeConfig::on_loopback(initial_peers)).await.unwrap();
        (joined.dht, joined.addrs[0].clone())
    }

    /// Announces to a node without peers, which stores everything itself: where the clock jumps. What the
    /// node says of the free cache, as long as the sender of the status lives.
    async fn announcing() -> (watch::Sender<ServerStatus>, impl AsyncFn() -> Option<u64>) {
        let (dht, _) = node(Vec::new()).await;
        let peer_id = p2p::PeerId::random().to_base58();
        let (sender, receiver) = watch::channel(status(ServerState::Online));
        let announcer = Announcer::start(dht.clone(), config("tiny", &peer_id), receiver);
        announcer.announced().wait_for(Option::is_some).await.unwrap();
        let told = async move || {
            let blocks = read_blocks(&dht, "tiny", 2..3).await.unwrap();
            blocks[0].get(&peer_id).and_then(|info| info.cache_tokens_left)
        };
        (sender, told)
    }

    #[tokio::test(start_paused = true)]
    async fn records_are_announced_again_each_period() {
        let (sender, told) = announcing().await;
        let (period, moment) = (config("", "").update_period, Duration::from_secs(1));
        tokio::time::sleep(moment).await;
        for free in [511, 510, 509] {
            // Too little to be told for its own sake.
            sender.send_modify(|status| status.cache_tokens_left = Some(free));
            tokio::time::sleep(period - 2 * moment).await;
            assert_eq!(told().await, Some(free + 1), "before the period ends");
            tokio::time::sleep(2 * moment).await;
            assert_eq!(told().await, Some(free));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_sessions_worth_of_cache_is_told_before_the_period_ends_and_less_is_not() {
        let (sender, told) = announcing().await;
        sender.send_modify(|status| status.cache_tokens_left = Some(450));
        tokio::time::sleep(3 * CACHE_PERIOD).await;
        assert_eq!(told().await, Some(512), "a change that matters to nobody");
        sender.send_modify(|status| status.cache_tokens_left = Some(400));
        tokio::time::sleep(Duration::from_secs(1)).await;
        assert_eq!(told().await, Some(400));
        sender.send_modify(|status| status.cache_tokens_left = Some(200));
        tokio::time::sleep(CACHE_PERIOD / 2).await;
        assert_eq!(told().await, Some(400), "too soon after the last time");
        tokio::time::sleep(CACHE_PERIOD / 2).await;
        assert_eq!(told().await, Some(200));
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn states_reach_other_nodes_one_after_another() {
        let (first, address) = node(Vec::new()).await;
        let (second, _) = node(vec![address]).await;
        let peer_id = p2p::PeerId::random().to_base58();
        let (sender, receiver) = watch::channel(status(ServerState::Joining));
        let announcer = Announcer::start(first, config("tiny", &peer_id), receiver);
        let mut announced = announcer.announced();
        for state in [ServerState::Joining, ServerState::Online, ServerState::Offline] {
            sender.send_modify(|status| status.state = state);
            announced.wait_for(|seen| *seen == Some(state)).await.unwrap();
            let blocks = read_blocks(&second, "tiny", 0..6).await.unwrap();
            let served: Vec<_> =
                blocks.iter().map(|servers| servers.get(&peer_id).map(|i| i.state)).collect();
            assert_eq!(served, [None, None, Some(state), Some(state), None, None]);
        }
        assert!(announcer.finished(Instant::now() + Duration::from_secs(60)).await);
    }
}
