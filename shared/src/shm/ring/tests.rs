//! The ring in one process, against a queue, and in two, one of which dies at every store.

use std::collections::VecDeque;
use std::os::fd::AsFd;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, ExitStatus};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use proptest::prelude::*;

use super::super::doorbell::{Doorbell, Wake};
use super::super::pair::{RingIdentity, RingPair};
use super::super::sync::die_at_store;
use super::*;
use crate::ids::{Generation, GroupId, WorkerId};

const DEADLINE: Duration = Duration::from_secs(60);

fn entry(number: u64) -> Entry {
    std::array::from_fn(|word| number.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(word as u64))
}

fn ends() -> (Producer<Arc<RingShared>>, Consumer<Arc<RingShared>>) {
    let ring = Arc::new(RingShared::new());
    (Producer::new(Arc::clone(&ring)), Consumer::new(ring))
}

#[test]
fn full_ring_gives_the_entry_back() {
    let (mut producer, mut consumer) = ends();
    for number in 0..CAPACITY {
        producer.push(entry(number)).unwrap();
    }

    assert_eq!(producer.vacant(), Ok(0));
    assert_eq!(producer.push(entry(999)), Err(PushError::Full(entry(999))));
    assert_eq!(consumer.pop(), Ok(Some(entry(0))));
    assert_eq!(producer.push(entry(CAPACITY)), Ok(()));
    for number in 1..=CAPACITY {
        assert_eq!(consumer.pop(), Ok(Some(entry(number))));
    }
    assert_eq!(consumer.pop(), Ok(None));
}

#[test]
fn indexes_wrap_around() {
    let (mut producer, mut consumer) = ends();
    let start = u64::MAX - 3;
    (producer.tail, producer.head) = (start, start);
    (consumer.tail, consumer.head) = (start, start);
    producer.ring.tail.value.store(start, Ordering::Relaxed);
    producer.ring.head.value.store(start, Ordering::Relaxed);

    for number in 0..2 * CAPACITY {
        producer.push(entry(number)).unwrap();
        assert_eq!(consumer.pop(), Ok(Some(entry(number))));
    }
}

#[test]
fn only_an_armed_consumer_is_rung_and_only_once() {
    let (mut producer, mut consumer) = ends();
    producer.push(entry(0)).unwrap();
    assert!(!producer.must_wake());

    assert_eq!(consumer.arm(), Ok(Armed::Ready));
    assert!(!producer.must_wake());
    consumer.pop().unwrap();

    assert_eq!(consumer.arm(), Ok(Armed::Sleep));
    producer.push(entry(1)).unwrap();
    producer.push(entry(2)).unwrap();
    assert!(producer.must_wake());
    assert!(!producer.must_wake());
}

#[test]
fn wait_tells_entry_from_bell_from_time() {
    let (mut producer, mut consumer) = ends();
    let bell = Doorbell::new().unwrap();
    let short = Duration::from_millis(1);

    assert_eq!(consumer.wait(&bell, Duration::ZERO, short).unwrap(), Wake::TimedOut);
    bell.ring().unwrap();
    assert_eq!(consumer.wait(&bell, Duration::ZERO, DEADLINE).unwrap(), Wake::Rung);
    producer.push(entry(0)).unwrap();
    assert_eq!(consumer.wait(&bell, Duration::ZERO, DEADLINE).unwrap(), Wake::Ready);
    consumer.pop().unwrap();

    let pushing = thread::spawn({
        let bell = Doorbell::from_fd(bell.try_clone().unwrap()).unwrap();
        move || {
            producer.push(entry(1)).unwrap();
            producer.ring_if_sleeping(&bell).unwrap();
        }
    });
    let wake = consumer.wait(&bell, Duration::from_micros(50), DEADLINE).unwrap();
    pushing.join().unwrap();
    assert_eq!(wake, Wake::Ready);
}

