//! One row per operation, shape and dtype: microseconds, GB/s beside the read bandwidth, GFLOP/s, and its peers on the same cores,
//! all by turns in one run.
//!
//!     cargo bench -p kernels --bench ops -- [THREADS] [--only WORD] [--isa NAME] [--torch PYTHON] [--ggml PROGRAM]
//!
//! `--only` takes rows whose name contains the word. `--isa` computes with a lesser instruction set than the machine has: `avx512`, `avx2` or
//! `portable`. `--torch` names a Python that has PyTorch, `--ggml` what was built of
//! `ggml_ops.c` with llama.cpp's library: products of bfloat16, INT8 and NF4 are compared with its bf16, q8_0 and q4_0. With one thread times are CPU times: what other
//! processes take away is not counted. Weights are walked in a ring larger than the caches, as a decode step walks the blocks of a
//! model. Numbers are the least of many.

mod timing;

use std::hint::black_box;

use kernels::cpu::Isa;
use kernels::cpu::pool::Pool;
use kernels::ops::{
    Attention, AttentionGrad, KvAppend, Linear, LinearGrad, Lora, LoraPart, Rmsnorm, SiluMul,
    convert,
};
use kernels::{
    Backend, Cpu, DType, KvPages, PAGE_TOKENS, PageLayout, QuantType, StepRow, WeightView, quant,
};
use shared::ids::PageId;
use timing::{Bench, Requests};

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
const FORMATS: [(QuantType, DType); 5] = [
    (QuantType::None, DType::Bf16),
    (QuantType::Int8, DType::Bf16),
    (QuantType::Nf4, DType::Bf16),
    (QuantType::None, DType::F16),
    (QuantType::None, DType::F32),
];
const ROWS: [usize; 5] = [1, 4, 16, 32, 512];
/// Tokens of units on the way back.
const GRAD_ROWS: [usize; 2] = [16, 64];
/// (prefix, tokens) of a batch row.
const ATTENTION: [(usize, usize); 5] = [(127, 1), (2047, 1), (0, 128), (1920, 128), (496, 16)];

/// The device, the clocks and the peers.
struct Table {
    cpu: Cpu,
    bench: Bench,
    only: String,
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let after = |flag: &str| {
        let place = arguments.iter().position(|a| a == flag)?;
        arguments.get(place + 1).map(String::as_str)
    };
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = arguments
        .iter()
        .find_map(|a| a.parse().ok())
        .unwrap_or(cores);
    let isa = after("--isa").map_or_else(Isa::detect, |name| {
        let named = |isa: &&Isa| format!("{isa:?}").eq_ignore_ascii_case(name);
        let found = Isa::available().iter().find(named);
        *found.unwrap_or_else(|| panic!("--isa is one of {:?}", Isa::available()))
    });
    let cpu = Cpu::with_isa(threads, isa);
    println!("{:?}, {} threads, {}", cpu.isa(), cpu.threads(), load());
    let bench = Bench::new(threads, after("--torch"), after("--ggml"));
    let only = after("--only").unwrap_or_default().to_owned();
    let mut table = Table { cpu, bench, only };
    for (quant, dtype) in FORMATS {
        for (outputs, inputs) in LINEAR {
            for rows in ROWS {
                table.linear(Shape {
                    quant,
                    dtype,
                    outputs,
                    inputs,
                    rows,
                });
            }
            for rows in GRAD_ROWS {
                table.linear_grad(Shape {
                    quant,
                    dtype,
                    outputs,
                    inputs,
                    rows,
                });
            }
        }
    }
    for (prefix, tokens) in ATTENTION {
        table.attention(prefix, tokens);
    }
    for tokens in [16, 128, 512] {
        table.attention_grad(tokens);
    }
    for (rank, rows) in [(16, 1), (16, 16), (64, 1), (64, 512)] {
        table.lora(rank, rows);
    }
    for rows in [1, 128] {
        table.elementwise(rows);
    }
    table.hand_over(threads);
    println!("{}", load());
}

