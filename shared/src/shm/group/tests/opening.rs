//! Making and opening the memory of a group.

use std::fs::File;
use std::os::fd::OwnedFd;

use super::super::layout::GROUP_MAGIC;
use super::*;
use crate::shm::layout::LAYOUT_VERSION;
use crate::shm::segment::{SegmentError, SmallSegment};

fn try_open(group: &GroupOwner, shape: &GroupShape, rank: u16) -> GroupMapError {
    let (segment, bells) = (group.try_clone().unwrap(), group.doorbells().unwrap());
    GroupMap::open(segment, bells, shape, Rank(rank)).unwrap_err()
}

#[test]
fn shapes_are_bounded() {
    let sound = shape(2, 8);
    let shapes = [
        GroupShape { world_size: WorldSize(1), ..sound },
        GroupShape { world_size: WorldSize(17), ..sound },
        GroupShape { exchange_values: 0, ..sound },
        GroupShape { exchange_values: MAX_EXCHANGE_VALUES + 1, ..sound },
        GroupShape { exchange_values: usize::MAX, ..sound },
        GroupShape { log_bytes: 8, ..sound },
        GroupShape { log_bytes: 20, ..sound },
        GroupShape { log_bytes: MAX_LOG_BYTES + 8, ..sound },
    ];
    let group = create(&sound);
    for shape in shapes {
        let refused = GroupOwner::create("sepal-test-group", &shape);
        assert!(matches!(refused, Err(GroupMapError::Shape(_))), "{shape:?}");
        assert!(matches!(try_open(&group, &shape, 0), GroupMapError::Shape(_)), "{shape:?}");
    }
}

#[test]
fn the_largest_shape_has_a_size() {
    let largest = GroupShape {
        world_size: WorldSize(16),
        exchange_values: MAX_EXCHANGE_VALUES,
        log_bytes: MAX_LOG_BYTES,
        ..shape(2, 8)
    };
    assert_eq!(largest.check(), Ok(()));
    // Buffers of the processors, those of the devices with their flags, and the log.
    let (buffers, flags) = (32 * (16 << 20), 16 * DEVICE_FLAG_BYTES);
    assert_eq!(largest.segment_bytes(), 8192 + 2 * buffers + flags + (64 << 20));
}

#[test]
fn the_group_of_another_time_or_shape_is_refused() {
    let made = shape(2, 8);
    let group = create(&made);
    // The same size in bytes.
    for shape in [
        GroupShape { group: GroupId(5), ..made },
        GroupShape { generation: Generation(3), ..made },
        GroupShape { exchange_values: 9, ..made },
        GroupShape { log_bytes: 264, ..made },
    ] {
        assert_eq!(shape.segment_bytes(), made.segment_bytes());
        let error = try_open(&group, &shape, 0);
        assert!(matches!(error, GroupMapError::Stale { found: [4, 2, 2, 8, 256], .. }), "{error}");
    }
    let error = try_open(&group, &GroupShape { exchange_values: 5000, ..made }, 0);
    let GroupMapError::Segment(SegmentError::WrongSize { .. }) = error else { panic!("{error}") };
}

#[test]
fn a_segment_with_something_else_is_no_group() {
    let shape = shape(2, 8);
    let group = create(&shape);
    let segment = SmallSegment::create("sepal-test-group", shape.segment_bytes()).unwrap();
    let (fd, bells) = (segment.try_clone().unwrap(), group.doorbells().unwrap());
    let error = GroupMap::open(fd, bells, &shape, Rank(0)).unwrap_err();
    assert!(matches!(error, GroupMapError::NoGroup { magic: 0, version: 0 }), "{error}");

    let map = open(&group, &shape, 1);
    map.control().header.version.store(LAYOUT_VERSION + 1, Ordering::Relaxed);
    let error = try_open(&group, &shape, 0);
    let GroupMapError::NoGroup { magic: GROUP_MAGIC, version } = error else { panic!("{error}") };
    assert_eq!(version, LAYOUT_VERSION + 1);
}

