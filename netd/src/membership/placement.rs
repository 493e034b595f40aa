//! Which blocks a server should serve: where the swarm is weakest; and whether one that serves
//! should move. Pure. Source: `petals/server/block_selection.py`. [`hysteresis`] keeps many servers
//! from moving at once.
//!
//! # Discrepancies
//! Upstream fails when a server's own record is missing; here it carries on. Upstream lets the
//! simulation of [`should_choose_other_blocks`] run for ever; here it takes at most [`MAX_PASSES`].
//! Servers that claim no blocks or a throughput that is no number are left out of it.

pub mod hysteresis;

use rand::Rng;
use rand::seq::SliceRandom;
use std::cmp::Ordering;
use std::ops::Range;
use swarm::view::ServerSpan;

/// Throughput of each of `count` blocks: the sum over the servers that cover it, each with the
/// throughput of its record. Summed in the order of `spans`, which is that of PeerIDs, so that
/// every server gets the same floats.
#[must_use]
pub fn block_throughput(spans: &[ServerSpan], count: usize) -> Vec<f64> {
    let mut throughput = vec![0.0; count];
    for span in spans {
        let covered = throughput.get_mut(span.start..span.end.min(count)).unwrap_or_default();
        covered.iter_mut().for_each(|block| *block += span.info.throughput);
    }
    throughput
}

/// Where a server of `length` blocks helps most: the window whose weakest block is weakest, ties by
/// the second weakest and so on, then the first. `None` if the model is shorter than that, or if
/// `length` is 0.
#[must_use]
pub fn best_start(throughput: &[f64], length: usize) -> Option<usize> {
    let mut window = throughput.get(..length).filter(|w| !w.is_empty())?.to_vec();
    window.sort_unstable_by(f64::total_cmp);
    let (mut best, mut best_start) = (window.clone(), 0);
    // The window slides: one value leaves, one enters, the order stays.
    for (start, (leaves, enters)) in throughput.iter().zip(throughput.get(length..)?).enumerate() {
        if let Ok(index) = window.binary_search_by(|value| value.total_cmp(leaves)) {
            window.remove(index);
        }
        let index = window.partition_point(|value| value.total_cmp(enters).is_lt());
        window.insert(index, *enters);
        if lexicographic(&window, &best).is_lt() {
            best.clone_from(&window);
            best_start = start + 1;
        }
    }
    Some(best_start)
}

/// Compares windows of equal length.
fn lexicographic(a: &[f64], b: &[f64]) -> Ordering {
    let differing = a.iter().zip(b).map(|(a, b)| a.total_cmp(b)).find(|order| order.is_ne());
    differing.unwrap_or(Ordering::Equal)
}

/// Whether to move, and why.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Decision {
    /// Keep the blocks.
    Stay(StayReason),
    /// Choose blocks anew.
    Move(MoveReason),
}

/// Why a server keeps its blocks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum StayReason {
    /// The swarm does not show our own record: nothing can be said.
    RecordMissing,
    /// Some block would be left without a server.
    SoleHolder,
    /// No other place is better.
    AlreadyBest,
    /// Even if every server moved where it helps most, the weakest block would not gain.
    NoGain,
    /// The weakest block has this share of what it could have, which is enough.
    GoodEnough(f64),
    /// [`hysteresis`] only: the last move is too recent.
    CoolingDown,
    /// [`hysteresis`] only: waits to see whether others move first.
    Waiting,
}

/// Why a server moves.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum MoveReason {
    /// `balance_quality` above 1 asks for a move at every check.
    Forced,
    /// The weakest block has only this share of what it could have.
    Quality(f64),
}

/// Differences of throughput below this do not count; also the share by which the present place is
/// preferred.
const EPSILON: f64 = 1e-3;
/// Passes over all servers in the simulation of a swarm that balances itself. Swarms converge in a
/// few.
pub const MAX_PASSES: usize = 64;

