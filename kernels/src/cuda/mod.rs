//! CUDA devices as a backend. The kernels are `kernels/cuda/*.cu`; `kernels/cuda/README.md` says
//! how one is added.
//!
//! ```text
//! Backend (blocks)  ->  ops/<op>.rs: checks, chooses the kernel, launches  ->  Gpu: driver | emulator
//! ```
//! One caller at a time. A failed allocation or launch is remembered: that operation and every
//! later one return it, since what the device holds is then unspecified.
#![allow(unsafe_code, reason = "device memory and launches; each use says why it holds")]

pub mod adapters;
mod address;
mod agree;
pub mod arena;
mod backend;
mod batch;
pub mod cache;
pub mod driver;
#[cfg(feature = "emu")]
pub mod emu;
pub mod experts;
pub mod gpu;
pub mod group;
mod host_memory;
pub mod matrix;
pub mod memory;
pub(crate) mod ops;
pub mod pages;
pub mod peaks;
pub mod scratch;
mod sharing;
pub mod step;

use std::sync::Arc;

/// What the budget of the kernels computes for whole blocks: JSON, microseconds by device, format and
/// sessions (`kernels/prebuilt/budget.py --write`).
pub const BUDGET: &str = include_str!("../../prebuilt/budget.json");

pub use adapters::Adapters;
pub use address::{Address, Floats};
pub use arena::MappedArena;
pub use cache::Cache;
pub use experts::Experts;
pub use gpu::{Gpu, GpuError, Launch, Params, Properties};
pub use matrix::{Matrix, MatrixParts};
pub use memory::{Buffer, PooledMemory, Taken};
pub use pages::Pages;
pub use step::Recorded;

use shared::warpgroups::WarpgroupKernels;

use crate::kv::StepRow;
use crate::ops::{OpError, check_len};
use crate::slice::WeightSlice;
use crate::tensor::{Format, WeightView};
use crate::tuning;
use memory::MemoryPool;

/// The CUDA backend over a device.
#[derive(Debug)]
pub struct Cuda<G: Gpu> {
    gpu: Arc<G>,
    pool: Arc<MemoryPool<G>>,
    failure: Option<GpuError>,
    constants: Vec<(Vec<f32>, PooledMemory<G>)>,
    /// The last batch, and room for the next.
    batch: Option<(Vec<u32>, PooledMemory<G>)>,
    /// The last adapters of rows.
    of_rows: Option<(Vec<u32>, PooledMemory<G>)>,
    words: Vec<u32>,
    /// Memory of steps that are recorded, once it is reserved.
    fixed: Option<step::Fixed<G>>,
    recording: Recording,
    launches: u64,
    /// The other ranks, if blocks are shared with some.
    group: group::Membership<G>,
    /// The kernels for warpgroups that are used instead of those for warps.
    warpgroups: WarpgroupKernels,
    /// Those that may be launched, if the device has warpgroups.
    harmless: WarpgroupKernels,
    /// Whom to tell of each launch.
    watch: Option<Watch>,
    /// Whether the next launch waits for the end of all before it, whatever its kernel does.
    in_order: bool,
}

/// Whether launches are recorded instead of run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Recording {
    Off,
    On,
    /// Launches are recorded, and an operation asked for something that only the host can do.
    Refused,
}

