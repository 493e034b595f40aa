//! The driver's functions, with results as plain numbers. cudarc declares them to return an enum of
//! the errors that it knows; a driver that is newer has others, and such a number in that enum
//! would be undefined behaviour. Types and constants are cudarc's.
//!
//! Each function is looked up once, in the library that cudarc has loaded; [`probe`](super::probe)
//! has made sure that it is there.
#![allow(non_snake_case, reason = "the driver's own names, as its documentation has them")]

use std::ffi::{c_char, c_int, c_uchar, c_uint, c_ulonglong, c_void};
use std::sync::OnceLock;

pub(super) use cudarc::driver::sys::*;

/// `CUresult`: 0, or one of the numbers of cuda.h.
pub(super) type Status = u32;

/// Error `CUDA_ERROR_OUT_OF_MEMORY`.
pub(super) const OUT_OF_MEMORY: Status = 2;

/// Error `CUDA_ERROR_NOT_READY`: what was asked for is not done yet.
pub(super) const NOT_READY: Status = 600;

macro_rules! functions {
    ($(#[$doc:meta])* $names:ident: $($name:ident($($argument:ident: $type:ty),*);)*) => {
        $(#[$doc])*
        pub(super) const $names: &[&str] = &[$(stringify!($name)),*];
        $(
        /// The driver's function of this name.
        ///
        /// # Safety
        /// What its documentation asks for; the driver was found by [`probe`](super::probe).
        #[allow(clippy::too_many_arguments, reason = "as many as the function has")]
        pub(super) unsafe fn $name($($argument: $type),*) -> Status {
            type Function = unsafe extern "C" fn($($type),*) -> Status;
            static FOUND: OnceLock<Function> = OnceLock::new();
            let function = FOUND.get_or_init(|| find(stringify!($name)));
            // SAFETY: the caller's; `CUresult` is an int of C.
            unsafe { function($($argument),*) }
        }
        )*
    };
}

/// A function of the driver.
fn find<F: Copy>(name: &str) -> F {
    // SAFETY: the library was found and stays loaded.
    let library = unsafe { culib() };
    // SAFETY: `functions` gives the type that cuda.h has for this name.
    let symbol = unsafe { library.get::<F>(name.as_bytes()) };
    *symbol.expect("the probe has found all functions")
}

functions! {
    /// Functions that a driver must have.
    NAMES:
    cuCtxSetCurrent(context: CUcontext);
    cuDeviceGet(device: *mut CUdevice, ordinal: c_int);
    cuDeviceGetAttribute(value: *mut c_int, which: CUdevice_attribute, device: CUdevice);
    cuDeviceGetName(name: *mut c_char, bytes: c_int, device: CUdevice);
    cuDeviceGetUuid_v2(uuid: *mut CUuuid, device: CUdevice);
    cuDevicePrimaryCtxRelease_v2(device: CUdevice);
    cuDevicePrimaryCtxRetain(context: *mut CUcontext, device: CUdevice);
    cuEventCreate(event: *mut CUevent, flags: c_uint);
    cuEventDestroy_v2(event: CUevent);
    cuEventElapsedTime(milliseconds: *mut f32, start: CUevent, end: CUevent);
    cuEventQuery(event: CUevent);
    cuEventRecord(event: CUevent, stream: CUstream);
    cuEventSynchronize(event: CUevent);
    cuFuncGetAttribute(value: *mut c_int, which: CUfunction_attribute, function: CUfunction);
    cuFuncSetAttribute(function: CUfunction, which: CUfunction_attribute, value: c_int);
    cuGraphDestroy(graph: CUgraph);
    cuGraphExecDestroy(graph: CUgraphExec);
    cuGraphInstantiateWithFlags(ready: *mut CUgraphExec, graph: CUgraph, flags: c_ulonglong);
    cuGraphLaunch(graph: CUgraphExec, stream: CUstream);
    cuLaunchKernel(
        function: CUfunction,
        grid_x: c_uint,
        grid_y: c_uint,
        grid_z: c_uint,
        cta_x: c_uint,
        cta_y: c_uint,
        cta_z: c_uint,
        shared_bytes: c_uint,
        stream: CUstream,
        parameters: *mut *mut c_void,
        extra: *mut *mut c_void
    );
    cuMemAlloc_v2(address: *mut CUdeviceptr, bytes: usize);
    cuMemFreeHost(start: *mut c_void);
    cuMemFree_v2(address: CUdeviceptr);
    cuMemGetInfo_v2(free: *mut usize, total: *mut usize);
    cuMemHostAlloc(start: *mut *mut c_void, bytes: usize, flags: c_uint);
    cuMemHostGetDevicePointer_v2(address: *mut CUdeviceptr, start: *mut c_void, flags: c_uint);
    cuMemHostRegister_v2(start: *mut c_void, bytes: usize, flags: c_uint);
    cuMemHostUnregister(start: *mut c_void);
    cuMemcpyAsync(to: CUdeviceptr, from: CUdeviceptr, bytes: usize, stream: CUstream);
    cuMemcpyDtoHAsync_v2(to: *mut c_void, from: CUdeviceptr, bytes: usize, stream: CUstream);
    cuMemcpyHtoDAsync_v2(to: CUdeviceptr, from: *const c_void, bytes: usize, stream: CUstream);
    cuMemsetD8Async(at: CUdeviceptr, value: c_uchar, bytes: usize, stream: CUstream);
    cuModuleGetFunction(function: *mut CUfunction, module: CUmodule, name: *const c_char);
    cuModuleLoadData(module: *mut CUmodule, image: *const c_void);
    cuStreamBeginCapture_v2(stream: CUstream, mode: CUstreamCaptureMode);
    cuStreamCreate(stream: *mut CUstream, flags: c_uint);
    cuStreamEndCapture(stream: CUstream, graph: *mut CUgraph);
    cuStreamQuery(stream: CUstream);
    cuStreamSynchronize(stream: CUstream);
}

functions! {
    /// The function for launches that may start early; called only where a driver has it.
    EARLY_NAMES:
    cuLaunchKernelEx(
        config: *const CUlaunchConfig,
        function: CUfunction,
        parameters: *mut *mut c_void,
        extra: *mut *mut c_void
    );
}

functions! {
    /// Functions that share memory with other processes; called only where a driver has all of them.
    SHARING_NAMES:
    cuDeviceCanAccessPeer(can: *mut c_int, device: CUdevice, peer: CUdevice);
    cuMemAddressFree(at: CUdeviceptr, bytes: usize);
    cuMemAddressReserve(
        at: *mut CUdeviceptr,
        bytes: usize,
        alignment: usize,
        wanted: CUdeviceptr,
        flags: c_ulonglong
    );
    cuMemCreate(
        handle: *mut CUmemGenericAllocationHandle,
        bytes: usize,
        properties: *const CUmemAllocationProp,
        flags: c_ulonglong
    );
    cuMemExportToShareableHandle(
        descriptor: *mut c_void,
        handle: CUmemGenericAllocationHandle,
        kind: CUmemAllocationHandleType,
        flags: c_ulonglong
    );
    cuMemGetAllocationGranularity(
        bytes: *mut usize,
        properties: *const CUmemAllocationProp,
        which: CUmemAllocationGranularity_flags
    );
    cuMemImportFromShareableHandle(
        handle: *mut CUmemGenericAllocationHandle,
        descriptor: *mut c_void,
        kind: CUmemAllocationHandleType
    );
    cuMemMap(
        at: CUdeviceptr,
        bytes: usize,
        offset: usize,
        handle: CUmemGenericAllocationHandle,
        flags: c_ulonglong
    );
    cuMemRelease(handle: CUmemGenericAllocationHandle);
    cuMemSetAccess(at: CUdeviceptr, bytes: usize, access: *const CUmemAccessDesc, count: usize);
    cuMemUnmap(at: CUdeviceptr, bytes: usize);
}
