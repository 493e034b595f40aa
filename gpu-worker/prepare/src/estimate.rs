//! How fast a block would run on devices on which this model was never measured: computed from the
//! rates of memory and arithmetic, and called an estimate wherever it is shown. The first start
//! measures, and its result replaces the estimate.

use std::time::Instant;

use kernels::cuda::driver::CudaDriver;
use kernels::ops::linear::Linear;
use kernels::{Backend, Cpu, DType, WeightView};
use model::rates::threads;
use model::sizing::token_flops;
use model::survey::Estimate;
use model::{BlockSpec, Mlp};
use shared::config::{Device, WorkerConfig};
use shared::model::ModelFacts;
use shared::survey::Capacity;

use crate::devices::processor_bandwidth;

/// Share of the rate of memory that a decode step is expected to reach.
const MEMORY_SHARE: f64 = 0.8;

/// Share of the rate of arithmetic that a long batch is expected to reach: on processors, whose rate
/// is that of a product of matrices, and on GPUs, whose rate is that of the data sheet.
const PRODUCT_SHARE: f64 = 0.7;
const PEAK_SHARE: f64 = 0.4;

/// Sides of the matrix whose product with [`ROWS`] rows is timed.
const SIDE: usize = 1024;
const ROWS: usize = 256;

/// Timed products, of which the fastest counts.
const PASSES: usize = 3;

/// What a device does at best.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Peak {
    bytes_per_s: f64,
    /// Multiplications and additions, as far as blocks are expected to reach them.
    flops_per_s: f64,
}

/// The rates of devices, each found out once.
#[derive(Debug, Default)]
pub struct Peaks {
    known: Vec<(Device, Option<Peak>)>,
}

impl Peaks {
    /// The speed of the slowest of `groups`; `None` if nothing is known of a device.
    pub fn estimate(
        &mut self,
        spec: &BlockSpec,
        facts: &ModelFacts,
        groups: &[Vec<Device>],
        worker: &WorkerConfig,
    ) -> Option<Estimate> {
        let mut slowest: Option<(Capacity, Peak)> = None;
        for group in groups {
            let mut sum = Peak { bytes_per_s: 0.0, flops_per_s: 0.0 };
            for &device in group {
                let peak = self.of(device, worker)?;
                sum.bytes_per_s += peak.bytes_per_s;
                sum.flops_per_s += peak.flops_per_s;
            }
            let capacity = capacity(spec, facts.block_bytes, &sum);
            let is_slower =
                |(other, _): &(Capacity, Peak)| capacity.forward_rps < other.forward_rps;
            if slowest.as_ref().is_none_or(is_slower) {
                slowest = Some((capacity, sum));
            }
        }
        let (capacity, peak) = slowest?;
        let has_gpu = groups.iter().flatten().any(|device| matches!(device, Device::Cuda(_)));
        let how = if has_gpu { "clocks of the device" } else { "a short test of the processor" };
        let basis = format!(
            "{:.0} GB/s of memory and {:.2} TFLOP/s of matrix products in each group, from {how}; serving measures it",
            peak.bytes_per_s / 1e9,
            peak.flops_per_s / 1e12
        );
        Some(Estimate { capacity, basis })
    }

    fn of(&mut self, device: Device, worker: &WorkerConfig) -> Option<Peak> {
        // All processors are asked alike.
        let device = if device.is_processor() { Device::Cpu } else { device };
        if let Some((_, known)) = self.known.iter().find(|(known, _)| *known == device) {
            return *known;
        }
        let peak = match device {
            Device::Cpu | Device::Node(_) => processor(threads(worker)),
            Device::Cuda(ordinal) => gpu(ordinal),
            // An emulator has the speed of no device.
            Device::Emulator(_) => None,
        };
        self.known.push((device, peak));
        peak
    }
}

/// What a block of `block_bytes` does on such a device: one token reads every weight that it is
/// multiplied with once, many tokens wait for the arithmetic.
fn capacity(spec: &BlockSpec, block_bytes: u64, peak: &Peak) -> Capacity {
    let share = active_share(spec);
    let bytes = (block_bytes as f64 * share).max(1.0);
    let inference_rps = MEMORY_SHARE * peak.bytes_per_s / bytes;
    let forward_rps = peak.flops_per_s / (token_flops(spec) as f64 * share).max(1.0);
    Capacity { inference_rps, forward_rps: forward_rps.max(inference_rps) }
}

/// Share of a block's weights that one token is multiplied with: all but those of the experts that
/// it does not go through.
fn active_share(spec: &BlockSpec) -> f64 {
    let Mlp::Experts(mlp) = &spec.mlp else {
        return 1.0;
    };
    let one = 3.0 * spec.hidden as f64 * spec.mlp.intermediate() as f64;
    let weights = token_flops(spec) as f64 / 2.0;
    let idle = mlp.experts.len().saturating_sub(mlp.chosen) as f64 * one;
    ((weights - idle) / weights).clamp(0.0, 1.0)
}

