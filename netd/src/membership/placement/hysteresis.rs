//! When to move for real: upstream's rule with hysteresis, and an order in which servers move, so that a thousand servers that see the
//! same hole do not all jump into it. Pure: time is passed in.
//!
//! ```text
//!   settled ── rule says move, own move helps ──> waiting (longer, the more servers would help more)
//!      ^                                              │ asked again when it is over, on a fresh view
//!      ├── no longer wanted, since others moved ──────┤
//!      └── moved (settling time doubles) <────────────┘ still wanted
//! ```
//!
//! Every server ranks all servers by what one move of each would do for the blocks that lack throughput, and waits two seconds for each
//! that would do more. So the few that help most move first, whoever looks first. A server that moves announces its new place at once as
//! joining: those whose wait ends later see it and mostly stay. Whoever waits asks for a better swarm than whoever does not: a swarm that
//! is out of balance is brought well beyond the point at which moves begin.

use super::{
    Decision, EPSILON, MovableSwarm, MoveReason, StayReason, best_start_without, block_throughput,
    lexicographic, should_choose_other_blocks,
};
use rand::Rng;
use std::time::Duration;
use swarm::view::ServerSpan;

/// Wait for each server that would help more.
const WAIT_PER_SERVER: Duration = Duration::from_secs(2);
/// Moves begin below the quality that is asked for, and end at this share of the way from there to 1.
const RELEASE: f64 = 0.25;
/// Longest wait before a move.
const MAX_WAIT: Duration = Duration::from_secs(600);
/// Time without a move after a move, at first.
const MIN_SETTLING: Duration = Duration::from_secs(300);
/// The same after many moves.
const MAX_SETTLING: Duration = Duration::from_secs(4 * 3600);

/// Decides over and over whether one server moves. Times are since any fixed moment.
#[derive(Clone, Debug)]
pub struct Rebalancer {
    quality: f64,
    settled_at: Duration,
    settling: Duration,
    waits_until: Option<Duration>,
}

impl Rebalancer {
    /// For a server that begins to serve at `now` and moves when the weakest block has less than
    /// `quality` of what it could have.
    #[must_use]
    pub fn new(quality: f64, now: Duration) -> Self {
        Self { quality, settled_at: now, settling: MIN_SETTLING, waits_until: None }
    }

    /// When to ask again at the latest, if the answer was [`StayReason::Waiting`].
    #[must_use]
    pub fn waits_until(&self) -> Option<Duration> {
        self.waits_until
    }

    /// Whether `me` moves now; `spans` and `block_count` as for [`should_choose_other_blocks`].
    /// After a [`Decision::Move`] the caller moves to [`best_start_without`] and is settled
    /// from `now` on.
    pub fn on_check(
        &mut self,
        now: Duration,
        me: &str,
        spans: &[ServerSpan],
        block_count: usize,
        rng: &mut impl Rng,
    ) -> Decision {
        // What is cheap comes first: the rule itself simulates the whole swarm, and most checks end
        // before it.
        if self.quality <= 1.0 {
            if !spans.iter().any(|span| span.peer_id == me) {
                return self.stay(StayReason::RecordMissing);
            }
            // A hole is filled even by one that has just moved: no client gets through before.
            let weakest =
                block_throughput(spans, block_count).into_iter().fold(f64::INFINITY, f64::min);
            let settles = now.saturating_sub(self.settled_at) < self.settling;
            if weakest > EPSILON && settles {
                return self.stay(StayReason::CoolingDown);
            }
            if !helps_alone(me, spans, block_count) {
                return self.stay(StayReason::NoGain);
            }
        }
        let quality = match self.waits_until {
            Some(_) => self.quality + RELEASE * (1.0 - self.quality),
            None => self.quality,
        };
        let decision = should_choose_other_blocks(me, spans, block_count, quality, rng);
        match decision {
            Decision::Stay(reason) => return self.stay(reason),
            Decision::Move(MoveReason::Forced) => return decision,
            Decision::Move(MoveReason::Quality(_)) => {}
        }
        let until = *self.waits_until.get_or_insert_with(|| {
            let better = servers_to_wait_for(me, spans, block_count, quality, rng);
            let wait = WAIT_PER_SERVER.saturating_mul(u32::try_from(better).unwrap_or(u32::MAX));
            now + wait.min(MAX_WAIT) + WAIT_PER_SERVER.mul_f64(rng.random_range(0.0..1.0))
        });
        if now < until {
            return Decision::Stay(StayReason::Waiting);
        }
        self.waits_until = None;
        self.settled_at = now;
        self.settling = (self.settling * 2).min(MAX_SETTLING);
        decision
    }

    fn stay(&mut self, reason: StayReason) -> Decision {
        self.waits_until = None;
        Decision::Stay(reason)
    }
}

/// Share of the usual time that a server's sessions have before it leaves its blocks: all of it where the swarm has what is asked for,
/// none where a block has no server, since no session gets through then.
#[must_use]
pub fn patience(reason: MoveReason, quality: f64) -> f64 {
    match reason {
        MoveReason::Forced => 1.0,
        MoveReason::Quality(share) if share > 0.0 && quality > 0.0 => (share / quality).min(1.0),
        MoveReason::Quality(_) => 0.0,
    }
}

