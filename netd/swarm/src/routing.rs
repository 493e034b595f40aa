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

use std::cmp::Ordering;
use std::collections::{BinaryHeap, HashMap};
use std::ops::Range;

/// Time that serialising and sending one step takes beside the way, in seconds (Petals' estimate).
const OVERHEAD_S: f64 = 0.018;
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
pub struct Candidate<P> {
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
    pub next_pings_s: HashMap<P, f64>,
}

impl<P: Eq + std::hash::Hash> Candidate<P> {
    /// Steps of one block per second that are believed.
    fn rps(&self) -> f64 {
        let claimed = self.inference_rps.filter(|rps| *rps > 0.0).unwrap_or(DEFAULT_RPS);
        claimed.min(self.measured_rps.unwrap_or(MAX_RPS)).min(MAX_RPS)
    }

    /// Round trip to another server, if it announces one.
    fn ping_to(&self, other: &Candidate<P>) -> Option<f64> {
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

/// The route through `blocks` with the least estimated time for one step, and that time in seconds.
/// `cache_tokens` is the length of the session, if known.
///
/// # Errors
/// [`MissingBlock`] when a block has no server.
pub fn min_latency<P: Clone + Eq + std::hash::Hash + Ord>(
    servers: &[Candidate<P>],
    blocks: Range<u32>,
    cache_tokens: Option<u64>,
) -> Result<(Vec<Leg<P>>, f64), MissingBlock> {
    if let Some(block) = blocks.clone().find(|b| !servers.iter().any(|s| s.blocks.contains(b))) {
        return Err(MissingBlock { block });
    }
    let graph = Graph { servers, blocks: blocks.clone(), cache_tokens };
    let (path, cost) = graph.shortest().ok_or(MissingBlock { block: blocks.start })?;
    Ok((graph.legs(&path), cost))
}

/// A route through `blocks` for a batch: from the left, a server of the block drawn at random with
/// the length of its span as weight, and kept to the end of its span (petals `sequence_manager.py`,
/// `_make_sequence_with_max_throughput`). One that does not answer pings is drawn only where there
/// is no other. `draw` decides: the same number gives the same route.
///
/// # Errors
/// [`MissingBlock`] when a block has no server.
pub fn max_throughput<P: Clone + Ord>(
    servers: &[Candidate<P>],
    blocks: Range<u32>,
    draw: u64,
) -> Result<Vec<Leg<P>>, MissingBlock> {
    let mut rng = <rand::rngs::StdRng as rand::SeedableRng>::seed_from_u64(draw);
    let mut legs = Vec::new();
    let mut block = blocks.start;
    while block < blocks.end {
        let mut here: Vec<_> = servers.iter().filter(|s| s.blocks.contains(&block)).collect();
        here.sort_by(|a, b| a.peer.cmp(&b.peer));
        let weight = |server: &&Candidate<P>| match server.ping_s {
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

struct Graph<'a, P> {
    servers: &'a [Candidate<P>],
    blocks: Range<u32>,
    cache_tokens: Option<u64>,
}

/// A server and the block it would run next (one past its last when it is done).
type Node = (usize, u32);

impl<P: Clone + Eq + std::hash::Hash + Ord> Graph<'_, P> {
    fn end(&self, server: usize) -> u32 {
        self.servers[server].blocks.end.min(self.blocks.end)
    }

    fn enter(&self, server: usize, half_ping: Option<f64>) -> f64 {
        half_ping.unwrap_or(UNKNOWN_HALF_PING_S) + OVERHEAD_S + self.penalty(server)
    }

    fn penalty(&self, server: usize) -> f64 {
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

    fn first_nodes(&self) -> impl Iterator<Item = (Node, f64)> + '_ {
        let first = self.blocks.start;
        let here = move |s: &usize| self.servers[*s].blocks.contains(&first);
        (0..self.servers.len()).filter(here).map(move |s| {
            let half = self.servers[s].ping_s.map(|p| p.min(MAX_PING_S) / 2.0);
            ((s, first), self.enter(s, half))
        })
    }

    fn neighbours(&self, (server, block): Node) -> Vec<(Node, f64)> {
        let candidate = &self.servers[server];
        if block < self.end(server) {
            return vec![((server, block + 1), 1.0 / candidate.rps())];
        }
        let next = |s: &usize| *s != server && self.servers[*s].blocks.contains(&block);
        (0..self.servers.len())
            .filter(next)
            .map(|s| {
                let ping = candidate.ping_to(&self.servers[s]);
                ((s, block), self.enter(s, ping.map(|p| p.min(MAX_PING_S) / 2.0)))
            })
            .collect()
    }

    /// Dijkstra's algorithm.
    fn shortest(&self) -> Option<(Vec<Node>, f64)> {
        let mut best: HashMap<Node, (f64, Option<Node>)> = HashMap::new();
        let mut queue = BinaryHeap::new();
        for (node, cost) in self.first_nodes() {
            best.insert(node, (cost, None));
            queue.push(Reached { cost, node, finished: false });
        }
        while let Some(Reached { cost, node, finished }) = queue.pop() {
            if finished {
                return Some((self.path_to(node, &best), cost));
            }
            if best.get(&node).is_some_and(|(known, _)| cost > *known) {
                continue;
            }
            if node.1 == self.blocks.end {
                let home = self.servers[node.0]
                    .ping_s
                    .map_or(UNKNOWN_HALF_PING_S, |p| p.min(MAX_PING_S) / 2.0);
                queue.push(Reached { cost: cost + home, node, finished: true });
                continue;
            }
            for (next, step) in self.neighbours(node) {
                let total = cost + step;
                if best.get(&next).is_none_or(|(known, _)| total < *known) {
                    best.insert(next, (total, Some(node)));
                    queue.push(Reached { cost: total, node: next, finished: false });
                }
            }
        }
        None
    }

    fn path_to(&self, last: Node, best: &HashMap<Node, (f64, Option<Node>)>) -> Vec<Node> {
        let mut path: Vec<Node> = std::iter::successors(Some(last), |node| {
            best.get(node).and_then(|(_, before)| *before)
        })
        .collect();
        path.reverse();
        path
    }

    fn legs(&self, path: &[Node]) -> Vec<Leg<P>> {
        path.chunk_by(|a, b| a.0 == b.0)
            .filter_map(|leg| {
                let (&(server, start), &(_, end)) = (leg.first()?, leg.last()?);
                Some(Leg { peer: self.servers[server].peer.clone(), blocks: start..end })
            })
            .filter(|leg| !leg.blocks.is_empty())
            .collect()
    }
}

#[derive(PartialEq)]
struct Reached {
    cost: f64,
    node: Node,
    finished: bool,
}

impl Eq for Reached {}

impl Ord for Reached {
    fn cmp(&self, other: &Reached) -> Ordering {
        other.cost.total_cmp(&self.cost).then_with(|| other.node.cmp(&self.node))
    }
}

impl PartialOrd for Reached {
    fn partial_cmp(&self, other: &Reached) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn server(
        peer: u8,
        blocks: Range<u32>,
        rps: f64,
        ping_ms: f64,
        next: &[(u8, f64)],
    ) -> Candidate<u8> {
        Candidate {
            peer,
            blocks,
            inference_rps: Some(rps),
            measured_rps: None,
            has_answered: true,
            cache_tokens_left: None,
            ping_s: Some(ping_ms / 1e3),
            next_pings_s: next.iter().map(|(p, ms)| (*p, ms / 1e3)).collect(),
        }
    }

    /// The swarm of eight blocks that Petals' own router was run on.
    fn swarm() -> Vec<Candidate<u8>> {
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
        let first = |servers: &[Candidate<u8>]| min_latency(servers, 0..8, None).unwrap().0;
        let mut servers = vec![server(1, 0..8, 100.0, 50.0, &[])];
        for peer in 2..100 {
            let fake = server(peer, 0..8, 1e9, 0.0, &[]);
            servers.push(Candidate { ping_s: None, has_answered: false, ..fake });
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
        let unknown = Candidate { ping_s: None, ..near };
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
}
