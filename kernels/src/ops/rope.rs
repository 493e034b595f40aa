//! Rotary position encoding in the half-split form: with `c`, `s` = cos, sin of `position *
//! inverse_frequency[i]`, `(x[i], x[i + d/2]) -> (x[i] c - x[i + d/2] s, x[i + d/2] c + x[i] s)`
//! (transformers `apply_rotary_pos_emb`). Inputs, cos, sin, products and sums are rounded to the
//! block dtype, as there.

use shared::dtype::DType;

use super::convert::with_rounding;
use super::{Elements, OpError, check_len};
use crate::kv::{StepRow, total_tokens};

/// Arguments of the table of one step: cos and sin for every new token.
#[derive(Debug)]
pub struct RopeTable<'a, F: ?Sized> {
    /// The batch; token `t` of a row has position `prefix + t`.
    pub rows: &'a [StepRow<'a>],
    /// Inverse frequencies `[head_dim / 2]`, with any scaling applied.
    pub inverse_frequencies: &'a [f32],
    /// Output `[tokens, 2, head_dim / 2]`: cos, then sin.
    pub out: &'a mut F,
    /// Dtype to which they are rounded: the block dtype.
    pub round: DType,
}

/// Arguments of the rotation.
#[derive(Debug)]
pub struct Rope<'a, F: ?Sized> {
    /// Rotated in place: `[tokens, heads, head_dim]`.
    pub x: &'a mut F,
    /// From [`RopeTable`].
    pub table: &'a F,
    /// New tokens of all rows.
    pub tokens: usize,
    pub heads: usize,
    /// Elements of a head, even.
    pub head_dim: usize,
    /// Dtype to which inputs, products and sums are rounded: the block dtype.
    pub round: DType,
    /// Whether to rotate back, which is the gradient of the rotation.
    pub inverse: bool,
}

impl<F: Elements + ?Sized> RopeTable<'_, F> {
    pub(crate) fn check(&self) -> Result<(), OpError> {
        check_len(
            "rope table",
            "out",
            self.out.len(),
            total_tokens(self.rows),
            2 * self.inverse_frequencies.len(),
        )
    }
}

impl<F: Elements + ?Sized> Rope<'_, F> {
    pub(crate) fn check(&self) -> Result<(), OpError> {
        if !self.head_dim.is_multiple_of(2) || self.head_dim == 0 {
            return Err(OpError::Shape { op: "rope", what: "the head dimension is not even" });
        }
        check_len("rope", "x", self.x.len(), self.tokens, self.heads * self.head_dim)?;
        check_len("rope", "table", self.table.len(), self.tokens, self.head_dim)
    }
}

/// The definition of the table; angles are f32 products, as in transformers.
pub fn reference_table(args: RopeTable<'_, [f32]>) -> Result<(), OpError> {
    args.check()?;
    let half = args.inverse_frequencies.len();
    let positions = args.rows.iter().flat_map(|row| row.prefix..row.prefix + row.tokens);
    for (position, out) in positions.zip(args.out.chunks_exact_mut(2 * half.max(1))) {
        let (cos, sin) = out.split_at_mut(half);
        for ((cos, sin), frequency) in cos.iter_mut().zip(sin).zip(args.inverse_frequencies) {
            (*sin, *cos) = (position as f32 * frequency).sin_cos();
        }
    }
    let own = &mut args.out[..total_tokens(args.rows) * 2 * half];
    with_rounding!(args.round, round => own.iter_mut().for_each(|v| *v = round(*v)));
    Ok(())
}

/// The definition of the rotation.
pub fn reference(args: Rope<'_, [f32]>) -> Result<(), OpError> {
    args.check()?;
    let width = args.heads * args.head_dim;
    let tables = args.table.chunks_exact(args.head_dim);
    for (token, table) in args.x.chunks_exact_mut(width.max(1)).zip(tables).take(args.tokens) {
        for head in token.chunks_exact_mut(args.head_dim) {
            let sign = if args.inverse { -1.0 } else { 1.0 };
            with_rounding!(args.round, round => rotate(head, table, sign, round));
        }
    }
    Ok(())
}

/// One head, compiled for the instruction set of the function that calls it.
#[inline(always)]
pub(crate) fn rotate(head: &mut [f32], table: &[f32], sign: f32, round: impl Fn(f32) -> f32) {
    let (first, second) = head.split_at_mut(table.len() / 2);
    let (cos, sin) = table.split_at(table.len() / 2);
    for (((a, b), cos), sin) in first.iter_mut().zip(second).zip(cos).zip(sin) {
        let (x, y, sin) = (round(*a), round(*b), sign * sin);
        *a = round(round(x * cos) - round(y * sin));
        *b = round(round(y * cos) + round(x * sin));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn position_zero_changes_nothing_and_angles_add_up() {
        let frequencies = [1.0, 0.1];
        let rotate = |x: &mut Vec<f32>, prefix, inverse| {
            let mut table = vec![f32::NAN; 4];
            let rows = [StepRow::new(1, prefix, &[])];
            reference_table(RopeTable {
                rows: &rows,
                inverse_frequencies: &frequencies,
                out: &mut table[..],
                round: DType::F32,
            })
            .unwrap();
            reference(Rope {
                x: &mut x[..],
                table: &table,
                tokens: 1,
                heads: 2,
                head_dim: 4,
                round: DType::F32,
                inverse,
            })
            .unwrap();
        };
        let original: Vec<f32> = (1..9).map(|v| v as f32).collect();
        let (mut still, mut twice, mut once) =
            (original.clone(), original.clone(), original.clone());
        rotate(&mut still, 0, false);
        assert_eq!(still, original);
        rotate(&mut twice, 3, false);
        rotate(&mut twice, 9, false);
        rotate(&mut twice, 5, true);
        rotate(&mut once, 7, false);
        assert!(once.iter().zip(&twice).all(|(a, b)| (a - b).abs() < 1e-5), "{once:?} {twice:?}");
    }
}
