//! What comes of a failure of each function of the driver: at the start of a server, and while it
//! serves. Error 999, which a driver gives for all that has no number of its own.
//!
//! [`CALLS`] has every function that this build looks up, and what is expected; a function that is
//! missing there fails the first test.

use std::collections::BTreeSet;

use kernels::cuda::driver;

use super::*;

/// At the start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Start {
    /// The run ends with a sentence that names the function.
    Refused,
    /// The server serves, and its log has this.
    Warned(&'static str),
    Serves,
    /// A start does not call the function.
    Unused,
}

/// While a session runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Service {
    /// The worker is replaced, and the session gets the same bits.
    Replaced,
    /// Steps do not call the function.
    Unused,
}

/// While ranks of a group meet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Meeting {
    /// They exchange sums through host memory instead of device memory.
    Host,
    /// They exchange sums through device memory all the same.
    Device,
}

const SLOW_MIRROR: &str = "mirroring the KV cache more slowly";
const FEW_GRAPHS: &str = "recorded only some decode steps";
const NO_SAMPLE: &str = "no sample was taken";

/// Functions that every server needs.
const CALLS: [(&str, Start, Service); 43] = [
    ("cuInit", Start::Refused, Service::Unused),
    ("cuDriverGetVersion", Start::Refused, Service::Unused),
    ("cuDeviceGetCount", Start::Refused, Service::Unused),
    ("cuCtxSetCurrent", Start::Refused, Service::Unused),
    ("cuDeviceGet", Start::Refused, Service::Unused),
    ("cuDeviceGetAttribute", Start::Refused, Service::Unused),
    ("cuDeviceGetName", Start::Refused, Service::Unused),
    ("cuDeviceGetUuid_v2", Start::Warned(NO_SAMPLE), Service::Unused),
    ("cuDevicePrimaryCtxRelease_v2", Start::Serves, Service::Unused),
    ("cuDevicePrimaryCtxRetain", Start::Refused, Service::Unused),
    ("cuEventCreate", Start::Serves, Service::Unused),
    ("cuEventDestroy_v2", Start::Serves, Service::Unused),
    ("cuEventElapsedTime", Start::Serves, Service::Unused),
    ("cuEventQuery", Start::Serves, Service::Unused),
    ("cuEventRecord", Start::Serves, Service::Unused),
    ("cuEventSynchronize", Start::Serves, Service::Unused),
    ("cuFuncGetAttribute", Start::Refused, Service::Unused),
    ("cuFuncSetAttribute", Start::Refused, Service::Unused),
    ("cuGraphDestroy", Start::Serves, Service::Unused),
    ("cuGraphExecDestroy", Start::Serves, Service::Unused),
    ("cuGraphInstantiateWithFlags", Start::Warned(FEW_GRAPHS), Service::Unused),
    ("cuGraphLaunch", Start::Unused, Service::Replaced),
    ("cuLaunchKernel", Start::Refused, Service::Replaced),
    // From compute capability 9.0 on; tests/emulator/driver/mod.rs says what comes of a refusal.
    ("cuLaunchKernelEx", Start::Unused, Service::Unused),
    ("cuMemAlloc_v2", Start::Serves, Service::Unused),
    ("cuMemFreeHost", Start::Serves, Service::Unused),
    ("cuMemFree_v2", Start::Serves, Service::Unused),
    ("cuMemGetInfo_v2", Start::Refused, Service::Unused),
    ("cuMemHostAlloc", Start::Refused, Service::Unused),
    ("cuMemHostGetDevicePointer_v2", Start::Serves, Service::Unused),
    ("cuMemHostRegister_v2", Start::Serves, Service::Unused),
    ("cuMemHostUnregister", Start::Serves, Service::Unused),
    ("cuMemcpyAsync", Start::Refused, Service::Replaced),
    ("cuMemcpyDtoHAsync_v2", Start::Refused, Service::Unused),
    ("cuMemcpyHtoDAsync_v2", Start::Refused, Service::Replaced),
    ("cuMemsetD8Async", Start::Serves, Service::Unused),
    ("cuModuleGetFunction", Start::Refused, Service::Unused),
    ("cuModuleLoadData", Start::Refused, Service::Unused),
    ("cuStreamBeginCapture_v2", Start::Warned(FEW_GRAPHS), Service::Unused),
    ("cuStreamCreate", Start::Refused, Service::Unused),
    ("cuStreamEndCapture", Start::Warned(FEW_GRAPHS), Service::Unused),
    ("cuStreamQuery", Start::Serves, Service::Unused),
    ("cuStreamSynchronize", Start::Refused, Service::Replaced),
];

