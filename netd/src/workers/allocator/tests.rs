use proptest::prelude::*;

use super::*;

/// 4 small slots of 128 bytes, 1024 bytes for larger short steps, then 4096 bytes of bulk.
fn small_arena() -> ArenaAllocator {
    ArenaAllocator::new(ArenaPlan::new(BULK_START + 4096, 4, 100, 1030).unwrap())
}

/// Where the region of short steps and bulk begin.
const SHORT_START: u64 = 4 * 128;
const BULK_START: u64 = SHORT_START + 1024;

#[test]
fn plans_without_room_are_refused() {
    for (total, slots, bytes) in
        [(0, 1, 64), (128, 2, 64), (191, 2, 64), (1000, 0, 64), (1000, 1, 0), (1000, 1, u64::MAX)]
    {
        assert!(ArenaPlan::new(total, slots, bytes, 0).is_err(), "{total} {slots} {bytes}");
    }
    assert_eq!(ArenaPlan::new(192, 2, 64, 63).unwrap().bulk_bytes, 64);
    assert!(ArenaPlan::new(192, 2, 64, 64).is_err(), "nothing left for bulk");
    assert!(ArenaPlan::new(192, 2, 64, 1 << 40).is_err());
}

#[test]
fn bulk_never_takes_what_is_kept_for_short_steps() {
    let mut arena = small_arena();
    let all = arena.allocate(Region::Bulk, 4096).unwrap();
    assert_eq!(all.offset(), BULK_START);

    let exhausted = AllocError::Exhausted { region: Region::Bulk, len: 1, free_bytes: 0 };
    assert_eq!(arena.allocate(Region::Bulk, 1), Err(exhausted));
    for _ in 0..4 {
        assert!(arena.allocate(Region::Small, 128).unwrap().offset() < SHORT_START);
    }
    let short = arena.allocate(Region::Short, 1024).unwrap();
    assert_eq!(short.offset(), SHORT_START);
    let exhausted = AllocError::Exhausted { region: Region::Short, len: 1, free_bytes: 0 };
    assert_eq!(arena.allocate(Region::Short, 1), Err(exhausted));
    assert!(matches!(
        arena.allocate(Region::Small, 1),
        Err(AllocError::Exhausted { region: Region::Small, .. })
    ));
}

#[test]
fn requests_that_never_fit_say_so() {
    let mut arena = small_arena();
    assert_eq!(arena.allocate(Region::Small, 0), Err(AllocError::Empty));
    assert_eq!(arena.allocate(Region::Bulk, 0), Err(AllocError::Empty));
    assert!(matches!(
        arena.allocate(Region::Small, 129),
        Err(AllocError::TooLarge { max_bytes: 128, .. })
    ));
    assert!(matches!(
        arena.allocate(Region::Bulk, 4097),
        Err(AllocError::TooLarge { max_bytes: 4096, .. })
    ));
    assert!(matches!(arena.allocate(Region::Bulk, u64::MAX), Err(AllocError::TooLarge { .. })));
}

#[test]
fn freeing_twice_or_elsewhere_is_refused() {
    let mut arena = small_arena();
    let (small, bulk) =
        (arena.allocate(Region::Small, 10).unwrap(), arena.allocate(Region::Bulk, 10).unwrap());
    arena.free(small).unwrap();
    arena.free(bulk).unwrap();
    assert_eq!(arena.free(small), Err(NotInUse { offset: 0, len: 10 }));
    assert_eq!(arena.free(bulk), Err(NotInUse { offset: BULK_START, len: 10 }));

    // The same bytes, handed out again: the old slots still free nothing.
    let (small_again, bulk_again) =
        (arena.allocate(Region::Small, 10).unwrap(), arena.allocate(Region::Bulk, 10).unwrap());
    assert_eq!((small_again.offset(), bulk_again.offset()), (0, BULK_START));
    assert!(arena.free(small).is_err());
    assert!(arena.free(bulk).is_err());

    let mut other = small_arena();
    assert!(other.free(bulk_again).is_err());
    assert_eq!(arena.slots_in_use(), 2);
}

