//! The devices of a run: which serve when none was named, and what is known of the warpgroups of
//! each. Short-lived processes find it out before the run begins, so a signal ends the supervisor at
//! once, and them with it.
//!
//! | module | is |
//! | --- | --- |
//! | this one | which devices serve: every CUDA device that passed its test, else the processor |
//! | `sample` | which kernels for warpgroups of a device may be used |
//! | `verdict` | what outlives a run, in the cache folder |
//! | `subprocess` | a process that says something about a device |
//!
//! A device is tested once for each driver and build, by `sepal selftest --quick`, and its
//! warpgroups by `sepal sample`. A test that found nothing, because it was killed or the device was
//! busy, is repeated at the next start.

mod sample;
pub(crate) mod subprocess;
mod verdict;

use std::path::Path;
use std::time::{Duration, Instant};

use shared::config::{AutomaticDevices, Device, QuantChoice, ServeConfig, shown_uuid};
use shared::control::{CudaDevice, CudaDevices};
use shared::exit::ExitReason;
use shared::processor::Processor;
use shared::warpgroups::{WarpgroupKernels, Warpgroups};
use tracing::{info, warn};

use crate::cache_folder;
use crate::placement::{MAX_DEVICES, threads};
use sample::SampleCandidate;
use subprocess::{Output, Subprocess};
use verdict::{VerdictSubject, sentence};

/// Time for the driver to say which devices there are.
const LIST_TIMEOUT: Duration = Duration::from_secs(30);

/// Time for the test of one device, which takes seconds.
const TEST_TIMEOUT: Duration = Duration::from_secs(300);

/// Time for the sample of warpgroups before a self-test.
const SAMPLE_TIMEOUT: Duration = Duration::from_secs(60);

/// The kind of the verdict of a self-test.
const KIND: &str = "selftest";

/// Fills in the devices of `config`, and the settings that depend on them, unless devices were
/// named; the numbers of those named by UUID; and what is known of the warpgroups of its CUDA devices.
///
/// # Errors
/// A sentence, when a UUID names no device or several, or others can write to the cache folder.
pub fn choose(config: &mut ServeConfig) -> Result<(), String> {
    cache_folder::check(&config.prepare.cache_dir)?;
    number(config)?;
    let folder = config.prepare.cache_dir.join("selftest");
    let limit = config.sample_timeout;
    let Some(AutomaticDevices { threads: asked }) = config.automatic.take() else {
        config.warpgroups = of_named(&folder, &config.devices, limit);
        return Ok(());
    };
    match usable(&folder, limit) {
        Ok(found) => {
            config.devices = found.iter().map(|(device, _)| *device).collect();
            config.warpgroups = found;
        }
        Err(why) => {
            let processor = Processor::of_worker(&config.worker.cpus);
            config.devices = processor.devices();
            config.devices.truncate(MAX_DEVICES);
            config.worker.threads = threads(asked, &config.devices, &processor);
            let devices: Vec<String> = config.devices.iter().map(Device::to_string).collect();
            let (devices, processor) = (devices.join(","), processor.summary());
            info!(devices, processor, why, "no device was named, serving on the CPU");
            return Ok(());
        }
    }
    let default = Device::default_quant_type(&config.devices);
    let processor = Processor::of_worker(&config.worker.cpus);
    config.worker.threads = threads(asked, &config.devices, &processor);
    if config.prepare.quant_type.named().is_none() {
        config.prepare.quant_type = QuantChoice::ByDevice(default);
    }
    let names: Vec<String> = config.devices.iter().map(Device::to_string).collect();
    let (devices, quant_type) = (names.join(","), config.prepare.quant_type.quant_type().name());
    info!(
        devices,
        quant_type, "no device was named, serving on the CUDA devices that passed their test"
    );
    Ok(())
}

/// Gives the devices of `config` that were named by UUID the numbers that the driver gives them.
///
/// # Errors
/// A sentence, when a UUID names no device or several.
pub fn number(config: &mut ServeConfig) -> Result<(), String> {
    if config.uuids.is_empty() {
        return Ok(());
    }
    let list = list().map_err(|why| format!("no device can be found by its UUID: {why}"))?;
    numbered(config, &list)
}

