use half::bf16;

use super::*;

fn arena(len: usize) -> (ArenaMap, ArenaMap) {
    let segment = MemfdSegment::create("sepal-test-arena", len).unwrap();
    (ArenaMap::map(&segment).unwrap(), ArenaMap::map(&segment).unwrap())
}

#[test]
fn what_one_side_writes_the_other_reads_at_any_alignment() {
    let (netd, worker) = arena(4096);
    for offset in [0, 1, 63, 4096 - 12] {
        let values = [1.5_f32, -2.0, f32::MAX];
        netd.write(offset, &values).unwrap();

        let mut copy = [0.0_f32; 3];
        worker.read(offset, &mut copy).unwrap();
        assert_eq!(copy, values);
    }
}

#[test]
fn copies_that_would_leave_the_arena_are_refused() {
    let (netd, worker) = arena(4096);
    netd.write(0, &[7_u8; 4096]).unwrap();
    for offset in [4093, 4096, 1 << 40, u64::MAX - 1] {
        let outside = OutOfBounds { offset, len: 4, segment_bytes: 4096 };
        assert_eq!(netd.write(offset, &[0_u32]), Err(outside));
        assert_eq!(worker.read(offset, &mut [0_u32]), Err(outside));
        assert_eq!(netd.write_with(offset, 4, |_| panic!("called")), Err::<(), _>(outside));
    }
    let mut all = [0_u8; 4096];
    worker.read(0, &mut all).unwrap();
    assert_eq!(all, [7; 4096]);
}

#[test]
fn conversion_in_place_stops_at_the_end_of_the_slot() {
    let (netd, worker) = arena(4096);
    let source = [1.0_f32, 2.0, 3.0, 4.0, 5.0];

    let written = netd.write_with(64, 9, |slot| {
        let first = slot.extend(source[..2].iter().map(|&value| bf16::from_f32(value)));
        let rest = slot.extend(source[2..].iter().map(|&value| bf16::from_f32(value)));
        (first, rest, slot.left_bytes())
    });

    assert_eq!(written, Ok((2, 2, 1)));
    let mut copy = [bf16::ZERO; 5];
    worker.read(64, &mut copy).unwrap();
    assert_eq!(copy.map(bf16::to_f32), [1.0, 2.0, 3.0, 4.0, 0.0]);
}

#[test]
fn a_full_slot_takes_no_value_from_the_source() {
    let (netd, _) = arena(4096);
    let mut source = 0_u32..10;
    netd.write_with(0, 8, |slot| slot.extend(source.by_ref())).unwrap();
    assert_eq!(source.next(), Some(2));
}
