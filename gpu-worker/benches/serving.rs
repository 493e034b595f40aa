//! What sessions see of the schedule: sizes of the batches, steps per second, and the time of a
//! step with and without a prefill and a backward in the background. Beside it, what a block costs
//! by the number of rows.
//!
//!     cargo bench -p gpu-worker --bench serving -- [SECONDS] [--sessions N] [--think MILLISECONDS]
//! [--only tiny|products]
//!
//! `--only tiny` measures a step of a tiny model instead, with pauses as between the steps of one
//! client; `--only products` what blocks cost in each format: one row, 16, and a prefill.
//!
//! Four Llama blocks of hidden size 2048 (184 M parameters) behind the worker's own schedule, in
//! one thread as in the executor; rings and network are left out. A session sends its next step
//! some time after the answer: what a client and a network take.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use gpu_worker::block::{
    BlockInput, BlockWeights, GradientWork, SavedActivations, Sums, Workspace, backward, forward,
};
use gpu_worker::kv::page_layout;
use gpu_worker::schedule::{Class, JobKey, JobShape, Schedule, Unit};
use kernels::{Cpu, DType, KvPages, QuantType, StepRow, WeightView, quant};
use model::BlockSpec;
use serde_json::json;
use shared::ids::PageId;
use shared::model::PAGE_TOKENS;

const BLOCKS: usize = 4;
/// Position of every decode step.
const PREFIX: usize = 128;
/// Tokens of a prefill or backward in the background.
const TOKENS: usize = 512;
/// Where the engine cuts sequences of this model, and gradients.
const PIECE: usize = 4;
const BACK_PIECE: usize = 16;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let after = |flag: &str| {
        let place = arguments.iter().position(|a| a == flag)?;
        arguments.get(place + 1)?.parse::<u64>().ok()
    };
    let seconds = arguments.first().and_then(|a| a.parse().ok()).unwrap_or(5);
    let sessions = after("--sessions").unwrap_or(16);
    let think = Duration::from_millis(after("--think").unwrap_or(3));
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    println!("{threads} threads, load {}", load.trim());
    let tiny = Bytes::new(spec(TINY), DType::F32, QuantType::None);
    Worker::new(&tiny, threads).alone(think);
    if arguments.iter().any(|a| a == "tiny") {
        return;
    }
    if arguments.iter().any(|a| a == "products") {
        for (dtype, quant) in FORMATS {
            Worker::new(&Bytes::new(spec(LARGE), dtype, quant), threads).products(quant);
        }
        return;
    }
    for quant in [QuantType::None, QuantType::Int8, QuantType::Nf4] {
        let bytes = Bytes::new(spec(LARGE), DType::Bf16, quant);
        let mut worker = Worker::new(&bytes, threads);
        worker.rows(quant);
        if quant == QuantType::None {
            for background in [None, Some(Class::Prefill), Some(Class::Backward)] {
                worker.serve(background, sessions, think, Duration::from_secs(seconds));
            }
        }
    }
}

const FORMATS: [(DType, QuantType); 5] = [
    (DType::Bf16, QuantType::None),
    (DType::Bf16, QuantType::Int8),
    (DType::Bf16, QuantType::Nf4),
    (DType::F16, QuantType::None),
    (DType::F32, QuantType::None),
];

/// Hidden size, intermediate size, blocks, heads and kv heads.
type Sizes = [usize; 5];

const LARGE: Sizes = [2048, 5632, BLOCKS, 32, 8];
/// That of the interop tests.
const TINY: Sizes = [128, 352, 6, 4, 2];

fn spec([hidden, intermediate, blocks, heads, kv_heads]: Sizes) -> BlockSpec {
    let config = json!({
        "model_type": "llama", "hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": blocks,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    });
    BlockSpec::from_config(&config).expect("a Llama")
}

/// Shape and bytes of a tensor.
type Stored = (Vec<usize>, Vec<u8>);

/// Stored tensors of each block, by name.
struct Bytes {
    spec: BlockSpec,
    dtype: DType,
    quant: QuantType,
    tensors: Vec<BTreeMap<String, Stored>>,
}

