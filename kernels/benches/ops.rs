//! One row per operation, shape and dtype: microseconds, and GB/s or GFLOP/s beside the read bandwidth of the same run.
//!
//!     cargo bench -p kernels --bench ops [-- THREADS]
//!
//! Weights are walked in a ring larger than the caches, as a decode step walks the blocks of a model. Numbers are medians.

use std::hint::black_box;
use std::time::{Duration, Instant};

use kernels::cpu::pool::Pool;
use kernels::ops::{Attention, KvAppend, Linear, Lora, LoraPart, Rmsnorm, SiluMul, convert};
use kernels::{
    Backend, Cpu, DType, KvPages, PAGE_TOKENS, PageLayout, QuantType, StepRow, WeightView, quant,
};
use shared::ids::PageId;

/// Bytes of weights that are walked: above the last-level cache of common machines.
const RING_BYTES: usize = 768 << 20;
/// (outputs, inputs) of matrices of Llama blocks of hidden size 4096 and 2048, and one of a tiny model.
const LINEAR: [(usize, usize); 6] = [
    (11008, 4096),
    (4096, 11008),
    (4096, 4096),
    (5632, 2048),
    (2048, 2048),
    (352, 128),
];
/// How matrices are stored, and the block dtype.
const FORMATS: [(QuantType, DType); 4] = [
    (QuantType::None, DType::Bf16),
    (QuantType::Int8, DType::Bf16),
    (QuantType::Nf4, DType::Bf16),
    (QuantType::None, DType::F32),
];
const ROWS: [usize; 4] = [1, 4, 16, 512];

fn main() {
    let number = |text: String| text.parse::<usize>().ok();
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = std::env::args().skip(1).find_map(number).unwrap_or(cores);
    let mut cpu = Cpu::new(threads);
    println!("{:?}, {} threads, {}", cpu.isa(), cpu.threads(), load());
    let ring: Vec<u8> = (0..RING_BYTES / 2)
        .flat_map(|i| ((i % 251) as u16 | 0x3c00).to_le_bytes())
        .collect();
    for (quant, dtype) in FORMATS {
        for (outputs, inputs) in LINEAR {
            for rows in ROWS {
                let shape = Shape {
                    quant,
                    dtype,
                    outputs,
                    inputs,
                    rows,
                };
                linear(&mut cpu, shape, &ring);
            }
        }
    }
    hand_over(threads);
    for (prefix, tokens) in [(127, 1), (2047, 1), (0, 128), (1920, 128)] {
        attention(&mut cpu, prefix, tokens);
    }
    for (rank, rows) in [(16, 1), (16, 16), (64, 1), (64, 512)] {
        lora(&mut cpu, rank, rows);
    }
    elementwise(&mut cpu);
    println!("{}", load());
}

/// Who else computes: numbers of a busy machine are worth their ratios only.
fn load() -> String {
    let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    format!("load {}", load.split(' ').next().unwrap_or("unknown"))
}

/// What it costs to give work to all threads and wait for them.
fn hand_over(threads: usize) {
    let mut pool = Pool::new(threads);
    let time = median(|| {
        pool.run(threads, |index| {
            black_box(index);
        })
    });
    print("pool hand-over", time, 0, 0);
}

/// Median time of `run` over at least five calls and half a second.
fn median(mut run: impl FnMut()) -> Duration {
    run();
    let began = Instant::now();
    let mut times = Vec::new();
    while times.len() < 5 || (began.elapsed() < Duration::from_millis(500) && times.len() < 10_000)
    {
        let start = Instant::now();
        run();
        times.push(start.elapsed());
    }
    times.sort();
    times[times.len() / 2]
}

fn print(what: &str, time: Duration, bytes: usize, flops: usize) {
    let ns = time.as_nanos().max(1) as f64;
    println!(
        "{what:44} {:10.1} µs {:8.1} GB/s {:8.1} GFLOP/s",
        ns / 1e3,
        bytes as f64 / ns,
        flops as f64 / ns
    );
}

