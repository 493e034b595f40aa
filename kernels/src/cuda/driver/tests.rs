//! The driver's side of the backend on a `libcuda.so` whose device is the emulator
//! (`kernels/cuda/emu/driver.cpp`), which is stricter and later than a driver.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::OnceLock;

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use shared::warpgroups::WarpgroupKernels;

use super::*;
use crate::cases::{Class, cuda_operations};
use crate::cuda::Cuda;
use crate::cuda::emu::DRIVER_FOLDER;
use crate::cuda::gpu::Params;

/// Whoever asks for `libcuda.so` from now on gets this one: a library of that name is loaded.
fn open() -> CudaDriver {
    static LOADED: OnceLock<Library> = OnceLock::new();
    LOADED.get_or_init(|| {
        let path = format!("{DRIVER_FOLDER}/libcuda.so");
        // SAFETY: it has no initialisers but those of C++.
        unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL) }.expect("it was linked")
    });
    CudaDriver::open(0).expect("a device")
}

#[test]
fn every_kernel_of_the_images_equals_its_reference() {
    let mut cuda = Cuda::new(open());
    cuda.use_warpgroups(WarpgroupKernels::ALL);
    for operation in cuda_operations::<CudaDriver>() {
        let cases = operation.check(std::slice::from_mut(&mut cuda), Class::Smallest);
        assert!(cases.unwrap_or_else(|e| panic!("{}: {e:?}", operation.name)) > 0);
    }
}

#[test]
fn products_of_the_images_go_to_warpgroups() {
    let agreement = Cuda::new(open()).choose_products().unwrap();
    assert_eq!(agreement.used(), WarpgroupKernels::ALL, "{agreement}");
}

#[test]
fn the_device_is_what_the_driver_says() {
    let driver = open();
    assert_eq!(CudaDriver::properties_of(0).unwrap().architecture, 90);
    let found = driver.properties();
    assert_eq!(found.name, "emulator behind a driver");
    assert_eq!((found.architecture, found.multiprocessors), (90, 4));
    assert_eq!(found.image, "sm_90a");
    assert_eq!(CudaDriver::uuid_of(0).unwrap(), *b"emulated card  0");
    let (free, total) = CudaDriver::memory_of(0).unwrap();
    assert!(free <= total);
    let missing = CudaDriver::open(1).unwrap_err().to_string();
    assert_eq!(missing, "no CUDA device 1: there are 1");
}

#[test]
fn host_bytes_may_be_reused_at_once_however_many_are_on_their_way() {
    let driver = open();
    let sizes = [1, 63, 4096, HALF - 64, HALF, HALF + 1, 3 << 20, 3 << 20, 3 << 20, 7];
    let mut written = Vec::new();
    for (index, bytes) in sizes.into_iter().enumerate() {
        let mut host = vec![index as u8 + 1; bytes];
        let at = driver.allocate(bytes).unwrap();
        // SAFETY: so many bytes were allocated.
        unsafe { driver.write(&host, at) }.unwrap();
        host.fill(0);
        written.push((at, bytes, index as u8 + 1));
    }
    for (at, bytes, value) in written {
        let mut got = vec![0; bytes];
        // SAFETY: as above.
        unsafe { driver.read(at, &mut got) }.unwrap();
        assert!(got.iter().all(|&b| b == value), "{bytes} bytes");
        // SAFETY: nothing uses it any more.
        unsafe { driver.release(at, bytes) };
    }
}

/// Adds `from` to `to`, 64 numbers each.
fn addition(to: Address, from: Address) -> Launch {
    Launch {
        kernel: "add_f32",
        grid: [1, 1, 1],
        cta: [256, 1, 1],
        shared_bytes: 0,
        params: Params::new().address(to).address(from).wide(64),
    }
}

