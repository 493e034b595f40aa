//! The seam between the CUDA backend and a device: the driver ([`super::driver`]) or the emulator
//! (`emu`). Work is enqueued and done in one order; the host waits in [`Gpu::read`] and
//! [`Gpu::wait`].

use std::os::fd::{BorrowedFd, OwnedFd};
use std::time::Duration;

use super::address::{Address, Floats};
use crate::error::{DeviceFailure, OpError};

/// Why a call failed. Every error but [`OutOfMemory`](GpuError::OutOfMemory) at start is final for
/// the process.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GpuError {
    /// The device has too little free memory.
    #[error("no device memory for {bytes} bytes")]
    OutOfMemory {
        /// Bytes asked for.
        bytes: usize,
    },
    /// No image has the kernel.
    #[error("there is no kernel {0}")]
    NoKernel(&'static str),
    /// The kernel does not support the parameters, the grid or the shared memory of a launch.
    #[error("cannot launch {kernel}: {what}")]
    BadLaunch { kernel: &'static str, what: &'static str },
    /// A step of the host between recorded launches.
    #[error("{0} cannot be recorded")]
    NotRecorded(&'static str),
    /// The driver reported an error.
    #[error("{call}: {name} ({code})")]
    Driver {
        call: &'static str,
        /// Name of the error.
        name: &'static str,
        code: u32,
    },
    /// Memory of another process cannot be used.
    #[error("cannot map device memory of another process: {0}")]
    NotShared(&'static str),
    /// A kernel failed while each launch was waited for.
    #[error("kernel {kernel}")]
    Kernel {
        kernel: &'static str,
        #[source]
        source: Box<GpuError>,
    },
}

impl From<GpuError> for OpError {
    fn from(error: GpuError) -> OpError {
        OpError::Device(match error {
            GpuError::OutOfMemory { bytes } => DeviceFailure::OutOfMemory { bytes },
            GpuError::Kernel { kernel, source } => {
                DeviceFailure::Fault(format!("kernel {kernel}: {source}"))
            }
            other => DeviceFailure::Fault(other.to_string()),
        })
    }
}

/// One kernel launch.
#[derive(Clone, Copy, Debug)]
pub struct Launch {
    /// The `extern "C"` name of the kernel.
    pub kernel: &'static str,
    /// CTAs in x, y and z.
    pub grid: [u32; 3],
    /// Threads of a CTA in x, y and z.
    pub cta: [u32; 3],
    /// Bytes of dynamic shared memory of a CTA.
    pub shared_bytes: u32,
    /// Parameters of the kernel.
    pub params: Params,
}

/// Most parameters of a kernel.
pub const MAX_PARAMS: usize = 24;

/// Parameters of a kernel, in the order of its declaration. Each call appends one.
///
/// A pointer is stored as a number. The caller keeps the buffers borrowed until the launch is
/// enqueued, and the pool reuses memory only for work that is enqueued later.
#[derive(Clone, Copy, Debug, Default)]
pub struct Params {
    words: [u64; MAX_PARAMS],
    bytes: [u32; MAX_PARAMS],
    count: usize,
    too_large: bool,
}

impl Params {
    /// No parameters yet.
    pub fn new() -> Params {
        Params::default()
    }

    /// `const float*`.
    #[must_use]
    pub fn read(self, values: &Floats) -> Params {
        self.address(values.address())
    }

    /// `float*`.
    #[must_use]
    pub fn write(self, values: &mut Floats) -> Params {
        self.address(values.address())
    }

    /// Any pointer.
    #[must_use]
    pub fn address(self, at: Address) -> Params {
        self.push(at.0, 8)
    }

    /// `const float*`, null when there is none.
    #[must_use]
    pub fn read_optional(self, values: Option<&Floats>) -> Params {
        self.address(values.map_or(Address(0), Floats::address))
    }

    /// `uint32_t`; the launch is refused when it does not fit.
    #[must_use]
    pub fn count(mut self, value: usize) -> Params {
        self.too_large |= u32::try_from(value).is_err();
        self.push(value as u64 & 0xffff_ffff, 4)
    }

    /// `uint64_t`.
    #[must_use]
    pub fn wide(self, value: usize) -> Params {
        self.push(value as u64, 8)
    }

    /// `float`.
    #[must_use]
    pub fn float(self, value: f32) -> Params {
        self.push(u64::from(value.to_bits()), 4)
    }

    fn push(mut self, word: u64, bytes: u32) -> Params {
        match (self.words.get_mut(self.count), self.bytes.get_mut(self.count)) {
            (Some(slot), Some(size)) => (*slot, *size) = (word, bytes),
            _ => self.too_large = true,
        }
        self.count = (self.count + 1).min(MAX_PARAMS);
        self
    }

    /// The values, little-endian at the start of each word.
    pub(super) fn words(&mut self) -> &mut [u64] {
        &mut self.words[..self.count]
    }

    #[cfg_attr(not(feature = "emu"), allow(dead_code, reason = "the driver does not ask"))]
    pub(super) fn sizes(&self) -> &[u32] {
        &self.bytes[..self.count]
    }

    /// Whether a value did not fit its parameter.
    pub(super) fn too_large(&self) -> bool {
        self.too_large
    }
}

/// A count as a `u32`; a larger one becomes `u32::MAX`, which the launch refuses.
pub(super) fn ctas(count: usize) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}

/// Is called while the host waits: it shows that the process lives.
pub type Pulse = Box<dyn Fn() + Send + Sync>;

/// Operations of a device. They are enqueued and done in the order of the calls.
pub trait Gpu: Send + Sync + 'static {
    /// A point in the order of enqueued work.
    type Event: Send + Sync;
    /// Recorded launches.
    type Graph: Send + Sync + std::fmt::Debug;

    /// Memory of `bytes` bytes (not 0) of unspecified content, aligned to 256.
    ///
    /// # Errors
    /// [`GpuError::OutOfMemory`], or the driver's.
    fn allocate(&self, bytes: usize) -> Result<Address, GpuError>;

    /// Frees memory.
    ///
    /// # Safety
    /// `at` came from `allocate` with as many bytes, was not freed, and no pending work uses it.
    unsafe fn release(&self, at: Address, bytes: usize);

    /// Copies host bytes to the device; the caller may reuse them at once.
    ///
    /// # Safety
    /// `to` begins as many bytes of allocated memory.
    ///
    /// # Errors
    /// The driver's.
    unsafe fn write(&self, from: &[u8], to: Address) -> Result<(), GpuError>;

    /// Copies device bytes to the host after all enqueued work; returns when they have arrived.
    ///
    /// # Safety
    /// `from` begins as many bytes of allocated memory.
    ///
    /// # Errors
    /// The driver's, also those of earlier launches.
    unsafe fn read(&self, from: Address, to: &mut [u8]) -> Result<(), GpuError>;

    /// Copies within the device, or between it and registered memory; the ranges do not overlap.
    ///
    /// # Safety
    /// Both begin `bytes` bytes of allocated or registered memory.
    ///
    /// # Errors
    /// The driver's.
    unsafe fn copy(&self, from: Address, to: Address, bytes: usize) -> Result<(), GpuError>;

    /// Sets bytes.
    ///
    /// # Safety
    /// `at` begins `bytes` bytes of allocated memory.
    ///
    /// # Errors
    /// The driver's.
    unsafe fn fill(&self, at: Address, value: u8, bytes: usize) -> Result<(), GpuError>;

    /// Maps host memory (the arena, the kv segment) for the device and returns its address there.
    /// The mapping lasts as long as this device is open, or until
    /// [`unregister`](Self::unregister).
    ///
    /// # Safety
    /// The bytes stay mapped until the device is closed, and nobody holds Rust references to those
    /// that the device writes.
    ///
    /// # Errors
    /// The driver's, for example when pages cannot be locked.
    unsafe fn register(&self, start: *mut u8, bytes: usize) -> Result<Address, GpuError>;

    /// Undoes [`register`](Self::register), which returned `at`.
    ///
    /// # Safety
    /// No pending work uses the memory.
    unsafe fn unregister(&self, at: Address);

    /// Enqueues a kernel.
    ///
    /// # Safety
    /// The parameters are those of the kernel's declaration, and its pointers name allocated memory
    /// of the sizes that it uses.
    ///
    /// # Errors
    /// [`GpuError::NoKernel`], [`GpuError::BadLaunch`], or the driver's.
    unsafe fn launch(&self, launch: Launch) -> Result<(), GpuError>;

    /// [`launch`](Self::launch) for a kernel that waits for earlier launches by itself: it may start
    /// while they run. A device that cannot do that launches it like any other.
    ///
    /// # Safety
    /// That of [`launch`](Self::launch). No launch since the last other command has written what
    /// the kernel reads before it waits.
    ///
    /// # Errors
    /// Those of [`launch`](Self::launch).
    unsafe fn launch_early(&self, launch: Launch) -> Result<(), GpuError>;

    /// Why the device has refused to start launches early; all others since were not.
    fn early_refusal(&self) -> Option<GpuError>;

    /// Records instead of running, until [`end_recording`](Self::end_recording). Only launches,
    /// fills and copies within the device may be enqueued meanwhile, and no memory is
    /// allocated.
    ///
    /// # Errors
    /// The driver's.
    fn begin_recording(&self) -> Result<(), GpuError>;

    /// Ends the recording and returns its launches; none of them has run.
    ///
    /// # Errors
    /// The driver's, also for what may not be recorded.
    fn end_recording(&self) -> Result<Self::Graph, GpuError>;

    /// Enqueues recorded launches.
    ///
    /// # Safety
    /// All memory that its launches name is still allocated.
    ///
    /// # Errors
    /// The driver's.
    unsafe fn replay(&self, graph: &Self::Graph) -> Result<(), GpuError>;

    /// Waits for all enqueued work.
    ///
    /// # Errors
    /// The driver's, also those of earlier launches.
    fn wait(&self) -> Result<(), GpuError>;

    /// Has `pulse` called again and again while the host waits for the device, which may wait for
    /// other devices. The first one stays.
    fn pulse(&self, pulse: Pulse);

    /// Records an event at this point of the order.
    ///
    /// # Errors
    /// The driver's.
    fn record(&self) -> Result<Self::Event, GpuError>;

    /// Waits for `end` and returns the seconds from `begin` to it.
    ///
    /// # Errors
    /// The driver's.
    fn seconds(&self, begin: &Self::Event, end: &Self::Event) -> Result<f64, GpuError>;

    /// What tells this device from all others, whatever its number is in another process.
    ///
    /// # Errors
    /// The driver's.
    fn uuid(&self) -> Result<[u8; 16], GpuError>;

    /// Whether this device can use memory that the device of `uuid` shares. False when this process
    /// does not see that device.
    fn reaches(&self, uuid: [u8; 16]) -> bool;

    /// Memory of at least `bytes` bytes (not 0) of unspecified content, aligned to 256, and a
    /// descriptor with which other processes map it. `None` where the driver has no such memory.
    ///
    /// # Errors
    /// [`GpuError::OutOfMemory`], or the driver's.
    fn share(&self, bytes: usize) -> Result<Option<(Address, OwnedFd)>, GpuError>;

    /// Maps memory of which another process [`share`](Self::share)d as many bytes; this device
    /// reads and writes it from now on.
    ///
    /// # Errors
    /// [`GpuError::NotShared`], or the driver's, when the descriptor is something else, or the
    /// device does not reach that memory.
    fn map_shared(&self, memory: BorrowedFd<'_>, bytes: usize) -> Result<Address, GpuError>;

    /// Undoes [`share`](Self::share) or [`map_shared`](Self::map_shared). The memory lives as long
    /// as one process maps it.
    ///
    /// # Safety
    /// One of them returned `at` for as many bytes, and no pending work uses the memory.
    unsafe fn unmap_shared(&self, at: Address, bytes: usize);

    /// Free and total bytes of device memory.
    ///
    /// # Errors
    /// The driver's.
    fn memory(&self) -> Result<(usize, usize), GpuError>;

    /// Longest time that a unit of work may occupy the device.
    fn unit_time(&self) -> Duration;

    /// Properties of the device.
    fn properties(&self) -> &Properties;
}

/// Properties of a device on which the choice of a kernel may depend.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Properties {
    /// Name of the device.
    pub name: String,
    /// Compute capability times ten: 90 for 9.0.
    pub architecture: u32,
    pub multiprocessors: u32,
    /// Most dynamic shared memory of a CTA.
    pub shared_bytes: u32,
    /// Image that the kernels come from; empty before the device is opened.
    pub image: String,
}

impl Properties {
    /// Whether the device runs clusters of CTAs (`kernels/cuda/linear_cluster.cu`, whose image has
    /// compute capability 9.0 alone).
    pub fn has_clusters(&self) -> bool {
        self.architecture == 90
    }

    /// Whether the device has warpgroup products (`kernels/cuda/wgmma.cuh`): compute capability
    /// 9.0.
    pub fn has_wgmma(&self) -> bool {
        self.architecture == 90
    }
}
