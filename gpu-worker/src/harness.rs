//! What the tests of the executor and of the worker process stand on: a tiny model made ready by
//! prepare, the segments that a supervisor would make, and netd's end of a link with sessions that
//! keep page tables.

use std::collections::HashMap;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use kernels::ops::convert;
use model::BlockSpec;
use model::manifest::Manifest;
use shared::block::{BlockIndex, Span};
use shared::config::{PrepareConfig, QuantChoice, QuantType};
use shared::dtype::DType;
use shared::ids::{JobId, PageId};
use shared::job::{
    Completion, Entry, JobBody, JobDescriptor, JobError, JobLimits, PageCopy, SlotRef, WorkKind,
};
use shared::model::{ModelFacts, PAGE_TOKENS};
use shared::shm::arena::ArenaMap;
use shared::shm::doorbell::Doorbell;
use shared::shm::kv::KvMap;
use shared::shm::pair::RingIdentity;
use shared::shm::segment::{MemfdSegment, SegmentError};
use tempfile::TempDir;

use testkit::configs::prepare_config;
use testkit::jobs::job_body;
pub(crate) use testkit::link::{ARENA_BYTES, LinkParts, another};
use testkit::models::{
    Tensors, adapted_modules, llama_config, llama_tensors, values, write_adapter, write_model,
};

#[cfg(feature = "emu")]
use model::sizing::{unit_tokens, work_bytes};
use prepare::Inspected;
pub(crate) use testkit::process::{
    DEADLINE, DownEnd, Seat, Spawned, UpEnd, as_child, spawn, unique, wait, worker_id,
};

/// Pages per block.
pub(crate) const KV_PAGES: u32 = 64;

/// Blocks of the model.
pub(crate) const BLOCKS: u32 = 3;

/// The bodies of jobs lie in the upper half of the arena.
const BODIES: u64 = ARENA_BYTES as u64 / 2;
const BODY_BYTES: u64 = 4096;

/// Tensors lie in the lower half, two pieces per job.
const SLOT_BYTES: u64 = 16384;

/// A model made ready.
pub(crate) struct Model {
    _dir: TempDir,
    pub(crate) path: PathBuf,
    pub(crate) manifest: Manifest,
    pub(crate) spec: BlockSpec,
    /// What its worker may keep for gradients.
    pub(crate) gradient_bytes: u64,
}

impl Model {
    pub(crate) fn new(dtype: DType) -> Model {
        Model::stored(dtype, QuantType::None, &llama_config(BLOCKS as usize))
    }

    /// With so many adapters.
    pub(crate) fn with_adapters(dtype: DType, adapters: usize) -> Model {
        let config = llama_config(BLOCKS as usize);
        Model::made(dtype, QuantType::None, &config, adapters)
    }

    /// A model of these tensors by another config, stored as `quant`.
    pub(crate) fn stored(dtype: DType, quant: QuantType, config: &serde_json::Value) -> Model {
        Model::made(dtype, quant, config, 0)
    }

    fn made(dtype: DType, quant: QuantType, config: &serde_json::Value, adapters: usize) -> Model {
        let tensors = llama_tensors(BLOCKS as usize, dtype);
        Model::of_tensors(dtype, quant, config, &tensors, adapters)
    }

    /// A model of other tensors.
    pub(crate) fn of_tensors(
        dtype: DType,
        quant: QuantType,
        config: &serde_json::Value,
        tensors: &Tensors,
        adapters: usize,
    ) -> Model {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("tiny");
        write_model(&folder, config, tensors);
        let modules = |seed| adapted_modules(config, seed);
        let config = PrepareConfig {
            dtype: Some(dtype),
            quant_type: QuantChoice::Named(quant),
            adapters: (0..adapters)
                .map(|seed| {
                    let folder = dir.path().join(format!("adapter-{seed}"));
                    write_adapter(&folder, BLOCKS as usize, seed, &modules(seed));
                    folder.to_str().unwrap().to_owned()
                })
                .collect(),
            ..prepare_config(&folder, dir.path().join("cache"))
        };
        let mut inspected = Inspected::new(&config).unwrap();
        let manifest = inspected.make_ready(span(), |_| Ok(())).unwrap();
        let path = dir.path().join("manifest.json");
        manifest.write(&path).unwrap();
        Model {
            gradient_bytes: shared::model::GRADIENT_BYTES,
            _dir: dir,
            path,
            manifest,
            spec: inspected.spec,
        }
    }

    pub(crate) fn facts(&self) -> &ModelFacts {
        &self.manifest.model
    }

    pub(crate) fn limits(&self) -> JobLimits {
        JobLimits::of(self.facts(), span(), KV_PAGES, ARENA_BYTES as u64)
    }
}

