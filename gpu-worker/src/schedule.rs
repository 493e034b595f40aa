//! What the executor does next. A pure state machine: it knows jobs as tasks (class, blocks, pieces) and the time it is told,
//! and neither tensors nor devices.
//!
//! A *unit* is one block over some rows, or several blocks over decode steps that go the same way; between two units anything may change. A task is a cut of its rows into *pieces* at
//! positions that depend on the job alone, and walks block by block, piece by piece:
//!
//! ```text
//! accept ──> at block 0, piece 0 ──next()/done()──> ... ──> block 0 done ──> block 1, piece 0 ... ──> finished
//! ```
//!
//! - Decode steps go before everything else. All that are at the same block run in one unit; of several blocks the lowest
//!   goes first, so that a step that came later catches up and shares the rest of the way. One that was overtaken too often
//!   goes first regardless.
//! - Then prefill, then forward, then backward; the oldest of a class first. How many pieces make a unit follows the measured speed; where
//!   pieces begin and end does not.
//! - Work behind a crowd of decode steps gets an eighth of the time, and one unit every [`BULK_PATIENCE`] at least, so that it is slow
//!   but comes to an end.

use std::collections::BTreeMap;
use std::ops::Range;
use std::time::{Duration, Instant};

/// How long units may take by measured speed.
#[derive(Clone, Copy, Debug)]
pub struct UnitTimes {
    /// Of prefill, forward and backward: what a decode step may have to wait for. Nearly all units keep it, not only half of them.
    pub bulk: Duration,
    /// Of decode steps through several blocks, which a step that comes later cannot join. Zero: block by block.
    pub decode: Duration,
}

impl UnitTimes {
    /// Of a processor, which gains nothing from going through several blocks at once.
    pub const PROCESSOR: UnitTimes = UnitTimes {
        bulk: Duration::from_millis(20),
        decode: Duration::ZERO,
    };
}

/// Longest time that decode steps hold up everything else.
pub const BULK_PATIENCE: Duration = Duration::from_millis(500);

/// How many times the length of its last unit decode steps hold up everything else, up to [`BULK_PATIENCE`]: what makes an eighth.
const DECODE_SHARE: u32 = 7;

/// A step of at most this many tokens over all its rows is a decode step: it is cheaper to run than to cut.
pub const DECODE_TOKENS: usize = 32;

/// Most tokens of one decode unit; more wait for the next. Far beyond where one more row is free of cost.
pub const BATCH_TOKENS: usize = 128;

/// Units of other decode steps that one waits through before it goes first: several passes over a large model.
const OVERTAKEN_LIMIT: u32 = 256;

/// Name of a task, in order of arrival.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TaskId(u64);

/// In order of precedence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Class {
    /// A step of few tokens.
    Decode,
    /// A step of many tokens.
    Prefill,
    /// A forward without cache.
    Forward,
    /// Gradients: a forward, and its blocks once more from the last to the first.
    Backward,
}

/// What the schedule must know of a job.
#[derive(Clone, Debug)]
pub struct TaskShape {
    /// Its class.
    pub class: Class,
    /// Its blocks in order, not empty; for gradients, twice: there and back.
    pub blocks: Vec<u32>,
    /// Tokens of each of its pieces, not empty.
    pub pieces: Vec<usize>,
}

/// One block, or several, over some rows of one or, for decode steps, several tasks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unit {
    /// The first block, by index in the model.
    pub block: u32,
    /// Blocks from there on, at least one; more only for decode steps that all go through them.
    pub count: u32,
    /// Who takes part; never empty.
    pub members: Vec<Member>,
}

/// The part of one task in a unit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    /// The task.
    pub task: TaskId,
    /// Position of the first block among those of the task.
    pub position: usize,
    /// Its pieces that take part.
    pub pieces: Range<usize>,
}

/// What a unit meant for one of its members.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Advance {
    /// The task.
    pub task: TaskId,
    /// Positions of the blocks that the unit worked on.
    pub positions: Range<usize>,
    /// All pieces have passed these blocks.
    pub block_done: bool,
    /// All blocks are done; the task is forgotten.
    pub finished: bool,
}

