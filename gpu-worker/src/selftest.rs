//! `sepal selftest`: every kernel against the reference on a device, then what each operation takes
//! there, beside what the device gives at best. It needs the executable and a driver, nothing else.

mod budget;
mod measure;
mod report;
mod steps;

use std::io::Write;
use std::path::{Path, PathBuf};

use clap::Args;
use kernels::Cpu;
use kernels::cases::{Class, Shapes, cuda_operations, operations};
use kernels::cuda::driver::CudaDriver;
#[cfg(feature = "emu")]
use kernels::cuda::emu::Emu;
use kernels::cuda::peaks::{HostRates, LaunchCosts};
use kernels::cuda::{Cuda, Gpu};
use kernels::ops::OpError;
use shared::bootstrap::die_with_parent;
use shared::config::Device;
use shared::exit::ExitReason;
use shared::processor::Processor;
use shared::warpgroups::{WarpgroupKernel, WarpgroupKernels, Warpgroups};

use crate::engine::EngineError;
use crate::node;
use measure::{Peaks, Table};
use report::{Check, SelftestReport};
use shared::error_chain::with_causes;
use steps::Steps;

/// Bytes of the pieces that are copied for the bandwidth, and repetitions of products for the peak.
const COPY_BYTES: usize = 1 << 30;
const MATRIX_ITERATIONS: usize = 20_000;
/// Bytes of the pieces that are copied to the host and back, and launches of which the cost is taken.
const HOST_BYTES: usize = 64 << 20;
const LAUNCHES: usize = 200;

/// Settings of `sepal selftest`.
#[derive(Clone, Debug, Args)]
#[command(rename_all = "snake_case")]
pub struct SelfTestConfig {
    /// Device to test: cuda:N, cpu (measured only), or emu:N in builds with the emulator
    #[arg(long, default_value = "cuda:0")]
    pub device: Device,
    /// Run only the smallest cases: whether kernels load and give correct results
    #[arg(long)]
    pub quick: bool,
    /// Also write everything that is found to FILE, as JSON, to be sent in
    #[arg(long, value_name = "FILE")]
    pub report: Option<PathBuf>,
    /// End with this process, the parent
    // It reads no measurements, which are left out, and knows that samples of kernels for warpgroups do no
    // harm here, except those of `skip`.
    #[arg(long, value_name = "PID", hide = true)]
    pub parent: Option<u32>,
    /// Kernels for warpgroups not to launch
    #[arg(long, value_delimiter = ',', hide = true)]
    pub skip: Vec<WarpgroupKernel>,
}

/// A self-test that has begun its report.
pub struct SelfTest {
    config: SelfTestConfig,
    report: SelftestReport,
}

impl SelfTest {
    /// Begins the report; ends with the parent from here on.
    ///
    /// # Errors
    /// With what the command ends; the error was printed.
    pub fn begin(config: SelfTestConfig) -> Result<SelfTest, ExitReason> {
        if let Some(Err(error)) = config.parent.map(die_with_parent) {
            eprintln!("sepal: {error}");
            return Err(error.exit_reason());
        }
        match SelftestReport::begin(config.report.as_deref()) {
            Ok(report) => Ok(SelfTest { config, report }),
            Err(error) => Err(unwritten(&config, &error)),
        }
    }

    /// The CUDA device of which other processes must take the samples of kernels for warpgroups first.
    pub fn to_sample(&self) -> Option<u32> {
        let Device::Cuda(ordinal) = self.config.device else { return None };
        let has_none = || CudaDriver::properties_of(ordinal).is_ok_and(|found| !found.has_wgmma());
        (self.config.parent.is_none() && !has_none()).then_some(ordinal)
    }

    /// Checks and measures the device, and prints to standard output; the smallest cases only if it is
    /// quick. `sampled` is what came of the samples. Everything that is found goes to the report as well.
    pub fn run(mut self, sampled: Option<Warpgroups>) -> ExitReason {
        let done = test(&self.config, sampled, &mut self.report);
        if let Err(error) = self.report.end(done.as_ref().err().map(|e| e.message.as_str())) {
            return unwritten(&self.config, &error);
        }
        match done {
            Ok(()) => ExitReason::Clean,
            Err(ended) => {
                eprintln!("sepal: {}", ended.message);
                ended.reason
            }
        }
    }
}

fn unwritten(config: &SelfTestConfig, error: &std::io::Error) -> ExitReason {
    let path = config.report.as_deref().unwrap_or(Path::new("")).display();
    eprintln!("sepal: cannot write the report {path}: {error}");
    ExitReason::BadConfig
}

