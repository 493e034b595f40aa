//! The layout of slices of stored matrices in memory of their own: what a rank of a group holds where its part of a
//! matrix does not lie in one piece. Quantization comes before the cut: the values of a slice are
//! those of the whole matrix, to the last bit.
//!
//! Plain numbers and INT8 have the layout of a smaller matrix, since the scale of an INT8 row is that
//! of the whole row. A slice of NF4 has it too where rows and cuts begin and end with groups, but for
//! the second scales: those of `1 << shift` groups are one number, which may be there several times.
//! `shift` is the largest for which that many neighbours here are neighbours in the whole matrix:
//!
//! ```text
//! codes    u8  [rows, inputs / 2]
//! absmax   u8  [rows, inputs / 64]
//! absmax2  f32 [groups >> shift]
//! offset   f32                        as in the whole matrix
//! ```
//! Elsewhere cuts go through groups, and groups run over the ends of rows:
//!
//! ```text
//! codes    u8  [rows, (inputs + 1) / 2]   each row begins with a byte
//! absmax   u8  [rows, groups]             the groups that a row touches, zeros behind them
//! starts   u64 [rows]                     which weight of the whole matrix the row begins with
//! offset   f32                            as in the whole matrix
//! absmax2  f32 [whole groups / 256]       as there
//! ```
//! The group of a weight, and its second scale, then follow from its place in the whole matrix. Fast
//! paths take slices of whole groups as they take matrices.

use std::ops::Range;

use shared::config::QuantType;
use shared::dtype::DType;

use super::nf4::{self, GROUP, SUPER_GROUP};
use super::{PART_ALIGNMENT, int8, stored_bytes};

/// Bytes of a [`WeightSlice`](crate::slice::WeightSlice), or more than are read of rows where they
/// [lie](crate::WeightView::rows): `rows` rows and some columns of a matrix `[outputs, inputs]`.
/// `None` when that is no size.
pub fn slice_bytes(
    quant: QuantType,
    dtype: DType,
    [outputs, inputs]: [usize; 2],
    rows: usize,
    columns: Range<usize>,
) -> Option<usize> {
    if rows == outputs && columns == (0..inputs) {
        return stored_bytes(quant, dtype, outputs, inputs);
    }
    match quant {
        QuantType::None => rows.checked_mul(columns.len())?.checked_mul(dtype.size_bytes()),
        QuantType::Int8 => int8::stored_bytes(rows, columns.len()),
        QuantType::Nf4 => {
            let groups = rows.checked_mul(row_groups(inputs, &columns))?;
            let codes = rows.checked_mul(columns.len().div_ceil(2))?;
            let (starts, seconds) = match shift(inputs, &columns) {
                Some(shift) => (0, groups.div_ceil(1 << shift)),
                None => {
                    let whole = outputs.checked_mul(inputs)?.div_ceil(GROUP);
                    (rows.checked_mul(nf4::START_BYTES)?, whole.div_ceil(SUPER_GROUP))
                }
            };
            let parts = [codes, groups, starts, seconds.checked_add(1)?.checked_mul(4)?];
            parts.into_iter().try_fold(0usize, |sum, part| {
                sum.checked_add(part.checked_next_multiple_of(PART_ALIGNMENT)?)
            })
        }
    }
}

/// Bytes that plans count for the same in the memory of any device: the larger of
/// [`slice_bytes`] and of what a CUDA device has, which pads NF4 of whole groups to tiles. `None` when
/// that is no size.
pub fn held_bytes(
    quant: QuantType,
    dtype: DType,
    [outputs, inputs]: [usize; 2],
    rows: usize,
    columns: Range<usize>,
) -> Option<usize> {
    let stored = slice_bytes(quant, dtype, [outputs, inputs], rows, columns.clone())?;
    let shift = match shift(inputs, &columns) {
        Some(_) if rows == outputs && columns == (0..inputs) => Some(nf4::SHIFT),
        other => other,
    };
    match (quant, shift) {
        (QuantType::Nf4, Some(shift)) => {
            Some(stored.max(nf4::tiled_bytes(rows, columns.len(), shift)?))
        }
        _ => Some(stored),
    }
}

/// How many groups of these columns share a second scale, as a power of two, where rows of `inputs`
/// weights and their columns begin and end with groups; `None` elsewhere.
pub(crate) fn shift(inputs: usize, columns: &Range<usize>) -> Option<u32> {
    let ends = [inputs, columns.start, columns.end];
    let is_grouped = ends.iter().all(|end| end.is_multiple_of(GROUP));
    let common = ends.iter().fold(SUPER_GROUP, |common, end| common | (end / GROUP));
    is_grouped.then(|| common.trailing_zeros())
}

/// Groups that a row of these columns of rows of `inputs` weights touches at most; exactly its own
/// where all cuts fall on groups.
pub(crate) fn row_groups(inputs: usize, columns: &Range<usize>) -> usize {
    match shift(inputs, columns) {
        Some(_) => columns.len() / GROUP,
        None => columns.len().div_ceil(GROUP) + 1,
    }
}
