use shared::job::WorkKind;

use super::*;

fn walk(kind: WorkKind, blocks: Range<u32>, pieces: &[usize]) -> Walk {
    Walk::new(kind, blocks.collect(), pieces.to_vec())
}

fn run(schedule: &mut Schedule, now: Instant) -> Option<(u32, Vec<JobKey>)> {
    let unit = schedule.next(now)?;
    schedule.done(&unit, Duration::from_millis(1));
    Some((unit.block, unit.members.iter().map(|m| m.job).collect()))
}

#[test]
fn decode_steps_end_with_the_unit_of_their_last_block() {
    let (mut schedule, now) = (Schedule::default(), Instant::now());
    let long = schedule.accept(walk(WorkKind::Decode, 0..2, &[1]));
    let short = schedule.accept(walk(WorkKind::Decode, 0..1, &[1]));
    schedule.accept(walk(WorkKind::Prefill, 0..1, &[100]));
    let mut ended = Vec::new();
    while let Some(unit) = schedule.next(now) {
        let ending = schedule.ending(&unit);
        let done = schedule.done(&unit, Duration::from_millis(1));
        let finished = done.iter().filter(|a| a.finished).map(|a| a.job);
        match schedule.is_empty() {
            true => assert_eq!(ending, [], "prefill is not a decode step"),
            false => assert_eq!(ending, finished.collect::<Vec<_>>()),
        }
        ended.extend(ending);
    }
    assert_eq!(ended, [short, long]);
}

#[test]
fn a_task_walks_all_pieces_of_a_block_before_the_next_block() {
    let (mut schedule, now) = (Schedule::default(), Instant::now());
    let job = schedule.accept(walk(WorkKind::Prefill, 3..5, &[100, 100, 50]));
    let mut seen = Vec::new();
    while let Some(unit) = schedule.next(now) {
        let advance = &schedule.done(&unit, Duration::from_secs(1))[0];
        assert_eq!(advance.job, job);
        seen.push((
            unit.block,
            unit.members[0].pieces.clone(),
            advance.block_done,
            advance.finished,
        ));
    }
    let expected = [
        (3, 0..1, false, false),
        (3, 1..2, false, false),
        (3, 2..3, true, false),
        (4, 0..1, false, false),
        (4, 1..2, false, false),
        (4, 2..3, true, true),
    ];
    assert_eq!(seen, expected);
    assert!(schedule.is_empty());
}

#[test]
fn a_decode_step_goes_between_two_units_of_a_prefill() {
    let (mut schedule, now) = (Schedule::default(), Instant::now());
    let prefill = schedule.accept(walk(WorkKind::Prefill, 0..2, &[100, 100]));
    assert_eq!(run(&mut schedule, now), Some((0, vec![prefill])));
    let decode = schedule.accept(walk(WorkKind::Decode, 0..2, &[1]));
    assert_eq!(run(&mut schedule, now), Some((0, vec![decode])));
    assert_eq!(run(&mut schedule, now), Some((1, vec![decode])));
    assert_eq!(run(&mut schedule, now), Some((0, vec![prefill])));
}

#[test]
fn kinds_go_in_order_and_the_oldest_of_a_kind_first() {
    let (mut schedule, now) = (Schedule::default(), Instant::now());
    let backward = schedule.accept(walk(WorkKind::Backward, 0..2, &[64]));
    let forward = schedule.accept(walk(WorkKind::Forward, 0..1, &[64]));
    let late = schedule.accept(walk(WorkKind::Prefill, 0..1, &[64]));
    let later = schedule.accept(walk(WorkKind::Prefill, 0..1, &[64]));
    let order: Vec<_> =
        std::iter::from_fn(|| run(&mut schedule, now)).map(|(_, who)| who[0]).collect();
    assert_eq!(order, [late, later, forward, backward, backward]);
}