fn numbered(config: &mut ServeConfig, list: &CudaDevices) -> Result<(), String> {
    for (position, uuid) in std::mem::take(&mut config.uuids) {
        let all = (0..).zip(&list.devices).filter_map(|(n, found)| Some((n, found.as_ref().ok()?)));
        let all: Vec<(u32, &CudaDevice)> = all.collect();
        let meant: Vec<u32> =
            all.iter().filter(|(_, found)| uuid.is_of(&found.uuid)).map(|(n, _)| *n).collect();
        let [ordinal] = meant[..] else {
            let many = if meant.is_empty() { "no" } else { "more than one" };
            let list =
                all.iter().map(|(n, found)| format!("cuda:{n} is {}", shown_uuid(&found.uuid)));
            return Err(format!(
                "{many} CUDA device has a UUID that begins with {uuid}: {}",
                list.collect::<Vec<_>>().join(", ")
            ));
        };
        if let Some(device) = config.devices.get_mut(position) {
            *device = Device::Cuda(ordinal);
        }
        info!(device = %Device::Cuda(ordinal), %uuid, "device found by its UUID");
    }
    Ok(())
}

/// A CUDA device as `sepal doctor` finds it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Examined {
    pub device: Device,
    /// Its name; empty if it has none to tell.
    pub name: String,
    /// Why it cannot be used.
    pub fault: Option<String>,
    /// Whether it was tested, now or before.
    pub is_tested: bool,
}

/// Looks at the CUDA devices among `devices`, or at all of them if it is `None`: what the driver says,
/// and what a self-test finds. Verdicts are read from `folder` and kept there. Devices whose names are
/// in `in_use` are not tested: servers may fill their memory.
///
/// # Errors
/// When the driver lists none.
pub fn examine(
    folder: &Path,
    devices: Option<&[Device]>,
    in_use: &[String],
    limit: Duration,
) -> Result<Vec<Examined>, String> {
    let list = list()?;
    let is_asked = |device: &Device| devices.is_none_or(|devices| devices.contains(device));
    let candidates = candidates(&list).filter(|one| is_asked(&one.device()));
    let (used, free): (Vec<_>, Vec<_>) =
        candidates.partition(|one| in_use.contains(&one.device().to_string()));
    let sampled = sample::warpgroups(folder, &free, limit);
    let mut found: Vec<Examined> = free
        .iter()
        .zip(sampled)
        .map(|(candidate, warpgroups)| Examined {
            device: candidate.device(),
            name: candidate.found.name.clone(),
            fault: tested(folder, candidate, &warpgroups),
            is_tested: true,
        })
        .collect();
    found.extend(used.iter().map(|candidate| untested(folder, candidate)));
    let all = (0..).map(Device::Cuda).zip(&list.devices).filter(|(device, _)| is_asked(device));
    found.extend(all.filter_map(|(device, found)| {
        let fault = Some(found.as_ref().err()?.clone());
        Some(Examined { device, name: String::new(), fault, is_tested: true })
    }));
    let is_listed = |device: &&Device| found.iter().any(|one| one.device == **device);
    let asked = devices.unwrap_or_default().iter();
    let missing: Vec<Device> = asked
        .filter(|device| matches!(device, Device::Cuda(_)) && !is_listed(device))
        .copied()
        .collect();
    let absent = |device| Examined {
        device,
        name: String::new(),
        fault: Some(format!("the driver lists {} devices", list.devices.len())),
        is_tested: true,
    };
    found.extend(missing.into_iter().map(absent));
    Ok(found)
}

/// A device that is in use, by an earlier test if there is one.
fn untested(folder: &Path, candidate: &SampleCandidate<'_>) -> Examined {
    let known: Option<Option<String>> = candidate.subject.read(folder, KIND);
    Examined {
        device: candidate.device(),
        name: candidate.found.name.clone(),
        is_tested: known.is_some(),
        fault: known.flatten(),
    }
}

/// What `sepal selftest` must know of a device before it tests it: the outcome of new samples.
pub fn sample(ordinal: u32) -> Warpgroups {
    sample::sample(ordinal, SAMPLE_TIMEOUT)
}

/// What is known of the warpgroups of the CUDA devices among `devices`. One that is not there is left
/// to prepare, which refuses it.
fn of_named(folder: &Path, devices: &[Device], limit: Duration) -> Vec<(Device, Warpgroups)> {
    if !devices.iter().any(|device| matches!(device, Device::Cuda(_))) {
        return Vec::new();
    }
    match list() {
        Ok(list) => {
            let is_named = |one: &SampleCandidate<'_>| devices.contains(&one.device());
            let named: Vec<_> = candidates(&list).filter(is_named).collect();
            let sampled = sample::warpgroups(folder, &named, limit);
            named.iter().map(|one| one.device()).zip(sampled).collect()
        }
        Err(why) => {
            let unknown = Warpgroups::Unknown(format!("no sample was taken: {why}"));
            devices.iter().map(|&device| (device, unknown.clone())).collect()
        }
    }
}

