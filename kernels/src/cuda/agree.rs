//! Whether warpgroups (`linear_wgmma.cu`, `attention_wgmma.cu`) and warps (`linear_gemv.cu`,
//! `linear_gemm.cu`, `attention_decode.cu`, `attention_prefill.cu`) give the same bits on a device.
//!
//! They add the same numbers in the same order of steps, but how tensor cores align, cut and round
//! within a step is documented for neither. A row's bits may not depend on its batch mates, and few
//! rows always go to warps; so products of many rows and attention of many tokens go to warpgroups
//! only where a sample of both is the same both ways. The choice depends on the device alone, never
//! on load. A process of its own takes the sample, since a kernel that faults or hangs takes its
//! process with it; a worker only follows what was found.

mod attention;

use std::sync::Arc;

use shared::config::QuantType;
use shared::dtype::DType;
use shared::warpgroups::Warpgroups;

use super::ops::linear;
use super::{Cuda, Gpu, Matrix};
use crate::ops::{Linear, OpError, convert};
use crate::quant::{int8, nf4};
use crate::tensor::WeightView;

/// Rows and inputs of the sample: more than few rows; chunks of blocks and one that is left, five
/// segments; and each stage of the rings filled again and nearly all of them twice, for which CTAs
/// of a cluster wait for each other (`linear_wgmma.cuh`).
const ROWS: usize = 40;
const INPUTS: usize = 1088;

impl<G: Gpu> Cuda<G> {
    /// Computes a sample both ways and takes warpgroups for products of many rows and attention of
    /// many tokens if all bits are the same. What it found is never [`Warpgroups::Failed`].
    ///
    /// # Errors
    /// When the device has no memory for the sample, or fails.
    pub fn choose_products(&mut self) -> Result<Warpgroups, OpError> {
        if !self.has_warpgroups() {
            return Ok(Warpgroups::Missing);
        }
        // With a pool of its own, which leaves no memory behind.
        let mut sampled = Cuda::with_pool(Arc::clone(&self.gpu), true);
        sampled.watch(self.watch);
        let mut is_same = true;
        for (quant, dtype) in [
            (QuantType::None, DType::Bf16),
            (QuantType::None, DType::F16),
            (QuantType::Int8, DType::Bf16),
            (QuantType::Nf4, DType::Bf16),
            (QuantType::Nf4, DType::F16),
        ] {
            let [warps, warpgroups] = sampled.both_ways(quant, dtype)?;
            is_same &= are_same(&warps, &warpgroups);
        }
        for case in attention::CASES {
            let [warps, warpgroups] = sampled.attention_both_ways(case)?;
            is_same &= are_same(&warps, &warpgroups);
        }
        self.by_warpgroups = is_same;
        Ok(match is_same {
            true => Warpgroups::SameBits,
            false => Warpgroups::OtherBits,
        })
    }

    /// Follows what another process found on this device. Where warpgroups failed, nothing is
    /// launched for them from now on, not even for comparisons.
    pub fn follow(&mut self, found: &Warpgroups) {
        self.gave_warpgroups_up |= matches!(found, Warpgroups::Failed(_));
        self.by_warpgroups = *found == Warpgroups::SameBits && self.has_warpgroups();
    }

    /// Whether the device has warpgroups that may be used.
    pub fn has_warpgroups(&self) -> bool {
        self.gpu.properties().has_wgmma() && !self.gave_warpgroups_up
    }

    /// Whether products of many rows go to warpgroups.
    pub fn uses_warpgroups(&self) -> bool {
        self.by_warpgroups
    }

    /// Sends products of many rows to warpgroups or to warps, for comparisons; what it was before.
    /// A device that has no warpgroups refuses the products.
    pub fn use_warpgroups(&mut self, on: bool) -> bool {
        std::mem::replace(&mut self.by_warpgroups, on)
    }

    /// The product of the sample by warps and by warpgroups.
    fn both_ways(&mut self, quant: QuantType, dtype: DType) -> Result<[Vec<f32>; 2], OpError> {
        // A tile of outputs for every fourth multiprocessor.
        let outputs = self.gpu.properties().multiprocessors as usize * 32;
        let weights = numbers(1, outputs, INPUTS, dtype);
        let mut bytes = vec![0; weights.len() * 2];
        match quant {
            QuantType::Nf4 => bytes = nf4::encode(&weights),
            QuantType::Int8 => bytes = int8::encode(&weights, INPUTS),
            QuantType::None => convert::from_f32(dtype, &weights, &mut bytes),
        }
        let shape = OpError::Shape { op: "sample of products", what: "a matrix" };
        let view =
            WeightView::quantized(quant, dtype, outputs, INPUTS, &bytes).map_err(|_| shape)?;
        let matrix = self.matrix(view)?;
        let x = numbers(2, ROWS, INPUTS, dtype);
        let by_warps = self.sample(&matrix, &x, outputs, false)?;
        Ok([by_warps, self.sample(&matrix, &x, outputs, true)?])
    }

    fn sample(
        &mut self,
        matrix: &Matrix<G>,
        x: &[f32],
        outputs: usize,
        by_warpgroups: bool,
    ) -> Result<Vec<f32>, OpError> {
        self.by_warpgroups = by_warpgroups;
        let (mut on_device, mut out) = (self.buffer(x.len()), self.buffer(ROWS * outputs));
        self.upload(x, &mut on_device)?;
        let args = Linear {
            x: &*on_device,
            weight: matrix.clone(),
            bias: None,
            out: &mut *out,
            rows: ROWS,
        };
        linear::launch(self, args)?;
        let mut values = vec![0.0; ROWS * outputs];
        self.download(&out, &mut values)?;
        Ok(values)
    }
}

