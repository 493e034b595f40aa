//! What is known of the warpgroups of devices: from an earlier start, or from `sepal sample`, a
//! process for each device. Kernels that fault or hang there can stop nothing else.
//!
//! A verdict is kept also when a kernel failed: it would fail again. A process that ended for
//! another reason (it was killed, the device was busy or had no memory) has found nothing, so the
//! next start tries again.

use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::time::{Duration, Instant};

use nix::libc;
use shared::config::Device;
use shared::control::CudaDevice;
use shared::exit::ExitReason;
use shared::warpgroups::{SampleLine, Warpgroups};
use tracing::info;

use super::subprocess::{Output, Subprocess};
use super::verdict::{Subject, sentence};

/// The kind of the verdict.
const KIND: &str = "warpgroups";

/// A device whose warpgroups are asked about.
pub struct Candidate<'a> {
    /// Its number.
    pub ordinal: u32,
    /// What the driver says of it.
    pub found: &'a CudaDevice,
    /// What a verdict about it is about.
    pub subject: Subject,
}

impl Candidate<'_> {
    /// The device, as settings name it.
    pub fn device(&self) -> Device {
        Device::Cuda(self.ordinal)
    }
}

/// What is known of the warpgroups of `devices`, in their order. Samples run all at once, each for
/// at most `limit`; verdicts are read from and written to `folder`.
pub fn warpgroups(folder: &Path, devices: &[Candidate<'_>], limit: Duration) -> Vec<Warpgroups> {
    let started: Vec<_> = devices.iter().map(|device| start(folder, device, limit)).collect();
    let finish = |(device, started)| finish(folder, device, started, limit);
    devices.iter().zip(started).map(finish).collect()
}

/// Of one device, found out anew.
pub fn sample(ordinal: u32, limit: Duration) -> Warpgroups {
    match process(ordinal, limit).and_then(Subprocess::finish) {
        Ok(output) => judge(&output, limit).0,
        Err(why) => failed(&why),
    }
}

/// What is known already, or a sample on its way.
enum Started {
    Known(Warpgroups),
    Sample(Result<Subprocess, String>, Instant),
}

fn start(folder: &Path, device: &Candidate<'_>, limit: Duration) -> Started {
    if !device.found.has_warpgroups {
        return Started::Known(Warpgroups::Missing);
    }
    if let Some(known) = device.subject.read(folder, KIND) {
        if matches!(known, Warpgroups::Failed(_)) {
            let path = device.subject.path(folder, KIND);
            info!(device = %device.device(), path = %path.display(), "warpgroups failed at an earlier start; without this file they are tried again");
        }
        return Started::Known(known);
    }
    let name = &device.found.name;
    info!(device = %device.device(), name, "sampling warpgroups, once for this driver and build");
    Started::Sample(process(device.ordinal, limit), Instant::now())
}

fn finish(folder: &Path, device: &Candidate<'_>, started: Started, limit: Duration) -> Warpgroups {
    let (process, since) = match started {
        Started::Known(known) => return known,
        Started::Sample(process, since) => (process, since),
    };
    let (found, is_verdict) = match process.and_then(Subprocess::finish) {
        Ok(output) => judge(&output, limit),
        Err(why) => (failed(&why), false),
    };
    let passed = !matches!(found, Warpgroups::Failed(_));
    info!(device = %device.device(), passed, took = ?since.elapsed(), "warpgroups sampled");
    if is_verdict {
        device.subject.write(folder, KIND, &found);
    }
    found
}

fn process(ordinal: u32, limit: Duration) -> Result<Subprocess, String> {
    Subprocess::start(&["sample", "--ordinal", &ordinal.to_string()], limit)
}

fn failed(why: &str) -> Warpgroups {
    Warpgroups::Failed(sentence(&format!("the sample failed: {why}")))
}

/// The outcome by the end of a sample, and whether it will be the same the next time.
fn judge(output: &Output, limit: Duration) -> (Warpgroups, bool) {
    let lines: Vec<SampleLine> =
        output.text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
    let has_passed = output.status.is_some_and(|status| status.success());
    if let (true, Some(SampleLine::Found(found))) = (has_passed, lines.last())
        && !matches!(found, Warpgroups::Failed(_))
    {
        return (found.clone(), true);
    }
    let launched = lines.iter().rev().find_map(|line| match line {
        SampleLine::Launches(kernel) => Some(kernel),
        SampleLine::Found(_) => None,
    });
    let mut why = match output.status {
        None => format!("it did not end within {limit:?}"),
        Some(status) if has_passed => format!("it gave no answer ({status})"),
        Some(status) => format!("its process ended with {status}"),
    };
    if let Some(kernel) = launched {
        why += &format!(" after launching {kernel}");
    }
    let errors = output.errors.trim().replace('\n', "; ");
    if !errors.is_empty() {
        why += &format!(": {errors}");
    }
    (failed(&why), launched.is_some() && blames_the_kernel(output))
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

    /// A launch, as the process tells it.
    const LAUNCH: &str = r#"echo '{"Launches":"linear_wgmma_bf16"}'"#;

    fn judged(script: &str) -> (Warpgroups, bool) {
        judge(&output_of(script, LONG), LONG)
    }

    #[test]
    fn only_the_last_line_of_a_process_that_ends_well_is_an_outcome() {
        for found in [Warpgroups::Missing, Warpgroups::SameBits, Warpgroups::OtherBits] {
            let line = serde_json::to_string(&SampleLine::Found(found.clone())).unwrap();
            let script = format!("{LAUNCH}; echo '{line}'");
            assert_eq!(judged(&script), (found, true));
            for bad in [
                format!("{script}; exit 10"),
                format!("{script}; kill -SEGV $$"),
                format!("{script}; {LAUNCH}"),
                format!("{LAUNCH}; echo '{line}x'"),
            ] {
                assert!(matches!(judged(&bad).0, Warpgroups::Failed(_)), "{bad}");
            }
        }
        let claims = r#"echo '{"Found":{"Failed":"by its own word"}}'"#;
        for bad in ["", "echo nonsense", claims] {
            let (found, is_verdict) = judged(bad);
            assert!(!is_verdict, "{bad}");
            assert!(found.to_string().contains("it gave no answer"), "{found}");
        }
    }

    #[test]
    fn a_kernel_that_failed_is_named_and_the_verdict_is_kept() {
        let (found, is_verdict) = judged(&format!("{LAUNCH}; echo 'a fault' >&2; exit 10"));
        let why = "the sample failed: its process ended with exit status: 10 after launching \
                   linear_wgmma_bf16: a fault";
        assert_eq!((found, is_verdict), (Warpgroups::Failed(why.to_owned()), true));
        let (found, is_verdict) = judged(&format!("{LAUNCH}; kill -SEGV $$"));
        assert!(is_verdict && found.to_string().contains("signal: 11 (SIGSEGV)"), "{found}");
        let hangs = Output { status: None, ..output_of(LAUNCH, LONG) };
        let (found, is_verdict) = judge(&hangs, LONG);
        let why = "it did not end within 60s after launching linear_wgmma_bf16";
        assert!(is_verdict && found.to_string().contains(why), "{found}");
    }

    #[test]
    fn what_is_not_the_fault_of_a_kernel_is_tried_again() {
        for script in [
            // No memory; killed from outside; no device, before any launch.
            format!("{LAUNCH}; exit 11"),
            format!("{LAUNCH}; kill -KILL $$"),
            "exit 10".to_owned(),
            "kill -SEGV $$".to_owned(),
        ] {
            let (found, is_verdict) = judged(&script);
            assert!(matches!(found, Warpgroups::Failed(_)) && !is_verdict, "{script}");
        }
        let hangs = Output { status: None, ..output_of("", LONG) };
        assert!(!judge(&hangs, LONG).1, "a driver that hangs");
    }

    #[test]
    fn a_sentence_without_end_is_cut() {
        let (found, _) = judged("head -c 60000 /dev/zero | tr '\\0' x >&2; exit 10");
        assert!(found.to_string().len() < 1000, "{}", found.to_string().len());
    }

    #[test]
    fn what_is_known_starts_no_process() {
        let folder = tempfile::tempdir().unwrap();
        let has =
            |has_warpgroups| CudaDevice { name: "H200".to_owned(), uuid: [7; 16], has_warpgroups };
        let known = Warpgroups::Failed("it faulted".to_owned());
        subject("H200", 12_080).write(folder.path(), KIND, &known);
        let (new, old) = (has(true), has(false));
        let candidate = |found| Candidate { ordinal: 0, found, subject: subject("H200", 12_080) };
        // A process would be this program of tests, which gives no answer.
        let devices = [candidate(&new), candidate(&old)];
        let found = warpgroups(folder.path(), &devices, LONG);
        assert_eq!(found, [known, Warpgroups::Missing]);
    }
}