#[test]
fn ranks_and_doorbells_must_fit() {
    let shape = shape(2, 8);
    let group = create(&shape);
    assert!(matches!(try_open(&group, &shape, 2), GroupMapError::BadRank { rank: Rank(2), .. }));
    let (fd, mut bells) = (group.try_clone().unwrap(), group.doorbells().unwrap());
    bells.pop();
    let error = GroupMap::open(fd, bells, &shape, Rank(0)).unwrap_err();
    assert!(matches!(error, GroupMapError::BadRank { doorbells: 1, .. }), "{error}");

    let files = || OwnedFd::from(File::open("/dev/null").unwrap());
    let fd = group.try_clone().unwrap();
    let error = GroupMap::open(fd, vec![files(), files()], &shape, Rank(0)).unwrap_err();
    assert!(matches!(error, GroupMapError::Doorbell(_)), "{error}");

    let map = open(&group, &shape, 0);
    assert!(map.ring(Rank(2)).is_err());
}

#[test]
fn nobody_can_change_the_size_of_the_segment() {
    let group = create(&shape(2, 8));
    let segment = group.try_clone().unwrap();
    assert_eq!(nix::unistd::ftruncate(&segment, 0), Err(nix::errno::Errno::EPERM));
}

#[test]
fn no_two_buffers_and_no_log_share_bytes() {
    let shape = shape(3, 5);
    let group = create(&shape);
    let maps = [0, 1, 2].map(|rank| open(&group, &shape, rank));
    let byte = |rank: usize, parity: usize| (1 + rank * PARITIES + parity) as u8;
    for (rank, map) in maps.iter().enumerate() {
        map.log().iter().for_each(|word| word.value.store(u64::MAX, Ordering::Relaxed));
        (0..PARITIES).for_each(|parity| map.write(parity, 0, &[byte(rank, parity); 20]));
    }
    for (rank, parity) in [0, 1, 2].into_iter().flat_map(|rank| [(rank, 0), (rank, 1)]) {
        let mut found = [0; 20];
        maps[2 - rank].read(rank, parity, 0, &mut found);
        assert_eq!(found, [byte(rank, parity); 20]);
    }
    let log: Vec<u64> =
        maps[0].log().iter().map(|word| word.value.load(Ordering::Relaxed)).collect();
    assert_eq!(log, [u64::MAX; 32]);
    assert_eq!(maps[0].control().log_tail.value.load(Ordering::Relaxed), 0);
}

#[test]
#[should_panic(expected = "outside of an exchange buffer")]
fn no_copy_leaves_its_buffer() {
    let shape = shape(2, 5);
    let group = create(&shape);
    open(&group, &shape, 0).read(1, 0, 4, &mut [0; 17]);
}

#[test]
fn a_device_finds_its_words_and_the_memory_of_all_ranks() {
    let shape = shape(3, 8);
    let group = create(&shape);
    let [first, area] = [0, 1].map(|rank| DeviceArea::new(open(&group, &shape, rank)));
    let (start, bytes) = area.words();
    let [aborted, waits_for, misled] = area.word_offsets();
    let store = |offset: usize, value: u64| {
        assert!(offset.is_multiple_of(8) && offset + 8 <= bytes);
        let word = start.as_ptr().wrapping_add(offset).cast::<u64>();
        // SAFETY: inside the words, which are atomics, as a device writes them.
        unsafe { word.write_volatile(value) };
    };
    assert_eq!(area.check().map_err(|e| e.to_string()), Ok(()));
    store(waits_for, 3);
    assert_eq!(group.waits(), [None, Some(Rank(2)), None]);
    store(misled, 1);
    assert!(matches!(area.check(), Err(GroupError::Misled { rank: Rank(0) })));
    store(misled, u64::MAX);
    assert!(matches!(area.check(), Err(GroupError::Misled { .. })));
    store(misled, 0);
    store(aborted, 1);
    assert!(matches!(area.check(), Err(GroupError::Aborted)));
    assert!(matches!(first.check(), Err(GroupError::Aborted)));

    let (memory, bytes) = area.exchange_memory();
    assert_eq!(bytes, 3 * shape.device_bytes());
    assert_eq!(shape.device_bytes(), DEVICE_FLAG_BYTES + 2 * 4096);
    // SAFETY: inside the memory, of which only the devices of these ranks have addresses.
    let words = unsafe { std::slice::from_raw_parts(memory.as_ptr(), bytes) };
    assert!(words.iter().all(|byte| *byte == 0), "flags begin at 0");
}
