//! The path of a job through the rings allocates nothing, awake or asleep.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::time::Duration;

use shared::ids::{Generation, GroupId, WorkerId};
use shared::shm::doorbell::{Doorbell, Wake};
use shared::shm::pair::{RingIdentity, RingPair};

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

/// The system's allocator, counting for each thread.
struct Counting;

// SAFETY: everything is passed on to `System` unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        // SAFETY: the caller keeps the contract of `GlobalAlloc::alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: the caller keeps the contract of `GlobalAlloc::dealloc`.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn a_job_and_its_completion_allocate_nothing() {
    let identity = RingIdentity {
        worker: WorkerId::solo(GroupId(0)),
        worker_generation: Generation(1),
        netd_generation: Generation(1),
    };
    let owner = RingPair::create("sepal-test-rings", &identity).unwrap();
    let open = || RingPair::open(owner.try_clone().unwrap(), &identity).unwrap();
    let (mut submit, mut completions) = open().netd_end();
    let (mut jobs, mut complete) = open().worker_end();
    let (job_bell, completion_bell) = (Doorbell::new().unwrap(), Doorbell::new().unwrap());
    let (spin, timeout) = (Duration::from_micros(50), Duration::from_secs(60));
    let mut round_trip = |number: u64| {
        // Armed by hand, since nobody else is there to ring a sleeping thread.
        let _ = jobs.arm().unwrap();
        submit.push([number; 8]).unwrap();
        submit.ring_if_sleeping(&job_bell).unwrap();
        assert!(job_bell.wait(timeout).unwrap());
        complete.push(jobs.pop().unwrap().unwrap()).unwrap();
        complete.ring_if_sleeping(&completion_bell).unwrap();
        assert_eq!(completions.wait(&completion_bell, spin, timeout).unwrap(), Wake::Ready);
        assert_eq!(completions.pop(), Ok(Some([number; 8])));
        let short = Duration::from_millis(1);
        assert_eq!(completions.wait(&completion_bell, spin, short).unwrap(), Wake::TimedOut);
    };
    round_trip(0);

    let before = ALLOCATIONS.get();
    for number in 1..20 {
        round_trip(number);
    }

    assert_eq!(ALLOCATIONS.get() - before, 0);
    assert!(before > 0, "the allocator counts");
}
