//! Batches of rows whose pages lie in no order, in a pool that is NaN wherever nothing was appended,
//! and the appends to pages.

use super::*;

/// Heads of a batch, and what a query sees.
#[derive(Clone, Copy, Debug)]
pub(super) struct Heads {
    pub(super) kv_heads: usize,
    pub(super) group: usize,
    pub(super) head_dim: usize,
    pub(super) window: usize,
    pub(super) has_slopes: bool,
}

const fn shape(
    kv_heads: usize,
    group: usize,
    head_dim: usize,
    window: usize,
    has_slopes: bool,
) -> Heads {
    Heads { kv_heads, group, head_dim, window, has_slopes }
}

const ALL: usize = usize::MAX;
const SHAPES: [(Heads, Class); 16] = [
    (shape(1, 1, 4, ALL, false), Class::Quick),
    (shape(2, 3, 20, 5, true), Class::Quick),
    (shape(2, 2, 64, ALL, false), Class::Quick),
    (shape(2, 3, 20, ALL, false), Class::Full),
    (shape(2, 2, 64, 5, false), Class::Full),
    (shape(1, 8, 16, ALL, true), Class::Full),
    (shape(3, 1, 12, 40, true), Class::Full),
    (shape(1, 3, 32, ALL, true), Class::Full),
    (shape(4, 1, 128, 16, false), Class::Full),
    (shape(1, 20, 64, 40, true), Class::Full),
    (shape(1, 8, 128, ALL, false), Class::Full),
    (shape(1, 3, 80, 100, false), Class::Full),
    (shape(3, 1, 96, ALL, true), Class::Full),
    (shape(2, 1, 96, 20, false), Class::Full),
    (shape(1, 2, 112, ALL, false), Class::Full),
    (shape(1, 2, 256, 70, false), Class::Full),
];

/// (prefix, new tokens) of the rows of a batch: alone, across pages, across tiles of 64 keys.
fn rows_for(class: Class) -> &'static [(usize, usize)] {
    match class {
        Class::Smallest => &[(0, 1), (15, 3), (20, 17)],
        Class::Quick => &[(0, 1), (15, 3), (70, 35)],
        Class::Full => &[(0, 1), (30, 70), (129, 3), (15, 17)],
        _ => &[(0, 1), (30, 70), (129, 3), (15, 17), (2047, 1), (1000, 333)],
    }
}

/// Rotations of neighbouring elements per position.
pub(super) fn frequencies(head_dim: usize) -> Vec<f32> {
    let half = head_dim / 2;
    (0..half).map(|i| 10_000f32.powf(-(i as f32) / half as f32)).collect()
}

/// A batch whose keys and values lie in pages.
#[derive(Clone, Debug)]
pub(super) struct Batch {
    pub(super) layout: PageLayout,
    pub(super) shape: Heads,
    /// (prefix, new tokens)
    pub(super) rows: Vec<(usize, usize)>,
    pub(super) slopes: Option<Vec<f32>>,
    tables: Vec<Vec<PageId>>,
    pages: usize,
    is_measured: bool,
    pool: OnceCell<Vec<u8>>,
}

impl Batch {
    pub(super) fn new(dtype: DType, shape: Heads, rows: &[(usize, usize)]) -> Batch {
        let Heads { kv_heads, group, head_dim, has_slopes, .. } = shape;
        // Page ids go round the rows, from the last to the first.
        let needed = |(prefix, tokens): &(usize, usize)| (prefix + tokens).div_ceil(PAGE_TOKENS);
        let pages: usize = rows.iter().map(needed).sum();
        let mut next = (0..u32::try_from(pages).unwrap_or(0)).rev().map(PageId);
        let mut tables = vec![Vec::new(); rows.len()];
        for round in 0..pages {
            for (table, row) in tables.iter_mut().zip(rows) {
                if round < needed(row) {
                    table.extend(next.next());
                }
            }
        }
        Batch {
            layout: PageLayout { dtype, kv_heads, head_dim },
            shape,
            rows: rows.to_vec(),
            slopes: has_slopes.then(|| noise(21, kv_heads * group)),
            tables,
            pages,
            is_measured: false,
            pool: OnceCell::new(),
        }
    }

    /// The batches of a class.
    pub(super) fn all(class: Class) -> Vec<Batch> {
        Batch::with_rows(class, rows_for(class))
    }

    /// The batches of a class, with the rows of another.
    pub(super) fn all_short(class: Class) -> Vec<Batch> {
        Batch::with_rows(
            class,
            rows_for(if class == Class::Served { Class::Full } else { class.min(Class::Quick) }),
        )
    }

