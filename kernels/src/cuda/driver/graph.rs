//! CUDA graphs: launches that are recorded once and replayed as one. Their parameters are fixed:
//! they read lengths, page tables and hidden states from buffers whose addresses do not change.

use super::calls as cu;

use super::CudaDriver;
use super::error::check;
use crate::cuda::gpu::GpuError;

/// A recorded sequence of launches.
#[derive(Debug)]
pub struct CudaGraph(cu::CUgraphExec);

// SAFETY: as for `Driver`.
unsafe impl Send for CudaGraph {}
// SAFETY: as for `Driver`; who shares a graph launches it from one thread at a time, as there is
// one caller of a backend.
unsafe impl Sync for CudaGraph {}

impl CudaDriver {
    /// [`Gpu::begin_recording`](crate::cuda::Gpu::begin_recording).
    pub(super) fn begin_graph(&self) -> Result<(), GpuError> {
        self.bind()?;
        let mode = cu::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream of this context.
        let status = unsafe { cu::cuStreamBeginCapture_v2(self.stream, mode) };
        check("cuStreamBeginCapture", status)
    }

    /// [`Gpu::end_recording`](crate::cuda::Gpu::end_recording).
    pub(super) fn end_graph(&self) -> Result<CudaGraph, GpuError> {
        self.bind()?;
        let mut graph = std::ptr::null_mut();
        // SAFETY: the stream that records.
        let status = unsafe { cu::cuStreamEndCapture(self.stream, &raw mut graph) };
        check("cuStreamEndCapture", status)?;
        let mut ready = std::ptr::null_mut();
        // SAFETY: a graph that was just made, and a place for what is made of it.
        let status = unsafe { cu::cuGraphInstantiateWithFlags(&raw mut ready, graph, 0) };
        // SAFETY: what was instantiated does not need it any more.
        let _ = unsafe { cu::cuGraphDestroy(graph) };
        check("cuGraphInstantiate", status)?;
        Ok(CudaGraph(ready))
    }

    /// [`Gpu::replay`](crate::cuda::Gpu::replay).
    ///
    /// # Safety
    /// All memory that its launches name is still allocated.
    pub(super) unsafe fn run_graph(&self, graph: &CudaGraph) -> Result<(), GpuError> {
        self.bind()?;
        // SAFETY: the caller's.
        let status = unsafe { cu::cuGraphLaunch(graph.0, self.stream) };
        check("cuGraphLaunch", status)
    }
}

impl Drop for CudaGraph {
    fn drop(&mut self) {
        // SAFETY: made by `end_recording`, dropped once.
        let _ = unsafe { cu::cuGraphExecDestroy(self.0) };
    }
}
