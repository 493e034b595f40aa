//! CUDA devices through the driver. A device is created only after [`probe`](probe::probe) found a
//! driver, which makes cudarc's raw calls usable. It has one context (the device's primary one) and
//! one stream; any thread may call it.
//!
//! A ring of pinned memory stages host bytes, so that [`Gpu::write`] neither waits nor keeps the
//! caller's bytes. Larger copies read the caller's bytes directly, and wait.

mod calls;
mod error;
pub mod graph;
pub mod host;
mod host_wait;
pub mod images;
pub mod probe;
mod ring;
mod sharing;

use std::cell::Cell;
use std::ffi::{c_int, c_void};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::OnceLock;
use std::time::Duration;

use calls as cu;
use parking_lot::Mutex;
use shared::error_chain::with_causes;
use shared::exit::ExitReason;

use super::address::Address;
use super::gpu::{Gpu, GpuError, Launch, Properties, Pulse};
use error::check;
use host::RegisteredMemory;
use host_wait::WaitPulse;
use images::Kernels;
use probe::NoCuda;
pub use ring::StreamEvent;
use ring::{HALF, Ring};

/// One CUDA device.
pub struct CudaDriver {
    device: cu::CUdevice,
    /// Whether memory can be shared with other processes.
    shares_memory: bool,
    /// Whether launches may start early, and what the driver said when it refused one.
    launches_early: bool,
    refusal: OnceLock<GpuError>,
    context: cu::CUcontext,
    stream: cu::CUstream,
    kernels: Kernels,
    properties: Properties,
    ring: Mutex<Ring>,
    registered: Mutex<Vec<RegisteredMemory>>,
    waiting: WaitPulse,
}

// SAFETY: handles of the driver may be used from any thread; each call makes the context current on
// its own.
unsafe impl Send for CudaDriver {}
// SAFETY: as above; the driver locks what it must, and the ring is behind a mutex.
unsafe impl Sync for CudaDriver {}

/// Why a device was not opened.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OpenError {
    #[error(transparent)]
    NoCuda(#[from] NoCuda),
    /// It is older than what the kernels are made for.
    #[error(
        "CUDA device {ordinal}, {name}, has compute capability {major}.{minor}; at least 8.0 is needed"
    )]
    TooOld {
        ordinal: u32,
        name: String,
        /// Compute capability.
        major: u32,
        /// And its second part.
        minor: u32,
    },
    #[error("cannot open CUDA device {ordinal}")]
    Call {
        ordinal: u32,
        #[source]
        source: GpuError,
    },
}

/// Names of all functions of the driver that are called on some device.
pub fn functions() -> impl Iterator<Item = &'static str> {
    probe::all_functions()
}

impl OpenError {
    /// Why a process that needs device `ordinal` ends: the reason, and a sentence for the operator.
    pub fn told(&self, ordinal: u32) -> (ExitReason, String) {
        let reason = match self {
            OpenError::NoCuda(_) | OpenError::TooOld { .. } => ExitReason::BadConfig,
            OpenError::Call { .. } => ExitReason::DeviceLost,
        };
        let why = with_causes(self);
        let message =
            format!("cuda:{ordinal} cannot be used ({why}); `--device cpu` serves without a GPU");
        (reason, message)
    }
}

impl CudaDriver {
    /// Opens device `ordinal` and loads all kernels.
    pub fn open(ordinal: u32) -> Result<CudaDriver, OpenError> {
        let (device, properties) = find(ordinal)?;
        let found = probe::probe()?;
        CudaDriver::start(device, properties, found)
            .map_err(|source| OpenError::Call { ordinal, source })
    }

    /// What device `ordinal` is, without opening it: no context is made, no kernel is loaded.
    pub fn properties_of(ordinal: u32) -> Result<Properties, OpenError> {
        find(ordinal).map(|(_, properties)| properties)
    }

    /// What tells device `ordinal` from all others, whatever its number is in another process. A
    /// slice of a device (MIG) has its own.
    pub fn uuid_of(ordinal: u32) -> Result<[u8; 16], OpenError> {
        let (device, _) = find(ordinal)?;
        sharing::uuid(device).map_err(|source| OpenError::Call { ordinal, source })
    }

