//! Attention over pages. A row is a new token, so that ranges of rows cut prefills anywhere.

use super::*;

pub(super) struct AttentionCase(Batch);

/// A long session in a decode step of as many others as there may be.
const LONG: [(usize, usize); 32] = {
    let mut rows = [(3, 1); 32];
    rows[5] = (2_303, 1);
    rows
};

/// Sessions in a decode step.
const DECODE: [(usize, usize); 7] = [(0, 1), (15, 1), (16, 1), (40, 1), (3, 1), (31, 1), (47, 1)];

impl Case for AttentionCase {
    const HAS_ALTERNATIVES: bool = true;

    fn cases(class: Class) -> Vec<Self> {
        let mut all = Batch::all(class);
        let of = |kv_heads, head_dim, rows: &[(usize, usize)]| {
            let window = usize::MAX;
            let shape = Heads { kv_heads, group: 2, head_dim, window, has_slopes: false };
            Batch::new(DType::Bf16, shape, rows)
        };
        match class {
            // The smallest batch that goes to the kernels for many tokens, with two tiles of keys.
            Class::Smallest => all.push(of(1, 64, &[(40, 33)])),
            Class::Quick => (),
            _ => all.extend([
                of(2, 32, &DECODE),
                of(2, 64, &DECODE),
                of(2, 64, &[(0, 67)]),
                // Three groups of tiles: by the kernels for many tokens, each alone by the one for
                // few, and by CTAs that take whole groups.
                of(1, 64, &[(2040, 40)]),
                of(2, 64, &LONG),
            ]),
        }
        all.into_iter().map(AttentionCase).collect()
    }

    fn measured(shapes: &Shapes) -> Vec<Self> {
        Batch::measured(shapes, shapes.attention).into_iter().map(AttentionCase).collect()
    }

    fn operation(&self) -> &'static str {
        "attention"
    }

    fn shape(&self) -> String {
        self.0.shape_name()
    }

    fn rows(&self) -> usize {
        self.0.tokens()
    }

    /// Queries are rounded, and where a score falls the other way, a weight moves by half a unit;
    /// slopes make scores large.
    fn tolerance(&self, arithmetic: Arithmetic) -> f32 {
        let is_device = arithmetic == Arithmetic::TensorCores;
        let is_decode = self.0.rows.iter().all(|(_, tokens)| *tokens == 1);
        match (self.0.layout.dtype, self.0.shape.has_slopes) {
            (DType::F32, false) => 2e-6,
            (DType::F32, true) => 1e-5,
            (DType::F16, true) if is_device => 8e-3,
            (_, true) => 6e-2,
            (_, false) if is_device || is_decode => 8e-3,
            (_, false) => 4e-3,
        }
    }

    /// Also single tokens out of all rows, which go to the kernel for few.
    fn ranges(&self, usual: Vec<Range<usize>>) -> Vec<Range<usize>> {
        let mut all = usual;
        let mut first = 0;
        for (_, tokens) in &self.0.rows {
            let alone = (0..*tokens).filter(|new| new % 13 == 0 || new + 1 == *tokens);
            all.extend(alone.map(|new| first + new..first + new + 1));
            first += tokens;
        }
        all.retain(|range| range.len() < self.0.tokens());
        all
    }

    fn work(&self) -> Work {
        let heads = self.0.width() * self.0.shape.group;
        let pairs =
            |(prefix, tokens): &(usize, usize)| (prefix + 1..=prefix + tokens).sum::<usize>();
        let pairs: usize = self.0.rows.iter().map(pairs).sum();
        Work { bytes: self.0.cached_bytes(), operations: 4 * heads * pairs }
    }

    fn run<B: Subject>(&self, bench: &mut Bench<'_, B>, rows: Range<usize>) -> Outcome {
        let (batch, Heads { group, head_dim, window, .. }) = (&self.0, self.0.shape);
        let width = batch.width() * group;
        let q = noise(7, batch.tokens() * width);
        let q = bench.input(&q[rows.start * width..rows.end * width])?;
        let (len, rows) = (rows.len() * width, batch.rows_of(&rows));
        let (mut out, mut logsum) = (bench.output(len)?, bench.output(len / head_dim)?);
        let memory = bench.device.page_memory(batch.pool());
        let mut memory = bench.op(memory)?;
        let pages = B::pages(&mut memory, batch.layout);
        bench.launch(|device, _| {
            device.attention(Attention {
                q: &*q,
                pages: &pages,
                rows: &rows,
                group,
                divisor: batch.divisor(),
                alibi: batch.alibi(),
                window,
                out: &mut *out,
                logsum: Some(&mut *logsum),
            })
        })?;
        Ok(vec![bench.take(&out, len)?, bench.take(&logsum, len / head_dim)?])
    }
}
