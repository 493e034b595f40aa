//! Two processes, one of which dies at every store of a sum.

use std::os::fd::AsFd;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, ExitStatus, Stdio};
use std::sync::Mutex;

use super::*;
use crate::bootstrap::DescriptorSocket;
use crate::control::FdTag;
use crate::shm::sync::die_at_store;

/// How the environment tells the child after how many stores it dies.
const CHILD: &str = "SEPAL_TEST_GROUP_CHILD";

/// Sums that the child takes part in before the one at which it dies.
const WHOLE: usize = 3;

/// Values of a sum.
const LEN: usize = 5;

const TAG: FdTag = FdTag(1);

fn run_child(group: &GroupOwner, stores: u64) -> ExitStatus {
    let (ours, theirs) = DescriptorSocket::pair().unwrap();
    let (segment, bells) = (group.try_clone().unwrap(), group.doorbells().unwrap());
    ours.send(TAG, &[segment.as_fd(), bells[0].as_fd(), bells[1].as_fd()]).unwrap();
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "shm::group::tests::processes::dying_rank", "--include-ignored"])
        .env(CHILD, stores.to_string())
        .stdin(Stdio::from(theirs))
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    child.wait().unwrap()
}

#[test]
#[ignore = "the child of a_rank_killed_within_a_sum_leaves_the_other_to_the_abort"]
fn dying_rank() {
    let Ok(stores) = std::env::var(CHILD) else {
        return;
    };
    let socket = DescriptorSocket::from(std::io::stdin().as_fd().try_clone_to_owned().unwrap());
    let mut fds = socket.recv(TAG, 3, DEADLINE).unwrap();
    let bells = fds.split_off(1);
    let map = GroupMap::open(fds.remove(0), bells, &shape(2, LEN), Rank(1)).unwrap();
    let mut member = GroupMember::new(&map, policy(Duration::ZERO)).unwrap();
    for round in 0.. {
        if round == WHOLE {
            die_at_store(stores.parse().unwrap());
        }
        member.all_reduce(&mut values(1, round, LEN)).unwrap();
    }
}

/// Sums until the abort, and counts in `sums`.
fn sum_until_aborted(member: &mut GroupMember, sums: &Mutex<usize>) {
    for round in 0.. {
        let mut values = values(0, round, LEN);
        match member.all_reduce(&mut values) {
            Ok(()) => assert_eq!(bits(&values), expected_bits(2, round, LEN)),
            Err(GroupError::Aborted) => return,
            Err(error) => panic!("{error}"),
        }
        *sums.lock().unwrap() += 1;
    }
    unreachable!("the other rank dies");
}

#[test]
fn a_rank_killed_within_a_sum_leaves_the_other_to_the_abort() {
    // The operation, the epoch, and what a sleep stores.
    for stores in 0..5 {
        let shape = shape(2, LEN);
        let group = create(&shape);
        let mut member = member(&group, &shape, 0);
        let sums = Mutex::new(0);
        thread::scope(|scope| {
            let summing = scope.spawn(|| sum_until_aborted(&mut member, &sums));
            let status = run_child(&group, stores);
            assert_eq!(status.signal(), Some(9), "after {stores} stores: {status}");
            let start = Instant::now();
            // A sleeper that was woken says that it waits until it runs.
            while *sums.lock().unwrap() < WHOLE || group.waits()[0] != Some(Rank(1)) {
                assert!(start.elapsed() < DEADLINE, "rank 0 does not wait");
                thread::yield_now();
            }
            group.abort().unwrap();
            summing.join().unwrap();
        });
    }
}
