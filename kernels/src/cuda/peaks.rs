//! Measures the peak rates of a device, the yardsticks of `sepal selftest`.

use std::time::Instant;

use super::gpu::{Gpu, ctas};
use super::{Cuda, GpuError, Launch, Params};
use crate::ops::OpError;
use crate::sizes;

/// Repetitions, of which the best counts.
const TRIES: usize = 5;
/// What begins a page of host memory.
const HOST_PAGE: usize = 4096;
/// Warps of a CTA of `peak.cu` and `peak_wgmma.cu`.
const WARPS: usize = 8;
/// Products of one warp in one iteration of `peak.cu`, and multiplications and additions of one of
/// them.
const CHAINS: f64 = 8.0;
const PRODUCT_FLOPS: f64 = 2.0 * 16.0 * 8.0 * 16.0;
/// Those of `peak_wgmma.cu`, of which a warp has a quarter of each.
const WARPGROUP_CHAINS: f64 = 4.0;
const WARPGROUP_FLOPS: f64 = 2.0 * 16.0 * 128.0 * 16.0;

/// What it costs to start work on a device.
#[derive(Clone, Copy, Debug)]
pub struct LaunchCosts {
    /// Seconds of a kernel that does nothing, in a row of such.
    pub launch_s: f64,
    /// The same in a replayed recording; `None` where nothing can be recorded.
    pub replayed_s: Option<f64>,
}

/// Bytes per second between the memories of host and device.
#[derive(Clone, Copy, Debug)]
pub struct HostRates {
    /// Copies of plain host memory to the device, with all that the driver does for them.
    pub to_device: f64,
    /// Copies the other way.
    pub from_device: f64,
    /// Copies to host memory that was registered, as the mirror of KV pages is; `None` where none can be.
    pub to_registered: Option<f64>,
}

impl<G: Gpu> Cuda<G> {
    /// What `count` kernels that do nothing cost each.
    ///
    /// # Errors
    /// When the device fails.
    pub fn launch_costs(&mut self, count: usize) -> Result<LaunchCosts, OpError> {
        let out = self.scratch(WARPS * 32 * 4)?;
        let launches = |gpu: &G| {
            for _ in 0..count {
                let launch = Launch {
                    kernel: "peak_mma_bf16",
                    grid: [1, 1, 1],
                    cta: [WARPS as u32 * 32, 1, 1],
                    shared_bytes: 0,
                    params: Params::new().address(out.address()).count(0),
                };
                // SAFETY: `out` has a number for each thread.
                unsafe { gpu.launch(launch) }?;
            }
            Ok(())
        };
        let each = |seconds: f64| seconds / count.max(1) as f64;
        let launch_s = each(self.best_of(launches)?);
        let graph = self.gpu.begin_recording().and_then(|()| {
            let launched = launches(&self.gpu);
            self.gpu.end_recording().and_then(|graph| launched.map(|()| graph))
        });
        let replayed_s = match graph {
            // SAFETY: `out` lives until the last replay was waited for.
            Ok(graph) => Some(each(self.best_of(|gpu| unsafe { gpu.replay(&graph) })?)),
            Err(_) => None,
        };
        Ok(LaunchCosts { launch_s, replayed_s })
    }

    /// Rates of copies of `bytes` bytes between host and device.
    ///
    /// # Errors
    /// When the device has no memory for such a piece, or fails.
    pub fn host_rates(&mut self, bytes: usize) -> Result<HostRates, OpError> {
        let device = self.scratch(bytes)?;
        let mut host = vec![0u8; bytes + HOST_PAGE];
        let rate = |took: f64| bytes as f64 / took.max(1e-9);
        let (mut to_device, mut from_device) = (0.0f64, 0.0f64);
        for _ in 0..TRIES {
            let began = Instant::now();
            // SAFETY: `device` has that size.
            let done = unsafe { self.gpu.write(&host[..bytes], device.address()) };
            self.noted(done.and_then(|()| self.gpu.wait()))?;
            to_device = to_device.max(rate(began.elapsed().as_secs_f64()));
            let began = Instant::now();
            // SAFETY: as above.
            let done = unsafe { self.gpu.read(device.address(), &mut host[..bytes]) };
            self.noted(done)?;
            from_device = from_device.max(rate(began.elapsed().as_secs_f64()));
        }
        let start = host.as_mut_ptr();
        let start = start.wrapping_add(start.align_offset(HOST_PAGE));
        // SAFETY: `host` lives longer than the registration, and nobody looks at it meanwhile.
        let to_registered = match unsafe { self.gpu.register(start, bytes) } {
            Err(_) => None,
            Ok(registered) => {
                // SAFETY: both have that size.
                let copy = |gpu: &G| unsafe { gpu.copy(device.address(), registered, bytes) };
                let seconds = self.best_of(copy);
                // SAFETY: the copies were waited for, or the device is lost.
                unsafe { self.gpu.unregister(registered) };
                Some(rate(seconds?))
            }
        };
        Ok(HostRates { to_device, from_device, to_registered })
    }

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
            let costs = cuda.launch_costs(3).unwrap();
            assert!(costs.launch_s > 0.0 && costs.replayed_s.unwrap() > 0.0);
            let rates = cuda.host_rates(1 << 16).unwrap();
            assert!(rates.to_device > 0.0 && rates.from_device > 0.0);
            assert!(rates.to_registered.unwrap() > 0.0);
        }
    }
}
