//! What the emulator refuses.

use super::*;
use crate::cuda::gpu::Params;

fn launch(kernel: &'static str, cta: u32, params: Params) -> Result<(), GpuError> {
    let launch = Launch { kernel, grid: [1, 1, 1], cta: [cta, 1, 1], shared_bytes: 128, params };
    // SAFETY: each of these is refused before a kernel runs.
    unsafe { Emu::new(1).launch(launch) }
}

#[test]
fn kernels_are_found_in_their_files() {
    let names = kernels();
    for name in ["rmsnorm_f32", "rmsnorm_bf16", "rmsnorm_f16"] {
        assert!(names.iter().any(|n| n == name), "{name} in {names:?}");
    }
}

/// Source, name and value of every constant that the compiled sources export.
fn exports() -> Vec<(String, String, u32)> {
    // SAFETY: names of exports are static C strings.
    let text = |at| unsafe { CStr::from_ptr(at) }.to_string_lossy().into_owned();
    let export = |index| {
        let (mut source, mut name, mut value) = (std::ptr::null(), std::ptr::null(), 0);
        // SAFETY: any index may be asked for; it writes two pointers and a number, or nothing.
        let is_there =
            unsafe { sepal_emu_export(index, &raw mut source, &raw mut name, &raw mut value) };
        is_there.then(|| (text(source), text(name), value))
    };
    (0..).map_while(export).collect()
}

#[test]
fn the_sizes_that_rust_uses_are_those_of_the_sources() {
    let mut listed: Vec<_> = crate::sizes::ALL
        .iter()
        .map(|&(source, name, value)| (source.to_owned(), name.to_owned(), value))
        .collect();
    let mut compiled = exports();
    listed.sort();
    compiled.sort();
    assert!(listed.len() > 50, "{listed:?}");
    assert_eq!(listed, compiled, "run kernels/prebuilt/build.py");
}

#[test]
fn launches_that_do_not_fit_the_declaration_are_refused() {
    let none = launch("no_such_kernel", 32, Params::new());
    assert_eq!(none, Err(GpuError::NoKernel("no_such_kernel")));
    let pointers = Params::new().address(Address(256)).address(Address(256)).address(Address(256));
    let good = pointers.count(8).float(0.0);
    for (params, cta) in [
        (pointers, 32),
        (pointers.wide(8).float(0.0), 32),
        (good.count(1), 32),
        (pointers.count(1 << 32).float(0.0), 32),
        (good, 2048),
        (good, 0),
    ] {
        let refused = launch("rmsnorm_f32", cta, params);
        assert!(matches!(refused, Err(GpuError::BadLaunch { .. })), "{refused:?}");
    }
}

#[test]
fn a_grid_that_clusters_do_not_fill_is_refused() {
    let nowhere = Address(256);
    let mut params = Params::new();
    for _ in 0..3 {
        params = params.address(nowhere).address(nowhere).address(nowhere);
        params = params.count(128).count(0);
    }
    let params = params.address(nowhere).count(64).count(40);
    let refused = launch("linear_wgmma_nf4_bf16", 256, params);
    let what = "a grid that its clusters do not fill";
    assert!(
        matches!(refused, Err(GpuError::BadLaunch { what: why, .. }) if why == what),
        "{refused:?}"
    );
}