/// Functions that share memory among the ranks of a group.
const SHARING_CALLS: [(&str, Meeting); 11] = [
    ("cuDeviceCanAccessPeer", Meeting::Host),
    ("cuMemAddressFree", Meeting::Device),
    ("cuMemAddressReserve", Meeting::Host),
    ("cuMemCreate", Meeting::Host),
    ("cuMemExportToShareableHandle", Meeting::Host),
    ("cuMemGetAllocationGranularity", Meeting::Host),
    ("cuMemImportFromShareableHandle", Meeting::Host),
    ("cuMemMap", Meeting::Host),
    ("cuMemRelease", Meeting::Device),
    ("cuMemSetAccess", Meeting::Host),
    ("cuMemUnmap", Meeting::Device),
];

/// A card whose warpgroups need no sample.
const CARD: (&str, &str) = ("EMU_CUDA_ARCH", "89");

#[test]
fn every_function_of_the_driver_has_an_expected_outcome() {
    let expected: BTreeSet<_> = CALLS
        .iter()
        .map(|(call, ..)| *call)
        .chain(SHARING_CALLS.iter().map(|(call, _)| *call))
        .collect();
    assert_eq!(expected, driver::functions().collect());
    assert_eq!(expected.len(), CALLS.len() + SHARING_CALLS.len(), "a function is named twice");
}

/// As errors name it: a launch by its kernel, and a copy of the driver by what asks for it.
fn told(call: &str) -> &str {
    match call {
        "cuLaunchKernel" => "rope_table_bf16",
        "cuMemcpyAsync" => "cuMemcpyHtoDAsync",
        other => other.trim_end_matches("_v2"),
    }
}