fn bytes_of(values: [f32; 64]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

#[test]
fn what_is_recorded_runs_each_time_it_is_replayed_and_not_before() {
    let driver = open();
    let [to, from] = [(); 2].map(|()| driver.allocate(256).unwrap());
    // SAFETY: 256 bytes each, which are 64 numbers.
    unsafe { driver.write(&bytes_of([0.5; 64]), to) }.unwrap();
    // SAFETY: as above.
    unsafe { driver.write(&bytes_of([2.0; 64]), from) }.unwrap();
    driver.begin_recording().unwrap();
    // SAFETY: as above.
    unsafe { driver.launch(addition(to, from)) }.unwrap();
    let graph = driver.end_recording().unwrap();
    let read = || {
        let mut got = vec![0; 256];
        // SAFETY: as above.
        unsafe { driver.read(to, &mut got) }.unwrap();
        got
    };
    assert_eq!(read(), bytes_of([0.5; 64]));
    for _ in 0..2 {
        // SAFETY: both are still allocated.
        unsafe { driver.replay(&graph) }.unwrap();
    }
    assert_eq!(read(), bytes_of([4.5; 64]));
}

#[test]
fn what_cannot_be_recorded_spoils_the_recording_and_nothing_else() {
    let driver = open();
    driver.begin_recording().unwrap();
    let refused = driver.allocate(256).unwrap_err().to_string();
    assert!(refused.contains("CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"), "{refused}");
    let refused = driver.end_recording().unwrap_err().to_string();
    assert!(refused.contains("CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"), "{refused}");
    driver.wait().unwrap();
    driver.allocate(256).unwrap();
}

#[test]
fn more_memory_than_there_is_and_launches_that_do_not_fit_are_refused() {
    let driver = open();
    let bytes = 1 << 40;
    assert_eq!(driver.allocate(bytes), Err(GpuError::OutOfMemory { bytes }));
    let at = driver.allocate(256).unwrap();
    let good = addition(at, at);
    let mut product = Params::new();
    for _ in 0..3 {
        product = product.address(at).address(at).address(at).count(0).count(0);
    }
    for bad in [
        // Not a whole cluster.
        Launch {
            kernel: "linear_wgmma_nf4_bf16",
            params: product.address(at).count(64).count(1),
            ..good
        },
        Launch { kernel: "no_such_kernel", ..good },
        Launch { cta: [2048, 1, 1], ..good },
        Launch { shared_bytes: 1 << 20, ..good },
    ] {
        // SAFETY: refused before it runs.
        assert!(unsafe { driver.launch(bad) }.is_err(), "{bad:?}");
    }
    // SAFETY: 256 bytes.
    unsafe { driver.launch(good) }.unwrap();
    driver.wait().unwrap();
}

#[test]
fn a_kernel_that_prefers_no_carveout_is_refused_where_more_of_its_ctas_would_fit() {
    let driver = open();
    let at = driver.allocate(256).unwrap();
    let launch = addition(at, at);
    let function = driver.kernels.find(launch.kernel).unwrap();
    let attribute = cu::CUfunction_attribute::CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT;
    for (percent, is_refused) in [(-1, true), (0, true), (100, false)] {
        // SAFETY: a function of a loaded module, which this test alone uses.
        let status = unsafe { cu::cuFuncSetAttribute(function, attribute, percent) };
        assert_eq!(status, 0, "{percent}");
        // SAFETY: 256 bytes.
        let launched = unsafe { driver.launch(addition(at, at)) };
        assert_eq!(launched.is_err(), is_refused, "{percent}");
    }
    driver.wait().unwrap();
}

#[test]
fn memory_of_the_host_is_reached_while_it_is_registered() {
    let driver = open();
    let mut pages = vec![7u8; 8192];
    // SAFETY: it lives to the end of the test.
    let at = unsafe { driver.register(pages.as_mut_ptr(), 8192) }.unwrap();
    // SAFETY: refused.
    let again = unsafe { driver.register(pages.as_mut_ptr(), 4096) }.unwrap_err().to_string();
    assert!(again.contains("CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"), "{again}");
    let device = driver.allocate(8192).unwrap();
    // SAFETY: 8192 bytes each.
    unsafe { driver.copy(at, device, 8192) }.unwrap();
    let mut got = vec![0; 8192];
    // SAFETY: as above.
    unsafe { driver.read(device, &mut got) }.unwrap();
    assert_eq!(got, pages);
    // SAFETY: nothing uses it any more.
    unsafe { driver.unregister(at) };
    // SAFETY: as before.
    unsafe { driver.register(pages.as_mut_ptr(), 8192) }.unwrap();
}

#[test]
fn shared_memory_is_one_memory_wherever_it_is_mapped() {
    let driver = open();
    // More than other tests take meanwhile.
    let (bytes, used) = (1 << 30, 70_000);
    let (before, _) = driver.memory().unwrap();
    let (at, fd) = driver.share(bytes).unwrap().expect("this driver shares memory");
    let other = driver.map_shared(fd.as_fd(), bytes).unwrap();
    assert_ne!(at, other);
    let written: Vec<u8> = (0..used).map(|byte| byte as u8).collect();
    // SAFETY: so many bytes were shared.
    unsafe { driver.write(&written, at) }.unwrap();
    let mut got = vec![0; used];
    // SAFETY: as above.
    unsafe { driver.read(other, &mut got) }.unwrap();
    assert_eq!(got, written);
    assert!(driver.reaches(CudaDriver::uuid_of(0).unwrap()));
    assert!(!driver.reaches(*b"emulated card  1"), "this process does not see it");
    for address in [at, other] {
        // SAFETY: mapped above, and nothing uses it any more.
        unsafe { driver.unmap_shared(address, bytes) };
    }
    assert!(driver.memory().unwrap().0 > before - bytes, "nothing is left");
}

#[test]
fn what_is_not_shared_memory_of_this_size_is_refused() {
    let driver = open();
    let (at, fd) = driver.share(70_000).unwrap().expect("this driver shares memory");
    let refused = |fd: BorrowedFd<'_>, bytes| {
        let error = driver.map_shared(fd, bytes).unwrap_err().to_string();
        assert!(error.contains("CUDA_ERROR_INVALID_VALUE"), "{error}");
        error
    };
    assert!(refused(fd.as_fd(), 140_000).starts_with("cuMemMap"), "another size");
    let null = std::fs::File::open("/dev/null").unwrap();
    assert!(refused(null.as_fd(), 70_000).starts_with("cuMemImportFromShareableHandle"));
    // No process has this number: the one whose memory it would be has ended.
    let name = format!("emulated memory of device 0 of process {}", i32::MAX);
    let flags = nix::sys::memfd::MFdFlags::MFD_CLOEXEC;
    let dead = nix::sys::memfd::memfd_create(name.as_str(), flags).unwrap();
    nix::unistd::ftruncate(&dead, 131_072).unwrap();
    assert!(refused(dead.as_fd(), 70_000).starts_with("cuMemImportFromShareableHandle"));
    // SAFETY: mapped above, and nothing uses it any more.
    unsafe { driver.unmap_shared(at, 70_000) };
}

