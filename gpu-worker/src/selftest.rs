//! `sepal selftest`: every kernel against the reference on a device, then what each operation takes
//! there, beside what the device gives at best. It needs the executable and a driver, nothing else.

mod blocks;
mod measure;

use std::io::Write;

use kernels::Cpu;
use kernels::cases::{Class, Shapes, cuda_operations, operations};
use kernels::cuda::driver::Driver;
#[cfg(feature = "emu")]
use kernels::cuda::emu::Emu;
use kernels::cuda::{Cuda, Gpu};
use kernels::ops::OpError;
use shared::bootstrap::die_with_parent;
use shared::config::Device;
use shared::exit::ExitReason;
use shared::warpgroups::{WarpgroupKernels, Warpgroups};

use crate::engine::EngineError;
use crate::node;
use blocks::Steps;
use measure::{Peaks, Table};
use shared::causes::with_causes;

/// Bytes of the pieces that are copied for the bandwidth, and repetitions of products for the peak.
const COPY_BYTES: usize = 1 << 30;
const MATRIX_ITERATIONS: usize = 20_000;

/// Checks and measures `device`, and prints to standard output; the smallest cases only if
/// `is_quick`. Ends with `parent`, if there is one. Then nobody reads measurements, which are left
/// out, and the parent knows that samples of kernels for warpgroups do no harm here, except those
/// of `skipped`; else `sample` has other processes take them on a CUDA device.
pub fn run_command(
    device: Device,
    is_quick: bool,
    (parent, skipped): (Option<u32>, WarpgroupKernels),
    sample: fn(u32) -> Warpgroups,
) -> ExitReason {
    if let Some(Err(error)) = parent.map(die_with_parent) {
        eprintln!("sepal: {error}");
        return error.exit_reason();
    }
    let out = &mut std::io::stdout();
    let class = if is_quick { Class::Quick } else { Class::Served };
    let done = match device {
        Device::Cpu => on_processor(is_quick, out),
        Device::Node(node) => match node::stay_on(node) {
            Ok(()) => on_processor(is_quick, out),
            Err(message) => Err(Ended { reason: ExitReason::BadConfig, message }),
        },
        Device::Cuda(ordinal) => {
            let has_none = Driver::properties_of(ordinal).is_ok_and(|found| !found.has_wgmma());
            let found = parent.is_none().then(|| match has_none {
                true => Warpgroups::Missing,
                false => sample(ordinal),
            });
            match Driver::open(ordinal) {
                Ok(driver) => {
                    let mut cuda = Cuda::new(driver);
                    cuda.leave_alone(skipped);
                    on_device(cuda, found, class, parent.is_none(), out)
                }
                Err(failure) => Err(Ended::new(ExitReason::BadConfig, &failure)),
            }
        }
        #[cfg(feature = "emu")]
        Device::Emulator(_) => {
            let threads = std::thread::available_parallelism().map_or(1, usize::from);
            on_device(Cuda::new(Emu::new(threads)), None, Class::Quick, true, out)
        }
        #[cfg(not(feature = "emu"))]
        Device::Emulator(_) => Err(Ended {
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
        Ended { reason, message: with_causes(failure) }
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
fn on_processor(is_quick: bool, out: &mut impl Write) -> Result<(), Ended> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let mut cpu = Cpu::new(threads);
    writeln!(out, "processor, {threads} threads, {:?}", cpu.isa())?;
    let mut table =
        Table { peaks: Peaks::default(), repetitions: if is_quick { 1 } else { 5 }, out };
    // Quantization is slow, and no part of serving.
    let is_wanted = |name: &str| !name.starts_with("quantize");
    table.operations(&mut cpu, &operations(), &Shapes::SMALL, &is_wanted)?;
    blocks::measure(&mut cpu, &Shapes::SMALL, Steps::SMALL, &mut table)
}

/// Without the kernels for warpgroups that failed, which then is what is wrong with the device.
/// Where nothing was found about them, the samples are taken here.
fn on_device<G: Gpu>(
    mut cuda: Cuda<G>,
    found: Option<Warpgroups>,
    class: Class,
    is_measured: bool,
    out: &mut impl Write,
) -> Result<(), Ended> {
    let properties = cuda.gpu().properties().clone();
    writeln!(
        out,
        "{}, compute capability {}.{}, {} multiprocessors, kernels: {}",
        properties.name,
        properties.architecture / 10,
        properties.architecture % 10,
        properties.multiprocessors,
        properties.image
    )?;
    let warpgroups = match found {
        Some(warpgroups) => warpgroups,
        None => cuda.choose_products()?,
    };
    cuda.follow(&warpgroups);
    writeln!(out, "products of many rows and attention of many tokens {warpgroups}")?;
    check(&mut cuda, class, out)?;
    if is_measured {
        measure(&mut cuda, class, out)?;
    }
    let failed = warpgroups.failed().map(|(kernel, why)| format!("{kernel}: {why}"));
    let mut failed: Vec<String> = failed.collect();
    if let Warpgroups::Unknown(why) = &warpgroups {
        failed.push(why.clone());
    }
    if failed.is_empty() {
        return Ok(());
    }
    let message = format!(
        "warpgroups fail on this device, and warps take their place; all else is right: {}",
        failed.join("; ")
    );
    Err(Ended { reason: ExitReason::DeviceLost, message })
}

/// Every operation against its reference.
fn check<G: Gpu>(cuda: &mut Cuda<G>, class: Class, out: &mut impl Write) -> Result<(), Ended> {
    // A failure then names its kernel.
    cuda.watch(Some(|_| ()));
    let mut wrong = 0;
    for operation in cuda_operations::<G>() {
        // At once, as a kernel may never end.
        write!(out, "{:20} {:8} ", operation.name, format!("{class:?}").to_lowercase())?;
        out.flush()?;
        match operation.check(std::slice::from_mut(cuda), class) {
            Ok(cases) => writeln!(out, "{cases:5} cases  right")?,
            Err(failure) => {
                wrong += 1;
                writeln!(out, "WRONG: {}", with_causes(&failure))?;
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

fn measure<G: Gpu>(cuda: &mut Cuda<G>, class: Class, out: &mut impl Write) -> Result<(), Ended> {
    let (bytes, iterations, shapes, steps, repetitions) = match class {
        Class::Served => (COPY_BYTES, MATRIX_ITERATIONS, Shapes::LARGE, Steps::LARGE, 50),
        _ => (1 << 20, 1, Shapes::TINY, Steps::TINY, 1),
    };
    let (rate, peak) = (cuda.copy_rate(bytes)?, cuda.matrix_rate(iterations)?);
    writeln!(out, "copy {:.0} GB/s, matrix peak {:.1} TFLOP/s", rate / 1e9, peak / 1e12)?;
    let peaks = Peaks { bytes_per_s: Some(rate), flops_per_s: Some(peak) };
    let mut table = Table { peaks, repetitions, out };
    let all = cuda_operations::<G>();
    table.operations(cuda, &all, &shapes, &|_| true)?;
    blocks::measure(cuda, &shapes, steps, &mut table)?;
    // Where products of many rows go to warpgroups: what warps take for them.
    let used = cuda.use_warpgroups(WarpgroupKernels::NONE);
    if used.is_empty() {
        return Ok(());
    }
    writeln!(table.out, "by warps (mma.sync) instead of warpgroups (wgmma):")?;
    let rows = format!("rows {}", shapes.rows.last().copied().unwrap_or(0));
    let is_wanted = |name: &str| name.starts_with("linear ") && name.ends_with(&rows);
    let done = table.operations(cuda, &all, &shapes, &is_wanted);
    cuda.use_warpgroups(used);
    done
}