#[test]
fn units_of_gradients_have_a_size_of_their_own() {
    let (mut schedule, now) = (Schedule::default(), Instant::now());
    let mut there_and_back = walk(WorkKind::Backward, 0..2, &[10; 40]);
    there_and_back.blocks = vec![0, 0];
    schedule.accept(there_and_back);
    let mut sizes = Vec::new();
    while let Some(unit) = schedule.next(now) {
        let pieces = unit.members[0].pieces.len();
        sizes.push((unit.members[0].position, pieces));
        // 10,000 tokens per second there, 2,000 back.
        let ms = pieces as u64 * if unit.members[0].position == 0 { 1 } else { 5 };
        schedule.done(&unit, Duration::from_millis(ms));
    }
    assert_eq!(sizes[..4], [(0, 1), (0, 18), (0, 18), (0, 3)]);
    assert_eq!(sizes[4..7], [(1, 1), (1, 3), (1, 3)]);
}

#[test]
fn a_later_decode_step_catches_up_and_shares_the_rest() {
    let (mut schedule, now) = (Schedule::default(), Instant::now());
    let first = schedule.accept(walk(WorkKind::Decode, 0..4, &[1]));
    run(&mut schedule, now);
    run(&mut schedule, now);
    let second = schedule.accept(walk(WorkKind::Decode, 0..3, &[1]));
    let units: Vec<_> = std::iter::from_fn(|| run(&mut schedule, now)).collect();
    let expected =
        [(0, vec![second]), (1, vec![second]), (2, vec![first, second]), (3, vec![first])];
    assert_eq!(units, expected);
}

#[test]
fn decode_steps_go_through_blocks_together_until_one_leaves_or_another_joins() {
    let now = Instant::now();
    let mut schedule = Schedule::new(UnitTimes {
        bulk: Duration::from_millis(2),
        decode: Duration::from_millis(4),
    });
    let next = |schedule: &mut Schedule| {
        let unit = schedule.next(now)?;
        schedule.done(&unit, Duration::from_millis(u64::from(unit.count)));
        Some((unit.block, unit.count, unit.members.len()))
    };
    // Nothing is known of the speed: block by block; then as many as the time allows.
    schedule.accept(walk(WorkKind::Decode, 0..16, &[1]));
    assert_eq!(next(&mut schedule), Some((0, 1, 1)));
    assert_eq!(next(&mut schedule), Some((1, 4, 1)));
    // One that begins later and leaves earlier, after one that waits to be joined at block 5.
    schedule.accept(walk(WorkKind::Decode, 3..8, &[1]));
    assert_eq!(next(&mut schedule), Some((3, 2, 1)));
    assert_eq!(next(&mut schedule), Some((5, 3, 2)));
    assert_eq!(next(&mut schedule), Some((8, 4, 1)));
    assert_eq!(next(&mut schedule), Some((12, 4, 1)));
    assert_eq!(next(&mut schedule), None);
}

#[test]
fn a_decode_step_is_not_overtaken_for_ever() {
    let (mut schedule, now) = (Schedule::default(), Instant::now());
    let old = schedule.accept(walk(WorkKind::Decode, 0..2, &[1]));
    run(&mut schedule, now);
    let mut units = 0;
    loop {
        schedule.accept(walk(WorkKind::Decode, 0..1, &[1]));
        units += 1;
        if run(&mut schedule, now) == Some((1, vec![old])) {
            break;
        }
        assert!(units <= OVERTAKEN_LIMIT + 1, "overtaken {units} times");
    }
}

#[test]
fn a_full_decode_unit_leaves_the_rest_for_the_next() {
    let (mut schedule, now) = (Schedule::default(), Instant::now());
    let jobs: Vec<_> =
        (0..5).map(|_| schedule.accept(walk(WorkKind::Decode, 0..1, &[DECODE_TOKENS]))).collect();
    assert_eq!(run(&mut schedule, now), Some((0, jobs[..4].to_vec())));
    assert_eq!(run(&mut schedule, now), Some((0, jobs[4..].to_vec())));
}

#[test]
fn decode_steps_without_end_do_not_hold_up_a_prefill_for_ever() {
    let (mut schedule, start) = (Schedule::default(), Instant::now());
    let prefill = schedule.accept(walk(WorkKind::Prefill, 0..1, &[64]));
    let mut decode_units = 0;
    for tick in 0..1000 {
        schedule.accept(walk(WorkKind::Decode, 0..1, &[1]));
        let (_, who) = run(&mut schedule, start + Duration::from_millis(10) * tick).unwrap();
        if who == [prefill] {
            break;
        }
        decode_units += 1;
    }
    assert_eq!(decode_units, 50, "one unit after {BULK_PATIENCE:?} at 10 ms each");
}

