//! The routes that Petals' client takes, over records as it has read them. Source: petals `client/routing/sequence_manager.py`,
//! `_build_inference_graph`, `_make_sequence_with_min_latency` and `_make_sequence_with_max_throughput`.
//!
//! A server is left only where its span ends, so the graph has no circle: blocks are visited in their order instead of nodes in the order
//! of their cost. Pings between servers that nobody announced cost all the same, so one server that ends at a block stands for all.

use std::ops::Range;
use std::rc::Rc;

use rand::Rng;
use rand::rngs::StdRng;

/// Time that serialising and sending one step takes beside the way (Petals' estimate).
pub const OVERHEAD_S: f64 = 0.018;
/// In place of half a ping that is not known.
const UNKNOWN_HALF_PING_S: f64 = 0.15;
/// Longest ping that counts.
const MAX_PING_S: f64 = 5.0;
/// For a server whose cache is too small.
const CACHE_PENALTY_S: f64 = 10.0;
/// Weight of a server that does not answer pings, where the others have their number of blocks.
const UNREACHABLE_WEIGHT: f64 = 1e-6;
const NOBODY: usize = usize::MAX;

/// A server that is ONLINE, as its records say.
#[derive(Clone, Debug)]
pub struct Record {
    pub server: usize,
    pub span: Range<usize>,
    /// One-token steps of one block per second.
    pub inference_rps: f64,
    /// Free cache: tokens of K or V of one block.
    pub cache_tokens_left: u64,
    /// Round trips to other servers in seconds, by their numbers in order.
    pub next_pings: Rc<[(usize, f64)]>,
}

/// All records at one time, by what routing looks for.
#[derive(Debug, Default)]
pub struct Directory {
    records: Vec<Record>,
    /// Which record is that of a server.
    of_server: Vec<usize>,
    /// Records that hold a block.
    holders: Vec<Vec<usize>>,
    /// Records whose spans end before a block.
    ending: Vec<Vec<usize>>,
    /// Of each record, those that hold the block where its span ends and half its ping to them, in order.
    next: Vec<Vec<(usize, f64)>>,
    /// Of each record, what it costs.
    costs: Vec<Cost>,
    /// From before each block to the end of the model, the least seconds if the way to the next server is not known.
    unknown_s: Vec<f64>,
}

/// What a record costs.
#[derive(Clone, Copy, Debug)]
struct Cost {
    /// Where its span ends.
    end: usize,
    /// Seconds that one of its blocks takes.
    block_s: f64,
    /// From there to the end of the model, the least seconds that any client's route may take.
    to_end_s: f64,
}

impl Directory {
    /// The directory of a model with `blocks` blocks.
    pub fn new(records: Vec<Record>, blocks: usize) -> Directory {
        let servers = records.iter().map(|record| record.server + 1).max().unwrap_or(0);
        let mut directory = Directory {
            of_server: vec![NOBODY; servers],
            holders: vec![Vec::new(); blocks],
            ending: vec![Vec::new(); blocks + 1],
            next: Vec::new(),
            costs: records.iter().map(Cost::new).collect(),
            unknown_s: vec![0.0; blocks],
            records: Vec::new(),
        };
        for (number, record) in records.iter().enumerate() {
            directory.of_server[record.server] = number;
            directory.ending[record.span.end].push(number);
            for block in record.span.clone() {
                directory.holders[block].push(number);
            }
        }
        let of_server = &directory.of_server;
        let next = |record: &Record| {
            let holds = |(server, ping_s): &(usize, f64)| {
                let next = *of_server.get(*server).filter(|next| **next != NOBODY)?;
                records[next].span.contains(&record.span.end).then(|| (next, half_ping(*ping_s)))
            };
            let mut found: Vec<(usize, f64)> = record.next_pings.iter().filter_map(holds).collect();
            found.sort_unstable_by_key(|(next, _)| *next);
            found
        };
        directory.next = records.iter().map(next).collect();
        directory.records = records;
        directory.find_bounds(blocks);
        directory
    }

    /// Fills in `to_end_s`: pings that are known count, what clients know does not.
    fn find_bounds(&mut self, blocks: usize) {
        for block in (1..blocks).rev() {
            let from_s = |next: usize| {
                let Cost { end, block_s, to_end_s } = self.costs[next];
                OVERHEAD_S + (end - block) as f64 * block_s + to_end_s
            };
            let unknown =
                self.holders[block].iter().map(|next| UNKNOWN_HALF_PING_S + from_s(*next));
            let unknown_s = unknown.fold(f64::INFINITY, f64::min);
            let least_s = |from: &usize| {
                let known =
                    self.next[*from].iter().map(|(next, half_ping_s)| half_ping_s + from_s(*next));
                (*from, known.fold(unknown_s, f64::min))
            };
            self.unknown_s[block] = unknown_s;
            let found: Vec<(usize, f64)> = self.ending[block].iter().map(least_s).collect();
            found.into_iter().for_each(|(from, least_s)| self.costs[from].to_end_s = least_s);
        }
    }

