//! Register tiles of products of bfloat16 pairs (`vdpbf16ps`): the arithmetic of [`super::packed`].
//!
//! A step is 64 inputs: two vectors of 32. A source gives the two vectors of one row of the matrix, decoded in registers
//! if it is quantized; it may give the 64 elements in an order of its own, in which the inputs are then packed too.
//!
//! ```text
//! panel of R input rows:   step 0: row 0 (2 vectors) ... row R-1 (2 vectors) | step 1: ...
//! sums of a tile:          O x R vectors, each walks the steps from first to last
//! ```

use std::arch::x86_64::*;
use std::ops::Range;

use crate::ops::convert::bf16_bits;
use crate::quant::{int8, nf4};

/// Inputs of one step.
pub(super) const STEP: usize = 64;
/// Most sums of a tile: with a weight and an input they fit 32 registers.
pub(super) const SUMS: usize = 24;
/// Bytes of one row in one step of a panel.
const STEP_BYTES: usize = 2 * LINE;
/// Bytes of a cache line and of a vector.
pub(super) const LINE: usize = 64;

/// A cache line of a panel: vector loads must not straddle two.
#[derive(Clone, Copy, Debug)]
#[repr(align(64))]
pub(super) struct Line([u8; LINE]);

impl Line {
    /// As a vector.
    #[inline]
    #[target_feature(enable = "avx512f")]
    pub(super) fn get(&self) -> __m512i {
        // SAFETY: 64 bytes on a line.
        unsafe { _mm512_load_si512(self.0.as_ptr().cast()) }
    }

    /// Takes the bytes of a vector.
    #[inline]
    #[target_feature(enable = "avx512f")]
    pub(super) fn set(&mut self, vector: __m512i) {
        // SAFETY: 64 bytes on a line.
        unsafe { _mm512_store_si512(self.0.as_mut_ptr().cast(), vector) };
    }
}

/// Lines of a panel that one row takes.
pub(super) const fn row_lines(inputs: usize) -> usize {
    2 * inputs.div_ceil(STEP)
}

/// The sums of one tile: vector `o * R + r`.
pub(super) type Sums = [__m512; SUMS];

/// No products yet.
pub(super) fn no_sums() -> Sums {
    // SAFETY: sixteen f32 zeros.
    let zero = unsafe { std::mem::transmute::<[f32; 16], __m512>([0.0; 16]) };
    [zero; SUMS]
}

/// A matrix as a tile reads it.
pub(super) trait Source: Copy + Sync {
    /// Element of the 64 that lies at each place of the two vectors.
    const ORDER: [u8; STEP];
    /// Whether loading is work: tiles that share a strip then share what was loaded.
    const DECODES: bool;

    /// The two vectors of row `output` in the step `step`, which is whole.
    ///
    /// # Safety
    /// The row has 64 inputs there; the machine has the instruction set of [`tile`].
    unsafe fn load(self, output: usize, step: usize) -> [__m512i; 2];

    /// The same for the last step, zeros after its `left` inputs.
    ///
    /// # Safety
    /// The row has `left` inputs there, fewer than 64; the machine has the instruction set of [`tile`].
    unsafe fn load_tail(self, output: usize, step: usize, left: usize) -> [__m512i; 2];

    /// Where the weights of row `output` begin; only for prefetching.
    fn row(self, output: usize) -> *const u8;

    /// What the sum of row `output` is multiplied with.
    fn scale(self, output: usize) -> f32;
}

/// What to ask the memory for while a tile computes.
#[derive(Clone, Copy)]
pub(super) struct Ahead {
    /// First byte of it, at the first step.
    pub(super) start: *const u8,
    /// Bytes for each step.
    pub(super) step_bytes: usize,
}

/// A panel tile: `R` rows of inputs.
#[derive(Clone, Copy)]
pub(super) struct Panel<'a> {
    pub(super) lines: &'a [Line],
    pub(super) inputs: usize,
}