    /// Bytes per second that the memory of device `ordinal` is made for: two transfers a clock over
    /// the width of its bus. 0 where the driver does not tell.
    pub fn bandwidth_of(ordinal: u32) -> Result<f64, OpenError> {
        use cu::CUdevice_attribute as Attribute;
        let (device, _) = find(ordinal)?;
        let of =
            |which| attribute(device, which).map_err(|source| OpenError::Call { ordinal, source });
        let kilohertz = of(Attribute::CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE)?;
        let bits = of(Attribute::CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH)?;
        Ok(2e3 * f64::from(kilohertz) * f64::from(bits) / 8.0)
    }

    /// Multiplications and additions per second on bfloat16 that the tensor cores of device `ordinal`
    /// are made for: those of a multiprocessor per clock by architecture, without sparsity.
    pub fn matrix_rate_of(ordinal: u32) -> Result<f64, OpenError> {
        let (device, properties) = find(ordinal)?;
        let clock = cu::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_CLOCK_RATE;
        let kilohertz =
            attribute(device, clock).map_err(|source| OpenError::Call { ordinal, source })?;
        // Data sheets of A100, H100, B200; cards for workstations and games have 512 or 1024.
        let per_clock = match properties.architecture {
            80 => 2048.0,
            90 => 4096.0,
            100..=109 => 8192.0,
            _ => 512.0,
        };
        Ok(1e3 * f64::from(kilohertz) * f64::from(properties.multiprocessors) * per_clock)
    }

    /// Free and total bytes of device `ordinal`, as a process finds them that has opened it: what
    /// the driver takes for a context is not free.
    pub fn memory_of(ordinal: u32) -> Result<(usize, usize), OpenError> {
        let found = probe::probe()?;
        if ordinal >= found.devices {
            let count = found.devices;
            return Err(NoCuda::NoSuchDevice { ordinal, count }.into());
        }
        let measured = device(ordinal).and_then(|device| {
            let mut context = std::ptr::null_mut();
            // SAFETY: a device of this driver, and a place for its context.
            let status = unsafe { cu::cuDevicePrimaryCtxRetain(&raw mut context, device) };
            check("cuDevicePrimaryCtxRetain", status)?;
            let bytes = make_current(context).and_then(|()| free_and_total());
            // SAFETY: retained above; nothing of this context is used any more. A failure leaves it
            // to the end of the process.
            let _ = unsafe { cu::cuDevicePrimaryCtxRelease_v2(device) };
            bytes
        });
        measured.map_err(|source| OpenError::Call { ordinal, source })
    }

    fn start(
        device: cu::CUdevice,
        mut properties: Properties,
        found: probe::FoundDriver,
    ) -> Result<CudaDriver, GpuError> {
        let mut context = std::ptr::null_mut();
        // SAFETY: a device of this driver, and a place for its context.
        let status = unsafe { cu::cuDevicePrimaryCtxRetain(&raw mut context, device) };
        check("cuDevicePrimaryCtxRetain", status)?;
        make_current(context)?;
        let mut stream = std::ptr::null_mut();
        let flags = cu::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: a context is current.
        let status = unsafe { cu::cuStreamCreate(&raw mut stream, flags) };
        check("cuStreamCreate", status)?;
        let kernels = Kernels::load(properties.architecture, properties.shared_bytes)?;
        properties.image.clone_from(&kernels.source);
        Ok(CudaDriver {
            device,
            shares_memory: found.shares_memory,
            launches_early: found.launches_early && kernels.wait(),
            refusal: OnceLock::new(),
            context,
            stream,
            kernels,
            properties,
            ring: Mutex::new(Ring::new()?),
            registered: Mutex::default(),
            waiting: WaitPulse::default(),
        })
    }

    fn bind(&self) -> Result<(), GpuError> {
        thread_local! {
            static CURRENT: Cell<usize> = const { Cell::new(0) };
        }
        let wanted = self.context.addr();
        if CURRENT.get() != wanted {
            make_current(self.context)?;
            CURRENT.set(wanted);
        }
        Ok(())
    }

