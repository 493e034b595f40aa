//! Jobs: what netd asks of a worker, in the form in which it crosses shared memory.
//!
//! A job is a fixed descriptor of 64 bytes in the submission ring, and a body of variable length in
//! the arena. It says everything and names no session: a worker is a function of (job, weights, KV
//! pages), and a new worker takes over where a dead one stopped. The worker copies the body out of
//! the arena, checks every number on its copy ([`JobBody::decode`]), and then uses only the copy.
//! Each job is answered once, by a [`Completion`] of 64 bytes in the completion ring.
//!
//! ```text
//! descriptor (8 words)              completion (8 words)
//! 0 magic | version | kind          0 magic | version | status code
//! 1 job id                          1 job id
//! 2 worker generation | netd gen.   2 worker generation | netd gen.
//! 3 body offset                     3 first number of an error
//! 4 body length                     4 second number of an error
//! 5 submitted at (monotonic ns)     5 ns from submission to start
//! 6 group | rank | world size       6 ns from start to completion
//! 7 zero                            7 zero
//!
//! body: header of 13 words, then blocks, prefix lengths, page counts, pages, copies, all little-endian u32
//! ```

use crate::block::{BlockIndex, Span};
use crate::dtype::DType;
use crate::ids::{Generation, GroupId, JobId, PageId, Rank, WorkerId, WorldSize};
use crate::model::{ModelFacts, PAGE_TOKENS};

mod body;
mod kind;

pub use body::{Prompts, SlotRef};
pub use kind::{DECODE_TOKENS, WorkKind};

/// Words of a ring entry.
pub const ENTRY_WORDS: usize = 8;

/// One entry of a ring, as plain words.
pub type Entry = [u64; ENTRY_WORDS];

/// Longest body that netd writes and a worker accepts, in bytes: 1,024 rows of 8,192 tokens need
/// half of it.
pub const MAX_BODY_BYTES: usize = 4 << 20;

/// Most rows (sequences) of one job.
pub const MAX_ROWS: u32 = 4096;

/// Most tokens per row of one job.
pub const MAX_TOKENS: u32 = 1 << 20;

const MAGIC: u64 = 0x5e9a_10b0;
const VERSION: u64 = 3;

/// The fixed part of a job, which travels in the submission ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct JobDescriptor {
    /// Name of the job.
    pub id: JobId,
    /// What it computes; known before the body is read, for scheduling.
    pub kind: WorkKind,
    /// The worker it is meant for: group, rank and world size.
    pub worker: WorkerId,
    /// The worker generation it is meant for.
    pub worker_generation: Generation,
    /// The netd generation that asks.
    pub netd_generation: Generation,
    /// Where the body lies in the arena.
    pub body: SlotRef,
    /// CLOCK_MONOTONIC at submission, in nanoseconds.
    pub submitted_ns: u64,
}

impl JobDescriptor {
    /// The ring entry.
    pub fn encode(&self) -> Entry {
        [
            MAGIC | VERSION << 32 | self.kind.code() << 48,
            self.id.0,
            generations(self.worker_generation, self.netd_generation),
            self.body.offset,
            self.body.len,
            self.submitted_ns,
            worker_word(self.worker),
            0,
        ]
    }

    /// Refuses a job that is meant for another worker than `worker`.
    ///
    /// # Errors
    /// [`JobError::WrongWorker`].
    pub fn check_worker(&self, worker: WorkerId) -> Result<(), JobError> {
        match self.worker == worker {
            true => Ok(()),
            false => Err(JobError::WrongWorker {
                got: worker_word(self.worker),
                want: worker_word(worker),
            }),
        }
    }

    /// Reads a ring entry that another process wrote.
    ///
    /// # Errors
    /// [`JobError::BadDescriptor`] when it is not a descriptor of this version,
    /// [`JobError::BodyTooLong`] when its body is longer than [`MAX_BODY_BYTES`].
    pub fn decode(entry: &Entry) -> Result<JobDescriptor, JobError> {
        let bad = JobError::BadDescriptor { word: entry[0] };
        if entry[0] & 0xffff_ffff != MAGIC || entry[0] >> 32 & 0xffff != VERSION {
            return Err(bad);
        }
        let kind = WorkKind::from_code(entry[0] >> 48).ok_or(bad)?;
        if entry[4] > MAX_BODY_BYTES as u64 {
            return Err(JobError::BodyTooLong { bytes: entry[4] });
        }
        let (worker_generation, netd_generation) = split_generations(entry[2]);
        Ok(JobDescriptor {
            id: JobId(entry[1]),
            kind,
            worker: worker_of(entry[6]),
            worker_generation,
            netd_generation,
            body: SlotRef { offset: entry[3], len: entry[4] },
            submitted_ns: entry[5],
        })
    }
}