/// The same bits throughout. A NaN is equal to a NaN of the same bits.
fn are_same(left: &[f32], right: &[f32]) -> bool {
    let bits = |values: &[f32]| values.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
    bits(left) == bits(right)
}

/// `rows` rows of `width` numbers in which other ways to add show. By the number of the row: values
/// of one size; of very different sizes, so that small terms lose their ends; large
/// ones that cancel each other among small ones; and so small that products are subnormal.
fn numbers(seed: u64, rows: usize, width: usize, dtype: DType) -> Vec<f32> {
    // Powers of two that the type has on either side of 1, but for what sums need.
    let (widest, least) = match dtype {
        DType::F16 => (7, -16),
        DType::F32 | DType::Bf16 => (24, -68),
    };
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 32) as u32
    };
    let mut values = Vec::with_capacity(rows * width);
    for row in 0..rows {
        let mut last = 0.0;
        for input in 0..width {
            let value = (next() >> 8) as f32 / (1 << 23) as f32 - 1.0;
            let power = (next() % (2 * widest as u32 + 1)) as i32 - widest;
            last = match row % 4 {
                0 => value,
                1 => value * 2f32.powi(power),
                2 if input % 3 == 0 => value * 2f32.powi(widest),
                2 if input % 3 == 1 => -last,
                2 => value * 2f32.powi(power.min(0)),
                _ => value * 2f32.powi(least + power % 4),
            };
            values.push(last);
        }
    }
    values
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_bit_is_a_difference_and_so_is_the_sign_of_zero() {
        let one = f32::from_bits(1.0f32.to_bits() + 1);
        assert!(are_same(&[1.0, f32::NAN], &[1.0, f32::NAN]));
        for (left, right) in [(1.0, one), (0.0, -0.0), (f32::NAN, 1.0)] {
            assert!(!are_same(&[2.0, left], &[2.0, right]), "{left} {right}");
        }
        assert!(!are_same(&[1.0], &[1.0, 1.0]));
    }

    #[test]
    fn the_sample_has_sizes_that_differ_and_numbers_that_are_finite() {
        for dtype in [DType::Bf16, DType::F16] {
            let values = numbers(1, 8, INPUTS, dtype);
            let size = |row: usize| {
                let row = &values[row * INPUTS..(row + 1) * INPUTS];
                row.iter().fold(0.0f32, |most, v| most.max(v.abs()))
            };
            let most = if dtype == DType::F16 { 65504.0 } else { 1e9 };
            assert!(values.iter().all(|v| v.is_finite() && v.abs() < most));
            assert!(size(1) > 32.0 * size(0) && size(3) < size(0) / 1000.0);
            let cancels = |at: usize| values[2 * INPUTS + at] == -values[2 * INPUTS + at + 1];
            assert!(cancels(0) && cancels(3));
        }
    }
}

#[cfg(all(test, feature = "emu"))]
mod emulated {
    use super::*;
    use crate::cuda::emu::Emu;

    #[test]
    fn warpgroups_are_used_where_a_sample_is_the_same() {
        let mut cuda = Cuda::new(Emu::new(2));
        let before = cuda.taken();
        assert_eq!(cuda.choose_products().unwrap(), Warpgroups::SameBits);
        assert!(cuda.uses_warpgroups());
        assert_eq!(cuda.taken(), before, "the sample leaves no memory behind");
    }

    #[test]
    fn attention_is_the_same_both_ways_and_shows_another_rounding() {
        let mut same = Cuda::new(Emu::new(2));
        let mut other = Cuda::new(Emu::new(2).with_other_rounding());
        for case in attention::CASES {
            let [warps, warpgroups] = same.attention_both_ways(case).unwrap();
            assert!(warps.iter().all(|v| v.is_finite()), "{case:?}");
            assert!(are_same(&warps, &warpgroups), "{case:?}");
            let [warps, warpgroups] = other.attention_both_ways(case).unwrap();
            assert!(!are_same(&warps, &warpgroups), "{case:?}");
        }
    }

    #[test]
    fn warps_are_used_where_a_sample_differs_or_there_are_no_warpgroups() {
        let mut cuda = Cuda::new(Emu::new(2).with_other_rounding());
        assert_eq!(cuda.choose_products().unwrap(), Warpgroups::OtherBits);
        assert!(!cuda.uses_warpgroups());
        let mut cuda = Cuda::new(Emu::new(2).with_architecture(80));
        assert_eq!(cuda.choose_products().unwrap(), Warpgroups::Missing);
        assert!(!cuda.uses_warpgroups());
    }

    #[test]
    fn what_was_found_is_followed_as_far_as_the_device_has_warpgroups() {
        for (found, is_used, has_them) in [
            (Warpgroups::SameBits, true, true),
            (Warpgroups::OtherBits, false, true),
            (Warpgroups::Missing, false, true),
            (Warpgroups::Failed("it faults".to_owned()), false, false),
        ] {
            let mut cuda = Cuda::new(Emu::new(2));
            cuda.follow(&found);
            let is = (cuda.uses_warpgroups(), cuda.has_warpgroups());
            assert_eq!(is, (is_used, has_them), "{found}");
        }
        let mut old = Cuda::new(Emu::new(2).with_architecture(80));
        old.follow(&Warpgroups::SameBits);
        assert!(!old.uses_warpgroups());
    }
}
