use std::path::Path;
use std::process::Command;

use super::*;

/// A driver library of the given functions, each returning its number.
fn fake(folder: &Path, functions: &[(&str, u32)]) -> Library {
    fake_with(folder, functions, "")
}

/// The same with further functions in C++.
fn fake_with(folder: &Path, functions: &[(&str, u32)], others: &str) -> Library {
    let source = folder.join("fake.cpp");
    let body: String = functions
        .iter()
        .map(|(name, status)| {
            format!("int {name}(int* out) {{ if ((long)out > 4096) *out = 0; return {status}; }}\n")
        })
        .collect();
    std::fs::write(&source, format!("extern \"C\" {{\n{body}{others}}}\n")).unwrap();
    let library = folder.join("libcuda.so.1");
    // The one that compiled the emulator.
    let compiler = env!("SEPAL_EMU_COMPILER");
    let compiled =
        Command::new(compiler).args(["-shared", "-fPIC", "-o"]).args([&library, &source]).status();
    assert!(compiled.expect(compiler).success());
    open(library.to_str().unwrap()).unwrap()
}

fn all(init: u32) -> Vec<(&'static str, u32)> {
    functions().map(|name| (name, if name == "cuInit" { init } else { 0 })).collect()
}

#[test]
fn a_stub_of_the_driver_is_told_by_what_it_lacks() {
    let folder = tempfile::tempdir().unwrap();
    let stub = fake(folder.path(), &[("cuInit", 100)]);
    assert_eq!(start(stub), Err(NoCuda::NoFunction("cuDriverGetVersion")));
}

#[test]
fn a_driver_that_does_not_start_says_why() {
    for (code, wanted) in [
        (100, "CUDA_ERROR_NO_DEVICE (100)"),
        (34, "CUDA_ERROR_STUB_LIBRARY (34)"),
        (803, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH (803)"),
        (4242, "an error that this build does not know (4242)"),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let message = start(fake(folder.path(), &all(code))).unwrap_err().to_string();
        assert!(message.starts_with("no CUDA device: cuInit: "), "{message}");
        assert!(message.contains(wanted), "{message}");
    }
}

#[test]
fn a_driver_that_shares_no_memory_starts() {
    let source = |functions: &[(&str, u32)]| {
        let folder = tempfile::tempdir().unwrap();
        let one = "int cuDeviceGetCount(int* out) { *out = 1; return 0; }\n";
        let functions: Vec<_> =
            functions.iter().filter(|f| f.0 != "cuDeviceGetCount").copied().collect();
        start(fake_with(folder.path(), &functions, one)).unwrap().shares_memory
    };
    let sharing = SHARING_NAMES.iter().map(|name| (*name, 0));
    let mut functions: Vec<_> = all(0).into_iter().chain(sharing).collect();
    assert!(source(&functions));
    functions.retain(|(name, _)| *name != "cuMemSetAccess");
    assert!(!source(&functions));
    assert!(!source(&all(0)));
}

#[test]
fn a_driver_without_devices_is_no_device() {
    let folder = tempfile::tempdir().unwrap();
    let refused = start(fake(folder.path(), &all(0)));
    let wanted = NoCuda::NoSuchDevice { ordinal: 0, count: 0 };
    assert_eq!(refused, Err(wanted));
}

#[test]
fn no_library_is_an_error_and_not_a_panic() {
    assert!(open("/nonexistent/libcuda.so.1").is_err());
}
