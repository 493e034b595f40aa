//! `sepal selftest`: every kernel against the reference on a device, then what each operation takes there, beside what the device gives
//! at best. It needs the executable and a driver, nothing else.

mod blocks;
mod others;
mod roofline;

use std::io::Write;
use std::time::Duration;

use kernels::Cpu;
#[cfg(feature = "emu")]
use kernels::cuda::emu::Emu;
use kernels::cuda::{Agreement, Cuda, Gpu};
use kernels::ops::OpError;
use kernels::selftest::{Extent, checks};
use shared::config::Device;
use shared::exit::ExitReason;

use crate::engine::EngineError;
use crate::prepare::with_source;
use crate::sample;
use roofline::{Peaks, Sizes, table};

/// Bytes of the pieces that are copied for the bandwidth, and repetitions of products for the peak.
const COPY_BYTES: usize = 1 << 30;
const MATRIX_ITERATIONS: usize = 20_000;

/// Longest time for the sample of products by warpgroups.
const SAMPLE_TIMEOUT: Duration = Duration::from_secs(60);

/// Checks and measures `device`, and prints to standard output; the smallest cases only if `is_quick`.
pub fn run_command(device: Device, is_quick: bool) -> ExitReason {
    let out = &mut std::io::stdout();
    let extent = if is_quick {
        Extent::Small
    } else {
        Extent::Full
    };
    let done = match device {
        Device::Cpu => on_processor(out),
        Device::Cuda(ordinal) => match sample::open(ordinal, Some(SAMPLE_TIMEOUT)) {
            Ok(opened) => on_device(opened.cuda, opened.sampled, extent, out),
            Err(failure) => Err(Ended::new(ExitReason::BadConfig, &failure)),
        },
        #[cfg(feature = "emu")]
        Device::Emulator => {
            let threads = std::thread::available_parallelism().map_or(1, usize::from);
            let mut cuda = Cuda::new(Emu::new(threads));
            let sampled = cuda.choose_products().map_err(|e| with_source(&e));
            on_device(cuda, sampled, Extent::Small, out)
        }
        #[cfg(not(feature = "emu"))]
        Device::Emulator => Err(Ended {
            reason: ExitReason::BadConfig,
            message: "device emu is not available: this build has no emulator".to_owned(),
        }),
    };
    match done {
        Ok(()) => ExitReason::Clean,
        Err(ended) => {
            eprintln!("sepal: {}", ended.message);
            ended.reason
        }
    }
}

/// Why a self-test ended early, or found something.
struct Ended {
    reason: ExitReason,
    message: String,
}

impl Ended {
    fn new(reason: ExitReason, failure: &dyn std::error::Error) -> Ended {
        Ended {
            reason,
            message: with_source(failure),
        }
    }
}

impl From<OpError> for Ended {
    fn from(failure: OpError) -> Ended {
        Ended::new(ExitReason::DeviceLost, &failure)
    }
}

impl From<EngineError> for Ended {
    fn from(failure: EngineError) -> Ended {
        Ended::new(ExitReason::DeviceLost, &failure)
    }
}

impl From<std::io::Error> for Ended {
    fn from(failure: std::io::Error) -> Ended {
        Ended::new(ExitReason::Failed, &failure)
    }
}

/// The processor's operations are checked by its tests; here they are measured.
fn on_processor(out: &mut impl Write) -> Result<(), Ended> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let mut cpu = Cpu::new(threads);
    writeln!(out, "processor, {threads} threads, {:?}", cpu.isa())?;
    table(&mut cpu, Sizes::SMALL, Peaks::default(), out)
}

/// Without warpgroups where the sample by them failed, which then is what is wrong with the device.
fn on_device<G: Gpu>(
    mut cuda: Cuda<G>,
    sampled: Result<Agreement, String>,
    extent: Extent,
    out: &mut impl Write,
) -> Result<(), Ended> {
    let found = cuda.gpu().properties().clone();
    writeln!(
        out,
        "{}, compute capability {}.{}, {} multiprocessors, kernels: {}",
        found.name,
        found.architecture / 10,
        found.architecture % 10,
        found.multiprocessors,
        found.image
    )?;
    match &sampled {
        Ok(how) => writeln!(out, "products of many rows {how}")?,
        Err(why) => writeln!(
            out,
            "products of many rows by warps, not by warpgroups: {why}"
        )?,
    }
    check(&mut cuda, extent, out)?;
    measure(&mut cuda, extent, out)?;
    match sampled {
        Ok(_) => Ok(()),
        Err(why) => Err(Ended {
            reason: ExitReason::DeviceLost,
            message: format!("warpgroups fail on this device; all else is right: {why}"),
        }),
    }
}

/// Every operation against its reference.
fn check<G: Gpu>(cuda: &mut Cuda<G>, extent: Extent, out: &mut impl Write) -> Result<(), Ended> {
    // A failure then names its kernel.
    cuda.watch(Some(|_| ()));
    let mut wrong = 0;
    for (name, check) in checks::<G>() {
        // At once, as a kernel may never end.
        write!(out, "{name:20} ")?;
        out.flush()?;
        match check(cuda, extent) {
            Ok(cases) => writeln!(out, "{cases:5} cases  right")?,
            Err(failure) => {
                wrong += 1;
                writeln!(out, "WRONG: {}", with_source(&failure))?;
            }
        }
    }
    cuda.watch(None);
    match wrong {
        0 => Ok(()),
        _ => Err(Ended {
            reason: ExitReason::DeviceLost,
            message: format!("{wrong} kinds of operations are wrong on this device"),
        }),
    }
}

fn measure<G: Gpu>(cuda: &mut Cuda<G>, extent: Extent, out: &mut impl Write) -> Result<(), Ended> {
    let is_full = extent == Extent::Full;
    let (bytes, iterations, sizes) = if is_full {
        (COPY_BYTES, MATRIX_ITERATIONS, Sizes::LARGE)
    } else {
        (1 << 20, 1, Sizes::TINY)
    };
    let peaks = Peaks {
        bytes_per_s: Some(cuda.copy_rate(bytes)?),
        flops_per_s: Some(cuda.matrix_rate(iterations)?),
    };
    table(cuda, sizes, peaks, out)?;
    roofline::by_warps(cuda, sizes, peaks, out)?;
    roofline::quantize(cuda, sizes, peaks, out)
}