    /// Enqueues a launch, which may start early or not.
    ///
    /// # Safety
    /// That of [`Gpu::launch`] or [`Gpu::launch_early`].
    unsafe fn enqueue(&self, mut launch: Launch, is_early: bool) -> Result<(), GpuError> {
        let kernel = launch.kernel;
        if launch.params.too_large() {
            let what = "a parameter does not fit";
            return Err(GpuError::BadLaunch { kernel, what });
        }
        self.bind()?;
        let function = self.kernels.find(kernel)?;
        let mut pointers = [std::ptr::null_mut::<c_void>(); super::gpu::MAX_PARAMS];
        for (pointer, word) in pointers.iter_mut().zip(launch.params.words()) {
            *pointer = std::ptr::from_mut(word).cast();
        }
        let ([gx, gy, gz], [cx, cy, cz]) = (launch.grid, launch.cta);
        let (none, shared_bytes) = (std::ptr::null_mut(), launch.shared_bytes);
        if !is_early {
            // SAFETY: the caller's for what the parameters mean; the driver copies them before it
            // returns.
            let status = unsafe {
                cu::cuLaunchKernel(
                    function,
                    gx,
                    gy,
                    gz,
                    cx,
                    cy,
                    cz,
                    shared_bytes,
                    self.stream,
                    pointers.as_mut_ptr(),
                    none,
                )
            };
            return check(kernel, status);
        }
        let mut attribute = early();
        let config = cu::CUlaunchConfig {
            gridDimX: gx,
            gridDimY: gy,
            gridDimZ: gz,
            blockDimX: cx,
            blockDimY: cy,
            blockDimZ: cz,
            sharedMemBytes: shared_bytes,
            hStream: self.stream,
            attrs: &raw mut attribute,
            numAttrs: 1,
        };
        // SAFETY: as above; the driver copies the attribute, too.
        let status = unsafe {
            cu::cuLaunchKernelEx(&raw const config, function, pointers.as_mut_ptr(), none)
        };
        check(kernel, status)
    }
}

/// What has a launch start before those before it end. In a recording it becomes a programmatic edge.
fn early() -> cu::CUlaunchAttribute {
    cu::CUlaunchAttribute {
        id: cu::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
        pad: [0; 4],
        value: cu::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
    }
}

impl std::fmt::Debug for CudaDriver {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Driver").field("properties", &self.properties).finish_non_exhaustive()
    }
}

impl Gpu for CudaDriver {
    type Event = StreamEvent;
    type Graph = graph::CudaGraph;

    fn allocate(&self, bytes: usize) -> Result<Address, GpuError> {
        self.bind()?;
        let mut at = 0;
        // SAFETY: a context is current; a place for an address.
        let status = unsafe { cu::cuMemAlloc_v2(&raw mut at, bytes) };
        if status == cu::OUT_OF_MEMORY {
            return Err(GpuError::OutOfMemory { bytes });
        }
        check("cuMemAlloc", status)?;
        Ok(Address(at))
    }

    unsafe fn release(&self, at: Address, _bytes: usize) {
        if self.bind().is_ok() {
            // SAFETY: the caller's. A failure leaves it to the end of the process.
            let _ = unsafe { cu::cuMemFree_v2(at.0) };
        }
    }

    unsafe fn write(&self, from: &[u8], to: Address) -> Result<(), GpuError> {
        if from.is_empty() {
            return Ok(());
        }
        self.bind()?;
        if from.len() > HALF {
            // The driver may block on memory that is not pinned: wait where the pulse is called.
            self.wait()?;
            // SAFETY: the caller's for the device; the host's bytes are there until the wait below
            // is over.
            let status = unsafe {
                cu::cuMemcpyHtoDAsync_v2(to.0, from.as_ptr().cast(), from.len(), self.stream)
            };
            check("cuMemcpyHtoDAsync", status)?;
            return self.wait();
        }
        let mut ring = self.ring.lock();
        let room = ring.room(from.len(), self.stream, &self.waiting)?;
        // SAFETY: `room` begins so many bytes of the ring that no copy reads any more.
        unsafe { room.copy_from_nonoverlapping(from.as_ptr(), from.len()) };
        // SAFETY: the caller's for the device; the ring keeps the bytes until the copy is done.
        let status = unsafe {
            cu::cuMemcpyHtoDAsync_v2(to.0, room.cast::<c_void>(), from.len(), self.stream)
        };
        check("cuMemcpyHtoDAsync", status)
    }

