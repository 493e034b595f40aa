//! Names of the driver's errors. A table of ours, since asking the driver for them panics in cudarc
//! when the library is a stub.

use super::calls::Status;
use crate::cuda::gpu::GpuError;

/// `Ok` for success.
pub(super) fn check(call: &'static str, status: Status) -> Result<(), GpuError> {
    match status {
        0 => Ok(()),
        code => Err(GpuError::Driver { call, name: name(code), code }),
    }
}

/// Name of an error, as in cuda.h.
pub(super) fn name(code: u32) -> &'static str {
    NAMES
        .iter()
        .find(|(number, _)| *number == code)
        .map_or("an error that this build does not know", |(_, name)| name)
}

/// What the operator may do about a driver that does not start; empty or begins with a colon.
pub(super) fn hint(code: u32) -> &'static str {
    match code {
        3 => ": the driver was shut down in this process",
        34 => ": this is the toolkit's stub; the driver's own library must be found before it",
        35 | 803 | 804 => ": the library and the kernel's driver are of different versions",
        100 => ": the driver sees none; in a container, is it passed through?",
        999 => {
            ": often a driver that was updated under a running system, or /dev/nvidia-uvm is missing"
        }
        _ => "",
    }
}

const NAMES: &[(u32, &str)] = &[
    (1, "CUDA_ERROR_INVALID_VALUE"),
    (2, "CUDA_ERROR_OUT_OF_MEMORY"),
    (3, "CUDA_ERROR_NOT_INITIALIZED"),
    (4, "CUDA_ERROR_DEINITIALIZED"),
    (34, "CUDA_ERROR_STUB_LIBRARY"),
    (35, "CUDA_ERROR_INSUFFICIENT_DRIVER"),
    (46, "CUDA_ERROR_DEVICE_UNAVAILABLE"),
    (100, "CUDA_ERROR_NO_DEVICE"),
    (101, "CUDA_ERROR_INVALID_DEVICE"),
    (200, "CUDA_ERROR_INVALID_IMAGE"),
    (201, "CUDA_ERROR_INVALID_CONTEXT"),
    (209, "CUDA_ERROR_NO_BINARY_FOR_GPU"),
    (214, "CUDA_ERROR_ECC_UNCORRECTABLE"),
    (218, "CUDA_ERROR_INVALID_PTX"),
    (220, "CUDA_ERROR_NVLINK_UNCORRECTABLE"),
    (221, "CUDA_ERROR_JIT_COMPILER_NOT_FOUND"),
    (222, "CUDA_ERROR_UNSUPPORTED_PTX_VERSION"),
    (300, "CUDA_ERROR_INVALID_SOURCE"),
    (304, "CUDA_ERROR_OPERATING_SYSTEM"),
    (400, "CUDA_ERROR_INVALID_HANDLE"),
    (500, "CUDA_ERROR_NOT_FOUND"),
    (600, "CUDA_ERROR_NOT_READY"),
    (700, "CUDA_ERROR_ILLEGAL_ADDRESS"),
    (701, "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES"),
    (702, "CUDA_ERROR_LAUNCH_TIMEOUT"),
    (710, "CUDA_ERROR_ASSERT"),
    (712, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"),
    (713, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED"),
    (714, "CUDA_ERROR_HARDWARE_STACK_ERROR"),
    (715, "CUDA_ERROR_ILLEGAL_INSTRUCTION"),
    (716, "CUDA_ERROR_MISALIGNED_ADDRESS"),
    (717, "CUDA_ERROR_INVALID_ADDRESS_SPACE"),
    (718, "CUDA_ERROR_INVALID_PC"),
    (719, "CUDA_ERROR_LAUNCH_FAILED"),
    (800, "CUDA_ERROR_NOT_PERMITTED"),
    (801, "CUDA_ERROR_NOT_SUPPORTED"),
    (802, "CUDA_ERROR_SYSTEM_NOT_READY"),
    (803, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"),
    (804, "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE"),
    (900, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"),
    (901, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"),
    (999, "CUDA_ERROR_UNKNOWN"),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_that_no_header_of_ours_has_is_reported_as_it_is() {
        assert_eq!(check("cuInit", 0), Ok(()));
        for code in [2, 4242, u32::MAX] {
            let wanted = GpuError::Driver { call: "cuInit", name: name(code), code };
            assert_eq!(check("cuInit", code), Err(wanted));
        }
    }
}
