//! Two ranks of one thread each, which share every block, beside one worker of two threads: the
//! same blocks in turns. Plans and sums cross a group's segment as in `serve`; the ranks are threads
//! of this process, since what they share is that segment alone.

use std::sync::Arc;
use std::time::Duration;

use kernels::{Cpu, DType, QuantType, StepRow};
use model::shards::{Shard, Shares};
use shared::ids::{Generation, GroupId, Rank, WorldSize};
use shared::shm::doorbell::MAX_SPIN;
use shared::shm::group::{
    GroupMap, GroupMember, GroupOwner, GroupShape, PlanReader, PlanWriter, WaitPolicy,
};

use crate::TOKENS;
use crate::stored::{Bytes, Held, Sizes, spec};
use crate::worker::{Worker, decode, table};

/// As wide as a model of 8 billion parameters; two blocks exceed any cache.
const WIDE: Sizes = [4096, 14336, 2, 32, 8];
/// One row, many, and a prefill: name and length of a turn.
const KINDS: [(&str, Duration); 3] = [
    ("one session", Duration::from_millis(600)),
    ("16 sessions", Duration::from_millis(800)),
    ("prefill", Duration::from_millis(2500)),
];
const SESSIONS: usize = 16;
const ROUNDS: usize = 7;

const SHAPE: GroupShape = GroupShape {
    group: GroupId(0),
    generation: Generation(1),
    world_size: WorldSize(2),
    exchange_values: 65_536,
    log_bytes: 4096,
};

/// What rank 0 tells rank 1: the kind of rows and the block, or that it is over.
const OVER: u8 = u8::MAX;

/// Prints the table of one worker and of two ranks in each format.
pub fn table_of_formats() {
    println!("hidden size {}, {} blocks; milliseconds, least of all turns", WIDE[0], WIDE[2]);
    for quant in [QuantType::None, QuantType::Int8, QuantType::Nf4] {
        compare(&Bytes::new(spec(WIDE), DType::Bf16, quant), quant);
    }
}

fn compare(bytes: &Bytes, quant: QuantType) {
    let shares = Shares::by_capacity(&bytes.spec, &[1.0, 1.0]).expect("two equal shares");
    let shards = shares.shards(&bytes.spec).expect("the shares of these blocks");
    let held: Vec<Held<'_>> = shards.iter().map(|shard| Held::new(bytes, shard)).collect();
    let group = GroupOwner::create("sepal-bench-ranks", &SHAPE).expect("make a group");
    let maps = [Rank(0), Rank(1)].map(|rank| map(&group, rank));
    let mut alone =
        Worker::new(&bytes.spec, bytes.dtype, Cpu::new(2), |b, name| bytes.view(b, name));
    std::thread::scope(|scope| {
        scope.spawn(|| follow(&maps[1], bytes.dtype, &shards[1], &held[1]));
        let mut plans = PlanWriter::new(&maps[0], policy()).expect("a writer");
        let mut leader = rank(&maps[0], bytes.dtype, &shards[0], &held[0]);
        let names = KINDS.map(|(name, _)| name).into_iter().enumerate();
        for (kind, name) in names {
            let ([mut one, mut two], mut ratios) = ([f64::MAX; 2], Vec::new());
            for _ in 0..ROUNDS {
                let apart = pass_seconds(&mut alone, kind, |_| ());
                let together =
                    pass_seconds(&mut leader, kind, |block| publish(&mut plans, kind, block));
                (one, two) = (one.min(apart), two.min(together));
                ratios.push(apart / together);
            }
            ratios.sort_by(f64::total_cmp);
            println!(
                "{quant}, {name}: one worker of 2 threads {:.2}, two ranks of 1 thread {:.2}; speed {:.2} x (median of {ROUNDS} turns; {:.2} to {:.2})",
                one * 1e3,
                two * 1e3,
                ratios[ROUNDS / 2],
                ratios[0],
                ratios[ROUNDS - 1],
            );
        }
        plans.publish(&[OVER, 0]).expect("a sound group");
    });
}

/// The least time of a pass of some kind through all blocks.
fn pass_seconds(worker: &mut Worker<'_>, kind: usize, before_block: impl FnMut(usize)) -> f64 {
    on_rows(kind, |rows| worker.least(rows, KINDS[kind].1, before_block))
}

fn publish(plans: &mut PlanWriter, kind: usize, block: usize) {
    plans.publish(&[kind as u8, block as u8]).expect("a sound group");
}

/// Rank 1: computes what rank 0 publishes.
fn follow(map: &Arc<GroupMap>, dtype: DType, shard: &Shard, held: &Held<'_>) {
    let mut plans = PlanReader::new(map, policy()).expect("a reader");
    let mut worker = rank(map, dtype, shard, held);
    let (mut record, mut hidden) = (Vec::new(), Vec::new());
    loop {
        let next = plans.next(&mut record, Duration::from_secs(1)).expect("a sound group");
        let (Some(position), &[kind, block]) = (next, &record[..]) else {
            continue;
        };
        if kind == OVER {
            return;
        }
        on_rows(kind.into(), |rows| {
            let tokens: usize = rows.iter().map(|row| row.tokens).sum();
            hidden.clear();
            hidden.resize(tokens * shard.spec.hidden, 0.5);
            worker.forward(block.into(), rows, &mut hidden);
        });
        plans.done(position).expect("a sound group");
    }
}

fn rank<'w>(map: &Arc<GroupMap>, dtype: DType, shard: &'w Shard, held: &'w Held<'_>) -> Worker<'w> {
    let mut cpu = Cpu::new(1);
    cpu.join(GroupMember::new(map, policy()).expect("a member"));
    Worker::new(&shard.spec, dtype, cpu, |block, name| held.view(block, name))
}

/// Calls `work` with the rows of a kind.
fn on_rows<R>(kind: usize, work: impl FnOnce(&[StepRow<'_>]) -> R) -> R {
    let sessions = if kind == 0 { 1 } else { SESSIONS };
    let tables: Vec<_> = (0..sessions).map(table).collect();
    if kind == 2 {
        return work(&[StepRow::new(TOKENS, 0, &tables[0])]);
    }
    let rows: Vec<_> = tables.iter().map(|pages| decode(pages)).collect();
    work(&rows)
}

fn map(group: &GroupOwner, rank: Rank) -> Arc<GroupMap> {
    let (segment, bells) = (group.try_clone(), group.doorbells());
    let (segment, bells) = (segment.expect("a descriptor"), bells.expect("descriptors"));
    GroupMap::open(segment, bells, &SHAPE, rank).expect("open the group")
}

fn policy() -> WaitPolicy {
    let interval = Duration::from_secs(20);
    WaitPolicy { spin: MAX_SPIN, interval, heartbeat: Box::new(|| ()) }
}
