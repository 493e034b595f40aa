use proptest::prelude::*;

use super::*;

fn segment() -> MemfdSegment {
    MemfdSegment::create("sepal-test-sessions", SESSIONS_BYTES).unwrap()
}

fn again(segment: &MemfdSegment) -> MemfdSegment {
    MemfdSegment::from_fd("sepal-test-sessions", segment.try_clone().unwrap(), SESSIONS_BYTES)
        .unwrap()
}

#[test]
fn records_outlive_their_mapping_and_one_process_maps_them() {
    let segment = segment();
    let records = SessionRecords::map(&segment).unwrap();
    assert!((0..SESSION_RECORDS).all(|slot| records.read(slot).is_none()));
    for round in 0..5u8 {
        records.write(3, &vec![round; 100 + usize::from(round)]).unwrap();
        records.write(SESSION_RECORDS - 1, &[]).unwrap();
    }
    assert!(matches!(SessionRecords::map(&again(&segment)), Err(SegmentError::Busy(_))));
    drop(records);
    let records = SessionRecords::map(&again(&segment)).unwrap();
    assert_eq!(records.read(3), Some(vec![4; 104]));
    assert_eq!(records.read(SESSION_RECORDS - 1), Some(Vec::new()));
    records.clear(3);
    assert_eq!(records.read(3), None);
    assert_eq!(records.read(SESSION_RECORDS), None);
    let long = vec![0; RECORD_BYTES + 1];
    assert_eq!(records.write(3, &long), Err(TooLong(long.len())));
    records.write(3, &long[1..]).unwrap();
    assert_eq!(records.read(3).map(|record| record.len()), Some(RECORD_BYTES));
}

#[test]
fn records_of_another_version_are_forgotten() {
    let segment = segment();
    let records = SessionRecords::map(&segment).unwrap();
    records.write(0, b"old").unwrap();
    records.store(8, VERSION + 1);
    drop(records);
    assert_eq!(SessionRecords::map(&segment).unwrap().read(0), None);
}

/// The stores of a write, in order, as [`SessionRecords::write`] makes them: a process that dies
/// after any of them leaves the record before.
#[test]
fn a_death_between_any_two_stores_leaves_the_record_before() {
    for done in 0..=4 {
        let records = SessionRecords::map(&segment()).unwrap();
        records.write(7, b"before").unwrap();
        let number = 2;
        let copy = copy_offset(7, number).unwrap();
        let record = b"the next one";
        let stores: [&dyn Fn(); 4] = [
            &|| records.store(copy, number),
            &|| records.store(copy + 8, record.len() as u64),
            &|| records.store(copy + 16, checksum(number, record)),
            &|| records.copy_in(copy + COPY_HEADER, record),
        ];
        stores.iter().take(done).for_each(|store| store());
        assert_eq!(records.read(7).as_deref(), Some(b"before".as_slice()), "{done} stores");
        records.store(slot_offset(7).unwrap(), number);
        let expected = (done == 4).then_some(record.to_vec());
        assert_eq!(records.read(7), expected, "{done} stores and a damaged number");
    }
}

proptest! {
    #[test]
    fn a_damaged_record_is_dropped_or_unharmed(
        record in prop::collection::vec(any::<u8>(), 1..200), at in 0usize..(COPY_HEADER + 200), bit in 0u8..8,
    ) {
        let records = SessionRecords::map(&segment()).unwrap();
        records.write(1, &record).unwrap();
        let copy = copy_offset(1, 1).unwrap();
        let mut byte = [0];
        records.copy_out(copy + at, &mut byte).unwrap();
        records.copy_in(copy + at, &[byte[0] ^ (1 << bit)]);
        let in_use = at < 24 || (COPY_HEADER..COPY_HEADER + record.len()).contains(&at);
        prop_assert_eq!(records.read(1), (!in_use).then_some(record));
    }
}
