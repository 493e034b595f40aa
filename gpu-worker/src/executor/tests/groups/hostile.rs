//! A follower of a rank 0 that publishes nonsense, or nothing more: the test writes the plan log by
//! hand.

use shared::job::StepPages;
use std::ops::Range;

use shared::shm::group::PlanPosition;

use super::*;
use crate::executor::plan_record;
use crate::schedule::{JobKey, Unit, UnitMember};

/// A rank 0 by hand, and the follower that it has.
struct Leader<'a> {
    parts: &'a Parts,
    plans: PlanWriter,
    netd: Netd,
    limits: JobLimits,
    commands: SyncSender<ExecutorCommand<ArenaLink>>,
    last: Option<PlanPosition>,
    is_finished: &'a dyn Fn() -> bool,
}

/// Runs `lead` against a follower that is linked; tells how the follower ended.
fn with_follower(model: &Model, lead: impl FnOnce(&mut Leader<'_>)) -> Exit {
    let (parts, kv) = (Parts::new(2, PLAN_LOG_BYTES), kv_segment(model.facts()));
    thread::scope(|scope| {
        let (commands, inbox) = sync_channel(8);
        let (acknowledge, acknowledged) = sync_channel(8);
        let follower = scope.spawn(|| run_follower(model, &kv, &parts, 1, &{ inbox }, acknowledge));
        let link = LinkParts::new(FIRST, FIRST);
        commands.send(ExecutorCommand::Link(Box::new(arena_link(&link)))).unwrap();
        acknowledged.recv_timeout(DEADLINE).unwrap();
        let mut leader = Leader {
            parts: &parts,
            plans: parts.writer(&board()),
            netd: Netd::of(link),
            limits: model.limits(),
            commands,
            last: None,
            is_finished: &|| follower.is_finished(),
        };
        leader.publish(|out| plan_record::link(FIRST, out));
        lead(&mut leader);
        drop(leader);
        follower.join().unwrap()
    })
}

impl Leader<'_> {
    fn publish(&mut self, write: impl FnOnce(&mut Vec<u8>)) {
        let mut bytes = Vec::new();
        write(&mut bytes);
        self.last = Some(self.plans.publish(&bytes).unwrap());
    }

    /// Has the follower leave once it is done with all of it, unless it left before.
    fn end(&mut self) {
        while !(self.is_finished)() && !self.plans.is_done(self.last.unwrap()).unwrap() {
            thread::yield_now();
        }
        let _ = self.commands.send(ExecutorCommand::Drain);
        self.parts.map(1).ring(Rank(1)).unwrap();
    }

    fn begin(&mut self, key: u64, body: &JobBody) {
        self.publish(|out| plan_record::begin(JobKey(key), key, JobId(key), body, out));
    }

    fn unit(&mut self, block: u32, count: u32, members: &[(u64, usize, Range<usize>)]) {
        let members = members
            .iter()
            .map(|(key, position, pieces)| UnitMember {
                job: JobKey(*key),
                position: *position,
                pieces: pieces.clone(),
            })
            .collect();
        self.publish(|out| plan_record::unit(&Unit { block, count, members }, out));
    }

    /// A forward of two tokens, of one piece.
    fn forward(&self) -> JobBody {
        self.netd.job(WorkKind::Forward, &self.limits, 1, &input(2, 1))
    }

    /// A prefill that is cut into pieces.
    fn prefill(&self) -> JobBody {
        Session::new().step(&self.netd, &self.limits, &mut shuffled_pages(), &input(60, 1))
    }

    fn step(&self) -> JobBody {
        Session::new().step(&self.netd, &self.limits, &mut shuffled_pages(), &input(1, 1))
    }
}

#[test]
fn a_follower_does_what_is_right_and_leaves_at_the_end() {
    let end = with_follower(&Model::new(DType::F32), |leader| {
        let (forward, step) = (leader.forward(), leader.step());
        leader.begin(0, &forward);
        leader.begin(7, &step);
        let other = JobBody {
            pages: StepPages { tables: vec![vec![PageId(5)]], ..step.pages.clone() },
            ..step.clone()
        };
        leader.begin(9, &other);
        leader.begin(10, &step);
        leader.unit(0, 1, &[(0, 0, 0..1)]);
        leader.unit(0, 1, &[(7, 0, 0..1), (9, 0, 0..1)]);
        leader.unit(1, 1, &[(0, 1, 0..1)]);
        leader.unit(1, 2, &[(7, 1, 0..1), (9, 1, 0..1)]);
        leader.publish(|out| plan_record::remove(JobKey(10), out));
        leader.unit(2, 1, &[(0, 2, 0..1)]);
        // All keys are free again.
        [0, 7, 9, 10].into_iter().for_each(|key| leader.begin(key, &forward));
        leader.end();
    });
    assert_eq!(end, Exit::clean());
}

