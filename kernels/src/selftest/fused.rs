//! Cases of launches that do the work of several: the bits are those of one after the other.

use shared::dtype::DType;
use shared::ids::PageId;

use super::{Bench, Extent, Failure, noise, test_on_devices};
use crate::cuda::ops::fused::{add_norm, rope_append};
use crate::cuda::ops::{add, kv_append, layernorm, rmsnorm, rope};
use crate::cuda::{Cuda, Gpu, Pages};
use crate::kv::{PageLayout, StepRow};
use crate::ops::{Add, AddNorm, KvAppend, Layernorm, Rmsnorm, Rope, RopeAppend, RopeTable};

const NORMS: [(usize, usize, Extent); 4] = [
    (1, 1, Extent::Small),
    (3, 37, Extent::Small),
    (2, 260, Extent::Small),
    (2, 8192, Extent::Middle),
];
/// (kv heads, group, head dimension)
const HEADS: [(usize, usize, usize); 3] = [(1, 1, 2), (2, 3, 20), (1, 8, 128)];
const DTYPES: [DType; 3] = [DType::F32, DType::Bf16, DType::F16];

pub(super) fn check<G: Gpu>(cuda: &mut Cuda<G>, extent: Extent) -> Result<usize, Failure> {
    let mut bench = Bench::new(cuda);
    for dtype in DTYPES {
        for (rows, width, _) in NORMS.into_iter().filter(|(.., at)| extent.takes(*at)) {
            for has_bias in [false, true] {
                bench.begin(format!("sum and norm {dtype} {has_bias} [{rows}, {width}]"));
                norm(&mut bench, rows, width, dtype, has_bias)?;
            }
        }
        for shape in HEADS {
            bench.begin(format!("rotation and append {dtype} {shape:?}"));
            append(&mut bench, dtype, shape)?;
        }
    }
    Ok(bench.cases)
}

fn norm<G: Gpu>(
    bench: &mut Bench<'_, G>,
    rows: usize,
    width: usize,
    round: DType,
    has_bias: bool,
) -> Result<(), Failure> {
    let (len, eps) = (rows * width, 1e-5);
    let x = noise(1, len);
    let (y, weight, bias) = (
        bench.input(&noise(2, len))?,
        bench.input(&noise(3, width))?,
        bench.input(&noise(4, width))?,
    );
    let (mut sum, mut normed) = (bench.in_place(&x)?, bench.output(len)?);
    let args = Add {
        x: &mut *sum,
        y: &*y,
        len,
        round,
    };
    let done = add::launch(bench.cuda, args);
    bench.op(done)?;
    let done = match has_bias {
        false => rmsnorm::launch(
            bench.cuda,
            Rmsnorm {
                x: &*sum,
                weight: &*weight,
                out: &mut *normed,
                rows,
                width,
                eps,
                round,
            },
        ),
        true => layernorm::launch(
            bench.cuda,
            Layernorm {
                x: &*sum,
                weight: &*weight,
                bias: &*bias,
                out: &mut *normed,
                rows,
                width,
                eps,
                round,
            },
        ),
    };
    bench.op(done)?;
    let (mut both, mut out) = (bench.in_place(&x)?, bench.output(len)?);
    let args = AddNorm {
        x: &mut *both,
        y: &*y,
        weight: &*weight,
        bias: has_bias.then_some(&*bias),
        out: &mut *out,
        rows,
        width,
        eps,
        round,
    };
    let done = add_norm(bench.cuda, args);
    bench.op(done)?;
    for (got, wanted) in [(&both, &sum), (&out, &normed)] {
        let (got, wanted) = (bench.take(got, len)?, bench.take(wanted, len)?);
        bench.same(&got, &wanted)?;
    }
    Ok(())
}

fn append<G: Gpu>(
    bench: &mut Bench<'_, G>,
    dtype: DType,
    (kv_heads, group, head_dim): (usize, usize, usize),
) -> Result<(), Failure> {
    let layout = PageLayout {
        dtype,
        kv_heads,
        head_dim,
    };
    let (first, second) = ([PageId(2), PageId(0)], [PageId(1)]);
    let row = |tokens, prefix, pages| StepRow {
        tokens,
        prefix,
        pages,
    };
    let rows = [row(3, 15, &first[..]), row(1, 0, &second[..])];
    let (tokens, bytes) = (4, 3 * layout.page_bytes());
    let frequencies: Vec<f32> = (0..head_dim / 2).map(|i| 1.0 / (1 + i) as f32).collect();
    let mut table = bench.output(tokens * head_dim)?;
    let args = RopeTable {
        rows: &rows,
        inverse_frequencies: &frequencies,
        out: &mut *table,
        round: dtype,
    };
    let done = rope::launch_table(bench.cuda, args);
    bench.op(done)?;
    let (q, k) = (
        noise(1, tokens * kv_heads * group * head_dim),
        noise(2, tokens * kv_heads * head_dim),
    );
    let v = bench.input(&noise(3, k.len()))?;
    let empty = vec![0.0; bytes / 4];
    let (mut wanted_q, mut rotated) = (bench.in_place(&q)?, bench.in_place(&k)?);
    let (wanted_pages, wanted_mirror) = (bench.input(&empty)?, bench.input(&empty)?);
    for (x, heads) in [(&mut wanted_q, kv_heads * group), (&mut rotated, kv_heads)] {
        let args = Rope {
            x: &mut **x,
            table: &*table,
            tokens,
            heads,
            head_dim,
            round: dtype,
            inverse: false,
        };
        let done = rope::launch(bench.cuda, args);
        bench.op(done)?;
    }
    let args = KvAppend {
        keys: &*rotated,
        values: &*v,
        rows: &rows,
        pages: &mut Pages::over(layout, &wanted_pages, Some(&wanted_mirror), bytes),
    };
    let done = kv_append::launch(bench.cuda, args);
    bench.op(done)?;
    let (mut got_q, mut k) = (bench.in_place(&q)?, bench.input(&k)?);
    let (got_pages, got_mirror) = (bench.input(&empty)?, bench.input(&empty)?);
    let args = RopeAppend {
        q: &mut *got_q,
        k: &mut *k,
        v: &*v,
        table: &*table,
        rows: &rows,
        group,
        pages: &mut Pages::over(layout, &got_pages, Some(&got_mirror), bytes),
    };
    let done = rope_append(bench.cuda, args);
    bench.op(done)?;
    let (got, wanted) = (
        bench.take(&got_q, q.len())?,
        bench.take(&wanted_q, q.len())?,
    );
    bench.same(&got, &wanted)?;
    for (got, wanted) in [(&got_pages, &wanted_pages), (&got_mirror, &wanted_mirror)] {
        let mut pair = [vec![0.0; bytes / 4], vec![0.0; bytes / 4]];
        for (values, from) in pair.iter_mut().zip([got, wanted]) {
            let done = bench.cuda.download(from, values);
            bench.op(done)?;
        }
        bench.same(&pair[0], &pair[1])?;
    }
    Ok(())
}

test_on_devices!(super::check);
