//! NF4 (QLoRA, appendix E): four bits per weight, groups of 64, scales quantized in turn.
//!
//! ```text
//! n = outputs * inputs, row-major; groups run over the end of a row
//! codes    u8  [(n + 1) / 2]       weight 2i in the upper half of byte i, weight 2i + 1 in the lower
//! absmax   u8  [n / 64]            code of the group's largest magnitude in the dynamic map
//! absmax2  f32 [groups / 256]      largest magnitude of 256 groups' absmax - offset
//! offset   f32                     mean of absmax
//! weight   = LEVELS[code] * (DYNAMIC[absmax] * absmax2 + offset), in f32, then rounded to the block dtype
//! ```
//!
//! 4.127 bits per weight. Divisions above round up; the last group may be short. A CUDA device has
//! matrices of whole groups in another layout (`kernels/cuda/nf4.cuh`).

use std::ops::Range;

use super::{PART_ALIGNMENT, f32_at, pad};
use crate::sizes::repack as tiles;

/// Weights of a group.
pub const GROUP: usize = 64;
/// Groups that share a second scale.
pub const SUPER_GROUP: usize = 256;

/// Groups that share a second scale in a whole matrix, as a power of two.
pub(crate) const SHIFT: u32 = SUPER_GROUP.trailing_zeros();
/// What [`Parts::layout`] says of a slice that cuts groups.
const RAGGED: u32 = 16;

/// Bytes that say where a row of a slice that cuts groups begins.
pub(crate) const START_BYTES: usize = size_of::<u64>();

/// Value of each code (bitsandbytes `get_4bit_type("nf4")`).
pub const LEVELS: [f32; 16] = [
    -1.0,
    -0.696_192_8,
    -0.525_073_05,
    -0.394_917_5,
    -0.284_441_38,
    -0.184_773_43,
    -0.091_050_036,
    0.0,
    0.079_580_3,
    0.160_930_2,
    0.246_112_3,
    0.337_915_24,
    0.440_709_83,
    0.562_617,
    0.722_956_84,
    1.0,
];

/// The signed dynamic map (bitsandbytes `create_dynamic_map()`): 256 values, sorted.
pub static DYNAMIC: [f32; 256] = dynamic();

/// Bytes of a matrix as stored; `None` when that is no size.
pub fn stored_bytes(outputs: usize, inputs: usize) -> Option<usize> {
    let weights = outputs.checked_mul(inputs)?;
    let groups = weights.div_ceil(GROUP);
    let codes = weights.div_ceil(2).checked_next_multiple_of(PART_ALIGNMENT)?;
    let absmax = groups.checked_next_multiple_of(PART_ALIGNMENT)?;
    codes
        .checked_add(absmax)?
        .checked_add((4 * (groups.div_ceil(SUPER_GROUP) + 1)).next_multiple_of(PART_ALIGNMENT))
}

/// Bytes of a matrix of whole groups as tensor cores read it (`nf4.cuh`): of the codes, of those of
/// the scales, and of the second scales with the offset. `1 << shift` groups share a second scale.
/// `None` when that is no size.
pub(crate) fn tiled_sections(outputs: usize, inputs: usize, shift: u32) -> Option<[usize; 3]> {
    let (strips, blocks) = (outputs.div_ceil(tiles::STRIP), inputs / GROUP);
    let groups = outputs.checked_mul(blocks)?;
    let seconds = groups.div_ceil(1usize.checked_shl(shift)?).checked_add(1)?;
    Some([
        strips.checked_mul(blocks)?.checked_mul(tiles::TILE_BYTES)?,
        strips.checked_mul(blocks.div_ceil(tiles::CHUNK))?.checked_mul(tiles::CHUNK_BYTES)?,
        seconds.checked_mul(4)?.checked_next_multiple_of(PART_ALIGNMENT)?,
    ])
}

/// The sum of [`tiled_sections`].
pub(crate) fn tiled_bytes(outputs: usize, inputs: usize, shift: u32) -> Option<usize> {
    let sections = tiled_sections(outputs, inputs, shift)?;
    sections.into_iter().try_fold(0usize, usize::checked_add)
}

