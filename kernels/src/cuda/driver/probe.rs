//! Looks for a usable driver before the first call through cudarc, which panics when the library or
//! one of its functions is missing. This module opens the library itself and compares plain
//! numbers. It returns errors and never panics. Only a gpu-worker or `sepal selftest` runs it: a
//! broken driver may crash or hang, and then only that process does.

use std::ffi::{c_char, c_int, c_uint};

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

use super::calls::{EARLY_NAMES, NAMES, SHARING_NAMES};
use super::error;

/// Names under which the driver is looked for, in the order in which cudarc does it.
const LIBRARIES: [&str; 2] = ["libcuda.so", "libcuda.so.1"];

/// Functions that are called here, before those of [`calls`](super::calls). All of both exist in
/// CUDA 11.4 and later.
const FIRST: [&str; 3] = ["cuInit", "cuDriverGetVersion", "cuDeviceGetCount"];

/// Every function that a driver must have.
fn functions() -> impl Iterator<Item = &'static str> {
    FIRST.into_iter().chain(NAMES.iter().copied())
}

/// Every function of the driver that is called, if it has those for early launches and shared memory.
pub(super) fn all_functions() -> impl Iterator<Item = &'static str> {
    functions().chain(EARLY_NAMES.iter().copied()).chain(SHARING_NAMES.iter().copied())
}

/// Why there is no CUDA device.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoCuda {
    /// There is no driver library.
    #[error(
        "no CUDA device: the driver library is not there ({0}); install NVIDIA's driver, 525 or later"
    )]
    NoLibrary(String),
    /// A library without some function.
    #[error("no CUDA device: the driver library has no {0}; it is a stub or older than CUDA 11.4")]
    NoFunction(&'static str),
    /// The driver does not start.
    #[error("no CUDA device: cuInit: {name} ({code}){hint}")]
    NoStart {
        /// Name of the error.
        name: &'static str,
        code: u32,
        /// What that commonly means.
        hint: &'static str,
    },
    /// Another call failed.
    #[error("no CUDA device: {call}: {name} ({code})")]
    Call {
        call: &'static str,
        /// Name of the error.
        name: &'static str,
        code: u32,
    },
    /// There are fewer devices.
    #[error("no CUDA device {ordinal}: there are {count}")]
    NoSuchDevice {
        ordinal: u32,
        /// Devices that there are.
        count: u32,
    },
}

/// A driver that starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FoundDriver {
    /// Version of CUDA that it supports: 1000 × major + 10 × minor.
    pub version: u32,
    pub devices: u32,
    /// Whether it has the functions that share memory with other processes.
    pub shares_memory: bool,
    /// Whether launches may start before earlier ones end, recorded ones included.
    pub launches_early: bool,
}

/// The version of CUDA from which a recording keeps that a launch may start early. Source: CUDA
/// 12.3, programmatic dependent launch edges of graphs (`cudaGraphEdgeData`).
const EARLY_VERSION: u32 = 12_030;

/// Starts the driver, if there is one.
///
/// # Errors
/// [`NoCuda`] says why there is none.
pub fn probe() -> Result<FoundDriver, NoCuda> {
    let mut reason = String::new();
    for name in LIBRARIES {
        match open(name) {
            Ok(library) => return start(library),
            Err(why) => reason = why,
        }
    }
    Err(NoCuda::NoLibrary(reason))
}

fn open(path: &str) -> Result<Library, String> {
    // SAFETY: initialisers of a driver library run here; that is what opening it is for, and why
    // only workers do it.
    let opened = unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL) };
    // The source has the words of the loader.
    opened.map_err(|failure| match std::error::Error::source(&failure) {
        Some(source) => source.to_string(),
        None => failure.to_string(),
    })
}

fn start(library: Library) -> Result<FoundDriver, NoCuda> {
    let has = |name: &str| {
        // SAFETY: only the presence of the symbol matters.
        let symbol = unsafe { library.get::<*const ()>(name.as_bytes()) };
        symbol.is_ok()
    };
    if let Some(missing) = functions().find(|name| !has(name)) {
        return Err(NoCuda::NoFunction(missing));
    }
    let status = call_number(&library, "cuInit", 0)?;
    if status != 0 {
        return Err(NoCuda::NoStart {
            name: error::name(status),
            code: status,
            hint: error::hint(status),
        });
    }
    let version = ask(&library, "cuDriverGetVersion")?;
    let found = FoundDriver {
        version,
        devices: ask(&library, "cuDeviceGetCount")?,
        shares_memory: SHARING_NAMES.iter().all(|name| has(name)),
        launches_early: version >= EARLY_VERSION && EARLY_NAMES.iter().all(|name| has(name)),
    };
    if found.devices == 0 {
        return Err(NoCuda::NoSuchDevice { ordinal: 0, count: 0 });
    }
    // Stays loaded: cudarc opens it again, and a driver is never unloaded.
    std::mem::forget(library);
    Ok(found)
}

/// Calls a function of one number; its status.
fn call_number(library: &Library, name: &'static str, value: c_uint) -> Result<u32, NoCuda> {
    // SAFETY: the driver's `CUresult cuInit(unsigned)`; a status is an int of C.
    let function = unsafe { library.get::<unsafe extern "C" fn(c_uint) -> c_int>(name.as_bytes()) };
    let function = function.map_err(|_| NoCuda::NoFunction(name))?;
    // SAFETY: takes any number.
    let status = unsafe { function(value) };
    Ok(u32::try_from(status).unwrap_or(u32::MAX))
}

/// Calls a function that writes one number.
fn ask(library: &Library, name: &'static str) -> Result<u32, NoCuda> {
    type Ask = unsafe extern "C" fn(*mut c_int) -> c_int;
    // SAFETY: the driver's `CUresult f(int*)`.
    let function = unsafe { library.get::<Ask>(name.as_bytes()) };
    let function = function.map_err(|_| NoCuda::NoFunction(name))?;
    let mut value: c_int = 0;
    // SAFETY: writes one int to a place for one.
    let status = unsafe { function(&raw mut value) };
    match u32::try_from(status).unwrap_or(u32::MAX) {
        0 => Ok(u32::try_from(value).unwrap_or(0)),
        code => Err(NoCuda::Call { call: name, name: error::name(code), code }),
    }
}

/// A C string of the driver, up to its end.
pub(super) fn text(bytes: &[c_char]) -> String {
    let bytes: Vec<u8> = bytes.iter().take_while(|&&b| b != 0).map(|&b| b as u8).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

// With `emu`, for its compiler.
#[cfg(all(test, feature = "emu"))]
mod tests;
