//! Cases of rotation, of the append to pages, of attention over them and of its gradient: batches of rows whose pages lie in no order, in a
//! pool that is NaN wherever nothing was appended.

use shared::dtype::DType;
use shared::ids::PageId;

use super::{Bench, Extent, Failure, noise, test_on_devices};
use crate::cuda::ops::{
    attention as device, attention_grad as device_grad, kv_append as device_append,
    rope as device_rope,
};
use crate::cuda::{Buffer, Cuda, Gpu, Pages};
use crate::kv::{KvPages, PageLayout, StepRow};
use crate::ops::{
    Alibi, Attention, AttentionGrad, Known, KvAppend, Rope, RopeTable, attention, attention_grad,
    kv_append, rope,
};

/// (kv heads, group, head dimension, window, slopes)
type Shape = (usize, usize, usize, usize, bool);
const ALL: usize = usize::MAX;
const SHAPES: [(Shape, Extent); 9] = [
    ((1, 1, 4, ALL, false), Extent::Small),
    ((2, 3, 20, 5, true), Extent::Small),
    ((2, 2, 64, ALL, false), Extent::Small),
    ((1, 20, 64, 40, true), Extent::Middle),
    ((1, 8, 128, ALL, false), Extent::Middle),
    ((1, 3, 80, 100, false), Extent::Middle),
    ((3, 1, 96, ALL, true), Extent::Middle),
    ((1, 2, 112, ALL, false), Extent::Middle),
    ((1, 2, 256, 70, false), Extent::Middle),
];
const DTYPES: [DType; 3] = [DType::F32, DType::Bf16, DType::F16];

/// (prefix, new tokens) of the rows of a batch: alone, across pages, across tiles of 64 keys.
fn batch_of(extent: Extent) -> &'static [(usize, usize)] {
    match extent {
        Extent::Least => &[(0, 1), (15, 3), (20, 17)],
        Extent::Small => &[(0, 1), (15, 3), (70, 35)],
        Extent::Middle => &[(0, 1), (30, 70), (129, 3), (15, 17)],
        Extent::Full => &[(0, 1), (30, 70), (129, 3), (15, 17), (2047, 1), (1000, 333)],
    }
}

/// Types of the pages: all, or those of the tiles and of the smallest case.
fn dtypes_of(extent: Extent, shape: Shape) -> &'static [DType] {
    match extent {
        Extent::Least if shape.2 > 4 => &[DType::Bf16],
        _ => &DTYPES,
    }
}

/// A batch whose keys and values lie in pages.
struct Batch {
    layout: PageLayout,
    shape: Shape,
    rows: Vec<(usize, usize)>,
    tables: Vec<Vec<PageId>>,
    slopes: Option<Vec<f32>>,
    pool: Vec<u8>,
}

impl Batch {
    fn new(dtype: DType, shape: Shape, rows: &[(usize, usize)]) -> Batch {
        let (kv_heads, group, head_dim, _, has_slopes) = shape;
        let layout = PageLayout {
            dtype,
            kv_heads,
            head_dim,
        };
        // Page ids go round the rows, from the last to the first.
        let needed = |(prefix, tokens): &(usize, usize)| (prefix + tokens).div_ceil(16);
        let total: usize = rows.iter().map(needed).sum();
        let mut next = (0..u32::try_from(total).unwrap_or(0)).rev().map(PageId);
        let mut tables = vec![Vec::new(); rows.len()];
        for round in 0..total {
            for (table, row) in tables.iter_mut().zip(rows) {
                if round < needed(row) {
                    table.extend(next.next());
                }
            }
        }
        let mut batch = Batch {
            layout,
            shape,
            rows: rows.to_vec(),
            tables,
            slopes: has_slopes.then(|| noise(21, kv_heads * group)),
            pool: vec![0xff; total * layout.page_bytes()],
        };
        batch.fill();
        batch
    }

    /// Appends all positions, those of the new tokens included.
    fn fill(&mut self) {
        let width = self.layout.kv_heads * self.layout.head_dim;
        for (index, table) in self.tables.iter().enumerate() {
            let tokens = self.rows[index].0 + self.rows[index].1;
            let (keys, values) = (
                noise(100 + index as u64, tokens * width),
                noise(200 + index as u64, tokens * width),
            );
            kv_append::reference(KvAppend {
                keys: &keys[..],
                values: &values[..],
                rows: &[StepRow {
                    tokens,
                    prefix: 0,
                    pages: table,
                }],
                pages: &mut KvPages::new(self.layout, &mut self.pool),
            })
            .expect("the pool has pages for all rows");
        }
    }