/// The parts of a stored matrix, or of a slice of one.
#[derive(Clone, Copy, Debug)]
pub struct Nf4Parts<'a> {
    /// Two weights a byte.
    pub codes: &'a [u8],
    /// Codes of the groups' scales.
    pub absmax: &'a [u8],
    /// f32, little-endian: second scales.
    pub absmax2: &'a [u8],
    /// Added to every scale.
    pub offset: f32,
    /// Weights of a row.
    inputs: usize,
    rows: RowLayout<'a>,
    /// Which group of those that `absmax2` counts is the first one here.
    first: usize,
    /// `1 << shift` groups share a second scale.
    shift: u32,
}

/// How rows lie in `codes` and `absmax`.
#[derive(Clone, Copy, Debug)]
enum RowLayout<'a> {
    /// One behind the other, groups over their ends. The first `phase` weights of the first group
    /// belong to a row before.
    Running { phase: usize },
    /// Each begins with a byte and has the scales of all groups that it touches: a slice that cuts
    /// groups, in memory of its own (see [`slice`](super::slice)).
    Ragged {
        /// Groups of a row.
        groups: usize,
        /// u64 `[rows]`, little-endian: which weight of the whole matrix a row begins with.
        starts: &'a [u8],
    },
}

impl<'a> Nf4Parts<'a> {
    /// The parts of `bytes`; `None` when their number is not that of the shape.
    pub fn new(outputs: usize, inputs: usize, bytes: &'a [u8]) -> Option<Nf4Parts<'a>> {
        if stored_bytes(outputs, inputs)? != bytes.len() {
            return None;
        }
        let weights = outputs * inputs;
        let groups = weights.div_ceil(GROUP);
        let absmax_at = weights.div_ceil(2).next_multiple_of(PART_ALIGNMENT);
        let absmax2_at = absmax_at + groups.next_multiple_of(PART_ALIGNMENT);
        let (absmax2, offset) =
            bytes.get(absmax2_at..)?.split_at_checked(4 * groups.div_ceil(SUPER_GROUP))?;
        Some(Nf4Parts {
            codes: bytes.get(..weights.div_ceil(2))?,
            absmax: bytes.get(absmax_at..absmax_at + groups)?,
            absmax2,
            offset: f32_at(offset, 0),
            inputs,
            rows: RowLayout::Running { phase: 0 },
            first: 0,
            shift: SHIFT,
        })
    }

    /// Some rows of a whole matrix where they lie; `None` when they are not all there.
    pub(crate) fn rows(&self, range: Range<usize>) -> Option<Nf4Parts<'a>> {
        let (RowLayout::Running { phase: 0 }, 0, SHIFT) = (self.rows, self.first, self.shift)
        else {
            return None;
        };
        let (start, end) = (range.start * self.inputs, range.end.checked_mul(self.inputs)?);
        let (first, last) = (start / GROUP, end.div_ceil(GROUP));
        Some(Nf4Parts {
            codes: self.codes.get(first * GROUP / 2..end.div_ceil(2))?,
            absmax: self.absmax.get(first..last)?,
            rows: RowLayout::Running { phase: start % GROUP },
            first,
            ..*self
        })
    }

    /// Rows of whole groups from the parts of a [slice](super::slice), of whose groups
    /// `1 << shift` share a second scale. `None` when the parts are not those of one number of
    /// groups.
    pub(crate) fn grouped(
        inputs: usize,
        shift: u32,
        [codes, absmax, absmax2]: [&'a [u8]; 3],
        offset: f32,
    ) -> Option<Nf4Parts<'a>> {
        let rows = RowLayout::Running { phase: 0 };
        let fits = codes.len() == absmax.len().checked_mul(GROUP / 2)?
            && absmax2.len() == absmax.len().div_ceil(1usize.checked_shl(shift)?).checked_mul(4)?;
        fits.then_some(Nf4Parts { codes, absmax, absmax2, offset, inputs, rows, first: 0, shift })
    }