    unsafe fn read(&self, from: Address, to: &mut [u8]) -> Result<(), GpuError> {
        if to.is_empty() {
            return self.wait();
        }
        self.bind()?;
        if to.len() > HALF {
            // As in `write`.
            self.wait()?;
            // SAFETY: the caller's for the device; the host's bytes are borrowed until the wait
            // below is over.
            let status = unsafe {
                cu::cuMemcpyDtoHAsync_v2(to.as_mut_ptr().cast(), from.0, to.len(), self.stream)
            };
            check("cuMemcpyDtoHAsync", status)?;
            return self.wait();
        }
        let mut ring = self.ring.lock();
        let room = ring.room(to.len(), self.stream, &self.waiting)?;
        // SAFETY: the caller's for the device; `room` begins so many bytes that nobody else uses
        // before the wait is over.
        let status = unsafe {
            cu::cuMemcpyDtoHAsync_v2(room.cast::<c_void>(), from.0, to.len(), self.stream)
        };
        check("cuMemcpyDtoHAsync", status)?;
        self.wait()?;
        // SAFETY: the copy into `room` is done.
        unsafe { to.as_mut_ptr().copy_from_nonoverlapping(room, to.len()) };
        Ok(())
    }

    unsafe fn copy(&self, from: Address, to: Address, bytes: usize) -> Result<(), GpuError> {
        self.bind()?;
        // Not DtoD: one of them may be memory of the host.
        // SAFETY: the caller's.
        let status = unsafe { cu::cuMemcpyAsync(to.0, from.0, bytes, self.stream) };
        check("cuMemcpyAsync", status)
    }

    unsafe fn fill(&self, at: Address, value: u8, bytes: usize) -> Result<(), GpuError> {
        self.bind()?;
        // SAFETY: the caller's.
        let status = unsafe { cu::cuMemsetD8Async(at.0, value, bytes, self.stream) };
        check("cuMemsetD8Async", status)
    }

    unsafe fn register(&self, start: *mut u8, bytes: usize) -> Result<Address, GpuError> {
        self.bind()?;
        // SAFETY: the caller's.
        let registered = unsafe { RegisteredMemory::new(start, bytes) }?;
        let device = registered.device();
        let mut kept = self.registered.lock();
        kept.push(registered);
        Ok(device)
    }

    unsafe fn unregister(&self, at: Address) {
        if self.bind().is_ok() {
            let mut kept = self.registered.lock();
            kept.retain(|registered| registered.device() != at);
        }
    }

    unsafe fn launch(&self, launch: Launch) -> Result<(), GpuError> {
        // SAFETY: the caller's.
        unsafe { self.enqueue(launch, false) }
    }

    unsafe fn launch_early(&self, launch: Launch) -> Result<(), GpuError> {
        if !self.launches_early || self.refusal.get().is_some() {
            // SAFETY: the caller's.
            return unsafe { self.enqueue(launch, false) };
        }
        // SAFETY: the caller's.
        match unsafe { self.enqueue(launch, true) } {
            // From 700 on the error is that of an earlier launch, and final.
            Err(error @ GpuError::Driver { code: ..700 | 800..900, .. }) => {
                let _ = self.refusal.set(error);
                // SAFETY: the caller's.
                unsafe { self.enqueue(launch, false) }
            }
            done => done,
        }
    }

    fn early_refusal(&self) -> Option<GpuError> {
        self.refusal.get().cloned()
    }

    fn begin_recording(&self) -> Result<(), GpuError> {
        self.begin_graph()
    }

    fn end_recording(&self) -> Result<graph::CudaGraph, GpuError> {
        self.end_graph()
    }

    unsafe fn replay(&self, graph: &graph::CudaGraph) -> Result<(), GpuError> {
        // SAFETY: the caller's.
        unsafe { self.run_graph(graph) }
    }

    fn wait(&self) -> Result<(), GpuError> {
        self.bind()?;
        // SAFETY: the stream of this context.
        let ask = || unsafe { cu::cuStreamQuery(self.stream) };
        // SAFETY: as above.
        let status = self.waiting.wait(ask, || unsafe { cu::cuStreamSynchronize(self.stream) });
        check("cuStreamSynchronize", status)
    }

    fn pulse(&self, pulse: Pulse) {
        self.waiting.pulse(pulse);
    }

    fn record(&self) -> Result<StreamEvent, GpuError> {
        self.bind()?;
        StreamEvent::record(self.stream)
    }

    fn seconds(&self, begin: &StreamEvent, end: &StreamEvent) -> Result<f64, GpuError> {
        self.bind()?;
        end.wait(&self.waiting)?;
        let mut milliseconds = 0.0f32;
        // SAFETY: events of this context that were recorded.
        let status = unsafe { cu::cuEventElapsedTime(&raw mut milliseconds, begin.0, end.0) };
        check("cuEventElapsedTime", status)?;
        Ok(f64::from(milliseconds) / 1e3)
    }