/// All blocks.
pub(crate) fn span() -> Span {
    Span::new(0, BLOCKS).unwrap()
}

/// A kv segment full of NaN: a free page must never show.
pub(crate) fn kv_segment(facts: &ModelFacts) -> MemfdSegment {
    let segment =
        MemfdSegment::create(&unique("kv"), facts.kv_segment_bytes(span(), KV_PAGES)).unwrap();
    // Not through a mapping: its lock could still be there when the worker maps the segment.
    let file = std::fs::File::from(segment.try_clone().unwrap());
    file.write_all_at(&vec![0xff; segment.len()], 0).unwrap();
    segment
}

/// Maps a kv segment in this process. Its lock can outlive an earlier mapping for a moment: a
/// process that another test is starting has a copy of every descriptor until it runs its own
/// program.
pub(crate) fn alone(segment: &MemfdSegment) -> KvMap {
    let until = Instant::now() + DEADLINE;
    loop {
        match KvMap::map(segment) {
            Ok(map) => return map,
            Err(SegmentError::Busy(_)) if Instant::now() < until => std::thread::yield_now(),
            Err(error) => panic!("{error}"),
        }
    }
}

/// netd's end of a link.
pub(crate) struct Netd {
    jobs: shared::shm::ring::Producer<shared::shm::pair::RingHandle>,
    answers: shared::shm::ring::Consumer<shared::shm::pair::RingHandle>,
    pub(crate) arena: ArenaMap,
    parts: LinkParts,
    submitted: u64,
    early: HashMap<JobId, Completion>,
}

impl Netd {
    /// netd's end of this link.
    pub(crate) fn of(parts: LinkParts) -> Netd {
        let (jobs, answers) = parts.netd_end();
        let arena = ArenaMap::map(&parts.arena).unwrap();
        Netd { jobs, answers, arena, parts, submitted: 0, early: HashMap::new() }
    }

    /// Slots for the input and the output of the next job.
    pub(crate) fn slots(&self, bytes: u64) -> (SlotRef, SlotRef) {
        assert!(bytes <= SLOT_BYTES);
        let at = self.submitted % (BODIES / (2 * SLOT_BYTES)) * 2 * SLOT_BYTES;
        (SlotRef { offset: at, len: bytes }, SlotRef { offset: at + SLOT_BYTES, len: bytes })
    }

    /// Submits a job and wakes the worker.
    pub(crate) fn submit(&mut self, body: &JobBody) -> JobId {
        let id = self.push(body);
        self.wake();
        id
    }

    /// Submits a job without waking the worker.
    pub(crate) fn push(&mut self, body: &JobBody) -> JobId {
        self.push_bytes(body.kind, &body.encode())
    }

    /// Submits bytes in place of a body.
    pub(crate) fn push_bytes(&mut self, kind: WorkKind, body: &[u8]) -> JobId {
        let slot =
            SlotRef { offset: BODIES + self.submitted % 256 * BODY_BYTES, len: body.len() as u64 };
        assert!(slot.len <= BODY_BYTES);
        self.arena.write(slot.offset, body).unwrap();
        let id = JobId(self.submitted);
        self.push_entry(self.descriptor(id, kind, slot).encode());
        id
    }

    pub(crate) fn descriptor(&self, id: JobId, kind: WorkKind, body: SlotRef) -> JobDescriptor {
        let RingIdentity { worker, worker_generation, netd_generation } = self.parts.identity;
        JobDescriptor {
            id,
            kind,
            worker,
            worker_generation,
            netd_generation,
            body,
            submitted_ns: 0,
        }
    }

    pub(crate) fn push_entry(&mut self, entry: Entry) {
        self.submitted += 1;
        let until = Instant::now() + DEADLINE;
        while let Err(full) = self.jobs.push(entry) {
            assert!(Instant::now() < until, "{full}");
            self.wake();
            std::thread::yield_now();
        }
    }

    pub(crate) fn wake(&mut self) {
        self.jobs.ring_if_sleeping(&self.parts.submission_bell).unwrap();
    }

    /// Rings the bell whether the worker sleeps or not, as its control thread does.
    pub(crate) fn wake_always(&self) {
        self.parts.submission_bell.ring().unwrap();
    }

    /// The bell on which the worker sleeps.
    pub(crate) fn bell(&self) -> Doorbell {
        another(&self.parts.submission_bell)
    }

    /// Publishes an index that no honest netd can reach.
    pub(crate) fn corrupt(&self) {
        let file = std::fs::File::from(self.parts.rings());
        // The tail of the submission ring is its first word, after the header of 128 bytes.
        file.write_all_at(&(u64::MAX / 2).to_ne_bytes(), 128).unwrap();
        self.wake_always();
    }

