//! Choice of servers: for a session the path of least latency (petals `sequence_manager.py`,
//! `_make_sequence_with_min_latency`), for batches any path, drawn so that the load is spread.
//! Pure; the view of the swarm and the measured pings are passed in.
//!
//! The path goes over nodes (server, block boundary). A server is left only at the end of its span.
//!
//! ```text
//! start -> (P, first)   ping/2 + overhead (+ penalty if P lacks cache)
//! (P, b) -> (P, b+1)    1 / inference_rps
//! (P, b) -> (Q, b)      P's span ends at b: ping(P, Q)/2 + overhead (+ penalty if Q lacks cache)
//! (P, last) -> end      ping/2
//! ```
//!
//! # Discrepancies
//! Petals believes what records claim. Here a server that has not answered pays a penalty, the rate
//! that was measured counts instead of a higher one that is claimed, claims are clipped, and a
//! claimed ping between two servers is not less than the difference of their distances from here.

use std::collections::HashMap;
use std::hash::Hash;
use std::ops::Range;
use std::sync::Arc;

/// Time that serialising and sending one step takes beside the way, in seconds (Petals' estimate).
pub const OVERHEAD_S: f64 = 0.018;
/// In place of half a ping that is not known.
const UNKNOWN_HALF_PING_S: f64 = 0.15;
/// Longest ping that counts.
const MAX_PING_S: f64 = 5.0;
/// For a server whose cache is too small.
const CACHE_PENALTY_S: f64 = 10.0;
/// For a server that has not answered yet, nor was seen to be away: it may be a mere record.
const STRANGER_PENALTY_S: f64 = 5.0;
/// Most blocks per second that a record is believed: about what a block of the smallest models
/// takes on the fastest devices.
const MAX_RPS: f64 = 20_000.0;
/// Weight of a server that does not answer pings, where the others have their number of blocks.
const UNREACHABLE_WEIGHT: f64 = 1e-6;
/// Blocks per second of a server that announces none.
const DEFAULT_RPS: f64 = 300.0;

/// A server as routing sees it.
#[derive(Clone, Debug)]
pub struct RouteCandidate<P> {
    pub peer: P,
    /// The blocks it serves.
    pub blocks: Range<u32>,
    /// One-token steps of one block per second, as it announces them.
    pub inference_rps: Option<f64>,
    /// The same as this client has measured it.
    pub measured_rps: Option<f64>,
    /// Whether it has answered anything lately.
    pub has_answered: bool,
    /// Free cache as announced: tokens of K or V of one block.
    pub cache_tokens_left: Option<u64>,
    /// Round trip from the client, in seconds.
    pub ping_s: Option<f64>,
    /// Round trips to other servers as it announces them, in seconds.
    pub next_pings_s: Arc<HashMap<P, f64>>,
}

impl<P: Eq + Hash> RouteCandidate<P> {
    /// Steps of one block per second that are believed.
    fn rps(&self) -> f64 {
        let claimed = self.inference_rps.filter(|rps| *rps > 0.0).unwrap_or(DEFAULT_RPS);
        claimed.min(self.measured_rps.unwrap_or(MAX_RPS)).min(MAX_RPS)
    }

    /// Round trip to another server, if it announces one.
    fn ping_to(&self, other: &RouteCandidate<P>) -> Option<f64> {
        let claimed = *self.next_pings_s.get(&other.peer)?;
        let known = |ping: Option<f64>| ping.filter(|seconds| seconds.is_finite());
        let apart = known(self.ping_s).zip(known(other.ping_s)).map(|(a, b)| (a - b).abs());
        Some(claimed.max(apart.unwrap_or(0.0)))
    }
}

/// One leg of a route: these blocks run on this server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Leg<P> {
    pub peer: P,
    /// The blocks it is asked for.
    pub blocks: Range<u32>,
}

/// No route covers all blocks.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "no server that is ONLINE serves block {block}; start one that does, or wait until it has announced itself"
)]
pub struct MissingBlock {
    /// The first block that nobody serves.
    pub block: u32,
}

/// The servers that are not banned, and those without which a block would be left without any: better
/// a doubtful server than none.
pub fn without_banned<P: Clone>(
    servers: &[RouteCandidate<P>],
    is_banned: impl Fn(&P) -> bool,
) -> Vec<RouteCandidate<P>> {
    let holds = |server: &RouteCandidate<P>, block| server.blocks.contains(&block);
    let is_served =
        |block| servers.iter().any(|server| holds(server, block) && !is_banned(&server.peer));
    let is_needed = |server: &&RouteCandidate<P>| !server.blocks.clone().all(is_served);
    let kept = servers.iter().filter(|server| !is_banned(&server.peer) || is_needed(server));
    kept.cloned().collect()
}