    fn uuid(&self) -> Result<[u8; 16], GpuError> {
        sharing::uuid(self.device)
    }

    fn reaches(&self, uuid: [u8; 16]) -> bool {
        // What the driver does not answer is no.
        self.shares_memory && sharing::reaches(self.device, uuid).unwrap_or(false)
    }

    fn share(&self, bytes: usize) -> Result<Option<(Address, OwnedFd)>, GpuError> {
        self.bind()?;
        if !self.shares_memory || !sharing::can_export(self.device)? {
            return Ok(None);
        }
        sharing::export(self.device, bytes).map(Some)
    }

    fn map_shared(&self, memory: BorrowedFd<'_>, bytes: usize) -> Result<Address, GpuError> {
        self.bind()?;
        if !self.shares_memory {
            return Err(GpuError::NotShared("the driver lacks functions for it"));
        }
        sharing::import(self.device, memory, bytes)
    }

    unsafe fn unmap_shared(&self, at: Address, bytes: usize) {
        if self.bind().is_ok() {
            // SAFETY: the caller's.
            unsafe { sharing::unmap(self.device, at, bytes) };
        }
    }

    fn memory(&self) -> Result<(usize, usize), GpuError> {
        self.bind()?;
        free_and_total()
    }

    fn unit_time(&self) -> Duration {
        Duration::from_millis(2)
    }

    fn properties(&self) -> &Properties {
        &self.properties
    }
}

/// Of the context that is current.
fn free_and_total() -> Result<(usize, usize), GpuError> {
    let (mut free, mut total) = (0, 0);
    // SAFETY: a context is current; places for two numbers.
    let status = unsafe { cu::cuMemGetInfo_v2(&raw mut free, &raw mut total) };
    check("cuMemGetInfo", status)?;
    Ok((free, total))
}

fn make_current(context: cu::CUcontext) -> Result<(), GpuError> {
    // SAFETY: a context that is never destroyed.
    let status = unsafe { cu::cuCtxSetCurrent(context) };
    check("cuCtxSetCurrent", status)
}

/// A device that the kernels are made for, and what it is.
fn find(ordinal: u32) -> Result<(cu::CUdevice, Properties), OpenError> {
    let found = probe::probe()?;
    if ordinal >= found.devices {
        let count = found.devices;
        return Err(NoCuda::NoSuchDevice { ordinal, count }.into());
    }
    let failed = |source| OpenError::Call { ordinal, source };
    let device = device(ordinal).map_err(failed)?;
    let properties = properties(device).map_err(failed)?;
    if properties.architecture < 80 {
        return Err(OpenError::TooOld {
            ordinal,
            name: properties.name,
            major: properties.architecture / 10,
            minor: properties.architecture % 10,
        });
    }
    Ok((device, properties))
}

fn device(ordinal: u32) -> Result<cu::CUdevice, GpuError> {
    let mut device = 0;
    let ordinal = c_int::try_from(ordinal).unwrap_or(c_int::MAX);
    // SAFETY: a place for a device.
    let status = unsafe { cu::cuDeviceGet(&raw mut device, ordinal) };
    check("cuDeviceGet", status)?;
    Ok(device)
}

fn attribute(device: cu::CUdevice, which: cu::CUdevice_attribute) -> Result<u32, GpuError> {
    let mut value: c_int = 0;
    // SAFETY: a place for an int.
    let status = unsafe { cu::cuDeviceGetAttribute(&raw mut value, which, device) };
    check("cuDeviceGetAttribute", status)?;
    Ok(u32::try_from(value).unwrap_or(0))
}

fn properties(device: cu::CUdevice) -> Result<Properties, GpuError> {
    use cu::CUdevice_attribute as Attribute;
    let attribute = |which: Attribute| attribute(device, which);
    let mut name = [0; 128];
    // SAFETY: a place for that many characters.
    let status = unsafe { cu::cuDeviceGetName(name.as_mut_ptr(), 128, device) };
    check("cuDeviceGetName", status)?;
    let major = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
    let minor = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
    Ok(Properties {
        name: probe::text(&name),
        architecture: major * 10 + minor,
        multiprocessors: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
        shared_bytes: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
        image: String::new(),
    })
}

#[cfg(all(test, feature = "emu"))]
mod tests;
