//! Every interleaving and every reordering that the memory model allows, on rings of two entries:
//! `.ci/long loom`.

use loom::sync::{Arc, Condvar, Mutex};
use loom::thread;

use super::*;

/// An entry whose eight words all tell which one it is, so that a torn one is seen.
fn entry(number: u64) -> Entry {
    std::array::from_fn(|word| number * 100 + word as u64)
}

fn ends() -> (Producer<Arc<RingShared>>, Consumer<Arc<RingShared>>) {
    let ring = Arc::new(RingShared::new());
    (Producer::new(Arc::clone(&ring)), Consumer::new(ring))
}

/// A doorbell as an eventfd is one: remembers that it was rung until it is answered.
#[derive(Default)]
struct Bell {
    rung: Mutex<bool>,
    changed: Condvar,
}

impl Bell {
    fn ring(&self) {
        *self.rung.lock().unwrap() = true;
        self.changed.notify_one();
    }

    fn wait(&self) {
        let mut rung = self.rung.lock().unwrap();
        while !*rung {
            rung = self.changed.wait(rung).unwrap();
        }
        *rung = false;
    }
}

/// Pops one entry, sleeping as often as the ring is empty. A lost wake-up is a deadlock, which loom
/// reports.
fn pop_sleeping(consumer: &mut Consumer<Arc<RingShared>>, bell: &Bell) -> Entry {
    loop {
        if let Some(entry) = consumer.pop().unwrap() {
            return entry;
        }
        if consumer.arm().unwrap() == Armed::Sleep {
            bell.wait();
            consumer.disarm();
        }
    }
}

/// Pushes one entry, giving way while the ring is full.
fn push_yielding(producer: &mut Producer<Arc<RingShared>>, mut entry: Entry) {
    loop {
        match producer.push(entry) {
            Ok(()) => return,
            Err(PushError::Full(back)) => entry = back,
            Err(PushError::Corrupt(corrupt)) => panic!("{corrupt}"),
        }
        thread::yield_now();
    }
}

#[test]
fn loom_entries_come_whole_and_in_order() {
    loom::model(|| {
        let (mut producer, mut consumer) = ends();
        let pushing = thread::spawn(move || {
            for number in 0..2 {
                producer.push(entry(number)).unwrap();
            }
        });
        let mut expected = 0;
        while expected < 2 {
            match consumer.pop().unwrap() {
                Some(found) => {
                    assert_eq!(found, entry(expected));
                    expected += 1;
                }
                None => thread::yield_now(),
            }
        }
        pushing.join().unwrap();
        assert_eq!(consumer.pop(), Ok(None));
    });
}

#[test]
fn loom_full_ring_gives_the_entry_back_and_overwrites_nothing() {
    loom::model(|| {
        let (mut producer, mut consumer) = ends();
        producer.push(entry(0)).unwrap();
        producer.push(entry(1)).unwrap();
        let pushing = thread::spawn(move || push_yielding(&mut producer, entry(2)));
        for expected in 0..3 {
            loop {
                match consumer.pop().unwrap() {
                    Some(found) => break assert_eq!(found, entry(expected)),
                    None => thread::yield_now(),
                }
            }
        }
        pushing.join().unwrap();
    });
}

#[test]
fn loom_no_wake_up_is_lost() {
    loom::model(|| {
        let (mut producer, mut consumer) = ends();
        let bell = Arc::new(Bell::default());
        let pushing = thread::spawn({
            let bell = Arc::clone(&bell);
            move || {
                for number in 0..2 {
                    producer.push(entry(number)).unwrap();
                    if producer.must_wake() {
                        bell.ring();
                    }
                }
            }
        });
        for expected in 0..2 {
            assert_eq!(pop_sleeping(&mut consumer, &bell), entry(expected));
        }
        pushing.join().unwrap();
    });
}

#[test]
fn loom_one_ring_for_a_burst_wakes_for_all_of_it() {
    loom::model(|| {
        let (mut producer, mut consumer) = ends();
        let bell = Arc::new(Bell::default());
        let pushing = thread::spawn({
            let bell = Arc::clone(&bell);
            move || {
                producer.push(entry(0)).unwrap();
                producer.push(entry(1)).unwrap();
                if producer.must_wake() {
                    bell.ring();
                }
            }
        });
        for expected in 0..2 {
            assert_eq!(pop_sleeping(&mut consumer, &bell), entry(expected));
        }
        pushing.join().unwrap();
    });
}

/// Two jobs in flight over a pair of rings, answered in the other order; both sides sleep when they
/// have nothing to do.
#[test]
fn loom_completions_come_out_of_order_and_each_once() {
    let mut model = loom::model::Builder::new();
    // The models of one ring above are complete. Of this one the full tree takes longer than CI may
    // (more than 200 s), so that it is cut to runs with at most two forced switches.
    model.preemption_bound = Some(2);
    model.check(|| {
        let (mut submit, mut jobs) = ends();
        let (mut complete, mut completions) = ends();
        let (job_bell, completion_bell) = (Arc::new(Bell::default()), Arc::new(Bell::default()));
        let worker = thread::spawn({
            let (job_bell, completion_bell) = (Arc::clone(&job_bell), Arc::clone(&completion_bell));
            move || {
                let first = pop_sleeping(&mut jobs, &job_bell);
                let second = pop_sleeping(&mut jobs, &job_bell);
                for job in [second, first] {
                    complete.push(job).unwrap();
                    if complete.must_wake() {
                        completion_bell.ring();
                    }
                }
            }
        });
        for number in 0..2 {
            submit.push(entry(number)).unwrap();
            if submit.must_wake() {
                job_bell.ring();
            }
        }
        for expected in [1, 0] {
            assert_eq!(pop_sleeping(&mut completions, &completion_bell), entry(expected));
        }
        worker.join().unwrap();
        assert_eq!(completions.pop(), Ok(None));
    });
}