impl Bytes {
    fn new(spec: BlockSpec, dtype: DType, quant: QuantType) -> Bytes {
        let tensors = (0..spec.num_blocks).map(|block| {
            let tensors = spec.tensors(block).into_iter().map(|tensor| {
                let (outputs, inputs) = sides(&tensor.shape);
                let quant = kept(quant, outputs);
                let size = quant::stored_bytes(quant, dtype, outputs, inputs);
                // Small numbers of both signs; the scales of quantized matrices among them.
                let words = (0..size.expect("a size") / 2).map(|i| 0x3a00 | (i % 251) as u16);
                let bytes = words.flat_map(u16::to_le_bytes).collect();
                (tensor.name, (tensor.shape, bytes))
            });
            tensors.collect()
        });
        let tensors = tensors.collect();
        Bytes { spec, dtype, quant, tensors }
    }

    fn view(&self, block: usize, name: &str) -> Option<WeightView<'_>> {
        let (shape, bytes) = self.tensors[block].get(name)?;
        let (outputs, inputs) = sides(shape);
        let quant = kept(self.quant, outputs);
        WeightView::quantized(quant, self.dtype, outputs, inputs, bytes).ok()
    }
}

/// Vectors are single rows, and are never quantized.
fn sides(shape: &[usize]) -> (usize, usize) {
    match *shape {
        [outputs, inputs] => (outputs, inputs),
        _ => (1, shape.iter().product()),
    }
}

fn kept(quant: QuantType, outputs: usize) -> QuantType {
    if outputs == 1 { QuantType::None } else { quant }
}

/// What an executor has, without its link.
struct Worker<'w> {
    spec: &'w BlockSpec,
    dtype: DType,
    cpu: Cpu,
    blocks: Vec<BlockWeights<'w, Cpu>>,
    work: Workspace<Cpu>,
    gradients: GradientWork<Cpu>,
    /// Of each block.
    pages: Vec<Vec<u8>>,
}

/// What a job of the schedule is.
enum BenchJob {
    Session(usize, Instant),
    Background,
}

/// Pages of session `index`; the background comes after all of them.
fn table(index: usize) -> Vec<PageId> {
    let per_session = (PREFIX + 1).div_ceil(PAGE_TOKENS);
    let first = index * per_session;
    (first..first + TOKENS / PAGE_TOKENS)
        .map(|page| PageId(u32::try_from(page).expect("few pages")))
        .collect()
}

