//! What is known of the kernels for warpgroups of devices: from an earlier start, or from
//! `sepal sample`, a process for each device. Kernels that fault or hang there can stop nothing
//! else, and cost only themselves: another process samples the kernels that were left.
//!
//! A verdict is kept also when a kernel failed: it would fail again. A process that ended for
//! another reason (it was killed, the device was busy or had no memory) has found nothing about the
//! kernels that were left, so the next start tries those again.

use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::time::{Duration, Instant};

use nix::libc;
use serde::{Deserialize, Serialize};
use shared::config::Device;
use shared::control::CudaDevice;
use shared::exit::ExitReason;
use shared::warpgroups::{
    SampleLine, SampleVerdict, Verdicts, WarpgroupKernel, WarpgroupKernels, Warpgroups,
};
use tracing::info;

use super::subprocess::{Output, Subprocess};
use super::verdict::{VerdictSubject, sentence};

/// The kind of the verdict.
const KIND: &str = "warpgroups";

/// Version of [`Stored`]. A file of another version holds nothing.
const VERSION: u32 = 2;

/// Kernels that may hang at one start. What is left then is sampled at the next start.
const MAX_HANGS: u32 = 2;

/// A device whose warpgroups are asked about.
pub struct SampleCandidate<'a> {
    pub ordinal: u32,
    /// What the driver says of it.
    pub found: &'a CudaDevice,
    /// What a verdict about it is about.
    pub subject: VerdictSubject,
}

impl SampleCandidate<'_> {
    /// The device, as settings name it.
    pub fn device(&self) -> Device {
        Device::Cuda(self.ordinal)
    }
}

/// What a file keeps.
#[derive(Serialize, Deserialize)]
struct SampleFile {
    version: u32,
    verdicts: Verdicts,
}

