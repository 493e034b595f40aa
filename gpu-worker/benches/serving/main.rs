//! What sessions see of the schedule: sizes of the batches, steps per second, and the time of a
//! step with and without a prefill and a backward in the background. Beside it, what a block costs
//! by the number of rows.
//!
//!     cargo bench -p gpu-worker --bench serving -- [SECONDS] [--sessions N] [--think MILLISECONDS]
//! [--only tiny|products|ranks]
//!
//! `--only tiny` measures a step of a tiny model instead, with pauses as between the steps of one
//! client; `--only products` what blocks cost in each format: one row, 16, and a prefill; `--only
//! ranks` the same for two ranks of one thread beside one worker of two threads.
//!
//! Four Llama blocks of hidden size 2048 (184 M parameters) behind the worker's own schedule, in
//! one thread as in the executor; rings and network are left out. A session sends its next step
//! some time after the answer: what a client and a network take.

mod ranks;
mod stored;
mod worker;

use std::time::Duration;

use kernels::{Cpu, DType, QuantType};
use shared::job::WorkKind;

use stored::{Bytes, Sizes, spec};
use worker::Worker;

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
    if arguments.iter().any(|a| a == "ranks") {
        return ranks::table_of_formats();
    }
    let tiny = Bytes::new(spec(TINY), DType::F32, QuantType::None);
    on(&tiny, threads).alone(think);
    if arguments.iter().any(|a| a == "tiny") {
        return;
    }
    if arguments.iter().any(|a| a == "products") {
        for (dtype, quant) in FORMATS {
            on(&Bytes::new(spec(LARGE), dtype, quant), threads).products(quant);
        }
        return;
    }
    for quant in [QuantType::None, QuantType::Int8, QuantType::Nf4] {
        let bytes = Bytes::new(spec(LARGE), DType::Bf16, quant);
        let mut worker = on(&bytes, threads);
        worker.rows(quant);
        if quant == QuantType::None {
            for background in [None, Some(WorkKind::Prefill), Some(WorkKind::Backward)] {
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

const LARGE: Sizes = [2048, 5632, BLOCKS, 32, 8];
/// That of the interop tests.
const TINY: Sizes = [128, 352, 6, 4, 2];

/// A worker of whole blocks.
fn on(bytes: &Bytes, threads: usize) -> Worker<'_> {
    let cpu = Cpu::new(threads);
    Worker::new(&bytes.spec, bytes.dtype, cpu, |block, name| bytes.view(block, name))
}