#[derive(Debug)]
struct Task {
    shape: TaskShape,
    position: usize,
    piece: usize,
    overtaken: u32,
}

impl Task {
    fn block(&self) -> u32 {
        self.shape
            .blocks
            .get(self.position)
            .copied()
            .unwrap_or(u32::MAX)
    }

    fn tokens(&self) -> usize {
        self.shape.pieces.iter().sum()
    }

    /// Whether the block at `position` is taken on the way back, which costs several times as much.
    fn is_back(&self, position: usize) -> bool {
        self.shape.class == Class::Backward && position >= self.shape.blocks.len() / 2
    }

    /// Whether the block at `position` is the last before the way back, of which only keys and values are computed.
    fn is_turn(&self, position: usize) -> bool {
        self.shape.class == Class::Backward && position + 1 == self.shape.blocks.len() / 2
    }
}

/// What a token costs in units of one kind, as they ran.
#[derive(Clone, Copy, Debug, Default)]
struct Pace {
    /// Seconds of a token in one block, a moving mean; zero: nothing ran yet.
    mean: f64,
    /// How much slower units are than the mean, a moving mean too: those that are faster count as zero.
    excess: f64,
}

impl Pace {
    /// Excesses above the mean for which units are planned, and what they are at least, as a part of the mean: few are slower than that.
    const MARGIN: f64 = 5.0;
    const LEAST_EXCESS: f64 = 0.015;
    /// Part of a new value in the means. A unit that was disturbed makes the next ones smaller at once, by its excess, and is forgotten after some.
    const MEAN_GAIN: f64 = 0.25;
    const EXCESS_GAIN: f64 = 0.125;

    fn add(&mut self, tokens: usize, elapsed: Duration) {
        let seconds = elapsed.as_secs_f64().max(1e-6) / tokens.max(1) as f64;
        if self.mean == 0.0 {
            self.mean = seconds;
            return;
        }
        let off = seconds - self.mean;
        self.mean += Self::MEAN_GAIN * off;
        self.excess += Self::EXCESS_GAIN * (off.max(0.0) - self.excess);
    }

    /// Tokens of a unit that hardly takes longer than `time`; none while nothing ran.
    fn tokens(&self, time: Duration) -> f64 {
        if self.mean == 0.0 {
            return 0.0;
        }
        let excess = self.excess.max(Self::LEAST_EXCESS * self.mean);
        time.as_secs_f64() / (self.mean + Self::MARGIN * excess)
    }
}

/// The tasks that are accepted and not finished.
#[derive(Debug)]
pub struct Schedule {
    times: UnitTimes,
    /// Most tokens of units other than decode steps, there and on the way back; a piece may have more.
    most_tokens: [usize; 2],
    tasks: BTreeMap<TaskId, Task>,
    arrived: u64,
    /// Of units of prefill and forward.
    pace: Pace,
    /// Of units of gradients.
    back_pace: Pace,
    /// Of units of the last block before the way back.
    turn_pace: Pace,
    /// Seconds of a decode unit per block.
    decode_block: Option<f64>,
    /// Since when work other than decode is held up.
    held_since: Option<Instant>,
    /// Length of the last unit other than decode.
    bulk_time: Option<Duration>,
}

impl Default for Schedule {
    fn default() -> Schedule {
        Schedule::new(UnitTimes::PROCESSOR)
    }
}

impl Schedule {
    /// A schedule without tasks.
    pub fn new(times: UnitTimes) -> Schedule {
        Schedule {
            times,
            most_tokens: [usize::MAX; 2],
            tasks: BTreeMap::new(),
            arrived: 0,
            pace: Pace::default(),
            back_pace: Pace::default(),
            turn_pace: Pace::default(),
            decode_block: None,
            held_since: None,
            bulk_time: None,
        }
    }

    /// The same, with a bound on the tokens of units other than decode steps, there and on the way back.
    #[must_use]
    pub fn limited(mut self, most_tokens: [usize; 2]) -> Schedule {
        self.most_tokens = most_tokens;
        self
    }

