//! The hidden command `sepal sample`: whether the warpgroups of a device may be used.
//!
//! The sample itself is `kernels/src/cuda/agree.rs`. A kernel that faults leaves its process with a
//! device that fails every later call, and a kernel that hangs keeps its process waiting. So this
//! process does nothing else. The supervisor starts it, waits for a limited time, and keeps what
//! came of it (`supervisor/src/devices/sample.rs`).
//!
//! Standard output has lines of JSON, [`SampleLine`]: each kernel before it is launched, and the
//! outcome in the last line. Standard error has what went wrong.

use kernels::cuda::Cuda;
use kernels::cuda::driver::Driver;
use kernels::ops::{DeviceFailure, OpError};
use shared::bootstrap::die_with_parent;
use shared::causes::with_causes;
use shared::exit::ExitReason;
use shared::warpgroups::{SampleLine, Warpgroups};

/// Takes the sample on device `ordinal` for process `parent`, with which this process ends, and
/// prints the outcome.
pub fn run_command(ordinal: u32, parent: u32) -> ExitReason {
    let _ = nix::sys::prctl::set_name(c"sepal-sample");
    let done = die_with_parent(parent)
        .map_err(|failure| (failure.exit_reason(), with_causes(&failure)))
        .and_then(|()| take(ordinal));
    match done {
        Ok(found) => {
            print(&SampleLine::Found(found));
            ExitReason::Clean
        }
        Err((reason, message)) => {
            eprintln!("{message}");
            reason
        }
    }
}

fn take(ordinal: u32) -> Result<Warpgroups, (ExitReason, String)> {
    let driver = Driver::open(ordinal).map_err(|failure| failure.told(ordinal))?;
    let mut cuda = Cuda::new(driver);
    cuda.watch(Some(|kernel| print(&SampleLine::Launches(kernel.to_owned()))));
    cuda.choose_products().map_err(|failure| {
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