    /// The servers that are ONLINE.
    pub fn records(&self) -> &[Record] {
        &self.records
    }

    /// The servers that hold a block.
    pub fn holders(&self, block: usize) -> impl ExactSizeIterator<Item = &Record> {
        self.holders[block].iter().map(|number| &self.records[*number])
    }
}

impl Cost {
    fn new(record: &Record) -> Cost {
        Cost { end: record.span.end, block_s: record.inference_rps.recip(), to_end_s: 0.0 }
    }
}

/// What a client knows beside the records.
pub trait Knowledge {
    /// The round trip to a server, if it was measured; infinite if it did not answer.
    fn ping_s(&self, server: usize) -> Option<f64>;
    /// Whether a server is avoided.
    fn is_banned(&self, server: usize) -> bool;
}

/// One leg of a route: these blocks run on this server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hop {
    pub server: usize,
    /// The blocks it is asked for.
    pub blocks: Range<usize>,
}

/// Where a server is reached from at least cost.
#[derive(Clone, Copy)]
struct Reached {
    /// Seconds until it has run the last of its blocks.
    cost_s: f64,
    from: usize,
    at: usize,
}

const UNREACHED: Reached = Reached { cost_s: f64::INFINITY, from: NOBODY, at: 0 };

/// Finds routes; its buffers serve one search after the other.
#[derive(Default)]
pub struct Router {
    reached: Vec<Reached>,
    /// Half the ping from the client, with the overhead and the penalty for a full cache apart.
    half_ping_s: Vec<f64>,
    penalty_s: Vec<f64>,
    leaving: Vec<usize>,
    /// No route that takes longer is of use: there is one that does not.
    most_s: f64,
    /// Whether routes lead to the end of the model, so that bounds are known.
    is_whole: bool,
    /// The least half ping to a server of the last block.
    home_s: f64,
}

impl Router {
    /// The route through `blocks` with the least estimated time for a step of a session of `tokens` tokens; `None` if a block has no server.
    /// Banned servers are taken only where there is no other way.
    pub fn min_latency(
        &mut self,
        directory: &Directory,
        blocks: Range<usize>,
        tokens: Option<u64>,
        client: &impl Knowledge,
    ) -> Option<(Vec<Hop>, f64)> {
        if directory.holders[blocks.clone()].iter().any(Vec::is_empty) {
            return None;
        }
        self.prepare(directory, tokens, client, false);
        self.search(directory, &blocks).or_else(|| {
            self.prepare(directory, tokens, client, true);
            self.search(directory, &blocks)
        })
    }

    fn prepare(
        &mut self,
        directory: &Directory,
        tokens: Option<u64>,
        client: &impl Knowledge,
        takes_banned: bool,
    ) {
        let records = &directory.records;
        self.reached.clear();
        self.reached.resize(records.len(), UNREACHED);
        let half =
            |record: &Record| client.ping_s(record.server).map_or(UNKNOWN_HALF_PING_S, half_ping);
        self.half_ping_s.clear();
        self.half_ping_s.extend(records.iter().map(half));
        let penalty = |record: &Record| {
            if !takes_banned && client.is_banned(record.server) {
                return f64::INFINITY;
            }
            let need = tokens.map_or(0, |tokens| 2 * tokens * record.span.len() as u64);
            OVERHEAD_S + if need > record.cache_tokens_left { CACHE_PENALTY_S } else { 0.0 }
        };
        self.penalty_s.clear();
        self.penalty_s.extend(records.iter().map(penalty));
    }