    fn step_rows(&self) -> Vec<StepRow<'_>> {
        let rows = self.rows.iter().zip(&self.tables);
        rows.map(|(&(prefix, tokens), pages)| StepRow {
            tokens,
            prefix,
            pages,
        })
        .collect()
    }

    fn alibi(&self) -> Option<Alibi<'_>> {
        let slopes = self.slopes.as_deref();
        slopes.map(|slopes| Alibi { slopes, scale: 0.5 })
    }

    fn divisor(&self) -> f32 {
        (self.layout.head_dim as f32).sqrt()
    }

    fn tokens(&self) -> usize {
        self.rows.iter().map(|(_, tokens)| tokens).sum()
    }

    /// Where the rows begin in the sums: one behind the other, with a gap before the first.
    fn starts(&self) -> Vec<usize> {
        let mut end = 2;
        let start = |(prefix, tokens): &(usize, usize)| {
            let start = end;
            end += prefix + tokens;
            start
        };
        self.rows.iter().map(start).collect()
    }

    fn width(&self) -> usize {
        self.layout.kv_heads * self.layout.head_dim
    }
}

pub(super) fn check<G: Gpu>(cuda: &mut Cuda<G>, extent: Extent) -> Result<usize, Failure> {
    let mut bench = Bench::new(cuda);
    for (shape, _) in SHAPES.into_iter().filter(|(_, at)| extent.takes(*at)) {
        for &dtype in dtypes_of(extent, shape) {
            let batch = Batch::new(dtype, shape, batch_of(extent));
            bench.begin(format!("attention {dtype} {shape:?}"));
            attend(&mut bench, &batch)?;
        }
    }
    if extent == Extent::Least {
        // The smallest batch that goes to the kernels for many tokens, with two tiles of keys.
        let batch = Batch::new(DType::Bf16, (1, 2, 64, ALL, false), &[(40, 33)]);
        bench.begin("attention of many tokens".to_owned());
        attend(&mut bench, &batch)?;
    }
    Ok(bench.cases)
}

pub(super) fn check_grad<G: Gpu>(cuda: &mut Cuda<G>, extent: Extent) -> Result<usize, Failure> {
    let mut bench = Bench::new(cuda);
    for (shape, _) in SHAPES.into_iter().filter(|(_, at)| extent.takes(*at)) {
        for &dtype in dtypes_of(extent, shape) {
            // The reference takes its time.
            let rows = match extent {
                Extent::Full => Extent::Middle,
                less => less.min(Extent::Small),
            };
            let batch = Batch::new(dtype, shape, batch_of(rows));
            bench.begin(format!("gradient {dtype} {shape:?}"));
            gradient(&mut bench, &batch)?;
            // Each piece is a launch of its own, which takes an instrumented emulator long.
            if extent > Extent::Small {
                bench.begin(format!("gradient in pieces {dtype} {shape:?}"));
                cut(&mut bench, &batch)?;
            }
        }
    }
    Ok(bench.cases)
}

pub(super) fn check_pages<G: Gpu>(cuda: &mut Cuda<G>, extent: Extent) -> Result<usize, Failure> {
    let mut bench = Bench::new(cuda);
    for (shape, _) in SHAPES.into_iter().filter(|(_, at)| extent.takes(*at)) {
        for dtype in DTYPES {
            let batch = Batch::new(dtype, shape, batch_of(extent.min(Extent::Small)));
            bench.begin(format!("append {dtype} {shape:?}"));
            append(&mut bench, &batch)?;
            bench.begin(format!("rotation {dtype} {shape:?}"));
            rotate(&mut bench, &batch)?;
        }
    }
    Ok(bench.cases)
}

/// The bytes of a pool as f32 on the device.
fn upload<G: Gpu>(bench: &mut Bench<'_, G>, bytes: &[u8]) -> Result<Buffer<G>, Failure> {
    let words: Vec<f32> = bytes
        .chunks(4)
        .map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))
        .collect();
    bench.input(&words)
}

fn download<G: Gpu>(
    bench: &mut Bench<'_, G>,
    from: &Buffer<G>,
    len: usize,
) -> Result<Vec<u8>, Failure> {
    let mut words = vec![0.0; len / 4];
    let done = bench.cuda.download(from, &mut words);
    bench.op(done)?;
    Ok(words.iter().flat_map(|v| v.to_le_bytes()).collect())
}