/// What is known of the warpgroups of `devices`, in their order. Devices are sampled at once, each
/// process for at most `limit`; verdicts are read from and written to `folder`.
pub fn warpgroups(
    folder: &Path,
    devices: &[SampleCandidate<'_>],
    limit: Duration,
) -> Vec<Warpgroups> {
    let known = devices.iter().map(|device| known(folder, device));
    let mut known: Vec<_> = known.collect();
    let since = Instant::now();
    run(&mut known, limit);
    let finish = |(device, sampling)| finish(folder, device, sampling, since);
    devices.iter().zip(known).map(finish).collect()
}

/// Of one device, found out anew.
pub fn sample(ordinal: u32, limit: Duration) -> Warpgroups {
    let mut one = [Sampling::new(ordinal, Verdicts::new())];
    run(&mut one, limit);
    let [one] = one;
    one.outcome()
}

/// Names in one argument.
pub fn names(kernels: WarpgroupKernels) -> String {
    kernels.iter().map(|kernel| kernel.to_string()).collect::<Vec<_>>().join(",")
}

/// What is known of a device so far.
struct Sampling {
    ordinal: u32,
    verdicts: Verdicts,
    /// Kernels without a verdict.
    left: WarpgroupKernels,
    /// Why they stay so.
    stopped: Option<String>,
    hangs: u32,
    /// Whether a process was asked.
    is_new: bool,
}

impl Sampling {
    fn new(ordinal: u32, verdicts: Verdicts) -> Sampling {
        let judged = verdicts.keys().copied().collect();
        let left = WarpgroupKernels::ALL.without(judged);
        Sampling { ordinal, verdicts, left, stopped: None, hangs: 0, is_new: false }
    }

    fn is_open(&self) -> bool {
        self.stopped.is_none() && !self.left.is_empty()
    }

    fn note(&mut self, kernel: WarpgroupKernel, verdict: SampleVerdict) {
        self.left = self.left.without([kernel].into_iter().collect());
        self.verdicts.insert(kernel, verdict);
    }

    /// Learns from the end of a process that was asked about what was left.
    fn learn(&mut self, output: &Output, limit: Duration) {
        let (mut sampled, mut launched) = (None, None);
        let lines = output.text.lines().filter_map(|line| serde_json::from_str(line).ok());
        for line in lines {
            match line {
                SampleLine::Samples(kernel) => (sampled, launched) = (Some(kernel), None),
                SampleLine::Launches(name) => launched = Some(name),
                SampleLine::Found(_, SampleVerdict::Failed(_)) => (),
                SampleLine::Found(kernel, verdict) => {
                    if sampled == Some(kernel) && self.left.contains(kernel) {
                        self.note(kernel, verdict);
                    }
                    sampled = None;
                }
            }
        }
        if output.status.is_some_and(|status| status.success()) && self.left.is_empty() {
            return;
        }
        let why = why(output, launched.as_deref(), limit);
        match sampled.filter(|kernel| self.left.contains(*kernel)) {
            Some(kernel)
                if launched.as_deref().is_some_and(is_its_own) && blames_the_kernel(output) =>
            {
                self.note(kernel, SampleVerdict::Failed(why));
                self.hangs += u32::from(output.status.is_none());
                if self.hangs == MAX_HANGS && !self.left.is_empty() {
                    self.stopped = Some(format!("{MAX_HANGS} other kernels hung"));
                }
            }
            _ => self.stopped = Some(why),
        }
    }

    fn outcome(mut self) -> Warpgroups {
        match self.stopped {
            Some(why) if self.verdicts.is_empty() => {
                Warpgroups::Unknown(sentence(&format!("the sample failed: {why}")))
            }
            Some(why) => {
                let first = self.left.iter().next();
                let why = SampleVerdict::Failed(sentence(&format!("not sampled: {why}")));
                self.verdicts.extend(first.map(|kernel| (kernel, why)));
                Warpgroups::Sampled(self.verdicts)
            }
            None => Warpgroups::Sampled(self.verdicts),
        }
    }
}

/// Whether a launch is of a kernel for warpgroups. A sample launches kernels for warps, too, whose
/// faults say nothing of it.
fn is_its_own(launched: &str) -> bool {
    ["linear_wgmma", "attention_wgmma"].iter().any(|name| launched.starts_with(name))
}

/// Asks processes until each device has its verdicts or stops. Each round ends with a verdict more
/// or a stop.
fn run(all: &mut [Sampling], limit: Duration) {
    loop {
        let open = all.iter_mut().filter(|sampling| sampling.is_open());
        let asked = open.map(|sampling| (process(sampling, limit), sampling));
        let asked: Vec<_> = asked.collect();
        if asked.is_empty() {
            return;
        }
        for (process, sampling) in asked {
            sampling.is_new = true;
            match process.and_then(Subprocess::finish) {
                Ok(output) => sampling.learn(&output, limit),
                Err(why) => sampling.stopped = Some(why),
            }
        }
    }
}

fn process(sampling: &Sampling, limit: Duration) -> Result<Subprocess, String> {
    let (ordinal, kernels) = (sampling.ordinal.to_string(), names(sampling.left));
    Subprocess::start(&["sample", "--ordinal", &ordinal, "--kernels", &kernels], limit)
}

/// What an earlier start found.
fn known(folder: &Path, device: &SampleCandidate<'_>) -> Sampling {
    let kept =
        device.subject.read::<SampleFile>(folder, KIND).filter(|kept| kept.version == VERSION);
    let mut sampling =
        Sampling::new(device.ordinal, kept.map(|kept| kept.verdicts).unwrap_or_default());
    if !device.found.has_warpgroups {
        sampling.left = WarpgroupKernels::NONE;
        return sampling;
    }
    if sampling.verdicts.values().any(|verdict| matches!(verdict, SampleVerdict::Failed(_))) {
        let path = device.subject.path(folder, KIND);
        info!(device = %device.device(), path = %path.display(), "warpgroups failed at an earlier start; without this file they are tried again");
    }
    if sampling.is_open() {
        let (name, kernels) = (&device.found.name, sampling.left.iter().count());
        info!(device = %device.device(), name, kernels, "sampling warpgroups, once for this driver and build");
    }
    sampling
}

fn finish(
    folder: &Path,
    device: &SampleCandidate<'_>,
    sampling: Sampling,
    since: Instant,
) -> Warpgroups {
    if !device.found.has_warpgroups {
        return Warpgroups::Missing;
    }
    if !sampling.is_new {
        return sampling.outcome();
    }
    let verdicts = sampling.verdicts.clone();
    let found = sampling.outcome();
    let used = found.used().iter().count();
    info!(device = %device.device(), used, took = ?since.elapsed(), "warpgroups sampled");
    if !verdicts.is_empty() {
        device.subject.write(folder, KIND, SampleFile { version: VERSION, verdicts });
    }
    found
}

/// Why a process gave not all verdicts, in a sentence.
fn why(output: &Output, launched: Option<&str>, limit: Duration) -> String {
    let mut why = match output.status {
        None => format!("it did not end within {limit:?}"),
        Some(status) if status.success() => format!("it gave no answer ({status})"),
        Some(status) => format!("its process ended with {status}"),
    };
    if let Some(kernel) = launched {
        why += &format!(" after launching {kernel}");
    }
    let errors = output.errors.trim().replace('\n', "; ");
    if !errors.is_empty() {
        why += &format!(": {errors}");
    }
    sentence(&why)
}

/// Whether a process that had launched a kernel ended as one whose kernel failed.
fn blames_the_kernel(output: &Output) -> bool {
    let Some(status) = output.status else {
        return true;
    };
    let lost = i32::from(ExitReason::DeviceLost.code());
    let crashes = [libc::SIGSEGV, libc::SIGBUS, libc::SIGABRT, libc::SIGILL, libc::SIGFPE];
    status.code() == Some(lost) || status.signal().is_some_and(|signal| crashes.contains(&signal))
}

#[cfg(test)]
mod tests {
    use super::super::subprocess::output_of;
    use super::super::verdict::tests::subject;
    use super::*;

    const LONG: Duration = Duration::from_secs(60);
    const FIRST: WarpgroupKernel = WarpgroupKernel::ALL[0];
    const SECOND: WarpgroupKernel = WarpgroupKernel::ALL[1];

    fn echo(line: &SampleLine) -> String {
        format!("echo '{}'", serde_json::to_string(line).unwrap())
    }

    /// A sample that begins and launches a kernel, as the process tells it.
    fn begun(kernel: WarpgroupKernel) -> String {
        let launch = SampleLine::Launches(format!("{kernel}_of_a_sample"));
        format!("{}; {}", echo(&SampleLine::Samples(kernel)), echo(&launch))
    }

    fn found(kernel: WarpgroupKernel) -> String {
        format!("{}; {}", begun(kernel), echo(&SampleLine::Found(kernel, SampleVerdict::OtherBits)))
    }

    fn learned_from(output: &Output) -> Sampling {
        let mut sampling = Sampling::new(0, Verdicts::new());
        sampling.learn(output, LONG);
        sampling
    }

    fn learned(script: &str) -> Sampling {
        learned_from(&output_of(script, LONG))
    }

    #[test]
    fn a_fault_costs_the_kernel_that_was_sampled_alone() {
        let script = format!("{}; {}; echo 'a fault' >&2; exit 10", found(FIRST), begun(SECOND));
        let sampling = learned(&script);
        let why = format!(
            "its process ended with exit status: 10 after launching {SECOND}_of_a_sample: a fault"
        );
        let expected = [(FIRST, SampleVerdict::OtherBits), (SECOND, SampleVerdict::Failed(why))];
        assert_eq!(sampling.verdicts, expected.into_iter().collect());
        assert!(sampling.is_open(), "another process samples the others");
        assert_eq!(sampling.left.iter().count(), WarpgroupKernel::ALL.len() - 2);
        let sampling = learned(&format!("{}; kill -SEGV $$", begun(FIRST)));
        let text = format!("{:?}", sampling.verdicts);
        assert!(sampling.is_open() && text.contains("signal: 11 (SIGSEGV)"), "{text}");
    }

    #[test]
    fn kernels_that_hang_end_the_samples_of_a_start() {
        let hangs = |kernel| Output { status: None, ..output_of(&begun(kernel), LONG) };
        let mut sampling = learned_from(&hangs(FIRST));
        assert!(sampling.is_open());
        sampling.learn(&hangs(SECOND), LONG);
        assert!(!sampling.is_open() && sampling.verdicts.len() == 2);
        let text = sampling.outcome().to_string();
        for part in [
            "it did not end within 60s after launching linear_wgmma_plain_f16_of_a_sample",
            "linear_wgmma_int8_bf16 (not sampled: 2 other kernels hung)",
            "linear_wgmma_int8_f16 (not sampled)",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
    }

    #[test]
    fn what_is_not_the_fault_of_a_kernel_is_tried_again() {
        for script in [
            // No memory; killed from outside; no device, before any launch.
            format!("{}; exit 11", begun(FIRST)),
            format!("{}; kill -KILL $$", begun(FIRST)),
            echo(&SampleLine::Samples(FIRST)) + "; exit 10",
            // A kernel for warps.
            format!(
                "{}; {}; exit 10",
                echo(&SampleLine::Samples(FIRST)),
                echo(&SampleLine::Launches("linear_gemm_plain_bf16".to_owned()))
            ),
            "exit 10".to_owned(),
            "kill -SEGV $$".to_owned(),
            // No answer, or one that is not about what was sampled.
            String::new(),
            "echo nonsense".to_owned(),
            begun(FIRST),
            echo(&SampleLine::Found(FIRST, SampleVerdict::SameBits)),
            format!(
                "{}; {}",
                begun(SECOND),
                echo(&SampleLine::Found(FIRST, SampleVerdict::SameBits))
            ),
        ] {
            let sampling = learned(&script);
            assert!(!sampling.is_open() && sampling.verdicts.is_empty(), "{script}");
            assert!(matches!(sampling.outcome(), Warpgroups::Unknown(_)), "{script}");
        }
        let hangs = Output { status: None, ..output_of("", LONG) };
        assert!(learned_from(&hangs).verdicts.is_empty(), "a driver that hangs");
        let own = SampleLine::Found(FIRST, SampleVerdict::Failed("by its own word".to_owned()));
        let claims = learned(&format!("{}; {}", begun(FIRST), echo(&own)));
        assert!(claims.verdicts.is_empty());
        let some = learned(&format!("{}; {}; exit 11", found(FIRST), begun(SECOND)));
        assert_eq!(some.verdicts.len(), 1, "what was found before is kept");
        assert!(!some.is_open());
    }

    #[test]
    fn a_sentence_without_end_is_cut() {
        let script = format!("{}; head -c 60000 /dev/zero | tr '\\0' x >&2; exit 10", begun(FIRST));
        let text = learned(&script).outcome().to_string();
        assert!(text.len() < 2000, "{}", text.len());
    }

    #[test]
    fn what_is_known_starts_no_process() {
        let folder = tempfile::tempdir().unwrap();
        let has =
            |has_warpgroups| CudaDevice { name: "H200".to_owned(), uuid: [7; 16], has_warpgroups };
        let each = |kernel| (kernel, SampleVerdict::SameBits);
        let mut verdicts: Verdicts = WarpgroupKernel::ALL.into_iter().map(each).collect();
        verdicts.insert(FIRST, SampleVerdict::Failed("it faulted".to_owned()));
        let kept = SampleFile { version: VERSION, verdicts: verdicts.clone() };
        subject("H200", 12_080).write(folder.path(), KIND, &kept);
        let (new, old) = (has(true), has(false));
        let candidate =
            |found| SampleCandidate { ordinal: 0, found, subject: subject("H200", 12_080) };
        // A process would be this program of tests, which gives no answer.
        let devices = [candidate(&new), candidate(&old)];
        let found = warpgroups(folder.path(), &devices, LONG);
        assert_eq!(found, [Warpgroups::Sampled(verdicts), Warpgroups::Missing]);
    }

    #[test]
    fn a_file_of_another_version_holds_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let found = CudaDevice { name: "H200".to_owned(), uuid: [7; 16], has_warpgroups: true };
        let subject = subject("H200", 12_080);
        let device = SampleCandidate { ordinal: 0, found: &found, subject: subject.clone() };
        let verdicts = Verdicts::from([(FIRST, SampleVerdict::SameBits)]);
        let left = |device: &SampleCandidate<'_>| known(folder.path(), device).left.iter().count();
        let all = WarpgroupKernel::ALL.len();
        for (version, expected) in [(VERSION, all - 1), (VERSION - 1, all), (VERSION + 1, all)] {
            let kept = SampleFile { version, verdicts: verdicts.clone() };
            subject.write(folder.path(), KIND, &kept);
            assert_eq!(left(&device), expected, "{version}");
        }
        // One verdict for all kernels, without a version.
        subject.write(folder.path(), KIND, "SameBits");
        assert_eq!(left(&device), all);
    }
}