    fn with_rows(class: Class, rows: &[(usize, usize)]) -> Vec<Batch> {
        let of = |shape: Heads| {
            let dtypes: &[DType] = match class {
                Class::Smallest if shape.head_dim > 4 => &[DType::Bf16],
                _ => &DTYPES,
            };
            dtypes.iter().map(move |&dtype| Batch::new(dtype, shape, rows))
        };
        class.select(&SHAPES).into_iter().flat_map(of).collect()
    }

    /// Batches to measure, of (sessions, prefix, new tokens).
    pub(super) fn measured(shapes: &Shapes, all: &[(usize, usize, usize)]) -> Vec<Batch> {
        let of = |&(sessions, prefix, tokens): &(usize, usize, usize)| {
            let shape =
                shape(shapes.kv / HEAD_DIM, shapes.hidden / shapes.kv, HEAD_DIM, ALL, false);
            let rows = vec![(prefix, tokens); sessions];
            Batch { is_measured: true, ..Batch::new(DType::Bf16, shape, &rows) }
        };
        all.iter().map(of).collect()
    }

    /// Prefills of so many tokens.
    pub(super) fn prefills(shapes: &Shapes, tokens: &[usize]) -> Vec<Batch> {
        let all: Vec<_> = tokens.iter().map(|&tokens| (1, 0, tokens)).collect();
        Batch::measured(shapes, &all)
    }

    /// The bytes of all pages, those of the new tokens included.
    pub(super) fn pool(&self) -> &[u8] {
        self.pool.get_or_init(|| {
            let bytes = self.pages * self.layout.page_bytes();
            if self.is_measured {
                return vec![0x3c; bytes];
            }
            let mut pool = vec![0xff; bytes];
            for (index, &(prefix, tokens)) in self.rows.iter().enumerate() {
                let (tokens, index) = (prefix + tokens, index as u64);
                let len = tokens * self.width();
                let (keys, values) = (noise(100 + index, len), noise(200 + index, len));
                let table = &self.tables[index as usize];
                kv_append::reference(KvAppend {
                    keys: &keys[..],
                    values: &values[..],
                    rows: &[StepRow::new(tokens, 0, table)],
                    pages: &mut KvPages::new(self.layout, &mut pool),
                })
                .expect("the pool has pages for all rows");
            }
            pool
        })
    }

    /// The step that consists of some of the new tokens of all rows, one row behind the other.
    pub(super) fn rows_of(&self, tokens: &Range<usize>) -> Vec<StepRow<'_>> {
        let mut first = 0;
        let mut rows = Vec::new();
        for (&(prefix, count), pages) in self.rows.iter().zip(&self.tables) {
            let end = first + count;
            let own = tokens.start.clamp(first, end)..tokens.end.clamp(first, end);
            if !own.is_empty() {
                let prefix = prefix + own.start - first;
                rows.push(StepRow::new(own.len(), prefix, pages));
            }
            first = end;
        }
        rows
    }

    pub(super) fn all_rows(&self) -> Vec<StepRow<'_>> {
        self.rows_of(&(0..self.tokens()))
    }

    pub(super) fn table(&self, row: usize) -> &[PageId] {
        &self.tables[row]
    }

    pub(super) fn alibi(&self) -> Option<Alibi<'_>> {
        let slopes = self.slopes.as_deref();
        slopes.map(|slopes| Alibi { slopes, scale: 0.5 })
    }

    pub(super) fn divisor(&self) -> f32 {
        (self.layout.head_dim as f32).sqrt()
    }

    /// New tokens.
    pub(super) fn tokens(&self) -> usize {
        self.rows.iter().map(|(_, tokens)| tokens).sum()
    }

    /// Elements of the keys of a token.
    pub(super) fn width(&self) -> usize {
        self.layout.kv_heads * self.layout.head_dim
    }

    /// Bytes of the keys and values that some rows hold.
    pub(super) fn cached_bytes(&self) -> usize {
        self.pages * self.layout.page_bytes()
    }

    /// Cos and sin of some of the new tokens, by their definition.
    pub(super) fn angles(&self, tokens: &Range<usize>) -> Vec<f32> {
        let rows = self.rows_of(tokens);
        let mut out = vec![0.0; tokens.len() * self.layout.head_dim];
        rope::reference_table(RopeTable {
            rows: &rows,
            inverse_frequencies: &frequencies(self.layout.head_dim),
            out: &mut out[..],
            round: self.layout.dtype,
        })
        .expect("room for all tokens");
        out
    }

    pub(super) fn shape_name(&self) -> String {
        let Heads { kv_heads, group, head_dim, window, has_slopes } = self.shape;
        let slopes = if has_slopes { " slopes" } else { "" };
        let window = if window == ALL { String::new() } else { format!(" window {window}") };
        let rows: Vec<String> = match &self.rows[..] {
            [first, others @ ..] if !others.is_empty() && others.iter().all(|row| row == first) => {
                vec![format!("{}+{} x {}", first.0, first.1, self.rows.len())]
            }
            rows => rows.iter().map(|(prefix, tokens)| format!("{prefix}+{tokens}")).collect(),
        };
        let dtype = self.layout.dtype;
        let heads = format!("{}/{kv_heads}x{head_dim}", kv_heads * group);
        format!("{dtype} {heads}{window}{slopes} {}", rows.join(" "))
    }
}