    /// Rows from the parts of a [slice](super::slice) that cuts groups of `whole`: `codes`, `absmax`
    /// and `starts`. `None` when these are not of one number of rows, or name a group that `whole`
    /// does not have.
    pub(crate) fn ragged(
        whole: (&'a [u8], f32),
        inputs: usize,
        groups: usize,
        [codes, absmax, starts]: [&'a [u8]; 3],
    ) -> Option<Nf4Parts<'a>> {
        let ((absmax2, offset), count) = (whole, starts.len() / START_BYTES);
        let rows = RowLayout::Ragged { groups, starts };
        let parts =
            Nf4Parts { codes, absmax, absmax2, offset, inputs, rows, first: 0, shift: SHIFT };
        let is_there = |row: usize| {
            let last = (parts.start(row) as usize).checked_add(inputs.checked_sub(1)?)?;
            let named = last / GROUP / SUPER_GROUP < absmax2.len() / 4;
            let held = last / GROUP - parts.start(row) as usize / GROUP < groups;
            (named && held).then_some(())
        };
        let fits = codes.len() == count * inputs.div_ceil(2) && absmax.len() == count * groups;
        (fits && (0..count).all(|row| is_there(row).is_some())).then_some(parts)
    }

    /// Which weight row `output` begins with, of those whose groups `absmax2` counts.
    #[inline(always)]
    fn start(&self, output: usize) -> u64 {
        match self.rows {
            RowLayout::Running { phase } => {
                (self.first * GROUP + phase + output * self.inputs) as u64
            }
            RowLayout::Ragged { starts, .. } => {
                let bytes = starts.get(output * START_BYTES..(output + 1) * START_BYTES);
                bytes.and_then(|b| b.try_into().ok()).map_or(u64::MAX, u64::from_le_bytes)
            }
        }
    }

    /// Whether each row begins and ends with a group: what fast paths take.
    pub fn is_grouped(&self) -> bool {
        let RowLayout::Running { phase } = self.rows else {
            return false;
        };
        phase == 0 && self.inputs.is_multiple_of(GROUP)
    }

    /// How the parts of a matrix that has memory of its own lie, as `nf4_matrix` in `nf4.cuh` takes
    /// it.
    pub(crate) fn layout(&self) -> u32 {
        match self.rows {
            RowLayout::Running { .. } => self.shift,
            RowLayout::Ragged { .. } => RAGGED,
        }
    }

    /// Scale of the group of weight `input` of row `output`.
    #[inline(always)]
    pub fn scale(&self, output: usize, input: usize) -> f32 {
        let start = self.start(output) as usize;
        let group = (start + input) / GROUP;
        let held = match self.rows {
            RowLayout::Running { .. } => group - self.first,
            RowLayout::Ragged { groups, .. } => output * groups + group - start / GROUP,
        };
        DYNAMIC[self.absmax[held] as usize] * f32_at(self.absmax2, group >> self.shift)
            + self.offset
    }

    /// [`scale`](Self::scale) of group `group` of row `output`, which begins and ends with a group.
    ///
    /// # Safety
    /// The matrix [`is_grouped`](Self::is_grouped) and has that row, and a row that group.
    #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
    #[allow(unsafe_code, reason = "the innermost loop of a matrix product asks for it")]
    #[inline(always)]
    pub(crate) unsafe fn scale_unchecked(&self, output: usize, group: usize) -> f32 {
        let held = output * (self.inputs / GROUP) + group;
        // SAFETY: `absmax` has the groups of all rows.
        let code = unsafe { *self.absmax.get_unchecked(held) };
        let second = (self.first + held) >> self.shift;
        let second = self.absmax2.as_ptr().cast::<f32>().wrapping_add(second);
        // SAFETY: `absmax2` has the second scales of all groups that it counts, among them those
        // that `new`, `rows` or `grouped` found here.
        let second = f32::from_bits(u32::from_le(unsafe { second.read_unaligned() }.to_bits()));
        DYNAMIC[code as usize] * second + self.offset
    }

    /// Place of weight `input` of row `output` in `codes`, in weights.
    #[inline(always)]
    fn place(&self, output: usize, input: usize) -> usize {
        match self.rows {
            RowLayout::Running { phase } => phase + output * self.inputs + input,
            RowLayout::Ragged { .. } => 2 * output * self.inputs.div_ceil(2) + input,
        }
    }

    /// Code of weight `input` of row `output`.
    #[inline(always)]
    fn code(&self, output: usize, input: usize) -> u8 {
        let place = self.place(output, input);
        let byte = self.codes[place / 2];
        if place.is_multiple_of(2) { byte >> 4 } else { byte & 15 }
    }

    /// Weight `input` of row `output`.
    #[inline(always)]
    pub fn weight(&self, output: usize, input: usize) -> f32 {
        LEVELS[self.code(output, input) as usize] * self.scale(output, input)
    }
}

/// What a copy of some columns of a row takes; the matrix is none that cuts groups.
impl<'a> Nf4Parts<'a> {
    /// Which weight of the whole matrix weight `input` of row `output` is.
    pub(crate) fn named(&self, output: usize, input: usize) -> usize {
        self.start(output) as usize + input
    }

