//! One row per operation and shape: microseconds, what it moves or computes per second, and the share of what the device gives at best.
//! Operations are enqueued many at a time and waited for once; weights are walked in a ring larger than the caches.

use std::io::Write;
use std::time::Instant;

use kernels::cuda::{Cuda, Gpu};
use kernels::ops::{Attention, KvAppend, Linear};
use kernels::{DType, PageLayout, QuantType, StepRow};
use shared::ids::PageId;
use shared::model::PAGE_TOKENS;

use super::Ended;
use super::others::{stored, view};
use crate::device::Paged;

/// What a device gives at best, as measured in this run.
#[derive(Clone, Copy, Debug, Default)]
pub struct Peaks {
    /// Of a copy, read and written together.
    pub bytes_per_s: Option<f64>,
    /// Of the tensor cores on bfloat16.
    pub flops_per_s: Option<f64>,
}

/// What is measured.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    /// Width of the hidden states, of the middle of the MLP, and of keys.
    pub(super) hidden: usize,
    pub(super) middle: usize,
    pub(super) kv: usize,
    /// Rows of a step, and of a prefill.
    rows: &'static [usize],
    /// Tokens of a piece on the way back.
    gradient_rows: usize,
    /// Sessions of a decode step through a whole block, tokens of a prefill, and blocks of a model.
    pub(super) sessions: &'static [usize],
    pub(super) prefill: usize,
    pub(super) model_blocks: usize,
    /// Cached tokens of a session.
    pub(super) context: usize,
    /// Bytes of weights that are walked.
    ring_bytes: usize,
    /// Repetitions of a measurement.
    repetitions: usize,
}

impl Sizes {
    /// A block of a 70B Llama.
    pub const LARGE: Sizes = Sizes {
        hidden: 8192,
        middle: 28672,
        kv: 1024,
        rows: &[1, 8, 32, 1024],
        gradient_rows: 256,
        sessions: &[1, 8, 32],
        prefill: 1024,
        model_blocks: 80,
        context: 2048,
        ring_bytes: 512 << 20,
        repetitions: 50,
    };
    /// A block of a 1B Llama.
    pub const SMALL: Sizes = Sizes {
        hidden: 2048,
        middle: 5632,
        kv: 256,
        rows: &[1, 8, 128],
        gradient_rows: 64,
        sessions: &[1, 8],
        prefill: 128,
        model_blocks: 22,
        context: 512,
        ring_bytes: 256 << 20,
        repetitions: 5,
    };
    /// For the emulator, whose times mean nothing.
    pub const TINY: Sizes = Sizes {
        hidden: 256,
        middle: 512,
        kv: 128,
        rows: &[1, 3],
        gradient_rows: 17,
        sessions: &[1, 3],
        prefill: 20,
        model_blocks: 2,
        context: 40,
        ring_bytes: 1,
        repetitions: 1,
    };
}

/// Elements of a head.
pub(super) const HEAD_DIM: usize = 128;

pub(super) const FORMATS: [QuantType; 3] = [QuantType::Nf4, QuantType::Int8, QuantType::None];

/// Measures everything and prints the table.
pub fn table<B: Paged>(
    backend: &mut B,
    sizes: Sizes,
    peaks: Peaks,
    out: &mut impl Write,
) -> Result<(), Ended> {
    if let (Some(bytes), Some(flops)) = (peaks.bytes_per_s, peaks.flops_per_s) {
        writeln!(
            out,
            "copy {:.0} GB/s, matrix peak {:.1} TFLOP/s",
            bytes / 1e9,
            flops / 1e12
        )?;
    }
    let mut bench = Bench {
        backend,
        sizes,
        peaks,
        out,
    };
    for quant in FORMATS {
        for &rows in sizes.rows {
            bench.block(quant, rows)?;
        }
    }
    for &rows in sizes.rows {
        bench.attention(rows)?;
    }
    for &rows in sizes.rows {
        bench.elementwise(rows)?;
        bench.positions(rows)?;
        bench.adapters(rows)?;
        bench.gather(rows)?;
        for quant in FORMATS {
            bench.mixture(quant, rows)?;
        }
    }
    bench.gradients(sizes.gradient_rows)?;
    bench.blocks()
}