/// Whether the server `me` should choose other blocks: whether the weakest block has less than
/// `balance_quality` of the throughput it would have if all servers moved, one after another, to
/// where they help most. `spans` are those of servers that are at least joining, in PeerID order;
/// `block_count` is the length of the model. `rng` orders the simulated moves.
pub fn should_choose_other_blocks(
    me: &str,
    spans: &[ServerSpan],
    block_count: usize,
    balance_quality: f64,
    rng: &mut impl Rng,
) -> Decision {
    if balance_quality > 1.0 {
        return Decision::Move(MoveReason::Forced);
    }
    let Some(mut swarm) = MovableSwarm::read(spans, block_count, me) else {
        return Decision::Stay(StayReason::RecordMissing);
    };
    let initial = swarm.weakest();
    let old_start = swarm.servers[swarm.me].start;
    swarm.lift(swarm.me);
    if initial > EPSILON && swarm.weakest() <= 0.0 {
        return Decision::Stay(StayReason::SoleHolder);
    }
    let start = swarm.best_start(swarm.me);
    if start == old_start {
        return Decision::Stay(StayReason::AlreadyBest);
    }
    // However the servers were placed, the weakest block would have at most the mean: most swarms
    // need no simulation.
    if initial > EPSILON && initial >= (balance_quality - EPSILON) * swarm.mean() {
        return Decision::Stay(StayReason::GoodEnough(initial / swarm.mean()));
    }
    swarm.put_down(swarm.me, start);
    swarm.converge(rng);
    let new = swarm.weakest();
    if new < initial || new < EPSILON {
        return Decision::Stay(StayReason::NoGain);
    }
    let quality = initial / new;
    if quality < balance_quality - EPSILON {
        Decision::Move(MoveReason::Quality(quality))
    } else {
        Decision::Stay(StayReason::GoodEnough(quality))
    }
}

/// Where a server of `length` blocks helps most when what `me` serves now is not counted: the
/// choice of one that moves.
#[must_use]
pub fn best_start_without(
    me: &str,
    spans: &[ServerSpan],
    block_count: usize,
    length: usize,
) -> Option<usize> {
    let mut throughput = block_throughput(spans, block_count);
    for span in spans.iter().filter(|span| span.peer_id == me) {
        let covered = throughput.get_mut(span.start..span.end.min(block_count));
        // As in Swarm::lift: a little more than it gave, so that rounding leaves nothing behind.
        covered
            .unwrap_or_default()
            .iter_mut()
            .for_each(|block| *block -= span.info.throughput * (1.0 + EPSILON));
    }
    best_start(&throughput, length)
}

/// A swarm whose servers can be moved.
struct MovableSwarm {
    throughput: Vec<f64>,
    servers: Vec<PlacedServer>,
    me: usize,
}

/// A server's span; not empty, inside the model.
struct PlacedServer {
    start: usize,
    length: usize,
    throughput: f64,
}

impl PlacedServer {
    fn range(&self) -> Range<usize> {
        self.start..self.start + self.length
    }
}

impl MovableSwarm {
    /// `None` without a usable record of `me`.
    fn read(spans: &[ServerSpan], block_count: usize, me: &str) -> Option<Self> {
        let usable = |span: &&ServerSpan| {
            span.start < span.end.min(block_count) && span.info.throughput.is_finite()
        };
        let usable: Vec<&ServerSpan> = spans.iter().filter(usable).collect();
        let me = usable.iter().position(|span| span.peer_id == me)?;
        let placed = |span: &&ServerSpan| PlacedServer {
            start: span.start,
            length: span.end.min(block_count) - span.start,
            throughput: span.info.throughput,
        };
        let servers: Vec<PlacedServer> = usable.iter().map(placed).collect();
        let mut swarm = Self { throughput: vec![0.0; block_count], servers, me };
        for server in 0..swarm.servers.len() {
            swarm.add(server, 1.0);
        }
        Some(swarm)
    }

    fn weakest(&self) -> f64 {
        self.throughput.iter().copied().min_by(f64::total_cmp).unwrap_or(0.0)
    }

    /// What every block would have if throughput could be spread evenly.
    fn mean(&self) -> f64 {
        let total: f64 =
            self.servers.iter().map(|placed| placed.throughput * placed.length as f64).sum();
        total / self.throughput.len().max(1) as f64
    }

    fn add(&mut self, server: usize, share: f64) {
        let placed = &self.servers[server];
        self.throughput[placed.range()]
            .iter_mut()
            .for_each(|block| *block += placed.throughput * share);
    }

    /// Takes a server out, with a little more than it gave: its place then wins ties, and rounding
    /// does not move it.
    fn lift(&mut self, server: usize) {
        self.add(server, -(1.0 + EPSILON));
    }

    /// Puts a lifted server down at `start`.
    fn put_down(&mut self, server: usize, start: usize) {
        self.add(server, EPSILON);
        self.servers[server].start = start;
        self.add(server, 1.0);
    }

    fn best_start(&self, server: usize) -> usize {
        let placed = &self.servers[server];
        best_start(&self.throughput, placed.length).unwrap_or(placed.start)
    }

