//! What the emulator says of launches that may start early.

use super::*;
use crate::cuda::gpu::Params;

const WIDTH: usize = 64;
const FAULT: &str = "it reads before pdl_wait what an earlier launch wrote";

/// `values` in memory of the device.
fn floats(emu: &Emu, values: &[f32]) -> Address {
    let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    let at = emu.allocate(bytes.len()).unwrap();
    // SAFETY: so many bytes were allocated.
    unsafe { emu.write(&bytes, at) }.unwrap();
    at
}

fn first(emu: &Emu, at: Address) -> f32 {
    let mut bytes = [0; 4];
    // SAFETY: it begins a buffer of this file.
    unsafe { emu.read(at, &mut bytes) }.unwrap();
    f32::from_le_bytes(bytes)
}

/// x += y.
fn add(x: Address, y: Address) -> Launch {
    Launch {
        kernel: "add_f32",
        grid: [1, 1, 1],
        cta: [256, 1, 1],
        shared_bytes: 0,
        params: Params::new().address(x).address(y).wide(WIDTH),
    }
}

fn norm(x: Address, weight: Address, out: Address) -> Launch {
    Launch {
        kernel: "rmsnorm_f32",
        grid: [1, 1, 1],
        cta: [32, 1, 1],
        shared_bytes: 128,
        params: Params::new().address(x).address(weight).address(out).count(WIDTH).float(0.0),
    }
}

/// Records launches, of which all but the first may start early, and runs them.
fn replay(emu: &Emu, launches: &[Launch]) -> Result<(), GpuError> {
    emu.begin_recording().unwrap();
    for (at, launch) in launches.iter().enumerate() {
        let recorded = match at {
            // SAFETY: buffers of `WIDTH` values, which live on.
            0 => unsafe { emu.launch(*launch) },
            // SAFETY: as above.
            _ => unsafe { emu.launch_early(*launch) },
        };
        recorded.unwrap();
    }
    let graph = emu.end_recording().unwrap();
    // SAFETY: as above.
    unsafe { emu.replay(&graph) }
}

#[test]
fn launches_that_wait_for_what_they_read_have_the_results_of_launches_in_order() {
    let emu = Emu::new(1);
    let [x, weight, out] = [1.0, 3.0, 0.0].map(|value| floats(&emu, &[value; WIDTH]));
    replay(&emu, &[add(x, x), norm(x, weight, out), add(out, out), norm(out, weight, x)]).unwrap();
    assert_eq!((first(&emu, out), first(&emu, x)), (6.0, 3.0));
}

#[test]
fn a_launch_that_reads_what_the_one_before_it_wrote_is_refused() {
    let emu = Emu::new(1);
    let [x, weight, out] = [1.0, 3.0, 0.0].map(|value| floats(&emu, &[value; WIDTH]));
    let fault = GpuError::BadLaunch { kernel: "rmsnorm_f32", what: FAULT };
    assert_eq!(replay(&emu, &[add(weight, x), norm(x, weight, out)]), Err(fault));
}

/// The launch between them may itself start early, and has not waited yet.
#[test]
fn a_launch_that_reads_what_the_one_before_the_last_wrote_is_refused() {
    let emu = Emu::new(1);
    let [x, y, weight, out] = [1.0, 1.0, 3.0, 0.0].map(|value| floats(&emu, &[value; WIDTH]));
    let fault = GpuError::BadLaunch { kernel: "rmsnorm_f32", what: FAULT };
    let launches = [add(weight, x), add(x, y), norm(x, weight, out)];
    assert_eq!(replay(&emu, &launches), Err(fault));
    // A launch in order between them, or a copy, lets it read that.
    emu.begin_recording().unwrap();
    // SAFETY: buffers of `WIDTH` values.
    unsafe { emu.launch(add(weight, x)) }.unwrap();
    // SAFETY: as above.
    unsafe { emu.copy(x, y, 4) }.unwrap();
    // SAFETY: as above.
    unsafe { emu.launch_early(norm(x, weight, out)) }.unwrap();
    let graph = emu.end_recording().unwrap();
    // SAFETY: as above.
    unsafe { emu.replay(&graph) }.unwrap();
}

#[test]
fn a_kernel_that_never_waits_may_not_start_early() {
    let emu = Emu::new(1);
    let [x, out] = [1.0, 0.0].map(|value| floats(&emu, &[value; WIDTH]));
    let convert = Launch {
        kernel: "convert_f32_bf16",
        params: Params::new().address(x).address(out).wide(WIDTH),
        ..add(x, x)
    };
    assert!(!crate::cuda::driver::images::waits(convert.kernel));
    // SAFETY: buffers of `WIDTH` values.
    let refused = unsafe { emu.launch_early(convert) };
    let what = "it may start early, and a thread ends without pdl_wait";
    assert_eq!(refused, Err(GpuError::BadLaunch { kernel: convert.kernel, what }));
    let older = Emu::new(1).with_architecture(89);
    // SAFETY: as above.
    unsafe { older.launch_early(convert) }.unwrap();
}
