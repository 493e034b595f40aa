//! The emulator as a device: `kernels/cuda/emu` runs the same `.cu` files on the CPU. A launch
//! returns after the kernel has run. Device memory is host memory at the same address. For tests;
//! the feature `emu` builds it and needs g++. Memory that processes share is a memfd.

use std::alloc::Layout;
use std::collections::HashMap;
use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use shared::shm::arena::ArenaMap;
use shared::shm::segment::MemfdSegment;

use super::address::Address;
use super::gpu::{Gpu, GpuError, Launch, Properties, Pulse};

unsafe extern "C" {
    #[cfg(test)]
    fn sepal_emu_export(
        index: c_uint,
        source: *mut *const c_char,
        name: *mut *const c_char,
        value: *mut u32,
    ) -> bool;
    fn sepal_emu_kernel(index: c_uint) -> *const c_char;
    fn sepal_emu_lacks() -> *const c_char;
    fn sepal_emu_launch(
        name: *const c_char,
        grid: *const c_uint,
        cta: *const c_uint,
        shared_bytes: c_uint,
        params: *mut *mut c_void,
        sizes: *const c_uint,
        count: c_uint,
        threads: c_uint,
        order: u64,
        adds_backwards: bool,
        early: *const u64,
    ) -> c_int;
    fn sepal_emu_rehearse(
        name: *const c_char,
        grid: *const c_uint,
        cta: *const c_uint,
        shared_bytes: c_uint,
        params: *mut *mut c_void,
        sizes: *const c_uint,
        count: c_uint,
    ) -> u64;
}

/// Instructions that the kernels were compiled for and this processor lacks.
fn lacks() -> Option<String> {
    // SAFETY: it may be called at any time.
    let name = unsafe { sepal_emu_lacks() };
    // SAFETY: a static C string.
    (!name.is_null()).then(|| unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned())
}

/// Where a `libcuda.so` lies whose devices are the emulator (`kernels/cuda/emu/driver.cpp`): a
/// process that has the folder in `LD_LIBRARY_PATH` runs the driver's side of the backend on it.
/// Not made when the kernels are built with a sanitizer.
pub const DRIVER_FOLDER: &str = concat!(env!("OUT_DIR"), "/driver");

/// Alignment of device memory.
const ALIGNMENT: usize = 256;

/// The emulated device.
#[derive(Debug)]
pub struct Emu {
    threads: u32,
    order: u64,
    adds_backwards: bool,
    properties: Properties,
    memory_bytes: usize,
    taken_bytes: AtomicUsize,
    /// Its number among the emulated devices, and whether it reaches the memory of others.
    ordinal: u32,
    has_peers: bool,
    /// Most bytes that one call registers, and all together.
    most_registered: [usize; 2],
    /// Bytes that are registered, by their address.
    registered: Mutex<HashMap<u64, usize>>,
    /// Memory that is shared with other devices, by its address.
    shared: Mutex<HashMap<u64, Mapped>>,
    /// What was enqueued since the recording began, while there is one.
    recorded: Mutex<Option<Vec<GraphCommand>>>,
    pulse: EmuPulse,
}

/// Memory that several emulated devices map.
#[derive(Debug)]
struct Mapped {
    memory: ArenaMap,
    /// Whether this device made it.
    is_own: bool,
}

/// What is called while a kernel runs that may wait for other devices.
#[derive(Default)]
struct EmuPulse(OnceLock<Pulse>);

impl std::fmt::Debug for EmuPulse {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("EmuPulse").field(&self.0.get().is_some()).finish()
    }
}

/// Longest time between two beats of the pulse.
const BEAT: Duration = Duration::from_millis(1);

/// What can be recorded.
#[allow(clippy::large_enum_variant, reason = "nearly all of them are launches")]
#[derive(Clone, Copy, Debug)]
enum GraphCommand {
    Launch(Launch),
    /// A launch that may start early.
    Early(Launch),
    Copy(Address, Address, usize),
    Fill(Address, u8, usize),
}

/// Commands that were recorded; each runs as if it were enqueued.
#[derive(Debug)]
pub struct EmuGraph(Vec<GraphCommand>);

impl Emu {
    /// Whether `command` was recorded instead.
    fn is_recorded(&self, command: GraphCommand) -> bool {
        let mut recorded = self.recorded.lock();
        recorded.as_mut().map(|all| all.push(command)).is_some()
    }

    /// A device whose CTAs run on `threads` threads of the host.
    pub fn new(threads: usize) -> Emu {
        Emu::with_order(threads, 1)
    }

