//! Rows of inputs packed for tiles of outer products.

use std::ops::Range;

use shared::dtype::DType;

use super::MOST_ROWS;
use crate::cpu::pool::Disjoint;
use crate::ops::convert;

/// Rows of inputs to pack.
#[derive(Clone, Copy, Debug)]
pub(in crate::cpu::simd) struct InputRows<'a> {
    /// `[rows, width]`.
    pub(in crate::cpu::simd) x: &'a [f32],
    pub(in crate::cpu::simd) width: usize,
    /// To which the inputs are rounded.
    pub(in crate::cpu::simd) dtype: DType,
    /// For each position of a whole group of 64, the input that lies there; `None` for inputs in
    /// their own order.
    pub(in crate::cpu::simd) order: Option<[u8; 64]>,
    /// Inputs of an item: [`Outer::ITEM`](super::Outer::ITEM).
    pub(in crate::cpu::simd) item: usize,
    /// See [`Classes`](super::Classes).
    pub(in crate::cpu::simd) classes: usize,
    /// Zeros follow the inputs up to a multiple of this, which is one of `item * classes`.
    pub(in crate::cpu::simd) step: usize,
    /// Inputs of a chunk, a multiple of 64.
    pub(in crate::cpu::simd) chunk: usize,
}

impl InputRows<'_> {
    /// Items that the packed rows take.
    pub(in crate::cpu::simd) fn packed(&self) -> usize {
        self.x.len() / self.width.max(1) * (self.width.next_multiple_of(self.step) / self.item)
    }

    /// Steps of a run of each class for so many inputs.
    pub(in crate::cpu::simd) fn steps(&self, inputs: usize) -> usize {
        inputs.next_multiple_of(self.step) / (self.item * self.classes)
    }

    /// The chunk that begins with input `start` or holds it.
    pub(in crate::cpu::simd) fn chunk(&self, start: usize) -> Range<usize> {
        let first = start / self.chunk * self.chunk;
        first..self.width.min(first + self.chunk)
    }

    /// Where the run of a class in a chunk begins, `[step][row]`, for a tile of rows. The runs of
    /// all tiles follow each other, as they are read.
    pub(in crate::cpu::simd) fn run(
        &self,
        chunk: &Range<usize>,
        class: usize,
        tile: &Range<usize>,
    ) -> usize {
        let (rows, steps) = (self.x.len() / self.width, self.steps(chunk.len()));
        rows * (chunk.start / self.item) + (class * rows + tile.start) * steps
    }
}

/// Makes items of the rows of a tile and packs them `[step][row]`, by chunk and class; zeros follow the
/// inputs. `items` makes those of up to 64 inputs of a row.
///
/// # Safety
/// The rows of the tile exist in `to`, and no one else writes there.
#[inline(always)]
pub(super) unsafe fn pack(
    of: InputRows<'_>,
    tile: Range<usize>,
    to: &Disjoint<'_, f32>,
    items: impl Fn(&InputRows<'_>, &[f32], &mut [f32; 64]),
) {
    let (count, mut made) = (tile.len(), [[0.0; 64]; MOST_ROWS]);
    for start in (0..of.width).step_by(64) {
        let left = 64.min(of.width - start);
        for (r, made) in tile.clone().zip(&mut made) {
            items(&of, &of.x[r * of.width + start..][..left], made);
        }
        let chunk = of.chunk(start);
        let (first, steps) = (of.steps(start - chunk.start), of.steps(left));
        for class in 0..of.classes {
            let at = of.run(&chunk, class, &tile) + first * count;
            // SAFETY: as the caller says; the borrow ends here.
            let to = unsafe { to.range(at, steps * count) };
            for (i, to) in to.chunks_exact_mut(count).enumerate() {
                for (to, made) in to.iter_mut().zip(&made) {
                    *to = made[i * of.classes + class];
                }
            }
        }
    }
}

/// Rounds up to 64 inputs, in the order of the rows if they are 64; zeros follow.
#[inline(always)]
pub(super) fn rounded(of: &InputRows<'_>, x: &[f32], items: &mut [f32; 64]) {
    convert::with_rounding!(of.dtype, round => match &of.order {
        Some(order) if x.len() == 64 => {
            for (to, from) in items.iter_mut().zip(order) {
                *to = round(x[usize::from(from % 64)]);
            }
        }
        _ => items.iter_mut().zip(x).for_each(|(to, x)| *to = round(*x)),
    });
    items[x.len()..].fill(0.0);
}
