//! The sample of attention of many tokens: products of scores and of values, whose tiles merge in
//! one order by warps and by warpgroups.

use shared::dtype::DType;
use shared::ids::PageId;

use super::numbers;
use crate::cuda::ops::attention;
use crate::cuda::{Cuda, Gpu, Pages, PooledMemory};
use crate::kv::{KvPages, PAGE_TOKENS, PageLayout, StepRow};
use crate::ops::{Alibi, Attention, KvAppend, OpError, kv_append};

/// Heads of keys, and of queries for each: several queries of a token in a tile.
const KV_HEADS: usize = 2;
const GROUP: usize = 3;

/// What is attended to.
#[derive(Clone, Copy, Debug)]
pub(super) struct Case {
    pub dtype: DType,
    pub head_dim: usize,
    /// Cached tokens before the long row; the short one has none.
    pub prefix: usize,
    pub window: usize,
    pub has_slopes: bool,
}

/// The case of a kernel: among all, a row longer than the ring of tiles, a window and slopes.
pub(super) fn case(head_dim: usize, dtype: DType) -> Case {
    let (prefix, window, has_slopes) = match (head_dim, dtype) {
        (64, DType::Bf16) | (128, DType::F16) => (270, usize::MAX, true),
        (80, _) => (30, usize::MAX, dtype == DType::Bf16),
        (96, _) => (70, 50, dtype == DType::F16),
        (112, _) => (70, usize::MAX, true),
        _ => (70, usize::MAX, false),
    };
    Case { dtype, head_dim, prefix, window, has_slopes }
}

/// New tokens of the long row and of the short one: more than go to the kernel for few.
const TOKENS: [usize; 2] = [31, 5];

impl<G: Gpu> Cuda<G> {
    /// Outputs and logarithms of the sums, by warps and by warpgroups.
    pub(super) fn attention_both_ways(&mut self, case: Case) -> Result<[Vec<f32>; 2], OpError> {
        let layout = PageLayout { dtype: case.dtype, kv_heads: KV_HEADS, head_dim: case.head_dim };
        let positions = [case.prefix + TOKENS[0], TOKENS[1]];
        let tables = tables(positions);
        let pool = pool(layout, positions, &tables)?;
        let mut pages = self.scratch(pool.len())?;
        self.upload_bytes(&pool, &mut pages, 0)?;
        let rows =
            [0, 1].map(|row| StepRow::new(TOKENS[row], positions[row] - TOKENS[row], &tables[row]));
        let by_warps = self.attended(case, layout, &mut pages, &rows, false)?;
        Ok([by_warps, self.attended(case, layout, &mut pages, &rows, true)?])
    }

    fn attended(
        &mut self,
        case: Case,
        layout: PageLayout,
        pages: &mut PooledMemory<G>,
        rows: &[StepRow<'_>],
        by_warpgroups: bool,
    ) -> Result<Vec<f32>, OpError> {
        let (heads, bytes) = (KV_HEADS * GROUP, pages.bytes());
        let tokens: usize = TOKENS.iter().sum();
        let q = queries(tokens * heads, case.head_dim);
        let slopes: Vec<f32> = (0..heads).map(|h| 0.3 / (h + 1) as f32).collect();
        let mut on_device = self.buffer(q.len());
        self.upload(&q, &mut on_device)?;
        let (mut out, mut logsum) = (self.buffer(q.len()), self.buffer(tokens * heads));
        let args = Attention {
            q: &*on_device,
            pages: &Pages::new(layout, pages, 0, bytes),
            rows,
            group: GROUP,
            divisor: (case.head_dim as f32).sqrt(),
            alibi: case.has_slopes.then_some(Alibi { slopes: &slopes, scale: 1.0 }),
            window: case.window,
            out: &mut *out,
            logsum: Some(&mut *logsum),
        };
        attention::launch_by(self, args, by_warpgroups)?;
        let (mut values, mut sums) = (vec![0.0; q.len()], vec![0.0; tokens * heads]);
        self.download(&out, &mut values)?;
        self.download(&logsum, &mut sums)?;
        values.append(&mut sums);
        Ok(values)
    }
}

/// Pages of the two rows, in no order.
fn tables(positions: [usize; 2]) -> [Vec<PageId>; 2] {
    let [long, short] = positions.map(|tokens| tokens.div_ceil(PAGE_TOKENS) as u32);
    let ids = |range: std::ops::Range<u32>| range.rev().map(PageId).collect();
    [ids(short..short + long), ids(0..short)]
}

/// The pages of all positions.
fn pool(
    layout: PageLayout,
    positions: [usize; 2],
    tables: &[Vec<PageId>; 2],
) -> Result<Vec<u8>, OpError> {
    let count: usize = tables.iter().map(Vec::len).sum();
    // What nothing was appended to is NaN.
    let mut pool = vec![0xff; count * layout.page_bytes()];
    for (row, tokens) in positions.into_iter().enumerate() {
        let width = layout.kv_heads * layout.head_dim;
        // Sizes of values differ by the position: weights of one size add them.
        let values = numbers(30 + row as u64, tokens, width, layout.dtype);
        kv_append::reference(KvAppend {
            keys: &keys(10 + row as u64, tokens, width, layout.head_dim)[..],
            values: &values[..],
            rows: &[StepRow::new(tokens, 0, &tables[row])],
            pages: &mut KvPages::new(layout, &mut pool),
        })?;
    }
    Ok(pool)
}

/// `[heads, head_dim]` in which elements 1, 4, 7 ... of a head are those before them, so that
/// products with [`keys`] cancel.
fn queries(heads: usize, head_dim: usize) -> Vec<f32> {
    let mut q = numbers(1, 1, heads * head_dim, DType::F16);
    for head in q.chunks_mut(head_dim) {
        for at in (1..head_dim).step_by(3) {
            head[at] = head[at - 1];
        }
    }
    q
}

/// Keys by their position: of one size; large ones that cancel each other among small ones; and
/// tiny ones. Scores stay moderate, as a softmax of large ones is one weight of 1.
fn keys(seed: u64, tokens: usize, width: usize, head_dim: usize) -> Vec<f32> {
    let mut keys = numbers(seed, 1, tokens * width, DType::F16);
    for (position, key) in keys.chunks_mut(width).enumerate() {
        for head in key.chunks_mut(head_dim) {
            match position % 3 {
                1 => (1..head_dim).step_by(3).for_each(|at| {
                    head[at - 1] *= 1024.0;
                    head[at] = -head[at - 1];
                }),
                2 => head.iter_mut().for_each(|v| *v *= 2f32.powi(-14)),
                _ => (),
            }
        }
    }
    keys
}