/// The route through `blocks` with the least estimated time for one step, and that time in seconds.
/// `cache_tokens` is the length of the session, if known. Each server has a peer of its own.
///
/// # Errors
/// [`MissingBlock`] when a block has no server.
pub fn min_latency<P: Clone + Eq + Hash>(
    servers: &[RouteCandidate<P>],
    blocks: Range<u32>,
    cache_tokens: Option<u64>,
) -> Result<(Vec<Leg<P>>, f64), MissingBlock> {
    if let Some(block) = blocks.clone().find(|b| !servers.iter().any(|s| s.blocks.contains(b))) {
        return Err(MissingBlock { block });
    }
    let block = blocks.start;
    Search::new(servers, blocks, cache_tokens).run().ok_or(MissingBlock { block })
}

/// A route through `blocks` for a batch: from the left, a server of the block drawn at random with
/// the length of its span as weight, and kept to the end of its span (petals `sequence_manager.py`,
/// `_make_sequence_with_max_throughput`). One that does not answer pings is drawn only where there
/// is no other. `draw` decides: the same number gives the same route.
///
/// # Errors
/// [`MissingBlock`] when a block has no server.
pub fn max_throughput<P: Clone + Ord>(
    servers: &[RouteCandidate<P>],
    blocks: Range<u32>,
    draw: u64,
) -> Result<Vec<Leg<P>>, MissingBlock> {
    let mut rng = <rand::rngs::StdRng as rand::SeedableRng>::seed_from_u64(draw);
    let mut legs = Vec::new();
    let mut block = blocks.start;
    while block < blocks.end {
        let mut here: Vec<_> = servers.iter().filter(|s| s.blocks.contains(&block)).collect();
        here.sort_by(|a, b| a.peer.cmp(&b.peer));
        let weight = |server: &&RouteCandidate<P>| match server.ping_s {
            Some(ping) if ping.is_infinite() => UNREACHABLE_WEIGHT,
            None if !server.has_answered => UNREACHABLE_WEIGHT,
            _ => f64::from(server.blocks.end - server.blocks.start),
        };
        let total: f64 = here.iter().map(weight).sum();
        let mut left = rand::Rng::random::<f64>(&mut rng) * total;
        let chosen = here.iter().find(|server| {
            left -= weight(server);
            left < 0.0
        });
        let chosen = chosen.or(here.last()).ok_or(MissingBlock { block })?;
        let end = chosen.blocks.end.min(blocks.end);
        legs.push(Leg { peer: chosen.peer.clone(), blocks: block..end });
        block = end;
    }
    Ok(legs)
}

/// A search through blocks in their order: a server is left only where its span ends, so that no
/// route comes back to a block.
struct Search<'a, P> {
    servers: &'a [RouteCandidate<P>],
    blocks: Range<u32>,
    cache_tokens: Option<u64>,
    numbers: HashMap<&'a P, usize>,
    reached: Vec<Option<Reached>>,
}

/// The way to a server that takes the least time.
#[derive(Clone, Copy)]
struct Reached {
    /// Seconds until it has run the last of its blocks.
    cost_s: f64,
    /// The server before it.
    from: Option<usize>,
    /// The first block that it runs.
    at: u32,
}

impl<'a, P: Clone + Eq + Hash> Search<'a, P> {
    fn new(
        servers: &'a [RouteCandidate<P>],
        blocks: Range<u32>,
        cache_tokens: Option<u64>,
    ) -> Self {
        let numbers = servers.iter().enumerate().map(|(number, server)| (&server.peer, number));
        let (numbers, reached) = (numbers.collect(), vec![None; servers.len()]);
        Self { servers, blocks, cache_tokens, numbers, reached }
    }

    /// The legs of the fastest route, and its seconds.
    fn run(mut self) -> Option<(Vec<Leg<P>>, f64)> {
        let Range { start, end } = self.blocks;
        for first in self.holders(start) {
            let way_s = half(self.servers[first].ping_s);
            self.reach(first, start, way_s, None);
        }
        for block in start + 1..end {
            self.pass_on(block);
        }
        let home_s = |(number, reached): (usize, &Option<Reached>)| {
            let cost_s = reached.filter(|_| self.end(number) == end)?.cost_s;
            Some((cost_s + half(self.servers[number].ping_s), number))
        };
        let done = self.reached.iter().enumerate().filter_map(home_s);
        let (cost_s, last) = done.min_by(|a, b| a.0.total_cmp(&b.0))?;
        Some((self.legs_to(last), cost_s))
    }

