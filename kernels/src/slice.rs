//! Slices of stored matrices, copied into memory of their own: see [`quant::slice`].

use std::ops::Range;

use shared::config::QuantType;
use shared::dtype::DType;

use crate::quant::nf4::{self, GROUP, START_BYTES};
use crate::quant::slice::{row_groups, shift, slice_bytes};
use crate::quant::{self, PART_ALIGNMENT, pad};
use crate::tensor::{Format, WeightView};

/// A slice of a matrix, copied.
#[derive(Clone, Debug)]
pub struct WeightSlice {
    quant: QuantType,
    dtype: DType,
    outputs: usize,
    inputs: usize,
    bytes: Vec<u8>,
    layout: Layout,
}

/// How a slice of NF4 lies.
#[derive(Clone, Copy, Debug, Default)]
struct Layout {
    /// Groups of a row.
    groups: usize,
    /// Second scales.
    seconds: usize,
    /// How many groups share a second scale, as a power of two; `None` where groups are cut.
    shift: Option<u32>,
}

impl WeightSlice {
    /// Copies `columns` of `rows`, one range behind the other. `None` when they are not all there,
    /// there are none, or `whole` is a slice itself.
    pub fn new(
        whole: WeightView<'_>,
        rows: &[Range<usize>],
        columns: Range<usize>,
    ) -> Option<WeightSlice> {
        let is_there = |range: &Range<usize>, end| range.start < range.end && range.end <= end;
        let all_there = rows.iter().all(|range| is_there(range, whole.outputs()))
            && is_there(&columns, whole.inputs());
        if !all_there || rows.is_empty() || whole.is_slice() {
            return None;
        }
        WeightSlice::copy(whole, rows, columns)
    }

    /// Copies a slice whose parts lie apart, as rows of a larger matrix do.
    pub(crate) fn gathered(view: WeightView<'_>) -> Option<WeightSlice> {
        let all = 0..view.outputs();
        WeightSlice::copy(view, std::slice::from_ref(&all), 0..view.inputs())
    }

    fn copy(
        whole: WeightView<'_>,
        rows: &[Range<usize>],
        columns: Range<usize>,
    ) -> Option<WeightSlice> {
        let (outputs, inputs) = (rows.iter().map(Range::len).sum::<usize>(), columns.len());
        let quant = match whole.format() {
            Format::Plain => QuantType::None,
            Format::Int8(_) => QuantType::Int8,
            Format::Nf4(_) => QuantType::Nf4,
        };
        let shape = [whole.outputs(), whole.inputs()];
        let len = slice_bytes(quant, whole.dtype(), shape, outputs, columns.clone())?;
        let (dtype, bytes) = (whole.dtype(), Vec::with_capacity(len));
        let layout = Layout::default();
        let mut slice = WeightSlice { quant, dtype, outputs, inputs, bytes, layout };
        let rows = || rows.iter().cloned().flatten();
        match whole.format() {
            Format::Plain => {
                let size = whole.dtype().size_bytes();
                for row in rows() {
                    let row = whole.row(row)?;
                    slice.bytes.extend(row.get(columns.start * size..columns.end * size)?);
                }
            }
            Format::Int8(parts) => {
                for start in rows().map(|row| row * whole.inputs()) {
                    let codes = parts.codes.get(start + columns.start..start + columns.end)?;
                    slice.bytes.extend(codes);
                }
                pad(&mut slice.bytes);
                for row in rows() {
                    slice.bytes.extend(parts.absmax.get(4 * row..4 * row + 4)?);
                }
                pad(&mut slice.bytes);
            }
            Format::Nf4(parts) => slice.nf4(&parts, whole.inputs(), rows, columns)?,
        }
        // A whole matrix of NF4, copied, is longer than one as it is stored.
        debug_assert!(slice.bytes.len() == len || [outputs, inputs] == shape);
        slice.view().is_some().then_some(slice)
    }