    fn search(&mut self, directory: &Directory, blocks: &Range<usize>) -> Option<(Vec<Hop>, f64)> {
        self.is_whole = blocks.end == directory.holders.len();
        self.most_s = if self.is_whole { self.hasty(directory, blocks) } else { f64::INFINITY };
        let home = directory.holders[blocks.end - 1].iter().map(|last| self.half_ping_s[*last]);
        self.home_s = home.fold(f64::INFINITY, f64::min);

        for &first in &directory.holders[blocks.start] {
            self.relax(directory, first, blocks, blocks.start, self.half_ping_s[first], NOBODY);
        }
        for block in blocks.start + 1..blocks.end {
            self.pass_on(directory, blocks, block);
        }
        // Whoever holds the last block runs it; those that are left earlier end before it.
        let last = directory.holders[blocks.end - 1].iter().copied();
        let cost_s = |last: &usize| self.reached[*last].cost_s + self.half_ping_s[*last];
        let last = last.min_by(|a, b| cost_s(a).total_cmp(&cost_s(b)))?;
        let total_s = cost_s(&last);
        total_s.is_finite().then(|| (self.hops_to(directory, last, blocks.end), total_s))
    }

    /// The cost of a route that takes what looks best at each server, as a bound for the others.
    fn hasty(&self, directory: &Directory, blocks: &Range<usize>) -> f64 {
        let (mut block, mut cost_s, mut last) = (blocks.start, 0.0, NOBODY);
        while block < blocks.end {
            let known = directory.next.get(last).map_or(&[][..], Vec::as_slice);
            let run_s = |next: usize| {
                let Cost { end, block_s, .. } = directory.costs[next];
                self.penalty_s[next] + (end - block) as f64 * block_s
            };
            let to_end_s = |next: usize| directory.costs[next].to_end_s;
            let of_all = directory.holders[block].iter().map(|next| match last {
                NOBODY => (*next, self.half_ping_s[*next] + run_s(*next)),
                _ => (*next, UNKNOWN_HALF_PING_S + run_s(*next)),
            });
            // Who is known to be farther away is not chosen as if he were not.
            let farther = |(next, _): &(usize, f64)| {
                known.iter().any(|(to, half_s)| to == next && *half_s > UNKNOWN_HALF_PING_S)
            };
            let of_known = known.iter().map(|(next, half_s)| (*next, half_s + run_s(*next)));
            let less = |a: &(usize, f64), b: &(usize, f64)| {
                (a.1 + to_end_s(a.0)).total_cmp(&(b.1 + to_end_s(b.0)))
            };
            let of_all = of_all.min_by(less).filter(|best| !farther(best));
            let Some((best, enter_s)) = of_known.chain(of_all).min_by(less) else {
                return f64::INFINITY;
            };
            cost_s += enter_s;
            (block, last) = (directory.records[best].span.end, best);
        }
        cost_s + self.half_ping_s[last]
    }

    /// From the servers whose spans end before `block` to those that hold it.
    fn pass_on(&mut self, directory: &Directory, blocks: &Range<usize>, block: usize) {
        let mut leaving = std::mem::take(&mut self.leaving);
        leaving.clear();
        let is_reached = |number: &&usize| self.reached[**number].cost_s.is_finite();
        leaving.extend(directory.ending[block].iter().filter(is_reached));
        leaving
            .sort_unstable_by(|a, b| self.reached[*a].cost_s.total_cmp(&self.reached[*b].cost_s));
        for &from in &leaving {
            for &(next, half_ping_s) in &directory.next[from] {
                self.relax(
                    directory,
                    next,
                    blocks,
                    block,
                    self.reached[from].cost_s + half_ping_s,
                    from,
                );
            }
        }
        // Where none is of use, servers that nobody knows the way to are not looked at.
        let may_help = |from: &&usize| {
            let least_s = self.reached[**from].cost_s + directory.unknown_s[block] + self.home_s;
            !self.is_whole || least_s <= self.most_s + 1e-9
        };
        if let Some(&nearest) = leaving.first().filter(may_help) {
            let least_s = self.reached[nearest].cost_s + UNKNOWN_HALF_PING_S;
            for &next in &directory.holders[block] {
                if self.improved(directory, next, blocks, block, least_s).is_none() {
                    continue;
                }
                let knows = |from: &usize| {
                    directory.next[*from].binary_search_by_key(&next, |(to, _)| *to).is_ok()
                };
                if let Some(&from) = leaving.iter().find(|from| !knows(from)) {
                    let cost_s = self.reached[from].cost_s + UNKNOWN_HALF_PING_S;
                    self.relax(directory, next, blocks, block, cost_s, from);
                }
            }
        }
        self.leaving = leaving;
    }

    fn relax(
        &mut self,
        directory: &Directory,
        next: usize,
        blocks: &Range<usize>,
        at: usize,
        way_s: f64,
        from: usize,
    ) {
        if let Some(cost_s) = self.improved(directory, next, blocks, at, way_s) {
            self.reached[next] = Reached { cost_s, from, at };
            if directory.costs[next].end >= blocks.end {
                self.most_s = self.most_s.min(cost_s + self.half_ping_s[next]);
            }
        }
    }

