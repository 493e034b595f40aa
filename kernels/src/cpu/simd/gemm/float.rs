//! f32 products as an [`Arithmetic`] over any [`Vector`], and the matrices that they read: numbers
//! as stored, INT8 codes, and quantized matrices of any shape.
//!
//! A step is one vector of inputs, widened to f32. Weights that take work to widen are widened once
//! for all tiles of a strip, into lines that stay in the first-level cache.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::{__m256, __m512};
use std::marker::PhantomData;
use std::ops::Range;

use shared::dtype::DType;

use super::arithmetic::{self, Arithmetic, IN_ORDER, MatrixSource, Panel, TilePrefetch};
use crate::cpu::simd::Isa;
use crate::cpu::simd::line::{CacheLine, LINE, floats};
#[cfg(target_arch = "aarch64")]
use crate::cpu::simd::neon::Neon;
use crate::cpu::simd::vector::{Lanes, Plain, Vector};
use crate::ops::convert;
use crate::quant::int8;
use crate::tensor::WeightView;
use crate::tuning::{self, Split};

/// f32 products in vectors `V`.
#[derive(Clone, Copy)]
pub(super) struct Float<V>(PhantomData<V>);

/// The same by groups of eight vectors of eight lanes, for matrices of which a group of 64 weights is decoded at
/// once, in registers: single rows, which use what they decode once.
#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy)]
pub(super) struct Groups;

/// The same by groups of four vectors of sixteen lanes.
#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy)]
pub(super) struct WideGroups;

/// f32 products in NEON by groups of 64 weights, which are decoded in registers: single rows.
#[cfg(target_arch = "aarch64")]
#[derive(Clone, Copy)]
pub(super) struct NeonGroups;

