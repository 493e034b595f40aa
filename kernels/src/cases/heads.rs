//! Moves of heads, and their rotation by position.

use super::*;

/// A fused projection, taken apart or put together.
#[derive(Clone, Copy, Debug)]
pub(super) struct QkvCase {
    joins: bool,
    tokens: usize,
    kv_heads: usize,
    group: usize,
    head_dim: usize,
}

impl QkvCase {
    fn all(sizes: impl IntoIterator<Item = (usize, usize, usize, usize)>) -> Vec<QkvCase> {
        let of = |(tokens, kv_heads, group, head_dim)| {
            [false, true].map(|joins| QkvCase { joins, tokens, kv_heads, group, head_dim })
        };
        sizes.into_iter().flat_map(of).collect()
    }
}

impl Case for QkvCase {
    fn cases(_: Class) -> Vec<Self> {
        QkvCase::all([(1, 1, 1, 1), (3, 2, 3, 20), (2, 1, 71, 64), (40, 2, 1, 16)])
    }

    fn measured(shapes: &Shapes) -> Vec<Self> {
        let (kv_heads, group) = (shapes.kv / HEAD_DIM, shapes.hidden / shapes.kv);
        QkvCase::all(shapes.rows.iter().map(|&tokens| (tokens, kv_heads, group, HEAD_DIM)))
    }

    fn operation(&self) -> &'static str {
        if self.joins { "join_qkv" } else { "split_qkv" }
    }

    fn shape(&self) -> String {
        format!("{}x{}x{} tokens {}", self.kv_heads, self.group, self.head_dim, self.tokens)
    }

    fn rows(&self) -> usize {
        self.tokens
    }

    fn work(&self) -> Work {
        Work::bytes(8 * self.tokens * self.kv_heads * (self.group + 2) * self.head_dim)
    }

    fn run<B: Subject>(&self, bench: &mut Bench<'_, B>, rows: Range<usize>) -> Outcome {
        let QkvCase { joins, kv_heads, group, head_dim, .. } = *self;
        let kv = kv_heads * head_dim;
        let (widths, tokens) = ([kv * (group + 2), kv * group, kv, kv], rows.len());
        let mut buffers = Vec::new();
        for (seed, width) in (1..).zip(widths) {
            // What is read is noise, what is written is NaN.
            let is_read = joins != (seed == 1);
            buffers.push(match is_read {
                true => bench.in_place(&rows_of(seed, self.tokens, width, &rows))?,
                false => bench.output(tokens * width)?,
            });
        }
        let [fused, q, k, v] = &mut buffers[..] else { unreachable!("four widths") };
        bench.launch(|device, _| {
            let (fused, q, k, v) = (&mut **fused, &mut **q, &mut **k, &mut **v);
            match joins {
                true => {
                    device.join_qkv(JoinQkv { fused, q, k, v, tokens, kv_heads, group, head_dim })
                }
                false => {
                    device.split_qkv(SplitQkv { fused, q, k, v, tokens, kv_heads, group, head_dim })
                }
            }
        })?;
        let pairs = buffers.iter().zip(widths);
        pairs.map(|(buffer, width)| bench.take(buffer, tokens * width)).collect()
    }
}

/// Angles of the tokens of a batch, or the rotation of heads by them.
#[derive(Clone, Debug)]
pub(super) struct RopeCase {
    batch: Batch,
    /// Heads that are rotated, and whether back; `None` for the angles.
    rotated: Option<(usize, bool)>,
}

impl Case for RopeCase {
    fn cases(class: Class) -> Vec<Self> {
        let of = |batch: Batch| {
            let heads = batch.layout.kv_heads;
            [None, Some((heads, false)), Some((heads, true))]
                .map(|rotated| RopeCase { batch: batch.clone(), rotated })
        };
        Batch::all(class.min(Class::Quick)).into_iter().flat_map(of).collect()
    }

    fn measured(shapes: &Shapes) -> Vec<Self> {
        let heads = shapes.hidden / HEAD_DIM;
        let of = |batch: Batch| {
            [None, Some((heads, false))].map(|rotated| RopeCase { batch: batch.clone(), rotated })
        };
        Batch::prefills(shapes, shapes.rows).into_iter().flat_map(of).collect()
    }

    fn operation(&self) -> &'static str {
        if self.rotated.is_some() { "rope" } else { "rope_table" }
    }

    fn shape(&self) -> String {
        match self.rotated {
            None => self.batch.shape_name(),
            Some((heads, false)) => format!("heads {heads} {}", self.batch.shape_name()),
            Some((heads, true)) => format!("inverse heads {heads} {}", self.batch.shape_name()),
        }
    }

    fn rows(&self) -> usize {
        self.batch.tokens()
    }

    fn tolerance(&self, _: Arithmetic) -> f32 {
        match (self.rotated, self.batch.layout.dtype) {
            (Some(_), _) => 0.0,
            (None, DType::F32) => 1e-6,
            (None, DType::Bf16) => 4e-3,
            (None, DType::F16) => 5e-4,
        }
    }

    fn work(&self) -> Work {
        let values = self.rotated.map_or(1, |(heads, _)| 2 * heads);
        Work::bytes(4 * values * self.batch.tokens() * self.batch.layout.head_dim)
    }

    fn run<B: Subject>(&self, bench: &mut Bench<'_, B>, rows: Range<usize>) -> Outcome {
        let (head_dim, round) = (self.batch.layout.head_dim, self.batch.layout.dtype);
        let tokens = rows.len();
        let Some((heads, inverse)) = self.rotated else {
            let (rows, frequencies) = (self.batch.rows_of(&rows), frequencies(head_dim));
            let mut out = bench.output(tokens * head_dim)?;
            bench.launch(|device, _| {
                let (rows, inverse_frequencies, out) = (&rows[..], &frequencies[..], &mut *out);
                device.rope_table(RopeTable { rows, inverse_frequencies, out, round })
            })?;
            return Ok(vec![bench.take(&out, tokens * head_dim)?]);
        };
        let width = heads * head_dim;
        let mut x = bench.in_place(&rows_of(5, self.rows(), width, &rows))?;
        let table = bench.input(&self.batch.angles(&rows))?;
        bench.launch(|device, _| {
            let (x, table) = (&mut *x, &*table);
            device.rope(Rope { x, table, tokens, heads, head_dim, round, inverse })
        })?;
        Ok(vec![bench.take(&x, tokens * width)?])
    }
}