    /// Appends the codes of the columns, from a byte on, the last byte padded with a zero.
    pub(crate) fn copy_codes(
        &self,
        output: usize,
        columns: &Range<usize>,
        to: &mut Vec<u8>,
    ) -> Option<()> {
        let (start, len) = (self.place(output, columns.start), columns.len());
        let codes = self.codes.get(start / 2..(start + len).div_ceil(2))?;
        if start.is_multiple_of(2) {
            to.extend(codes);
        } else {
            let next = codes.iter().skip(1).copied().chain([0]);
            to.extend(codes.iter().zip(next).take(len.div_ceil(2)).map(|(a, b)| a << 4 | b >> 4));
        }
        if let Some(last) = to.last_mut()
            && !len.is_multiple_of(2)
        {
            *last &= 0xf0;
        }
        Some(())
    }

    /// The codes of the scales of all groups that the columns touch.
    pub(crate) fn absmax_of(&self, output: usize, columns: &Range<usize>) -> Option<&'a [u8]> {
        let [start, end] = [columns.start, columns.end].map(|input| self.named(output, input));
        let first = (start / GROUP).checked_sub(self.first)?;
        self.absmax.get(first..end.div_ceil(GROUP).checked_sub(self.first)?)
    }

    /// The second scale, four bytes, of the group of weight `input` of row `output`.
    pub(crate) fn absmax2_of(&self, output: usize, input: usize) -> Option<&'a [u8]> {
        let at = 4 * ((self.named(output, input) / GROUP) >> self.shift);
        self.absmax2.get(at..at + 4)
    }
}

/// Quantizes a matrix given row-major as numbers.
///
/// *Source*: bitsandbytes 0.41.1 `quantize_4bit(compress_statistics=True, quant_type="nf4")`.
pub fn encode(weights: &[f32]) -> Vec<u8> {
    let mut absmax = Vec::with_capacity(weights.len().div_ceil(GROUP));
    let mut bytes = vec![0u8; weights.len().div_ceil(2)];
    for (weights, bytes) in weights.chunks(GROUP).zip(bytes.chunks_mut(GROUP / 2)) {
        let largest = weights.iter().fold(0.0f32, |m, w| m.max(w.abs()));
        let inverse = if largest > 0.0 { 1.0 / largest } else { 0.0 };
        absmax.push(largest);
        for (i, w) in weights.iter().enumerate() {
            bytes[i / 2] |= level(w * inverse) << if i.is_multiple_of(2) { 4 } else { 0 };
        }
    }
    pad(&mut bytes);
    encode_scales(&absmax, &mut bytes);
    bytes
}

