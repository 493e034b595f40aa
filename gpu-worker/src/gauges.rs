//! Memory, temperature and power of a CUDA device, read through NVML and shown on the board.
//!
//! A thread of its own in the worker asks, since a driver that has lost its device may never answer.
//! NVML is loaded at run time: on a machine without it, nothing is shown and nothing is said beyond
//! the debug log. Only the worker asks, for its own device, so the supervisor needs no driver.

use std::sync::Arc;
use std::time::Duration;

use kernels::cuda::driver::CudaDriver;
use nvml_wrapper::Nvml;
use nvml_wrapper::enum_wrappers::device::TemperatureSensor;
use nvml_wrapper::error::NvmlError;
use shared::figures::server::DeviceFigures;
use shared::shm::board::BoardWriter;
use tracing::debug;
use uuid::Uuid;

/// Time between two readings; a reading takes some milliseconds.
const PERIOD: Duration = Duration::from_secs(5);

/// Names of the library: the second comes only with packages for development.
const LIBRARIES: [&str; 2] = ["libnvidia-ml.so.1", "libnvidia-ml.so"];

/// Shows how CUDA device `ordinal` is until the process ends.
pub fn watch(ordinal: u32, board: Arc<BoardWriter>) {
    let watching = std::thread::Builder::new().name("gauges".to_owned()).spawn(move || {
        if let Err(error) = keep_showing(ordinal, &board) {
            debug!(ordinal, error, "NVML does not tell how the device is");
        }
    });
    if let Err(error) = watching {
        debug!(%error, "cannot start the thread that watches the device");
    }
}

fn keep_showing(ordinal: u32, board: &BoardWriter) -> Result<(), String> {
    let nvml = load().map_err(|error| error.to_string())?;
    let uuid = CudaDriver::uuid_of(ordinal).map_err(|error| error.to_string())?;
    // A slice of a device has a UUID of another kind.
    let names = ["GPU", "MIG"].map(|kind| name_of(kind, uuid));
    let device = names.iter().find_map(|name| nvml.device_by_uuid(name.as_str()).ok());
    let device = device.ok_or_else(|| format!("it does not know {}", names[0]))?;
    loop {
        let memory = device.memory_info().ok();
        board.set_device(&DeviceFigures {
            memory_used: memory.as_ref().map(|memory| memory.used),
            memory_total: memory.as_ref().map(|memory| memory.total),
            celsius: device.temperature(TemperatureSensor::Gpu).ok(),
            watts: device.power_usage().ok().map(|milliwatts| f64::from(milliwatts) / 1e3),
        });
        std::thread::sleep(PERIOD);
    }
}

fn load() -> Result<Nvml, NvmlError> {
    let [first, second] = LIBRARIES;
    let open = |name: &str| Nvml::builder().lib_path(name.as_ref()).init();
    open(first).or_else(|_| open(second))
}

/// A UUID as NVML writes it.
fn name_of(kind: &str, uuid: [u8; 16]) -> String {
    format!("{kind}-{}", Uuid::from_bytes(uuid))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uuids_are_written_as_nvml_writes_them() {
        let uuid = std::array::from_fn(|i| i as u8 * 17);
        assert_eq!(name_of("GPU", uuid), "GPU-00112233-4455-6677-8899-aabbccddeeff");
    }
}