/// The bytes of pages, and of what was appended, as numbers.
pub(super) fn numbers(bytes: [Vec<u8>; 2]) -> Vec<Vec<f32>> {
    bytes.map(|bytes| bytes.into_iter().map(f32::from).collect()).into()
}

/// An append of the new tokens of all rows.
pub(super) struct KvAppendCase(Batch);

impl Case for KvAppendCase {
    fn cases(class: Class) -> Vec<Self> {
        // All types, whose kernels are small.
        let rows = rows_for(class.min(Class::Quick));
        let of = |shape| DTYPES.map(|dtype| KvAppendCase(Batch::new(dtype, shape, rows)));
        class.select(&SHAPES).into_iter().flat_map(of).collect()
    }

    fn measured(shapes: &Shapes) -> Vec<Self> {
        Batch::prefills(shapes, shapes.rows).into_iter().map(KvAppendCase).collect()
    }

    fn operation(&self) -> &'static str {
        "kv_append"
    }

    fn shape(&self) -> String {
        self.0.shape_name()
    }

    fn work(&self) -> Work {
        Work::bytes(12 * self.0.tokens() * self.0.width())
    }

    fn run<B: Subject>(&self, bench: &mut Bench<'_, B>, _: Range<usize>) -> Outcome {
        let (batch, rows) = (&self.0, self.0.all_rows());
        let len = batch.tokens() * batch.width();
        let (keys, values) = (bench.input(&noise(11, len))?, bench.input(&noise(12, len))?);
        let memory = bench.device.page_memory(batch.pool());
        let mut memory = bench.op(memory)?;
        {
            let mut pages = B::pages(&mut memory, batch.layout);
            bench.launch(|device, _| {
                let (keys, values, rows, pages) = (&*keys, &*values, &rows[..], &mut pages);
                device.kv_append(KvAppend { keys, values, rows, pages })
            })?;
        }
        if batch.is_measured {
            return Ok(Vec::new());
        }
        let bytes = bench.device.page_bytes(&memory, batch.layout, &rows);
        Ok(numbers(bench.op(bytes)?))
    }
}

/// The rotation of queries and keys, and the append: the bits of one after the other.
pub(super) struct RopeAppendCase(Batch);

impl Case for RopeAppendCase {
    fn cases(_: Class) -> Vec<Self> {
        let heads = [(1, 1, 2), (2, 3, 20), (1, 8, 128)];
        let of = |(kv_heads, group, head_dim)| {
            let shape = shape(kv_heads, group, head_dim, ALL, false);
            DTYPES.map(|dtype| RopeAppendCase(Batch::new(dtype, shape, &[(15, 3), (0, 1)])))
        };
        heads.into_iter().flat_map(of).collect()
    }

    fn operation(&self) -> &'static str {
        "rope_append"
    }

    fn shape(&self) -> String {
        self.0.shape_name()
    }

    fn run<B: Subject>(&self, bench: &mut Bench<'_, B>, _: Range<usize>) -> Outcome {
        let (batch, rows, group) = (&self.0, self.0.all_rows(), self.0.shape.group);
        let len = total_tokens(&rows) * batch.width();
        let mut q = bench.in_place(&noise(1, len * group))?;
        let (mut k, v) = (bench.input(&noise(2, len))?, bench.input(&noise(3, len))?);
        let table = bench.input(&batch.angles(&(0..batch.tokens())))?;
        let memory = bench.device.page_memory(batch.pool());
        let mut memory = bench.op(memory)?;
        {
            let mut pages = B::pages(&mut memory, batch.layout);
            bench.launch(|device, _| {
                let (q, k, v, table) = (&mut *q, &mut *k, &*v, &*table);
                let (rows, pages) = (&rows[..], &mut pages);
                device.rope_append(RopeAppend { q, k, v, table, rows, group, pages })
            })?;
        }
        let bytes = bench.device.page_bytes(&memory, batch.layout, &rows);
        let mut all = numbers(bench.op(bytes)?);
        all.push(bench.take(&q, len * group)?);
        Ok(all)
    }
}
