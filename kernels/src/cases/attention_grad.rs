//! The gradient of attention: whole, and in pieces that are taken from the last to the first.

use super::*;

pub(super) struct AttentionGradCase {
    batch: Batch,
    /// Whether results of attention are given.
    is_known: bool,
    /// Whether it is also taken in pieces.
    is_cut: bool,
}

/// How a gradient is asked for.
#[derive(Clone, Copy, Default)]
struct GradientCase {
    /// With the results of attention.
    is_known: bool,
    /// In memory for one tile of keys.
    is_tight: bool,
}

impl AttentionGradCase {
    /// Where the rows begin in the sums: one behind the other, with a gap before the first.
    fn starts(&self) -> Vec<usize> {
        let mut end = 2;
        let start = |(prefix, tokens): &(usize, usize)| {
            let start = end;
            end += prefix + tokens;
            start
        };
        self.batch.rows.iter().map(start).collect()
    }

    /// What the sums of keys and values hold before.
    fn sums(&self) -> Vec<f32> {
        let positions: usize = self.batch.rows.iter().map(|(prefix, tokens)| prefix + tokens).sum();
        noise(9, (positions + 2) * self.batch.width())
    }

    fn is_tiled(&self) -> bool {
        let layout = self.batch.layout;
        let has_kernel = tuning::CUDA_ATTENTION_GRAD_DIMS.contains(&layout.head_dim);
        layout.dtype != DType::F32 && has_kernel
    }

    /// Adds the gradients of some new tokens of each row, (prefix, tokens) within those of the
    /// batch, to `results`: those of queries, keys and values.
    fn add<B: Subject>(
        &self,
        bench: &mut Bench<'_, B>,
        piece: &[(usize, usize)],
        results: &mut [Vec<f32>; 3],
        ask: GradientCase,
    ) -> Result<(), Failure> {
        let (batch, Heads { group, head_dim, window, .. }) = (&self.batch, self.batch.shape);
        let (width, all_starts) = (batch.width() * group, self.starts());
        // Tokens of the piece within those of the batch.
        let (mut ranges, mut rows, mut starts) = (Vec::new(), Vec::new(), Vec::new());
        let mut first = 0;
        for (index, (&(from, tokens), &(prefix, all))) in piece.iter().zip(&batch.rows).enumerate()
        {
            if tokens > 0 {
                let at = first + from - prefix;
                ranges.push(at * width..(at + tokens) * width);
                rows.push(StepRow::new(tokens, from, batch.table(index)));
                starts.push(all_starts[index]);
            }
            first += all;
        }
        let values = |seed| -> Vec<f32> {
            let all = noise(seed, batch.tokens() * width);
            ranges.iter().flat_map(|range| &all[range.clone()]).copied().collect()
        };
        let (q, grad) = (bench.input(&values(7))?, bench.input(&values(8))?);
        let len = ranges.iter().map(Range::len).sum();
        let mut q_grad = bench.output(len)?;
        let (mut k_grad, mut v_grad) = (bench.in_place(&results[1])?, bench.in_place(&results[2])?);
        let (mut out, mut logsum) = (bench.output(len)?, bench.output(len / head_dim)?);
        let memory = bench.device.page_memory(batch.pool());
        let mut memory = bench.op(memory)?;
        let pages = B::pages(&mut memory, batch.layout);
        let (divisor, alibi) = (batch.divisor(), batch.alibi());
        if ask.is_known {
            let (q, pages, rows) = (&*q, &pages, &rows[..]);
            let (out, logsum) = (&mut *out, Some(&mut *logsum));
            let done = bench.device.attention(Attention {
                q,
                pages,
                rows,
                group,
                divisor,
                alibi,
                window,
                out,
                logsum,
            });
            bench.op(done)?;
        }
        bench.launch(|device, _| {
            let args = AttentionGrad {
                q: &*q,
                grad: &*grad,
                pages: &pages,
                rows: &rows,
                starts: &starts,
                group,
                divisor,
                alibi,
                window,
                known: ask.is_known.then_some(Known { out: &*out, logsum: &*logsum }),
                q_grad: &mut *q_grad,
                k_grad: &mut *k_grad,
                v_grad: &mut *v_grad,
            };
            match ask.is_tight {
                true => device.attention_grad_tight(args),
                false => device.attention_grad(args),
            }
        })?;
        let q_grad = bench.take(&q_grad, len)?;
        let mut rest = &q_grad[..];
        for range in ranges {
            let (own, behind) = rest.split_at(range.len().min(rest.len()));
            results[0][range][..own.len()].copy_from_slice(own);
            rest = behind;
        }
        for (result, sums) in results[1..].iter_mut().zip([&k_grad, &v_grad]) {
            *result = bench.take(sums, result.len())?;
        }
        Ok(())
    }

