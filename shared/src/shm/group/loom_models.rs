//! Every interleaving and every reordering that the memory model allows, in groups of two and three
//! ranks: `.ci/long loom`. Buffers that are written while another rank may read them, and wake-ups
//! that are lost, end a model.

use std::time::Duration;

use loom::sync::Arc;
use loom::thread;

use super::loom_map::Shared;
use super::*;
use crate::ids::{Generation, GroupId, WorldSize};
use crate::shm::ring::Armed;

fn shared(world: u16, log_words: usize) -> Arc<Shared> {
    Shared::new(GroupShape {
        group: GroupId(0),
        generation: Generation(1),
        world_size: WorldSize(world),
        exchange_values: 4,
        log_bytes: log_words * 8,
    })
}

fn policy() -> WaitPolicy {
    WaitPolicy { spin: Duration::ZERO, interval: Duration::MAX, heartbeat: Box::new(|| ()) }
}

fn member(shared: &Arc<Shared>, rank: usize) -> Member {
    Member::new(&GroupMap::new(shared, rank), policy()).unwrap()
}

fn reader(shared: &Arc<Shared>, rank: usize) -> PlanReader {
    PlanReader::new(&GroupMap::new(shared, rank), policy()).unwrap()
}

fn writer(shared: &Arc<Shared>) -> PlanWriter {
    PlanWriter::new(&GroupMap::new(shared, 0), policy()).unwrap()
}

/// Runs `ranks` on all ranks of a group, the last of them on this thread.
fn run(shared: &Arc<Shared>, rank: impl Fn(usize, &mut Member) + Copy + Send + 'static) {
    let world = shared.bells.len();
    let threads: Vec<_> = (1..world)
        .map(|index| {
            let mut member = member(shared, index);
            thread::spawn(move || rank(index, &mut member))
        })
        .collect();
    rank(0, &mut member(shared, 0));
    threads.into_iter().for_each(|thread| thread.join().unwrap());
}

/// A model of which runs with more than `switches` forced switches are left out: the full tree
/// takes longer than CI may.
fn bounded(switches: usize, model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(switches);
    builder.check(model);
}

/// The third exchange writes the buffers of the first.
#[test]
fn loom_sums_of_two_ranks_are_whole_while_buffers_are_used_again() {
    bounded(3, || {
        run(&shared(2, 2), |rank, member| {
            for round in 0..3u8 {
                let mut values = [f32::from(round) + rank as f32];
                member.all_reduce(&mut values).unwrap();
                assert_eq!(values, [2.0 * f32::from(round) + 1.0]);
            }
        });
    });
}

#[test]
fn loom_one_sum_in_every_order() {
    loom::model(|| {
        run(&shared(2, 2), |rank, member| {
            let mut values = [1.0 + rank as f32];
            member.all_reduce(&mut values).unwrap();
            assert_eq!(values, [3.0]);
        });
    });
}

/// A rank is rung by one for which it does not sleep any more.
#[test]
fn loom_no_wake_up_is_lost_among_three_ranks() {
    bounded(2, || {
        run(&shared(3, 2), |rank, member| {
            let mut values = [1.0 + rank as f32];
            member.all_reduce(&mut values).unwrap();
            assert_eq!(values, [6.0]);
        });
    });
}

/// Rank 0 goes on at once, and does not overwrite what the other has not read.
#[test]
fn loom_broadcasts_wait_for_the_slowest_reader() {
    bounded(3, || {
        run(&shared(2, 2), |rank, member| {
            for round in 1..=3 {
                let mut bytes = if rank == 0 { [round] } else { [0] };
                member.broadcast(&mut bytes).unwrap();
                assert_eq!(bytes, [round]);
            }
        });
    });
}

#[test]
fn loom_an_abort_ends_a_wait() {
    loom::model(|| {
        let shared = shared(2, 2);
        let waiting = thread::spawn({
            let mut member = member(&shared, 0);
            move || member.all_reduce(&mut [1.0])
        });
        shared.control.abort();
        shared.bells.iter().for_each(|bell| bell.ring().unwrap());
        assert!(matches!(waiting.join().unwrap(), Err(GroupError::Aborted)));
    });
}

/// Records of two words, of which a log of three words holds one.
fn publish(shared: &Arc<Shared>, records: u8) {
    let mut writer = writer(shared);
    for number in 0..records {
        writer.publish(&[number]).unwrap();
    }
}

fn read(reader: &mut PlanReader, records: u8) {
    let mut record = Vec::new();
    let mut expected = 0;
    while expected < records {
        if let Some(position) = reader.next(&mut record, Duration::MAX).unwrap() {
            assert_eq!(record, [expected]);
            reader.done(position).unwrap();
            expected += 1;
        }
    }
}

#[test]
fn loom_plans_come_whole_and_in_order_through_a_full_log() {
    bounded(3, || {
        let shared = shared(2, 3);
        let reading = thread::spawn({
            let mut reader = reader(&shared, 1);
            move || read(&mut reader, 3)
        });
        publish(&shared, 3);
        reading.join().unwrap();
    });
}

#[test]
fn loom_plans_wait_for_the_slowest_of_two_followers() {
    bounded(2, || {
        let shared = shared(3, 3);
        let reading = [1, 2].map(|rank| {
            let mut reader = reader(&shared, rank);
            thread::spawn(move || read(&mut reader, 2))
        });
        publish(&shared, 2);
        reading.into_iter().for_each(|thread| thread.join().unwrap());
    });
}

fn read_one(reader: &mut PlanReader) {
    let mut record = Vec::new();
    let position = loop {
        if let Some(position) = reader.next(&mut record, Duration::MAX).unwrap() {
            break position;
        }
    };
    reader.done(position).unwrap();
}

#[test]
fn loom_rank_0_sees_when_a_plan_is_done() {
    loom::model(|| {
        let shared = shared(2, 3);
        let reading = thread::spawn({
            let mut reader = reader(&shared, 1);
            move || read_one(&mut reader)
        });
        let mut writer = writer(&shared);
        let position = writer.publish(&[7]).unwrap();
        writer.wait_done(position).unwrap();
        assert!(writer.is_done(position).unwrap());
        reading.join().unwrap();
    });
}

#[test]
fn loom_rank_0_is_rung_when_a_plan_is_done() {
    loom::model(|| {
        let shared = shared(2, 3);
        let reading = thread::spawn({
            let mut reader = reader(&shared, 1);
            move || read_one(&mut reader)
        });
        let mut writer = writer(&shared);
        let position = writer.publish(&[7]).unwrap();
        while writer.arm(position).unwrap() == Armed::Sleep {
            shared.bells[0].wait(Duration::MAX).unwrap();
            writer.disarm();
        }
        assert!(writer.is_done(position).unwrap());
        reading.join().unwrap();
    });
}
