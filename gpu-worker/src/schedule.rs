//! What the executor does next. A pure state machine: it knows of a job its shape (kind, blocks,
//! pieces), and the time it is told, and neither tensors nor devices.
//!
//! A *unit* is one block over some rows, or several blocks over decode steps that go the same way;
//! between two units anything may change. The rows of a job are cut into *pieces* at
//! positions that depend on the job alone. A job walks block by block, piece by piece:
//!
//! ```text
//! accept ──> at block 0, piece 0 ──next()/done()──> ... ──> block 0 done ──> block 1, piece 0 ... ──> finished
//! ```
//!
//! - Decode steps go before everything else. All that are at the same block run in one unit; of
//!   several blocks the lowest goes first, so that a step that came later catches up and shares the
//!   rest of the way. One that was overtaken too often goes first regardless.
//! - Then prefill, then forward, then backward; the oldest of a kind first. How many pieces make a
//!   unit follows the measured speed; where pieces begin and end does not.
//! - Work behind a crowd of decode steps gets an eighth of the time, and one unit every
//!   [`BULK_PATIENCE`] at least, so that it is slow but comes to an end.

use std::collections::BTreeMap;
use std::ops::Range;
use std::time::{Duration, Instant};

use model::sizing::BATCH_TOKENS;

mod pace;
mod walk;

use pace::Pace;
pub use walk::Walk;

/// How long units may take by measured speed.
#[derive(Clone, Copy, Debug)]
pub struct UnitTimes {
    /// Of prefill, forward and backward: what a decode step may have to wait for. Nearly all units
    /// keep it, not only half of them.
    pub bulk: Duration,
    /// Of decode steps through several blocks, which a step that comes later cannot join. Zero:
    /// block by block.
    pub decode: Duration,
}

impl UnitTimes {
    /// Of a processor, which gains nothing from going through several blocks at once.
    pub const PROCESSOR: UnitTimes =
        UnitTimes { bulk: Duration::from_millis(20), decode: Duration::ZERO };
}

/// Longest time that decode steps hold up everything else.
pub const BULK_PATIENCE: Duration = Duration::from_millis(500);

/// How many times the length of its last unit decode steps hold up everything else, up to
/// [`BULK_PATIENCE`]: what makes an eighth.
const DECODE_SHARE: u32 = 7;

/// Most tokens of a decode step ([`shared::job::WorkKind::Decode`]).
pub const DECODE_TOKENS: usize = shared::job::DECODE_TOKENS as usize;

/// Units of other decode steps that one waits through before it goes first: several passes over a
/// large model.
const OVERTAKEN_LIMIT: u32 = 256;

/// Name of a job, in order of arrival; the same on all ranks of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct JobKey(pub u64);

/// One block, or several, over some rows of one or, for decode steps, several jobs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unit {
    /// The first block, by index in the model.
    pub block: u32,
    /// Blocks from there on, at least one; more only for decode steps that all go through them.
    pub count: u32,
    /// Who takes part; never empty.
    pub members: Vec<UnitMember>,
}

/// The part of one job in a unit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnitMember {
    pub job: JobKey,
    /// Position of the first block among those of the job.
    pub position: usize,
    /// Its pieces that take part.
    pub pieces: Range<usize>,
}

/// What a unit meant for one of its members.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Advance {
    pub job: JobKey,
    /// Positions of the blocks that the unit worked on.
    pub positions: Range<usize>,
    /// All pieces have passed these blocks.
    pub block_done: bool,
    /// All blocks are done; the job is forgotten.
    pub finished: bool,
}

#[derive(Debug)]
struct QueuedJob {
    walk: Walk,
    overtaken: u32,
}

