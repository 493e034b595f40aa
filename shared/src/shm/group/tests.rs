//! Groups over one segment: threads as ranks here, processes in [`processes`], plans in [`plans`].

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use proptest::prelude::*;

use super::layout::{Control, PARITIES};
use super::*;
use crate::ids::{Generation, GroupId, WorldSize};

mod opening;
mod plans;
mod processes;

const DEADLINE: Duration = Duration::from_secs(60);

/// Short, so that heartbeats come soon.
const INTERVAL: Duration = Duration::from_millis(5);

fn shape(world: u16, exchange_values: usize) -> GroupShape {
    GroupShape {
        group: GroupId(4),
        generation: Generation(2),
        world_size: WorldSize(world),
        exchange_values,
        log_bytes: 256,
    }
}

fn create(shape: &GroupShape) -> GroupOwner {
    GroupOwner::create("sepal-test-group", shape).unwrap()
}

fn open(group: &GroupOwner, shape: &GroupShape, rank: u16) -> Arc<GroupMap> {
    let (segment, bells) = (group.try_clone().unwrap(), group.doorbells().unwrap());
    GroupMap::open(segment, bells, shape, Rank(rank)).unwrap()
}

/// Waits that end the test when they take too long.
fn policy(spin: Duration) -> WaitPolicy {
    let start = Instant::now();
    let heartbeat = move || assert!(start.elapsed() < DEADLINE, "a wait does not end");
    WaitPolicy { spin, interval: INTERVAL, heartbeat: Box::new(heartbeat) }
}

fn member(group: &GroupOwner, shape: &GroupShape, rank: u16) -> GroupMember {
    GroupMember::new(&open(group, shape, rank), policy(Duration::ZERO)).unwrap()
}