    /// From the servers whose spans end before `block` to those that hold it.
    fn pass_on(&mut self, block: u32) {
        let servers = self.servers;
        let done = |number: usize| {
            let reached = self.reached[number].filter(|_| self.end(number) == block)?;
            Some((reached.cost_s, number))
        };
        let mut leaving: Vec<(f64, usize)> = (0..servers.len()).filter_map(done).collect();
        if leaving.is_empty() {
            return;
        }
        leaving.sort_by(|a, b| a.0.total_cmp(&b.0));
        for &(cost_s, from) in &leaving {
            for peer in servers[from].next_pings_s.keys() {
                let Some(&next) = self.numbers.get(peer) else { continue };
                if servers[next].blocks.contains(&block) {
                    let way_s = half(servers[from].ping_to(&servers[next]));
                    self.reach(next, block, cost_s + way_s, Some(from));
                }
            }
        }
        // A way that nobody has announced takes as long from everywhere: the first server that is done
        // stands for all.
        for next in self.holders(block) {
            let peer = &servers[next].peer;
            let mut unknown =
                leaving.iter().filter(|(_, from)| !servers[*from].next_pings_s.contains_key(peer));
            if let Some(&(cost_s, from)) = unknown.next() {
                self.reach(next, block, cost_s + UNKNOWN_HALF_PING_S, Some(from));
            }
        }
    }

    /// Keeps the way to `next`, which takes `way_s` and enters it at block `at`, if none is faster.
    fn reach(&mut self, next: usize, at: u32, way_s: f64, from: Option<usize>) {
        let run_s = f64::from(self.end(next) - at) / self.servers[next].rps();
        let cost_s = way_s + OVERHEAD_S + self.penalty_s(next) + run_s;
        if self.reached[next].is_none_or(|known| cost_s < known.cost_s) {
            self.reached[next] = Some(Reached { cost_s, from, at });
        }
    }

    fn holders(&self, block: u32) -> impl Iterator<Item = usize> + use<'a, P> {
        let servers = self.servers;
        (0..servers.len()).filter(move |number| servers[*number].blocks.contains(&block))
    }

    fn end(&self, server: usize) -> u32 {
        self.servers[server].blocks.end.min(self.blocks.end)
    }

    fn penalty_s(&self, server: usize) -> f64 {
        let candidate = &self.servers[server];
        let need = self
            .cache_tokens
            .map(|n| n * 2 * u64::from(candidate.blocks.end - candidate.blocks.start));
        let of_cache = match (need, candidate.cache_tokens_left) {
            (Some(need), Some(left)) if need > left => CACHE_PENALTY_S,
            _ => 0.0,
        };
        of_cache + if candidate.has_answered { 0.0 } else { STRANGER_PENALTY_S }
    }

    fn legs_to(&self, last: usize) -> Vec<Leg<P>> {
        let before = |(number, _): &(usize, u32)| {
            let Reached { from, at, .. } = self.reached[*number]?;
            from.map(|from| (from, at))
        };
        let hops = std::iter::successors(Some((last, self.blocks.end)), before);
        let leg = |(number, end): (usize, u32)| {
            let at = self.reached[number]?.at;
            Some(Leg { peer: self.servers[number].peer.clone(), blocks: at..end })
        };
        let mut legs: Vec<Leg<P>> = hops.filter_map(leg).collect();
        legs.reverse();
        legs.retain(|leg| !leg.blocks.is_empty());
        legs
    }
}

/// Half of a ping, which serves as the time of one way.
fn half(ping_s: Option<f64>) -> f64 {
    ping_s.map_or(UNKNOWN_HALF_PING_S, |ping_s| ping_s.min(MAX_PING_S) / 2.0)
}

#[cfg(test)]
mod tests {
    use rand::rngs::StdRng;
    use rand::{Rng, SeedableRng};

    use super::*;

    fn server(
        peer: u8,
        blocks: Range<u32>,
        rps: f64,
        ping_ms: f64,
        next: &[(u8, f64)],
    ) -> RouteCandidate<u8> {
        RouteCandidate {
            peer,
            blocks,
            inference_rps: Some(rps),
            measured_rps: None,
            has_answered: true,
            cache_tokens_left: None,
            ping_s: Some(ping_ms / 1e3),
            next_pings_s: Arc::new(next.iter().map(|(p, ms)| (*p, ms / 1e3)).collect()),
        }
    }