fn generations(worker: Generation, netd: Generation) -> u64 {
    u64::from(worker.0) << 32 | u64::from(netd.0)
}

fn split_generations(word: u64) -> (Generation, Generation) {
    (Generation((word >> 32) as u32), Generation(word as u32))
}

fn worker_word(worker: WorkerId) -> u64 {
    u64::from(worker.group.0)
        | u64::from(worker.rank.0) << 16
        | u64::from(worker.world_size.0) << 32
}

fn worker_of(word: u64) -> WorkerId {
    WorkerId {
        group: GroupId(word as u16),
        rank: Rank((word >> 16) as u16),
        world_size: WorldSize((word >> 32) as u16),
    }
}

/// Copy of the first `tokens` rows of a page onto another page, in every block of the job, before
/// anything is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageCopy {
    /// Page to read.
    pub source: PageId,
    /// Page to write.
    pub destination: PageId,
    /// Tokens to copy, 1 to [`PAGE_TOKENS`].
    pub tokens: u32,
}

/// Where the keys and values of a step lie, the same pages in every block.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StepPages {
    /// Tokens in the cache before the step, per row.
    pub prefixes: Vec<u32>,
    /// Pages of each row, in order of position, up to the last token of the step.
    pub tables: Vec<Vec<PageId>>,
    /// Copies to make before anything is written.
    pub copies: Vec<PageCopy>,
}

/// The variable part of a job. Hidden states are `[batch, tokens, hidden]` in the block dtype.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JobBody {
    /// What to compute; equal to the descriptor's.
    pub kind: WorkKind,
    /// Type of all tensors in slots.
    pub dtype: DType,
    /// The blocks, in the order in which they run.
    pub blocks: Vec<BlockIndex>,
    /// Adapter to apply, by its index among those the worker loaded.
    pub adapter: Option<u32>,
    /// Sequences.
    pub batch: u32,
    /// Tokens per sequence in this job.
    pub tokens: u32,
    /// Width of the hidden states.
    pub hidden: u32,
    /// Where its keys and values lie. Empty unless the job is a step.
    pub pages: StepPages,
    /// Hidden states to read.
    pub input: SlotRef,
    /// Where to write the result: hidden states, or the gradient of the input.
    pub output: SlotRef,
    /// Deep prompts to add to the first positions of this job's tokens, before each block.
    pub prompts: Option<Prompts>,
    /// Backward: the gradient of the output, of the shape of the input.
    pub output_gradient: Option<SlotRef>,
    /// Backward with prompts: where to write their gradient, `[blocks, batch, prompt tokens,
    /// hidden]`.
    pub prompt_gradient: Option<SlotRef>,
}

/// What a worker can be asked for; every number of a job is checked against it.
#[derive(Clone, Copy, Debug)]
pub struct JobLimits {
    /// Length of the arena in bytes.
    pub arena_bytes: u64,
    /// Blocks of the worker.
    pub span: Span,
    /// Width of the hidden states.
    pub hidden: u32,
    /// Block dtype.
    pub dtype: DType,
    /// Pages per block in the pool.
    pub kv_pages: u32,
    /// Adapters loaded.
    pub adapters: u32,
}

impl JobLimits {
    /// Those of a worker that serves `span` of this model.
    pub fn of(model: &ModelFacts, span: Span, kv_pages: u32, arena_bytes: u64) -> JobLimits {
        JobLimits {
            arena_bytes,
            span,
            hidden: model.hidden_size,
            dtype: model.dtype,
            kv_pages,
            adapters: u32::try_from(model.adapters.len()).unwrap_or(u32::MAX),
        }
    }
}

impl JobBody {
    /// Tokens of all rows.
    pub fn total_tokens(&self) -> u64 {
        u64::from(self.batch) * u64::from(self.tokens)
    }

    /// Bytes of the hidden states of this job: `batch × tokens × hidden` elements.
    pub fn hidden_bytes(&self) -> u64 {
        self.total_tokens() * u64::from(self.hidden) * self.dtype.size_bytes() as u64
    }

