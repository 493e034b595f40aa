//! One row per operation, shape and dtype: microseconds, and GB/s or GFLOP/s beside the read bandwidth of the same run.
//!
//!     cargo bench -p kernels --bench ops [-- THREADS]
//!
//! Weights are walked in a ring larger than the caches, as a decode step walks the blocks of a model. Numbers are medians.

use std::hint::black_box;
use std::time::{Duration, Instant};

use kernels::cpu::pool::Pool;
use kernels::ops::{Attention, KvAppend, Linear, Rmsnorm, SiluMul, convert};
use kernels::{Backend, Cpu, DType, KvPages, PAGE_TOKENS, PageLayout, StepRow, WeightView};
use shared::ids::PageId;

/// Bytes of weights that are walked: above the last-level cache of common machines.
const RING_BYTES: usize = 768 << 20;
/// (outputs, inputs) of the largest and the smallest matrix of a Llama 2 7B block, and one of a tiny model.
const LINEAR: [(usize, usize); 3] = [(11008, 4096), (4096, 4096), (352, 128)];
const ROWS: [usize; 4] = [1, 4, 16, 128];

fn main() {
    let number = |text: String| text.parse::<usize>().ok();
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = std::env::args().skip(1).find_map(number).unwrap_or(cores);
    let mut cpu = Cpu::new(threads);
    println!("{:?}, {} threads", cpu.isa(), cpu.threads());
    let ring: Vec<u8> = (0..RING_BYTES / 2)
        .flat_map(|i| ((i % 251) as u16 | 0x3c00).to_le_bytes())
        .collect();
    println!("read bandwidth {:.1} GB/s", read_bandwidth(threads, &ring));
    for dtype in [DType::Bf16, DType::F32] {
        for (outputs, inputs) in LINEAR {
            for rows in ROWS {
                linear(&mut cpu, dtype, outputs, inputs, rows, &ring);
            }
        }
    }
    println!("read bandwidth {:.1} GB/s", read_bandwidth(threads, &ring));
    for (prefix, tokens) in [(127, 1), (2047, 1), (0, 128), (1920, 128)] {
        attention(&mut cpu, prefix, tokens);
    }
    elementwise(&mut cpu);
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

fn read_bandwidth(threads: usize, ring: &[u8]) -> f64 {
    let mut pool = Pool::new(threads);
    let part = ring.len().div_ceil(threads * 16).next_multiple_of(64);
    let time = median(|| {
        pool.run(ring.len().div_ceil(part), |index| {
            let mut sums = [0u64; 32];
            for line in ring[index * part..ring.len().min((index + 1) * part)].chunks_exact(256) {
                for (sum, word) in sums.iter_mut().zip(line.as_chunks::<8>().0) {
                    *sum = sum.wrapping_add(u64::from_ne_bytes(*word));
                }
            }
            black_box(sums);
        });
    });
    ring.len() as f64 / time.as_nanos() as f64
}

fn linear(cpu: &mut Cpu, dtype: DType, outputs: usize, inputs: usize, rows: usize, ring: &[u8]) {
    let size = outputs * inputs * dtype.size_bytes();
    let x = vec![0.5f32; rows * inputs];
    let mut out = vec![0.0f32; rows * outputs];
    let mut matrices = ring.chunks_exact(size).cycle();
    let time = median(|| {
        let weight = WeightView::new(
            dtype,
            outputs,
            inputs,
            matrices.next().expect("the ring is larger"),
        )
        .expect("fits");
        cpu.linear(Linear {
            x: &x[..],
            weight,
            bias: None,
            out: &mut out[..],
            rows,
        })
        .expect("shapes fit");
    });
    print(
        &format!("linear {dtype} {outputs}x{inputs} rows {rows}"),
        time,
        size,
        2 * outputs * inputs * rows,
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