    /// The next answer; `None` if none comes in time.
    pub(crate) fn next(&mut self, timeout: Duration) -> Option<Completion> {
        let until = Instant::now() + timeout;
        loop {
            if let Some(entry) = self.answers.pop().unwrap() {
                return Some(Completion::decode(&entry).expect("a completion"));
            }
            let left = until.checked_duration_since(Instant::now())?;
            self.answers
                .wait(
                    &self.parts.completion_bell,
                    Duration::ZERO,
                    left.min(Duration::from_millis(50)),
                )
                .unwrap();
        }
    }

    /// The answer to `id`.
    pub(crate) fn answer(&mut self, id: JobId) -> Result<(), JobError> {
        loop {
            if let Some(completion) = self.early.remove(&id) {
                return completion.result;
            }
            let completion = self.next(DEADLINE).expect("an answer in time");
            assert!(self.early.insert(completion.id, completion).is_none(), "answered twice");
        }
    }

    pub(crate) fn write(&self, slot: SlotRef, dtype: DType, values: &[f32]) {
        let mut bytes = vec![0u8; values.len() * dtype.size_bytes()];
        convert::from_f32(dtype, values, &mut bytes);
        self.arena.write(slot.offset, &bytes).unwrap();
    }

    /// The bits of an output.
    pub(crate) fn read(&self, slot: SlotRef) -> Vec<u8> {
        let mut bytes = vec![0; slot.len as usize];
        self.arena.read(slot.offset, &mut bytes).unwrap();
        bytes
    }

    /// Runs a job to its end: the bits of its output.
    pub(crate) fn call(&mut self, body: &JobBody) -> Result<Vec<u8>, JobError> {
        let id = self.submit(body);
        self.answer(id).map(|()| self.read(body.output))
    }

    /// A job over all blocks on `input` `[batch, tokens, hidden]`, written to its slot.
    pub(crate) fn job(
        &self,
        kind: WorkKind,
        limits: &JobLimits,
        batch: u32,
        input: &[f32],
    ) -> JobBody {
        let tokens = input.len() as u32 / limits.hidden / batch;
        let (input_slot, output) = self.slots((input.len() * limits.dtype.size_bytes()) as u64);
        self.write(input_slot, limits.dtype, input);
        JobBody {
            dtype: limits.dtype,
            hidden: limits.hidden,
            input: input_slot,
            output,
            ..job_body(kind, batch, tokens, BLOCKS)
        }
    }
}

/// Pages in an order that looks like that of a server which ran for a week.
pub(crate) fn shuffled_pages() -> Vec<PageId> {
    (0..KV_PAGES).map(|i| PageId(i * 37 % KV_PAGES)).collect()
}

/// A session of one row, as netd keeps it.
#[derive(Clone)]
pub(crate) struct Session {
    pub(crate) table: Vec<PageId>,
    pub(crate) prefix: u32,
    pub(crate) copies: Vec<PageCopy>,
}

impl Session {
    pub(crate) fn new() -> Session {
        Session { table: vec![], prefix: 0, copies: vec![] }
    }

    /// The job of a step on `input`; pages are taken from `free`.
    pub(crate) fn step(
        &mut self,
        netd: &Netd,
        limits: &JobLimits,
        free: &mut Vec<PageId>,
        input: &[f32],
    ) -> JobBody {
        let mut body = netd.job(WorkKind::Decode, limits, 1, input);
        body.kind = WorkKind::of_step(body.batch, body.tokens);
        while self.table.len() * PAGE_TOKENS < (self.prefix + body.tokens) as usize {
            self.table.push(free.pop().expect("a free page"));
        }
        body.pages.prefixes = vec![self.prefix];
        body.pages.tables = vec![self.table.clone()];
        body.pages.copies = std::mem::take(&mut self.copies);
        self.prefix += body.tokens;
        body
    }
}

/// Hidden states of `tokens` tokens, of unit size, exact in bfloat16.
pub(crate) fn input(tokens: usize, seed: usize) -> Vec<f32> {
    let exact = |v: f32| kernels::ops::convert::round(DType::Bf16, v);
    values(&[tokens * 64], seed).into_iter().map(|v| exact((v - 1.0) * 5.0)).collect()
}

/// The first block alone.
pub(crate) fn first_block() -> Vec<BlockIndex> {
    vec![BlockIndex(0)]
}

/// What a device is planned to need beside weights and pages.
#[cfg(feature = "emu")]
pub(crate) fn planned_work(spec: &BlockSpec) -> u64 {
    let tokens = unit_tokens(spec);
    let scratch = kernels::cuda::scratch::planned_bytes(&spec.dimensions(), tokens);
    work_bytes(spec, tokens, scratch)
}