/// Is told the name of a kernel before it is launched.
pub type Watch = fn(&'static str);

/// Rows whose parts are not all there, which [`WeightView::rows`] never makes.
const APART: OpError = OpError::Shape { op: "matrix", what: "the parts of the rows do not fit" };

/// Arrays of constants that are kept.
const MAX_CONSTANTS: usize = 32;

impl<G: Gpu> Cuda<G> {
    /// A backend over `gpu`.
    pub fn new(gpu: G) -> Cuda<G> {
        Cuda::with_pool(Arc::new(gpu), false)
    }

    /// The same, slower: every piece of memory is as large as asked for and goes back to the device
    /// at once, so that an instrument sees what kernels do beyond its ends.
    pub fn exact(gpu: G) -> Cuda<G> {
        Cuda::with_pool(Arc::new(gpu), true)
    }

    fn with_pool(gpu: Arc<G>, is_exact: bool) -> Cuda<G> {
        Cuda {
            pool: MemoryPool::new(Arc::clone(&gpu), is_exact),
            gpu,
            failure: None,
            constants: Vec::new(),
            batch: None,
            of_rows: None,
            words: Vec::new(),
            fixed: None,
            recording: Recording::Off,
            launches: 0,
            group: group::Membership::Alone,
            warpgroups: WarpgroupKernels::NONE,
            harmless: WarpgroupKernels::ALL,
            watch: None,
            in_order: false,
        }
    }

    /// From now on `watch` is told of each kernel before it is launched, and each launch is waited
    /// for unless it is recorded, so that a failure names its kernel ([`GpuError::Kernel`]) and
    /// a kernel that never ends is the last one told. `None` ends that.
    pub fn watch(&mut self, watch: Option<Watch>) {
        self.watch = watch;
    }

    /// The device.
    pub fn gpu(&self) -> &G {
        &self.gpu
    }

    /// Has `pulse` called while the host waits for the device: [`Gpu::pulse`].
    pub fn pulse(&self, pulse: gpu::Pulse) {
        self.gpu.pulse(pulse);
    }

    /// What the device was asked for so far.
    pub fn taken(&self) -> Taken {
        self.pool.taken()
    }

    /// A buffer of `len` elements of unspecified content. A device that has no memory for it fails
    /// the next operation.
    pub fn buffer(&mut self, len: usize) -> Buffer<G> {
        let memory = self.pool.take(len.saturating_mul(4)).or_else(|error| {
            self.failure.get_or_insert(error);
            self.pool.take(0)
        });
        Buffer::new(memory.expect("memory of no bytes is always there"))
    }

    /// Copies host values to the start of `to`.
    ///
    /// # Errors
    /// When `to` is shorter, or the device fails.
    pub fn upload(&mut self, from: &[f32], to: &mut Floats) -> Result<(), OpError> {
        self.host("an upload")?;
        check_len("upload", "to", to.len(), 1, from.len())?;
        // SAFETY: `to` is a live buffer, at least as long.
        let done = unsafe { self.gpu.write(bytes_of(from), to.address()) };
        self.noted(done)
    }

    /// Copies the first values of `from` to the host, after all operations before it.
    ///
    /// # Errors
    /// When `from` is shorter, or the device fails or failed.
    pub fn download(&mut self, from: &Floats, to: &mut [f32]) -> Result<(), OpError> {
        self.host("a download")?;
        check_len("download", "from", from.len(), 1, to.len())?;
        // SAFETY: `from` is a live buffer, at least as long.
        let done = unsafe { self.gpu.read(from.address(), bytes_of_mut(to)) };
        self.noted(done)?;
        self.check_group()
    }

    /// Copies the first `len` values of `from` to the start of `to`.
    ///
    /// # Errors
    /// When one of them is shorter, or the device fails.
    pub fn copy(&mut self, from: &Floats, to: &mut Floats, len: usize) -> Result<(), OpError> {
        self.health()?;
        check_len("copy", "from", from.len(), 1, len)?;
        check_len("copy", "to", to.len(), 1, len)?;
        if len == 0 {
            return Ok(());
        }
        // SAFETY: both hold `len` values; a borrow to write and one to read do not overlap.
        let done = unsafe { self.gpu.copy(from.address(), to.address(), len * 4) };
        self.noted(done)
    }

    /// Copies a matrix to the device, as it is stored, but NF4 for tensor cores in tiles; rows of a
    /// larger quantized matrix as a slice in memory of its own.
    ///
    /// # Errors
    /// When the device has no memory for it, or fails.
    pub fn matrix(&mut self, weight: WeightView<'_>) -> Result<Matrix<G>, OpError> {
        self.host("a new matrix")?;
        let gathered = weight.lies_apart().then(|| WeightSlice::gathered(weight));
        let weight = match &gathered {
            Some(slice) => slice.as_ref().and_then(WeightSlice::view).ok_or(APART)?,
            None => weight,
        };
        let memory = match weight.format() {
            Format::Nf4(parts) if matrix::is_tiled(&weight) => {
                let shape = [weight.outputs(), weight.inputs()];
                ops::repack::upload(self, &parts, shape, tuning::CUDA_REPACK_BYTES)?
            }
            Format::Plain | Format::Int8(_) | Format::Nf4(_) => {
                let memory = self.pool.take_exactly(weight.bytes().len())?;
                // SAFETY: the memory is of that length.
                let done = unsafe { self.gpu.write(weight.bytes(), memory.address()) };
                self.noted(done)?;
                memory
            }
        };
        Ok(Matrix::new(&weight, memory))
    }

    /// Memory of `bytes` bytes for one operation: workspace. It may be dropped as soon as the
    /// launches that use it are enqueued.
    ///
    /// # Errors
    /// When the device has none, or failed.
    pub fn scratch(&mut self, bytes: usize) -> Result<PooledMemory<G>, OpError> {
        self.host("workspace")?;
        let taken = self.pool.take(bytes);
        self.noted(taken)
    }

    /// Memory of exactly `bytes` bytes, for what stays.
    ///
    /// # Errors
    /// When the device has none, or failed.
    pub fn reserve(&mut self, bytes: usize) -> Result<PooledMemory<G>, OpError> {
        self.host("new memory")?;
        let taken = self.pool.take_exactly(bytes);
        self.noted(taken)
    }

    /// Copies host bytes to byte `at` of `to`.
    ///
    /// # Errors
    /// When they do not fit, or the device fails.
    pub fn upload_bytes(
        &mut self,
        from: &[u8],
        to: &mut PooledMemory<G>,
        at: usize,
    ) -> Result<(), OpError> {
        self.host("an upload")?;
        check_len("upload", "to", to.bytes(), 1, at.saturating_add(from.len()))?;
        // SAFETY: checked to lie within `to`.
        let done = unsafe { self.gpu.write(from, to.address().offset(at)) };
        self.noted(done)
    }

    /// Copies bytes from byte `at` of `from` on to the host, after all operations before it.
    ///
    /// # Errors
    /// When there are not so many, or the device fails or failed.
    pub fn download_bytes(
        &mut self,
        from: &PooledMemory<G>,
        at: usize,
        to: &mut [u8],
    ) -> Result<(), OpError> {
        self.host("a download")?;
        check_len("download", "from", from.bytes(), 1, at.saturating_add(to.len()))?;
        // SAFETY: checked to lie within `from`.
        let done = unsafe { self.gpu.read(from.address().offset(at), to) };
        self.noted(done)?;
        self.check_group()
    }

    /// Copies `bytes` bytes within `memory`, from byte `from` to byte `to` on.
    ///
    /// # Errors
    /// When they are not there or overlap, or the device fails.
    pub fn copy_within(
        &mut self,
        memory: &mut PooledMemory<G>,
        from: usize,
        to: usize,
        bytes: usize,
    ) -> Result<(), OpError> {
        self.health()?;
        let end = from.max(to).saturating_add(bytes);
        check_len("copy", "memory", memory.bytes(), 1, end)?;
        if from.abs_diff(to) < bytes {
            return Err(OpError::Shape { op: "copy", what: "the ranges overlap" });
        }
        let (from, to) = (memory.address().offset(from), memory.address().offset(to));
        // SAFETY: both lie within `memory`, and apart.
        let done = unsafe { self.gpu.copy(from, to, bytes) };
        self.noted(done)
    }

    /// Waits for all that was enqueued.
    ///
    /// # Errors
    /// When the device fails or failed.
    pub fn wait(&mut self) -> Result<(), OpError> {
        self.host("a wait")?;
        let done = self.gpu.wait();
        self.noted(done)?;
        self.check_group()
    }

    /// Words of the host on the device, for one operation, as [`scratch`](Self::scratch).
    ///
    /// # Errors
    /// When the device has no memory for them, or fails.
    pub fn words(&mut self, words: &[u32]) -> Result<PooledMemory<G>, OpError> {
        let memory = self.scratch(size_of_val(words))?;
        // SAFETY: the memory is of that length.
        let done = unsafe { self.gpu.write(bytes_of(words), memory.address()) };
        self.noted(done)?;
        Ok(memory)
    }

    /// Numbers of the host on the device, for one operation, as [`scratch`](Self::scratch).
    ///
    /// # Errors
    /// When the device has no memory for them, or fails.
    pub fn floats(&mut self, values: &[f32]) -> Result<PooledMemory<G>, OpError> {
        let memory = self.scratch(size_of_val(values))?;
        // SAFETY: the memory is of that length.
        let done = unsafe { self.gpu.write(bytes_of(values), memory.address()) };
        self.noted(done)?;
        Ok(memory)
    }

    /// A copy of numbers that hardly ever change (frequencies, slopes, tables), kept for the next
    /// operation that names the same.
    ///
    /// # Errors
    /// When the device has no memory for them, or fails.
    pub fn constants(&mut self, values: &[f32]) -> Result<Address, OpError> {
        self.health()?;
        let same = |kept: &[f32]| bytes_of(kept) == bytes_of(values);
        if let Some((_, memory)) = self.constants.iter().find(|(kept, _)| same(kept)) {
            return Ok(memory.address());
        }
        self.host("a new constant")?;
        let memory = self.floats(values)?;
        let address = memory.address();
        // Recorded launches name constants; a model has few.
        if self.constants.len() >= MAX_CONSTANTS && self.fixed.is_none() {
            self.constants.remove(0);
        }
        self.constants.push((values.to_vec(), memory));
        Ok(address)
    }

    /// The rows of a step on the device, for `batch_of` in `common.cuh`. The same rows are copied
    /// once, however many operations name them.
    ///
    /// # Errors
    /// When a number does not fit 32 bits, or the device fails.
    pub fn batch(&mut self, rows: &[StepRow<'_>]) -> Result<Address, OpError> {
        if let Some(fixed) = self.fixed() {
            return Ok(fixed.batch());
        }
        let mut words = std::mem::take(&mut self.words);
        batch::write(rows, 0, &mut words)?;
        if let Some((kept, memory)) = &mut self.batch
            && *kept == words
        {
            self.words = words;
            return Ok(memory.address());
        }
        let memory = self.words(&words)?;
        let address = memory.address();
        if let Some((kept, _)) = self.batch.replace((words, memory)) {
            self.words = kept;
        }
        Ok(address)
    }

    /// Enqueues a kernel.
    ///
    /// # Safety
    /// That of [`Gpu::launch`].
    unsafe fn launch(&mut self, launch: Launch) -> Result<(), OpError> {
        self.health()?;
        self.launches += 1;
        if let Some(watch) = self.watch {
            watch(launch.kernel);
        }
        let in_order = std::mem::take(&mut self.in_order);
        let mut done = match driver::images::waits(launch.kernel) && !in_order {
            // SAFETY: the caller's. Before they wait, kernels read only weights, constants, the step's
            // words and tables, and keys of earlier steps: `end_before_next` was called after a launch
            // that writes such.
            true => unsafe { self.gpu.launch_early(launch) },
            // SAFETY: the caller's.
            false => unsafe { self.gpu.launch(launch) },
        };
        if self.watch.is_some() && self.recording == Recording::Off {
            done = done.and_then(|()| self.gpu.wait());
            done = done.map_err(|source| GpuError::Kernel {
                kernel: launch.kernel,
                source: Box::new(source),
            });
        }
        self.noted(done)
    }

    /// Has the next launch wait until all before it have ended: kernels after it may read what those
    /// wrote before they wait.
    fn end_before_next(&mut self) {
        self.in_order = true;
    }

    /// Why the device does not start launches before earlier ones end, although it could.
    pub fn early_refusal(&self) -> Option<String> {
        self.gpu.early_refusal().map(|error| error.to_string())
    }

    /// Refuses what the host does while launches are recorded.
    fn host(&mut self, what: &'static str) -> Result<(), OpError> {
        self.health()?;
        match self.recording {
            Recording::Off => Ok(()),
            Recording::On | Recording::Refused => {
                self.recording = Recording::Refused;
                Err(GpuError::NotRecorded(what).into())
            }
        }
    }

    fn health(&self) -> Result<(), OpError> {
        self.failure.clone().map_or(Ok(()), |e| Err(e.into()))
    }

    fn noted<T>(&mut self, done: Result<T, GpuError>) -> Result<T, OpError> {
        done.map_err(|error| {
            self.failure.get_or_insert(error.clone());
            error.into()
        })
    }
}

/// Types without padding of which every pattern of bits is a value.
trait Word: Copy {}
impl Word for f32 {}
impl Word for u32 {}

/// The bytes of `values`.
fn bytes_of<T: Word>(values: &[T]) -> &[u8] {
    // SAFETY: `T` has no padding, and u8 needs no alignment.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values)) }
}

fn bytes_of_mut<T: Word>(values: &mut [T]) -> &mut [u8] {
    // SAFETY: as above, and every pattern of bits is a `T`.
    unsafe { std::slice::from_raw_parts_mut(values.as_mut_ptr().cast(), size_of_val(values)) }
}
