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
//! 4.127 bits per weight. Divisions above round up; the last group may be short.

use std::ops::Range;

use super::{PART_ALIGNMENT, f32_at, pad};

/// Weights of a group.
pub const GROUP: usize = 64;
/// Groups that share a second scale.
pub const SUPER_GROUP: usize = 256;

/// Bytes that say where a row of a slice begins.
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

/// The parts of a stored matrix, or of a slice of one.
#[derive(Clone, Copy, Debug)]
pub struct Parts<'a> {
    /// Two weights a byte.
    pub codes: &'a [u8],
    /// Codes of the groups' scales.
    pub absmax: &'a [u8],
    /// f32, little-endian: second scales of the whole matrix.
    pub absmax2: &'a [u8],
    /// Added to every scale.
    pub offset: f32,
    /// Weights of a row.
    inputs: usize,
    rows: Rows<'a>,
}

/// How rows lie in `codes` and `absmax`, and among the groups of the whole matrix.
#[derive(Clone, Copy, Debug)]
enum Rows<'a> {
    /// One behind the other, groups over their ends, as in the whole matrix: the first group here
    /// is its group `first`, and the first `phase` weights of that belong to the row before.
    Running { first: usize, phase: usize },
    /// A slice in memory of its own: see [`slice`](super::slice).
    Cut {
        /// Groups of a row.
        groups: usize,
        /// u64 `[rows]`, little-endian: which weight of the whole matrix a row begins with.
        starts: &'a [u8],
    },
}

impl<'a> Parts<'a> {
    /// The parts of `bytes`; `None` when their number is not that of the shape.
    pub fn new(outputs: usize, inputs: usize, bytes: &'a [u8]) -> Option<Parts<'a>> {
        if stored_bytes(outputs, inputs)? != bytes.len() {
            return None;
        }
        let weights = outputs * inputs;
        let groups = weights.div_ceil(GROUP);
        let absmax_at = weights.div_ceil(2).next_multiple_of(PART_ALIGNMENT);
        let absmax2_at = absmax_at + groups.next_multiple_of(PART_ALIGNMENT);
        let (absmax2, offset) =
            bytes.get(absmax2_at..)?.split_at_checked(4 * groups.div_ceil(SUPER_GROUP))?;
        Some(Parts {
            codes: bytes.get(..weights.div_ceil(2))?,
            absmax: bytes.get(absmax_at..absmax_at + groups)?,
            absmax2,
            offset: f32_at(offset, 0),
            inputs,
            rows: Rows::Running { first: 0, phase: 0 },
        })
    }

    /// Some rows of a whole matrix where they lie; `None` when they are not all there.
    pub(crate) fn rows(&self, range: Range<usize>) -> Option<Parts<'a>> {
        let Rows::Running { first: 0, phase: 0 } = self.rows else {
            return None;
        };
        let (start, end) = (range.start * self.inputs, range.end.checked_mul(self.inputs)?);
        let (first, last) = (start / GROUP, end.div_ceil(GROUP));
        Some(Parts {
            codes: self.codes.get(first * GROUP / 2..end.div_ceil(2))?,
            absmax: self.absmax.get(first..last)?,
            rows: Rows::Running { first, phase: start % GROUP },
            ..*self
        })
    }