/// How many servers should move before `me`: those whose one move would give the blocks that have too little more of what they lack.
/// Of equal ones, a random number.
fn servers_to_wait_for(
    me: &str,
    spans: &[ServerSpan],
    block_count: usize,
    quality: f64,
    rng: &mut impl Rng,
) -> usize {
    let Some(mut swarm) = MovableSwarm::read(spans, block_count, me) else {
        return 0;
    };
    let enough = quality * swarm.mean();
    let lack = |blocks: &[f64]| blocks.iter().map(|block| (enough - block).max(0.0)).sum::<f64>();
    let present = lack(&swarm.throughput);
    let gains: Vec<f64> = (0..swarm.servers.len())
        .map(|server| {
            let (start, before) = (swarm.servers[server].start, swarm.throughput.clone());
            swarm.lift(server);
            let best = swarm.best_start(server);
            swarm.put_down(server, best);
            let gain = present - lack(&swarm.throughput);
            (swarm.servers[server].start, swarm.throughput) = (start, before);
            gain
        })
        .collect();
    let own = gains[swarm.me];
    let better = gains.iter().filter(|gain| **gain > own + EPSILON).count();
    let equal = gains.iter().filter(|gain| (**gain - own).abs() <= EPSILON).count();
    better + rng.random_range(0..equal.max(1))
}

