use super::*;
use crate::shm::ring::PushError;

fn identity(worker_generation: u32) -> RingIdentity {
    RingIdentity {
        worker: WorkerId { group: GroupId(1), rank: Rank(2), world_size: WorldSize(4) },
        worker_generation: Generation(worker_generation),
        netd_generation: Generation(9),
    }
}

fn pair(worker_generation: u32) -> RingPair {
    RingPair::create("sepal-test-rings", &identity(worker_generation)).unwrap()
}

fn open(pair: &RingPair) -> RingPair {
    RingPair::open(pair.try_clone().unwrap(), &identity(1)).unwrap()
}

#[test]
fn both_ends_talk_in_both_directions() {
    let owner = pair(1);
    let (mut submit, mut completions) = open(&owner).netd_end();
    let (mut jobs, mut complete) = open(&owner).worker_end();

    submit.push([1; 8]).unwrap();
    submit.push([2; 8]).unwrap();
    assert_eq!(jobs.pop(), Ok(Some([1; 8])));
    assert_eq!(jobs.pop(), Ok(Some([2; 8])));
    complete.push([20; 8]).unwrap();
    assert_eq!(completions.pop(), Ok(Some([20; 8])));
    assert_eq!(completions.pop(), Ok(None));
}

#[test]
fn jobs_within_the_rings_never_find_the_completion_ring_full() {
    let owner = pair(1);
    let (mut submit, _completions) = open(&owner).netd_end();
    let (mut jobs, mut complete) = open(&owner).worker_end();

    let mut accepted = 0;
    while submit.push([accepted; 8]) != Err(PushError::Full([accepted; 8])) {
        accepted += 1;
    }
    for _ in 0..accepted {
        let job = jobs.pop().unwrap().unwrap();
        assert_eq!(complete.push(job), Ok(()));
    }
}

#[test]
fn stale_generations_are_refused() {
    let owner = pair(2);

    let error = RingPair::open(owner.try_clone().unwrap(), &identity(1)).unwrap_err();

    assert!(
        matches!(error, PairError::Stale { ref found, .. } if **found == identity(2)),
        "{error}"
    );
}

#[test]
fn segments_with_something_else_are_refused() {
    let owner = SmallSegment::create("sepal-test-rings", RING_PAIR_BYTES).unwrap();

    let error = RingPair::open(owner.try_clone().unwrap(), &identity(1)).unwrap_err();

    assert!(matches!(error, PairError::NoRings { magic: 0, version: 0, .. }), "{error}");
}