    /// The pages that a step on `row` writes, as positions in the row's table: those that hold the
    /// tokens `prefix .. prefix + tokens`.
    pub fn written_pages(prefix: u32, tokens: u32) -> std::ops::Range<usize> {
        let first = prefix as usize / PAGE_TOKENS;
        let end = (prefix as usize + tokens as usize).div_ceil(PAGE_TOKENS);
        first..end.max(first)
    }

    /// The body as bytes for the arena. Never longer than [`MAX_BODY_BYTES`] for a job within
    /// [`MAX_ROWS`] whose tables netd made.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        self.encode_to(&mut bytes);
        bytes
    }

    /// Appends the body to `bytes`.
    pub fn encode_to(&self, bytes: &mut Vec<u8>) {
        body::encode(self, bytes);
    }

    /// Reads and checks a body that another process wrote.
    ///
    /// # Errors
    /// A [`JobError`] that names the first number that is wrong and its limit: truncated or
    /// overlong bodies, blocks that are not in the span, slots outside the arena or of the
    /// wrong length, an output that overlaps an input, pages outside the pool, tables too short
    /// for their row, a page that two rows would write, a page that one row would write and
    /// another read.
    pub fn decode(bytes: &[u8], limits: &JobLimits) -> Result<JobBody, JobError> {
        body::decode(bytes, limits)
    }
}

/// Why a worker refused or failed a job. Travels in a [`Completion`] as a code and two numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum JobError {
    /// The ring entry is no descriptor.
    #[error("ring entry starts with {word:#x}, which is no job descriptor of this build")]
    BadDescriptor {
        /// First word of the entry.
        word: u64,
    },
    /// The body exceeds [`MAX_BODY_BYTES`].
    #[error("job body of {bytes} bytes is longer than the limit of {MAX_BODY_BYTES}")]
    BodyTooLong { bytes: u64 },
    /// The body ends early, has bytes left over, or holds a code that no one writes.
    #[error("job body is malformed at byte {at}")]
    BadBody { at: u64 },
    /// Batch, tokens or number of blocks out of bounds.
    #[error("job asks for {value} where at most {limit} (and at least 1) is allowed")]
    OutOfBounds {
        value: u64,
        /// The most.
        limit: u64,
    },
    /// A block that this worker does not serve, or one that a step names twice.
    #[error("block {block} is not served by this worker, or named twice")]
    BlockNotServed { block: u64 },
    /// Hidden size of another model.
    #[error("hidden size {got} does not match the model's {want}")]
    WrongHidden {
        /// In the job.
        got: u64,
        /// Of the model.
        want: u64,
    },
    /// Another dtype than the worker's.
    #[error("dtype code {got} does not match the worker's {want}")]
    WrongDType {
        /// In the job.
        got: u64,
        /// Of the worker.
        want: u64,
    },
    /// A slot outside the arena or of the wrong length.
    #[error("slot of {len} bytes at {offset} is outside the arena or of the wrong length")]
    BadSlot { offset: u64, len: u64 },
    /// An output slot that overlaps an input.
    #[error("output slot at {offset} overlaps the slot at {other}")]
    Aliased {
        offset: u64,
        /// The other.
        other: u64,
    },
    /// A page outside the pool.
    #[error("page {page} is outside the pool of {pages} pages")]
    BadPage {
        page: u64,
        /// Pages in the pool.
        pages: u64,
    },
    /// A page that one job writes twice, or that one row writes and another reads.
    #[error("page {page} is written by one row or copy of the job and used by another")]
    SharedPage { page: u64 },
    /// A page table that is too short for the row.
    #[error("page table of {have} pages is too short, the row needs {need}")]
    ShortTable {
        have: u64,
        /// What the row needs.
        need: u64,
    },
    /// An adapter that is not loaded.
    #[error("adapter {adapter} is not among the {loaded} that are loaded")]
    UnknownAdapter {
        adapter: u64,
        /// How many there are.
        loaded: u64,
    },
    /// A kind of job that this worker does not compute.
    #[error("this worker does not compute jobs of kind {kind}")]
    Unsupported {
        /// Code of the kind.
        kind: u64,
    },
    /// The job was meant for another generation of the worker or came from another netd.
    #[error("job belongs to generation {got}, this is {want}")]
    Stale {
        /// In the job.
        got: u64,
        /// Of the worker.
        want: u64,
    },
    /// The job names another worker: another group, rank or world size.
    #[error("job is for worker {got:#x} (world size, rank, group), this is {want:#x}")]
    WrongWorker {
        /// In the job: 16 bits each of world size, rank and group.
        got: u64,
        /// Of the worker.
        want: u64,
    },
    /// The worker is ending and did not start the job.
    #[error("worker is draining")]
    Draining,
}