    /// The swarm of eight blocks that Petals' own router was run on.
    fn swarm() -> Vec<RouteCandidate<u8>> {
        let mut servers = vec![
            server(1, 0..4, 500.0, 50.0, &[(2, 20.0), (3, 100.0)]),
            server(2, 2..6, 250.0, 60.0, &[(3, 40.0)]),
            server(3, 4..8, 1000.0, 80.0, &[]),
            server(4, 0..8, 200.0, 30.0, &[]),
        ];
        servers[3].cache_tokens_left = Some(1000);
        servers
    }

    #[test]
    fn routes_equal_those_of_petals() {
        let leg = |peer, blocks| Leg { peer, blocks };
        for need in [None, Some(62)] {
            let (route, cost) = min_latency(&swarm(), 0..8, need).unwrap();
            assert_eq!(route, [leg(4, 0..8)]);
            assert!((cost - 0.088).abs() < 1e-9, "{cost}");
        }
        let (route, cost) = min_latency(&swarm(), 0..8, Some(63)).unwrap();
        assert_eq!(route, [leg(1, 0..4), leg(3, 4..8)]);
        assert!((cost - 0.163).abs() < 1e-9, "{cost}");
    }

    #[test]
    fn what_a_record_claims_counts_less_than_what_is_known() {
        let first = |servers: &[RouteCandidate<u8>]| min_latency(servers, 0..8, None).unwrap().0;
        let mut servers = vec![server(1, 0..8, 100.0, 50.0, &[])];
        for peer in 2..100 {
            let fake = server(peer, 0..8, 1e9, 0.0, &[]);
            servers.push(RouteCandidate { ping_s: None, has_answered: false, ..fake });
        }
        assert_eq!(first(&servers)[0].peer, 1, "who has answered before who has not");
        assert!((0..100).all(|draw| max_throughput(&servers, 0..8, draw).unwrap()[0].peer == 1));
        let mut servers = vec![server(1, 0..8, 1e9, 50.0, &[]), server(2, 0..8, 1e5, 49.0, &[])];
        assert_eq!(first(&servers)[0].peer, 2, "claims are clipped");
        servers[1].measured_rps = Some(100.0);
        assert_eq!(first(&servers)[0].peer, 1, "what was measured counts");
    }

    #[test]
    fn two_servers_are_not_nearer_to_each_other_than_their_distances_from_here_allow() {
        let far = server(1, 0..4, 100.0, 400.0, &[(2, 0.0)]);
        let near = server(2, 4..8, 100.0, 20.0, &[]);
        assert_eq!(far.ping_to(&near), Some(0.38));
        let unknown = RouteCandidate { ping_s: None, ..near };
        assert_eq!(far.ping_to(&unknown), Some(0.0));
    }

    #[test]
    fn a_leg_may_start_and_end_inside_a_span() {
        let servers = [server(1, 0..5, 100.0, 10.0, &[]), server(2, 3..9, 100.0, 10.0, &[])];
        let (route, _) = min_latency(&servers, 1..8, None).unwrap();
        assert_eq!(route, [Leg { peer: 1, blocks: 1..5 }, Leg { peer: 2, blocks: 5..8 }]);
    }

    #[test]
    fn batches_are_spread_by_the_length_of_spans_and_avoid_the_unreachable() {
        let mut servers = [
            server(1, 0..6, 1.0, 10.0, &[]),
            server(2, 0..2, 1.0, 10.0, &[]),
            server(3, 0..8, 1.0, 10.0, &[]),
            server(4, 2..8, 1.0, 10.0, &[]),
            server(5, 6..8, 1.0, 10.0, &[]),
        ];
        servers[2].ping_s = Some(f64::INFINITY);
        let mut first = std::collections::HashMap::new();
        for draw in 0..1000 {
            let route = max_throughput(&servers, 0..8, draw).unwrap();
            assert_eq!(route, max_throughput(&servers, 0..8, draw).unwrap());
            assert_eq!((route[0].blocks.start, route.last().unwrap().blocks.end), (0, 8));
            let joined = route.windows(2).all(|w| w[0].blocks.end == w[1].blocks.start);
            assert!(joined, "{route:?}");
            *first.entry(route[0].peer).or_insert(0) += 1;
        }
        // Six blocks against two.
        assert!(first[&1] > 650 && first[&2] > 150, "{first:?}");
        assert!(!first.contains_key(&3));
        let only = [servers[2].clone()];
        assert_eq!(max_throughput(&only, 1..3, 7).unwrap()[0].peer, 3);
        assert_eq!(max_throughput(&servers, 0..9, 7), Err(MissingBlock { block: 8 }));
    }