/// Adds the products of `O` rows of the matrix from `output` on, and the `R` rows of `panel`, over `steps`: to nothing from step 0
/// on, else to the sums of the steps before.
///
/// # Safety
/// The machine has AVX-512 F, BW, DQ, VL and BF16; `source` has these rows and steps; `panel` holds `R` rows.
#[allow(
    clippy::needless_range_loop,
    reason = "indexes that are constants keep the sums in registers"
)]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
pub(super) unsafe fn tile<S: Source, const O: usize, const R: usize>(
    source: S,
    output: usize,
    panel: Panel<'_>,
    steps: Range<usize>,
    ahead: Ahead,
    all: &mut Sums,
) {
    debug_assert!(panel.lines.len() == R * row_lines(panel.inputs) && O * R <= SUMS);
    let x = panel.lines.as_ptr().cast::<u8>();
    let whole = steps.end.min(panel.inputs / STEP);
    let mut sums = [[_mm512_setzero_ps(); R]; O];
    if steps.start > 0 {
        for o in 0..O {
            for r in 0..R {
                sums[o][r] = all[o * R + r];
            }
        }
    }
    let mut asked = ahead.start.wrapping_add(steps.start * ahead.step_bytes);
    for step in steps.start..whole {
        let until = asked.wrapping_add(ahead.step_bytes);
        while asked < until {
            _mm_prefetch::<_MM_HINT_T1>(asked.cast());
            asked = asked.wrapping_add(LINE);
        }
        asked = until;
        let x = x.wrapping_add(step * R * STEP_BYTES);
        for o in 0..O {
            // SAFETY: the caller gives rows and steps that exist.
            let weights = unsafe { source.load(output + o, step) };
            for half in 0..2 {
                for r in 0..R {
                    // SAFETY: row `r` of a step of the panel, whose length the caller keeps.
                    let x = unsafe { load(x.wrapping_add(r * STEP_BYTES + half * LINE)) };
                    sums[o][r] = pairs(weights[half], x, sums[o][r]);
                }
            }
        }
    }
    if whole < steps.end {
        let x = x.wrapping_add(whole * R * STEP_BYTES);
        for o in 0..O {
            // SAFETY: as above; `whole` is the last step, which is not whole.
            let weights =
                unsafe { source.load_tail(output + o, whole, panel.inputs - whole * STEP) };
            for half in 0..2 {
                for r in 0..R {
                    // SAFETY: panels end with whole steps, padded with zeros.
                    let x = unsafe { load(x.wrapping_add(r * STEP_BYTES + half * LINE)) };
                    sums[o][r] = pairs(weights[half], x, sums[o][r]);
                }
            }
        }
    }
    for o in 0..O {
        for r in 0..R {
            all[o * R + r] = sums[o][r];
        }
    }
}

/// The sums of the lanes of vectors `first`, `first + stride`, ... (`O` of them): halves, quarters, eighths, pairs.
///
/// # Safety
/// The machine has AVX-512 F and DQ.
#[inline]
#[target_feature(enable = "avx512f,avx512dq")]
pub(super) unsafe fn totals<const O: usize>(sums: &Sums, first: usize, stride: usize) -> [f32; O] {
    let mut out = [0.0; O];
    let at = |o: usize| sums[first + o * stride];
    if O.is_multiple_of(4) {
        for (group, out) in out.as_chunks_mut::<4>().0.iter_mut().enumerate() {
            let of = |i: usize| at(4 * group + i);
            let four = totals4([of(0), of(1), of(2), of(3)]);
            // SAFETY: four f32.
            unsafe { _mm_storeu_ps(out.as_mut_ptr(), four) };
        }
    } else {
        for (o, out) in out.iter_mut().enumerate() {
            let none = _mm512_setzero_ps();
            *out = _mm_cvtss_f32(totals4([at(o), none, none, none]));
        }
    }
    out
}

