//! The hidden command `sepal cuda_devices`: which CUDA devices there are. A process of its own asks
//! the driver, so that the supervisor never loads its library.

use kernels::cuda::driver::{CudaDriver, OpenError, probe};
use shared::bootstrap::die_with_parent;
use shared::control::{CudaDevice, CudaDevices};
use shared::exit::ExitReason;

use shared::error_chain::with_causes;

/// Prints the devices as JSON for `parent`, with which this process ends.
pub fn run_command(parent: u32) -> ExitReason {
    if let Err(error) = die_with_parent(parent) {
        eprintln!("{error}");
        return error.exit_reason();
    }
    let found = match probe::probe() {
        Ok(found) => found,
        Err(failure) => {
            eprintln!("{}", with_causes(&failure));
            return ExitReason::BadConfig;
        }
    };
    let described = |ordinal| describe(ordinal).map_err(|failure| with_causes(&failure));
    let devices = (0..found.devices).map(described).collect();
    let list = CudaDevices { driver_version: found.version, devices };
    match serde_json::to_string(&list) {
        Ok(text) => {
            println!("{text}");
            ExitReason::Clean
        }
        Err(failure) => {
            eprintln!("{failure}");
            ExitReason::Failed
        }
    }
}

fn describe(ordinal: u32) -> Result<CudaDevice, OpenError> {
    let found = CudaDriver::properties_of(ordinal)?;
    Ok(CudaDevice {
        name: format!("{} (compute capability {})", found.name, found.architecture),
        uuid: CudaDriver::uuid_of(ordinal)?,
        has_warpgroups: found.has_wgmma(),
    })
}