/// Who else computes: numbers of a busy machine are worth their ratios only.
fn load() -> String {
    let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    format!("load {}", load.split(' ').next().unwrap_or("unknown"))
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

impl Shape {
    fn bytes(self) -> usize {
        quant::stored_bytes(self.quant, self.dtype, self.outputs, self.inputs).expect("a size")
    }

    fn view(self, bytes: &[u8]) -> WeightView<'_> {
        WeightView::quantized(self.quant, self.dtype, self.outputs, self.inputs, bytes)
            .expect("the size fits")
    }

    fn name(self, operation: &str) -> String {
        let Shape {
            quant,
            dtype,
            outputs,
            inputs,
            rows,
        } = self;
        format!("{operation} {dtype} {quant} {outputs}x{inputs} rows {rows}")
    }

    /// What PyTorch is asked; quantized matrices are compared with its bfloat16.
    fn request(self, operation: &str) -> String {
        let Shape {
            dtype,
            outputs,
            inputs,
            rows,
            ..
        } = self;
        format!("{operation} {dtype} {outputs} {inputs} {rows}")
    }

    /// What ggml is asked about a product: the format of the same class.
    fn ggml_request(self) -> String {
        let Shape {
            outputs,
            inputs,
            rows,
            ..
        } = self;
        let format = match (self.quant, self.dtype) {
            (QuantType::Int8, _) => "q8_0",
            (QuantType::Nf4, _) => "q4_0",
            (QuantType::None, DType::Bf16) => "bf16",
            (QuantType::None, DType::F16) => return String::new(),
            (QuantType::None, _) => "f32",
        };
        format!("{format} {outputs} {inputs} {rows}")
    }

    fn flops(self) -> usize {
        2 * self.outputs * self.inputs * self.rows
    }
}

impl Table {
    fn skips(&self, what: &str) -> bool {
        !what.contains(&self.only)
    }

    fn linear(&mut self, shape: Shape) {
        let what = shape.name("linear");
        if self.skips(&what) {
            return;
        }
        let x = vec![0.5f32; shape.rows * shape.inputs];
        let mut out = vec![0.0f32; shape.rows * shape.outputs];
        let requests = Requests {
            torch: shape.request("linear"),
            ggml: shape.ggml_request(),
        };
        let cpu = &mut self.cpu;
        let times = self.bench.measure(requests, shape.bytes(), |bytes| {
            cpu.linear(Linear {
                x: &x[..],
                weight: shape.view(bytes),
                bias: None,
                out: &mut out[..],
                rows: shape.rows,
            })
            .expect("shapes fit");
        });
        times.print(&what, shape.bytes(), shape.flops());
    }

    fn linear_grad(&mut self, shape: Shape) {
        let what = shape.name("linear_grad");
        if self.skips(&what) {
            return;
        }
        let grad = vec![0.5f32; shape.rows * shape.outputs];
        let mut out = vec![0.0f32; shape.rows * shape.inputs];
        let (cpu, request) = (&mut self.cpu, shape.request("linear_grad"));
        let times = self.bench.measure(&request[..], shape.bytes(), |bytes| {
            cpu.linear_grad(LinearGrad {
                grad: &grad[..],
                weight: shape.view(bytes),
                out: &mut out[..],
                rows: shape.rows,
            })
            .expect("shapes fit");
        });
        times.print(&what, shape.bytes(), shape.flops());
    }

    fn attention(&mut self, prefix: usize, tokens: usize) {
        let what = format!("attention bfloat16 32/8x128 {prefix}+{tokens}");
        if self.skips(&what) {
            return;
        }
        let (layout, group, width) = (HEADS, 4, 8 * 128);
        let table = pages(prefix + tokens);
        let mut pool = vec![0x3c; table.len() * layout.page_bytes()];
        let mut pages = KvPages::new(layout, &mut pool);
        let rows = [StepRow {
            tokens,
            prefix,
            pages: &table,
        }];
        let kv = vec![0.1f32; tokens * width];
        let q = vec![0.1f32; tokens * width * group];
        let mut out = q.clone();
        let cpu = &mut self.cpu;
        let append = self.bench.measure("", 1, |_| {
            cpu.kv_append(KvAppend {
                keys: &kv[..],
                values: &kv,
                rows: &rows,
                pages: &mut pages,
            })
            .expect("fits");
        });
        append.print(&format!("kv append bfloat16 8x128 tokens {tokens}"), 0, 0);
        let request = format!("attention bfloat16 8 4 128 {prefix} {tokens}");
        let times = self.bench.measure(&request[..], 1, |_| {
            cpu.attention(Attention {
                q: &q[..],
                pages: &pages,
                rows: &rows,
                group,
                divisor: 11.3,
                alibi: None,
                window: usize::MAX,
                out: &mut out[..],
                logsum: None,
            })
            .expect("fits");
        });
        let pairs: usize = (prefix + 1..=prefix + tokens).sum();
        let bytes = 4 * width * (prefix + tokens);
        times.print(&what, bytes, 4 * width * group * pairs);
    }

