//! Every kernel on the emulator in its smallest cases, for an emulator that is instrumented by a
//! sanitizer (`SEPAL_EMU_SANITIZE` at build time, `kernels/cuda/emu/sanitize` sets everything up).
//! A program of its own: the test harness of Rust is not instrumented, and what its threads do
//! looks like races. First it runs a kernel that is wrong on purpose, in a process of its own, and
//! fails unless the sanitizer ends that process: green means that faults are seen. It also fails
//! when a kernel was launched in no case. Without instruments it checks nothing: the library's own
//! tests run the same cases.
//!
//! Arguments name the checks to run; none: all.
#![allow(unsafe_code, reason = "the launch of a kernel that is wrong on purpose")]
#![allow(clippy::print_stdout, reason = "the report of this program")]

use std::collections::BTreeSet;
use std::process::Command;
use std::sync::Mutex;
use std::time::Instant;

use kernels::cases::{Class, cuda_operations, never_launched};
use kernels::cuda::emu::{self, Emu};
use kernels::cuda::{Cuda, Gpu, Launch, Params};
use shared::warpgroups::WarpgroupKernels;

/// What this program was built with.
const SANITIZER: Option<&str> = option_env!("SEPAL_EMU_SANITIZE");

/// Which cases. The thread sanitizer makes the emulator 500 times slower, the address sanitizer 10
/// times; `SANITIZE_CLASS=smallest` asks for the smallest cases under either.
fn class() -> Class {
    let is_smallest = std::env::var_os("SANITIZE_CLASS").is_some_and(|class| class == "smallest");
    match SANITIZER {
        Some("thread") => Class::Smallest,
        _ if is_smallest => Class::Smallest,
        _ => Class::Quick,
    }
}

/// Threads of the emulator, and the order of the threads of a CTA: none that a kernel may count on.
const THREADS: usize = 2;
const ORDER: u64 = 7;

/// Another, whose seed is even, for the checks of kernels whose CTAs copy to each other: such
/// copies then come as soon as they may.
const EARLY: u64 = 8;
const IN_CLUSTERS: [&str; 2] = ["linear", "products"];

/// Kernels that were launched.
static LAUNCHED: Mutex<BTreeSet<&'static str>> = Mutex::new(BTreeSet::new());

/// Launches a kernel that is wrong, instead of anything else.
const FAULTY: &str = "--faulty";

/// Products of a warpgroup that are wrong, and what the emulator says of them.
const FAULTY_PRODUCTS: [(&str, &str); 4] = [
    ("faulty_wgmma_proxy", "copied without fence_proxy_async"),
    ("faulty_wgmma_wait", "registers of A were changed"),
    ("faulty_wgmma_warps", "issue different products"),
    ("faulty_wgmma_layout", "do not fill the rows of their swizzle"),
];

/// Two CTAs that copy to each other: what is wrong, and with which order it is seen.
const FAULTY_CLUSTERS: [(&str, u64, &str); 5] = [
    ("faulty_cluster_start", 1, "that was not made"),
    ("faulty_cluster_fence", 1, "that was not made known"),
    ("faulty_cluster_free", EARLY, OVERWRITTEN),
    ("faulty_cluster_wait", 1, "before it has waited for all"),
    ("faulty_cluster_end", 1, "comes to a CTA that has ended"),
];
/// The same with nothing wrong.
const SOUND: &str = "sound_cluster";
const WRONG: &str = "wrong values";
/// What is said of bytes that are overwritten while they are read.
const OVERWRITTEN: &str = match SANITIZER {
    Some(kind) if matches!(kind.as_bytes(), b"thread") => "ThreadSanitizer: data race",
    _ => WRONG,
};

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if arguments.first().is_some_and(|first| first == FAULTY) {
        launch_faulty(arguments.get(1).map_or("", String::as_str));
        return;
    }
    match SANITIZER {
        Some("address") => {
            assert_reported("faulty_overrun", "AddressSanitizer: heap-buffer-overflow")
        }
        Some("thread") => assert_reported("faulty_race", "ThreadSanitizer: data race"),
        _ => {
            println!("ignored: the emulator is not instrumented");
            return;
        }
    }
    for (kernel, message) in FAULTY_PRODUCTS {
        assert_reported(kernel, message);
    }
    for (kernel, _, message) in FAULTY_CLUSTERS {
        assert_reported(kernel, message);
    }
    let (is_success, said) = run_faulty(SOUND);
    assert!(is_success, "{SOUND}: {said}");
    let mut ran = 0;
    for order in [ORDER, EARLY] {
        ran += run_checks(&arguments, order);
    }
    assert!(ran > 0, "no check is called so");
    if arguments.is_empty() {
        assert_all_launched();
    }
}

