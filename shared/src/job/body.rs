//! Encoding and checking of job bodies. Words are little-endian `u32`; 64-bit numbers take two.

use std::collections::HashSet;

use super::{
    JobBody, JobError, JobLimits, MAX_BODY_BYTES, MAX_ROWS, MAX_TOKENS, PageCopy, StepPages,
    WorkKind,
};
use crate::block::{BlockIndex, MAX_BLOCKS};
use crate::dtype::DType;
use crate::ids::PageId;
use crate::model::PAGE_TOKENS;

/// No adapter, no prompts, no slot.
const NONE: u32 = u32::MAX;

/// A piece of the arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SlotRef {
    /// First byte.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
}

impl SlotRef {
    /// Whether two slots share a byte.
    pub fn overlaps(self, other: SlotRef) -> bool {
        let end = |s: SlotRef| s.offset.saturating_add(s.len);
        self.len > 0 && other.len > 0 && self.offset < end(other) && other.offset < end(self)
    }

    fn check(self, arena_bytes: u64, want: u64) -> Result<(), JobError> {
        let inside = self.offset.checked_add(self.len).is_some_and(|end| end <= arena_bytes);
        if inside && self.len == want {
            Ok(())
        } else {
            Err(JobError::BadSlot { offset: self.offset, len: self.len })
        }
    }
}

/// Deep prompts of a job: `[blocks, batch, tokens, hidden]` in the block dtype.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Prompts {
    pub slot: SlotRef,
    /// Sequences: the job's batch, or 1 to use the same prompts for every row.
    pub batch: u32,
    /// Prompt tokens, at most the job's tokens.
    pub tokens: u32,
}

pub(super) fn encode(job: &JobBody, bytes: &mut Vec<u8>) {
    let mut out = BodyWriter(bytes);
    out.word(job.kind.code() as u32 | (job.dtype as u32) << 8);
    out.word(job.adapter.unwrap_or(NONE));
    for n in [job.batch, job.tokens, job.hidden] {
        out.word(n);
    }
    for n in [job.blocks.len(), job.pages.tables.len(), job.pages.copies.len()] {
        out.word(u32::try_from(n).unwrap_or(NONE));
    }
    out.slot(Some(job.input));
    out.slot(Some(job.output));
    out.slot(job.prompts.map(|p| p.slot));
    out.word(job.prompts.map_or(0, |p| p.batch));
    out.word(job.prompts.map_or(0, |p| p.tokens));
    out.slot(job.output_gradient);
    out.slot(job.prompt_gradient);
    job.blocks.iter().for_each(|b| out.word(b.0));
    job.pages.prefixes.iter().for_each(|n| out.word(*n));
    for table in &job.pages.tables {
        out.word(u32::try_from(table.len()).unwrap_or(NONE));
        table.iter().for_each(|page| out.word(page.0));
    }
    for copy in &job.pages.copies {
        out.word(copy.source.0);
        out.word(copy.destination.0);
        out.word(copy.tokens);
    }
}

struct BodyWriter<'a>(&'a mut Vec<u8>);

impl BodyWriter<'_> {
    fn word(&mut self, word: u32) {
        self.0.extend_from_slice(&word.to_le_bytes());
    }

    fn long(&mut self, long: u64) {
        self.0.extend_from_slice(&long.to_le_bytes());
    }

    fn slot(&mut self, slot: Option<SlotRef>) {
        let slot = slot.unwrap_or(SlotRef { offset: u64::MAX, len: u64::MAX });
        self.long(slot.offset);
        self.long(slot.len);
    }
}

struct BodyReader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl BodyReader<'_> {
    fn take<const N: usize>(&mut self) -> Result<[u8; N], JobError> {
        let bad = JobError::BadBody { at: self.at as u64 };
        let end = self.at.checked_add(N).ok_or(bad)?;
        let bytes = self.bytes.get(self.at..end).and_then(|s| s.try_into().ok()).ok_or(bad)?;
        self.at = end;
        Ok(bytes)
    }

    fn word(&mut self) -> Result<u32, JobError> {
        self.take().map(u32::from_le_bytes)
    }

    fn long(&mut self) -> Result<u64, JobError> {
        self.take().map(u64::from_le_bytes)
    }

    fn slot(&mut self) -> Result<Option<SlotRef>, JobError> {
        let slot = SlotRef { offset: self.long()?, len: self.long()? };
        Ok((slot.offset != u64::MAX).then_some(slot))
    }

    fn required_slot(&mut self) -> Result<SlotRef, JobError> {
        let at = self.at as u64;
        self.slot()?.ok_or(JobError::BadBody { at })
    }

    /// A count of items of which each takes at least `words` words, so that it cannot ask for more
    /// than the body holds.
    fn counted(&self, count: u32, words: usize) -> Result<usize, JobError> {
        let left = (self.bytes.len() - self.at) / 4;
        let count = count as usize;
        if count.checked_mul(words).is_some_and(|need| need <= left) {
            Ok(count)
        } else {
            Err(JobError::BadBody { at: self.at as u64 })
        }
    }

    fn words<T>(&mut self, count: usize, make: impl Fn(u32) -> T) -> Result<Vec<T>, JobError> {
        (0..count).map(|_| self.word().map(&make)).collect()
    }
}