fn attend<G: Gpu>(bench: &mut Bench<'_, G>, batch: &Batch) -> Result<(), Failure> {
    let (_, group, _, window, has_slopes) = batch.shape;
    let q = noise(7, batch.tokens() * batch.width() * group);
    let rows = batch.step_rows();
    let mut wanted = vec![f32::NAN; q.len()];
    let mut wanted_sums = vec![f32::NAN; q.len() / batch.layout.head_dim];
    let mut pool = batch.pool.clone();
    let reference = attention::reference(Attention {
        q: &q[..],
        pages: &KvPages::new(batch.layout, &mut pool),
        rows: &rows,
        group,
        divisor: batch.divisor(),
        alibi: batch.alibi(),
        window,
        out: &mut wanted[..],
        logsum: Some(&mut wanted_sums[..]),
    });
    bench.op(reference)?;
    let memory = upload(bench, &batch.pool)?;
    let run = |bench: &mut Bench<'_, G>, q: &[f32], rows: &[StepRow<'_>]| {
        attended(bench, batch, &memory, q, rows, false)
    };
    let [got, got_sums] = run(bench, &q, &rows)?;
    // Queries are rounded on the device, and where a score falls the other way, a weight moves by half a unit; slopes make scores large.
    let tolerance = match (batch.layout.dtype, has_slopes) {
        (DType::F32, false) => 2e-6,
        (DType::F32, true) => 1e-5,
        (DType::Bf16, false) => 8e-3,
        (DType::Bf16, true) => 6e-2,
        (DType::F16, _) => 8e-3,
    };
    bench.close(&got, &wanted, tolerance)?;
    bench.close(&got_sums, &wanted_sums, tolerance)?;
    if bench.cuda.has_warpgroups() {
        let [by_warpgroups, sums] = attended(bench, batch, &memory, &q, &rows, true)?;
        bench.close(&by_warpgroups, &wanted, tolerance)?;
        bench.close(&sums, &wanted_sums, tolerance)?;
    }
    // Each token alone, and so by the kernel for few.
    let per_token = batch.width() * group;
    let mut token = 0;
    for row in &rows {
        for new in 0..row.tokens {
            let range = token * per_token..(token + 1) * per_token;
            token += 1;
            if new % 13 != 0 && new + 1 != row.tokens {
                continue;
            }
            let alone = StepRow {
                tokens: 1,
                prefix: row.prefix + new,
                pages: row.pages,
            };
            let [alone, alone_sums] = run(bench, &q[range.clone()], &[alone])?;
            let sums = range.start / batch.layout.head_dim..range.end / batch.layout.head_dim;
            bench.same(&alone, &got[range])?;
            bench.same(&alone_sums, &got_sums[sums])?;
        }
    }
    Ok(())
}

/// The output of attention on the device and the logarithms of its sums, many tokens by warpgroups or by warps.
fn attended<G: Gpu>(
    bench: &mut Bench<'_, G>,
    batch: &Batch,
    memory: &Buffer<G>,
    q: &[f32],
    rows: &[StepRow<'_>],
    by_warpgroups: bool,
) -> Result<[Vec<f32>; 2], Failure> {
    let (_, group, _, window, _) = batch.shape;
    let (from, mut out) = (bench.input(q)?, bench.output(q.len())?);
    let sums = q.len() / batch.layout.head_dim;
    let mut logsum = bench.output(sums)?;
    let args = Attention {
        q: &*from,
        pages: &pages(memory, batch),
        rows,
        group,
        divisor: batch.divisor(),
        alibi: batch.alibi(),
        window,
        out: &mut *out,
        logsum: Some(&mut *logsum),
    };
    let done = device::launch_by(bench.cuda, args, by_warpgroups);
    bench.op(done)?;
    Ok([bench.take(&out, q.len())?, bench.take(&logsum, sums)?])
}

fn pages<'k, G: Gpu>(memory: &'k Buffer<G>, batch: &Batch) -> Pages<'k> {
    Pages::over(batch.layout, memory, None, batch.pool.len())
}