/// The sums of the lanes of four vectors, each in the order of [`totals`].
#[inline]
#[target_feature(enable = "avx512f,avx512dq")]
fn totals4([a, b, c, d]: [__m512; 4]) -> __m128 {
    let halves = |a: __m512, b: __m512| {
        _mm512_add_ps(
            _mm512_shuffle_f32x4::<0x44>(a, b),
            _mm512_shuffle_f32x4::<0xee>(a, b),
        )
    };
    let (ab, cd) = (halves(a, b), halves(c, d));
    // The quarters of each vector in a 128-bit lane of its own.
    let quarters = _mm512_add_ps(
        _mm512_shuffle_f32x4::<0x88>(ab, cd),
        _mm512_shuffle_f32x4::<0xdd>(ab, cd),
    );
    let two = _mm512_add_ps(quarters, _mm512_permute_ps::<0b01_00_11_10>(quarters));
    let one = _mm512_add_ps(two, _mm512_permute_ps::<0b10_11_00_01>(two));
    let firsts = _mm512_setr_epi32(0, 4, 8, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);
    _mm512_castps512_ps128(_mm512_permutexvar_ps(firsts, one))
}

/// Rounds `rows` rows of `inputs` values each to bfloat16 and packs them as a panel in the order of the source.
///
/// # Safety
/// The machine has AVX-512 F, BW and VL.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
pub(super) unsafe fn pack<S: Source>(x: &[f32], inputs: usize, rows: usize, panel: &mut [Line]) {
    let places: [[u16; STEP / 2]; 2] =
        const { [halved_order(S::ORDER, 0), halved_order(S::ORDER, STEP / 2)] };
    // SAFETY: 64 bytes each.
    let places = places.map(|half| unsafe { load(half.as_ptr().cast()) });
    for (step, lines) in panel.chunks_exact_mut(2 * rows).enumerate() {
        let start = step * STEP;
        let left = STEP.min(inputs - start);
        for (r, lines) in lines.chunks_exact_mut(2).enumerate() {
            let x = &x[r * inputs + start..][..left];
            let (first, second) = (rounded32(x), rounded32(x.get(STEP / 2..).unwrap_or(&[])));
            for (line, places) in lines.iter_mut().zip(places) {
                line.set(_mm512_permutex2var_epi16(first, places, second));
            }
        }
    }
}

/// Up to 32 numbers as bfloat16, zeros after them: [`bf16_bits`] of each.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn rounded32(x: &[f32]) -> __m512i {
    let lower = _mm512_cvtepi32_epi16(rounded16(x));
    let upper = _mm512_cvtepi32_epi16(rounded16(x.get(16..).unwrap_or(&[])));
    _mm512_inserti64x4::<1>(_mm512_castsi256_si512(lower), upper)
}

/// Up to 16 of them in the lower halves of 32 bits.
#[inline]
#[target_feature(enable = "avx512f")]
fn rounded16(x: &[f32]) -> __m512i {
    let mask = if x.len() >= 16 {
        u16::MAX
    } else {
        (1 << x.len()) - 1
    };
    // SAFETY: only the lanes of the mask are read, which are in the slice.
    let value = unsafe { _mm512_maskz_loadu_ps(mask, x.as_ptr()) };
    let bits = _mm512_castps_si512(value);
    let upper = _mm512_srli_epi32::<16>(bits);
    let even = _mm512_and_si512(upper, _mm512_set1_epi32(1));
    let half = _mm512_add_epi32(even, _mm512_set1_epi32(0x7fff));
    let rounded = _mm512_srli_epi32::<16>(_mm512_add_epi32(bits, half));
    let is_nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(value, value);
    _mm512_mask_or_epi32(rounded, is_nan, upper, _mm512_set1_epi32(0x40))
}