    /// The seconds until a server has run its blocks from `at` on, if they are fewer than those that are known, and may be of use.
    fn improved(
        &self,
        directory: &Directory,
        next: usize,
        blocks: &Range<usize>,
        at: usize,
        way_s: f64,
    ) -> Option<f64> {
        let Cost { end, block_s, to_end_s } = directory.costs[next];
        let cost_s = way_s + self.penalty_s[next] + (end.min(blocks.end) - at) as f64 * block_s;
        let left_s = if self.is_whole { to_end_s + self.home_s } else { 0.0 };
        // A little more than the bound: sums in another order differ.
        let is_useful = cost_s < self.reached[next].cost_s && cost_s + left_s <= self.most_s + 1e-9;
        is_useful.then_some(cost_s)
    }

    fn hops_to(&self, directory: &Directory, last: usize, end: usize) -> Vec<Hop> {
        let (mut hops, mut number, mut end) = (Vec::new(), last, end);
        while number != NOBODY {
            let reached = self.reached[number];
            hops.push(Hop { server: directory.records[number].server, blocks: reached.at..end });
            (number, end) = (reached.from, reached.at);
        }
        hops.reverse();
        hops
    }
}

fn half_ping(ping_s: f64) -> f64 {
    ping_s.min(MAX_PING_S) / 2.0
}

