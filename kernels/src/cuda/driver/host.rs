//! Host memory that the device accesses directly: pinned memory of this process, and shared memory
//! (the arena, the kv segment) that is registered with the driver.

use super::calls as cu;

use super::error::check;
use crate::cuda::address::Address;
use crate::cuda::gpu::GpuError;

/// Pinned memory, freed when dropped. Cached, unlike cudarc's default, whose write-combining makes
/// reads on the host very slow.
#[derive(Debug)]
pub struct Pinned {
    start: *mut u8,
    bytes: usize,
}

// SAFETY: plain memory, owned.
unsafe impl Send for Pinned {}
// SAFETY: it is only reached through raw pointers, whose users answer for what they do.
unsafe impl Sync for Pinned {}

impl Pinned {
    /// `bytes` bytes. A context must be current.
    ///
    /// # Errors
    /// The driver's.
    pub(super) fn new(bytes: usize) -> Result<Pinned, GpuError> {
        let mut start = std::ptr::null_mut();
        // SAFETY: a place for an address.
        let status = unsafe { cu::cuMemHostAlloc(&raw mut start, bytes, 0) };
        check("cuMemHostAlloc", status)?;
        Ok(Pinned { start: start.cast(), bytes })
    }

    /// Where it begins.
    pub(super) fn pointer(&self) -> *mut u8 {
        self.start
    }

    /// Its size.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // SAFETY: allocated by `new`, freed once. A failure leaves it to the end of the process.
        let _ = unsafe { cu::cuMemFreeHost(self.start.cast()) };
    }
}

/// Memory of others that is registered with the device, until dropped.
#[derive(Debug)]
pub struct RegisteredMemory {
    start: *mut u8,
    device: Address,
}

// SAFETY: an address; what is done through it is its users' business.
unsafe impl Send for RegisteredMemory {}
// SAFETY: as above.
unsafe impl Sync for RegisteredMemory {}

impl RegisteredMemory {
    /// Registers `bytes` bytes from `start` on. A context must be current.
    ///
    /// # Safety
    /// They stay mapped until this is dropped.
    ///
    /// # Errors
    /// The driver's, for example when pages cannot be locked.
    pub(super) unsafe fn new(start: *mut u8, bytes: usize) -> Result<RegisteredMemory, GpuError> {
        // Portable and mapped: every context may use it, and the device has an address for it.
        let flags = cu::CU_MEMHOSTREGISTER_PORTABLE | cu::CU_MEMHOSTREGISTER_DEVICEMAP;
        // SAFETY: the caller's.
        let status = unsafe { cu::cuMemHostRegister_v2(start.cast(), bytes, flags) };
        check("cuMemHostRegister", status)?;
        let mut registered = RegisteredMemory { start, device: Address(0) };
        let mut device = 0;
        // SAFETY: memory that was registered just now.
        let status = unsafe { cu::cuMemHostGetDevicePointer_v2(&raw mut device, start.cast(), 0) };
        check("cuMemHostGetDevicePointer", status)?;
        registered.device = Address(device);
        Ok(registered)
    }

    /// Where the device finds it.
    pub fn device(&self) -> Address {
        self.device
    }
}

impl Drop for RegisteredMemory {
    fn drop(&mut self) {
        // SAFETY: registered by `new`, once. A failure leaves it to the end of the process.
        let _ = unsafe { cu::cuMemHostUnregister(self.start.cast()) };
    }
}