/// One half of the places of an order.
const fn halved_order(order: [u8; STEP], start: usize) -> [u16; STEP / 2] {
    let mut half = [0; STEP / 2];
    let mut i = 0;
    while i < STEP / 2 {
        half[i] = order[start + i] as u16;
        i += 1;
    }
    half
}

/// Rounds a row to bfloat16, each value times its scale if there are scales; zeros after it.
///
/// # Safety
/// The machine has AVX-512 F, BW, VL and BF16.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
pub(super) unsafe fn round_row(row: &[f32], scales: Option<&[f32]>, bytes: &mut [u8]) {
    let (own, rest) = bytes.split_at_mut(2 * row.len());
    let places = own.as_chunks_mut::<2>().0.iter_mut().zip(row);
    match scales {
        None => places.for_each(|(to, x)| *to = bf16_bits(*x).to_le_bytes()),
        Some(scales) => places
            .zip(scales)
            .for_each(|((to, x), scale)| *to = bf16_bits(x * scale).to_le_bytes()),
    }
    rest.fill(0);
}

/// An empty panel of `lines` lines in reused memory.
pub(super) fn resize(memory: &mut Vec<Line>, lines: usize) {
    memory.resize(lines, ZEROS);
}

/// bfloat16 as stored.
#[derive(Clone, Copy)]
pub(super) struct Bf16<'a> {
    /// `[outputs, inputs]`.
    pub(super) bytes: &'a [u8],
    pub(super) inputs: usize,
}

impl Source for Bf16<'_> {
    const ORDER: [u8; STEP] = order(1, 1);
    const DECODES: bool = false;

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn load(self, output: usize, step: usize) -> [__m512i; 2] {
        let p = self.row(output).wrapping_add(step * STEP_BYTES);
        // SAFETY: 128 bytes of the row, as the caller promises.
        let first = unsafe { load(p) };
        // SAFETY: as above.
        [first, unsafe { load(p.wrapping_add(LINE)) }]
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn load_tail(self, output: usize, step: usize, left: usize) -> [__m512i; 2] {
        let p = self.row(output).wrapping_add(step * STEP_BYTES);
        let mask = (1u64 << left) - 1;
        // SAFETY: only the lanes of the mask are read, which lie in the row.
        let first = unsafe { _mm512_maskz_loadu_epi16(mask as u32, p.cast()) };
        let p = p.wrapping_add(LINE);
        // SAFETY: as above.
        let second = unsafe { _mm512_maskz_loadu_epi16((mask >> 32) as u32, p.cast()) };
        [first, second]
    }

    fn row(self, output: usize) -> *const u8 {
        self.bytes.as_ptr().wrapping_add(output * self.inputs * 2)
    }

    fn scale(self, _output: usize) -> f32 {
        1.0
    }
}

/// INT8: the codes as bfloat16, which holds them exactly; the scale of a row comes after the sum.
#[derive(Clone, Copy)]
pub(super) struct Int8<'a> {
    pub(super) parts: int8::Parts<'a>,
    pub(super) inputs: usize,
}

impl Source for Int8<'_> {
    // Lanes of two vectors of 16 become the lower and upper halves of one of 32.
    const ORDER: [u8; STEP] = order(16, 32);
    const DECODES: bool = true;

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn load(self, output: usize, step: usize) -> [__m512i; 2] {
        let p = self.row(output).wrapping_add(step * STEP);
        // SAFETY: 64 bytes of the row, as the caller promises.
        let [a, b] = unsafe { widen16(p) };
        // SAFETY: as above.
        let [c, d] = unsafe { widen16(p.wrapping_add(32)) };
        [halves(a, b), halves(c, d)]
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn load_tail(self, output: usize, step: usize, left: usize) -> [__m512i; 2] {
        let p = self.row(output).wrapping_add(step * STEP);
        let mut padded = [0u8; STEP];
        for (i, byte) in padded.iter_mut().enumerate().take(left) {
            // SAFETY: one of the `left` bytes of the row.
            *byte = unsafe { p.wrapping_add(i).read() };
        }
        // SAFETY: 64 bytes.
        let [a, b] = unsafe { widen16(padded.as_ptr()) };
        // SAFETY: as above.
        let [c, d] = unsafe { widen16(padded.as_ptr().wrapping_add(32)) };
        [halves(a, b), halves(c, d)]
    }

    fn row(self, output: usize) -> *const u8 {
        self.parts.codes.as_ptr().wrapping_add(output * self.inputs)
    }

    fn scale(self, output: usize) -> f32 {
        self.parts.scale(output)
    }
}