    /// Rows of their own from the parts of a [slice](super::slice) of `whole`: `codes`, `absmax`
    /// and `starts`. `None` when these are not of one number of rows, or name a group that `whole`
    /// does not have.
    pub(crate) fn cut(
        whole: (&'a [u8], f32),
        inputs: usize,
        groups: usize,
        [codes, absmax, starts]: [&'a [u8]; 3],
    ) -> Option<Parts<'a>> {
        let ((absmax2, offset), rows) = (whole, starts.len() / START_BYTES);
        let parts =
            Parts { codes, absmax, absmax2, offset, inputs, rows: Rows::Cut { groups, starts } };
        let is_there = |row: usize| {
            let last = (parts.start(row) as usize).checked_add(inputs.checked_sub(1)?)?;
            let named = last / GROUP / SUPER_GROUP < absmax2.len() / 4;
            let held = last / GROUP - parts.start(row) as usize / GROUP < groups;
            (named && held).then_some(())
        };
        let fits = codes.len() == rows * inputs.div_ceil(2) && absmax.len() == rows * groups;
        (fits && (0..rows).all(|row| is_there(row).is_some())).then_some(parts)
    }

    /// Which weight of the whole matrix row `output` begins with.
    #[inline(always)]
    fn start(&self, output: usize) -> u64 {
        match self.rows {
            Rows::Running { first, phase } => (first * GROUP + phase + output * self.inputs) as u64,
            Rows::Cut { starts, .. } => {
                let bytes = starts.get(output * START_BYTES..(output + 1) * START_BYTES);
                bytes.and_then(|b| b.try_into().ok()).map_or(u64::MAX, u64::from_le_bytes)
            }
        }
    }

    /// Whether it is a slice in memory of its own.
    pub fn is_cut(&self) -> bool {
        matches!(self.rows, Rows::Cut { .. })
    }

    /// Whether each row begins and ends with a group: what fast paths take.
    pub fn is_grouped(&self) -> bool {
        self.inputs.is_multiple_of(GROUP)
            && match self.rows {
                Rows::Running { phase, .. } => phase == 0,
                Rows::Cut { groups, .. } => groups * GROUP == self.inputs,
            }
    }

    /// Scale of the group of weight `input` of row `output`.
    #[inline(always)]
    pub fn scale(&self, output: usize, input: usize) -> f32 {
        let start = self.start(output) as usize;
        let (first, group) = (start / GROUP, (start + input) / GROUP);
        let held = match self.rows {
            Rows::Running { first, .. } => group - first,
            Rows::Cut { groups, .. } => output * groups + group - first,
        };
        DYNAMIC[self.absmax[held] as usize] * f32_at(self.absmax2, group / SUPER_GROUP)
            + self.offset
    }

    /// [`scale`](Self::scale) of group `group` of row `output`, which begins and ends with a group.
    /// Of matrices that [are not cut](Self::is_cut), a loop without `CUT` is a tenth faster.
    ///
    /// # Safety
    /// The matrix [`is_grouped`](Self::is_grouped) and has that row, and a row that group; without
    /// `CUT` it is not cut.
    #[allow(unsafe_code, reason = "the innermost loop of a matrix product asks for it")]
    #[inline(always)]
    pub(crate) unsafe fn scale_unchecked<const CUT: bool>(
        &self,
        output: usize,
        group: usize,
    ) -> f32 {
        let held = output * (self.inputs / GROUP) + group;
        // SAFETY: `absmax` has the groups of all rows.
        let code = unsafe { *self.absmax.get_unchecked(held) };
        let named = match self.rows {
            Rows::Running { first, .. } => first + held,
            Rows::Cut { starts, .. } if CUT => {
                let start = starts.as_ptr().cast::<u64>().wrapping_add(output);
                // SAFETY: `cut` counted one start per row.
                let start = u64::from_le(unsafe { start.read_unaligned() });
                start as usize / GROUP + group
            }
            Rows::Cut { .. } => held,
        };
        let second = self.absmax2.as_ptr().cast::<f32>().wrapping_add(named / SUPER_GROUP);
        // SAFETY: `absmax2` has the second scales of all groups of the whole matrix, in which `new`
        // or `cut` found this one.
        let second = f32::from_bits(u32::from_le(unsafe { second.read_unaligned() }.to_bits()));
        DYNAMIC[code as usize] * second + self.offset
    }

    /// Place of weight `input` of row `output` in `codes`, in weights.
    #[inline(always)]
    fn place(&self, output: usize, input: usize) -> usize {
        match self.rows {
            Rows::Running { phase, .. } => phase + output * self.inputs + input,
            Rows::Cut { .. } => 2 * output * self.inputs.div_ceil(2) + input,
        }
    }

    /// Code of weight `input` of row `output`.
    #[inline(always)]
    fn code(&self, output: usize, input: usize) -> u8 {
        let place = self.place(output, input);
        let byte = self.codes[place / 2];
        if place.is_multiple_of(2) { byte >> 4 } else { byte & 15 }
    }

    /// Appends the codes of `len` weights from weight `start` of a whole matrix on, the last byte
    /// padded with a zero.
    pub(crate) fn copy_codes(&self, start: usize, len: usize, to: &mut Vec<u8>) -> Option<()> {
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

    /// Weight `input` of row `output`.
    #[inline(always)]
    pub fn weight(&self, output: usize, input: usize) -> f32 {
        LEVELS[self.code(output, input) as usize] * self.scale(output, input)
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
pub(crate) fn decode(parts: &Parts<'_>, output: usize, first: usize, out: &mut [f32]) {
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
