//! One row per operation, shape and dtype: microseconds, GB/s beside the read bandwidth, GFLOP/s,
//! and its peers on the same cores, interleaved in one run. The rows are the cases of class
//! `Measured` in `kernels::cases`.
//!
//!     cargo bench -p kernels --bench ops -- [THREADS] [--only WORD] [--isa NAME] [--torch PYTHON]
//! [--ggml PROGRAM]
//!
//! `--only` takes rows whose name contains the word. `--isa` computes with a lesser instruction set
//! than the machine has: `avx512bf16`, `avx512`, `avx2` or `portable`. `--torch` names a Python that has PyTorch, which
//! computes in the type of the row and in float32, with the same instruction set; the faster of both is printed.
//! `--ggml` names what was built of `ggml_ops.c` with llama.cpp's library: products of bfloat16, INT8 and
//! NF4 are compared with its bf16, q8_0 and q4_0. With one thread times are CPU times: what other
//! processes take away is not counted. Weights are walked in a ring larger than the caches, as a
//! decode step walks the blocks of a model. Numbers are the least of many.

mod timing;

use std::hint::black_box;

use kernels::cases::{Measurement, Row, Shapes, Work, operations};
use kernels::cpu::Isa;
use kernels::cpu::pool::ThreadPool;
use kernels::ops::convert;
use kernels::{Cpu, DType};
use timing::{Bench, Requests};

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let after = |flag: &str| {
        let position = arguments.iter().position(|a| a == flag)?;
        arguments.get(position + 1).map(String::as_str)
    };
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = arguments.iter().find_map(|a| a.parse().ok()).unwrap_or(cores);
    let isa = after("--isa").map_or_else(Isa::detect, |name| {
        let named = |isa: &&Isa| format!("{isa:?}").eq_ignore_ascii_case(name);
        let all = Isa::computable();
        let found = all.iter().find(named).copied();
        found.unwrap_or_else(|| panic!("--isa is one of {all:?}"))
    });
    let mut cpu = Cpu::with_isa(threads, isa);
    println!("{:?}, {} threads, {}", cpu.isa(), cpu.threads(), load());
    let only = after("--only").unwrap_or_default();
    // Quantization is slow, and no part of serving: only when it is named.
    let is_wanted =
        |name: &str| name.contains(only) && !(only.is_empty() && name.starts_with("quantize"));
    let words = (0..Shapes::BENCHMARK.ring_bytes / 2).map(|i| (i % 251) as u16 | 0x3c00);
    let ring: Vec<u8> = words.flat_map(u16::to_le_bytes).collect();
    let mut bench = Bench::new(threads, isa, after("--torch"), after("--ggml"), &ring);
    for operation in operations::<Cpu>() {
        let mut measurement = Measurement {
            shapes: &Shapes::BENCHMARK,
            ring: &ring,
            is_wanted: &is_wanted,
            timer: &mut |row, repeat| {
                let mut done = Ok(());
                let run = || done = std::mem::replace(&mut done, Ok(())).and_then(|()| repeat(1));
                bench.measure(requests(&row.name), run).print(row);
                done
            },
        };
        operation.measure(&mut cpu, &mut measurement).expect("shapes fit");
    }
    for rows in [1, 128] {
        let (values, mut bytes) = (vec![0.5f32; rows * 4096], vec![0u8; 2 * rows * 4096]);
        let work = Work { bytes: 3 * bytes.len(), operations: 0 };
        let row = Row { name: format!("to bfloat16 {rows}x4096"), work };
        let convert = || convert::from_f32(DType::Bf16, &values, &mut bytes);
        if is_wanted(&row.name) {
            bench.measure(Requests::default(), convert).print(&row);
        }
    }
    // What it costs to give work to all threads and wait for them.
    let row = Row { name: "pool hand-over".to_owned(), work: Work::default() };
    let mut pool = ThreadPool::new(threads);
    let hand_over = || {
        pool.run(threads, |index| {
            black_box(index);
        });
    };
    if is_wanted(&row.name) {
        bench.measure(Requests::default(), hand_over).print(&row);
    }
    println!("{}", load());
}

/// Who else computes: numbers of a busy machine are worth their ratios only.
fn load() -> String {
    let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    format!("load {}", load.split(' ').next().unwrap_or("unknown"))
}

/// What the peers are asked beside a row, by its name: `linear bfloat16 nf4 4096x2048 rows 16`,
/// `attention bfloat16 32/8x128 2047+1`. PyTorch has no such formats and multiplies the type of the
/// row in their place; ggml has products of one of the same class.
fn requests(name: &str) -> Requests {
    let words: Vec<&str> = name.split([' ', 'x', '/', '+']).collect();
    match words[..] {
        [operation @ ("linear" | "linear_grad"), dtype, quant, outputs, inputs, "rows", rows] => {
            let format = match (operation, quant, dtype) {
                ("linear_grad", ..) | (_, "none", "float16") => None,
                (_, "int8", _) => Some("q8_0"),
                (_, "nf4", _) => Some("q4_0"),
                (_, _, "bfloat16") => Some("bf16"),
                _ => Some("f32"),
            };
            let sizes = format!("{outputs} {inputs} {rows}");
            Requests {
                torch: format!("{operation} {dtype} {sizes}"),
                ggml: format.map_or_else(String::new, |format| format!("{format} {sizes}")),
            }
        }
        [
            operation @ ("attention" | "attention_grad"),
            dtype,
            heads,
            kv_heads,
            dim,
            prefix,
            tokens,
        ] => {
            let count = |word: &str| word.parse().unwrap_or(1);
            let group: usize = count(heads) / count(kv_heads).max(1);
            let torch = format!("{operation} {dtype} {kv_heads} {group} {dim} {prefix} {tokens}");
            Requests { torch, ggml: String::new() }
        }
        _ => Requests::default(),
    }
}