    /// The same; threads take turns in an order drawn from `seed` (1: one after the other). With an
    /// even one, bulk copies are carried out as soon as they are asked for, otherwise as late
    /// as may be.
    ///
    /// # Panics
    /// If the kernels were compiled on a machine whose processor has instructions that this one lacks.
    pub fn with_order(threads: usize, seed: u64) -> Emu {
        if let Some(instructions) = lacks() {
            panic!(
                "the emulator was compiled for a processor with {instructions}, which this one lacks: \
                 compile it here (cargo clean -p kernels)"
            );
        }
        Emu {
            threads: u32::try_from(threads).unwrap_or(1).max(1),
            order: seed.max(1),
            adds_backwards: false,
            memory_bytes: MEMORY_BYTES,
            taken_bytes: AtomicUsize::new(0),
            ordinal: 0,
            has_peers: true,
            most_registered: [usize::MAX; 2],
            registered: Mutex::default(),
            shared: Mutex::default(),
            recorded: Mutex::default(),
            pulse: EmuPulse::default(),
            properties: Properties {
                name: "emulator".to_owned(),
                architecture: 90,
                multiprocessors: 4,
                shared_bytes: 227 * 1024,
                image: "C++".to_owned(),
            },
        }
    }
}

impl Emu {
    /// The same with so much memory: more than that is refused.
    #[must_use]
    pub fn with_memory(mut self, bytes: usize) -> Emu {
        self.memory_bytes = bytes;
        self
    }
}

impl Emu {
    /// The same as a device of another compute capability (times ten).
    #[must_use]
    pub fn with_architecture(mut self, architecture: u32) -> Emu {
        self.properties.architecture = architecture;
        self
    }

    /// The same with so many multiprocessors.
    #[must_use]
    pub fn with_multiprocessors(mut self, count: u32) -> Emu {
        self.properties.multiprocessors = count;
        self
    }

    /// The same as device `ordinal` of several.
    #[must_use]
    pub fn with_ordinal(mut self, ordinal: u32) -> Emu {
        self.ordinal = ordinal;
        self
    }

    /// The same as a device that reaches the memory of other devices, as it does by default, or not.
    #[must_use]
    pub fn with_peers(mut self, has_peers: bool) -> Emu {
        self.has_peers = has_peers;
        self
    }

    /// The same on a host that registers at most `once` bytes at once and `in_all` in all.
    #[must_use]
    pub fn with_registrations(mut self, once: usize, in_all: usize) -> Emu {
        self.most_registered = [once, in_all];
        self
    }

    /// The same as a device whose warpgroups round otherwise than its warps.
    #[must_use]
    pub fn with_other_rounding(mut self) -> Emu {
        self.adds_backwards = true;
        self
    }
}