/// NF4 whose rows are whole groups of 64: the sixteen levels times the group's scale, rounded to bfloat16, are a table in
/// a register.
#[derive(Clone, Copy)]
pub(super) struct Nf4<'a> {
    pub(super) parts: nf4::Parts<'a>,
    pub(super) inputs: usize,
}

impl Source for Nf4<'_> {
    // The first vector is made of the upper halves of the bytes, the second of the lower ones.
    const ORDER: [u8; STEP] = {
        let mut order = [0; STEP];
        let mut i = 0;
        while i < STEP / 2 {
            order[i] = 2 * i as u8;
            order[STEP / 2 + i] = 2 * i as u8 + 1;
            i += 1;
        }
        order
    };
    const DECODES: bool = true;

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
    unsafe fn load(self, output: usize, step: usize) -> [__m512i; 2] {
        let p = self.row(output).wrapping_add(step * STEP / 2);
        // SAFETY: 32 bytes of the row, as the caller promises.
        let bytes = _mm512_cvtepu8_epi16(unsafe { _mm256_loadu_si256(p.cast()) });
        // SAFETY: the group of 64 exists, as its weights do.
        let scale = unsafe {
            self.parts
                .absmax_unchecked(output * (self.inputs / STEP) + step)
        };
        // SAFETY: sixteen f32.
        let levels = unsafe { _mm512_loadu_ps(nf4::LEVELS.as_ptr()) };
        let table = _mm512_cvtneps_pbh(_mm512_mul_ps(levels, _mm512_set1_ps(scale)));
        // SAFETY: both are 256 bits in which every pattern is valid.
        let table = unsafe { std::mem::transmute::<__m256bh, __m256i>(table) };
        // Indexes are below 16: the upper half is never looked up.
        let table = _mm512_castsi256_si512(table);
        let high = _mm512_srli_epi16::<4>(bytes);
        let low = _mm512_and_si512(bytes, _mm512_set1_epi16(15));
        [
            _mm512_permutexvar_epi16(high, table),
            _mm512_permutexvar_epi16(low, table),
        ]
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
    unsafe fn load_tail(self, _output: usize, _step: usize, _left: usize) -> [__m512i; 2] {
        // Rows are whole groups: `super::packed` takes no others.
        [_mm512_setzero_si512(); 2]
    }

    fn row(self, output: usize) -> *const u8 {
        let start = output * self.inputs / 2;
        self.parts.codes.as_ptr().wrapping_add(start)
    }

    fn scale(self, _output: usize) -> f32 {
        1.0
    }
}

/// A chunk of a strip, decoded by [`decode`]; its rows are numbered from 0.
#[derive(Clone, Copy)]
pub(super) struct Decoded<'a> {
    /// `[rows, steps of the chunk, 2]`.
    pub(super) lines: &'a [Line],
    /// The steps of the chunk.
    pub(super) first: usize,
    pub(super) count: usize,
}