fn gpu(ordinal: u32) -> Option<Peak> {
    let bytes_per_s = CudaDriver::bandwidth_of(ordinal).ok().filter(|rate| *rate > 0.0)?;
    let flops_per_s = CudaDriver::matrix_rate_of(ordinal).ok().filter(|rate| *rate > 0.0)?;
    Some(Peak { bytes_per_s, flops_per_s: PEAK_SHARE * flops_per_s })
}

/// Reads memory and multiplies matrices for about a tenth of a second.
fn processor(threads: usize) -> Option<Peak> {
    let mut cpu = Cpu::new(threads.clamp(1, 256));
    // 1.0 in bfloat16.
    let weights = [0x80, 0x3f].repeat(SIDE * SIDE);
    let (input, mut output) = (vec![0.5f32; ROWS * SIDE], vec![0f32; ROWS * SIDE]);
    let mut fastest = f64::INFINITY;
    for _ in 0..=PASSES {
        let weight = WeightView::new(DType::Bf16, SIDE, SIDE, &weights).ok()?;
        let args = Linear {
            x: input.as_slice(),
            weight,
            bias: None,
            out: output.as_mut_slice(),
            rows: ROWS,
        };
        let start = Instant::now();
        cpu.linear(args).ok()?;
        fastest = fastest.min(start.elapsed().as_secs_f64());
    }
    let flops = 2.0 * (ROWS * SIDE * SIDE) as f64;
    let flops_per_s = PRODUCT_SHARE * flops / fastest.max(1e-9);
    Some(Peak { bytes_per_s: processor_bandwidth(threads), flops_per_s })
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use testkit::facts::facts;

    use super::*;

    /// A tenth of an H200.
    const PEAK: Peak = Peak { bytes_per_s: 4.8e11, flops_per_s: 4e13 };

    fn spec(config: &serde_json::Value) -> BlockSpec {
        BlockSpec::from_config(config).unwrap()
    }

    #[test]
    fn decoding_waits_for_memory_and_long_batches_for_arithmetic() {
        let llama = spec(&json!({
            "model_type": "llama", "hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64,
            "num_key_value_heads": 8, "num_hidden_layers": 80, "rms_norm_eps": 1e-5,
        }));
        // 855654400 parameters: half a byte each, two operations each.
        let of = capacity(&llama, 855_654_400 / 2, &PEAK);
        assert!((of.inference_rps - 0.8 * 4.8e11 / 427_827_200.0).abs() < 1e-6, "{of:?}");
        assert!((of.forward_rps - 4e13 / (2.0 * 855_654_400.0)).abs() < 1e-6, "{of:?}");
        let slow = capacity(&llama, 1, &PEAK);
        assert_eq!(slow.forward_rps, slow.inference_rps, "a batch is no slower than its tokens");
    }

    #[test]
    fn experts_that_a_token_does_not_go_through_cost_nothing() {
        let mixtral = spec(&json!({
            "model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
            "num_key_value_heads": 8, "num_hidden_layers": 32, "rms_norm_eps": 1e-5, "num_local_experts": 8,
            "num_experts_per_tok": 2,
        }));
        let active = 1_451_270_144.0 - 6.0 * 3.0 * 4096.0 * 14336.0;
        assert!((active_share(&mixtral) - active / 1_451_270_144.0).abs() < 1e-3);
    }

    #[test]
    fn the_slowest_group_decides_and_an_emulator_has_no_speed() {
        let mut peaks = Peaks {
            known: vec![
                (Device::Cpu, Some(Peak { bytes_per_s: 1e10, flops_per_s: 1e11 })),
                (Device::Cuda(0), Some(PEAK)),
            ],
        };
        let llama = spec(&json!({
            "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
            "num_hidden_layers": 2, "rms_norm_eps": 1e-5,
        }));
        let facts = ModelFacts { dtype: DType::Bf16, block_bytes: 69_888, ..facts() };
        let worker = WorkerConfig::default();
        let mut of = |groups: &[Vec<Device>]| peaks.estimate(&llama, &facts, groups, &worker);
        let cpu = of(&[vec![Device::Cpu]]).unwrap();
        let both = of(&[vec![Device::Cuda(0)], vec![Device::Cpu]]).unwrap();
        assert_eq!(both.capacity, cpu.capacity);
        let pair = of(&[vec![Device::Cpu, Device::Cpu]]).unwrap();
        assert_eq!(pair.capacity.forward_rps, 2.0 * cpu.capacity.forward_rps);
        assert!(pair.basis.contains("20 GB/s"), "{}", pair.basis);
        assert_eq!(of(&[vec![Device::Emulator(0)]]), None);
    }

    #[test]
    fn a_processor_has_a_speed() {
        let peak = processor(1).unwrap();
        assert!(peak.bytes_per_s > 1e7 && peak.flops_per_s > 1e6, "{peak:?}");
    }
}
