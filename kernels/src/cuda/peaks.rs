//! Measures the peak rates of a device, the yardsticks of `sepal selftest`.

use super::gpu::{Gpu, ctas};
use super::{Cuda, GpuError, Launch, Params};
use crate::ops::OpError;
use crate::sizes;

/// Repetitions, of which the best counts.
const TRIES: usize = 5;
/// Warps of a CTA of `peak.cu` and `peak_wgmma.cu`.
const WARPS: usize = 8;
/// Products of one warp in one iteration of `peak.cu`, and multiplications and additions of one of
/// them.
const CHAINS: f64 = 8.0;
const PRODUCT_FLOPS: f64 = 2.0 * 16.0 * 8.0 * 16.0;
/// Those of `peak_wgmma.cu`, of which a warp has a quarter of each.
const WARPGROUP_CHAINS: f64 = 4.0;
const WARPGROUP_FLOPS: f64 = 2.0 * 16.0 * 128.0 * 16.0;

impl<G: Gpu> Cuda<G> {
    /// Bytes per second, read and written together, of copies of `bytes` bytes within the device.
    ///
    /// # Errors
    /// When the device has no memory for two such pieces, or fails.
    pub fn copy_rate(&mut self, bytes: usize) -> Result<f64, OpError> {
        let (from, to) = (self.scratch(bytes)?, self.scratch(bytes)?);
        let seconds = self.best_of(|gpu| {
            // SAFETY: two pieces of that size.
            unsafe { gpu.copy(from.address(), to.address(), bytes) }
        })?;
        Ok(2.0 * bytes as f64 / seconds)
    }

    /// Multiplications and additions per second of the tensor cores on bfloat16: by `wgmma` where a
    /// device has it, else by `mma.sync`.
    ///
    /// # Errors
    /// When the device fails.
    pub fn matrix_rate(&mut self, iterations: usize) -> Result<f64, OpError> {
        let (kernel, per_warp, shared_bytes) = match !self.harmless_warpgroups().is_empty() {
            true => {
                ("peak_wgmma_bf16", WARPGROUP_CHAINS * WARPGROUP_FLOPS, sizes::peak_wgmma::SHARED)
            }
            false => ("peak_mma_bf16", CHAINS * PRODUCT_FLOPS, 0),
        };
        let count = self.gpu.properties().multiprocessors as usize * 4;
        let out = self.scratch(count * WARPS * 32 * 4)?;
        let launch = Launch {
            kernel,
            grid: [ctas(count), 1, 1],
            cta: [WARPS as u32 * 32, 1, 1],
            shared_bytes: ctas(shared_bytes),
            params: Params::new().address(out.address()).count(iterations),
        };
        let seconds = self.best_of(|gpu| {
            // SAFETY: `out` has a number for each thread.
            unsafe { gpu.launch(launch) }
        })?;
        Ok((count * WARPS * iterations) as f64 * per_warp / seconds)
    }

    /// Seconds of the fastest run.
    fn best_of(&mut self, run: impl Fn(&G) -> Result<(), GpuError>) -> Result<f64, OpError> {
        self.health()?;
        let mut best = f64::INFINITY;
        for _ in 0..TRIES {
            let timed = self.timed(&run);
            best = best.min(self.noted(timed)?);
        }
        Ok(best.max(1e-9))
    }

    fn timed(&self, run: impl Fn(&G) -> Result<(), GpuError>) -> Result<f64, GpuError> {
        let begin = self.gpu.record()?;
        run(&self.gpu)?;
        let end = self.gpu.record()?;
        self.gpu.seconds(&begin, &end)
    }
}

#[cfg(all(test, feature = "emu"))]
mod tests {
    use super::*;
    use crate::cuda::emu::Emu;

    #[test]
    fn yardsticks_are_measured() {
        for architecture in [80, 90] {
            let mut cuda = Cuda::new(Emu::new(1).with_architecture(architecture));
            assert!(cuda.copy_rate(1 << 16).unwrap() > 0.0);
            assert!(cuda.matrix_rate(1).unwrap() > 0.0);
        }
    }
}