fn test(
    config: &SelfTestConfig,
    sampled: Option<Warpgroups>,
    report: &mut SelftestReport,
) -> Result<(), Ended> {
    let SelfTestConfig { device, quick: is_quick, parent, .. } = *config;
    let out = &mut std::io::stdout();
    let class = if is_quick { Class::Quick } else { Class::Served };
    match device {
        Device::Cpu => on_processor(is_quick, out, report),
        Device::Node(_) => {
            let processor = Processor::of_this_machine();
            if processor.of(device).is_empty() {
                let message = format!("invalid device {device}: there are {}", processor.summary());
                return Err(Ended { reason: ExitReason::BadConfig, message });
            }
            node::stay_on(&processor.seats(device, 0, 1, 0), device);
            on_processor(is_quick, out, report)
        }
        Device::Cuda(ordinal) => {
            let found = parent.is_none().then(|| sampled.unwrap_or(Warpgroups::Missing));
            match CudaDriver::open(ordinal) {
                Ok(driver) => {
                    let mut cuda = Cuda::new(driver);
                    cuda.leave_alone(config.skip.iter().copied().collect());
                    on_device(cuda, found, class, parent.is_none(), out, report)
                }
                Err(failure) => Err(Ended::new(ExitReason::BadConfig, &failure)),
            }
        }
        #[cfg(feature = "emu")]
        Device::Emulator(_) => {
            let threads = std::thread::available_parallelism().map_or(1, usize::from);
            on_device(Cuda::new(Emu::new(threads)), None, Class::Quick, true, out, report)
        }
        #[cfg(not(feature = "emu"))]
        Device::Emulator(_) => Err(Ended {
            reason: ExitReason::BadConfig,
            message: "device emu is not available: this build has no emulator".to_owned(),
        }),
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
fn on_processor(
    is_quick: bool,
    out: &mut impl Write,
    report: &mut SelftestReport,
) -> Result<(), Ended> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let mut cpu = Cpu::new(threads);
    let name = format!("processor, {threads} threads, {:?}", cpu.isa());
    writeln!(out, "{name}")?;
    report.of_processor(name);
    let repetitions = if is_quick { 1 } else { 5 };
    let mut table = Table { peaks: Peaks::default(), repetitions, out, report };
    // Quantization is slow, and no part of serving.
    let is_wanted = |name: &str| !name.starts_with("quantize");
    table.operations(&mut cpu, &operations(), &Shapes::SMALL, &is_wanted)?;
    steps::measure(&mut cpu, &Shapes::SMALL, Steps::SMALL, &mut table)
}

/// Without the kernels for warpgroups that failed, which then is what is wrong with the device.
/// Where nothing was found about them, the samples are taken here.
fn on_device<G: Gpu>(
    mut cuda: Cuda<G>,
    found: Option<Warpgroups>,
    class: Class,
    is_measured: bool,
    out: &mut impl Write,
    report: &mut SelftestReport,
) -> Result<(), Ended> {
    let properties = cuda.gpu().properties().clone();
    report.of_device(&properties, name_of(class));
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
    report.decided(&warpgroups);
    check(&mut cuda, class, out, report)?;
    if is_measured {
        measure(&mut cuda, class, out, report)?;
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
fn check<G: Gpu>(
    cuda: &mut Cuda<G>,
    class: Class,
    out: &mut impl Write,
    report: &mut SelftestReport,
) -> Result<(), Ended> {
    // A failure then names its kernel.
    cuda.watch(Some(|_| ()));
    let mut wrong = 0;
    for operation in cuda_operations::<G>() {
        // At once, as a kernel may never end.
        write!(out, "{:20} {:8} ", operation.name, name_of(class))?;
        out.flush()?;
        let checked = operation.check(std::slice::from_mut(cuda), class);
        let checked = checked.map_err(|failure| with_causes(&failure));
        match &checked {
            Ok(cases) => writeln!(out, "{cases:5} cases  right")?,
            Err(failure) => {
                wrong += 1;
                writeln!(out, "WRONG: {failure}")?;
            }
        }
        report.checked(Check {
            operation: operation.name.to_owned(),
            cases: *checked.as_ref().unwrap_or(&0),
            failure: checked.err(),
        })?;
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

fn name_of(class: Class) -> String {
    format!("{class:?}").to_lowercase()
}

fn measure<G: Gpu>(
    cuda: &mut Cuda<G>,
    class: Class,
    out: &mut impl Write,
    report: &mut SelftestReport,
) -> Result<(), Ended> {
    let (bytes, iterations, shapes, steps, repetitions) = match class {
        Class::Served => (COPY_BYTES, MATRIX_ITERATIONS, Shapes::LARGE, Steps::LARGE, 50),
        _ => (1 << 20, 1, Shapes::TINY, Steps::TINY, 1),
    };
    let (rate, peak) = (cuda.copy_rate(bytes)?, cuda.matrix_rate(iterations)?);
    writeln!(out, "copy {:.0} GB/s, matrix peak {:.1} TFLOP/s", rate / 1e9, peak / 1e12)?;
    let (launch, host) = (cuda.launch_costs(LAUNCHES)?, cuda.host_rates(bytes.min(HOST_BYTES))?);
    host_line(launch, host, out)?;
    report.peaks(rate, peak, launch, host);
    report.save()?;
    let peaks = Peaks { bytes_per_s: Some(rate), flops_per_s: Some(peak) };
    let mut table = Table { peaks, repetitions, out, report };
    let all = cuda_operations::<G>();
    table.operations(cuda, &all, &shapes, &|_| true)?;
    steps::measure(cuda, &shapes, steps, &mut table)?;
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

/// What launches cost, and copies to the host and back.
fn host_line(launch: LaunchCosts, host: HostRates, out: &mut impl Write) -> std::io::Result<()> {
    let us = |seconds: f64| format!("{:.2} µs", seconds * 1e6);
    let replayed = launch.replayed_s.map_or_else(|| "not possible".to_owned(), us);
    let gb = |rate: f64| format!("{:.1} GB/s", rate / 1e9);
    let mirror = host.to_registered.map_or_else(|| "not possible".to_owned(), gb);
    writeln!(
        out,
        "launch {}, replayed {replayed}, to the device {}, back {}, to registered memory {mirror}",
        us(launch.launch_s),
        gb(host.to_device),
        gb(host.from_device)
    )
}
