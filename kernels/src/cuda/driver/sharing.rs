//! Memory that several processes map (virtual memory management of the driver): one process creates
//! and exports it as a descriptor, others import it. Each maps it for its own device.
//! Source: CUDA Driver API reference, "Virtual Memory Management".

use std::ffi::{c_int, c_void};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use super::calls as cu;
use super::error::check;
use super::{attribute, device};
use crate::cuda::address::Address;
use crate::cuda::gpu::GpuError;

const DESCRIPTOR: cu::CUmemAllocationHandleType =
    cu::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

/// What tells a device from all others.
pub(super) fn uuid(device: cu::CUdevice) -> Result<[u8; 16], GpuError> {
    let mut uuid = cu::CUuuid { bytes: [0; 16] };
    // SAFETY: a place for a uuid.
    let status = unsafe { cu::cuDeviceGetUuid_v2(&raw mut uuid, device) };
    check("cuDeviceGetUuid_v2", status)?;
    Ok(uuid.bytes.map(|byte| byte as u8))
}

/// Whether `own` can use the memory of the device of `wanted`; no when this process does not see
/// that device.
pub(super) fn reaches(own: cu::CUdevice, wanted: [u8; 16]) -> Result<bool, GpuError> {
    if uuid(own)? == wanted {
        return Ok(true);
    }
    let count = super::probe::probe().map_or(0, |found| found.devices);
    for ordinal in 0..count {
        let other = device(ordinal)?;
        if uuid(other)? != wanted {
            continue;
        }
        let mut can: c_int = 0;
        // SAFETY: a place for an int, and two devices of this driver.
        let status = unsafe { cu::cuDeviceCanAccessPeer(&raw mut can, own, other) };
        check("cuDeviceCanAccessPeer", status)?;
        return Ok(can != 0);
    }
    Ok(false)
}

/// Whether memory of the device can be exported as a descriptor.
pub(super) fn can_export(device: cu::CUdevice) -> Result<bool, GpuError> {
    use cu::CUdevice_attribute as Attribute;
    let has = |which| Ok::<_, GpuError>(attribute(device, which)? != 0);
    Ok(has(Attribute::CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED)?
        && has(Attribute::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED)?)
}

/// New memory of at least `bytes` bytes, mapped, and a descriptor of it.
pub(super) fn export(device: cu::CUdevice, bytes: usize) -> Result<(Address, OwnedFd), GpuError> {
    let size = whole(device, bytes)?;
    let mut handle = 0;
    let properties = properties(device);
    // SAFETY: a place for a handle, and properties of this device.
    let status = unsafe { cu::cuMemCreate(&raw mut handle, size, &raw const properties, 0) };
    if status == cu::OUT_OF_MEMORY {
        return Err(GpuError::OutOfMemory { bytes });
    }
    check("cuMemCreate", status)?;
    let handle = Handle(handle);
    let mut raw: c_int = -1;
    // SAFETY: a handle that was created to be exported, and a place for a descriptor.
    let status =
        unsafe { cu::cuMemExportToShareableHandle((&raw mut raw).cast(), handle.0, DESCRIPTOR, 0) };
    check("cuMemExportToShareableHandle", status)?;
    // SAFETY: the driver gave a new descriptor to this process, which owns it.
    let fd = unsafe { OwnedFd::from_raw_fd(raw) };
    Ok((map(device, &handle, size)?, fd))
}

/// Maps memory of another process.
pub(super) fn import(
    device: cu::CUdevice,
    memory: BorrowedFd<'_>,
    bytes: usize,
) -> Result<Address, GpuError> {
    let size = whole(device, bytes)?;
    let mut handle = 0;
    // The driver takes the number of the descriptor for a pointer.
    let descriptor = std::ptr::without_provenance_mut::<c_void>(memory.as_raw_fd() as usize);
    // SAFETY: a place for a handle, and a descriptor that is open during the call.
    let status =
        unsafe { cu::cuMemImportFromShareableHandle(&raw mut handle, descriptor, DESCRIPTOR) };
    check("cuMemImportFromShareableHandle", status)?;
    map(device, &Handle(handle), size)
}

/// # Safety
/// `at` came from [`export`] or [`import`] for as many bytes, and nothing uses it.
pub(super) unsafe fn unmap(device: cu::CUdevice, at: Address, bytes: usize) {
    // A failure leaves the memory to the end of the process.
    let Ok(size) = whole(device, bytes) else {
        return;
    };
    // SAFETY: the caller's.
    if unsafe { cu::cuMemUnmap(at.0, size) } == 0 {
        // SAFETY: reserved in `map`, and nothing is mapped there any more.
        let _ = unsafe { cu::cuMemAddressFree(at.0, size) };
    }
}

/// A reference to memory. What is mapped keeps the memory without it.
struct Handle(cu::CUmemGenericAllocationHandle);

impl Drop for Handle {
    fn drop(&mut self) {
        // SAFETY: created or imported once, released once.
        let _ = unsafe { cu::cuMemRelease(self.0) };
    }
}

/// Maps the whole memory of a handle, of `size` bytes, for `device`.
fn map(device: cu::CUdevice, handle: &Handle, size: usize) -> Result<Address, GpuError> {
    let mut at = 0;
    // SAFETY: a place for an address.
    let status = unsafe { cu::cuMemAddressReserve(&raw mut at, size, 0, 0, 0) };
    check("cuMemAddressReserve", status)?;
    // SAFETY: a range that was just reserved, and a handle of this process.
    let status = unsafe { cu::cuMemMap(at, size, 0, handle.0, 0) };
    if let Err(error) = check("cuMemMap", status) {
        // SAFETY: reserved above; nothing is mapped there.
        let _ = unsafe { cu::cuMemAddressFree(at, size) };
        return Err(error);
    }
    let access = cu::CUmemAccessDesc {
        location: location(device),
        flags: cu::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
    };
    // SAFETY: a range that was just mapped, and one description.
    let status = unsafe { cu::cuMemSetAccess(at, size, &raw const access, 1) };
    check("cuMemSetAccess", status).inspect_err(|_| {
        // SAFETY: mapped above, and nothing has used it.
        unsafe { unmap(device, Address(at), size) };
    })?;
    Ok(Address(at))
}

/// `bytes` rounded up to what the device maps at once.
fn whole(device: cu::CUdevice, bytes: usize) -> Result<usize, GpuError> {
    let mut granularity = 0;
    let properties = properties(device);
    let which = cu::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
    // SAFETY: a place for a number, and properties of this device.
    let status = unsafe {
        cu::cuMemGetAllocationGranularity(&raw mut granularity, &raw const properties, which)
    };
    check("cuMemGetAllocationGranularity", status)?;
    let whole = bytes.checked_next_multiple_of(granularity.max(1));
    whole.ok_or(GpuError::OutOfMemory { bytes })
}

fn location(device: cu::CUdevice) -> cu::CUmemLocation {
    cu::CUmemLocation { type_: cu::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: device }
}

fn properties(device: cu::CUdevice) -> cu::CUmemAllocationProp {
    cu::CUmemAllocationProp {
        type_: cu::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
        requestedHandleTypes: DESCRIPTOR,
        location: location(device),
        win32HandleMetaData: std::ptr::null_mut(),
        allocFlags: cu::CUmemAllocationProp_st__bindgen_ty_1 {
            compressionType: 0,
            gpuDirectRDMACapable: 0,
            usage: 0,
            reserved: [0; 4],
        },
    }
}