/// Where products of many rows go to warpgroups: what warps take for them.
pub fn by_warps<G: Gpu>(
    cuda: &mut Cuda<G>,
    sizes: Sizes,
    peaks: Peaks,
    out: &mut impl Write,
) -> Result<(), Ended> {
    let (Some(&rows), true) = (sizes.rows.last(), cuda.use_warpgroups(false)) else {
        return Ok(());
    };
    writeln!(out, "by warps (mma.sync) instead of warpgroups (wgmma):")?;
    let mut bench = Bench {
        backend: &mut *cuda,
        sizes,
        peaks,
        out,
    };
    let done = FORMATS
        .into_iter()
        .try_for_each(|quant| bench.block(quant, rows));
    cuda.use_warpgroups(true);
    done
}

/// Rows of the quantization of a matrix on the device.
pub fn quantize<G: Gpu>(
    cuda: &mut Cuda<G>,
    sizes: Sizes,
    peaks: Peaks,
    out: &mut impl Write,
) -> Result<(), Ended> {
    let (outputs, inputs) = (sizes.middle, sizes.hidden);
    let plain = stored(QuantType::None, outputs, inputs);
    let matrix = cuda.matrix(view(QuantType::None, outputs, inputs, &plain)?)?;
    let mut bench = Bench {
        backend: cuda,
        sizes,
        peaks,
        out,
    };
    for quant in [QuantType::Nf4, QuantType::Int8] {
        let bytes = stored(quant, outputs, inputs).len();
        let mut to = bench.backend.buffer(bytes.div_ceil(4));
        let seconds = bench.time(|cuda| cuda.quantize(&matrix, quant, &mut to))?;
        let name = format!("quantize {quant} {outputs} x {inputs}");
        bench.print(&name, seconds, plain.len() + bytes, 0)?;
    }
    Ok(())
}

/// A device, what is measured on it, and where the rows go.
pub(super) struct Bench<'a, B, W> {
    pub(super) backend: &'a mut B,
    pub(super) sizes: Sizes,
    peaks: Peaks,
    pub(super) out: &'a mut W,
}