/// In a process of its own: the error stays.
#[test]
fn a_launch_that_starts_too_early_fails_on_the_stand_in() {
    const CHILD: &str = "SEPAL_STARTS_TOO_EARLY";
    if std::env::var_os(CHILD).is_some() {
        return start_too_early();
    }
    let test = "cuda::driver::tests::a_launch_that_starts_too_early_fails_on_the_stand_in";
    let done = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture"])
        .env(CHILD, "1")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&done.stderr);
    assert!(done.status.success(), "{said}");
    assert!(said.contains("rmsnorm_f32: reads before pdl_wait what an earlier launch wrote"));
}

/// A norm whose weights the launch before it writes.
fn start_too_early() {
    let driver = open();
    let at = driver.allocate(64 * 4).unwrap();
    let launch = Launch {
        kernel: "add_f32",
        grid: [1, 1, 1],
        cta: [256, 1, 1],
        shared_bytes: 0,
        params: Params::new().address(at).address(at).wide(64),
    };
    let norm = Launch {
        kernel: "rmsnorm_f32",
        cta: [32, 1, 1],
        shared_bytes: 128,
        params: Params::new().address(at).address(at).address(at).count(64).float(0.0),
        ..launch
    };
    let ones: Vec<u8> = std::iter::repeat_n(1f32.to_le_bytes(), 64).flatten().collect();
    // SAFETY: so many bytes were allocated.
    unsafe { driver.write(&ones, at) }.unwrap();
    driver.wait().unwrap();
    // SAFETY: 64 values were allocated.
    unsafe { driver.launch(launch) }.unwrap();
    // SAFETY: none: that it reads too early is to be seen.
    unsafe { driver.launch_early(norm) }.unwrap();
    let failed = driver.wait().unwrap_err();
    assert!(matches!(failed, GpuError::Driver { code: 719, .. }), "{failed}");
    assert_eq!(driver.early_refusal(), None);
}
