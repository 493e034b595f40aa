//! Looks at the swarm again and again and says when this server should serve other blocks. It only
//! asks; who carries the move out, and says when the next one may be thought of, is [`crate::run`].
//! Source: the loop in `petals/server/server.py`, `Server.run`.
//!
//! # Discrepancies
//! Petals' check that cannot be made ends the server; here the next one comes. Which blocks are
//! better is decided before the move, on the view that asked for it.

use std::ops::Range;
use std::time::Duration;

use rand::Rng;
use rand::SeedableRng;
use rand::rngs::StdRng;
use shared::block::Span;
use swarm::dht::driver::Dht;
use swarm::view::{self, BlockServers, ServerSpan};
use swarm::wire::records::ServerState;
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;
use tracing::{debug, info, warn};

use super::placement::hysteresis::{self, Rebalancer};
use super::placement::{Decision, StayReason, best_start_without};

/// Servers that are looked at; more are a flood of records.
pub(crate) const MAX_SERVERS: usize = 4096;
/// Shortest pause between two looks.
const MIN_PAUSE: Duration = Duration::from_secs(1);

/// What to look at, and how often.
#[derive(Clone, Debug)]
pub struct BalanceSettings {
    /// Prefix of the model.
    pub prefix: String,
    /// This peer in base58.
    pub own: String,
    /// Blocks of the model.
    pub blocks: u32,
    /// Moves when the weakest block has less than this share of what it could have; 0 never, above
    /// 1 always.
    pub quality: f64,
    /// Mean time between two looks; each is uniform in up to twice that.
    pub period: Duration,
}

impl BalanceSettings {
    /// Whether a server of `length` blocks can ever move.
    #[must_use]
    pub fn moves(&self, length: usize) -> bool {
        self.quality > 0.0 && length < self.blocks as usize
    }
}

/// Blocks that the swarm needs more than those of this server.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Wish {
    pub to: Span,
    /// Share of the usual time that sessions have to end, if the present blocks must be left first.
    pub patience: f64,
}

/// Looks for ever. `present` is the span that is served and may be left, `None` while there is no
/// such thing; spans that would be better go to `wishes`.
pub async fn watch(
    dht: Dht,
    settings: BalanceSettings,
    mut present: watch::Receiver<Option<Span>>,
    wishes: mpsc::Sender<Wish>,
) {
    let mut watcher = Watcher::new(dht, settings);
    loop {
        tokio::time::sleep(watcher.pause()).await;
        let Ok(span) = present.wait_for(Option::is_some).await.map(|span| *span) else {
            return;
        };
        let Some(span) = span else { continue };
        let Some(view) = watcher.look(span).await else {
            continue;
        };
        // Only a reactor that stops loses its thread.
        let Some((next, view, decision)) = watcher.decide(view).await else {
            return;
        };
        watcher = next;
        let servers = view.servers.len();
        if !matches!(decision, Decision::Stay(StayReason::Waiting)) {
            debug!(?decision, servers, "checked the balance of the swarm");
        }
        let Decision::Move(reason) = decision else {
            continue;
        };
        let to = target(&watcher.settings.own, &view.servers, view.blocks, span);
        let Some(to) = to.filter(|to| *to != span) else {
            continue;
        };
        info!(?reason, from = %span, %to, servers, "the swarm needs other blocks more");
        let patience = hysteresis::patience(reason, watcher.settings.quality);
        if wishes.send(Wish { to, patience }).await.is_err() {
            return;
        }
    }
}

/// Looks at the swarm, and decides.
struct Watcher {
    dht: Dht,
    settings: BalanceSettings,
    began: Instant,
    random: StdRng,
    rebalancer: Rebalancer,
    /// Records that the last look dropped.
    dropped: usize,
}

/// What one look saw.
struct BalanceView {
    servers: Vec<ServerSpan>,
    /// Blocks of the model.
    blocks: usize,
}

impl Watcher {
    fn new(dht: Dht, settings: BalanceSettings) -> Watcher {
        Watcher {
            rebalancer: Rebalancer::new(settings.quality, Duration::ZERO),
            dht,
            settings,
            began: Instant::now(),
            random: StdRng::from_rng(&mut rand::rng()),
            dropped: 0,
        }
    }

    /// Time to the next look.
    fn pause(&mut self) -> Duration {
        let period = self.settings.period;
        let usual = period.mul_f64(2.0 * self.random.random_range(0.0..1.0));
        match self.rebalancer.waits_until() {
            Some(until) => until
                .saturating_sub(self.began.elapsed())
                .clamp(MIN_PAUSE, MIN_PAUSE.max(2 * period)),
            None => usual,
        }
    }

    /// The servers of the swarm, this one with the span `present`. `None`: they cannot be read now.
    async fn look(&mut self, present: Span) -> Option<BalanceView> {
        let BalanceSettings { prefix, blocks, own, .. } = &self.settings;
        let view = match view::read(&self.dht, prefix, 0..*blocks).await {
            Ok(view) => view,
            Err(error) => {
                debug!(%error, "cannot read the swarm");
                return None;
            }
        };
        if view.dropped != self.dropped {
            warn!(dropped = view.dropped, "ignoring invalid records of other servers");
            self.dropped = view.dropped;
        }
        let blocks = view.blocks.len();
        let mut servers = view::places(&view.blocks, 0);
        // Anybody can write under our name: where this server is, it knows itself.
        for server in servers.iter_mut().filter(|server| server.peer_id == *own) {
            let within = |block: u32| (block as usize).min(blocks);
            (server.start, server.end) = (within(present.start().0), within(present.end().0));
        }
        if servers.len() > MAX_SERVERS {
            let mut left = MAX_SERVERS;
            servers.retain(|server| {
                left = left.saturating_sub(1);
                left > 0 || server.peer_id == *own
            });
        }
        Some(BalanceView { servers, blocks })
    }