fn gradient<G: Gpu>(bench: &mut Bench<'_, G>, batch: &Batch) -> Result<(), Failure> {
    let (_, group, _, window, _) = batch.shape;
    let len = batch.tokens() * batch.width() * group;
    let (q, grad) = (noise(7, len), noise(8, len));
    let rows = batch.step_rows();
    let starts = batch.starts();
    let ends = starts.iter().zip(&batch.rows);
    let ends = ends.map(|(start, (prefix, tokens))| start + prefix + tokens);
    let end = ends.max().unwrap_or(0);
    let sums = noise(9, end * batch.width());
    let mut wanted = [vec![f32::NAN; len], sums.clone(), sums.clone()];
    let [q_grad, k_grad, v_grad] = &mut wanted;
    let mut pool = batch.pool.clone();
    let reference = attention_grad::reference(AttentionGrad {
        q: &q[..],
        grad: &grad[..],
        pages: &KvPages::new(batch.layout, &mut pool),
        rows: &rows,
        starts: &starts,
        group,
        divisor: batch.divisor(),
        alibi: batch.alibi(),
        window,
        known: None,
        q_grad: &mut q_grad[..],
        k_grad: &mut k_grad[..],
        v_grad: &mut v_grad[..],
    });
    bench.op(reference)?;
    let memory = upload(bench, &batch.pool)?;
    let mut got = [vec![f32::NAN; len], sums.clone(), sums];
    let whole = batch.rows.clone();
    let way = Way::default();
    back(
        bench,
        batch,
        &memory,
        [&q, &grad],
        &starts,
        &whole,
        &mut got,
        way,
    )?;
    // Gradients, and from tensor cores all that they multiply, are rounded to bfloat16 there, and scores as attention rounds them: slopes make
    // scores large.
    let tolerance = match (is_tiled(batch), batch.layout.dtype, batch.slopes.is_some()) {
        (true, DType::Bf16, true) => 4e-2,
        (true, ..) => 1e-2,
        (false, ..) => 3e-5,
    };
    for (got, wanted) in got.iter().zip(&wanted) {
        bench.close(got, wanted, tolerance)?;
    }
    Ok(())
}

fn is_tiled(batch: &Batch) -> bool {
    batch.layout.dtype != DType::F32 && [64, 80, 96, 112, 128].contains(&batch.layout.head_dim)
}

/// How a gradient is asked for.
#[derive(Clone, Copy, Default)]
struct Way {
    /// With what attention gave.
    is_known: bool,
    /// In memory for one tile of keys.
    is_tight: bool,
}

/// The batch in pieces, cut at multiples of a page and taken from the last to the first, has the bits of the whole, whatever is known and however much
/// memory there is.
fn cut<G: Gpu>(bench: &mut Bench<'_, G>, batch: &Batch) -> Result<(), Failure> {
    let len = batch.tokens() * batch.width() * batch.shape.1;
    let (q, grad) = (noise(7, len), noise(8, len));
    let (memory, inputs, starts) = (upload(bench, &batch.pool)?, [&q[..], &grad], batch.starts());
    let sums = starts.last().copied().unwrap_or(0);
    let last = batch
        .rows
        .last()
        .map_or(0, |(prefix, tokens)| prefix + tokens);
    let zeros = vec![0.0; (sums + last) * batch.width()];
    let mut whole = [vec![0.0; len], zeros.clone(), zeros.clone()];
    let rows = batch.rows.clone();
    let ends = rows.iter().map(|(prefix, tokens)| prefix + tokens);
    let longest = ends.max().unwrap_or(0);
    let way = Way::default();
    back(
        bench, batch, &memory, inputs, &starts, &rows, &mut whole, way,
    )?;
    let way = Way {
        is_known: true,
        is_tight: true,
    };
    let mut pieces = [vec![0.0; len], zeros.clone(), zeros];
    for page in (0..longest.div_ceil(16)).rev().map(|page| page * 16) {
        let within = |&(prefix, tokens): &(usize, usize)| {
            let from = prefix.max(page).min(prefix + tokens);
            (from, (prefix + tokens).min(page + 16).max(from) - from)
        };
        let part: Vec<_> = rows.iter().map(within).collect();
        if part.iter().any(|(_, tokens)| *tokens > 0) {
            back(
                bench,
                batch,
                &memory,
                inputs,
                &starts,
                &part,
                &mut pieces,
                way,
            )?;
        }
    }
    for (got, wanted) in pieces.iter().zip(&whole) {
        bench.same(got, wanted)?;
    }
    Ok(())
}

