use proptest::prelude::*;
use shared::job::{SlotRef, WorkKind};
use testkit::jobs::job_body;

use super::*;

fn body() -> JobBody {
    let slot = SlotRef { offset: 64, len: 16 };
    JobBody { input: slot, output: slot, ..job_body(WorkKind::Forward, 1, 1, 2) }
}

type Write<'a> = &'a dyn Fn(&mut Vec<u8>);

/// One record of each kind.
fn records() -> Vec<Vec<u8>> {
    let member = |key, position| UnitMember { job: JobKey(key), position, pieces: 1..3 };
    let a_unit = Unit { block: 7, count: 2, members: vec![member(3, 1), member(u64::MAX, 0)] };
    let writers: [Write<'_>; 4] = [
        &|out| link(Generation(9), out),
        &|out| begin(JobKey(3), 4, JobId(5), &body(), out),
        &|out| unit(&a_unit, out),
        &|out| remove(JobKey(u64::MAX - 1), out),
    ];
    let written = |write: Write<'_>| {
        let mut bytes = Vec::new();
        write(&mut bytes);
        bytes
    };
    writers.into_iter().map(written).collect()
}

#[test]
fn what_is_written_is_read() {
    let (records, body) = (records(), body().encode());
    let found: Vec<_> = records.iter().map(|bytes| Record::decode(bytes).unwrap()).collect();
    let member = |key, position| UnitMember { job: JobKey(key), position, pieces: 1..3 };
    let expected = [
        Record::Link { netd_generation: Generation(9) },
        Record::Begin(Begin { key: JobKey(3), number: 4, id: JobId(5), body: &body }),
        Record::Unit(Unit { block: 7, count: 2, members: vec![member(3, 1), member(u64::MAX, 0)] }),
        Record::Drop(JobKey(u64::MAX - 1)),
    ];
    assert_eq!(found, expected);
}

#[test]
fn records_cut_short_and_with_bytes_left_over_are_malformed() {
    for bytes in records() {
        let kind = u32::from(bytes[0]);
        // The body of a job and the members of a unit end where the record does.
        let shortest = match kind {
            BEGIN => 28,
            UNIT => 12,
            _ => bytes.len(),
        };
        let member_bytes = 20;
        for len in 0..bytes.len() {
            let is_whole = kind == BEGIN && len >= shortest
                || kind == UNIT && len >= shortest && (len - shortest) % member_bytes == 0;
            assert_eq!(Record::decode(&bytes[..len]).is_ok(), is_whole, "{len} bytes of {kind}");
        }
        let longer = [&bytes[..], &[0]].concat();
        assert_eq!(Record::decode(&longer).is_ok(), kind == BEGIN, "kind {kind} and a byte");
    }
    assert_eq!(Record::decode(&[]), Err(Malformed { kind: 0, bytes: 0 }));
    assert_eq!(Record::decode(&[5, 0, 0, 0]), Err(Malformed { kind: 5, bytes: 4 }));
}

proptest! {
    #[test]
    fn no_bytes_panic(bytes in prop::collection::vec(any::<u8>(), 0..200), kind in 0u8..8) {
        let _ = Record::decode(&bytes);
        let _ = Record::decode(&[&[kind, 0, 0, 0], &bytes[..]].concat());
    }
}
