//! Runs a target under libFuzzer, which `tests/fuzzing/run` asks for.

#![allow(unsafe_code, reason = "libFuzzer is called as a C library")]

use std::ffi::{CString, c_char, c_int};
use std::path::{Path, PathBuf};
use std::process::abort;
use std::sync::OnceLock;

type Check = Box<dyn Fn(&[u8]) -> Result<(), String>>;

/// The one decoder of this process. libFuzzer calls it on the thread that called `run`.
struct Chosen(Check);

// SAFETY: `run` sets it and hands its own thread to libFuzzer, which calls it on that thread alone.
unsafe impl Send for Chosen {}
// SAFETY: as above.
unsafe impl Sync for Chosen {}

static CHOSEN: OnceLock<Chosen> = OnceLock::new();

type Callback = extern "C" fn(*const u8, usize) -> c_int;

unsafe extern "C" {
    /// The whole of libFuzzer as a function. It ends the process.
    fn LLVMFuzzerRunDriver(
        argc: *mut c_int,
        argv: *mut *mut *mut c_char,
        callback: Callback,
    ) -> c_int;
}

/// What `libfuzzer-sys` expects of a program with `fuzz_target!`.
#[unsafe(no_mangle)]
fn rust_fuzzer_test_input(input: &[u8]) -> i32 {
    let Some(Chosen(check)) = CHOSEN.get() else { abort() };
    if let Err(failure) = check(input) {
        eprintln!("fuzz: {failure}");
        abort();
    }
    0
}

extern "C" fn one_input(data: *const u8, size: usize) -> c_int {
    let input = match size {
        0 => &[][..],
        // SAFETY: libFuzzer passes an input that lives during the call.
        _ => unsafe { std::slice::from_raw_parts(data, size) },
    };
    rust_fuzzer_test_input(input)
}

/// Fuzzes `check` from `corpus` for `SEPAL_FUZZ_SECONDS` (default 60), keeps what covers more in
/// `SEPAL_FUZZ_FOLDER`, and ends the process.
///
/// # Panics
/// If the folder cannot be written.
pub fn run(
    name: &str,
    corpus: &[Vec<u8>],
    check: impl Fn(&[u8]) -> Result<(), String> + 'static,
) -> ! {
    // It lets symbols of the library be found.
    let _ = libfuzzer_sys::rust_libfuzzer_debug_path();
    let set = |key: &str, default: &str| std::env::var(key).unwrap_or_else(|_| default.to_owned());
    let folder = PathBuf::from(set("SEPAL_FUZZ_FOLDER", "/tmp/fuzz")).join(name.replace(' ', "_"));
    let (seeds, found) = (folder.join("seeds"), folder.join("corpus"));
    for folder in [&seeds, &found] {
        std::fs::create_dir_all(folder).expect("the folder of a fuzz target");
    }
    for (number, seed) in corpus.iter().enumerate() {
        std::fs::write(seeds.join(number.to_string()), seed).expect("a seed");
    }
    CHOSEN.get_or_init(|| Chosen(Box::new(check)));
    let shown = |path: &Path| path.display().to_string();
    let arguments = [
        "fuzz".to_owned(),
        format!("-max_total_time={}", set("SEPAL_FUZZ_SECONDS", "60")),
        format!("-artifact_prefix={}/", shown(&folder)),
        "-max_len=131072".to_owned(),
        "-timeout=10".to_owned(),
        "-print_final_stats=1".to_owned(),
        "-verbosity=0".to_owned(),
        shown(&found),
        shown(&seeds),
    ];
    let mut arguments: Vec<*mut c_char> = arguments
        .into_iter()
        .map(|argument| CString::new(argument).expect("no zero byte").into_raw())
        .collect();
    let mut count = arguments.len() as c_int;
    arguments.push(std::ptr::null_mut());
    let mut arguments = arguments.as_mut_ptr();
    // SAFETY: as `main` gets them: `count` texts and a null pointer, which are never freed.
    let status = unsafe { LLVMFuzzerRunDriver(&raw mut count, &raw mut arguments, one_input) };
    unreachable!("libFuzzer returned {status}")
}
