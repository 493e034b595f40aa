//! The plan log between threads.

use super::*;
use crate::shm::doorbell::Doorbell;
use crate::shm::ring::Armed;

const SHORT: Duration = Duration::from_millis(1);

fn shape_with_log(world: u16, log_bytes: usize) -> GroupShape {
    GroupShape { log_bytes, ..shape(world, 1) }
}

fn writer(group: &GroupOwner, shape: &GroupShape) -> PlanWriter {
    PlanWriter::new(&open(group, shape, 0), policy(Duration::ZERO)).unwrap()
}

fn reader(group: &GroupOwner, shape: &GroupShape, rank: u16) -> PlanReader {
    PlanReader::new(&open(group, shape, rank), policy(Duration::ZERO)).unwrap()
}

fn read(reader: &mut PlanReader) -> (Vec<u8>, PlanPosition) {
    let mut record = Vec::new();
    let start = Instant::now();
    loop {
        assert!(start.elapsed() < DEADLINE, "no record");
        if let Some(position) = reader.next(&mut record, DEADLINE).unwrap() {
            return (record, position);
        }
    }
}

fn record(number: usize, len: usize) -> Vec<u8> {
    (0..len).map(|index| (number * 31 + index * 7) as u8).collect()
}

proptest! {
    #![proptest_config(cases(24))]

    #[test]
    fn every_follower_reads_every_record_in_order(
        world in 2u16..=8,
        log_words in 2usize..40,
        fills in prop::collection::vec(0.0f64..=1.0, 1..40),
    ) {
        let shape = shape_with_log(world, log_words * 8);
        let group = create(&shape);
        let limit = (log_words - 1) * 8;
        let records: Vec<Vec<u8>> = fills.iter().enumerate()
            .map(|(number, fill)| record(number, (fill * limit as f64) as usize)).collect();
        let found: Vec<_> = thread::scope(|scope| {
            let followers: Vec<_> = (1..world).map(|rank| {
                let (mut reader, records) = (reader(&group, &shape, rank), &records);
                scope.spawn(move || records.iter().map(|_| {
                    let (record, position) = read(&mut reader);
                    reader.done(position).unwrap();
                    record
                }).collect::<Vec<_>>())
            }).collect();
            let mut writer = writer(&group, &shape);
            for record in &records {
                writer.publish(record).unwrap();
            }
            followers.into_iter().map(|follower| follower.join().unwrap()).collect()
        });
        for follower in found {
            prop_assert_eq!(&follower, &records);
        }
    }
}

#[test]
fn a_reader_without_records_comes_back_in_time_or_when_rung() {
    let shape = shape_with_log(2, 64);
    let group = create(&shape);
    let mut reader = reader(&group, &shape, 1);
    let mut record = vec![1];
    assert_eq!(reader.next(&mut record, SHORT).unwrap(), None);
    assert_eq!(reader.next(&mut record, Duration::ZERO).unwrap(), None);
    assert!(record.is_empty());

    let start = Instant::now();
    let leader = open(&group, &shape, 0);
    leader.ring(Rank(1)).unwrap();
    assert_eq!(reader.next(&mut record, 2 * DEADLINE).unwrap(), None);
    assert!(start.elapsed() < DEADLINE, "the ring woke nobody");
    assert_eq!(group.waits(), [None, None], "an idle follower waits for no one");
}

#[test]
fn an_idle_reader_beats() {
    let shape = shape_with_log(2, 64);
    let group = create(&shape);
    let beats = Arc::new(AtomicU64::new(0));
    let heartbeat = Box::new({
        let beats = Arc::clone(&beats);
        move || {
            beats.fetch_add(1, Ordering::Relaxed);
        }
    });
    let policy = WaitPolicy { spin: Duration::ZERO, interval: SHORT, heartbeat };
    let mut reader = PlanReader::new(&open(&group, &shape, 1), policy).unwrap();
    let outcome = thread::scope(|scope| {
        let reading = scope.spawn(move || reader.next(&mut Vec::new(), 2 * DEADLINE));
        let start = Instant::now();
        while beats.load(Ordering::Relaxed) < 2 {
            assert!(start.elapsed() < DEADLINE, "no heartbeats");
            thread::yield_now();
        }
        open(&group, &shape, 0).ring(Rank(1)).unwrap();
        reading.join().unwrap()
    });
    assert_eq!(outcome.unwrap(), None);
}

