use std::thread;

use super::*;

const DEADLINE: Duration = Duration::from_secs(60);

/// Long enough to show that nothing came, which is certain from the start.
const NOTHING: Duration = Duration::from_millis(1);

#[test]
fn a_ring_before_the_wait_is_remembered_and_answered_once() {
    let bell = Doorbell::new().unwrap();
    bell.ring().unwrap();
    bell.ring().unwrap();
    assert!(bell.wait(DEADLINE).unwrap());
    assert!(!bell.wait(NOTHING).unwrap());

    bell.ring().unwrap();
    assert!(bell.wait(DEADLINE).unwrap());
    assert!(!bell.wait(NOTHING).unwrap());
}

#[test]
fn a_cleared_bell_wakes_nobody() {
    let bell = Doorbell::new().unwrap();
    bell.ring().unwrap();
    assert!(bell.clear().unwrap());
    assert!(!bell.clear().unwrap());
    assert!(!bell.wait(NOTHING).unwrap());
}

#[test]
fn any_copy_rings_the_sleeper() {
    let bell = Doorbell::new().unwrap();
    let copy = Doorbell::from_fd(bell.try_clone().unwrap()).unwrap();
    let ringing = thread::spawn(move || copy.ring().unwrap());
    assert!(bell.wait(DEADLINE).unwrap());
    ringing.join().unwrap();
}

#[test]
fn a_wait_for_joined_bells_ends_with_each_of_them_and_remembers_both() {
    let (bell, other) = (Doorbell::new().unwrap(), Doorbell::new().unwrap());
    let copy = Doorbell::from_fd(other.try_clone().unwrap()).unwrap();
    other.ring().unwrap();
    bell.join(&copy).unwrap();
    assert!(bell.wait(DEADLINE).unwrap(), "a ring before the two were joined");
    assert!(!bell.wait(NOTHING).unwrap());
    for rung in [&other, &bell, &copy] {
        rung.ring().unwrap();
        assert!(bell.wait(DEADLINE).unwrap());
        assert!(!bell.wait(NOTHING).unwrap());
    }
    // The other is heard by who waits for it alone, too.
    other.ring().unwrap();
    assert!(other.wait(DEADLINE).unwrap());
    assert!(bell.wait(DEADLINE).unwrap());
}

#[test]
fn a_full_counter_is_still_rung() {
    let bell = Doorbell::new().unwrap();
    bell.fd.write(u64::MAX - 1).unwrap();
    bell.ring().unwrap();
    assert!(bell.wait(DEADLINE).unwrap());
}

#[test]
fn descriptors_that_are_no_eventfd_are_refused() {
    let file = tempfile::tempfile().unwrap();
    let error = Doorbell::from_fd(file.into()).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
}