    /// The gradients of pieces of so many positions, from the last to the first.
    fn cut<B: Subject>(
        &self,
        bench: &mut Bench<'_, B>,
        positions: usize,
        ask: GradientCase,
    ) -> Outcome {
        let ends = self.batch.rows.iter().map(|(prefix, tokens)| prefix + tokens);
        let longest = ends.max().unwrap_or(0);
        let mut results = self.before();
        for first in (0..longest).step_by(positions).rev() {
            let within = |&(prefix, tokens): &(usize, usize)| {
                let from = prefix.max(first).min(prefix + tokens);
                (from, (prefix + tokens).min(first + positions).max(from) - from)
            };
            let piece: Vec<_> = self.batch.rows.iter().map(within).collect();
            if piece.iter().any(|(_, tokens)| *tokens > 0) {
                self.add(bench, &piece, &mut results, ask)?;
            }
        }
        Ok(results.into())
    }

    fn before(&self) -> [Vec<f32>; 3] {
        let len = self.batch.tokens() * self.batch.width() * self.batch.shape.group;
        [vec![f32::NAN; len], self.sums(), self.sums()]
    }
}

impl Case for AttentionGradCase {
    fn cases(class: Class) -> Vec<Self> {
        let is_cut = class > Class::Quick;
        let of = |batch| AttentionGradCase { batch, is_known: false, is_cut };
        // The reference takes its time.
        let mut all: Vec<_> = Batch::all_short(class).into_iter().map(of).collect();
        if is_cut {
            let single = |batch: Batch| Batch::new(batch.layout.dtype, batch.shape, &[(0, 35)]);
            let singles: Vec<_> = all.iter().map(|case| of(single(case.batch.clone()))).collect();
            all.extend(singles);
        }
        all
    }

    fn measured(shapes: &Shapes) -> Vec<Self> {
        let of = |batch| AttentionGradCase { batch, is_known: true, is_cut: false };
        Batch::prefills(shapes, shapes.gradient_tokens).into_iter().map(of).collect()
    }

    fn operation(&self) -> &'static str {
        "attention_grad"
    }

    fn shape(&self) -> String {
        self.batch.shape_name()
    }

    /// Gradients, and from tensor cores all that they multiply, are rounded to bfloat16 there, and
    /// scores as attention rounds them: slopes make scores large.
    fn tolerance(&self, arithmetic: Arithmetic) -> f32 {
        let (layout, has_slopes) = (self.batch.layout, self.batch.shape.has_slopes);
        match arithmetic {
            Arithmetic::TensorCores if !self.is_tiled() => 3e-5,
            Arithmetic::TensorCores if layout.dtype == DType::Bf16 && has_slopes => 4e-2,
            Arithmetic::TensorCores => 1e-2,
            Arithmetic::Bf16Pairs if has_pairs(&self.batch) => 1e-2,
            Arithmetic::F32 | Arithmetic::Bf16Pairs => 2e-5,
        }
    }

    fn work(&self) -> Work {
        // Scores again, and four products of their size.
        let pairs = self.batch.rows.iter().map(|(_, tokens)| tokens * (tokens + 1)).sum::<usize>();
        let operations = 5 * pairs * self.batch.width() * self.batch.shape.group;
        Work { bytes: self.batch.cached_bytes(), operations }
    }

    fn run<B: Subject>(&self, bench: &mut Bench<'_, B>, _: Range<usize>) -> Outcome {
        let mut results = self.before();
        let ask = GradientCase { is_known: self.is_known, is_tight: false };
        self.add(bench, &self.batch.rows, &mut results, ask)?;
        Ok(results.into())
    }

    fn check<B: Subject>(&self, bench: &mut Bench<'_, B>, expected: &[Vec<f32>]) -> Outcome {
        let all = self.run(bench, 0..1)?;
        let tolerance = self.tolerance(bench.device.arithmetic());
        bench.all_close(&all, expected, tolerance, false)?;
        if !self.is_cut {
            return Ok(all);
        }
        // Products of pairs and tensor cores sum the queries of a page by themselves.
        let is_free = match bench.device.arithmetic() {
            Arithmetic::F32 => true,
            Arithmetic::Bf16Pairs => !has_pairs(&self.batch),
            Arithmetic::TensorCores => false,
        };
        let ask = GradientCase { is_known: true, is_tight: true };
        let cuts: &[usize] = match (B::IS_HOST, is_free) {
            (true, true) => &[1, 20, PAGE_TOKENS, 2 * PAGE_TOKENS],
            (true, false) => &[PAGE_TOKENS, 2 * PAGE_TOKENS],
            (false, _) => &[PAGE_TOKENS],
        };
        for &positions in cuts {
            let pieces = self.cut(bench, positions, ask)?;
            bench.all_same(&pieces, &all)?;
        }
        Ok(all)
    }
}

/// Whether a processor with products of bfloat16 pairs takes them here.
fn has_pairs(batch: &Batch) -> bool {
    batch.layout.dtype == DType::Bf16 && batch.layout.head_dim.is_multiple_of(32)
}
