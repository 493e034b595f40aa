//! The layout of slices of stored matrices in memory of their own: what a rank of a group holds where its part of a
//! matrix does not lie in one piece. Quantization comes before the cut: the values of a slice are
//! those of the whole matrix, to the last bit.
//!
//! Plain numbers and INT8 have the layout of a smaller matrix, since the scale of an INT8 row is that
//! of the whole row. Groups of NF4 run over the ends of rows, and cuts go through them:
//!
//! ```text
//! codes    u8  [rows, (inputs + 1) / 2]   each row begins with a byte
//! absmax   u8  [rows, groups]             the groups that a row touches, zeros behind them
//! absmax2  f32 [whole groups / 256]       as in the whole matrix
//! offset   f32                            as there
//! starts   u64 [rows]                     which weight of the whole matrix the row begins with
//! ```
//! The group of a weight, and its second scale, follow from its place in the whole matrix. Where cuts
//! fall on groups, a row has `inputs / 64` of them, and fast paths read the slice as they read a
//! matrix.

use std::ops::Range;

use shared::config::QuantType;
use shared::dtype::DType;

use super::nf4::{self, GROUP, SUPER_GROUP};
use super::{PART_ALIGNMENT, int8, stored_bytes};

/// Bytes of a [`WeightSlice`](crate::slice::WeightSlice), or more than are read of rows where they
/// [lie](crate::WeightView::rows): `rows` rows and some columns of a matrix `[outputs, inputs]`. `None` when that is no size.
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
            let seconds = outputs.checked_mul(inputs)?.div_ceil(GROUP).div_ceil(SUPER_GROUP);
            let groups = row_groups(inputs, &columns);
            let parts = [
                rows.checked_mul(columns.len().div_ceil(2))?,
                rows.checked_mul(groups)?,
                seconds.checked_add(1)?.checked_mul(4)?,
                rows.checked_mul(nf4::START_BYTES)?,
            ];
            parts.into_iter().try_fold(0usize, |sum, part| {
                sum.checked_add(part.checked_next_multiple_of(PART_ALIGNMENT)?)
            })
        }
    }
}

/// Groups that a row of these columns of rows of `inputs` weights touches at most; exactly its own
/// where all cuts fall on groups.
pub(crate) fn row_groups(inputs: usize, columns: &Range<usize>) -> usize {
    let is_border = |at: usize| at.is_multiple_of(GROUP);
    match is_border(inputs) && is_border(columns.start) && is_border(columns.end) {
        true => columns.len() / GROUP,
        false => columns.len().div_ceil(GROUP) + 1,
    }
}