    /// Takes a task on.
    ///
    /// # Panics
    /// When it has no block or no piece.
    pub fn accept(&mut self, shape: TaskShape) -> TaskId {
        assert!(
            !shape.blocks.is_empty() && !shape.pieces.is_empty(),
            "a task has blocks and pieces"
        );
        let id = TaskId(self.arrived);
        self.arrived += 1;
        self.tasks.insert(
            id,
            Task {
                shape,
                position: 0,
                piece: 0,
                overtaken: 0,
            },
        );
        id
    }

    /// Tasks that are not finished.
    pub fn len(&self) -> usize {
        self.tasks.len()
    }

    /// Whether nothing is to be done.
    pub fn is_empty(&self) -> bool {
        self.tasks.is_empty()
    }

    /// Forgets a task.
    pub fn remove(&mut self, task: TaskId) {
        self.tasks.remove(&task);
    }

    /// Forgets all tasks; the measured speed stays.
    pub fn clear(&mut self) {
        self.tasks.clear();
        self.held_since = None;
    }

    /// The unit to run now. It is not taken off: [`done`](Self::done) or [`remove`](Self::remove) is.
    pub fn next(&mut self, now: Instant) -> Option<Unit> {
        let bulk = self.bulk();
        let decode = self.decode_block();
        match (decode, bulk) {
            (None, None) => None,
            (Some(block), None) => Some(self.decode_unit(block)),
            (None, Some(task)) => self.bulk_unit(task),
            (Some(block), Some(task)) => {
                let since = *self.held_since.get_or_insert(now);
                if now.saturating_duration_since(since) >= self.patience() {
                    self.bulk_unit(task)
                } else {
                    Some(self.decode_unit(block))
                }
            }
        }
    }

    /// How long decode steps may hold up everything else.
    fn patience(&self) -> Duration {
        self.bulk_time.map_or(BULK_PATIENCE, |time| {
            time.saturating_mul(DECODE_SHARE).min(BULK_PATIENCE)
        })
    }

    /// The unit ran and took `elapsed`.
    pub fn done(&mut self, unit: &Unit, elapsed: Duration) -> Vec<Advance> {
        self.measure(unit, elapsed);
        unit.members
            .iter()
            .filter_map(|m| self.advance(m, unit.count as usize))
            .collect()
    }

    /// The decode steps that `unit` finishes.
    pub fn ending(&self, unit: &Unit) -> Vec<TaskId> {
        let is_last = |member: &&Member| {
            let end = member.position + unit.count as usize;
            let task = self.tasks.get(&member.task);
            task.is_some_and(|t| t.shape.class == Class::Decode && end >= t.shape.blocks.len())
        };
        let members = unit.members.iter().filter(is_last);
        members.map(|member| member.task).collect()
    }

    fn advance(&mut self, member: &Member, blocks: usize) -> Option<Advance> {
        let task = self.tasks.get_mut(&member.task)?;
        task.piece = member.pieces.end;
        let block_done = task.piece >= task.shape.pieces.len();
        if block_done {
            task.piece = 0;
            task.position += blocks;
        }
        let finished = task.position >= task.shape.blocks.len();
        if finished {
            self.tasks.remove(&member.task);
        }
        Some(Advance {
            task: member.task,
            positions: member.position..member.position + blocks,
            block_done,
            finished,
        })
    }

    fn measure(&mut self, unit: &Unit, elapsed: Duration) {
        let is_decode = |m: &Member| {
            let task = self.tasks.get(&m.task);
            task.is_some_and(|t| t.shape.class == Class::Decode)
        };
        if unit.members.iter().all(is_decode) {
            let seconds = elapsed.as_secs_f64() / f64::from(unit.count.max(1));
            let known = &mut self.decode_block;
            *known = Some(known.map_or(seconds, |old| 0.5 * (old + seconds)));
            return;
        }
        let [member] = unit.members.as_slice() else {
            return;
        };
        let Some(task) = self
            .tasks
            .get(&member.task)
            .filter(|t| t.shape.class != Class::Decode)
        else {
            return;
        };
        self.held_since = None;
        self.bulk_time = Some(elapsed);
        let tokens: usize = task
            .shape
            .pieces
            .get(member.pieces.clone())
            .unwrap_or_default()
            .iter()
            .sum();
        if task.is_back(member.position) {
            self.back_pace.add(tokens, elapsed);
        } else if task.is_turn(member.position) {
            self.turn_pace.add(tokens, elapsed);
        } else {
            self.pace.add(tokens, elapsed);
        }
    }