/// A thread for each rank; what each returns, in the order of ranks.
fn on_all_ranks<Out: Send>(
    shape: &GroupShape,
    spin: Duration,
    work: impl Fn(usize, &mut GroupMember) -> Out + Sync,
) -> Vec<Out> {
    let group = create(shape);
    thread::scope(|scope| {
        let ranks: Vec<_> = (0..shape.world_size.0)
            .map(|rank| {
                let mut member =
                    GroupMember::new(&open(&group, shape, rank), policy(spin)).unwrap();
                let work = &work;
                scope.spawn(move || work(rank.into(), &mut member))
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// A value in which rounding shows the order of additions.
fn value(rank: usize, round: usize, index: usize) -> f32 {
    let hash = [rank, round, index].iter().fold(0x9e37_79b9u32, |hash, &part| {
        (hash ^ part as u32).wrapping_mul(0x85eb_ca6b).rotate_left(13)
    });
    let exponent = (hash % 40) as i32 - 20;
    ((hash >> 8) as f32 / 8_388_608.0 - 1.0) * 2f32.powi(exponent)
}

fn values(rank: usize, round: usize, len: usize) -> Vec<f32> {
    (0..len).map(|index| value(rank, round, index)).collect()
}

/// ((r0 + r1) + r2) + ..., as bits.
fn expected_bits(world: usize, round: usize, len: usize) -> Vec<u32> {
    let sum = |index| {
        (1..world).fold(value(0, round, index), |sum, rank| sum + value(rank, round, index))
    };
    (0..len).map(|index| sum(index).to_bits()).collect()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

#[test]
fn every_rank_gets_the_sum_in_the_order_of_ranks() {
    // 1e8 swallows a 1 that is added to it alone.
    let terms = [1.0, 1e8, -1e8, 1.0];
    let sums = on_all_ranks(&shape(4, 16), Duration::ZERO, |rank, member| {
        let mut values = [terms[rank], -0.0];
        member.all_reduce(&mut values).unwrap();
        bits(&values)
    });
    assert_eq!(sums, vec![bits(&[((1.0 + 1e8) - 1e8) + 1.0, -0.0]); 4]);
}

#[test]
fn long_messages_cross_in_pieces_one_shot_and_two() {
    // Pieces of 100 take two shots with three ranks, the rest of 20 one.
    for world in [2, 3] {
        let sums = on_all_ranks(&shape(world, 100), Duration::ZERO, |rank, member| {
            let mut values = values(rank, 0, 320);
            member.all_reduce(&mut values).unwrap();
            bits(&values)
        });
        assert_eq!(sums, vec![expected_bits(world.into(), 0, 320); world.into()]);
    }
}

#[test]
fn more_values_than_are_added_at_once_come_out_right() {
    for (world, len) in [(2, 2500), (3, 7000)] {
        let sums = on_all_ranks(&shape(world, 8192), Duration::ZERO, |rank, member| {
            let mut values = values(rank, 3, len);
            member.all_reduce(&mut values).unwrap();
            bits(&values)
        });
        assert_eq!(sums, vec![expected_bits(world.into(), 3, len); world.into()]);
    }
}

#[test]
fn all_get_what_rank_0_broadcasts() {
    let found = on_all_ranks(&shape(3, 4), Duration::ZERO, |rank, member| {
        let mut bytes: Vec<u8> = if rank == 0 { (0..70).collect() } else { vec![0; 70] };
        member.broadcast(&mut bytes).unwrap();
        let mut values = if rank == 0 { [0.5, f32::MIN] } else { [0.0; 2] };
        member.broadcast_values(&mut values).unwrap();
        member.all_reduce(&mut values).unwrap();
        (bytes, values)
    });
    assert_eq!(found, vec![((0..70).collect(), [1.5, f32::NEG_INFINITY]); 3]);
}

#[test]
fn ranks_that_disagree_get_an_error_and_no_sum() {
    let shape = shape(2, 8);
    let group = create(&shape);
    let (mut first, mut second) = (member(&group, &shape, 0), member(&group, &shape, 1));
    let error = thread::scope(|scope| {
        scope.spawn(|| second.all_reduce(&mut [1.0; 3]));
        first.all_reduce(&mut [1.0; 2]).unwrap_err()
    });
    assert!(matches!(error, GroupError::Mismatch { rank: Rank(1), epoch: 1, .. }), "{error}");
}

/// So many cases, multiplied as `PROPTEST_CASES` multiplies the usual 256.
fn cases(short: u32) -> ProptestConfig {
    let config = ProptestConfig::default();
    ProptestConfig { cases: short.saturating_mul(config.cases).div_ceil(256), ..config }
}

proptest! {
    #![proptest_config(cases(24))]

    #[test]
    fn sums_have_the_bits_of_the_sequential_sum(
        world in 2u16..=8,
        exchange_values in 1usize..200,
        fills in prop::collection::vec(0.0f64..3.0, 1..12),
        broadcasts in any::<u16>(),
        spins in any::<bool>(),
    ) {
        let spin = if spins { Duration::from_micros(20) } else { Duration::ZERO };
        let lengths: Vec<usize> =
            fills.iter().map(|fill| (fill * exchange_values as f64) as usize).collect();
        let found = on_all_ranks(&shape(world, exchange_values), spin, |rank, member| {
            let rounds = lengths.iter().enumerate();
            rounds.map(|(round, &len)| {
                let mut values = values(rank, round, len);
                if broadcasts >> round & 1 == 1 {
                    member.broadcast_values(&mut values).unwrap();
                } else {
                    member.all_reduce(&mut values).unwrap();
                }
                bits(&values)
            }).collect::<Vec<_>>()
        });
        for (round, &len) in lengths.iter().enumerate() {
            let expected = if broadcasts >> round & 1 == 1 {
                bits(&values(0, round, len))
            } else {
                expected_bits(world.into(), round, len)
            };
            for rank in &found {
                prop_assert_eq!(&rank[round], &expected);
            }
        }
    }
}

/// Calls of the heartbeat of a wait of rank 0 for rank 1, which never comes, until the abort.
fn aborted_wait(spin: Duration) -> (u64, GroupError) {
    let shape = shape(2, 8);
    let group = create(&shape);
    let beats = Arc::new(AtomicU64::new(0));
    let heartbeat = Box::new({
        let beats = Arc::clone(&beats);
        move || {
            beats.fetch_add(1, Ordering::Relaxed);
        }
    });
    let policy = WaitPolicy { spin, interval: INTERVAL, heartbeat };
    let mut member = GroupMember::new(&open(&group, &shape, 0), policy).unwrap();
    let error = thread::scope(|scope| {
        let waiting = scope.spawn(move || member.all_reduce(&mut [1.0]).unwrap_err());
        let start = Instant::now();
        while beats.load(Ordering::Relaxed) < 3 {
            assert!(start.elapsed() < DEADLINE, "no heartbeat");
            thread::yield_now();
        }
        assert_eq!(group.waits(), [Some(Rank(1)), None]);
        group.abort().unwrap();
        waiting.join().unwrap()
    });
    assert_eq!(group.waits(), [None, None]);
    (beats.load(Ordering::Relaxed), error)
}

#[test]
fn a_waiting_rank_beats_shows_for_whom_it_waits_and_sees_the_abort() {
    for spin in [Duration::ZERO, Duration::from_micros(50)] {
        let (beats, error) = aborted_wait(spin);
        assert!(beats >= 3);
        assert!(matches!(error, GroupError::Aborted), "{error}");
    }
}

#[test]
fn a_rank_that_sleeps_long_is_rung_by_the_abort() {
    let shape = shape(2, 8);
    let group = create(&shape);
    let policy =
        WaitPolicy { spin: Duration::ZERO, interval: DEADLINE, heartbeat: Box::new(|| ()) };
    let mut member = GroupMember::new(&open(&group, &shape, 1), policy).unwrap();
    let start = Instant::now();
    thread::scope(|scope| {
        let waiting = scope.spawn(move || member.all_reduce(&mut [1.0]).unwrap_err());
        while group.waits()[1].is_none() {
            thread::yield_now();
        }
        group.abort().unwrap();
        assert!(matches!(waiting.join().unwrap(), GroupError::Aborted));
    });
    assert!(start.elapsed() < DEADLINE, "the abort rang nobody");
}

#[test]
fn an_aborted_group_exchanges_nothing_more() {
    let shape = shape(2, 8);
    let group = create(&shape);
    group.abort().unwrap();
    let mut first = member(&group, &shape, 0);
    assert!(matches!(first.all_reduce(&mut [1.0]), Err(GroupError::Aborted)));
    assert!(matches!(first.broadcast(&mut [1]), Err(GroupError::Aborted)));
    assert!(first.all_reduce(&mut []).is_ok(), "nothing to exchange");
}

/// Words near each other, so that both sound and corrupt distances come up, and far ones.
fn near() -> impl Strategy<Value = u64> {
    prop_oneof![0..6u64, u64::MAX - 3..=u64::MAX, any::<u64>()]
}

/// Stores `words` wherever rank 1 may store.
fn scribble(control: &Control, words: [u64; 7]) {
    let rank = &control.ranks[1];
    let [epoch, even, odd, exchange, log, waits_for, cursor] = words;
    let operations: &[_; PARITIES] = &rank.published.operations;
    for (word, value) in [
        (&rank.published.epoch, epoch),
        (&operations[0], even),
        (&operations[1], odd),
        (&rank.sleep.exchange, exchange),
        (&rank.sleep.log, log),
        (&rank.sleep.waits_for, waits_for),
        (&rank.log_cursor.value, cursor),
    ] {
        word.store(value, Ordering::Relaxed);
    }
}

proptest! {
    #[test]
    fn any_words_of_another_rank_are_bounded(words in prop::array::uniform7(near())) {
        let shape = shape(2, 8);
        let group = Arc::new(create(&shape));
        let map = open(&group, &shape, 0);
        scribble(map.control(), words);
        let waits_for = (1..=2).contains(&words[5]).then(|| Rank(words[5] as u16 - 1));
        prop_assert_eq!(group.waits(), [None, waits_for]);
        let policy = || {
            let group = Arc::clone(&group);
            let heartbeat = Box::new(move || group.abort().unwrap());
            WaitPolicy { spin: Duration::ZERO, interval: Duration::from_millis(1), heartbeat }
        };

        // Three pieces need three epochs, and the other rank stands still.
        let sum = GroupMember::new(&map, policy()).unwrap().all_reduce(&mut [1.0; 20]);
        prop_assert!(!matches!(sum, Ok(()) | Err(GroupError::Doorbell(_))), "{sum:?}");

        let mut plans = PlanWriter::new(&map, policy()).unwrap();
        let published = plans.publish(&[1; 200]).and_then(|_| plans.publish(&[2; 200]));
        prop_assert!(
            matches!(published, Err(GroupError::Corrupt { .. } | GroupError::Aborted)),
            "{published:?}"
        );
    }
}