impl JobError {
    fn to_words(self) -> (u16, u64, u64) {
        match self {
            JobError::BadDescriptor { word } => (1, word, 0),
            JobError::BodyTooLong { bytes } => (2, bytes, 0),
            JobError::BadBody { at } => (3, at, 0),
            JobError::OutOfBounds { value, limit } => (4, value, limit),
            JobError::BlockNotServed { block } => (5, block, 0),
            JobError::WrongHidden { got, want } => (6, got, want),
            JobError::WrongDType { got, want } => (7, got, want),
            JobError::BadSlot { offset, len } => (8, offset, len),
            JobError::Aliased { offset, other } => (9, offset, other),
            JobError::BadPage { page, pages } => (10, page, pages),
            JobError::SharedPage { page } => (11, page, 0),
            JobError::ShortTable { have, need } => (12, have, need),
            JobError::UnknownAdapter { adapter, loaded } => (13, adapter, loaded),
            JobError::Unsupported { kind } => (14, kind, 0),
            JobError::Stale { got, want } => (15, got, want),
            JobError::Draining => (16, 0, 0),
            JobError::WrongWorker { got, want } => (17, got, want),
        }
    }

    fn from_words(code: u16, a: u64, b: u64) -> Option<JobError> {
        Some(match code {
            1 => JobError::BadDescriptor { word: a },
            2 => JobError::BodyTooLong { bytes: a },
            3 => JobError::BadBody { at: a },
            4 => JobError::OutOfBounds { value: a, limit: b },
            5 => JobError::BlockNotServed { block: a },
            6 => JobError::WrongHidden { got: a, want: b },
            7 => JobError::WrongDType { got: a, want: b },
            8 => JobError::BadSlot { offset: a, len: b },
            9 => JobError::Aliased { offset: a, other: b },
            10 => JobError::BadPage { page: a, pages: b },
            11 => JobError::SharedPage { page: a },
            12 => JobError::ShortTable { have: a, need: b },
            13 => JobError::UnknownAdapter { adapter: a, loaded: b },
            14 => JobError::Unsupported { kind: a },
            15 => JobError::Stale { got: a, want: b },
            16 => JobError::Draining,
            17 => JobError::WrongWorker { got: a, want: b },
            _ => return None,
        })
    }
}

/// Answer to a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion {
    pub id: JobId,
    /// Generation of the worker that answers.
    pub worker_generation: Generation,
    /// Generation of netd that asked.
    pub netd_generation: Generation,
    /// `Ok`: the output slot is written. `Err`: nothing of the job had an effect.
    pub result: Result<(), JobError>,
    /// From submission to the start of the work, in nanoseconds.
    pub queue_ns: u64,
    /// From the start of the work to its end, in nanoseconds.
    pub compute_ns: u64,
}

impl Completion {
    /// The ring entry.
    pub fn encode(&self) -> Entry {
        let (code, a, b) = self.result.err().map_or((0, 0, 0), JobError::to_words);
        [
            MAGIC | VERSION << 32 | u64::from(code) << 48,
            self.id.0,
            generations(self.worker_generation, self.netd_generation),
            a,
            b,
            self.queue_ns,
            self.compute_ns,
            0,
        ]
    }

    /// Reads a ring entry that a worker wrote; `None` if it is no completion of this version.
    pub fn decode(entry: &Entry) -> Option<Completion> {
        if entry[0] & 0xffff_ffff != MAGIC || entry[0] >> 32 & 0xffff != VERSION {
            return None;
        }
        let code = (entry[0] >> 48) as u16;
        let result =
            if code == 0 { Ok(()) } else { Err(JobError::from_words(code, entry[3], entry[4])?) };
        let (worker_generation, netd_generation) = split_generations(entry[2]);
        Some(Completion {
            id: JobId(entry[1]),
            worker_generation,
            netd_generation,
            result,
            queue_ns: entry[5],
            compute_ns: entry[6],
        })
    }
}

#[cfg(test)]
pub(crate) mod tests;