/// Whether the swarm is better after this one move: weakest block first, then the second weakest
/// and so on. Upstream's rule also moves when only further moves of others would help.
fn helps_alone(me: &str, spans: &[ServerSpan], block_count: usize) -> bool {
    let Some(own) = spans.iter().find(|span| span.peer_id == me) else {
        return false;
    };
    let length = own.end.min(block_count).saturating_sub(own.start);
    let Some(start) = best_start_without(me, spans, block_count, length) else {
        return false;
    };
    let now = block_throughput(spans, block_count);
    let mut then = now.clone();
    let rate = own.info.throughput;
    then[own.start..own.start + length].iter_mut().for_each(|block| *block -= rate);
    then[start..start + length].iter_mut().for_each(|block| *block += rate);
    // Sorted, and without the noise of sums in another order.
    let sorted = |mut blocks: Vec<f64>| {
        blocks.iter_mut().for_each(|block| *block = (*block / EPSILON).round());
        blocks.sort_unstable_by(f64::total_cmp);
        blocks
    };
    lexicographic(&sorted(then), &sorted(now)).is_gt()
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::SeedableRng;
    use rand::rngs::StdRng;
    use swarm::wire::records::{ServerInfo, ServerState};

    const SECOND: Duration = Duration::from_secs(1);

    fn spans(places: &[(usize, usize)]) -> Vec<ServerSpan> {
        let span = |(peer, &(start, end)): (usize, &(usize, usize))| ServerSpan {
            peer_id: peer.to_string(),
            start,
            end,
            info: ServerInfo::new(ServerState::Online, 10.0),
        };
        places.iter().enumerate().map(span).collect()
    }

    /// Asks every second until it moves; the time of the move.
    fn time_of_move(
        rebalancer: &mut Rebalancer,
        from: Duration,
        spans: &[ServerSpan],
        rng: &mut StdRng,
    ) -> Option<Duration> {
        (0..20_000u32)
            .map(|s| from + SECOND * s)
            .find(|now| matches!(rebalancer.on_check(*now, "0", spans, 8, rng), Decision::Move(_)))
    }

    #[test]
    fn hole_is_filled_after_a_wait_of_seconds_per_server() {
        let hole = spans(&[(0, 4), (0, 4)]);
        for seed in 0..50 {
            let mut rng = StdRng::seed_from_u64(seed);
            let mut rebalancer = Rebalancer::new(0.75, Duration::ZERO);
            let first = rebalancer.on_check(Duration::ZERO, "0", &hole, 8, &mut rng);
            assert_eq!(first, Decision::Stay(StayReason::Waiting));
            let moved = time_of_move(&mut rebalancer, SECOND, &hole, &mut rng);
            assert!(moved.is_some_and(|at| at <= WAIT_PER_SERVER * 2 + SECOND), "{moved:?}");
        }
    }

    #[test]
    fn the_worse_the_swarm_the_shorter_its_patience() {
        let of = |share| patience(MoveReason::Quality(share), 0.75);
        assert_eq!([of(0.0), of(0.375), of(0.75), of(2.0)], [0.0, 0.5, 1.0, 1.0]);
        assert_eq!([of(f64::NAN), of(f64::NEG_INFINITY)], [0.0, 0.0]);
        assert_eq!(patience(MoveReason::Forced, 2.0), 1.0);
    }

    #[test]
    fn wish_is_forgotten_when_another_fills_the_hole() {
        let mut rng = StdRng::seed_from_u64(1);
        let mut rebalancer = Rebalancer::new(0.75, Duration::ZERO);
        let hole = spans(&[(0, 4), (0, 4)]);
        rebalancer.on_check(Duration::ZERO, "0", &hole, 8, &mut rng);
        assert!(rebalancer.waits_until().is_some());
        let filled = spans(&[(0, 4), (4, 8)]);
        let decision = rebalancer.on_check(SECOND, "0", &filled, 8, &mut rng);
        assert_eq!(decision, Decision::Stay(StayReason::CoolingDown));
        assert_eq!(rebalancer.waits_until(), None);
    }

    #[test]
    fn mere_imbalance_waits_for_the_settling_time_which_doubles() {
        let uneven = spans(&[(0, 4), (0, 4), (0, 4), (4, 8)]);
        let mut rng = StdRng::seed_from_u64(1);
        let mut rebalancer = Rebalancer::new(0.75, Duration::ZERO);
        let soon = rebalancer.on_check(SECOND, "0", &uneven, 8, &mut rng);
        assert_eq!(soon, Decision::Stay(StayReason::CoolingDown));
        let first = time_of_move(&mut rebalancer, SECOND, &uneven, &mut rng).unwrap();
        assert!(first >= MIN_SETTLING, "{first:?}");
        let second = time_of_move(&mut rebalancer, first, &uneven, &mut rng).unwrap();
        assert!(second - first >= MIN_SETTLING * 2, "{second:?}");
    }

    /// The same with a throughput each.
    fn rated(places: &[(usize, usize, f64)]) -> Vec<ServerSpan> {
        let mut rated =
            spans(&places.iter().map(|(start, end, _)| (*start, *end)).collect::<Vec<_>>());
        rated.iter_mut().zip(places).for_each(|(span, place)| span.info.throughput = place.2);
        rated
    }

    #[test]
    fn those_who_help_most_move_first_and_equal_ones_in_any_order() {
        let hole = rated(&[(0, 4, 10.0), (0, 4, 30.0), (0, 4, 10.0), (4, 8, 5.0)]);
        let mut seen = [[false; 4]; 4];
        for seed in 0..50 {
            let mut rng = StdRng::seed_from_u64(seed);
            for (me, seen) in seen.iter_mut().enumerate() {
                seen[servers_to_wait_for(&me.to_string(), &hole, 8, 0.75, &mut rng)] = true;
            }
        }
        let second = [false, true, true, false];
        assert_eq!(
            seen,
            [second, [true, false, false, false], second, [false, false, false, true]]
        );
        let mut rng = StdRng::seed_from_u64(1);
        assert_eq!(servers_to_wait_for("9", &hole, 8, 0.75, &mut rng), 0);
    }

    #[test]
    fn whoever_waits_brings_the_swarm_beyond_the_point_where_moves_begin() {
        let first_half = [(0, 4, 4.0), (0, 4, 10.0), (0, 4, 10.0), (0, 4, 4.0)];
        let with = |last: f64| rated(&[&first_half[..], &[(4, 8, last)]].concat());
        let (bad, better, good) = (with(10.0), with(17.0), with(26.0));
        let (mut rng, now) = (StdRng::seed_from_u64(1), MIN_SETTLING * 2);
        let fresh = Rebalancer::new(0.75, Duration::ZERO);
        // 17 of the 21 that could be.
        let decision = fresh.clone().on_check(now, "0", &better, 8, &mut rng);
        assert!(matches!(decision, Decision::Stay(StayReason::GoodEnough(_))), "{decision:?}");
        let mut waiting = fresh;
        assert_eq!(
            waiting.on_check(now, "0", &bad, 8, &mut rng),
            Decision::Stay(StayReason::Waiting)
        );
        let later = now + MAX_WAIT;
        let enough = waiting.clone().on_check(later, "0", &good, 8, &mut rng);
        assert!(matches!(enough, Decision::Stay(_)), "{enough:?}");
        let decision = waiting.on_check(later, "0", &better, 8, &mut rng);
        assert!(matches!(decision, Decision::Move(MoveReason::Quality(_))), "{decision:?}");
    }

    #[test]
    fn move_that_helps_only_if_others_follow_is_not_made() {
        // Two of six would have to move for the weakest block to gain; each of them gains the
        // second weakest.
        let follow = spans(&[(0, 3), (3, 6), (6, 8), (0, 3), (0, 3), (0, 3)]);
        assert!(helps_alone("0", &follow, 8));
        // Moving only mirrors the imbalance.
        let mirror = spans(&[(0, 4), (4, 8), (0, 4)]);
        assert!(!helps_alone("0", &mirror, 8));
        assert!(!helps_alone("9", &mirror, 8));
    }

    #[test]
    fn own_record_that_is_missing_changes_nothing() {
        let mut rng = StdRng::seed_from_u64(1);
        let mut rebalancer = Rebalancer::new(0.75, Duration::ZERO);
        let decision = rebalancer.on_check(SECOND, "9", &spans(&[(0, 4)]), 8, &mut rng);
        assert_eq!(decision, Decision::Stay(StayReason::RecordMissing));
    }
}