#[test]
fn work_behind_decode_steps_without_end_gets_an_eighth_of_the_time() {
    let (mut schedule, mut now) = (Schedule::default(), Instant::now());
    let backward = schedule.accept(walk(WorkKind::Backward, 0..2, &[64; 1000]));
    let (mut bulk, mut all) = (Duration::ZERO, Duration::ZERO);
    for _ in 0..2000 {
        schedule.accept(walk(WorkKind::Decode, 0..1, &[1]));
        let unit = schedule.next(now).unwrap();
        let is_bulk = unit.members[0].job == backward;
        let elapsed = Duration::from_millis(if is_bulk { 20 } else { 10 });
        schedule.done(&unit, elapsed);
        (now, all) = (now + elapsed, all + elapsed);
        bulk += if is_bulk { elapsed } else { Duration::ZERO };
    }
    let share = bulk.as_secs_f64() / all.as_secs_f64();
    assert!((share - 0.125).abs() < 0.01, "{share}");
}

#[test]
fn units_have_no_more_tokens_than_memory_is_planned_for() {
    let (mut schedule, now) = (Schedule::default().limited([200, 64]), Instant::now());
    let mut there_and_back = walk(WorkKind::Backward, 0..2, &[64; 8]);
    there_and_back.blocks = vec![0, 0];
    schedule.accept(there_and_back);
    let mut sizes = Vec::new();
    while let Some(unit) = schedule.next(now) {
        sizes.push(unit.members[0].pieces.len());
        schedule.done(&unit, Duration::from_micros(1));
    }
    assert_eq!(sizes[..4], [1, 3, 3, 1]);
    assert_eq!(sizes[4..], [1; 8]);
}

#[test]
fn units_grow_with_the_measured_speed_but_pieces_do_not_move() {
    let (mut schedule, now) = (Schedule::default(), Instant::now());
    schedule.accept(walk(WorkKind::Forward, 0..2, &[64; 8]));
    let first = schedule.next(now).unwrap();
    assert_eq!(first.members[0].pieces, 0..1, "one piece while the speed is not known");
    schedule.done(&first, Duration::from_millis(5));
    let second = schedule.next(now).unwrap();
    assert_eq!(second.members[0].pieces, 1..4, "three pieces of 5 ms in 20 ms, and a margin");
}

/// Tokens of units of a prefill that take `cost(number of the unit)` ms a token.
fn sizes(cost: impl Fn(usize) -> f64, units: usize) -> Vec<(usize, f64)> {
    let (mut schedule, now) = (Schedule::default(), Instant::now());
    schedule.accept(walk(WorkKind::Prefill, 0..1, &[4; 20_000]));
    (0..units)
        .map(|number| {
            let unit = schedule.next(now).unwrap();
            let tokens = 4 * unit.members[0].pieces.len();
            let ms = cost(number) * tokens as f64;
            schedule.done(&unit, Duration::from_secs_f64(1e-3 * ms));
            (tokens, ms)
        })
        .collect()
}

#[test]
fn units_of_uneven_cost_hardly_ever_take_longer_than_they_may() {
    // A token takes 0.4 to 0.5 ms; an even cost of 0.45 would allow units of 44 tokens.
    let noise = |number: usize| 0.4 + 0.1 * (number * 7919 % 101) as f64 / 100.0;
    let units = &sizes(noise, 1020)[20..];
    let late = units.iter().filter(|(_, ms)| *ms > 20.0).count();
    assert!(late <= units.len() / 100, "{late} of {}", units.len());
    let mean = units.iter().map(|(tokens, _)| *tokens).sum::<usize>() / units.len();
    assert!(mean >= 32, "{mean} tokens");
}

#[test]
fn a_unit_that_was_disturbed_makes_the_next_smaller_at_once_and_is_forgotten() {
    let disturbed = |number| if number == 50 { 1.0 } else { 0.5 };
    let units = sizes(disturbed, 100);
    assert_eq!(units[50].0, 36);
    assert!(units[51].0 <= 24, "{}", units[51].0);
    assert!(units[99].0 >= 32, "{}", units[99].0);
}