    /// Decides on a thread of its own: the simulation of a large swarm takes too long for the
    /// reactor.
    async fn decide(mut self, view: BalanceView) -> Option<(Watcher, BalanceView, Decision)> {
        let decided = tokio::task::spawn_blocking(move || {
            let Watcher { rebalancer, settings, random, began, .. } = &mut self;
            let (servers, blocks) = (&view.servers, view.blocks);
            let now = began.elapsed();
            let decision = rebalancer.on_check(now, &settings.own, servers, blocks, random);
            (self, view, decision)
        });
        decided.await.ok()
    }
}

/// Where a server that serves `span` helps most.
fn target(own: &str, places: &[ServerSpan], blocks: usize, span: Span) -> Option<Span> {
    let length = span.block_count();
    let start = best_start_without(own, places, blocks, length)?;
    let end = u32::try_from(start + length).ok()?;
    Span::new(u32::try_from(start).ok()?, end).ok()
}

/// Whether some block that is left by a move would have no server that is online.
#[must_use]
pub fn opens_hole(blocks: &[BlockServers], own: &str, left: &[u32]) -> bool {
    let served = |block: &u32| {
        let servers = usize::try_from(*block).ok().and_then(|block| blocks.get(block));
        servers.is_some_and(|servers| {
            servers.iter().any(|(peer, info)| peer != own && info.state == ServerState::Online)
        })
    };
    !left.iter().all(served)
}

/// The blocks of `span` that are not in `other`.
#[must_use]
pub fn without(span: Span, other: Span) -> Vec<u32> {
    let outside = |block: &shared::block::BlockIndex| !other.contains(*block);
    span.blocks().filter(outside).map(|block| block.0).collect()
}

/// The blocks that are in both.
#[must_use]
pub fn common(span: Span, other: Span) -> Vec<u32> {
    let both = |block: &shared::block::BlockIndex| other.contains(*block);
    span.blocks().filter(both).map(|block| block.0).collect()
}

/// The blocks of a span as records name them.
#[must_use]
pub fn range(span: Span) -> Range<u32> {
    span.start().0..span.end().0
}

#[cfg(test)]
mod tests {
    use testkit::span;

    use super::*;
    use proptest::prelude::*;
    use rand::seq::SliceRandom;
    use swarm::wire::records::ServerInfo;

    fn online(span: Span) -> ServerInfo {
        ServerInfo {
            start_block: Some(span.start().0.into()),
            end_block: Some(span.end().0.into()),
            ..ServerInfo::new(ServerState::Online, 1.0)
        }
    }

    fn in_state(state: ServerState, span: Span) -> ServerInfo {
        ServerInfo { state, ..online(span) }
    }

    #[test]
    fn spans_are_taken_apart() {
        assert_eq!(without(span(0, 6), span(2, 8)), [0, 1]);
        assert_eq!(without(span(0, 8), span(2, 4)), [0, 1, 4, 5, 6, 7]);
        assert_eq!(common(span(0, 6), span(2, 8)), [2, 3, 4, 5]);
        assert!(common(span(0, 2), span(2, 4)).is_empty());
    }

    #[test]
    fn a_move_is_called_off_when_what_it_leaves_has_no_other_server() {
        let both = BlockServers::from([
            ("me".to_owned(), online(span(0, 2))),
            ("other".to_owned(), online(span(0, 1))),
        ]);
        let mut joining = both.clone();
        joining.insert("other".to_owned(), in_state(ServerState::Joining, span(0, 2)));
        let blocks = [both, joining];
        assert!(!opens_hole(&blocks, "me", &[0]));
        assert!(opens_hole(&blocks, "me", &[0, 1]), "one that loads serves nobody");
        assert!(opens_hole(&blocks, "me", &[7]));
    }

    proptest! {
        /// Whoever looks at the records between any two of the stores of a move sees either the old place, which is still
        /// served, or the new one, which is served already, or nothing: never blocks between the two.
        #[test]
        fn no_reader_ever_sees_blocks_that_are_not_served(
            from in (0u32..10, 1u32..8), to in (0u32..10, 1u32..8), seed in any::<u64>(),
        ) {
            let (from, to) = (span(from.0, from.0 + from.1), span(to.0, to.0 + to.1));
            let mut blocks = vec![BlockServers::new(); 20];
            let mut put = |block: u32, info: &ServerInfo| {
                blocks[block as usize].insert("me".to_owned(), info.clone());
                let seen = view::spans(&blocks, 0, ServerState::Online);
                let honest = |s: &ServerSpan| {
                    let inside = |span: Span| s.start >= span.start().0 as usize && s.end <= span.end().0 as usize;
                    inside(from) || inside(to)
                };
                seen.iter().all(honest)
            };
            let mut random = StdRng::seed_from_u64(seed);
            for block in from.blocks() {
                put(block.0, &online(from));
            }
            for block in without(to, from) {
                prop_assert!(put(block, &in_state(ServerState::Joining, to)));
            }
            for (mut under, state) in [
                (without(from, to), ServerState::Offline),
                (common(to, from), ServerState::Online),
                (range(to).collect(), ServerState::Online),
            ] {
                under.shuffle(&mut random);
                for block in under {
                    prop_assert!(put(block, &in_state(state, to)), "{from} -> {to}, block {block}");
                }
            }
            let seen = view::spans(&blocks, 0, ServerState::Online);
            prop_assert_eq!((seen[0].start, seen[0].end), (to.start().0 as usize, to.end().0 as usize));
        }
    }
}
