//! The devices that a model is made ready for: their memory and their relative speeds.

use std::hint::black_box;
use std::time::{Duration, Instant};

use kernels::cuda::driver::{CudaDriver, OpenError};
use kernels::cuda::scratch;
use model::BlockSpec;
use model::rates::{RateCache, device_name, threads};
use model::sizing::{unit_tokens, work_bytes};
use shared::config::{Device, WorkerConfig};
use shared::model::ModelFacts;
use shared::survey::DeviceMemory;

/// Memory that the emulator pretends to have.
const EMULATED_BYTES: u64 = 8 << 30;

/// Memory of those of `devices` that have their own, of which no worker is to take more than
/// `most_bytes`. `held` is what each device runs of the blocks of `whole`: their share, of ranks of
/// groups. Workers on one CUDA device have equal parts of its memory.
///
/// # Errors
/// When a device cannot be asked.
pub fn device_memory(
    devices: &[Device],
    most_bytes: Option<u64>,
    whole: &BlockSpec,
    held: impl Fn(usize) -> BlockSpec,
) -> Result<Vec<DeviceMemory>, (u32, OpenError)> {
    let tokens = unit_tokens(whole);
    let mut found = Vec::new();
    for (index, &device) in devices.iter().enumerate() {
        let free = match device {
            Device::Cpu | Device::Node(_) => continue,
            // Each worker has an emulator of its own.
            Device::Emulator(_) => EMULATED_BYTES,
            Device::Cuda(ordinal) => {
                let (free, _) = CudaDriver::memory_of(ordinal).map_err(|e| (ordinal, e))?;
                let workers = devices.iter().filter(|other| **other == device).count();
                free as u64 / workers.max(1) as u64
            }
        };
        let spec = held(index);
        let scratch = scratch::planned_bytes(&spec.dimensions(), tokens);
        found.push(DeviceMemory {
            device,
            free_bytes: most_bytes.map_or(free, |most| most.min(free)),
            work_bytes: work_bytes(&spec, tokens, scratch),
        });
    }
    Ok(found)
}

/// Names of groups of devices.
pub fn group_names(groups: &[Vec<Device>], worker: &WorkerConfig) -> Vec<String> {
    groups.iter().map(|group| names(group, worker).join(" + ")).collect()
}

/// Names of `devices`, with what else changes their speed.
pub fn names(devices: &[Device], worker: &WorkerConfig) -> Vec<String> {
    devices.iter().map(|&device| device_name(device, worker)).collect()
}

/// Relative speeds of `devices` on this model: what their workers measured at an earlier start,
/// unless one of them never did; else how fast each reads memory, which bounds decoding.
pub fn speeds(devices: &[Device], facts: &ModelFacts, worker: &WorkerConfig) -> Vec<f64> {
    let first = devices.first();
    let is_first = |device: &Device| Some(device) == first;
    let is_emulated = |device: &Device| matches!(device, Device::Emulator(_));
    // Workers on the processor have as many threads each, emulated devices too.
    if devices.iter().all(|device| device.is_processor())
        || devices.iter().all(is_emulated)
        || devices.iter().all(is_first)
    {
        return vec![1.0; devices.len()];
    }
    let folder = worker.rates_dir.as_ref().filter(|_| !worker.measure_anew);
    let cache = folder.map(|folder| RateCache::new(folder, Duration::ZERO));
    if let Some(rates) = cache.and_then(|cache| cache.kept(facts, devices.chunks(1), worker)) {
        return rates.iter().map(|rate| rate.inference_rps).collect();
    }
    let of_device = |&device: &Device| match device {
        Device::Cpu | Device::Node(_) | Device::Emulator(_) => processor_bandwidth(threads(worker)),
        Device::Cuda(ordinal) => CudaDriver::bandwidth_of(ordinal).unwrap_or(0.0),
    };
    devices.iter().map(of_device).collect()
}

/// Bytes per second that the processor reads with so many threads, all of them at once.
pub fn processor_bandwidth(threads: usize) -> f64 {
    const BYTES: usize = 256 << 20;
    const PASSES: usize = 3;
    let words = vec![1u64; BYTES / size_of::<u64>()];
    let piece = words.len().div_ceil(threads.max(1));
    let pass = || {
        let start = Instant::now();
        std::thread::scope(|scope| {
            for part in words.chunks(piece) {
                scope.spawn(move || black_box(part.iter().fold(0u64, |sum, word| sum ^ word)));
            }
        });
        start.elapsed()
    };
    let fastest = (0..PASSES).map(|_| pass()).min().unwrap_or_default();
    BYTES as f64 / fastest.as_secs_f64().max(1e-9)
}

#[cfg(test)]
mod tests {
    use model::rates::{Freshness, Key};
    use shared::survey::Capacity;

    use testkit::facts::facts;
    use testkit::models::llama_config;

    use super::*;

    #[test]
    fn the_emulator_has_what_it_is_given_and_the_processor_is_left_out() {
        let spec = BlockSpec::from_config(&llama_config(1)).unwrap();
        let devices = [Device::Cpu, Device::Emulator(0)];
        for (most, wanted) in [(None, 8 << 30), (Some(1 << 30), 1 << 30), (Some(1 << 40), 8 << 30)]
        {
            let found = device_memory(&devices, most, &spec, |_| spec.clone()).unwrap();
            assert_eq!(found.len(), 1);
            assert_eq!((found[0].device, found[0].free_bytes), (Device::Emulator(0), wanted));
        }
    }

    #[test]
    fn speeds_are_those_that_were_measured_else_bandwidths() {
        let folder = tempfile::tempdir().unwrap();
        let worker = WorkerConfig {
            rates_dir: Some(folder.path().to_owned()),
            threads: 1,
            ..WorkerConfig::default()
        };
        let devices = [Device::Cpu, Device::Emulator(0)];
        assert_eq!(speeds(&[Device::Cpu; 3], &facts(), &worker), [1.0; 3]);
        assert_eq!(speeds(&[Device::Node(0), Device::Node(1)], &facts(), &worker), [1.0; 2]);
        let emulated = [Device::Emulator(0), Device::Emulator(1)];
        assert_eq!(speeds(&emulated, &facts(), &worker), [1.0; 2]);
        assert!(speeds(&devices, &facts(), &worker).iter().all(|rate| *rate > 1e6));
        let cache = RateCache::new(folder.path(), Duration::ZERO);
        for (device, inference_rps) in devices.into_iter().zip([500.0, 20.0]) {
            let key = Key::of(&facts(), &[device], &worker);
            let rates = Capacity { inference_rps, forward_rps: 1.0 };
            let measured = || Ok::<_, std::convert::Infallible>(rates);
            cache.rates(&key, Freshness::Kept, measured).unwrap();
        }
        assert_eq!(speeds(&devices, &facts(), &worker), [500.0, 20.0]);
        let anew = WorkerConfig { measure_anew: true, ..worker };
        assert_ne!(speeds(&devices, &facts(), &anew), [500.0, 20.0]);
    }
}