/// Bytes that one measurement of the bandwidth reads.
const READ_BYTES: usize = 16 << 20;

/// Reads `bytes` with all threads.
fn read(pool: &mut Pool, bytes: &[u8]) {
    let part = bytes
        .len()
        .div_ceil(pool.threads() * 16)
        .next_multiple_of(256);
    pool.run(bytes.len().div_ceil(part), |index| {
        let mut sums = [0u64; 32];
        for line in bytes[index * part..bytes.len().min((index + 1) * part)].chunks_exact(256) {
            for (sum, word) in sums.iter_mut().zip(line.as_chunks::<8>().0) {
                *sum = sum.wrapping_add(u64::from_ne_bytes(*word));
            }
        }
        black_box(sums);
    });
}

/// Time of `run` and read bandwidth in GB/s, measured by turns, so that both saw the same machine: the tenth that were
/// disturbed least.
fn beside_reading(threads: usize, ring: &[u8], mut run: impl FnMut()) -> (Duration, f64) {
    let mut pool = Pool::new(threads);
    let mut parts = ring.chunks_exact(READ_BYTES).cycle();
    let (mut runs, mut reads) = (Vec::new(), Vec::new());
    let began = Instant::now();
    run();
    while runs.len() < 5 || (began.elapsed() < Duration::from_millis(700) && runs.len() < 10_000) {
        for _ in 0..3 {
            let start = Instant::now();
            run();
            runs.push(start.elapsed());
        }
        let start = Instant::now();
        read(&mut pool, parts.next().expect("the ring is larger"));
        reads.push(start.elapsed());
    }
    runs.sort();
    reads.sort();
    let read = reads[reads.len() / 10];
    (
        runs[runs.len() / 10],
        READ_BYTES as f64 / read.as_nanos() as f64,
    )
}

/// One row of the table of matrix products.
#[derive(Clone, Copy)]
struct Shape {
    quant: QuantType,
    dtype: DType,
    outputs: usize,
    inputs: usize,
    rows: usize,
}

fn linear(cpu: &mut Cpu, shape: Shape, ring: &[u8]) {
    let Shape {
        quant,
        dtype,
        outputs,
        inputs,
        rows,
    } = shape;
    let size = quant::stored_bytes(quant, dtype, outputs, inputs).expect("a size");
    let x = vec![0.5f32; rows * inputs];
    let mut out = vec![0.0f32; rows * outputs];
    let mut matrices = ring.chunks_exact(size).cycle();
    let threads = cpu.threads();
    let (time, bandwidth) = beside_reading(threads, ring, || {
        let bytes = matrices.next().expect("the ring is larger");
        let weight =
            WeightView::quantized(quant, dtype, outputs, inputs, bytes).expect("the size fits");
        cpu.linear(Linear {
            x: &x[..],
            weight,
            bias: None,
            out: &mut out[..],
            rows,
        })
        .expect("shapes fit");
    });
    let ns = time.as_nanos() as f64;
    let products = (outputs * inputs * rows) as f64;
    println!(
        "{:44} {:10.1} µs {:6.1} GB/s = {:3.0} % of reading {:7.1} GFLOP/s",
        format!("linear {dtype} quant {quant} {outputs}x{inputs} rows {rows}"),
        ns / 1e3,
        size as f64 / ns,
        100.0 * size as f64 / ns / bandwidth,
        2.0 * products / ns,
    );
}