pub(super) fn decode(bytes: &[u8], limits: &JobLimits) -> Result<JobBody, JobError> {
    if bytes.len() > MAX_BODY_BYTES {
        return Err(JobError::BodyTooLong { bytes: bytes.len() as u64 });
    }
    let job = parse(&mut BodyReader { bytes, at: 0 })?;
    check_shape(&job, limits)?;
    check_slots(&job, limits)?;
    match job.kind {
        WorkKind::Decode | WorkKind::Prefill => check_pages(&job, limits)?,
        WorkKind::Forward | WorkKind::Backward => {
            let extra = job.pages.prefixes.len() + job.pages.tables.len() + job.pages.copies.len();
            bounded(extra as u64, 0, 0)?;
        }
    }
    Ok(job)
}

fn parse(r: &mut BodyReader<'_>) -> Result<JobBody, JobError> {
    let head = r.word()?;
    let bad = JobError::BadBody { at: 0 };
    let kind = WorkKind::from_code(u64::from(head & 0xff)).ok_or(bad)?;
    let dtype = u8::try_from(head >> 8).ok().and_then(DType::from_repr).ok_or(bad)?;
    let adapter = Some(r.word()?).filter(|&a| a != NONE);
    let (batch, tokens, hidden) = (r.word()?, r.word()?, r.word()?);
    let (blocks, rows, copies) = (r.word()?, r.word()?, r.word()?);
    let (input, output) = (r.required_slot()?, r.required_slot()?);
    let prompt_slot = r.slot()?;
    let (prompt_batch, prompt_tokens) = (r.word()?, r.word()?);
    let prompts =
        prompt_slot.map(|slot| Prompts { slot, batch: prompt_batch, tokens: prompt_tokens });
    let (output_gradient, prompt_gradient) = (r.slot()?, r.slot()?);
    let blocks = r.counted(blocks, 1).and_then(|n| r.words(n, BlockIndex))?;
    let rows = r.counted(rows, 2)?;
    let prefixes = r.words(rows, |n| n)?;
    let mut tables = Vec::with_capacity(rows);
    for _ in 0..rows {
        let pages = r.word()?;
        let pages = r.counted(pages, 1)?;
        tables.push(r.words(pages, PageId)?);
    }
    let mut page_copies = Vec::with_capacity(r.counted(copies, 3)?);
    for _ in 0..copies {
        let (source, destination, tokens) = (PageId(r.word()?), PageId(r.word()?), r.word()?);
        page_copies.push(PageCopy { source, destination, tokens });
    }
    if r.at != r.bytes.len() {
        return Err(JobError::BadBody { at: r.at as u64 });
    }
    Ok(JobBody {
        kind,
        dtype,
        blocks,
        adapter,
        batch,
        tokens,
        hidden,
        pages: StepPages { prefixes, tables, copies: page_copies },
        input,
        output,
        prompts,
        output_gradient,
        prompt_gradient,
    })
}

fn bounded(value: u64, least: u64, limit: u64) -> Result<(), JobError> {
    if (least..=limit).contains(&value) {
        Ok(())
    } else {
        Err(JobError::OutOfBounds { value, limit })
    }
}

fn check_shape(job: &JobBody, limits: &JobLimits) -> Result<(), JobError> {
    bounded(job.blocks.len() as u64, 1, u64::from(MAX_BLOCKS))?;
    bounded(u64::from(job.batch), 1, u64::from(MAX_ROWS))?;
    bounded(u64::from(job.tokens), 1, u64::from(MAX_TOKENS))?;
    if job.kind.is_step() && job.kind != WorkKind::of_step(job.batch, job.tokens) {
        return Err(JobError::BadBody { at: 0 });
    }
    if job.hidden != limits.hidden {
        return Err(JobError::WrongHidden {
            got: u64::from(job.hidden),
            want: u64::from(limits.hidden),
        });
    }
    if job.dtype != limits.dtype {
        return Err(JobError::WrongDType { got: job.dtype as u64, want: limits.dtype as u64 });
    }
    if let Some(adapter) = job.adapter.filter(|&a| a >= limits.adapters) {
        return Err(JobError::UnknownAdapter {
            adapter: u64::from(adapter),
            loaded: u64::from(limits.adapters),
        });
    }
    let mut seen = vec![false; limits.span.block_count()];
    for block in &job.blocks {
        let local = limits
            .span
            .local(*block)
            .ok_or(JobError::BlockNotServed { block: u64::from(block.0) })?;
        // A step that names a block twice would write its pages twice.
        if std::mem::replace(&mut seen[local], true) && job.kind.is_step() {
            return Err(JobError::BlockNotServed { block: u64::from(block.0) });
        }
    }
    Ok(())
}

