//! Conversions between f32 and stored dtypes, round to nearest even. Bytes are little-endian and
//! need no alignment.

use shared::dtype::DType;

use crate::quant::{int8, nf4};
use crate::tensor::{Format, WeightView};

/// `bytes` of `dtype` as f32 into `out`; both must hold the same number of elements.
///
/// # Panics
/// When they do not.
pub fn to_f32(dtype: DType, bytes: &[u8], out: &mut [f32]) {
    widen(dtype, bytes, out);
}

/// [`to_f32`], compiled for the instruction set of the function that calls it.
#[inline(always)]
pub(crate) fn widen(dtype: DType, bytes: &[u8], out: &mut [f32]) {
    assert_eq!(bytes.len(), out.len() * dtype.size_bytes(), "elements of {dtype}");
    match dtype {
        DType::F32 => {
            for (o, b) in out.iter_mut().zip(bytes.chunks_exact(4)) {
                *o = f32::from_le_bytes([b[0], b[1], b[2], b[3]]);
            }
        }
        DType::Bf16 => {
            for (o, b) in out.iter_mut().zip(bytes.chunks_exact(2)) {
                *o = f32::from_bits(u32::from(u16::from_le_bytes([b[0], b[1]])) << 16);
            }
        }
        DType::F16 => {
            for (o, b) in out.iter_mut().zip(bytes.chunks_exact(2)) {
                *o = f16_value(u16::from_le_bytes([b[0], b[1]]));
            }
        }
    }
}

/// `values` rounded to `dtype` into `bytes`; both must hold the same number of elements.
///
/// # Panics
/// When they do not.
pub fn from_f32(dtype: DType, values: &[f32], bytes: &mut [u8]) {
    narrow(dtype, values, bytes);
}

/// [`from_f32`], compiled for the instruction set of the function that calls it.
#[inline(always)]
pub(crate) fn narrow(dtype: DType, values: &[f32], bytes: &mut [u8]) {
    assert_eq!(bytes.len(), values.len() * dtype.size_bytes(), "elements of {dtype}");
    match dtype {
        DType::F32 => {
            for (v, b) in values.iter().zip(bytes.chunks_exact_mut(4)) {
                b.copy_from_slice(&v.to_le_bytes());
            }
        }
        DType::Bf16 => {
            for (v, b) in values.iter().zip(bytes.chunks_exact_mut(2)) {
                b.copy_from_slice(&bf16_bits(*v).to_le_bytes());
            }
        }
        DType::F16 => {
            for (v, b) in values.iter().zip(bytes.chunks_exact_mut(2)) {
                b.copy_from_slice(&f16_bits(*v).to_le_bytes());
            }
        }
    }
}

/// Whether no element of `dtype` has the exponent of NaN and infinity.
pub fn all_finite(dtype: DType, bytes: &[u8]) -> bool {
    // In blocks without an early end, which become vector code.
    let none = |mask: u16, size: usize| {
        bytes.chunks(4096).all(|block| {
            let upper =
                block.chunks_exact(size).map(|b| u16::from_le_bytes([b[size - 2], b[size - 1]]));
            !upper.fold(false, |found, bits| found | (bits & mask == mask))
        })
    };
    match dtype {
        DType::F32 => none(0x7f80, 4),
        DType::Bf16 => none(0x7f80, 2),
        DType::F16 => none(0x7c00, 2),
    }
}

/// `values` as an owned f32 vector.
pub fn to_vec(dtype: DType, bytes: &[u8]) -> Vec<f32> {
    let mut out = vec![0.0; bytes.len() / dtype.size_bytes()];
    to_f32(dtype, &bytes[..out.len() * dtype.size_bytes()], &mut out);
    out
}

/// The value of `dtype` nearest to `value`.
#[inline(always)]
pub fn round(dtype: DType, value: f32) -> f32 {
    match dtype {
        DType::F32 => value,
        DType::Bf16 => f32::from_bits(u32::from(bf16_bits(value)) << 16),
        DType::F16 => f16_value(f16_bits(value)),
    }
}

/// Calls `$body` with `$round` bound to the rounding of one dtype: the choice is made once, outside
/// of loops, which then become vector code.
macro_rules! with_rounding {
    ($dtype:expr, $round:ident => $body:expr) => {
        match $dtype {
            shared::dtype::DType::F32 => {
                let $round = |v: f32| v;
                $body
            }
            shared::dtype::DType::Bf16 => {
                let $round = |v: f32| $crate::ops::convert::round(shared::dtype::DType::Bf16, v);
                $body
            }
            shared::dtype::DType::F16 => {
                let $round = |v: f32| $crate::ops::convert::round(shared::dtype::DType::F16, v);
                $body
            }
        }
    };
}
pub(crate) use with_rounding;

impl WeightView<'_> {
    /// Row `index` as f32 into `out` (`[inputs]`); false when there is no such row or `out` has
    /// another length. A quantized row is what it stands for: NF4 rounded to the dtype, as the
    /// arithmetic takes it.
    pub fn row_to_f32(&self, index: usize, out: &mut [f32]) -> bool {
        if index >= self.outputs() || out.len() != self.inputs() {
            return false;
        }
        self.widen_row(index, out);
        true
    }

    /// [`row_to_f32`](Self::row_to_f32) of a row that exists, compiled for the instruction set of
    /// the caller.
    #[inline(always)]
    pub(crate) fn widen_row(&self, index: usize, out: &mut [f32]) {
        self.widen_part(index, 0, out);
    }

    /// Columns of row `index` from `first` on, which exist, as f32 into `out`; compiled for the
    /// instruction set of the caller.
    #[inline(always)]
    pub(crate) fn widen_part(&self, index: usize, first: usize, out: &mut [f32]) {
        let start = index * self.inputs() + first;
        match &self.format() {
            Format::Plain => {
                let size = self.dtype().size_bytes();
                let bytes = &self.bytes()[start * size..(start + out.len()) * size];
                widen(self.dtype(), bytes, out);
            }
            Format::Int8(parts) => int8::decode(parts, index, start, out),
            Format::Nf4(parts) => {
                nf4::decode(parts, index, first, out);
                with_rounding!(self.dtype(), round => for out in out.iter_mut() {
                    *out = round(*out);
                });
            }
        }
    }
}