impl Emu {
    /// Takes as many bytes of the device's memory, if there are so many.
    fn take(&self, bytes: usize) -> Result<(), GpuError> {
        let more = |taken: usize| {
            let taken = taken.checked_add(bytes)?;
            (taken <= self.memory_bytes).then_some(taken)
        };
        let taken = self.taken_bytes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more);
        taken.map(|_| ()).map_err(|_| GpuError::OutOfMemory { bytes })
    }

    fn give_back(&self, bytes: usize) {
        self.taken_bytes.fetch_sub(bytes, Ordering::Relaxed);
    }

    /// Keeps a mapping until it is undone; its address.
    fn keep(&self, mapped: Mapped, bytes: usize) -> Result<Address, GpuError> {
        let start = mapped.memory.pointer(0, bytes);
        let start = start.map_err(|_| GpuError::NotShared("it is shorter"))?;
        let at = Address(start.expose_provenance() as u64);
        self.shared.lock().insert(at.0, mapped);
        Ok(at)
    }

    /// Runs a kernel; `early` as in [`enqueue`](Self::enqueue).
    ///
    /// # Safety
    /// That of [`Gpu::launch`].
    unsafe fn run(&self, mut launch: Launch, early: Option<u64>) -> Result<(), GpuError> {
        let kernel = launch.kernel;
        let bad = |what| GpuError::BadLaunch { kernel, what };
        let name = CString::new(kernel).map_err(|_| GpuError::NoKernel(kernel))?;
        let sizes = launch.params.sizes().to_vec();
        let mut params: Vec<*mut c_void> =
            launch.params.words().iter_mut().map(|word| std::ptr::from_mut(word).cast()).collect();
        let count = c_uint::try_from(sizes.len()).unwrap_or(c_uint::MAX);
        // SAFETY: arrays of the lengths that are named with them, which live until the call
        // returns; what the parameters point to is the caller's.
        let status = unsafe {
            sepal_emu_launch(
                name.as_ptr(),
                launch.grid.as_ptr(),
                launch.cta.as_ptr(),
                launch.shared_bytes,
                params.as_mut_ptr(),
                sizes.as_ptr(),
                count,
                self.threads,
                self.order,
                self.adds_backwards,
                early.as_ref().map_or(std::ptr::null(), std::ptr::from_ref),
            )
        };
        match status {
            0 => Ok(()),
            1 => Err(GpuError::NoKernel(kernel)),
            2 => Err(bad("the parameters are not those of its declaration")),
            4 => Err(bad("a grid that its clusters do not fill")),
            5 => Err(bad("it reads before pdl_wait what an earlier launch wrote")),
            6 => Err(bad("it may start early, and a thread ends without pdl_wait")),
            _ => Err(bad("a grid, a CTA or shared memory beyond what devices have")),
        }
    }

    /// Runs a kernel, or refuses it. Of one that may start early, `early` has the state at its wait
    /// before the launches that it may overlap, or 0.
    ///
    /// # Safety
    /// That of [`Gpu::launch`].
    unsafe fn enqueue(&self, launch: Launch, early: Option<u64>) -> Result<(), GpuError> {
        if launch.params.too_large() {
            let what = "a parameter does not fit";
            return Err(GpuError::BadLaunch { kernel: launch.kernel, what });
        }
        match self.pulse.0.get() {
            // SAFETY: the caller's.
            Some(pulse) if waits_for_others(launch.kernel) => unsafe {
                self.run_beside(launch, early, pulse)
            },
            // SAFETY: the caller's.
            _ => unsafe { self.run(launch, early) },
        }
    }

    /// Runs a kernel on another thread, and beats here meanwhile.
    ///
    /// # Safety
    /// That of [`Gpu::launch`].
    unsafe fn run_beside(
        &self,
        launch: Launch,
        early: Option<u64>,
        pulse: &Pulse,
    ) -> Result<(), GpuError> {
        let waiting = std::thread::current();
        let is_done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let running = scope.spawn(|| {
                // SAFETY: the caller's.
                let done = unsafe { self.run(launch, early) };
                is_done.store(true, Ordering::Release);
                waiting.unpark();
                done
            });
            while !is_done.load(Ordering::Acquire) {
                std::thread::park_timeout(BEAT);
                pulse();
            }
            running.join().expect("a kernel ends the process rather than its thread")
        })
    }
}

/// The state of a launch at its wait, if it began now; 0: not known.
///
/// # Safety
/// That of [`Gpu::launch`].
unsafe fn rehearse(mut launch: Launch) -> u64 {
    let Ok(name) = CString::new(launch.kernel) else {
        return 0;
    };
    let sizes = launch.params.sizes().to_vec();
    let mut params: Vec<*mut c_void> =
        launch.params.words().iter_mut().map(|word| std::ptr::from_mut(word).cast()).collect();
    let count = c_uint::try_from(sizes.len()).unwrap_or(c_uint::MAX);
    // SAFETY: arrays of the lengths that are named with them, which live until the call returns;
    // what the parameters point to is the caller's.
    unsafe {
        sepal_emu_rehearse(
            name.as_ptr(),
            launch.grid.as_ptr(),
            launch.cta.as_ptr(),
            launch.shared_bytes,
            params.as_mut_ptr(),
            sizes.as_ptr(),
            count,
        )
    }
}

/// Whether a kernel may wait for other devices.
fn waits_for_others(kernel: &str) -> bool {
    kernel.starts_with("exchange_")
}

/// What `/proc/PID/maps` shows of memory that emulated devices share.
const SHARED_NAME: &str = "sepal-emulated-memory";

/// What the identity of every emulated device begins with; its ordinal follows.
const UUID: [u8; 16] = *b"emulator no \0\0\0\0";

/// Memory of a device that nobody has limited.
const MEMORY_BYTES: usize = 8 << 30;

/// Names of all kernels that the emulator runs.
pub fn kernels() -> Vec<String> {
    // SAFETY: any index may be asked for; names are static.
    let name = |index| unsafe { sepal_emu_kernel(index) };
    (0..)
        .map(name)
        .take_while(|name| !name.is_null())
        .map(|name| {
            // SAFETY: not null, so a static C string.
            let name = unsafe { CStr::from_ptr(name) };
            name.to_string_lossy().into_owned()
        })
        .collect()
}