fn attention(cpu: &mut Cpu, prefix: usize, tokens: usize) {
    let layout = PageLayout {
        dtype: DType::Bf16,
        kv_heads: 8,
        head_dim: 128,
    };
    let (group, width) = (4, 8 * 128);
    let table: Vec<PageId> = (0..(prefix + tokens).div_ceil(PAGE_TOKENS) as u32)
        .map(PageId)
        .collect();
    let mut pool = vec![0x3c; table.len() * layout.page_bytes()];
    let mut pages = KvPages::new(layout, &mut pool);
    let rows = [StepRow {
        tokens,
        prefix,
        pages: &table,
    }];
    let (kv, q) = (
        vec![0.1f32; tokens * width],
        vec![0.1f32; tokens * width * group],
    );
    let mut out = q.clone();
    let append = median(|| {
        cpu.kv_append(KvAppend {
            keys: &kv[..],
            values: &kv,
            rows: &rows,
            pages: &mut pages,
        })
        .expect("fits");
    });
    print(
        &format!("kv append bfloat16 8x128 tokens {tokens}"),
        append,
        tokens * width * 4,
        0,
    );
    let time = median(|| {
        let args = Attention {
            q: &q[..],
            pages: &pages,
            rows: &rows,
            group,
            divisor: 11.3,
            alibi: None,
            window: usize::MAX,
            out: &mut out[..],
        };
        cpu.attention(args).expect("fits");
    });
    let pairs: usize = (prefix + 1..=prefix + tokens).sum();
    let bytes = 4 * width * (prefix + tokens);
    print(
        &format!("attention bfloat16 32/8x128 {prefix}+{tokens}"),
        time,
        bytes,
        4 * width * group * pairs,
    );
}

/// What an adapter of a 4096x4096 matrix adds to its product.
fn lora(cpu: &mut Cpu, rank: usize, rows: usize) {
    let (width, dtype) = (4096, DType::Bf16);
    let bytes = vec![0x3c; width * rank * dtype.size_bytes()];
    let view =
        |outputs, inputs| WeightView::new(dtype, outputs, inputs, &bytes).expect("the size fits");
    let (x, mut out) = (vec![0.5f32; rows * width], vec![0.5f32; rows * width]);
    let mut middle = vec![0.0f32; rows * rank];
    let parts = [LoraPart {
        first: 0,
        rows,
        a: view(rank, width),
        b: view(width, rank),
        scale: 0.5,
    }];
    let time = median(|| {
        let args = Lora {
            x: &x[..],
            parts: &parts,
            middle: &mut middle[..],
            out: &mut out[..],
            rows,
            round: dtype,
        };
        cpu.lora(args).expect("fits");
    });
    print(
        &format!("lora {dtype} 4096x4096 rank {rank} rows {rows}"),
        time,
        2 * bytes.len(),
        4 * width * rank * rows,
    );
}

fn elementwise(cpu: &mut Cpu) {
    for rows in [1, 128] {
        let (width, middle) = (4096, 11008);
        let (x, weight, mut out) = (
            vec![0.5f32; rows * width],
            vec![1.0f32; width],
            vec![0.0f32; rows * width],
        );
        let time = median(|| {
            let args = Rmsnorm {
                x: &x[..],
                weight: &weight,
                out: &mut out[..],
                rows,
                width,
                eps: 1e-5,
                round: DType::Bf16,
            };
            cpu.rmsnorm(args).expect("fits");
        });
        print(
            &format!("rmsnorm bfloat16 {rows}x{width}"),
            time,
            8 * rows * width,
            0,
        );
        let (mut gate, up) = (vec![0.5f32; rows * middle], vec![0.5f32; rows * middle]);
        let time = median(|| {
            let args = SiluMul {
                gate: &mut gate[..],
                up: &up,
                len: rows * middle,
                round: DType::Bf16,
            };
            cpu.silu_mul(args).expect("fits");
        });
        print(
            &format!("silu_mul bfloat16 {rows}x{middle}"),
            time,
            12 * rows * middle,
            0,
        );
        let mut bytes = vec![0u8; 2 * rows * width];
        let time = median(|| convert::from_f32(DType::Bf16, &x, &mut bytes));
        print(
            &format!("convert float32 to bfloat16 {rows}x{width}"),
            time,
            6 * rows * width,
            0,
        );
    }
}