#[test]
fn two_threads_pass_many_entries_asleep_and_awake() {
    const ENTRIES: u64 = 20_000;
    let (mut producer, mut consumer) = ends();
    let bell = Arc::new(Doorbell::new().unwrap());
    let pushing = thread::spawn({
        let bell = Arc::clone(&bell);
        move || {
            for number in 0..ENTRIES {
                while let Err(error) = producer.push(entry(number)) {
                    assert!(matches!(error, PushError::Full(_)), "{error}");
                    thread::yield_now();
                }
                producer.ring_if_sleeping(&bell).unwrap();
            }
        }
    });

    for number in 0..ENTRIES {
        let found = loop {
            match consumer.pop().unwrap() {
                Some(found) => break found,
                None => {
                    let wake =
                        consumer.wait(&bell, Duration::from_micros(number % 3), DEADLINE).unwrap();
                    assert_ne!(wake, Wake::TimedOut, "entry {number}: wake-up lost");
                }
            }
        };
        assert_eq!(found, entry(number));
    }
    pushing.join().unwrap();
}

/// Indexes near each other, so that both sound and corrupt distances come up, and far ones.
fn near() -> impl Strategy<Value = u64> {
    prop_oneof![0..3 * CAPACITY, u64::MAX - CAPACITY..=u64::MAX, any::<u64>()]
}

proptest! {
    #[test]
    fn behaves_as_a_bounded_queue(steps in prop::collection::vec(any::<bool>(), 0..2000)) {
        let (mut producer, mut consumer) = ends();
        let mut model = VecDeque::new();
        for (number, push) in steps.into_iter().enumerate() {
            let number = number as u64;
            if push {
                let full = model.len() == RING_ENTRIES;
                let expected = if full { Err(PushError::Full(entry(number))) } else { Ok(()) };
                prop_assert_eq!(producer.push(entry(number)), expected);
                if expected.is_ok() {
                    model.push_back(number);
                }
            } else {
                prop_assert_eq!(consumer.pop(), Ok(model.pop_front().map(entry)));
            }
        }
    }

    #[test]
    fn any_index_of_the_other_side_is_bounded(
        tail in near(), head in near(), own in near(),
    ) {
        let ring = Arc::new(RingShared::new());
        ring.tail.value.store(tail, Ordering::Relaxed);

        let mut consumer = Consumer { ring, head: own, tail: own };
        match tail.wrapping_sub(own) {
            0 => prop_assert_eq!(consumer.pop(), Ok(None)),
            1..=CAPACITY => prop_assert!(consumer.pop().unwrap().is_some()),
            _ => {
                let corrupt = RingCorrupt { index: "tail", theirs: tail, ours: own };
                prop_assert_eq!(consumer.pop(), Err(corrupt));
                prop_assert_eq!(consumer.arm(), Err(corrupt));
            }
        }

        let ring = Arc::new(RingShared::new());
        ring.head.value.store(head, Ordering::Relaxed);
        let mut producer = Producer { ring, tail: own, head: own.wrapping_sub(CAPACITY) };
        match own.wrapping_sub(head) {
            0..CAPACITY => prop_assert_eq!(producer.push(entry(0)), Ok(())),
            CAPACITY => prop_assert_eq!(producer.push(entry(0)), Err(PushError::Full(entry(0)))),
            _ => {
                let corrupt = RingCorrupt { index: "head", theirs: head, ours: own };
                prop_assert_eq!(producer.push(entry(0)), Err(PushError::Corrupt(corrupt)));
            }
        }
    }
}

/// How the environment tells a child process of a test what to do.
const CHILD: &str = "SEPAL_TEST_RING_CHILD";

/// Entries that a child passes in whole before the one at which it dies.
const WHOLE: u64 = 3;

fn identity() -> RingIdentity {
    RingIdentity {
        worker: WorkerId::solo(GroupId(3)),
        worker_generation: Generation(7),
        netd_generation: Generation(2),
    }
}

