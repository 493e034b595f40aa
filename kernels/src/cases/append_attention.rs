//! Attention of tokens whose keys are new, in one operation and in those that it stands for: the
//! same bits of outputs, pages and outbox, in fewer launches.

use super::*;
use crate::backend::append_then_attend;
use crate::cuda::{Cuda, Gpu};
use crate::ops::AppendAttention;
use crate::sizes;

/// (kv heads, group, head dimension, window, slopes)
type Shape = (usize, usize, usize, usize, bool);
const ALL: usize = usize::MAX;

/// Alone; over the border of a page and of a tile; behind one; several in each of two tiles.
const SHORT: Rows = &[(0, 1), (15, 3), (63, 2), (64, 1), (120, 11)];
/// Groups of tiles for all CTAs, the last of them with nothing but new keys, or without any.
const LONG: Rows = &[(2047, 3), (2048, 1), (1100, 1)];

/// (prefix, new tokens) of each row.
type Rows = &'static [(usize, usize)];

const CASES: [(Shape, Rows, Class); 12] = [
    ((1, 2, 64, ALL, false), SHORT, Class::Smallest),
    ((2, 2, 64, ALL, true), SHORT, Class::Quick),
    ((1, 8, 128, ALL, false), SHORT, Class::Quick),
    ((1, 3, 80, 5, false), SHORT, Class::Full),
    ((3, 1, 96, 70, false), SHORT, Class::Full),
    ((1, 2, 112, ALL, false), SHORT, Class::Full),
    ((1, 20, 64, ALL, false), SHORT, Class::Full),
    ((2, 2, 64, ALL, false), LONG, Class::Full),
    ((2, 2, 64, 300, false), LONG, Class::Full),
    // Apart: heads that are too long, or of no length that tensor cores take, or too many tokens.
    ((1, 2, 256, ALL, false), SHORT, Class::Full),
    ((1, 2, 20, ALL, false), SHORT, Class::Full),
    ((1, 2, 64, ALL, false), &[(3, 50)], Class::Full),
];

/// Compares every bit, and counts launches.
pub(super) fn check<G: Gpu>(
    _: &str,
    devices: &mut [Cuda<G>],
    class: Class,
) -> Result<usize, Failure> {
    let mut cases = 0;
    for device in devices {
        for (shape, rows, _) in CASES.into_iter().filter(|(.., at)| *at <= class) {
            for dtype in DTYPES {
                let (kv_heads, group, head_dim, window, has_slopes) = shape;
                let heads = Heads { kv_heads, group, head_dim, window, has_slopes };
                let batch = Batch::new(dtype, heads, rows);
                let case = format!("append_attention {}", batch.shape_name());
                let mut bench = Bench::checking(&mut *device, &case, class);
                let (launches, joint) = run(&mut bench, &batch, true)?;
                let (apart_launches, apart) = run(&mut bench, &batch, false)?;
                for (joint, apart) in joint.iter().zip(&apart) {
                    bench.same(joint, apart)?;
                }
                let is_joint = dtype != DType::F32
                    && (64..=sizes::attention_decode::FRESH_DIM).contains(&head_dim)
                    && batch.tokens() <= tuning::CUDA_ATTENTION_DECODE_TOKENS;
                let saved = (apart_launches - launches) as f32;
                bench.same(&[saved], &[f32::from(u8::from(is_joint))])?;
                cases += 1;
            }
        }
    }
    Ok(cases)
}

/// Launches, and pages, outbox and output.
fn run<G: Gpu>(
    bench: &mut Bench<'_, Cuda<G>>,
    batch: &Batch,
    is_joint: bool,
) -> Result<(u64, Vec<Vec<f32>>), Failure> {
    let (rows, group) = (batch.all_rows(), batch.shape.group);
    let len = batch.tokens() * batch.width();
    let (mut q, mut k) = (bench.input(&noise(1, len * group))?, bench.input(&noise(2, len))?);
    let (v, table) = (bench.input(&noise(3, len))?, batch.angles(&(0..batch.tokens())));
    let (table, mut out) = (bench.input(&table)?, bench.output(len * group)?);
    let memory = bench.device.page_memory(batch.pool());
    let mut memory = bench.op(memory)?;
    let before = bench.device.launches();
    {
        let mut pages = Cuda::<G>::pages(&mut memory, batch.layout);
        bench.launch(|device, _| {
            let args = AppendAttention {
                q: &mut *q,
                k: &mut *k,
                v: &*v,
                table: batch.slopes.is_none().then_some(&*table),
                rows: &rows,
                group,
                pages: &mut pages,
                divisor: batch.divisor(),
                alibi: batch.alibi(),
                window: batch.shape.window,
                out: &mut *out,
            };
            match is_joint {
                true => device.append_attention(args),
                false => append_then_attend(device, args),
            }
        })?;
    }
    let launches = bench.device.launches() - before;
    let bytes = bench.device.page_bytes(&memory, batch.layout, &rows);
    let mut all = pages::numbers(bench.op(bytes)?);
    all.push(bench.take(&out, len * group)?);
    Ok((launches, all))
}
