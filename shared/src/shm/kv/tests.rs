use half::bf16;

use super::*;
use crate::shm::arena::ArenaMap;

#[test]
fn pages_outlive_the_worker_that_wrote_them() {
    let segment = MemfdSegment::create("sepal-test-kv", 4096 * 3).unwrap();
    let mut first = KvMap::map(&segment).unwrap();
    first.page_mut::<f32>(1024, 2).unwrap().fill(2.5);
    drop(first);

    let second = KvMap::map(&segment).unwrap();
    assert_eq!(second.page::<f32>(1024, 2).unwrap(), [2.5; 1024]);
    assert_eq!(second.page::<f32>(1024, 1).unwrap(), [0.0; 1024]);
}

#[test]
fn a_second_worker_waits_for_the_end_of_the_first() {
    let segment = MemfdSegment::create("sepal-test-kv", 4096).unwrap();
    let first = KvMap::map(&segment).unwrap();
    assert!(matches!(KvMap::map(&segment), Err(SegmentError::Busy(_))));
    assert!(matches!(ArenaMap::map(&segment), Err(SegmentError::Busy(_))));
    drop(first);
    assert!(KvMap::map(&segment).is_ok());
}

#[test]
fn pages_beyond_the_pool_do_not_exist() {
    let segment = MemfdSegment::create("sepal-test-kv", 100).unwrap();
    let mut kv = KvMap::map(&segment).unwrap();

    assert_eq!(kv.values::<bf16>().len(), 50);
    assert_eq!(kv.values_mut::<f64>().len(), 12);
    assert!(kv.page::<bf16>(16, 2).is_some());
    assert!(kv.page::<bf16>(16, 3).is_none());
    assert!(kv.page::<bf16>(usize::MAX, 2).is_none());
    assert!(kv.page_mut::<bf16>(2, usize::MAX / 2).is_none());
    assert!(kv.page::<bf16>(0, 0).is_none());
}