fn run_child(test: &str, rings: &RingPair, stores: u64) -> ExitStatus {
    let rings = rings.try_clone().unwrap();
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", &format!("shm::ring::tests::{test}"), "--include-ignored", "--nocapture"])
        .env(CHILD, stores.to_string())
        .stdin(std::process::Stdio::from(rings))
        .stdout(std::process::Stdio::null())
        .spawn()
        .unwrap();
    child.wait().unwrap()
}

fn child_task() -> Option<(RingPair, u64)> {
    let stores = std::env::var(CHILD).ok()?;
    let rings = std::io::stdin().as_fd().try_clone_to_owned().unwrap();
    Some((RingPair::open(rings, &identity()).unwrap(), stores.parse().unwrap()))
}

#[test]
#[ignore = "the child of a_writer_killed_at_any_store_leaves_whole_entries"]
fn dying_writer() {
    let Some((pair, stores)) = child_task() else {
        return;
    };
    let (mut producer, _) = pair.netd_end();
    for number in 0..WHOLE {
        producer.push(entry(number)).unwrap();
    }
    die_at_store(stores);
    producer.push(entry(WHOLE)).unwrap();
    let _ = producer.must_wake();
}

#[test]
fn a_writer_killed_at_any_store_leaves_whole_entries() {
    let stores_of_a_push = ENTRY_WORDS as u64 + 1;
    let stores_of_a_wake = 1;
    for stores in 0..=stores_of_a_push + stores_of_a_wake {
        let owner = RingPair::create("sepal-test-rings", &identity()).unwrap();
        let (mut consumer, _) =
            RingPair::open(owner.try_clone().unwrap(), &identity()).unwrap().worker_end();
        assert_eq!(consumer.arm(), Ok(Armed::Sleep));

        let status = run_child("dying_writer", &owner, stores);

        let survived = stores == stores_of_a_push + stores_of_a_wake;
        assert_eq!(status.signal(), (!survived).then_some(9), "after {stores} stores: {status}");
        let published = WHOLE + u64::from(stores >= stores_of_a_push);
        for number in 0..published {
            assert_eq!(consumer.pop(), Ok(Some(entry(number))), "after {stores} stores");
        }
        assert_eq!(consumer.pop(), Ok(None), "after {stores} stores");
    }
}

#[test]
#[ignore = "the child of a_reader_killed_at_any_store_loses_at_most_what_it_took"]
fn dying_reader() {
    let Some((pair, stores)) = child_task() else {
        return;
    };
    let (mut consumer, _) = pair.worker_end();
    for number in 0..WHOLE {
        assert_eq!(consumer.pop(), Ok(Some(entry(number))));
    }
    die_at_store(stores);
    consumer.pop().unwrap();
    let _ = consumer.arm();
}

#[test]
fn a_reader_killed_at_any_store_loses_at_most_what_it_took() {
    let stores_of_a_pop = 1;
    let stores_of_an_arm = 2;
    for stores in 0..=stores_of_a_pop + stores_of_an_arm {
        let owner = RingPair::create("sepal-test-rings", &identity()).unwrap();
        let (mut producer, _) =
            RingPair::open(owner.try_clone().unwrap(), &identity()).unwrap().netd_end();
        for number in 0..CAPACITY {
            producer.push(entry(number)).unwrap();
        }

        let status = run_child("dying_reader", &owner, stores);

        let survived = stores == stores_of_a_pop + stores_of_an_arm;
        assert_eq!(status.signal(), (!survived).then_some(9), "after {stores} stores: {status}");
        let popped = WHOLE + u64::from(stores >= stores_of_a_pop);
        for number in 0..popped {
            assert_eq!(producer.push(entry(number)), Ok(()), "after {stores} stores");
        }
        assert_eq!(
            producer.push(entry(0)),
            Err(PushError::Full(entry(0))),
            "after {stores} stores"
        );
    }
}
