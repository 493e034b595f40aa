//! The hidden command `sepal sample`: which kernels for warpgroups of a device may be used.
//!
//! The sample itself is `kernels/src/cuda/agree.rs`. A kernel that faults leaves its process with a
//! device that fails every later call, and a kernel that hangs keeps its process waiting. So this
//! process does nothing else. The supervisor starts it, waits for a limited time, and keeps what
//! came of it; what was left open after a fault is sampled by another such process
//! (`supervisor/src/devices/sample.rs`).
//!
//! Standard output has lines of JSON, [`SampleLine`]: which kernel is sampled next, each kernel
//! before it is launched, and what was found. Standard error has what went wrong.

use clap::Args;
use kernels::cuda::Cuda;
use kernels::cuda::driver::CudaDriver;
use kernels::ops::{DeviceFailure, OpError};
use shared::bootstrap::die_with_parent;
use shared::error_chain::with_causes;
use shared::exit::ExitReason;
use shared::warpgroups::{SampleLine, WarpgroupKernel, WarpgroupKernels};

/// Settings of `sepal sample`.
#[derive(Clone, Debug, Args)]
#[command(rename_all = "snake_case")]
pub struct SampleConfig {
    /// Number of the CUDA device
    #[arg(long)]
    pub ordinal: u32,
    /// Kernels for warpgroups to compare
    #[arg(long, value_delimiter = ',', required = true)]
    pub kernels: Vec<WarpgroupKernel>,
    /// The process that waits for the answer
    // With it, this process ends.
    #[arg(long)]
    pub parent: u32,
}

/// Takes the samples and prints what it finds.
pub fn run_command(config: &SampleConfig) -> ExitReason {
    let kernels = config.kernels.iter().copied().collect();
    let _ = nix::sys::prctl::set_name(c"sepal-sample");
    let done = die_with_parent(config.parent)
        .map_err(|failure| (failure.exit_reason(), with_causes(&failure)))
        .and_then(|()| take(config.ordinal, kernels));
    match done {
        Ok(()) => ExitReason::Clean,
        Err((reason, message)) => {
            eprintln!("{message}");
            reason
        }
    }
}

fn take(ordinal: u32, kernels: WarpgroupKernels) -> Result<(), (ExitReason, String)> {
    let driver = CudaDriver::open(ordinal).map_err(|failure| failure.told(ordinal))?;
    let mut cuda = Cuda::new(driver);
    cuda.watch(Some(|kernel| print(&SampleLine::Launches(kernel.to_owned()))));
    cuda.sample_warpgroups(kernels, |line| print(&line)).map_err(|failure| {
        let reason = match &failure {
            OpError::Device(DeviceFailure::OutOfMemory { .. }) => ExitReason::OutOfMemory,
            _ => ExitReason::DeviceLost,
        };
        (reason, with_causes(&failure))
    })
}

fn print(line: &SampleLine) {
    println!("{}", serde_json::to_string(line).expect("an enum of texts is JSON"));
}