    /// The oldest task of the first class other than decode.
    fn bulk(&self) -> Option<TaskId> {
        let others = self
            .tasks
            .iter()
            .filter(|(_, t)| t.shape.class != Class::Decode);
        others
            .min_by_key(|&(&id, t)| (t.shape.class, id))
            .map(|(&id, _)| id)
    }

    fn bulk_unit(&self, id: TaskId) -> Option<Unit> {
        let task = self.tasks.get(&id)?;
        let [there, back] = self.most_tokens;
        let (pace, most) = if task.is_back(task.position) {
            (self.back_pace, back)
        } else if task.is_turn(task.position) {
            (self.turn_pace, there)
        } else {
            (self.pace, there)
        };
        let room = pace.tokens(self.times.bulk);
        let (mut end, mut tokens) = (task.piece, 0);
        for piece in task.shape.pieces.iter().skip(task.piece) {
            tokens += piece;
            if end > task.piece && (tokens as f64 > room || tokens > most) {
                break;
            }
            end += 1;
        }
        let members = vec![Member {
            task: id,
            position: task.position,
            pieces: task.piece..end,
        }];
        Some(Unit {
            block: task.block(),
            count: 1,
            members,
        })
    }

    fn decode(&self) -> impl Iterator<Item = (&TaskId, &Task)> {
        self.tasks
            .iter()
            .filter(|(_, t)| t.shape.class == Class::Decode)
    }

    fn decode_block(&self) -> Option<u32> {
        let patient = self.decode().find(|(_, t)| t.overtaken >= OVERTAKEN_LIMIT);
        patient
            .map(|(_, t)| t.block())
            .or_else(|| self.decode().map(|(_, t)| t.block()).min())
    }

    fn decode_unit(&mut self, block: u32) -> Unit {
        let (mut members, mut tokens) = (Vec::new(), 0);
        for (&id, task) in self
            .tasks
            .iter_mut()
            .filter(|(_, t)| t.shape.class == Class::Decode)
        {
            let more = tokens + task.tokens();
            if task.block() == block && (members.is_empty() || more <= BATCH_TOKENS) {
                tokens = more;
                task.overtaken = 0;
                members.push(Member {
                    task: id,
                    position: task.position,
                    pieces: 0..task.shape.pieces.len(),
                });
            } else {
                task.overtaken += 1;
            }
        }
        let count = self.shared_blocks(block, &members);
        Unit {
            block,
            count,
            members,
        }
    }