#[test]
fn rank_0_waits_for_the_slowest_follower_until_the_abort() {
    let shape = shape_with_log(3, 32);
    let group = create(&shape);
    let (mut fast, mut slow) = (reader(&group, &shape, 1), reader(&group, &shape, 2));
    let mut writer = writer(&group, &shape);
    let first = writer.publish(&record(0, 24)).unwrap();
    assert!(!writer.is_done(first).unwrap());
    for reader in [&mut fast, &mut slow] {
        assert_eq!(read(reader), (record(0, 24), first));
    }
    fast.done(first).unwrap();
    assert!(!writer.is_done(first).unwrap());

    thread::scope(|scope| {
        let publishing = scope.spawn(|| {
            let second = writer.publish(&record(1, 8)).unwrap();
            assert!(writer.is_done(first).unwrap());
            writer.wait_done(second)
        });
        while group.waits()[0] != Some(Rank(2)) {
            thread::yield_now();
        }
        slow.done(first).unwrap();
        assert_eq!(read(&mut slow).0, record(1, 8));
        let (last, second) = read(&mut fast);
        assert_eq!(last, record(1, 8));
        fast.done(second).unwrap();
        while group.waits()[0] != Some(Rank(2)) {
            thread::yield_now();
        }
        group.abort().unwrap();
        assert!(matches!(publishing.join().unwrap(), Err(GroupError::Aborted)));
    });
    assert!(matches!(slow.next(&mut Vec::new(), DEADLINE), Err(GroupError::Aborted)));
    assert!(matches!(writer.publish(&[]), Err(GroupError::Aborted)));
}

#[test]
fn rank_0_sleeps_on_another_bell_until_the_slowest_follower_is_done() {
    let shape = shape_with_log(3, 64);
    let group = create(&shape);
    let (mut fast, mut slow) = (reader(&group, &shape, 1), reader(&group, &shape, 2));
    let (mut writer, bell) = (writer(&group, &shape), Doorbell::new().unwrap());
    writer.join(&bell).unwrap();
    let position = writer.publish(&record(0, 24)).unwrap();
    assert_eq!(writer.arm(position).unwrap(), Armed::Sleep);
    assert_eq!(group.waits()[0], Some(Rank(1)));
    for (reader, next) in [(&mut fast, Armed::Sleep), (&mut slow, Armed::Ready)] {
        assert!(!bell.wait(SHORT).unwrap(), "nobody is done");
        let (_, position) = read(reader);
        reader.done(position).unwrap();
        assert!(bell.wait(DEADLINE).unwrap());
        writer.disarm();
        assert_eq!(writer.arm(position).unwrap(), next);
    }
    assert_eq!(group.waits()[0], None);

    let position = writer.publish(&record(1, 8)).unwrap();
    assert_eq!(writer.arm(position).unwrap(), Armed::Sleep);
    assert!(writer.check_abort().is_ok());
    group.abort().unwrap();
    assert!(bell.wait(DEADLINE).unwrap());
    writer.disarm();
    assert!(matches!(writer.check_abort(), Err(GroupError::Aborted)));
    assert!(matches!(writer.arm(position), Err(GroupError::Aborted)));
}

#[test]
fn a_record_longer_than_the_log_is_refused_and_costs_nothing() {
    let shape = shape_with_log(2, 32);
    let group = create(&shape);
    let (mut writer, mut reader) = (writer(&group, &shape), reader(&group, &shape, 1));
    let error = writer.publish(&[0; 25]).unwrap_err();
    assert!(matches!(error, GroupError::TooLong { bytes: 25, limit_bytes: 24 }), "{error}");
    writer.publish(&record(1, 24)).unwrap();
    let (found, position) = read(&mut reader);
    reader.done(position).unwrap();
    assert_eq!(found, record(1, 24));
    assert!(writer.is_done(position).unwrap());
}

#[test]
fn rank_0_writes_and_the_others_read() {
    let shape = shape_with_log(2, 32);
    let group = create(&shape);
    assert!(PlanWriter::new(&open(&group, &shape, 1), policy(SHORT)).is_err());
    assert!(PlanReader::new(&open(&group, &shape, 0), policy(SHORT)).is_err());
}

proptest! {
    #[test]
    fn any_words_of_rank_0_are_bounded(
        tail in near(), len in prop_oneof![0u64..40, any::<u64>()], is_done in any::<bool>(),
    ) {
        let shape = shape_with_log(2, 32);
        let group = create(&shape);
        let (mut writer, mut reader) = (writer(&group, &shape), reader(&group, &shape, 1));
        writer.publish(&[0; 8]).unwrap();
        let (_, position) = read(&mut reader);
        if is_done {
            reader.done(position).unwrap();
        }
        let leader = open(&group, &shape, 0);
        leader.control().log_tail.value.store(tail, Ordering::Relaxed);
        leader.log()[2].value.store(len, Ordering::Relaxed);

        let mut record = Vec::new();
        let outcome = reader.next(&mut record, Duration::ZERO);

        let (available, done) = (tail.wrapping_sub(2), if is_done { 2 } else { 0 });
        if tail < 2 || tail.wrapping_sub(done) > 4 {
            let is_refused = matches!(outcome, Err(GroupError::Corrupt { what: "log tail", .. }));
            prop_assert!(is_refused);
        } else if available == 0 {
            prop_assert_eq!(outcome.unwrap(), None);
        } else if len.div_ceil(8) >= available {
            let is_refused = matches!(outcome, Err(GroupError::Corrupt { what: "record length", .. }));
            prop_assert!(is_refused);
        } else {
            prop_assert!(outcome.unwrap().is_some());
            prop_assert_eq!(record.len() as u64, len);
        }
    }
}
