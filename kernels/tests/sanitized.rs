//! Every kernel on the emulator in its smallest cases, for an emulator that is instrumented by a sanitizer (`SEPAL_EMU_SANITIZE` at build
//! time, `kernels/cuda/emu/sanitize` sets everything up). A program of its own: the test harness of Rust is not instrumented, and what its
//! threads do looks like races. First it runs a kernel that is wrong on purpose, in a process of its own, and fails unless the sanitizer ends
//! that process: green means that faults are seen.
//!
//! Arguments name the checks to run; none: all.
#![allow(
    unsafe_code,
    reason = "the launch of a kernel that is wrong on purpose"
)]
#![allow(clippy::print_stdout, reason = "the report of this program")]

use std::process::Command;
use std::time::Instant;

use kernels::cuda::emu::Emu;
use kernels::cuda::{Cuda, Gpu, Launch, Params};
use kernels::selftest::{Extent, checks};

/// What this program was built with.
const SANITIZER: Option<&str> = option_env!("SEPAL_EMU_SANITIZE");

/// The thread sanitizer makes the emulator 500 times slower, the other 10 times.
const EXTENT: Extent = match SANITIZER {
    Some(kind) if matches!(kind.as_bytes(), b"thread") => Extent::Least,
    _ => Extent::Small,
};

/// Threads of the emulator, and the order of the threads of a CTA: none that a kernel may count on.
const THREADS: usize = 2;
const ORDER: u64 = 7;

/// Launches a kernel that is wrong, instead of anything else.
const FAULTY: &str = "--faulty";

/// Products of a warpgroup that are wrong, and what the emulator says of them.
const FAULTY_PRODUCTS: [(&str, &str); 3] = [
    ("faulty_wgmma_proxy", "copied without fence_proxy_async"),
    ("faulty_wgmma_wait", "registers of A were changed"),
    ("faulty_wgmma_warps", "issue different products"),
];

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
        _ => println!("not instrumented"),
    }
    if SANITIZER.is_some_and(|kind| !kind.is_empty()) {
        for (kernel, message) in FAULTY_PRODUCTS {
            assert_reported(kernel, message);
        }
    }
    let mut cuda = Cuda::exact(Emu::with_order(THREADS, ORDER));
    cuda.use_warpgroups(true);
    let mut ran = 0;
    for (name, check) in checks::<Emu>() {
        if !arguments.is_empty() && !arguments.iter().any(|wanted| wanted == name) {
            continue;
        }
        let start = Instant::now();
        let cases = check(&mut cuda, EXTENT).unwrap_or_else(|failure| {
            let source = std::error::Error::source(&failure).map(ToString::to_string);
            panic!("{name}: {failure} {}", source.unwrap_or_default())
        });
        assert!(cases > 0, "{name} has no cases");
        println!(
            "{name:20} {cases:5} cases {:7.1} s",
            start.elapsed().as_secs_f64()
        );
        ran += 1;
    }
    assert!(ran > 0, "no check is called so");
}

/// Runs the kernel in a process of its own, which the sanitizer must end with this message.
fn assert_reported(kernel: &str, message: &str) {
    let program = std::env::current_exe().expect("the path of this program");
    let ended = Command::new(program)
        .args([FAULTY, kernel])
        .output()
        .expect("this program again");
    let said = String::from_utf8_lossy(&ended.stderr);
    assert!(
        !ended.status.success() && said.contains(message),
        "{kernel} was not reported: {} {said}",
        ended.status
    );
    println!("{kernel:20} reported");
}

fn launch_faulty(kernel: &str) {
    const COUNT: usize = 64;
    let product = FAULTY_PRODUCTS.iter().find(|(name, _)| *name == kernel);
    let kernel = match (kernel, product) {
        (_, Some((name, _))) => name,
        ("faulty_overrun", _) => "faulty_overrun",
        _ => "faulty_race",
    };
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