fn pointer(at: Address) -> *mut u8 {
    std::ptr::with_exposed_provenance_mut(at.0 as usize)
}

impl Gpu for Emu {
    type Event = Instant;
    type Graph = EmuGraph;

    fn allocate(&self, bytes: usize) -> Result<Address, GpuError> {
        let layout = Layout::from_size_align(bytes, ALIGNMENT)
            .map_err(|_| GpuError::OutOfMemory { bytes })?;
        self.take(bytes)?;
        // SAFETY: `bytes` is not 0, as the trait says.
        let start = unsafe { std::alloc::alloc(layout) };
        if start.is_null() {
            return Err(GpuError::OutOfMemory { bytes });
        }
        // Freshly allocated memory reads as NaN.
        // SAFETY: `start` begins `bytes` bytes of ours.
        unsafe { start.write_bytes(0xff, bytes) };
        Ok(Address(start.expose_provenance() as u64))
    }

    unsafe fn release(&self, at: Address, bytes: usize) {
        if let Ok(layout) = Layout::from_size_align(bytes, ALIGNMENT) {
            self.give_back(bytes);
            // SAFETY: allocated above with this layout, says the caller.
            unsafe { std::alloc::dealloc(pointer(at), layout) };
        }
    }

    unsafe fn write(&self, from: &[u8], to: Address) -> Result<(), GpuError> {
        // SAFETY: the caller's; a slice of the host does not overlap device memory.
        unsafe { pointer(to).copy_from_nonoverlapping(from.as_ptr(), from.len()) };
        Ok(())
    }

    unsafe fn read(&self, from: Address, to: &mut [u8]) -> Result<(), GpuError> {
        // SAFETY: the caller's; a slice of the host does not overlap device memory.
        unsafe { to.as_mut_ptr().copy_from_nonoverlapping(pointer(from), to.len()) };
        Ok(())
    }

    unsafe fn copy(&self, from: Address, to: Address, bytes: usize) -> Result<(), GpuError> {
        if self.is_recorded(GraphCommand::Copy(from, to, bytes)) {
            return Ok(());
        }
        // SAFETY: the caller's.
        unsafe { pointer(to).copy_from_nonoverlapping(pointer(from), bytes) };
        Ok(())
    }

    unsafe fn fill(&self, at: Address, value: u8, bytes: usize) -> Result<(), GpuError> {
        if self.is_recorded(GraphCommand::Fill(at, value, bytes)) {
            return Ok(());
        }
        // SAFETY: the caller's.
        unsafe { pointer(at).write_bytes(value, bytes) };
        Ok(())
    }

    unsafe fn register(&self, start: *mut u8, bytes: usize) -> Result<Address, GpuError> {
        let mut registered = self.registered.lock();
        let [once, in_all] = self.most_registered;
        let before: usize = registered.values().sum();
        if bytes > once || before.saturating_add(bytes) > in_all {
            return Err(GpuError::OutOfMemory { bytes });
        }
        let at = start.expose_provenance() as u64;
        registered.insert(at, bytes);
        Ok(Address(at))
    }

    unsafe fn unregister(&self, at: Address) {
        self.registered.lock().remove(&at.0);
    }

    unsafe fn launch(&self, launch: Launch) -> Result<(), GpuError> {
        if self.is_recorded(GraphCommand::Launch(launch)) {
            return Ok(());
        }
        // SAFETY: the caller's.
        unsafe { self.enqueue(launch, None) }
    }

    unsafe fn launch_early(&self, launch: Launch) -> Result<(), GpuError> {
        if self.properties.architecture < 90 {
            // SAFETY: the caller's.
            return unsafe { self.launch(launch) };
        }
        if self.is_recorded(GraphCommand::Early(launch)) {
            return Ok(());
        }
        // SAFETY: the caller's.
        unsafe { self.enqueue(launch, Some(0)) }
    }

    fn early_refusal(&self) -> Option<GpuError> {
        None
    }

    fn begin_recording(&self) -> Result<(), GpuError> {
        *self.recorded.lock() = Some(Vec::new());
        Ok(())
    }

    fn end_recording(&self) -> Result<EmuGraph, GpuError> {
        Ok(EmuGraph(self.recorded.lock().take().unwrap_or_default()))
    }