/// How many were run.
fn run_checks(arguments: &[String], order: u64) -> usize {
    let mut cuda = Cuda::exact(Emu::with_order(THREADS, order));
    cuda.use_warpgroups(WarpgroupKernels::ALL);
    cuda.watch(Some(|kernel| {
        LAUNCHED.lock().expect("nobody panics").insert(kernel);
    }));
    let mut ran = 0;
    for operation in cuda_operations::<Emu>() {
        let name = operation.name;
        let is_wanted = arguments.is_empty() || arguments.iter().any(|wanted| wanted == name);
        if !is_wanted || order == EARLY && !IN_CLUSTERS.contains(&name) {
            continue;
        }
        let start = Instant::now();
        let devices = std::slice::from_mut(&mut cuda);
        let cases = operation.check(devices, class()).unwrap_or_else(|failure| {
            let source = std::error::Error::source(&failure).map(ToString::to_string);
            panic!("{name}: {failure} {}", source.unwrap_or_default())
        });
        assert!(cases > 0, "{name} has no cases");
        println!("{name:20} {cases:5} cases {:7.1} s", start.elapsed().as_secs_f64());
        ran += 1;
    }
    ran
}

/// Fails when a kernel was launched in no case: the sanitizer has not seen it.
fn assert_all_launched() {
    let all = emu::kernels();
    // Those of faulty.cu have run in processes of their own.
    let is_planted = |name: &str| name.starts_with("faulty_") || name == SOUND;
    let right = all.iter().filter(|name| !is_planted(name));
    let launched = LAUNCHED.lock().expect("nobody panics");
    let missing = never_launched(right.map(String::as_str), &launched);
    assert!(missing.is_empty(), "never launched: {missing:?}");
    println!("{} kernels launched, none is left out", launched.len());
}

/// Runs the kernel in a process of its own, which must end with this message.
fn assert_reported(kernel: &str, message: &str) {
    let (is_success, said) = run_faulty(kernel);
    assert!(!is_success && said.contains(message), "{kernel} was not reported: {said}");
    println!("{kernel:20} reported");
}

/// Whether the process was content, and what it said.
fn run_faulty(kernel: &str) -> (bool, String) {
    let program = std::env::current_exe().expect("the path of this program");
    let ended = Command::new(program).args([FAULTY, kernel]).output().expect("this program again");
    let said = String::from_utf8_lossy(&ended.stderr).into_owned();
    (ended.status.success(), said)
}

fn launch_faulty(kernel: &str) {
    let product = FAULTY_PRODUCTS.iter().find(|(name, _)| *name == kernel);
    let cluster = FAULTY_CLUSTERS.iter().find(|(name, ..)| *name == kernel);
    if let Some((name, order, _)) = cluster {
        launch_cluster(name, *order);
    } else if kernel == SOUND {
        for order in [1, ORDER, EARLY] {
            launch_cluster(SOUND, order);
        }
    } else if let Some((name, _)) = product {
        launch_alone(name);
    } else if kernel == "faulty_overrun" {
        launch_alone("faulty_overrun");
    } else {
        launch_alone("faulty_race");
    }
}

fn launch_alone(kernel: &'static str) {
    const COUNT: usize = 64;
    let gpu = Emu::with_order(1, 1);
    let out = gpu.allocate(COUNT * 4).expect("memory");
    let launch = Launch {
        kernel,
        grid: [1, 1, 1],
        cta: [128, 1, 1],
        shared_bytes: 64 * 128,
        params: Params::new().address(out).count(COUNT),
    };
    // SAFETY: none: it writes past its output, or its threads race. That is to be seen.
    unsafe { gpu.launch(launch) }.expect("a kernel that is compiled in");
}

/// Two CTAs, which leave sums of zeros unless they multiply what comes too early.
fn launch_cluster(kernel: &'static str, order: u64) {
    const SUMS_BYTES: usize = 64 * 4;
    const TILE_BYTES: usize = 64 * 128;
    let gpu = Emu::with_order(1, order);
    let mut bytes = vec![0; SUMS_BYTES + 2 * TILE_BYTES];
    let ones = bytes.iter_mut().skip(SUMS_BYTES + TILE_BYTES);
    for (byte, half) in ones.zip([0x80, 0x3f].into_iter().cycle()) {
        *byte = half;
    }
    let out = gpu.allocate(bytes.len()).expect("memory");
    let launch = Launch {
        kernel,
        grid: [2, 1, 1],
        cta: [128, 1, 1],
        shared_bytes: 64 * 128 + 64,
        params: Params::new().address(out).count(bytes.len()),
    };
    let sums = &mut [0xff; SUMS_BYTES];
    // SAFETY: memory of this size.
    unsafe { gpu.write(&bytes, out) }.expect("memory");
    // SAFETY: none but for memory of this size: what is wrong is to be seen.
    unsafe { gpu.launch(launch) }.expect("a kernel that is compiled in");
    // SAFETY: the sums are first in it.
    unsafe { gpu.read(out, sums) }.expect("memory");
    assert!(sums.iter().all(|byte| *byte == 0), "{WRONG}");
}