impl Source for Decoded<'_> {
    // The inputs are packed in the order of the source that was decoded.
    const ORDER: [u8; STEP] = order(1, 1);
    const DECODES: bool = false;

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn load(self, output: usize, step: usize) -> [__m512i; 2] {
        let p = self
            .row(output)
            .wrapping_add((step - self.first) * STEP_BYTES);
        // SAFETY: the lines of a step of the chunk, as the caller promises.
        let first = unsafe { load(p) };
        // SAFETY: as above.
        [first, unsafe { load(p.wrapping_add(LINE)) }]
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn load_tail(self, output: usize, step: usize, _left: usize) -> [__m512i; 2] {
        // SAFETY: decoded steps are whole, padded with zeros.
        unsafe { self.load(output, step) }
    }

    fn row(self, output: usize) -> *const u8 {
        let start = output * self.count * STEP_BYTES;
        self.lines.as_ptr().cast::<u8>().wrapping_add(start)
    }

    fn scale(self, _output: usize) -> f32 {
        1.0
    }
}

/// Decodes `steps` of rows `outputs` of a matrix of `inputs` columns into `lines` `[rows, steps, 2]`.
///
/// # Safety
/// The machine has the instruction set of [`tile`]; the source has these rows and steps.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
pub(super) unsafe fn decode<S: Source>(
    source: S,
    outputs: Range<usize>,
    steps: Range<usize>,
    inputs: usize,
    lines: &mut [Line],
) {
    let rows = lines.chunks_exact_mut(2 * steps.len());
    for (output, lines) in outputs.zip(rows) {
        for (step, lines) in steps.clone().zip(lines.chunks_exact_mut(2)) {
            let left = inputs - step * STEP;
            let vectors = if left >= STEP {
                // SAFETY: a whole step of a row that exists.
                unsafe { source.load(output, step) }
            } else {
                // SAFETY: the last step of a row that exists.
                unsafe { source.load_tail(output, step, left) }
            };
            for (line, vector) in lines.iter_mut().zip(vectors) {
                // SAFETY: a line is 64 bytes.
                unsafe { _mm512_storeu_si512(line.0.as_mut_ptr().cast(), vector) };
            }
        }
    }
}

/// A line of zeros.
pub(super) const ZEROS: Line = Line([0; LINE]);

/// In each 32 elements: place `2 i` holds element `i`, place `2 i + 1` element `i + distance`; as they are when
/// `distance` is 1.
const fn order(distance: usize, group: usize) -> [u8; STEP] {
    let mut order = [0; STEP];
    let mut i = 0;
    while i < STEP {
        order[i] = if distance == 1 {
            i as u8
        } else {
            (i / group * group + i % group / 2 + i % 2 * distance) as u8
        };
        i += 1;
    }
    order
}

/// # Safety
/// 64 bytes at the pointer are readable.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn load(p: *const u8) -> __m512i {
    // SAFETY: an unaligned load of bytes that the caller says are readable.
    unsafe { _mm512_loadu_si512(p.cast()) }
}

/// 32 signed bytes as two vectors of f32, as bits.
///
/// # Safety
/// 32 bytes at the pointer are readable.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn widen16(p: *const u8) -> [__m512i; 2] {
    // SAFETY: as the caller says.
    let first = unsafe { _mm_loadu_si128(p.cast()) };
    // SAFETY: as above.
    let second = unsafe { _mm_loadu_si128(p.wrapping_add(16).cast()) };
    [
        _mm512_castps_si512(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(first))),
        _mm512_castps_si512(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(second))),
    ]
}

/// The upper halves of two vectors of f32: pairs of bfloat16.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn halves(lower: __m512i, upper: __m512i) -> __m512i {
    _mm512_mask_blend_epi16(0xaaaa_aaaa, _mm512_srli_epi32::<16>(lower), upper)
}

#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
pub(super) fn pairs(a: __m512i, b: __m512i, sum: __m512) -> __m512 {
    // SAFETY: both are 512 bits in which every pattern is valid.
    let a = unsafe { std::mem::transmute::<__m512i, __m512bh>(a) };
    // SAFETY: as above.
    let b = unsafe { std::mem::transmute::<__m512i, __m512bh>(b) };
    _mm512_dpbf16_ps(sum, a, b)
}