    unsafe fn replay(&self, graph: &EmuGraph) -> Result<(), GpuError> {
        let mut states = vec![0; graph.0.len()];
        for (at, command) in graph.0.iter().enumerate() {
            // The first command of a graph waits for all before it, as a launch after a copy does.
            let is_after_launch = at > 0
                && matches!(graph.0[at - 1], GraphCommand::Launch(_) | GraphCommand::Early(_));
            match *command {
                GraphCommand::Early(launch) if is_after_launch => {
                    // SAFETY: the caller's.
                    unsafe { self.enqueue(launch, Some(states[at])) }?;
                }
                GraphCommand::Launch(launch) | GraphCommand::Early(launch) => {
                    let mut rest = states.iter_mut().zip(&graph.0).skip(at + 1);
                    while let Some((state, GraphCommand::Early(next))) = rest.next() {
                        // SAFETY: the caller's.
                        *state = unsafe { rehearse(*next) };
                    }
                    let early = matches!(command, GraphCommand::Early(_)).then_some(0);
                    // SAFETY: the caller's.
                    unsafe { self.enqueue(launch, early) }?;
                }
                // SAFETY: the caller's.
                GraphCommand::Copy(from, to, bytes) => unsafe { self.copy(from, to, bytes) }?,
                // SAFETY: the caller's.
                GraphCommand::Fill(at, value, bytes) => unsafe { self.fill(at, value, bytes) }?,
            }
        }
        Ok(())
    }

    fn wait(&self) -> Result<(), GpuError> {
        Ok(())
    }

    fn pulse(&self, pulse: Pulse) {
        let _ = self.pulse.0.set(pulse);
    }

    fn record(&self) -> Result<Instant, GpuError> {
        Ok(Instant::now())
    }

    fn seconds(&self, begin: &Instant, end: &Instant) -> Result<f64, GpuError> {
        Ok(end.saturating_duration_since(*begin).as_secs_f64())
    }

    fn uuid(&self) -> Result<[u8; 16], GpuError> {
        let mut uuid = UUID;
        uuid[12..].copy_from_slice(&self.ordinal.to_le_bytes());
        Ok(uuid)
    }

    fn reaches(&self, uuid: [u8; 16]) -> bool {
        self.uuid() == Ok(uuid) || self.has_peers && uuid[..12] == UUID[..12]
    }

    fn share(&self, bytes: usize) -> Result<Option<(Address, OwnedFd)>, GpuError> {
        self.take(bytes)?;
        let made = MemfdSegment::create(SHARED_NAME, bytes).ok().and_then(|segment| {
            let fd = segment.try_clone().ok()?;
            Some((ArenaMap::map(&segment).ok()?, fd))
        });
        let Some((memory, fd)) = made else {
            self.give_back(bytes);
            return Err(GpuError::OutOfMemory { bytes });
        };
        let at = self.keep(Mapped { memory, is_own: true }, bytes)?;
        // SAFETY: as many bytes of a fresh mapping.
        unsafe { pointer(at).write_bytes(0xff, bytes) };
        Ok(Some((at, fd)))
    }

    fn map_shared(&self, memory: BorrowedFd<'_>, bytes: usize) -> Result<Address, GpuError> {
        if !self.has_peers {
            return Err(GpuError::NotShared("this device reaches no other device"));
        }
        let refused = |_| GpuError::NotShared("the descriptor is not memory of this size");
        let fd = memory
            .try_clone_to_owned()
            .map_err(|_| GpuError::NotShared("the process is out of descriptors"))?;
        let segment = MemfdSegment::from_fd(SHARED_NAME, fd, bytes).map_err(refused)?;
        let memory = ArenaMap::map(&segment).map_err(refused)?;
        self.keep(Mapped { memory, is_own: false }, bytes)
    }

    unsafe fn unmap_shared(&self, at: Address, bytes: usize) {
        let mut all = self.shared.lock();
        if let Some(mapped) = all.remove(&at.0)
            && mapped.is_own
        {
            self.give_back(bytes);
        }
    }

    fn memory(&self) -> Result<(usize, usize), GpuError> {
        let taken = self.taken_bytes.load(Ordering::Relaxed);
        let free = self.memory_bytes.saturating_sub(taken);
        Ok((free, self.memory_bytes))
    }

    fn unit_time(&self) -> Duration {
        // It is slower by more than that.
        Duration::from_millis(200)
    }

    fn properties(&self) -> &Properties {
        &self.properties
    }
}

#[cfg(test)]
mod early_tests;
#[cfg(test)]
mod tests;