impl<'w> Worker<'w> {
    fn new(bytes: &'w Bytes, threads: usize) -> Worker<'w> {
        let mut cpu = Cpu::new(threads);
        let count = bytes.tensors.len();
        let blocks = (0..count).map(|block| {
            BlockWeights::new(&mut cpu, &bytes.spec, bytes.dtype, |name| bytes.view(block, name))
                .expect("all tensors are there")
        });
        let blocks = blocks.collect();
        let (work, gradients) = (Workspace::new(&mut cpu), GradientWork::new(&mut cpu));
        let page_bytes = page_layout(&bytes.spec, bytes.dtype).page_bytes();
        Worker {
            spec: &bytes.spec,
            dtype: bytes.dtype,
            cpu,
            blocks,
            work,
            gradients,
            pages: vec![vec![0; 1024 * page_bytes]; count],
        }
    }

    fn forward(&mut self, block: usize, rows: &[StepRow<'_>], hidden: &mut [f32]) {
        let mut pages = KvPages::new(page_layout(self.spec, self.dtype), &mut self.pages[block]);
        let input = BlockInput { rows, prompts: &[], adapters: &[], lengths: &[] };
        let (cpu, weights) = (&mut self.cpu, &self.blocks[block]);
        forward(cpu, self.spec, weights, &mut self.work, input, hidden, &mut pages)
            .expect("rows fit");
    }

    /// One session's steps of all blocks, one after the other with pauses.
    fn alone(&mut self, pause: Duration) {
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
    fn rows(&mut self, quant: QuantType) {
        let mut alone = f64::MAX;
        for count in [1, 2, 4, 8, 16, 32] {
            let tables: Vec<_> = (0..count).map(table).collect();
            let rows: Vec<_> = tables.iter().map(|pages| decode(pages)).collect();
            let least = self.least(&rows, Duration::from_secs(2));
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
    fn products(&mut self, quant: QuantType) {
        let tables: Vec<_> = (0..16).map(table).collect();
        let rows: Vec<_> = tables.iter().map(|pages| decode(pages)).collect();
        let prefill = [StepRow { tokens: TOKENS, prefix: 0, pages: &tables[0] }];
        let [one, many, prefill] =
            [&rows[..1], &rows, &prefill].map(|rows| self.least(rows, Duration::from_millis(700)));
        println!(
            "{} {quant}: 1 row {:.2} ms, 16 rows {:.2} ms, a prefill of {TOKENS} tokens {:.1} ms",
            self.dtype,
            one * 1e3,
            many * 1e3,
            prefill * 1e3
        );
    }

    /// Seconds of one pass of the rows through all blocks: the least of those that fit into a time.
    fn least(&mut self, rows: &[StepRow<'_>], time: Duration) -> f64 {
        let tokens: usize = rows.iter().map(|row| row.tokens).sum();
        let mut hidden = vec![0.5; tokens * self.spec.hidden];
        let (mut least, began) = (f64::MAX, Instant::now());
        while began.elapsed() < time {
            let start = Instant::now();
            for block in 0..BLOCKS {
                hidden.fill(0.5);
                self.forward(block, rows, &mut hidden);
            }
            least = least.min(start.elapsed().as_secs_f64());
        }
        least
    }

    /// Serves sessions, and a job of `background` after the other, for some time.
    fn serve(&mut self, background: Option<Class>, sessions: u64, think: Duration, time: Duration) {
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
                    let job = schedule.accept(shape(Class::Decode));
                    jobs.insert(job, BenchJob::Session(session, at));
                }
            }
            if let (Some(class), false) = (background, pending) {
                jobs.insert(schedule.accept(shape(class)), BenchJob::Background);
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
        background: Option<Class>,
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
        let is_back = background == Some(Class::Backward) && member.position >= BLOCKS;
        // On the way back pieces are taken from the last to the first.
        let first = match is_back {
            true => TOKENS / piece - member.pieces.end,
            false => member.pieces.start,
        };
        let rows =
            [StepRow { tokens: member.pieces.len() * piece, prefix: first * piece, pages: &own }];
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
        let input = BlockInput { rows, prompts: &[], adapters: &[], lengths: &[] };
        let (cpu, weights, work) = (&mut self.cpu, &self.blocks[block], &mut self.gradients);
        backward(
            cpu,
            self.spec,
            weights,
            work,
            input,
            &x,
            gradient,
            sums,
            SavedActivations::default(),
            &mut pages,
        )
        .expect("rows fit");
    }
}

fn decode(pages: &[PageId]) -> StepRow<'_> {
    StepRow { tokens: 1, prefix: PREFIX, pages }
}

fn shape(class: Class) -> JobShape {
    let blocks = 0..BLOCKS as u32;
    JobShape {
        class,
        blocks: match class {
            Class::Backward => blocks.clone().chain(blocks.rev()).collect(),
            _ => blocks.collect(),
        },
        pieces: match class {
            Class::Decode => vec![1],
            class => vec![piece_tokens(class); TOKENS / piece_tokens(class)],
        },
    }
}

/// Tokens of a piece of a job in the background.
fn piece_tokens(class: Class) -> usize {
    match class {
        Class::Backward => BACK_PIECE,
        _ => PIECE,
    }
}

/// In milliseconds.
fn quantile(times: &mut [Duration], share: f64) -> f64 {
    times.sort();
    let place = (times.len() as f64 * share) as usize;
    times.get(place).map_or(0.0, |time| time.as_secs_f64() * 1e3)
}