/// The jobs that are accepted and not finished.
#[derive(Debug)]
pub struct Schedule {
    times: UnitTimes,
    /// Most tokens of units other than decode steps, there and on the way back; a piece may have
    /// more.
    most_tokens: [usize; 2],
    jobs: BTreeMap<JobKey, QueuedJob>,
    arrived: u64,
    /// Of units of prefill and forward.
    pace: Pace,
    /// Of units of gradients.
    back_pace: Pace,
    /// Of units of the last block before the way back.
    keys_pace: Pace,
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
    /// A schedule without jobs.
    pub fn new(times: UnitTimes) -> Schedule {
        Schedule {
            times,
            most_tokens: [usize::MAX; 2],
            jobs: BTreeMap::new(),
            arrived: 0,
            pace: Pace::default(),
            back_pace: Pace::default(),
            keys_pace: Pace::default(),
            decode_block: None,
            held_since: None,
            bulk_time: None,
        }
    }

    /// The same, with a bound on the tokens of units other than decode steps, there and on the way
    /// back.
    #[must_use]
    pub fn limited(mut self, most_tokens: [usize; 2]) -> Schedule {
        self.most_tokens = most_tokens;
        self
    }

    /// Takes a job on, at its first block.
    pub fn accept(&mut self, walk: Walk) -> JobKey {
        let id = JobKey(self.arrived);
        self.arrived += 1;
        self.jobs.insert(id, QueuedJob { walk, overtaken: 0 });
        id
    }

    /// Tasks that are not finished.
    pub fn len(&self) -> usize {
        self.jobs.len()
    }

    /// Whether nothing is to be done.
    pub fn is_empty(&self) -> bool {
        self.jobs.is_empty()
    }

    /// Forgets a job.
    pub fn remove(&mut self, job: JobKey) {
        self.jobs.remove(&job);
    }

    /// Forgets all jobs; the measured speed stays.
    pub fn clear(&mut self) {
        self.jobs.clear();
        self.held_since = None;
    }

    /// The unit to run now. It is not taken off: [`done`](Self::done) or [`remove`](Self::remove)
    /// is.
    pub fn next(&mut self, now: Instant) -> Option<Unit> {
        let bulk = self.bulk();
        let decode = self.decode_block();
        match (decode, bulk) {
            (None, None) => None,
            (Some(block), None) => Some(self.decode_unit(block)),
            (None, Some(job)) => self.bulk_unit(job),
            (Some(block), Some(job)) => {
                let since = *self.held_since.get_or_insert(now);
                if now.saturating_duration_since(since) >= self.patience() {
                    self.bulk_unit(job)
                } else {
                    Some(self.decode_unit(block))
                }
            }
        }
    }

    /// How long decode steps may hold up everything else.
    fn patience(&self) -> Duration {
        self.bulk_time
            .map_or(BULK_PATIENCE, |time| time.saturating_mul(DECODE_SHARE).min(BULK_PATIENCE))
    }

    /// The unit ran and took `elapsed`.
    pub fn done(&mut self, unit: &Unit, elapsed: Duration) -> Vec<Advance> {
        self.measure(unit, elapsed);
        unit.members.iter().filter_map(|m| self.advance(m, unit.count as usize)).collect()
    }

    /// The decode steps that `unit` finishes.
    pub fn ending(&self, unit: &Unit) -> Vec<JobKey> {
        let is_last = |member: &&UnitMember| {
            let end = member.position + unit.count as usize;
            let walk = self.jobs.get(&member.job).map(|job| &job.walk);
            walk.is_some_and(|walk| walk.is_decode() && end >= walk.blocks.len())
        };
        let members = unit.members.iter().filter(is_last);
        members.map(|member| member.job).collect()
    }

    fn advance(&mut self, member: &UnitMember, blocks: usize) -> Option<Advance> {
        let advance = self.jobs.get_mut(&member.job)?.walk.advance(member, blocks);
        if advance.finished {
            self.jobs.remove(&member.job);
        }
        Some(advance)
    }