fn check_slots(job: &JobBody, limits: &JobLimits) -> Result<(), JobError> {
    let hidden_bytes = job.hidden_bytes();
    job.input.check(limits.arena_bytes, hidden_bytes)?;
    job.output.check(limits.arena_bytes, hidden_bytes)?;
    let row_bytes = u64::from(job.hidden) * job.dtype.size_bytes() as u64;
    let prompt_bytes = |batch: u32, tokens: u32| {
        (job.blocks.len() as u64 * u64::from(batch)).saturating_mul(u64::from(tokens) * row_bytes)
    };
    if let Some(p) = job.prompts {
        bounded(u64::from(p.tokens), 1, u64::from(job.tokens))?;
        if p.batch != 1 {
            bounded(u64::from(p.batch), u64::from(job.batch), u64::from(job.batch))?;
        }
        p.slot.check(limits.arena_bytes, prompt_bytes(p.batch, p.tokens))?;
    }
    match (job.kind, job.output_gradient) {
        (WorkKind::Backward, Some(slot)) => slot.check(limits.arena_bytes, hidden_bytes)?,
        (WorkKind::Backward, None) => {
            return Err(JobError::BadSlot { offset: u64::MAX, len: 0 });
        }
        (_, Some(slot)) => {
            return Err(JobError::BadSlot { offset: slot.offset, len: slot.len });
        }
        (_, None) => {}
    }
    match (job.kind, job.prompts, job.prompt_gradient) {
        (WorkKind::Backward, Some(p), Some(slot)) => {
            slot.check(limits.arena_bytes, prompt_bytes(job.batch, p.tokens))?;
        }
        (_, _, Some(slot)) => {
            return Err(JobError::BadSlot { offset: slot.offset, len: slot.len });
        }
        (_, _, None) => {}
    }
    check_aliases(job)
}

fn check_aliases(job: &JobBody) -> Result<(), JobError> {
    let inputs = [Some(job.input), job.prompts.map(|p| p.slot), job.output_gradient];
    let outputs = [Some(job.output), job.prompt_gradient];
    for output in outputs.into_iter().flatten() {
        if let Some(input) = inputs.into_iter().flatten().find(|i| i.overlaps(output)) {
            return Err(JobError::Aliased { offset: output.offset, other: input.offset });
        }
    }
    match job.prompt_gradient {
        Some(slot) if slot.overlaps(job.output) => {
            Err(JobError::Aliased { offset: slot.offset, other: job.output.offset })
        }
        _ => Ok(()),
    }
}

fn check_pages(job: &JobBody, limits: &JobLimits) -> Result<(), JobError> {
    bounded(job.pages.tables.len() as u64, u64::from(job.batch), u64::from(job.batch))?;
    // MAX_ROWS fits 16 bits.
    let mut writers: Vec<Option<u16>> = vec![None; limits.kv_pages as usize];
    let in_pool = |page: PageId| match page.0 < limits.kv_pages {
        true => Ok(page.0 as usize),
        false => {
            Err(JobError::BadPage { page: u64::from(page.0), pages: u64::from(limits.kv_pages) })
        }
    };
    for (row, (table, &prefix)) in (0u16..).zip(job.pages.tables.iter().zip(&job.pages.prefixes)) {
        bounded(u64::from(prefix), 0, u64::from(MAX_TOKENS))?;
        let writes = JobBody::written_pages(prefix, job.tokens);
        if table.len() < writes.end {
            return Err(JobError::ShortTable { have: table.len() as u64, need: writes.end as u64 });
        }
        for (position, &page) in table.iter().enumerate() {
            let index = in_pool(page)?;
            if writes.contains(&position) && writers[index].replace(row).is_some() {
                return Err(JobError::SharedPage { page: u64::from(page.0) });
            }
        }
    }
    check_reads(job, &writers)?;
    check_copies(job, in_pool)
}

/// Refuses a page that one row writes and another row reads: the device may do either first.
/// `writers` names the row that writes each page of the pool.
fn check_reads(job: &JobBody, writers: &[Option<u16>]) -> Result<(), JobError> {
    for (row, (table, &prefix)) in (0u16..).zip(job.pages.tables.iter().zip(&job.pages.prefixes)) {
        for page in table.iter().take((prefix as usize).div_ceil(PAGE_TOKENS)) {
            let writer = writers.get(page.0 as usize).copied().flatten();
            if writer.is_some_and(|writer| writer != row) {
                return Err(JobError::SharedPage { page: u64::from(page.0) });
            }
        }
    }
    Ok(())
}

/// A copy's destination is written once and read by no other copy.
fn check_copies(
    job: &JobBody,
    in_pool: impl Fn(PageId) -> Result<usize, JobError>,
) -> Result<(), JobError> {
    bounded(job.pages.copies.len() as u64, 0, u64::from(MAX_ROWS))?;
    let mut destinations = HashSet::with_capacity(job.pages.copies.len());
    for copy in &job.pages.copies {
        in_pool(copy.source)?;
        in_pool(copy.destination)?;
        bounded(u64::from(copy.tokens), 1, PAGE_TOKENS as u64)?;
        if !destinations.insert(copy.destination) {
            return Err(JobError::SharedPage { page: u64::from(copy.destination.0) });
        }
    }
    match job.pages.copies.iter().find(|c| destinations.contains(&c.source)) {
        Some(copy) => Err(JobError::SharedPage { page: u64::from(copy.source.0) }),
        None => Ok(()),
    }
}