/// Scales minus their mean, in 8 bits of the dynamic map.
fn encode_scales(absmax: &[f32], bytes: &mut Vec<u8>) {
    // In f64, so that the order of the sum does not matter; PyTorch's f32 sum differs from it in
    // the last bit at most.
    let sum: f64 = absmax.iter().map(|v| f64::from(*v)).sum();
    let offset = (sum / absmax.len().max(1) as f64) as f32;
    let mut scales = Vec::new();
    for group in absmax.chunks(SUPER_GROUP) {
        let largest = group.iter().fold(0.0f32, |m, v| m.max((v - offset).abs()));
        let inverse = if largest > 0.0 { 1.0 / largest } else { 0.0 };
        scales.extend(largest.to_le_bytes());
        bytes.extend(group.iter().map(|v| nearest((v - offset) * inverse)));
    }
    pad(bytes);
    bytes.extend(scales);
    bytes.extend(offset.to_le_bytes());
    pad(bytes);
}

/// Code of the level nearest to `x`: the number of midpoints between levels that `x` lies above.
fn level(x: f32) -> u8 {
    LEVELS
        .windows(2)
        .take_while(|pair| f64::from(x) > (f64::from(pair[0]) + f64::from(pair[1])) / 2.0)
        .count() as u8
}

/// Code of the nearest value of the dynamic map.
fn nearest(x: f32) -> u8 {
    let above = DYNAMIC.partition_point(|v| *v <= x).clamp(1, 255);
    let (low, high) = (DYNAMIC[above - 1], DYNAMIC[above]);
    (if x - low > high - x { above } else { above - 1 }) as u8
}

/// Weights of row `output` as numbers: `out.len()` of them from weight `first` of the row on.
#[inline(always)]
pub(crate) fn decode(parts: &Nf4Parts<'_>, output: usize, first: usize, out: &mut [f32]) {
    let whole_groups = first.is_multiple_of(GROUP) && out.len().is_multiple_of(GROUP);
    if !whole_groups || !parts.is_grouped() {
        for (i, out) in out.iter_mut().enumerate() {
            *out = parts.weight(output, first + i);
        }
        return;
    }
    for (input, out) in (first..).step_by(GROUP).zip(out.chunks_exact_mut(GROUP)) {
        let scale = parts.scale(output, input);
        let mut table = LEVELS;
        table.iter_mut().for_each(|level| *level *= scale);
        let place = parts.place(output, input);
        let codes = &parts.codes[place / 2..(place + GROUP) / 2];
        for (pair, byte) in out.chunks_exact_mut(2).zip(codes) {
            pair[0] = table[(byte >> 4) as usize];
            pair[1] = table[(byte & 15) as usize];
        }
    }
}

/// Seven decades; decade `e` has 2^e values of each sign, the midpoints of equal parts of [0.1, 1]
/// times 10^(e-6); and zero and one.
const fn dynamic() -> [f32; 256] {
    let mut map = [0.0; 256];
    let mut at = 0;
    let scale: [f32; 7] = [1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0];
    let mut decade = 0;
    while decade < 7 {
        let parts = 1usize << decade;
        let mut i = 0;
        while i < parts {
            // As `torch.linspace(0.1, 1, parts + 1)` and the mean of neighbours in f32.
            let low = boundary(i, parts);
            let high = boundary(i + 1, parts);
            let value = scale[decade] * ((low + high) / 2.0);
            map[128 + at] = value;
            map[126 - at] = -value;
            at += 1;
            i += 1;
        }
        decade += 1;
    }
    map[255] = 1.0;
    map
}

/// Element `i` of `torch.linspace(0.1, 1, parts + 1)`, which is symmetric: the second half counts
/// down from the end. Products are fused with sums, as there; in f64 both are exact enough for the
/// one rounding.
const fn boundary(i: usize, parts: usize) -> f32 {
    let step = ((1.0f32 - 0.1f32) / parts as f32) as f64;
    if i < parts.div_ceil(2) {
        (0.1f32 as f64 + step * i as f64) as f32
    } else {
        (1.0 - step * (parts - i) as f64) as f32
    }
}