    fn measure(&mut self, unit: &Unit, elapsed: Duration) {
        let is_decode = |m: &UnitMember| {
            let job = self.jobs.get(&m.job);
            job.is_some_and(|job| job.walk.is_decode())
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
        let walk = self.jobs.get(&member.job).map(|job| &job.walk);
        let Some(walk) = walk.filter(|walk| !walk.is_decode()) else {
            return;
        };
        self.held_since = None;
        self.bulk_time = Some(elapsed);
        let tokens: usize = walk.pieces.get(member.pieces.clone()).unwrap_or_default().iter().sum();
        if walk.is_back(member.position) {
            self.back_pace.add(tokens, elapsed);
        } else if walk.is_last_forward(member.position) {
            self.keys_pace.add(tokens, elapsed);
        } else {
            self.pace.add(tokens, elapsed);
        }
    }

    /// The oldest job of the first kind other than decode.
    fn bulk(&self) -> Option<JobKey> {
        let others = self.jobs.iter().filter(|(_, job)| !job.walk.is_decode());
        others.min_by_key(|&(&id, job)| (job.walk.kind, id)).map(|(&id, _)| id)
    }

    fn bulk_unit(&self, id: JobKey) -> Option<Unit> {
        let walk = &self.jobs.get(&id)?.walk;
        let [there, back] = self.most_tokens;
        let (pace, most) = if walk.is_back(walk.position) {
            (self.back_pace, back)
        } else if walk.is_last_forward(walk.position) {
            (self.keys_pace, there)
        } else {
            (self.pace, there)
        };
        let budget = pace.tokens(self.times.bulk);
        let (mut end, mut tokens) = (walk.piece, 0);
        for piece in walk.pieces.iter().skip(walk.piece) {
            tokens += piece;
            if end > walk.piece && (tokens as f64 > budget || tokens > most) {
                break;
            }
            end += 1;
        }
        let members =
            vec![UnitMember { job: id, position: walk.position, pieces: walk.piece..end }];
        Some(Unit { block: walk.block(), count: 1, members })
    }

    fn decode(&self) -> impl Iterator<Item = (&JobKey, &QueuedJob)> {
        self.jobs.iter().filter(|(_, job)| job.walk.is_decode())
    }

    fn decode_block(&self) -> Option<u32> {
        let patient = self.decode().find(|(_, job)| job.overtaken >= OVERTAKEN_LIMIT);
        let lowest = || self.decode().map(|(_, job)| job.walk.block()).min();
        patient.map(|(_, job)| job.walk.block()).or_else(lowest)
    }

    fn decode_unit(&mut self, block: u32) -> Unit {
        let (mut members, mut tokens) = (Vec::new(), 0);
        for (&id, job) in self.jobs.iter_mut().filter(|(_, job)| job.walk.is_decode()) {
            let QueuedJob { walk, overtaken } = job;
            let more = tokens + walk.tokens();
            if walk.block() == block && (members.is_empty() || more <= BATCH_TOKENS) {
                tokens = more;
                *overtaken = 0;
                let pieces = 0..walk.pieces.len();
                members.push(UnitMember { job: id, position: walk.position, pieces });
            } else {
                *overtaken += 1;
            }
        }
        let count = self.shared_blocks(block, &members);
        Unit { block, count, members }
    }

    /// Blocks from `block` on that all members go through next, up to where somebody waits to join
    /// them, as far as the time of a unit goes.
    fn shared_blocks(&self, block: u32, members: &[UnitMember]) -> u32 {
        let blocks_in_time = self
            .decode_block
            .map_or(0.0, |seconds| self.times.decode.as_secs_f64() / seconds.max(1e-7));
        let goes_on = |member: &UnitMember, count: u32| {
            let job = self.jobs.get(&member.job);
            let next = job.and_then(|job| job.walk.blocks.get(member.position + count as usize));
            next == Some(&(block + count))
        };
        let is_awaited = |next: u32| self.decode().any(|(_, job)| job.walk.block() == next);
        let mut count = 1;
        while f64::from(count) < blocks_in_time.floor()
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