/// Upper half of `value`, rounded to nearest even; NaN stays NaN.
#[inline(always)]
pub(crate) fn bf16_bits(value: f32) -> u16 {
    let bits = value.to_bits();
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
    let quiet = (bits >> 16) | 0x40;
    (if value.is_nan() { quiet } else { rounded }) as u16
}

/// A float16 number, without branches, so that loops over it become vector code.
#[inline(always)]
pub(crate) fn f16_value(bits: u16) -> f32 {
    let bits = u32::from(bits);
    // The exponent is 112 too small, and a power of two changes nothing else; numbers below 2^-14
    // are made normal by it.
    let value = f32::from_bits((bits & 0x7fff) << 13) * f32::from_bits((127 + 112) << 23);
    let endless = if bits & 0x7c00 == 0x7c00 { 0x7f80_0000 } else { 0 };
    f32::from_bits(value.to_bits() | endless | (bits & 0x8000) << 16)
}

/// The float16 number nearest to `value`, to even between two; without branches.
#[inline(always)]
pub(crate) fn f16_bits(value: f32) -> u16 {
    let bits = value.to_bits();
    let (sign, size) = (bits >> 16 & 0x8000, bits & 0x7fff_ffff);
    let normal = (size.wrapping_add(0xfff + (size >> 13 & 1)) >> 13).wrapping_sub(112 << 10);
    // Below 2^-14 the last bit is worth 2^-24, as it is for numbers from 0.5 on: adding that
    // rounds.
    let small = (f32::from_bits(size) + 0.5).to_bits().wrapping_sub(0.5f32.to_bits());
    let finite = if size < 113 << 23 { small } else { normal.min(0x7c00) };
    let rounded = if size > 0x7f80_0000 { 0x7e00 } else { finite };
    (sign | rounded) as u16
}

#[cfg(test)]
mod tests {
    use half::{bf16, f16};
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn every_float16_number_is_read_and_written_as_it_is() {
        for bits in 0..=u16::MAX {
            let (wanted, got) = (f16::from_bits(bits).to_f32(), f16_value(bits));
            assert!(
                got.to_bits() == wanted.to_bits() || (got.is_nan() && wanted.is_nan()),
                "{bits:#x}"
            );
            assert!(f16_bits(got) == bits || got.is_nan(), "{bits:#x}");
            // The middle between it and the next goes to the even one, what is beside it to the
            // nearer.
            let next = f16::from_bits(bits.wrapping_add(1)).to_f32();
            let middle = 0.5 * (got + next);
            if middle.is_finite() {
                for value in [middle, middle.next_up(), middle.next_down()] {
                    assert_eq!(f16_bits(value), f16::from_f32(value).to_bits(), "{value:e}");
                }
            }
        }
        for value in [65519.99, 65520.0, 1e30, f32::INFINITY, 2.9e-8, 2.98e-8, 1e-40, -0.0] {
            assert_eq!(f16_bits(value), f16::from_f32(value).to_bits(), "{value:e}");
        }
    }

    #[test]
    fn one_number_that_is_none_is_found_wherever_it_is() {
        for dtype in [DType::F32, DType::Bf16, DType::F16] {
            let mut values = vec![-65504.0; 5000];
            let is_finite = |values: &[f32]| {
                let mut bytes = vec![0; values.len() * dtype.size_bytes()];
                from_f32(dtype, values, &mut bytes);
                all_finite(dtype, &bytes)
            };
            assert!(is_finite(&values), "{dtype}");
            for at in [0, 1023, 1024, 2047, 2048, 4999] {
                for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                    let good = std::mem::replace(&mut values[at], bad);
                    assert!(!is_finite(&values), "{dtype}: {bad} at {at}");
                    values[at] = good;
                }
            }
        }
    }

    proptest! {
        #[test]
        fn bfloat16_rounds_as_the_half_crate_does(bits: u32) {
            let value = f32::from_bits(bits);
            let wanted = bf16::from_f32(value);
            let got = bf16::from_bits(bf16_bits(value));
            prop_assert!(got == wanted || (got.is_nan() && wanted.is_nan()));
        }

        #[test]
        fn float16_rounds_as_the_half_crate_does(bits: u32) {
            for value in [f32::from_bits(bits), f32::from_bits(0x3300_0000 + bits % 0x1500_0000)] {
                let (wanted, got) = (f16::from_f32(value), f16::from_bits(f16_bits(value)));
                prop_assert!(got == wanted || (got.is_nan() && wanted.is_nan()), "{value:e}: {got}, not {wanted}");
            }
        }

        #[test]
        fn what_a_dtype_can_hold_survives_a_round_trip(values in prop::collection::vec(-1e4f32..1e4, 0..70)) {
            for dtype in [DType::F32, DType::Bf16, DType::F16] {
                let rounded: Vec<f32> = values.iter().map(|&v| round(dtype, v)).collect();
                let mut bytes = vec![0; values.len() * dtype.size_bytes()];
                from_f32(dtype, &values, &mut bytes);
                prop_assert_eq!(&to_vec(dtype, &bytes), &rounded);
            }
        }
    }
}