/// The gradients of the tokens of `part`, rows of (prefix, tokens) within those of the batch; `results` are what there is of those of
/// queries, keys and values.
#[allow(
    clippy::too_many_arguments,
    reason = "a batch, a part of it, and how it is asked for"
)]
fn back<G: Gpu>(
    bench: &mut Bench<'_, G>,
    batch: &Batch,
    memory: &Buffer<G>,
    inputs: [&[f32]; 2],
    starts: &[usize],
    part: &[(usize, usize)],
    results: &mut [Vec<f32>; 3],
    way: Way,
) -> Result<(), Failure> {
    let (_, group, _, window, _) = batch.shape;
    let width = batch.width() * group;
    // Tokens of the part within those of the batch.
    let (mut ranges, mut start) = (Vec::new(), 0);
    let (mut rows, mut kept) = (Vec::new(), Vec::new());
    for (index, (&(from, tokens), &(prefix, all))) in part.iter().zip(&batch.rows).enumerate() {
        if tokens > 0 {
            let at = start + from - prefix;
            ranges.push(at * width..(at + tokens) * width);
            rows.push(StepRow {
                tokens,
                prefix: from,
                pages: &batch.tables[index],
            });
            kept.push(starts[index]);
        }
        start += all;
    }
    let gathered = |of: &[f32]| -> Vec<f32> {
        let parts = ranges.iter().map(|range| &of[range.clone()]);
        parts.flatten().copied().collect()
    };
    let (q, grad) = (gathered(inputs[0]), gathered(inputs[1]));
    let len = q.len();
    let (q, grad) = (bench.input(&q)?, bench.input(&grad)?);
    let (mut q_grad, mut k_grad, mut v_grad) = (
        bench.output(len)?,
        bench.in_place(&results[1])?,
        bench.in_place(&results[2])?,
    );
    let pages = pages(memory, batch);
    let (mut out, mut logsum) = (
        bench.output(len)?,
        bench.output(len / batch.layout.head_dim)?,
    );
    if way.is_known {
        let args = Attention {
            q: &*q,
            pages: &pages,
            rows: &rows,
            group,
            divisor: batch.divisor(),
            alibi: batch.alibi(),
            window,
            out: &mut *out,
            logsum: Some(&mut *logsum),
        };
        let done = device::launch(bench.cuda, args);
        bench.op(done)?;
    }
    let known = way.is_known.then_some(Known {
        out: &*out,
        logsum: &*logsum,
    });
    let args = AttentionGrad {
        q: &*q,
        grad: &*grad,
        pages: &pages,
        rows: &rows,
        starts: &kept,
        group,
        divisor: batch.divisor(),
        alibi: batch.alibi(),
        window,
        known,
        q_grad: &mut *q_grad,
        k_grad: &mut *k_grad,
        v_grad: &mut *v_grad,
    };
    let done = match way.is_tight {
        false => device_grad::launch(bench.cuda, args),
        true => device_grad::launch_within(bench.cuda, args, 0),
    };
    bench.op(done)?;
    let q_grad = bench.take(&q_grad, len)?;
    let mut taken = 0;
    for range in ranges {
        let next = taken + range.len();
        results[0][range].copy_from_slice(&q_grad[taken..next]);
        taken = next;
    }
    for (result, sums) in results[1..].iter_mut().zip([&k_grad, &v_grad]) {
        *result = bench.take(sums, result.len())?;
    }
    Ok(())
}

fn append<G: Gpu>(bench: &mut Bench<'_, G>, batch: &Batch) -> Result<(), Failure> {
    let len = batch.tokens() * batch.width();
    let (keys, values) = (noise(11, len), noise(12, len));
    let rows = batch.step_rows();
    let mut wanted = batch.pool.clone();
    let reference = kv_append::reference(KvAppend {
        keys: &keys[..],
        values: &values[..],
        rows: &rows,
        pages: &mut KvPages::new(batch.layout, &mut wanted),
    });
    bench.op(reference)?;
    let (memory, mirror) = (upload(bench, &batch.pool)?, upload(bench, &batch.pool)?);
    let (keys, values) = (bench.input(&keys)?, bench.input(&values)?);
    let mut to = Pages::over(batch.layout, &memory, Some(&mirror), batch.pool.len());
    let args = KvAppend {
        keys: &*keys,
        values: &*values,
        rows: &rows,
        pages: &mut to,
    };
    let done = device_append::launch(bench.cuda, args);
    bench.op(done)?;
    same_bytes(bench, &memory, &wanted)?;
    same_bytes(bench, &mirror, &wanted)?;
    let copies = [(PageId(0), PageId(1), 5), (PageId(2), PageId(3), 16)];
    let mut host = KvPages::new(batch.layout, &mut wanted);
    for (source, destination, tokens) in copies {
        bench.op(host.copy(source, destination, tokens))?;
    }
    let done = device_append::launch_copies(bench.cuda, &mut pages(&memory, batch), &copies);
    bench.op(done)?;
    same_bytes(bench, &memory, &wanted)
}