#[test]
fn a_bad_record_ends_the_follower_with_a_sentence() {
    type Lead = fn(&mut Leader<'_>);
    let next = "is not what its jobs do next";
    let cases: &[(&str, &str, Lead)] = &[
        ("unknown kind", "kind 5 with 4 bytes is malformed", |l| {
            l.publish(|out| out.extend([5, 0, 0, 0]));
        }),
        ("nothing", "kind 0 with 0 bytes is malformed", |l| l.publish(|_| ())),
        ("a body of nothing", "job 3 asks for what this rank does not have: job body is", |l| {
            let forward = l.forward();
            l.publish(|out| {
                plan_record::begin(JobKey(3), 0, JobId(0), &forward, out);
                out.truncate(28);
            });
        }),
        ("a foreign block", "block 3 is not served", |l| {
            let body = JobBody { blocks: vec![BlockIndex(3)], ..l.forward() };
            l.begin(0, &body);
        }),
        ("a slot outside the arena", "outside the arena", |l| {
            let mut body = l.forward();
            body.input.offset = 4 << 20;
            l.begin(0, &body);
        }),
        ("a page outside the pool", "outside the pool", |l| {
            let mut body = l.step();
            body.pages.tables = vec![vec![PageId(KV_PAGES)]];
            l.begin(0, &body);
        }),
        ("an adapter", "adapter 0 is not among the 0", |l| {
            let body = JobBody { adapter: Some(0), ..l.step() };
            l.begin(0, &body);
        }),
        ("a job twice", "job 5 begins although", |l| {
            let body = l.forward();
            l.begin(5, &body);
            l.begin(5, &body);
        }),
        ("too many jobs", "job 256 begins although", |l| {
            let body = l.forward();
            (0..=256).for_each(|key| l.begin(key, &body));
        }),
        ("a drop of nothing", "job 4 is to be dropped", |l| {
            l.publish(|out| plan_record::remove(JobKey(4), out));
        }),
        ("a unit of nobody", next, |l| l.unit(0, 1, &[])),
        ("a unit of an unknown job", next, |l| l.unit(0, 1, &[(0, 0, 0..1)])),
        ("the second block first", next, |l| with_forward(l, 1, 1, 1, 0..1)),
        ("another block", next, |l| with_forward(l, 1, 1, 0, 0..1)),
        ("no block", next, |l| with_forward(l, 0, 0, 0, 0..1)),
        ("several blocks of a forward", next, |l| with_forward(l, 0, 2, 0, 0..1)),
        ("all blocks", next, |l| with_forward(l, 0, u32::MAX, 0, 0..1)),
        ("a block beyond all", next, |l| with_forward(l, u32::MAX, 1, 0, 0..1)),
        ("a position beyond all", next, |l| with_forward(l, 0, 1, u32::MAX as usize, 0..1)),
        ("no piece", next, |l| with_forward(l, 0, 1, 0, 0..0)),
        ("a piece that is not there", next, |l| with_forward(l, 0, 1, 0, 0..2)),
        ("pieces from the end", next, |l| with_forward(l, 0, 1, 0, Range { start: 1, end: 0 })),
        ("the second piece first", next, |l| {
            let body = l.prefill();
            l.begin(0, &body);
            l.unit(0, 1, &[(0, 0, 1..2)]);
        }),
        ("a block twice", next, |l| {
            with_forward(l, 0, 1, 0, 0..1);
            l.unit(0, 1, &[(0, 0, 0..1)]);
        }),
        ("a finished job", next, |l| {
            with_forward(l, 0, 1, 0, 0..1);
            l.unit(1, 1, &[(0, 1, 0..1)]);
            l.unit(2, 1, &[(0, 2, 0..1)]);
            l.unit(2, 1, &[(0, 2, 0..1)]);
        }),
        ("a step twice in a unit", next, |l| {
            let body = l.step();
            l.begin(0, &body);
            l.unit(0, 1, &[(0, 0, 0..1), (0, 0, 0..1)]);
        }),
        ("a step beyond its blocks", next, |l| {
            let body = l.step();
            l.begin(0, &body);
            l.unit(0, 4, &[(0, 0, 0..1)]);
        }),
        ("a forward beside a step", next, |l| {
            let (step, forward) = (l.step(), l.forward());
            l.begin(0, &step);
            l.begin(1, &forward);
            l.unit(0, 1, &[(0, 0, 0..1), (1, 0, 0..1)]);
        }),
        ("an unknown netd", "the arena of netd generation 2 did not come", |l| {
            l.publish(|out| plan_record::link(Generation(2), out));
        }),
        ("an older netd", "the arena of netd generation 1 did not come", |l| {
            let newer = arena_link(&LinkParts::new(FIRST, Generation(2)));
            l.commands.send(ExecutorCommand::Link(Box::new(newer))).unwrap();
            l.publish(|out| plan_record::link(FIRST, out));
        }),
    ];
    let model = Model::new(DType::F32);
    for (name, message, lead) in cases {
        let end = with_follower(&model, |leader| {
            lead(leader);
            // Whoever believed all of it ends cleanly.
            leader.end();
        });
        assert_eq!(end.reason, ExitReason::Failed, "{name}: {}", end.message);
        let start = "rank 0 published a plan that cannot be followed: ";
        assert!(end.message.starts_with(start), "{name}: {}", end.message);
        assert!(end.message.contains(message), "{name}: {}", end.message);
    }
}

/// A forward begins and goes through a unit.
fn with_forward(
    leader: &mut Leader<'_>,
    block: u32,
    count: u32,
    position: usize,
    pieces: Range<usize>,
) {
    let body = leader.forward();
    leader.begin(0, &body);
    leader.unit(block, count, &[(0, position, pieces)]);
}

#[test]
fn records_with_random_bits_changed_end_the_follower_or_are_followed() {
    let model = Model::new(DType::F32);
    let mut random = super::same_bits::Random(0x5851_f42d_4c95_7f2d);
    for _ in 0..60 {
        let end = with_follower(&model, |leader| {
            let (step, forward) = (leader.step(), leader.forward());
            let mut records = vec![Vec::new(); 5];
            plan_record::begin(JobKey(1), 0, JobId(1), &step, &mut records[0]);
            plan_record::begin(JobKey(2), 1, JobId(2), &forward, &mut records[1]);
            let member = |key| UnitMember { job: JobKey(key), position: 0, pieces: 0..1 };
            for (record, key) in records[2..4].iter_mut().zip([1, 2]) {
                plan_record::unit(&Unit { block: 0, count: 1, members: vec![member(key)] }, record);
            }
            plan_record::remove(JobKey(2), &mut records[4]);
            let which = random.below(records.len());
            let at = random.below(records[which].len());
            records[which][at] ^= 1 << random.below(8);
            for bytes in &records {
                leader.publish(|out| out.extend(bytes));
            }
            leader.end();
        });
        let is_told = end.message.starts_with("rank 0 published a plan that cannot be followed");
        assert!(end == Exit::clean() || is_told, "{end:?}");
    }
}

#[test]
fn an_abort_ends_a_follower_that_waits_for_a_plan() {
    let model = Model::new(DType::F32);
    let mut inbox = None;
    let end = with_follower(&model, |leader| {
        let body = leader.forward();
        leader.begin(0, &body);
        leader.plans.wait_done(leader.last.unwrap()).unwrap();
        leader.parts.group.abort().unwrap();
        // Its control thread goes on.
        inbox = Some(leader.commands.clone());
    });
    assert_eq!(end.reason, ExitReason::GroupAborted);
    assert_eq!(end.message, "another worker of the group died or hung");
}

#[test]
fn the_end_of_the_control_thread_ends_a_follower() {
    let model = Model::new(DType::F32);
    for is_sent in [true, false] {
        let end = with_follower(&model, |leader| {
            let (other, _inbox) = sync_channel(1);
            let commands = std::mem::replace(&mut leader.commands, other);
            if is_sent {
                commands.send(ExecutorCommand::End(ExitReason::ParentGone, String::new())).unwrap();
            }
            drop(commands);
            leader.parts.map(1).ring(Rank(1)).unwrap();
        });
        assert_eq!(end.reason, ExitReason::ParentGone);
    }
}
