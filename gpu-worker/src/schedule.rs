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

mod pace;

use pace::Pace;

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
mod tests;