    /// Copies some elements of a vector, a plain matrix of one row. `None` when they are not all
    /// there.
    pub fn elements(vector: WeightView<'_>, ranges: &[Range<usize>]) -> Option<WeightSlice> {
        let (dtype, size, all) = (vector.dtype(), vector.dtype().size_bytes(), vector.row(0)?);
        let mut bytes = Vec::with_capacity(ranges.iter().map(|range| range.len() * size).sum());
        for range in ranges {
            let (start, end) = (range.start.checked_mul(size)?, range.end.checked_mul(size)?);
            bytes.extend(all.get(start..end)?);
        }
        let (quant, inputs) = (QuantType::None, bytes.len() / size);
        let layout = Layout::default();
        let slice = WeightSlice { quant, dtype, outputs: 1, inputs, bytes, layout };
        slice.view().is_some().then_some(slice)
    }

    fn nf4<R: Iterator<Item = usize>>(
        &mut self,
        whole: &nf4::Nf4Parts<'_>,
        whole_inputs: usize,
        rows: impl Fn() -> R,
        columns: Range<usize>,
    ) -> Option<()> {
        let groups = row_groups(whole_inputs, &columns);
        let shift = shift(whole_inputs, &columns);
        let seconds = match shift {
            Some(shift) => (self.outputs * groups).div_ceil(1 << shift),
            None => whole.absmax2.len() / 4,
        };
        self.layout = Layout { groups, seconds, shift };
        let bytes = &mut self.bytes;
        for row in rows() {
            whole.copy_codes(row, &columns, bytes)?;
        }
        pad(bytes);
        for row in rows() {
            let end = bytes.len() + groups;
            bytes.extend(whole.absmax_of(row, &columns)?);
            bytes.resize(end, 0);
        }
        pad(bytes);
        let Some(shift) = shift else {
            let start = |row: usize| whole.named(row, columns.start) as u64;
            bytes.extend(rows().flat_map(|row| start(row).to_le_bytes()));
            pad(bytes);
            bytes.extend(whole.offset.to_le_bytes());
            bytes.extend(whole.absmax2);
            pad(bytes);
            return Some(());
        };
        for row in rows() {
            for first in columns.clone().step_by(GROUP << shift) {
                bytes.extend(whole.absmax2_of(row, first)?);
            }
        }
        bytes.extend(whole.offset.to_le_bytes());
        pad(bytes);
        Some(())
    }

    /// The slice as a matrix.
    pub fn view(&self) -> Option<WeightView<'_>> {
        let (dtype, outputs, inputs) = (self.dtype, self.outputs, self.inputs);
        let bytes = &self.bytes[..];
        if self.quant != QuantType::Nf4 {
            return WeightView::quantized(self.quant, dtype, outputs, inputs, bytes).ok();
        }
        let Layout { groups, seconds, shift } = self.layout;
        let mut rest = bytes;
        let mut next = |len: usize| {
            let (part, behind) =
                rest.split_at_checked(len.checked_next_multiple_of(PART_ALIGNMENT)?)?;
            rest = behind;
            part.get(..len)
        };
        let codes = next(outputs * inputs.div_ceil(2))?;
        let absmax = next(outputs * groups)?;
        let parts = match shift {
            Some(shift) => {
                let (absmax2, offset) = next(4 * (seconds + 1))?.split_at_checked(4 * seconds)?;
                let offset = quant::f32_at(offset, 0);
                nf4::Nf4Parts::grouped(inputs, shift, [codes, absmax, absmax2], offset)?
            }
            None => {
                let starts = next(outputs * START_BYTES)?;
                let (offset, absmax2) = next(4 * (seconds + 1))?.split_at_checked(4)?;
                let whole = (absmax2, quant::f32_at(offset, 0));
                nf4::Nf4Parts::ragged(whole, inputs, groups, [codes, absmax, starts])?
            }
        };
        Some(WeightView::copied(dtype, [outputs, inputs], bytes, parts))
    }

    /// Bytes that it holds.
    pub fn len(&self) -> usize {
        self.bytes.len()
    }

    /// Never: a slice has a row and a column.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }
}

#[cfg(test)]
mod tests;