#[test]
fn neighbours_merge_whatever_the_order_of_frees() {
    for order in [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]] {
        let mut arena = small_arena();
        let slots = [1000, 2000, 900].map(|len| arena.allocate(Region::Bulk, len).unwrap());
        assert!(arena.allocate(Region::Bulk, 128).is_err());
        for index in order {
            arena.free(slots[index]).unwrap();
        }
        assert!(arena.allocate(Region::Bulk, 4096).is_ok(), "freed in order {order:?}");
    }
}

#[derive(Clone, Debug)]
enum Action {
    Small(u64),
    Short(u64),
    Bulk(u64),
    Free(prop::sample::Index),
}

fn action() -> impl Strategy<Value = Action> {
    prop_oneof![
        (1_u64..140).prop_map(Action::Small),
        (1_u64..400).prop_map(Action::Short),
        (1_u64..1500).prop_map(Action::Bulk),
        any::<prop::sample::Index>().prop_map(Action::Free),
    ]
}

/// A region as a map of its 64-byte units, in use or not.
fn longest_free_run(used: &[Slot], region: std::ops::Range<u64>) -> u64 {
    let mut units = vec![false; ((region.end - region.start) / 64) as usize];
    for slot in used.iter().filter(|slot| region.contains(&slot.offset())) {
        let first = (slot.offset() - region.start) / 64;
        for unit in first..first + slot.len().div_ceil(64) {
            units[unit as usize] = true;
        }
    }
    units.split(|&used| used).map(|run| run.len() as u64 * 64).max().unwrap_or(0)
}

proptest! {
    #[test]
    fn slots_never_overlap_and_all_memory_comes_back(
        actions in prop::collection::vec(action(), 1..200),
    ) {
        let mut arena = small_arena();
        let mut used: Vec<Slot> = Vec::new();
        for action in actions {
            let (len, slot) = match action {
                Action::Free(index) => {
                    if !used.is_empty() {
                        let slot = used.swap_remove(index.index(used.len()));
                        prop_assert_eq!(arena.free(slot), Ok(()));
                        prop_assert!(arena.free(slot).is_err());
                    }
                    continue;
                }
                Action::Small(len) => {
                    let room = used.iter().filter(|slot| slot.offset() < SHORT_START).count() < 4;
                    let slot = arena.allocate(Region::Small, len);
                    prop_assert_eq!(slot.is_ok(), room && len <= 128);
                    (len, slot)
                }
                Action::Short(len) => {
                    let room = longest_free_run(&used, SHORT_START..BULK_START) >= len;
                    let slot = arena.allocate(Region::Short, len);
                    prop_assert_eq!(slot.is_ok(), room, "first fit finds every piece");
                    (len, slot)
                }
                Action::Bulk(len) => {
                    let bulk = BULK_START..BULK_START + 4096;
                    let room = longest_free_run(&used, bulk) >= len;
                    let slot = arena.allocate(Region::Bulk, len);
                    prop_assert_eq!(slot.is_ok(), room, "first fit finds every piece");
                    (len, slot)
                }
            };
            let Ok(slot) = slot else { continue };
            prop_assert_eq!(slot.len(), len);
            prop_assert_eq!(slot.offset() % SLOT_ALIGN, 0);
            prop_assert!(slot.offset() + len <= BULK_START + 4096);
            for other in &used {
                let (end, other_end) = (slot.offset() + len, other.offset() + other.len());
                let apart = end <= other.offset() || other_end <= slot.offset();
                prop_assert!(apart, "{slot:?} overlaps {other:?}");
            }
            used.push(slot);
            prop_assert_eq!(arena.slots_in_use(), used.len());
        }
        for slot in used {
            prop_assert_eq!(arena.free(slot), Ok(()));
        }
        prop_assert_eq!(arena.free_bytes(Region::Small), 4 * 128);
        prop_assert_eq!(arena.free_bytes(Region::Short), 1024);
        prop_assert_eq!(arena.free_bytes(Region::Bulk), 4096);
        prop_assert!(arena.allocate(Region::Short, 1024).is_ok(), "free pieces were merged");
        prop_assert!(arena.allocate(Region::Bulk, 4096).is_ok(), "free pieces were merged");
    }
}