    fn attention_grad(&mut self, tokens: usize) {
        let what = format!("attention_grad bfloat16 32/8x128 0+{tokens}");
        if self.skips(&what) {
            return;
        }
        let (layout, group, width) = (HEADS, 4, 8 * 128);
        let table = pages(tokens);
        let mut pool = vec![0x3c; table.len() * layout.page_bytes()];
        let pages = KvPages::new(layout, &mut pool);
        let rows = [StepRow {
            tokens,
            prefix: 0,
            pages: &table,
        }];
        let q = vec![0.1f32; tokens * width * group];
        let mut q_grad = q.clone();
        let mut sums = [vec![0.0f32; tokens * width], vec![0.0f32; tokens * width]];
        let cpu = &mut self.cpu;
        let request = format!("attention_grad bfloat16 8 4 128 0 {tokens}");
        let times = self.bench.measure(&request[..], 1, |_| {
            let [k_grad, v_grad] = &mut sums;
            cpu.attention_grad(AttentionGrad {
                q: &q[..],
                grad: &q,
                pages: &pages,
                rows: &rows,
                starts: &[0],
                group,
                divisor: 11.3,
                alibi: None,
                window: usize::MAX,
                known: None,
                q_grad: &mut q_grad[..],
                k_grad: &mut k_grad[..],
                v_grad: &mut v_grad[..],
            })
            .expect("fits");
        });
        // Five products for each pair of positions.
        let pairs = tokens * (tokens + 1) / 2;
        times.print(&what, 0, 10 * width * group * pairs);
    }

    /// What an adapter of a 4096x4096 matrix adds to its product.
    fn lora(&mut self, rank: usize, rows: usize) {
        let (width, dtype) = (4096, DType::Bf16);
        let what = format!("lora {dtype} 4096x4096 rank {rank} rows {rows}");
        if self.skips(&what) {
            return;
        }
        let bytes = vec![0x3c; width * rank * dtype.size_bytes()];
        let view = |outputs, inputs| {
            WeightView::new(dtype, outputs, inputs, &bytes).expect("the size fits")
        };
        let (x, mut out) = (vec![0.5f32; rows * width], vec![0.5f32; rows * width]);
        let mut middle = vec![0.0f32; rows * rank];
        let parts = [LoraPart {
            first: 0,
            rows,
            a: view(rank, width),
            b: view(width, rank),
            scale: 0.5,
        }];
        let cpu = &mut self.cpu;
        let times = self.bench.measure("", 1, |_| {
            cpu.lora(Lora {
                x: &x[..],
                parts: &parts,
                middle: &mut middle[..],
                out: &mut out[..],
                rows,
                round: dtype,
            })
            .expect("fits");
        });
        times.print(&what, 2 * bytes.len(), 4 * width * rank * rows);
    }

    fn elementwise(&mut self, rows: usize) {
        let (width, middle) = (4096, 11008);
        let (x, weight) = (vec![0.5f32; rows * width], vec![1.0f32; width]);
        let mut out = x.clone();
        let (mut gate, up) = (vec![0.5f32; rows * middle], vec![0.5f32; rows * middle]);
        let mut bytes = vec![0u8; 2 * rows * width];
        let cpu = &mut self.cpu;
        let norm = self.bench.measure("", 1, |_| {
            cpu.rmsnorm(Rmsnorm {
                x: &x[..],
                weight: &weight,
                out: &mut out[..],
                rows,
                width,
                eps: 1e-5,
                round: DType::Bf16,
            })
            .expect("fits");
        });
        let silu = self.bench.measure("", 1, |_| {
            cpu.silu_mul(SiluMul {
                gate: &mut gate[..],
                up: &up,
                len: rows * middle,
                round: DType::Bf16,
            })
            .expect("fits");
        });
        let round = self.bench.measure("", 1, |_| {
            convert::from_f32(DType::Bf16, &x, &mut bytes);
        });
        for (what, times, bytes) in [
            (
                format!("rmsnorm bfloat16 {rows}x{width}"),
                norm,
                8 * rows * width,
            ),
            (
                format!("silu_mul bfloat16 {rows}x{middle}"),
                silu,
                12 * rows * middle,
            ),
            (
                format!("to bfloat16 {rows}x{width}"),
                round,
                6 * rows * width,
            ),
        ] {
            if !self.skips(&what) {
                times.print(&what, bytes, 0);
            }
        }
    }

    /// What it costs to give work to all threads and wait for them.
    fn hand_over(&mut self, threads: usize) {
        if self.skips("pool hand-over") {
            return;
        }
        let mut pool = Pool::new(threads);
        let times = self.bench.measure("", 1, |_| {
            pool.run(threads, |index| {
                black_box(index);
            });
        });
        times.print("pool hand-over", 0, 0);
    }
}

/// Heads of the attention rows: 8 kv heads of 128.
const HEADS: PageLayout = PageLayout {
    dtype: DType::Bf16,
    kv_heads: 8,
    head_dim: 128,
};

/// A page table of `tokens` positions.
fn pages(tokens: usize) -> Vec<PageId> {
    (0..tokens.div_ceil(PAGE_TOKENS) as u32)
        .map(PageId)
        .collect()
}
