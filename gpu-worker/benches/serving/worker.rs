//! What an executor has, without its link, and what is measured on it.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use blocks::kv::page_layout;
use blocks::{BlockWeights, GradientWork, SavedActivations, Sums, Workspace, backward, forward};
use gpu_worker::schedule::{JobKey, Schedule, Unit, Walk};
use kernels::{Cpu, DType, KvPages, QuantType, StepRow, WeightView};
use model::BlockSpec;
use shared::ids::PageId;
use shared::job::WorkKind;
use shared::model::PAGE_TOKENS;

use crate::{BACK_PIECE, BLOCKS, PIECE, PREFIX, TOKENS};

/// What an executor has, without its link.
pub struct Worker<'w> {
    spec: &'w BlockSpec,
    dtype: DType,
    cpu: Cpu,
    blocks: Vec<BlockWeights<'w, Cpu>>,
    work: Workspace<Cpu>,
    gradients: GradientWork<Cpu>,
    pages: Vec<Vec<u8>>,
}

/// What a job of the schedule is.
enum BenchJob {
    Session(usize, Instant),
    Background,
}

/// Pages of session `index`; the background comes after all of them.
pub fn table(index: usize) -> Vec<PageId> {
    let per_session = (PREFIX + 1).div_ceil(PAGE_TOKENS);
    let first = index * per_session;
    (first..first + TOKENS / PAGE_TOKENS)
        .map(|page| PageId(u32::try_from(page).expect("few pages")))
        .collect()
}