    /// Moves every server where it helps most until none wants to.
    fn converge(&mut self, rng: &mut impl Rng) {
        let mut order: Vec<usize> = (0..self.servers.len()).collect();
        for _ in 0..MAX_PASSES {
            order.shuffle(rng);
            let mut moved = false;
            for &server in &order {
                self.lift(server);
                let start = self.best_start(server);
                moved |= start != self.servers[server].start;
                self.put_down(server, start);
            }
            if !moved {
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use rand::SeedableRng;
    use rand::rngs::StdRng;
    use swarm::wire::records::{ServerInfo, ServerState};

    fn span(peer: u8, start: usize, end: usize, throughput: f64) -> ServerSpan {
        let info = ServerInfo::new(ServerState::Online, throughput);
        ServerSpan { peer_id: peer.to_string(), start, end, info }
    }

    /// Cases run through Petals' own code: blocks, servers, expected throughput, and (length,
    /// start) pairs.
    #[test]
    fn cases_of_the_reference_come_out_the_same() {
        type Case = (Vec<ServerSpan>, Vec<f64>, Vec<(usize, usize)>);
        let cases: Vec<Case> = vec![
            (vec![], vec![0.0; 8], vec![(3, 0)]),
            (
                vec![span(1, 0, 4, 10.0), span(2, 2, 6, 5.0)],
                vec![10.0, 10.0, 15.0, 15.0, 5.0, 5.0, 0.0, 0.0],
                vec![(2, 6), (3, 5), (4, 4)],
            ),
            (
                vec![span(1, 0, 4, 10.0), span(2, 4, 8, 10.0), span(3, 0, 3, 4.0)],
                vec![14.0, 14.0, 14.0, 10.0, 10.0, 10.0, 10.0, 10.0],
                vec![(3, 3), (5, 3)],
            ),
            (
                vec![span(1, 0, 6, 100.0), span(2, 4, 12, 50.0), span(3, 2, 8, 30.0)],
                vec![100.0, 100.0, 130.0, 130.0, 180.0, 180.0, 80.0, 80.0, 50.0, 50.0, 50.0, 50.0],
                vec![(2, 8), (3, 8), (4, 8), (6, 6), (12, 0)],
            ),
            (
                vec![span(1, 0, 6, 100.0), span(2, 4, 12, 50.0)],
                vec![100.0, 100.0, 100.0, 100.0, 150.0, 150.0, 50.0, 50.0, 50.0, 50.0, 50.0, 50.0],
                vec![(2, 6), (3, 6), (4, 6), (6, 6)],
            ),
            (
                vec![span(1, 0, 10, 7.0), span(2, 3, 5, 1.0)],
                vec![7.0, 7.0, 7.0, 8.0, 8.0, 7.0, 7.0, 7.0, 7.0, 7.0],
                vec![(2, 0), (3, 0), (4, 5), (5, 5)],
            ),
        ];
        for (spans, expected, choices) in cases {
            let throughput = block_throughput(&spans, expected.len());
            assert_eq!(throughput, expected);
            for (length, start) in choices {
                assert_eq!(
                    best_start(&throughput, length),
                    Some(start),
                    "{length} blocks in {throughput:?}"
                );
            }
        }
    }

    #[test]
    fn impossible_lengths_have_no_start() {
        assert_eq!(best_start(&[1.0, 2.0], 3), None);
        assert_eq!(best_start(&[1.0, 2.0], 0), None);
        assert_eq!(best_start(&[], 1), None);
    }

    #[test]
    fn claims_that_cover_nothing_count_nothing() {
        assert_eq!(block_throughput(&[span(1, 3, 1, 5.0), span(2, 9, 12, 5.0)], 4), [0.0; 4]);
    }

    /// Cases run through Petals' own code with many seeds: blocks, servers as (start, end,
    /// throughput), who asks, whether it moves.
    #[test]
    fn moves_of_the_reference_come_out_the_same_for_every_seed() {
        type Case = (usize, &'static [(usize, usize, f64)], u8, bool);
        let cases: [Case; 12] = [
            (8, &[(0, 4, 10.0), (0, 4, 10.0)], 1, true),
            (8, &[(0, 4, 10.0), (4, 8, 10.0)], 1, false),
            (8, &[(0, 4, 10.0), (0, 4, 10.0), (4, 8, 10.0)], 1, false),
            (8, &[(0, 4, 10.0), (0, 4, 10.0), (4, 8, 10.0), (0, 4, 10.0)], 1, true),
            (8, &[(0, 4, 10.0), (4, 8, 10.0), (4, 8, 10.0), (4, 8, 10.0)], 1, false),
            (8, &[(0, 4, 10.0), (4, 8, 10.0), (4, 8, 10.0), (4, 8, 10.0)], 2, true),
            (24, &[(0, 5, 1.0), (0, 5, 1.0), (5, 19, 1.0)], 1, true),
            (9, &[(0, 3, 10.0), (3, 6, 10.0), (6, 9, 10.0), (0, 3, 10.0), (0, 3, 10.0)], 4, false),
            (
                9,
                &[
                    (0, 3, 10.0),
                    (3, 6, 10.0),
                    (6, 9, 10.0),
                    (0, 3, 10.0),
                    (0, 3, 10.0),
                    (0, 3, 10.0),
                ],
                4,
                true,
            ),
            (6, &[(0, 3, 20.0), (0, 3, 20.0), (3, 6, 5.0)], 2, true),
            (6, &[(0, 6, 5.0), (0, 3, 20.0)], 2, false),
            (8, &[(0, 4, 10.0), (0, 4, 3.0), (4, 8, 4.0), (4, 8, 4.0)], 2, false),
        ];
        for (number, (count, servers, me, moves)) in cases.into_iter().enumerate() {
            let spans: Vec<ServerSpan> = (1..)
                .zip(servers)
                .map(|(peer, &(start, end, rate))| span(peer, start, end, rate))
                .collect();
            for seed in 0..200 {
                let mut rng = StdRng::seed_from_u64(seed);
                let decision =
                    should_choose_other_blocks(&me.to_string(), &spans, count, 0.75, &mut rng);
                assert_eq!(
                    matches!(decision, Decision::Move(_)),
                    moves,
                    "case {number}, seed {seed}: {decision:?}"
                );
            }
        }
    }

    #[test]
    fn quality_asked_for_decides() {
        let spans = [span(1, 0, 4, 10.0), span(2, 0, 4, 10.0)];
        let ask = |me: &str, quality| {
            should_choose_other_blocks(me, &spans, 8, quality, &mut StdRng::seed_from_u64(1))
        };
        assert_eq!(ask("1", 0.75), Decision::Move(MoveReason::Quality(0.0)));
        assert!(matches!(ask("1", 0.0), Decision::Stay(StayReason::GoodEnough(_))));
        assert_eq!(ask("1", 1.5), Decision::Move(MoveReason::Forced));
        assert_eq!(ask("3", 0.75), Decision::Stay(StayReason::RecordMissing));
        assert_eq!(best_start_without("1", &spans, 8, 4), Some(4));
    }

    #[test]
    fn records_with_nonsense_do_not_disturb() {
        let spans = [
            span(1, 0, 4, 10.0),
            span(2, 0, 4, 10.0),
            span(3, 7, 2, 10.0),
            span(4, 0, 8, f64::INFINITY),
            span(5, 4, 99, f64::NAN),
            span(6, 3, 3, 1.0),
        ];
        let mut rng = StdRng::seed_from_u64(1);
        let decision = should_choose_other_blocks("1", &spans, 8, 0.75, &mut rng);
        assert_eq!(decision, Decision::Move(MoveReason::Quality(0.0)));
        for me in ["3", "4", "5", "6"] {
            let decision = should_choose_other_blocks(me, &spans, 8, 0.75, &mut rng);
            assert_eq!(decision, Decision::Stay(StayReason::RecordMissing), "{me}");
        }
        let nobody = should_choose_other_blocks("1", &spans, 0, 0.75, &mut rng);
        assert_eq!(nobody, Decision::Stay(StayReason::RecordMissing));
    }

    /// The definition, without the sliding.
    fn best_start_by_definition(throughput: &[f64], length: usize) -> Option<usize> {
        let sorted = |window: &[f64]| {
            let mut window = window.to_vec();
            window.sort_unstable_by(f64::total_cmp);
            window
        };
        let windows = throughput.windows(length).map(sorted).enumerate();
        windows.min_by(|(_, a), (_, b)| lexicographic(a, b)).map(|(start, _)| start)
    }

    proptest! {
        #[test]
        fn sliding_window_finds_what_sorting_finds(
            throughput in prop::collection::vec((0u8..6).prop_map(f64::from), 0..40),
            length in 1usize..12,
        ) {
            prop_assert_eq!(best_start(&throughput, length), best_start_by_definition(&throughput, length));
        }

        /// No swarm panics, and no decision depends on more than its seed.
        #[test]
        fn decisions_are_total_and_reproducible(
            servers in prop::collection::vec((0usize..20, 0usize..24, -2.0f64..50.0), 0..20),
            count in 0usize..20,
            quality in 0.0f64..1.2,
            seed in any::<u64>(),
        ) {
            let spans: Vec<ServerSpan> = (1..).zip(&servers).map(|(peer, &(start, end, rate))| span(peer, start, end, rate)).collect();
            let ask = || should_choose_other_blocks("1", &spans, count, quality, &mut StdRng::seed_from_u64(seed));
            prop_assert_eq!(ask(), ask());
        }
    }
}