impl<B: Paged, W: Write> Bench<'_, B, W> {
    /// The products of a block, each on its own row, and their sum.
    fn block(&mut self, quant: QuantType, rows: usize) -> Result<(), Ended> {
        let Sizes {
            hidden, middle, kv, ..
        } = self.sizes;
        let mut total = 0.0;
        for (outputs, inputs, count) in [
            (hidden, hidden, 2),
            (kv, hidden, 2),
            (middle, hidden, 2),
            (hidden, middle, 1),
        ] {
            total += f64::from(count) * self.linear(quant, outputs, inputs, rows)?;
        }
        writeln!(
            self.out,
            "{:44} {:10.1} µs",
            format!("products of a block {quant} x {rows}"),
            total * 1e6
        )?;
        Ok(())
    }

    fn linear(
        &mut self,
        quant: QuantType,
        outputs: usize,
        inputs: usize,
        rows: usize,
    ) -> Result<f64, Ended> {
        let stored = stored(quant, outputs, inputs);
        let (bytes, view) = (stored.len(), view(quant, outputs, inputs, &stored)?);
        let copies = (self.sizes.ring_bytes / bytes.max(1)).clamp(1, 64);
        let ring: Vec<_> = (0..copies)
            .map(|_| self.backend.matrix(view))
            .collect::<Result<_, _>>()?;
        let x = self.filled(rows * inputs)?;
        let mut out = self.backend.buffer(rows * outputs);
        let mut next = 0;
        let seconds = self.time(|backend| {
            next += 1;
            backend.linear(Linear {
                x: &*x,
                weight: ring[next % copies].clone(),
                bias: None,
                out: &mut *out,
                rows,
            })
        })?;
        let name = format!("linear {quant} {inputs} -> {outputs} x {rows}");
        self.print(&name, seconds, bytes, 2 * rows * inputs * outputs)?;
        Ok(seconds)
    }

    /// Decode steps of `rows` sessions, or for many rows a prefill of as many tokens.
    fn attention(&mut self, rows: usize) -> Result<(), Ended> {
        let Sizes {
            hidden,
            kv,
            context,
            ..
        } = self.sizes;
        let layout = PageLayout {
            dtype: DType::Bf16,
            kv_heads: kv / HEAD_DIM,
            head_dim: HEAD_DIM,
        };
        let is_prefill = rows > 32;
        let (sessions, tokens, prefix) = if is_prefill {
            (1, rows, 0)
        } else {
            (rows, 1, context - 1)
        };
        let used = (prefix + tokens).div_ceil(PAGE_TOKENS);
        let tables: Vec<Vec<PageId>> = (0..sessions)
            .map(|s| (s * used..(s + 1) * used).map(page).collect())
            .collect();
        let bytes = sessions * used * layout.page_bytes();
        let mut room = B::Room::default();
        let all = steps(&tables, prefix + tokens, 0);
        let fill = self.filled(sessions * (prefix + tokens) * kv)?;
        let q = self.filled(sessions * tokens * hidden)?;
        let mut out = self.backend.buffer(sessions * tokens * hidden);
        let mut pages = self.backend.blank(&mut room, layout, bytes)?;
        self.backend.kv_append(KvAppend {
            keys: &*fill,
            values: &*fill,
            rows: &all,
            pages: &mut pages,
        })?;
        let rows_now = steps(&tables, tokens, prefix);
        let seconds = self.time(|backend| {
            backend.attention(Attention {
                q: &*q,
                pages: &pages,
                rows: &rows_now,
                group: hidden / kv,
                divisor: (HEAD_DIM as f32).sqrt(),
                alibi: None,
                window: usize::MAX,
                out: &mut *out,
                logsum: None,
            })
        })?;
        let pairs = if is_prefill {
            tokens * (tokens + 1) / 2
        } else {
            sessions * context
        };
        let name = if is_prefill {
            format!("attention prefill {tokens}")
        } else {
            format!("attention decode {context} x {sessions}")
        };
        self.print(&name, seconds, bytes, 4 * pairs * hidden)
    }

    pub(super) fn filled(&mut self, len: usize) -> Result<B::Buffer, Ended> {
        let values: Vec<f32> = (0..len)
            .map(|i| (i as f32 * 12.9898).sin() * 0.01)
            .collect();
        let mut buffer = self.backend.buffer(len);
        self.backend.upload(&values, &mut buffer)?;
        Ok(buffer)
    }

    /// Seconds of one run: the best of three series, each waited for once.
    pub(super) fn time(
        &mut self,
        mut run: impl FnMut(&mut B) -> Result<(), kernels::ops::OpError>,
    ) -> Result<f64, Ended> {
        let mut one = [0.0f32];
        let probe = self.filled(1)?;
        run(self.backend)?;
        let mut best = f64::INFINITY;
        for _ in 0..3 {
            self.backend.download(&probe, &mut one)?;
            let start = Instant::now();
            for _ in 0..self.sizes.repetitions {
                run(self.backend)?;
            }
            self.backend.download(&probe, &mut one)?;
            best = best.min(start.elapsed().as_secs_f64() / self.sizes.repetitions as f64);
        }
        Ok(best.max(1e-9))
    }

    pub(super) fn print(
        &mut self,
        name: &str,
        seconds: f64,
        bytes: usize,
        flops: usize,
    ) -> Result<(), Ended> {
        let (bytes, flops) = (bytes as f64 / seconds, flops as f64 / seconds);
        let share = |value: f64, peak: Option<f64>| match peak {
            Some(peak) if value > 0.0 => format!("{:4.0} %", 100.0 * value / peak),
            _ => "    -".to_owned(),
        };
        writeln!(
            self.out,
            "{name:44} {:10.1} µs {:9.1} GB/s {} {:9.2} TFLOP/s {}",
            seconds * 1e6,
            bytes / 1e9,
            share(bytes, self.peaks.bytes_per_s),
            flops / 1e12,
            share(flops, self.peaks.flops_per_s),
        )?;
        Ok(())
    }
}

pub(super) fn steps(tables: &[Vec<PageId>], tokens: usize, prefix: usize) -> Vec<StepRow<'_>> {
    tables
        .iter()
        .map(|pages| StepRow {
            tokens,
            prefix,
            pages,
        })
        .collect()
}

pub(super) fn page(index: usize) -> PageId {
    PageId(u32::try_from(index).unwrap_or(u32::MAX))
}