    #[test]
    fn the_first_block_without_a_server_is_named() {
        let servers = [server(1, 0..3, 1.0, 1.0, &[]), server(2, 4..8, 1.0, 1.0, &[])];
        assert_eq!(min_latency(&servers, 0..8, None), Err(MissingBlock { block: 3 }));
        assert_eq!(min_latency::<u8>(&[], 0..8, None), Err(MissingBlock { block: 0 }));
    }

    #[test]
    fn banned_servers_are_taken_only_where_there_is_no_other_way() {
        let peers = |banned: &[u8]| {
            let left = without_banned(&swarm(), |peer| banned.contains(peer));
            left.iter().map(|server| server.peer).collect::<Vec<u8>>()
        };
        assert_eq!(peers(&[4]), [1, 2, 3]);
        assert_eq!(peers(&[3, 4]), [1, 2, 3, 4], "the last blocks have these alone");
        assert_eq!(peers(&[2, 4]), [1, 3]);
        let left = without_banned(&swarm(), |peer| *peer == 4);
        let (route, _) = min_latency(&left, 0..8, None).unwrap();
        let peers: Vec<u8> = route.iter().map(|leg| leg.peer).collect();
        assert_eq!(peers, [1, 3]);
    }

    /// The definition: Bellman's equations over all pairs of servers, until nothing changes.
    fn least_cost(servers: &[RouteCandidate<u8>], blocks: u32, tokens: u64) -> f64 {
        let enter = |server: &RouteCandidate<u8>, half_s: f64, at: u32| {
            let need = 2 * tokens * u64::from(server.blocks.end - server.blocks.start);
            let is_full = server.cache_tokens_left.is_some_and(|left| need > left);
            let run_s = f64::from(server.blocks.end - at) / server.rps();
            let stranger_s = if server.has_answered { 0.0 } else { STRANGER_PENALTY_S };
            half_s + OVERHEAD_S + if is_full { CACHE_PENALTY_S } else { 0.0 } + stranger_s + run_s
        };
        let mut done = vec![f64::INFINITY; servers.len()];
        for _ in 0..=servers.len() {
            for (next, server) in servers.iter().enumerate() {
                if server.blocks.start == 0 {
                    done[next] = done[next].min(enter(server, half(server.ping_s), 0));
                }
                let before = servers.iter().enumerate();
                for (from, other) in before.filter(|(_, o)| server.blocks.contains(&o.blocks.end)) {
                    let entered = enter(server, half(other.ping_to(server)), other.blocks.end);
                    done[next] = done[next].min(done[from] + entered);
                }
            }
        }
        let last = servers.iter().zip(&done).filter(|(server, _)| server.blocks.end == blocks);
        last.map(|(server, done)| done + half(server.ping_s)).fold(f64::INFINITY, f64::min)
    }

    #[test]
    fn blocks_in_their_order_find_what_the_definition_finds() {
        let (mut rng, mut routed) = (StdRng::seed_from_u64(1), 0);
        for _ in 0..300 {
            let servers: Vec<RouteCandidate<u8>> =
                (0..20).map(|peer| any_server(&mut rng, peer)).collect();
            let expected = least_cost(&servers, 16, 100);
            let found = min_latency(&servers, 0..16, Some(100));
            let cost = found.as_ref().map_or(f64::INFINITY, |(_, cost)| *cost);
            let is_same = cost == expected || (cost - expected).abs() < 1e-9;
            assert!(is_same, "{cost} instead of {expected}");
            routed += usize::from(found.is_ok());
        }
        assert!(routed > 200, "{routed} swarms have a route");
    }

    fn any_server(rng: &mut StdRng, peer: u8) -> RouteCandidate<u8> {
        let start = rng.random_range(0..16);
        let mut next = HashMap::new();
        for other in (0..20).filter(|other| *other != peer) {
            if rng.random_bool(0.3) {
                next.insert(other, rng.random_range(0.01..0.6));
            }
        }
        RouteCandidate {
            cache_tokens_left: Some(rng.random_range(0..4000)),
            has_answered: rng.random_bool(0.8),
            ping_s: rng.random_bool(0.4).then(|| rng.random_range(0.01..0.4)),
            next_pings_s: Arc::new(next),
            ..server(
                peer,
                start..rng.random_range(start + 1..=16),
                rng.random_range(50.0..900.0),
                0.0,
                &[],
            )
        }
    }
}