/// The CUDA devices that pass their test, at least one, or why there is none.
fn usable(folder: &Path, limit: Duration) -> Result<Vec<(Device, Warpgroups)>, String> {
    let mut list = list()?;
    list.devices.truncate(MAX_DEVICES);
    let unusable = |(ordinal, found): (u32, &Result<_, String>)| {
        Some((Device::Cuda(ordinal), found.as_ref().err()?.clone()))
    };
    let mut faults: Vec<(Device, String)> = (0..).zip(&list.devices).filter_map(unusable).collect();
    let candidates: Vec<_> = candidates(&list).collect();
    let sampled = sample::warpgroups(folder, &candidates, limit);
    let mut passed = Vec::new();
    for (candidate, warpgroups) in candidates.iter().zip(sampled) {
        match tested(folder, candidate, &warpgroups) {
            None => passed.push((candidate.device(), warpgroups)),
            Some(fault) => faults.push((candidate.device(), fault)),
        }
    }
    for (device, fault) in &faults {
        warn!(%device, fault, "device not used; `sepal selftest --device {device} --quick` tells more");
    }
    match passed.is_empty() {
        false => Ok(passed),
        true => {
            let faults = faults.iter().map(|(device, fault)| format!("{device}: {fault}"));
            Err(faults.collect::<Vec<_>>().join("; "))
        }
    }
}

/// A test of a device in a process of its own.
pub struct Examination(Result<Option<Subprocess>, String>);

impl Examination {
    /// Starts one. A processor needs none.
    pub fn start(device: Device) -> Examination {
        let named = device.to_string();
        let arguments = ["selftest", "--quick", "--device", &named];
        let test = || Subprocess::start(&arguments, TEST_TIMEOUT);
        Examination((!device.is_processor()).then(test).transpose())
    }

    /// What is wrong with the device, if anything is, once the test has ended. Never waits.
    pub fn poll(&mut self) -> Option<Option<String>> {
        match &mut self.0 {
            Ok(None) => Some(None),
            Err(why) => Some(Some(why.clone())),
            Ok(Some(process)) => process.poll().map(|end| match end {
                Ok(output) => judge(&output).0,
                Err(why) => Some(why),
            }),
        }
    }
}

/// What the driver says about its devices.
fn list() -> Result<CudaDevices, String> {
    let output = Subprocess::start(&["cuda_devices"], LIST_TIMEOUT)?.finish()?;
    if !output.status.is_some_and(|status| status.success()) {
        return Err(last_error(&output));
    }
    serde_json::from_str(&output.text)
        .map_err(|error| format!("cannot read the list of CUDA devices: {error}"))
}

/// The devices of a list that can be used at all.
fn candidates(list: &CudaDevices) -> impl Iterator<Item = SampleCandidate<'_>> {
    (0..).zip(&list.devices).filter_map(|(ordinal, found)| {
        let found = found.as_ref().ok()?;
        let subject = VerdictSubject::new(found, list.driver_version);
        Some(SampleCandidate { ordinal, found, subject })
    })
}

/// What is wrong with a device, as an earlier test or a new one found. Kernels for warpgroups that
/// fail are not tested: others take their place.
fn tested(
    folder: &Path,
    candidate: &SampleCandidate<'_>,
    warpgroups: &Warpgroups,
) -> Option<String> {
    let (device, SampleCandidate { found, subject, .. }) = (candidate.device(), candidate);
    if let Some(known) = subject.read(folder, KIND) {
        return known;
    }
    info!(%device, name = found.name, "testing a CUDA device, once for this driver and build");
    let start = Instant::now();
    let named = device.to_string();
    let mut arguments = vec!["selftest", "--quick", "--device", &named];
    let skipped = match warpgroups {
        Warpgroups::Missing => String::new(),
        known => sample::names(WarpgroupKernels::ALL.without(known.harmless())),
    };
    if !skipped.is_empty() {
        arguments.extend(["--skip", &skipped]);
    }
    let tested = Subprocess::start(&arguments, TEST_TIMEOUT).and_then(Subprocess::finish);
    let (fault, is_verdict) = match tested {
        Ok(output) => judge(&output),
        Err(why) => (Some(why), false),
    };
    info!(%device, passed = fault.is_none(), took = ?start.elapsed(), "CUDA device tested");
    if is_verdict {
        subject.write(folder, KIND, &fault);
    }
    fault
}