/// Implements [`Arithmetic`] for one vector, `halves` of them a step: `accumulators` of a tile of at most `rows` rows fit its
/// registers beside the inputs and a weight, those of `tiles` tiles the first-level cache. `set`
/// has its instructions. `work`
/// gives the bytes of an output and the rows that cost as much as what is computed.
macro_rules! float {
    (
        $arithmetic:ty, $vector:ty, halves $halves:literal, set $set:ident, $(target $features:literal,)? accumulators $accumulators:literal, rows $rows:literal,
        tiles $tiles:literal, panels $panels:literal, work |$row_bytes:ident, $inputs:ident, $of:ident| $work:expr
    ) => {
        impl Arithmetic for $arithmetic {
            type Vector = $vector;
            type Accumulator = $vector;
            type Weights = [$vector; $halves];
            type TileSums = [$vector; $accumulators];
            type GroupSums = [$vector; $accumulators * $tiles];

            const SET: Isa = Isa::$set;
            const STEP: usize = $halves * <$vector>::LANES;
            const STEP_BYTES: usize = 4 * Self::STEP;
            const HALVES: usize = $halves;
            const ACCUMULATORS: usize = $accumulators;
            const TILE_ROWS: usize = $rows;
            const HAS_PANELS: bool = $panels;
            // With four rows of weights and those of the inputs half of the first-level cache.
            const CHUNK: usize = 512;
            const ZERO: $vector = <$vector>::ZERO;

            fn tile_sums() -> Self::TileSums {
                [Self::ZERO; $accumulators]
            }

            fn group_sums() -> Self::GroupSums {
                [Self::ZERO; $accumulators * $tiles]
            }

            fn group_tiles(_inputs: usize, _tiles: usize) -> usize {
                $tiles
            }

            fn split(
                outputs: usize,
                $row_bytes: usize,
                $inputs: usize,
                $of: usize,
                threads: usize,
            ) -> Split {
                let (row_bytes, rows) = $work;
                tuning::linear_split(outputs, row_bytes, rows, threads)
            }

            $(#[target_feature(enable = $features)])?
            unsafe fn pack<S: MatrixSource<Self>>(
                dtype: DType,
                x: &[f32],
                inputs: usize,
                panel: &mut [CacheLine],
            ) {
                let order = const { other_order(S::ORDER) };
                pack::<$vector>(order, dtype, x, inputs, panel);
            }

            #[inline]
            $(#[target_feature(enable = $features)])?
            unsafe fn load(p: *const u8) -> $vector {
                // SAFETY: as the caller says.
                unsafe { <$vector>::load(p) }
            }

            #[inline]
            $(#[target_feature(enable = $features)])?
            unsafe fn load_weights(p: *const u8) -> [$vector; $halves] {
                let mut weights = [<$vector>::ZERO; $halves];
                for (half, weights) in weights.iter_mut().enumerate() {
                    // SAFETY: as the caller says.
                    *weights = unsafe { <$vector>::load(p.wrapping_add(4 * half * <$vector>::LANES)) };
                }
                weights
            }

            #[inline]
            $(#[target_feature(enable = $features)])?
            unsafe fn store_weights(weights: [$vector; $halves], p: *mut u8) {
                for (half, weights) in weights.into_iter().enumerate() {
                    // SAFETY: as the caller says.
                    unsafe { weights.store(p.wrapping_add(4 * half * <$vector>::LANES)) };
                }
            }

            #[inline]
            $(#[target_feature(enable = $features)])?
            unsafe fn multiply_add(weights: $vector, inputs: $vector, sum: $vector) -> $vector {
                // SAFETY: as the caller says.
                unsafe { weights.mul_add(inputs, sum) }
            }

            arithmetic::compiled_for!($($features)?);

            #[inline]
            $(#[target_feature(enable = $features)])?
            unsafe fn totals<const O: usize>(
                sums: &[$vector],
                first: usize,
                stride: usize,
            ) -> [f32; O] {
                // SAFETY: as the caller says.
                unsafe { <$vector>::totals(sums, first, stride) }
            }
        }
    };
}

// What widening takes counts as reading f32.
#[cfg(target_arch = "x86_64")]
float!(Float<__m256>, __m256, halves 1, set Avx2, target "avx2,fma,f16c", accumulators 12, rows 3,
    tiles 64, panels true,
    work |_row_bytes, inputs, rows| (2 * inputs, 2 * rows));
#[cfg(target_arch = "x86_64")]
float!(Groups, __m256, halves 8, set Avx2, target "avx2,fma,f16c", accumulators 12, rows 1,
    tiles 1, panels false,
    work |row_bytes, inputs, rows| (row_bytes.max(inputs), 2 * rows));
#[cfg(target_arch = "x86_64")]
float!(WideGroups, __m512, halves 4, set Avx512,
    target "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c", accumulators 24, rows 1, tiles 1, panels false,
    work |row_bytes, inputs, rows| (row_bytes.max(inputs), 2 * rows));
#[cfg(target_arch = "x86_64")]
float!(Float<__m512>, __m512, halves 1, set Avx512,
    target "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c", accumulators 24, rows 6, tiles 16, panels true,
    work |row_bytes, inputs, rows| (row_bytes.max(2 * inputs), rows));
// A vector is four registers: four outputs of a row have sixteen accumulators.
#[cfg(target_arch = "aarch64")]
float!(Float<Neon>, Neon, halves 1, set Neon, target "neon", accumulators 4, rows 1, tiles 32, panels true,
    work |row_bytes, inputs, rows| (row_bytes.max(2 * inputs), 2 * rows));
#[cfg(target_arch = "aarch64")]
float!(NeonGroups, Neon, halves 4, set Neon, target "neon", accumulators 4, rows 1, tiles 1, panels false,
    work |row_bytes, inputs, rows| (row_bytes.max(inputs), 2 * rows));
float!(Float<Plain>, Plain, halves 1, set Portable, accumulators 1, rows 1, tiles 128, panels false,
    work |_row_bytes, inputs, rows| (2 * inputs, 2 * rows));

/// Returns the order of a source if it is another one than that of the inputs.
const fn other_order(order: [u8; 64]) -> Option<[u8; 64]> {
    let mut i = 0;
    while i < 64 {
        if order[i] != i as u8 {
            return Some(order);
        }
        i += 1;
    }
    None
}

/// Rounds the rows of `x` to `dtype` and packs them `[step][row][lanes]`; `order` applies to whole
/// groups of 64. Zeros follow the inputs.
#[inline(always)]
fn pack<V: Vector>(
    order: Option<[u8; 64]>,
    dtype: DType,
    x: &[f32],
    inputs: usize,
    panel: &mut [CacheLine],
) {
    let rows = x.len() / inputs;
    let panel = floats(panel);
    for (r, x) in x.chunks_exact(inputs).enumerate() {
        let steps = panel.chunks_exact_mut(rows * V::LANES).zip((0..inputs).step_by(V::LANES));
        convert::with_rounding!(dtype, round => for (to, at) in steps {
            let to = &mut to[r * V::LANES..][..V::LANES];
            let group = at / 64 * 64;
            match &order {
                Some(order) if group + 64 <= inputs => {
                    let x: &[f32] = &x[group..group + 64];
                    for (to, from) in to.iter_mut().zip(&order[at % 64..]) {
                        *to = round(x[usize::from(from % 64)]);
                    }
                }
                _ if at + V::LANES <= inputs => {
                    to.iter_mut().zip(&x[at..at + V::LANES]).for_each(|(to, x)| *to = round(*x));
                }
                _ => {
                    let (own, rest) = to.split_at_mut(inputs - at);
                    own.iter_mut().zip(&x[at..]).for_each(|(to, x)| *to = round(*x));
                    rest.fill(0.0);
                }
            }
        });
    }
}

/// A type of stored numbers.
pub(super) trait Number: Copy + Sync {
    /// Bytes of a number.
    const BYTES: usize;
    /// See [`Source::SHARED_FROM`].
    const SHARED_FROM: usize;

    /// Loads a vector of numbers.
    ///
    /// # Safety
    /// As [`Vector`].
    unsafe fn load<V: Vector>(p: *const u8) -> V;
}

macro_rules! number {
    ($(#[doc = $doc:literal])* $number:ident, $bytes:literal, shared from $shared:expr, $load:ident) => {
        $(#[doc = $doc])*
        #[derive(Clone, Copy)]
        pub(super) struct $number;

        impl Number for $number {
            const BYTES: usize = $bytes;
            const SHARED_FROM: usize = $shared;

            #[inline(always)]
            unsafe fn load<V: Vector>(p: *const u8) -> V {
                // SAFETY: as the caller says.
                unsafe { V::$load(p) }
            }
        }
    };
}

number!(
    F32, 4, shared from usize::MAX, load);
number!(
    /// bfloat16.
    Bf16, 2, shared from 2, load_bf16);
number!(
    /// float16.
    F16, 2, shared from 2, load_f16);
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
number!(
    /// Codes of INT8.
    Code, 1, shared from 2, load_i8);

/// Numbers as stored, or the codes of INT8, whose scale comes after the sum of a row.
#[derive(Clone, Copy)]
pub(super) struct StoredNumbers<'a, N> {
    /// `[outputs, inputs]`.
    bytes: &'a [u8],
    inputs: usize,
    int8: Option<int8::Int8Parts<'a>>,
    number: PhantomData<N>,
}

impl<'a, N: Number> StoredNumbers<'a, N> {
    /// Numbers as stored.
    pub(super) fn new(bytes: &'a [u8], inputs: usize) -> Self {
        StoredNumbers { bytes, inputs, int8: None, number: PhantomData }
    }
}

#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
impl<'a> StoredNumbers<'a, Code> {
    /// The codes of INT8.
    pub(super) fn int8(parts: int8::Int8Parts<'a>, inputs: usize) -> Self {
        StoredNumbers { bytes: parts.codes, inputs, int8: Some(parts), number: PhantomData }
    }
}

impl<N: Number, V: Vector> MatrixSource<Float<V>> for StoredNumbers<'_, N>
where
    Float<V>: Arithmetic<Weights = [V; 1]>,
{
    const ORDER: [u8; 64] = IN_ORDER;
    // A tile of six rows widens a vector once for six products: no less than a strip would save.
    const SHARED_FROM: usize = if Float::<V>::TILE_ROWS >= 6 { usize::MAX } else { N::SHARED_FROM };

    #[inline(always)]
    unsafe fn load(self, output: usize, at: usize) -> [V; 1] {
        let start = (output * self.inputs + at) * N::BYTES;
        // SAFETY: a step of the row, as the caller promises.
        [unsafe { N::load(self.bytes.as_ptr().wrapping_add(start)) }]
    }

    #[inline(always)]
    unsafe fn load_tail(self, output: usize, at: usize, left: usize) -> [V; 1] {
        let start = (output * self.inputs + at) * N::BYTES;
        let mut padded = [0u8; LINE];
        padded[..left * N::BYTES].copy_from_slice(&self.bytes[start..][..left * N::BYTES]);
        // SAFETY: a step takes at most a line.
        [unsafe { N::load(padded.as_ptr()) }]
    }

    fn row(self, output: usize) -> *const u8 {
        self.bytes.as_ptr().wrapping_add(output * self.inputs * N::BYTES)
    }

    fn scale(self, output: usize) -> f32 {
        self.int8.map_or(1.0, |parts| parts.scale(output))
    }
}

/// A quantized matrix of any shape: always decoded first, by the plain definition of its format.
#[derive(Clone, Copy)]
pub(super) struct DecodedMatrix<'a>(pub(super) WeightView<'a>);

impl<V: Vector> MatrixSource<Float<V>> for DecodedMatrix<'_>
where
    Float<V>: Arithmetic<Weights = [V; 1]>,
{
    const ORDER: [u8; 64] = IN_ORDER;
    const SHARED_FROM: usize = 1;

    #[inline(always)]
    unsafe fn load(self, _output: usize, _at: usize) -> [V; 1] {
        [V::ZERO]
    }

    #[inline(always)]
    unsafe fn load_tail(self, _output: usize, _at: usize, _left: usize) -> [V; 1] {
        [V::ZERO]
    }

    #[inline(always)]
    unsafe fn decode(self, output: usize, range: Range<usize>, to: &mut [CacheLine]) {
        let (own, rest) = floats(to).split_at_mut(range.len());
        self.0.widen_part(output, range.start, own);
        rest.fill(0.0);
    }

    fn row(self, output: usize) -> *const u8 {
        self.0.bytes().as_ptr().wrapping_add(output * self.0.row_bytes())
    }

    fn scale(self, _output: usize) -> f32 {
        1.0
    }
}
