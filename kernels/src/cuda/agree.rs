//! Whether warpgroups (`linear_wgmma.cu`, `attention_wgmma.cu`) and warps (`linear_gemv.cu`,
//! `linear_gemm.cu`, `attention_decode.cu`, `attention_prefill.cu`) give the same bits on a device.
//!
//! They add the same numbers in the same order of steps, but how tensor cores align, cut and round
//! within a step is documented for neither. A row's bits may not depend on its batch mates, and few
//! rows always go to warps; so products of many rows and attention of many tokens go to warpgroups
//! only where a sample is the same both ways. Each format and dtype of products, and each head
//! dimension and dtype of attention, has a kernel and a sample of its own and is decided by itself.
//! The choice depends on the device alone, never on load. A process of its own takes the samples,
//! since a kernel that faults or hangs takes its process with it; a worker only follows what was
//! found.

mod attention;

use std::sync::Arc;

use shared::config::QuantType;
use shared::dtype::DType;
use shared::warpgroups::{
    SampleLine, SampleVerdict, Verdicts, WarpgroupKernel, WarpgroupKernels, Warpgroups,
};

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
    /// Takes the samples of all kernels that may be launched, and follows what they show. What it
    /// found is never a failure.
    ///
    /// # Errors
    /// When the device has no memory for a sample, or fails.
    pub fn choose_products(&mut self) -> Result<Warpgroups, OpError> {
        if !self.gpu.properties().has_wgmma() {
            return Ok(Warpgroups::Missing);
        }
        let mut verdicts = Verdicts::new();
        let harmless = self.harmless_warpgroups();
        self.sample_warpgroups(harmless, |line| {
            if let SampleLine::Found(kernel, verdict) = line {
                verdicts.insert(kernel, verdict);
            }
        })?;
        let found = Warpgroups::Sampled(verdicts);
        self.follow(&found);
        Ok(found)
    }

    /// Computes a sample for each of `kernels` by warps and by warpgroups, one after the other, and
    /// tells when one begins and what it showed.
    ///
    /// # Errors
    /// When the device has no memory for a sample, or fails.
    pub fn sample_warpgroups(
        &mut self,
        kernels: WarpgroupKernels,
        mut tell: impl FnMut(SampleLine),
    ) -> Result<(), OpError> {
        // With a pool of its own, which leaves no memory behind.
        let mut sampled = Cuda::with_pool(Arc::clone(&self.gpu), true);
        sampled.watch(self.watch);
        for kernel in kernels.iter() {
            tell(SampleLine::Samples(kernel));
            let [warps, warpgroups] = match kernel {
                WarpgroupKernel::Product(quant, dtype) => sampled.both_ways(quant, dtype),
                WarpgroupKernel::Attention(head_dim, dtype) => {
                    sampled.attention_both_ways(attention::case(head_dim.into(), dtype))
                }
            }?;
            let verdict = match are_same(&warps, &warpgroups) {
                true => SampleVerdict::SameBits,
                false => SampleVerdict::OtherBits,
            };
            tell(SampleLine::Found(kernel, verdict));
        }
        Ok(())
    }

    /// Follows what was found on this device. A kernel for warpgroups that failed, or of which
    /// nothing is known, is not launched from now on, not even for comparisons.
    pub fn follow(&mut self, found: &Warpgroups) {
        if *found != Warpgroups::Missing {
            self.harmless = found.harmless();
        }
        self.warpgroups = match self.gpu.properties().has_wgmma() {
            true => found.used(),
            false => WarpgroupKernels::NONE,
        };
    }

    /// Does without these kernels for warpgroups.
    pub fn leave_alone(&mut self, kernels: WarpgroupKernels) {
        self.harmless = self.harmless.without(kernels);
        self.warpgroups = self.warpgroups.without(kernels);
    }

    /// The kernels for warpgroups that the device has and that may be launched.
    pub fn harmless_warpgroups(&self) -> WarpgroupKernels {
        match self.gpu.properties().has_wgmma() {
            true => self.harmless,
            false => WarpgroupKernels::NONE,
        }
    }

    /// The kernels for warpgroups that are used.
    pub fn used_warpgroups(&self) -> WarpgroupKernels {
        self.warpgroups
    }

    /// Uses these kernels for warpgroups instead of those for warps, for comparisons; the ones that
    /// were used before. A device that has no warpgroups refuses their launches.
    pub fn use_warpgroups(&mut self, kernels: WarpgroupKernels) -> WarpgroupKernels {
        std::mem::replace(&mut self.warpgroups, kernels)
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
        self.warpgroups = match by_warpgroups {
            true => WarpgroupKernels::ALL,
            false => WarpgroupKernels::NONE,
        };
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

    /// The same verdict about every kernel.
    fn all(verdict: &SampleVerdict) -> Warpgroups {
        let each = |kernel| (kernel, verdict.clone());
        Warpgroups::Sampled(WarpgroupKernel::ALL.into_iter().map(each).collect())
    }

    #[test]
    fn warpgroups_are_used_where_a_sample_is_the_same() {
        let mut cuda = Cuda::new(Emu::new(2));
        let before = cuda.taken();
        assert_eq!(cuda.choose_products().unwrap(), all(&SampleVerdict::SameBits));
        assert_eq!(cuda.used_warpgroups(), WarpgroupKernels::ALL);
        assert_eq!(cuda.taken(), before, "the sample leaves no memory behind");
    }

    #[test]
    fn each_sample_is_the_same_both_ways_and_shows_another_rounding() {
        let (mut same, mut other) =
            (Cuda::new(Emu::new(2)), Cuda::new(Emu::new(2).with_other_rounding()));
        for kernel in WarpgroupKernel::ALL {
            let mut verdicts = Vec::new();
            let mut note = |line| {
                if let SampleLine::Found(of, verdict) = line {
                    verdicts.push((of, verdict));
                }
            };
            let one = [kernel].into_iter().collect();
            same.sample_warpgroups(one, &mut note).unwrap();
            other.sample_warpgroups(one, &mut note).unwrap();
            let expected = [(kernel, SampleVerdict::SameBits), (kernel, SampleVerdict::OtherBits)];
            assert_eq!(verdicts, expected);
            if let WarpgroupKernel::Attention(head_dim, dtype) = kernel {
                let case = attention::case(head_dim.into(), dtype);
                let values = same.attention_both_ways(case).unwrap();
                assert!(values.iter().flatten().all(|v| v.is_finite()), "{kernel}");
            }
        }
    }

    #[test]
    fn each_sample_launches_the_kernel_that_it_is_about_and_no_other_of_warpgroups() {
        static LAUNCHED: std::sync::Mutex<Vec<&str>> = std::sync::Mutex::new(Vec::new());
        let mut cuda = Cuda::new(Emu::new(2));
        cuda.watch(Some(|kernel| LAUNCHED.lock().unwrap().push(kernel)));
        for kernel in WarpgroupKernel::ALL {
            cuda.sample_warpgroups([kernel].into_iter().collect(), |_| ()).unwrap();
            let launched = std::mem::take(&mut *LAUNCHED.lock().unwrap());
            let is_other = |name: &&&str| name.contains("_wgmma_") && !name.contains("_wgmma_x_");
            let of_warpgroups: Vec<_> = launched.iter().filter(is_other).collect();
            assert_eq!(of_warpgroups, [&kernel.to_string()]);
        }
    }

    #[test]
    fn warps_are_used_where_a_sample_differs_or_there_are_no_warpgroups() {
        let mut cuda = Cuda::new(Emu::new(2).with_other_rounding());
        assert_eq!(cuda.choose_products().unwrap(), all(&SampleVerdict::OtherBits));
        assert_eq!(cuda.used_warpgroups(), WarpgroupKernels::NONE);
        let mut cuda = Cuda::new(Emu::new(2).with_architecture(80));
        assert_eq!(cuda.choose_products().unwrap(), Warpgroups::Missing);
        assert_eq!(cuda.used_warpgroups(), WarpgroupKernels::NONE);
    }

    #[test]
    fn what_was_found_is_followed_kernel_by_kernel() {
        let [plain, f16, int8, ..] = WarpgroupKernel::ALL;
        let failed = SampleVerdict::Failed("it faults".to_owned());
        let some =
            [(plain, SampleVerdict::SameBits), (f16, SampleVerdict::OtherBits), (int8, failed)];
        let found = Warpgroups::Sampled(some.into_iter().collect());
        let mut cuda = Cuda::new(Emu::new(2));
        cuda.follow(&found);
        assert_eq!(cuda.used_warpgroups(), [plain].into_iter().collect());
        assert_eq!(cuda.harmless_warpgroups(), [plain, f16].into_iter().collect());
        cuda.leave_alone([plain].into_iter().collect());
        assert_eq!(cuda.used_warpgroups(), WarpgroupKernels::NONE);
        assert_eq!(cuda.harmless_warpgroups(), [f16].into_iter().collect());
        let mut cuda = Cuda::new(Emu::new(2));
        cuda.follow(&Warpgroups::Unknown("no sample was taken".to_owned()));
        assert_eq!(cuda.harmless_warpgroups(), WarpgroupKernels::NONE);
        let mut old = Cuda::new(Emu::new(2).with_architecture(80));
        old.follow(&all(&SampleVerdict::SameBits));
        assert_eq!(old.used_warpgroups(), WarpgroupKernels::NONE);
    }

    #[test]
    fn a_kernel_that_falls_back_takes_no_other_with_it() {
        static LAUNCHED: std::sync::Mutex<Vec<&str>> = std::sync::Mutex::new(Vec::new());
        let mut cuda = Cuda::new(Emu::new(2));
        let [plain, ..] = WarpgroupKernel::ALL;
        cuda.use_warpgroups(WarpgroupKernels::ALL.without([plain].into_iter().collect()));
        cuda.watch(Some(|kernel| LAUNCHED.lock().unwrap().push(kernel)));
        let weights = numbers(1, 128, 64, DType::Bf16);
        let x = numbers(2, ROWS, 64, DType::Bf16);
        for (dtype, expected) in [(DType::Bf16, "linear_gemm_"), (DType::F16, "linear_wgmma_")] {
            let mut bytes = vec![0; weights.len() * 2];
            convert::from_f32(dtype, &weights, &mut bytes);
            let view = WeightView::quantized(QuantType::None, dtype, 128, 64, &bytes).unwrap();
            let matrix = cuda.matrix(view).unwrap();
            let (mut on_device, mut out) = (cuda.buffer(x.len()), cuda.buffer(ROWS * 128));
            cuda.upload(&x, &mut on_device).unwrap();
            let (x, out) = (&*on_device, &mut *out);
            let args = Linear { x, weight: matrix, bias: None, out, rows: ROWS };
            linear::launch(&mut cuda, args).unwrap();
            let launched = std::mem::take(&mut *LAUNCHED.lock().unwrap());
            assert!(launched.iter().any(|name| name.starts_with(expected)), "{launched:?}");
        }
    }
}