impl<'w> Worker<'w> {
    /// A worker of blocks of `spec` whose tensors `view` finds by block and name.
    pub fn new<'v: 'w>(
        spec: &'w BlockSpec,
        dtype: DType,
        mut cpu: Cpu,
        view: impl Fn(usize, &str) -> Option<WeightView<'v>>,
    ) -> Worker<'w> {
        let blocks = (0..spec.num_blocks).map(|block| {
            BlockWeights::new(&mut cpu, spec, dtype, |name| view(block, name))
                .expect("all tensors are there")
        });
        let blocks = blocks.collect();
        let (work, gradients) = (Workspace::new(&mut cpu), GradientWork::new(&mut cpu));
        let page_bytes = page_layout(spec, dtype).page_bytes();
        let pages = vec![vec![0; 1024 * page_bytes]; spec.num_blocks];
        Worker { spec, dtype, cpu, blocks, work, gradients, pages }
    }

    pub fn forward(&mut self, block: usize, rows: &[StepRow<'_>], hidden: &mut [f32]) {
        let mut pages = KvPages::new(page_layout(self.spec, self.dtype), &mut self.pages[block]);
        let (cpu, weights) = (&mut self.cpu, &self.blocks[block]);
        forward(cpu, self.spec, weights, &mut self.work, rows, hidden, &mut pages)
            .expect("rows fit");
    }

    /// One session's steps of all blocks, one after the other with pauses.
    pub fn alone(&mut self, pause: Duration) {
        let pages = table(0);
        let (rows, mut times) = ([decode(&pages)], Vec::new());
        let mut hidden = vec![0.5; self.spec.hidden];
        for _ in 0..500 {
            std::thread::sleep(pause);
            let start = Instant::now();
            for block in 0..self.blocks.len() {
                self.forward(block, &rows, &mut hidden);
            }
            times.push(start.elapsed());
        }
        println!(
            "{} blocks of hidden size {}, one session: a step p10 {:.3} ms, p50 {:.3} ms, p90 {:.3} ms",
            self.blocks.len(),
            self.spec.hidden,
            quantile(&mut times, 0.1),
            quantile(&mut times, 0.5),
            quantile(&mut times, 0.9),
        );
    }

    /// Steps of all blocks by the number of rows: the least time of many.
    pub fn rows(&mut self, quant: QuantType) {
        let mut alone = f64::MAX;
        for count in [1, 2, 4, 8, 16, 32] {
            let tables: Vec<_> = (0..count).map(table).collect();
            let rows: Vec<_> = tables.iter().map(|pages| decode(pages)).collect();
            let least = self.least(&rows, Duration::from_secs(2), |_| ());
            alone = if count == 1 { least } else { alone };
            println!(
                "{quant}: {count:2} rows {:8.2} ms {:8.1} steps/s, {:.2} x one row",
                least * 1e3,
                count as f64 / least,
                count as f64 * alone / least
            );
        }
    }

    /// All blocks with one row, with 16, and with a prefill.
    pub fn products(&mut self, quant: QuantType) {
        let tables: Vec<_> = (0..16).map(table).collect();
        let rows: Vec<_> = tables.iter().map(|pages| decode(pages)).collect();
        let prefill = [StepRow::new(TOKENS, 0, &tables[0])];
        let [one, many, prefill] = [&rows[..1], &rows, &prefill]
            .map(|rows| self.least(rows, Duration::from_millis(700), |_| ()));
        println!(
            "{} {quant}: 1 row {:.2} ms, 16 rows {:.2} ms, a prefill of {TOKENS} tokens {:.1} ms",
            self.dtype,
            one * 1e3,
            many * 1e3,
            prefill * 1e3
        );
    }

    /// Seconds of one pass of the rows through all blocks: the least of those that fit into a time.
    pub fn least(
        &mut self,
        rows: &[StepRow<'_>],
        time: Duration,
        mut before_block: impl FnMut(usize),
    ) -> f64 {
        let tokens: usize = rows.iter().map(|row| row.tokens).sum();
        let mut hidden = vec![0.5; tokens * self.spec.hidden];
        let (mut least, began) = (f64::MAX, Instant::now());
        while began.elapsed() < time {
            let start = Instant::now();
            for block in 0..self.blocks.len() {
                before_block(block);
                hidden.fill(0.5);
                self.forward(block, rows, &mut hidden);
            }
            least = least.min(start.elapsed().as_secs_f64());
        }
        least
    }

    /// Serves sessions, and a job of `background` after the other, for some time.
    pub fn serve(
        &mut self,
        background: Option<WorkKind>,
        sessions: u64,
        think: Duration,
        time: Duration,
    ) {
        let (mut schedule, mut jobs) = (Schedule::default(), BTreeMap::new());
        let mut ready: Vec<Option<Instant>> = (0..sessions).map(|_| Some(Instant::now())).collect();
        let (mut sizes, mut waits) = (BTreeMap::<usize, u64>::new(), Vec::new());
        let (mut units, mut tokens, mut pending) = (Vec::new(), 0, false);
        let (mut passed, mut busy) = (0, Duration::ZERO);
        let mut noise = 1u64;
        let began = Instant::now();
        while began.elapsed() < time {
            for (session, ready) in ready.iter_mut().enumerate() {
                if let Some(at) = ready.take_if(|at| *at <= Instant::now()) {
                    let job = schedule.accept(walk(WorkKind::Decode));
                    jobs.insert(job, BenchJob::Session(session, at));
                }
            }
            if let (Some(class), false) = (background, pending) {
                jobs.insert(schedule.accept(walk(class)), BenchJob::Background);
                pending = true;
            }
            let Some(unit) = schedule.next(Instant::now()) else {
                std::hint::spin_loop();
                continue;
            };
            let start = Instant::now();
            let is_decode = self.unit(&unit, &jobs, background);
            let elapsed = start.elapsed();
            if is_decode {
                *sizes.entry(unit.members.len()).or_default() += 1;
            } else {
                units.push(elapsed);
                let piece = background.map_or(1, piece_tokens);
                passed += unit.members.iter().map(|m| m.pieces.len() * piece).sum::<usize>();
            }
            busy += elapsed;
            for advance in schedule.done(&unit, elapsed).iter().filter(|a| a.finished) {
                match jobs.remove(&advance.job) {
                    Some(BenchJob::Session(session, since)) => {
                        waits.push(since.elapsed());
                        // Half to one and a half of the time, so that sessions do not march in
                        // step.
                        noise = noise.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                        let part = 0.5 + (noise >> 40) as f64 / (1u64 << 24) as f64;
                        ready[session] = Some(Instant::now() + think.mul_f64(part));
                    }
                    _ => {
                        pending = false;
                        tokens += TOKENS;
                    }
                }
            }
        }
        let what = background.map_or("alone".to_owned(), |class| format!("beside {class:?}"));
        let rows: u64 = sizes.iter().map(|(size, count)| *size as u64 * count).sum();
        let batches: u64 = sizes.values().sum();
        println!(
            "{sessions} sessions {what}: {:.1} steps/s, p50 {:.1} ms, p99 {:.1} ms; rows of a batch: mean {:.1}",
            waits.len() as f64 / time.as_secs_f64(),
            quantile(&mut waits, 0.5),
            quantile(&mut waits, 0.99),
            rows as f64 / batches.max(1) as f64,
        );
        println!("    batches by rows: {sizes:?}");
        if background.is_some() {
            let own: Duration = units.iter().sum();
            println!(
                "    background: {:.1} % of the time, {:.0} tokens/s through a block, {:.1} tokens/s finished; {} units p50 {:.1} ms, p99 {:.1} ms, most {:.1} ms",
                100.0 * own.as_secs_f64() / busy.as_secs_f64(),
                passed as f64 / time.as_secs_f64(),
                tokens as f64 / time.as_secs_f64(),
                units.len(),
                quantile(&mut units, 0.5),
                quantile(&mut units, 0.99),
                quantile(&mut units, 1.0 - 1e-9),
            );
        }
    }

    /// Runs a unit; whether it was one of decode steps.
    fn unit(
        &mut self,
        unit: &Unit,
        jobs: &BTreeMap<JobKey, BenchJob>,
        background: Option<WorkKind>,
    ) -> bool {
        let block = unit.block as usize;
        let sessions: Vec<_> = unit
            .members
            .iter()
            .filter_map(|member| match jobs.get(&member.job) {
                Some(BenchJob::Session(session, _)) => Some(table(*session)),
                _ => None,
            })
            .collect();
        if !sessions.is_empty() {
            let rows: Vec<_> = sessions.iter().map(|pages| decode(pages)).collect();
            let mut hidden = vec![0.5; rows.len() * self.spec.hidden];
            self.forward(block, &rows, &mut hidden);
            return true;
        }
        let member = &unit.members[0];
        let own = table(64);
        let piece = background.map_or(1, piece_tokens);
        let is_back = background == Some(WorkKind::Backward) && member.position >= BLOCKS;
        // On the way back pieces are taken from the last to the first.
        let first = match is_back {
            true => TOKENS / piece - member.pieces.end,
            false => member.pieces.start,
        };
        let rows = [StepRow::new(member.pieces.len() * piece, first * piece, &own)];
        let mut hidden = vec![0.5; rows[0].tokens * self.spec.hidden];
        if is_back {
            self.back(block, &rows, &mut hidden);
        } else {
            self.forward(block, &rows, &mut hidden);
        }
        false
    }

    fn back(&mut self, block: usize, rows: &[StepRow<'_>], gradient: &mut [f32]) {
        let width = self.spec.kv_heads * self.spec.head_dim;
        let (x, mut keys) = (gradient.to_vec(), vec![0.0; TOKENS * width]);
        let mut values = keys.clone();
        let mut pages = KvPages::new(page_layout(self.spec, self.dtype), &mut self.pages[block]);
        let sums = Sums { keys: &mut keys[..], values: &mut values[..], starts: &[0] };
        let (cpu, weights, work) = (&mut self.cpu, &self.blocks[block], &mut self.gradients);
        backward(
            cpu,
            self.spec,
            weights,
            work,
            rows,
            &[],
            &x,
            gradient,
            sums,
            SavedActivations::default(),
            &mut pages,
        )
        .expect("rows fit");
    }
}

pub fn decode(pages: &[PageId]) -> StepRow<'_> {
    StepRow::new(1, PREFIX, pages)
}

fn walk(kind: WorkKind) -> Walk {
    let there = 0..BLOCKS as u32;
    let blocks = match kind {
        WorkKind::Backward => there.clone().chain(there.rev()).collect(),
        _ => there.collect(),
    };
    let pieces = match kind {
        WorkKind::Decode => vec![1],
        kind => vec![piece_tokens(kind); TOKENS / piece_tokens(kind)],
    };
    Walk::new(kind, blocks, pieces)
}

/// Tokens of a piece of a job in the background.
fn piece_tokens(kind: WorkKind) -> usize {
    match kind {
        WorkKind::Backward => BACK_PIECE,
        _ => PIECE,
    }
}

/// In milliseconds.
fn quantile(times: &mut [Duration], share: f64) -> f64 {
    times.sort();
    let place = (times.len() as f64 * share) as usize;
    times.get(place).map_or(0.0, |time| time.as_secs_f64() * 1e3)
}