    /// Blocks from `block` on that all members go through next, up to where somebody waits to join them, as far as the time of a unit goes.
    fn shared_blocks(&self, block: u32, members: &[Member]) -> u32 {
        let room = self.decode_block.map_or(0.0, |seconds| {
            self.times.decode.as_secs_f64() / seconds.max(1e-7)
        });
        let goes_on = |member: &Member, count: u32| {
            let task = self.tasks.get(&member.task);
            let next = task.and_then(|t| t.shape.blocks.get(member.position + count as usize));
            next == Some(&(block + count))
        };
        let is_awaited = |next: u32| self.decode().any(|(_, task)| task.block() == next);
        let mut count = 1;
        while f64::from(count) < room.floor()
            && members.iter().all(|member| goes_on(member, count))
            && !is_awaited(block + count)
        {
            count += 1;
        }
        count
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(class: Class, blocks: Range<u32>, pieces: &[usize]) -> TaskShape {
        TaskShape {
            class,
            blocks: blocks.collect(),
            pieces: pieces.to_vec(),
        }
    }

    fn run(schedule: &mut Schedule, now: Instant) -> Option<(u32, Vec<TaskId>)> {
        let unit = schedule.next(now)?;
        schedule.done(&unit, Duration::from_millis(1));
        Some((unit.block, unit.members.iter().map(|m| m.task).collect()))
    }

    #[test]
    fn decode_steps_end_with_the_unit_of_their_last_block() {
        let (mut schedule, now) = (Schedule::default(), Instant::now());
        let long = schedule.accept(shape(Class::Decode, 0..2, &[1]));
        let short = schedule.accept(shape(Class::Decode, 0..1, &[1]));
        schedule.accept(shape(Class::Prefill, 0..1, &[100]));
        let mut ended = Vec::new();
        while let Some(unit) = schedule.next(now) {
            let ending = schedule.ending(&unit);
            let done = schedule.done(&unit, Duration::from_millis(1));
            let finished = done.iter().filter(|a| a.finished).map(|a| a.task);
            match schedule.is_empty() {
                true => assert_eq!(ending, [], "prefill is not a decode step"),
                false => assert_eq!(ending, finished.collect::<Vec<_>>()),
            }
            ended.extend(ending);
        }
        assert_eq!(ended, [short, long]);
    }

    #[test]
    fn a_task_walks_all_pieces_of_a_block_before_the_next_block() {
        let (mut schedule, now) = (Schedule::default(), Instant::now());
        let task = schedule.accept(shape(Class::Prefill, 3..5, &[100, 100, 50]));
        let mut seen = Vec::new();
        while let Some(unit) = schedule.next(now) {
            let advance = &schedule.done(&unit, Duration::from_secs(1))[0];
            assert_eq!(advance.task, task);
            seen.push((
                unit.block,
                unit.members[0].pieces.clone(),
                advance.block_done,
                advance.finished,
            ));
        }
        let expected = [
            (3, 0..1, false, false),
            (3, 1..2, false, false),
            (3, 2..3, true, false),
            (4, 0..1, false, false),
            (4, 1..2, false, false),
            (4, 2..3, true, true),
        ];
        assert_eq!(seen, expected);
        assert!(schedule.is_empty());
    }

    #[test]
    fn a_decode_step_goes_between_two_units_of_a_prefill() {
        let (mut schedule, now) = (Schedule::default(), Instant::now());
        let prefill = schedule.accept(shape(Class::Prefill, 0..2, &[100, 100]));
        assert_eq!(run(&mut schedule, now), Some((0, vec![prefill])));
        let decode = schedule.accept(shape(Class::Decode, 0..2, &[1]));
        assert_eq!(run(&mut schedule, now), Some((0, vec![decode])));
        assert_eq!(run(&mut schedule, now), Some((1, vec![decode])));
        assert_eq!(run(&mut schedule, now), Some((0, vec![prefill])));
    }

    #[test]
    fn classes_go_in_order_and_the_oldest_of_a_class_first() {
        let (mut schedule, now) = (Schedule::default(), Instant::now());
        let backward = schedule.accept(shape(Class::Backward, 0..2, &[64]));
        let forward = schedule.accept(shape(Class::Forward, 0..1, &[64]));
        let late = schedule.accept(shape(Class::Prefill, 0..1, &[64]));
        let later = schedule.accept(shape(Class::Prefill, 0..1, &[64]));
        let order: Vec<_> = std::iter::from_fn(|| run(&mut schedule, now))
            .map(|(_, who)| who[0])
            .collect();
        assert_eq!(order, [late, later, forward, backward, backward]);
    }

    #[test]
    fn units_of_gradients_have_a_size_of_their_own() {
        let (mut schedule, now) = (Schedule::default(), Instant::now());
        let mut there_and_back = shape(Class::Backward, 0..2, &[10; 40]);
        there_and_back.blocks = vec![0, 0];
        schedule.accept(there_and_back);
        let mut sizes = Vec::new();
        while let Some(unit) = schedule.next(now) {
            let pieces = unit.members[0].pieces.len();
            sizes.push((unit.members[0].position, pieces));
            // 10,000 tokens per second there, 2,000 back.
            let ms = pieces as u64 * if unit.members[0].position == 0 { 1 } else { 5 };
            schedule.done(&unit, Duration::from_millis(ms));
        }
        assert_eq!(sizes[..4], [(0, 1), (0, 18), (0, 18), (0, 3)]);
        assert_eq!(sizes[4..7], [(1, 1), (1, 3), (1, 3)]);
    }

    #[test]
    fn a_later_decode_step_catches_up_and_shares_the_rest() {
        let (mut schedule, now) = (Schedule::default(), Instant::now());
        let first = schedule.accept(shape(Class::Decode, 0..4, &[1]));
        run(&mut schedule, now);
        run(&mut schedule, now);
        let second = schedule.accept(shape(Class::Decode, 0..3, &[1]));
        let units: Vec<_> = std::iter::from_fn(|| run(&mut schedule, now)).collect();
        let expected = [
            (0, vec![second]),
            (1, vec![second]),
            (2, vec![first, second]),
            (3, vec![first]),
        ];
        assert_eq!(units, expected);
    }

    #[test]
    fn decode_steps_go_through_blocks_together_until_one_leaves_or_another_joins() {
        let now = Instant::now();
        let mut schedule = Schedule::new(UnitTimes {
            bulk: Duration::from_millis(2),
            decode: Duration::from_millis(4),
        });
        let next = |schedule: &mut Schedule| {
            let unit = schedule.next(now)?;
            schedule.done(&unit, Duration::from_millis(u64::from(unit.count)));
            Some((unit.block, unit.count, unit.members.len()))
        };
        // Nothing is known of the speed: block by block; then as many as the time allows.
        schedule.accept(shape(Class::Decode, 0..16, &[1]));
        assert_eq!(next(&mut schedule), Some((0, 1, 1)));
        assert_eq!(next(&mut schedule), Some((1, 4, 1)));
        // One that begins later and leaves earlier, after one that waits to be joined at block 5.
        schedule.accept(shape(Class::Decode, 3..8, &[1]));
        assert_eq!(next(&mut schedule), Some((3, 2, 1)));
        assert_eq!(next(&mut schedule), Some((5, 3, 2)));
        assert_eq!(next(&mut schedule), Some((8, 4, 1)));
        assert_eq!(next(&mut schedule), Some((12, 4, 1)));
        assert_eq!(next(&mut schedule), None);
    }

    #[test]
    fn a_decode_step_is_not_overtaken_for_ever() {
        let (mut schedule, now) = (Schedule::default(), Instant::now());
        let old = schedule.accept(shape(Class::Decode, 0..2, &[1]));
        run(&mut schedule, now);
        let mut units = 0;
        loop {
            schedule.accept(shape(Class::Decode, 0..1, &[1]));
            units += 1;
            if run(&mut schedule, now) == Some((1, vec![old])) {
                break;
            }
            assert!(units <= OVERTAKEN_LIMIT + 1, "overtaken {units} times");
        }
    }

    #[test]
    fn a_full_decode_unit_leaves_the_rest_for_the_next() {
        let (mut schedule, now) = (Schedule::default(), Instant::now());
        let tasks: Vec<_> = (0..5)
            .map(|_| schedule.accept(shape(Class::Decode, 0..1, &[DECODE_TOKENS])))
            .collect();
        assert_eq!(run(&mut schedule, now), Some((0, tasks[..4].to_vec())));
        assert_eq!(run(&mut schedule, now), Some((0, tasks[4..].to_vec())));
    }

    #[test]
    fn decode_steps_without_end_do_not_hold_up_a_prefill_for_ever() {
        let (mut schedule, start) = (Schedule::default(), Instant::now());
        let prefill = schedule.accept(shape(Class::Prefill, 0..1, &[64]));
        let mut decode_units = 0;
        for tick in 0..1000 {
            schedule.accept(shape(Class::Decode, 0..1, &[1]));
            let (_, who) = run(&mut schedule, start + Duration::from_millis(10) * tick).unwrap();
            if who == [prefill] {
                break;
            }
            decode_units += 1;
        }
        assert_eq!(
            decode_units, 50,
            "one unit after {BULK_PATIENCE:?} at 10 ms each"
        );
    }

    #[test]
    fn work_behind_decode_steps_without_end_gets_an_eighth_of_the_time() {
        let (mut schedule, mut now) = (Schedule::default(), Instant::now());
        let backward = schedule.accept(shape(Class::Backward, 0..2, &[64; 1000]));
        let (mut bulk, mut all) = (Duration::ZERO, Duration::ZERO);
        for _ in 0..2000 {
            schedule.accept(shape(Class::Decode, 0..1, &[1]));
            let unit = schedule.next(now).unwrap();
            let is_bulk = unit.members[0].task == backward;
            let elapsed = Duration::from_millis(if is_bulk { 20 } else { 10 });
            schedule.done(&unit, elapsed);
            (now, all) = (now + elapsed, all + elapsed);
            bulk += if is_bulk { elapsed } else { Duration::ZERO };
        }
        let share = bulk.as_secs_f64() / all.as_secs_f64();
        assert!((share - 0.125).abs() < 0.01, "{share}");
    }

    #[test]
    fn units_have_no_more_tokens_than_memory_is_planned_for() {
        let (mut schedule, now) = (Schedule::default().limited([200, 64]), Instant::now());
        let mut there_and_back = shape(Class::Backward, 0..2, &[64; 8]);
        there_and_back.blocks = vec![0, 0];
        schedule.accept(there_and_back);
        let mut sizes = Vec::new();
        while let Some(unit) = schedule.next(now) {
            sizes.push(unit.members[0].pieces.len());
            schedule.done(&unit, Duration::from_micros(1));
        }
        assert_eq!(sizes[..4], [1, 3, 3, 1]);
        assert_eq!(sizes[4..], [1; 8]);
    }

    #[test]
    fn units_grow_with_the_measured_speed_but_pieces_do_not_move() {
        let (mut schedule, now) = (Schedule::default(), Instant::now());
        schedule.accept(shape(Class::Forward, 0..2, &[64; 8]));
        let first = schedule.next(now).unwrap();
        assert_eq!(
            first.members[0].pieces,
            0..1,
            "one piece while the speed is not known"
        );
        schedule.done(&first, Duration::from_millis(5));
        let second = schedule.next(now).unwrap();
        assert_eq!(
            second.members[0].pieces,
            1..4,
            "three pieces of 5 ms in 20 ms, and a margin"
        );
    }

    /// Tokens of units of a prefill that take `cost(number of the unit)` ms a token.
    fn sizes(cost: impl Fn(usize) -> f64, units: usize) -> Vec<(usize, f64)> {
        let (mut schedule, now) = (Schedule::default(), Instant::now());
        schedule.accept(shape(Class::Prefill, 0..1, &[4; 20_000]));
        (0..units)
            .map(|number| {
                let unit = schedule.next(now).unwrap();
                let tokens = 4 * unit.members[0].pieces.len();
                let ms = cost(number) * tokens as f64;
                schedule.done(&unit, Duration::from_secs_f64(1e-3 * ms));
                (tokens, ms)
            })
            .collect()
    }

    #[test]
    fn units_of_uneven_cost_hardly_ever_take_longer_than_they_may() {
        // A token takes 0.4 to 0.5 ms; an even cost of 0.45 would allow units of 44 tokens.
        let noise = |number: usize| 0.4 + 0.1 * (number * 7919 % 101) as f64 / 100.0;
        let units = &sizes(noise, 1020)[20..];
        let late = units.iter().filter(|(_, ms)| *ms > 20.0).count();
        assert!(late <= units.len() / 100, "{late} of {}", units.len());
        let mean = units.iter().map(|(tokens, _)| *tokens).sum::<usize>() / units.len();
        assert!(mean >= 32, "{mean} tokens");
    }

    #[test]
    fn a_unit_that_was_disturbed_makes_the_next_smaller_at_once_and_is_forgotten() {
        let disturbed = |number| if number == 50 { 1.0 } else { 0.5 };
        let units = sizes(disturbed, 100);
        assert_eq!(units[50].0, 36);
        assert!(units[51].0 <= 24, "{}", units[51].0);
        assert!(units[99].0 >= 32, "{}", units[99].0);
    }
}