fn same_bytes<G: Gpu>(
    bench: &mut Bench<'_, G>,
    got: &Buffer<G>,
    wanted: &[u8],
) -> Result<(), Failure> {
    let got = download(bench, got, wanted.len())?;
    let numbers = |bytes: &[u8]| bytes.iter().map(|b| f32::from(*b)).collect::<Vec<f32>>();
    bench.same(&numbers(&got), &numbers(wanted))
}

fn rotate<G: Gpu>(bench: &mut Bench<'_, G>, batch: &Batch) -> Result<(), Failure> {
    let (kv_heads, _, head_dim, ..) = batch.shape;
    let (rows, round, tokens) = (batch.step_rows(), batch.layout.dtype, batch.tokens());
    let half = head_dim / 2;
    let frequencies: Vec<f32> = (0..half)
        .map(|i| 10_000f32.powf(-(i as f32) / half as f32))
        .collect();
    let mut wanted = vec![f32::NAN; tokens * head_dim];
    let reference = rope::reference_table(RopeTable {
        rows: &rows,
        inverse_frequencies: &frequencies,
        out: &mut wanted[..],
        round,
    });
    bench.op(reference)?;
    let mut table = bench.output(wanted.len())?;
    let args = RopeTable {
        rows: &rows,
        inverse_frequencies: &frequencies,
        out: &mut *table,
        round,
    };
    let done = device_rope::launch_table(bench.cuda, args);
    bench.op(done)?;
    let got = bench.take(&table, wanted.len())?;
    let tolerance = [1e-6, 4e-3, 5e-4][DTYPES.iter().position(|d| *d == round).unwrap_or(0)];
    bench.close(&got, &wanted, tolerance)?;
    for inverse in [false, true] {
        let x = noise(5, tokens * kv_heads * head_dim);
        let mut wanted = x.clone();
        let reference = rope::reference(Rope {
            x: &mut wanted[..],
            table: &got[..],
            tokens,
            heads: kv_heads,
            head_dim,
            round,
            inverse,
        });
        bench.op(reference)?;
        let mut on_device = bench.in_place(&x)?;
        let args = Rope {
            x: &mut *on_device,
            table: &*table,
            tokens,
            heads: kv_heads,
            head_dim,
            round,
            inverse,
        };
        let done = device_rope::launch(bench.cuda, args);
        bench.op(done)?;
        let got = bench.take(&on_device, wanted.len())?;
        bench.same(&got, &wanted)?;
    }
    Ok(())
}

test_on_devices!(super::check);

/// Warpgroups that add as warps do give the same bits.
#[cfg(all(test, feature = "emu"))]
fn check_warpgroups<G: Gpu>(cuda: &mut Cuda<G>, extent: Extent) -> Result<usize, Failure> {
    let mut bench = Bench::new(cuda);
    let shapes = SHAPES.into_iter().filter(|(_, at)| extent.takes(*at));
    for (shape, dtype) in shapes.flat_map(|(shape, _)| DTYPES.map(|dtype| (shape, dtype))) {
        let batch = Batch::new(dtype, shape, batch_of(extent));
        if is_tiled(&batch) {
            bench.begin(format!("attention by warpgroups {dtype} {shape:?}"));
            let (rows, width) = (batch.step_rows(), batch.width() * shape.1);
            let q = noise(7, batch.tokens() * width);
            let memory = upload(&mut bench, &batch.pool)?;
            let [warps, warpgroups] = [false, true].map(|by_warpgroups| {
                attended(&mut bench, &batch, &memory, &q, &rows, by_warpgroups)
            });
            for (warps, warpgroups) in warps?.iter().zip(&warpgroups?) {
                bench.same(warpgroups, warps)?;
            }
        }
    }
    Ok(bench.cases)
}

#[cfg(all(test, feature = "emu"))]
mod emulated_others {
    #[test]
    fn attention_by_warpgroups_has_the_bits_of_warps() {
        crate::selftest::assert_emulated(super::check_warpgroups);
    }

    #[test]
    fn gradients_equal_their_reference_on_the_emulator() {
        crate::selftest::assert_emulated(super::check_grad);
    }

    #[test]
    fn appends_and_rotations_equal_their_reference_on_the_emulator() {
        crate::selftest::assert_emulated(super::check_pages);
    }
}