#[test]
#[ignore = "larger shapes on the emulator: .ci/long emulator"]
fn a_start_is_refused_with_the_function_that_it_needs_and_that_fails() {
    for (call, ..) in CALLS.iter().filter(|(_, start, _)| *start == Start::Refused) {
        let plan = format!("{call}:999:0");
        let limits = ["--max_restarts", "0"];
        let mut sepal = start("cuda:0", &[CARD, ("EMU_CUDA_FAIL", &plan)], &limits);
        let code = sepal.wait().code();
        let log = sepal.log();
        let name = told(call);
        assert!(code.is_some_and(|code| code != 0), "{call}: {code:?} {log}");
        assert!(log.contains(&format!("{name}: CUDA_ERROR_UNKNOWN (999)")), "{call}: {log}");
    }
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "larger shapes on the emulator: .ci/long emulator"]
async fn a_server_starts_and_serves_where_a_function_fails_that_it_can_do_without() {
    let calm = serve("cuda:0", &[CARD]);
    let expected = run(&calm, |_| ()).await;
    assert_eq!(calm.terminate().code(), Some(0));
    // Those with the same warning hide each other.
    let is_warned = |start: &Start| matches!(start, Start::Warned(_));
    let alone = CALLS.iter().filter(|(_, start, _)| is_warned(start)).map(|row| vec![*row]);
    let together = CALLS.iter().filter(|(_, start, _)| *start == Start::Serves).copied().collect();
    for rows in alone.chain([together]) {
        let plans: Vec<_> = rows.iter().map(|(call, ..)| format!("{call}:999:0")).collect();
        let sepal = serve("cuda:0", &[CARD, ("EMU_CUDA_FAIL", &plans.join(","))]);
        let got = run(&sepal, |_| ()).await;
        assert!(got == expected, "{plans:?}: results differ");
        for (call, start, _) in rows {
            if let Start::Warned(warning) = start {
                assert!(sepal.log().contains(warning), "{call}: {}", sepal.log());
            }
        }
        assert_eq!(sepal.terminate().code(), Some(0));
    }
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "larger shapes on the emulator: .ci/long emulator"]
async fn a_function_that_fails_in_service_costs_at_most_a_worker_and_no_session() {
    let plans = tempfile::tempdir().expect("temporary folder");
    let path = plans.path().to_str().expect("UTF-8");
    let settings = [CARD, ("EMU_CUDA_FAIL_FOLDER", path)];
    let unused = CALLS.iter().filter(|(_, start, _)| *start == Start::Unused);
    let unused: Vec<_> = unused.map(|(call, ..)| plans.path().join(call)).collect();
    unused.iter().for_each(|plan| std::fs::write(plan, "999").expect("a plan"));
    let sepal = start("cuda:0", &settings, &["--max_restarts", "1000"]);
    sepal.wait_online();
    unused.iter().for_each(|plan| std::fs::remove_file(plan).expect("a start calls it"));
    let (expected, netd) = (run(&sepal, |_| ()).await, sepal.netd());
    let replaced = CALLS.iter().filter(|(.., service)| *service == Service::Replaced);
    let others = CALLS.iter().filter(|(.., service)| *service != Service::Replaced);
    let groups = [others.copied().collect()].into_iter().chain(replaced.map(|row| vec![*row]));
    for rows in groups {
        let first = sepal.worker();
        for (call, ..) in &rows {
            std::fs::write(plans.path().join(call), "999").expect("a plan");
        }
        let got = run(&sepal, |_| ()).await;
        assert!(got == expected, "{rows:?}: results differ");
        let is_replaced = rows.iter().any(|(.., service)| *service == Service::Replaced);
        assert_eq!(sepal.worker() != first, is_replaced, "{rows:?}: {}", sepal.log());
        for (call, _, service) in rows {
            let left = std::fs::remove_file(plans.path().join(call)).is_ok();
            assert_eq!(left, service == Service::Unused, "{call}: {service:?}");
        }
    }
    assert_eq!(sepal.netd(), netd, "netd lives on");
    assert_eq!(sepal.terminate().code(), Some(0));
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "larger shapes on the emulator: .ci/long emulator"]
async fn ranks_meet_where_a_function_that_shares_memory_fails() {
    let two = ("EMU_CUDA_DEVICES", "2");
    let calm = start_ranks("cuda:0,cuda:1", &[CARD, two]);
    let expected = golden::run_session(&calm.addr(), STEPS, |_| ()).await;
    assert_eq!(calm.terminate().code(), Some(0));
    for (call, meeting) in SHARING_CALLS {
        let plan = format!("{call}:999:0");
        let sepal = start_ranks("cuda:0,cuda:1", &[CARD, two, ("EMU_CUDA_FAIL", &plan)]);
        let got = golden::run_session(&sepal.addr(), STEPS, |_| ()).await;
        assert!(got == expected, "{call}: results differ");
        let path = match meeting {
            Meeting::Host => "path=host memory",
            Meeting::Device => "path=device memory",
        };
        let log = sepal.log();
        assert!(log.contains(path), "{call}: {log}");
        assert_eq!(sepal.terminate().code(), Some(0));
    }
}

/// The arena and the staging of the KV mirror are registered in parts, or not at all.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "larger shapes on the emulator: .ci/long emulator"]
async fn a_host_that_registers_little_memory_at_once_serves_as_one_that_registers_all() {
    let calm = serve("cuda:0", &[CARD]);
    let expected = run(&calm, |_| ()).await;
    assert_eq!(calm.terminate().code(), Some(0));
    for (bytes, warnings) in [("4194304", 0), ("0", 1)] {
        let sepal = serve("cuda:0", &[CARD, ("EMU_CUDA_REGISTER", bytes)]);
        let got = run(&sepal, |_| ()).await;
        assert!(got == expected, "{bytes}: results differ");
        for warning in [SLOW_MIRROR, "copying tensors once more"] {
            assert_eq!(sepal.log().matches(warning).count(), warnings, "{warning}");
        }
        assert_eq!(sepal.terminate().code(), Some(0));
    }
}