/// What is wrong by the end of a test, and whether it will be so the next time.
fn judge(output: &Output) -> (Option<String>, bool) {
    match output.status.map(|status| status.code()) {
        None => (Some(format!("its test did not end within {TEST_TIMEOUT:?}")), false),
        Some(Some(0)) => (None, true),
        Some(code) => {
            let lost = i32::from(ExitReason::DeviceLost.code());
            (Some(last_error(output)), code == Some(lost))
        }
    }
}

/// The last line of the errors of a process, or how it ended.
fn last_error(output: &Output) -> String {
    let line = output.errors.lines().rev().find(|line| !line.trim().is_empty());
    match (line, output.status) {
        (Some(line), _) => sentence(line.trim_start_matches("sepal: ")),
        (None, Some(status)) => format!("its process ended with {status}"),
        (None, None) => "its process did not end in time".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;
    use std::process::ExitStatus;

    use super::*;

    fn output(code: i32, errors: &str) -> Output {
        let status = Some(ExitStatus::from_raw(code << 8));
        Output { status, text: String::new(), errors: errors.to_owned() }
    }

    #[test]
    fn only_what_a_test_found_is_a_verdict() {
        assert_eq!(judge(&output(0, "")), (None, true));
        let wrong = judge(&output(10, "sepal: 2 kinds of operations are wrong on this device\n"));
        assert_eq!(
            wrong,
            (Some("2 kinds of operations are wrong on this device".to_owned()), true)
        );
        assert!(!judge(&output(11, "out of memory")).1);
        assert!(!judge(&Output { status: None, ..output(0, "") }).1);
        let killed = Output { status: Some(ExitStatus::from_raw(9)), ..output(0, "") };
        let (fault, is_verdict) = judge(&killed);
        assert!(fault.unwrap().contains("SIGKILL") && !is_verdict);
    }

    #[test]
    fn devices_named_by_uuid_get_their_numbers() {
        let found = |last| CudaDevice {
            name: "H200".to_owned(),
            uuid: std::array::from_fn(|n| if n == 15 { last } else { 7 }),
            has_warpgroups: true,
        };
        let devices = vec![Err("too old".to_owned()), Ok(found(1)), Ok(found(2))];
        let list = CudaDevices { driver_version: 12_080, devices };
        let of = |uuid: &str| {
            let devices = vec![Device::Cpu, Device::Cuda(u32::MAX), Device::Cuda(0)];
            let mut config = ServeConfig { devices, ..testkit::configs::serve_config() };
            config.uuids = vec![(1, uuid.parse().unwrap())];
            numbered(&mut config, &list).map(|()| config.devices)
        };
        let whole = "GPU-07070707-0707-0707-0707-070707070702";
        assert_eq!(of(whole), Ok(vec![Device::Cpu, Device::Cuda(2), Device::Cuda(0)]));
        let both = of("GPU-07").unwrap_err();
        assert!(
            both.contains("more than one") && both.contains(&format!("cuda:2 is {whole}")),
            "{both}"
        );
        let none = of("GPU-08").unwrap_err();
        assert!(none.starts_with("no CUDA device has a UUID that begins with GPU-08"), "{none}");
    }

    #[test]
    fn a_device_is_tested_once() {
        let folder = tempfile::tempdir().unwrap();
        let found = CudaDevice { name: "H200".to_owned(), uuid: [7; 16], has_warpgroups: true };
        let list = CudaDevices {
            driver_version: 12_080,
            devices: vec![Err("too old".to_owned()), Ok(found)],
        };
        let all: Vec<_> = candidates(&list).collect();
        let [candidate] = &all[..] else { panic!("one can be used") };
        assert_eq!((candidate.ordinal, candidate.device()), (1, Device::Cuda(1)));
        candidate.subject.write(folder.path(), KIND, Some("wrong"));
        // A new test would be this program, which is no `sepal`.
        let fault = tested(folder.path(), candidate, &Warpgroups::Missing);
        assert_eq!(fault, Some("wrong".to_owned()));
    }
}