/// A route through `blocks` for a batch: from the left, a server of the block drawn at random with the length of its span as weight, and
/// taken to the end of its span. `None` if a block has no server.
pub fn max_throughput(
    directory: &Directory,
    blocks: Range<usize>,
    client: &impl Knowledge,
    rng: &mut StdRng,
) -> Option<Vec<Hop>> {
    let (mut hops, mut block) = (Vec::new(), blocks.start);
    while block < blocks.end {
        let cost = |record: &Record| match client.ping_s(record.server) {
            Some(ping) if ping.is_infinite() => UNREACHABLE_WEIGHT,
            _ => record.span.len() as f64,
        };
        let holders = &directory.holders[block];
        let all_banned = directory.holders(block).all(|record| client.is_banned(record.server));
        let is_usable = |record: &&Record| all_banned || !client.is_banned(record.server);
        let usable = || holders.iter().map(|number| &directory.records[*number]).filter(is_usable);
        let mut left = rng.random::<f64>() * usable().map(cost).sum::<f64>();
        let chosen = usable().find(|record| {
            left -= cost(record);
            left < 0.0
        });
        let chosen = chosen.or(usable().last())?;
        let end = chosen.span.end.min(blocks.end);
        hops.push(Hop { server: chosen.server, blocks: block..end });
        block = end;
    }
    Some(hops)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::SeedableRng;
    use std::collections::HashMap;

    #[derive(Default)]
    struct Client {
        pings: HashMap<usize, f64>,
        banned: Vec<usize>,
    }

    impl Knowledge for Client {
        fn ping_s(&self, server: usize) -> Option<f64> {
            self.pings.get(&server).copied()
        }

        fn is_banned(&self, server: usize) -> bool {
            self.banned.contains(&server)
        }
    }

    fn record(
        server: usize,
        span: Range<usize>,
        inference_rps: f64,
        pings: &[(usize, f64)],
    ) -> Record {
        Record {
            server,
            span,
            inference_rps,
            cache_tokens_left: u64::MAX,
            next_pings: pings.into(),
        }
    }

    fn hop(server: usize, blocks: Range<usize>) -> Hop {
        Hop { server, blocks }
    }

    /// The swarm of eight blocks that Petals' own router was run on.
    fn swarm() -> (Directory, Client) {
        let mut records = vec![
            record(1, 0..4, 500.0, &[(2, 0.02), (3, 0.1)]),
            record(2, 2..6, 250.0, &[(3, 0.04)]),
            record(3, 4..8, 1000.0, &[]),
            record(4, 0..8, 200.0, &[]),
        ];
        records[3].cache_tokens_left = 1000;
        let pings = HashMap::from([(1, 0.05), (2, 0.06), (3, 0.08), (4, 0.03)]);
        (Directory::new(records, 8), Client { pings, ..Client::default() })
    }

    #[test]
    fn routes_equal_those_of_petals() {
        let ((directory, client), mut router) = (swarm(), Router::default());
        for tokens in [None, Some(62)] {
            let (route, cost) = router.min_latency(&directory, 0..8, tokens, &client).unwrap();
            assert_eq!(route, [hop(4, 0..8)]);
            assert!((cost - 0.088).abs() < 1e-9, "{cost}");
        }
        let (route, cost) = router.min_latency(&directory, 0..8, Some(63), &client).unwrap();
        assert_eq!(route, [hop(1, 0..4), hop(3, 4..8)]);
        assert!((cost - 0.163).abs() < 1e-9, "{cost}");
    }

    #[test]
    fn banned_servers_are_taken_only_where_there_is_no_other_way() {
        let ((directory, mut client), mut router) = (swarm(), Router::default());
        client.banned = vec![4];
        let (route, _) = router.min_latency(&directory, 0..8, None, &client).unwrap();
        assert_eq!(route, [hop(1, 0..4), hop(3, 4..8)]);
        client.banned = vec![3, 4];
        assert!(router.min_latency(&directory, 0..8, None, &client).is_some());
        assert_eq!(router.min_latency(&Directory::new(Vec::new(), 8), 0..8, None, &client), None);
        let mut rng = StdRng::seed_from_u64(1);
        client.banned = vec![1, 4];
        let starts: Vec<usize> = (0..50)
            .map(|_| max_throughput(&directory, 2..8, &client, &mut rng).unwrap()[0].server)
            .collect();
        assert!(starts.iter().all(|server| *server == 2), "{starts:?}");
    }

    /// The definition: Bellman's equations over all pairs of servers, until nothing changes.
    fn least_cost(directory: &Directory, blocks: usize, tokens: u64, client: &Client) -> f64 {
        let records = directory.records();
        let half = |known: Option<f64>| known.map_or(UNKNOWN_HALF_PING_S, half_ping);
        let from_client = |record: &Record| half(client.ping_s(record.server));
        let enter = |record: &Record, half_s: f64, at: usize| {
            let is_full = 2 * tokens * record.span.len() as u64 > record.cache_tokens_left;
            let run = (record.span.end - at) as f64 / record.inference_rps;
            half_s + OVERHEAD_S + if is_full { CACHE_PENALTY_S } else { 0.0 } + run
        };
        let mut done = vec![f64::INFINITY; records.len()];
        for _ in 0..records.len() + 1 {
            for (next, record) in records.iter().enumerate() {
                if record.span.start == 0 {
                    done[next] = done[next].min(enter(record, from_client(record), 0));
                }
                for (from, other) in
                    records.iter().enumerate().filter(|(_, o)| record.span.contains(&o.span.end))
                {
                    let known = other
                        .next_pings
                        .iter()
                        .find(|(to, _)| *to == record.server)
                        .map(|(_, ping)| *ping);
                    done[next] =
                        done[next].min(done[from] + enter(record, half(known), other.span.end));
                }
            }
        }
        let last = records.iter().zip(&done).filter(|(record, _)| record.span.end == blocks);
        last.map(|(record, done)| done + from_client(record)).fold(f64::INFINITY, f64::min)
    }

    #[test]
    fn visiting_blocks_in_order_finds_what_the_definition_finds() {
        let (mut rng, mut router, mut routed) = (StdRng::seed_from_u64(1), Router::default(), 0);
        for _ in 0..300 {
            let draw = |rng: &mut StdRng, server| {
                let start = rng.random_range(0..16);
                let mut draw_ping =
                    |to| rng.random_bool(0.3).then(|| (to, rng.random_range(0.01..0.6)));
                let mut pings: Vec<_> = (0..20).filter_map(&mut draw_ping).collect();
                pings.retain(|(to, _)| *to != server);
                let span = start..rng.random_range(start + 1..=16);
                Record {
                    cache_tokens_left: rng.random_range(0..4000),
                    ..record(server, span, rng.random_range(50.0..900.0), &pings)
                }
            };
            let records = (0..20).map(|server| draw(&mut rng, server)).collect();
            let directory = Directory::new(records, 16);
            let mut draw_ping =
                |to| rng.random_bool(0.4).then(|| (to, rng.random_range(0.01..0.4)));
            let pings = (0..20).filter_map(&mut draw_ping).collect();
            let client = Client { pings, ..Client::default() };
            let expected = least_cost(&directory, 16, 100, &client);
            let found = router.min_latency(&directory, 0..16, Some(100), &client);
            let cost = found.as_ref().map_or(f64::INFINITY, |(_, cost)| *cost);
            assert!(
                cost == expected || (cost - expected).abs() < 1e-9,
                "{cost} instead of {expected}"
            );
            routed += usize::from(found.is_some());
        }
        assert!(routed > 200, "{routed} swarms have a route");
    }
}
