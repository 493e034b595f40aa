//! Devices: the driver, and the quick self-test of each CUDA device that would serve.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::unistd::geteuid;
use shared::config::{Device, ServeConfig};
use shared::processor::Processor;
use supervisor::cache_folder;
use supervisor::devices::{Examined, examine, number};

use super::check::CheckVerdict;

/// What serves, and what is known of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceFacts {
    /// The devices that were named; `None` if they are to be chosen.
    pub named: Option<Vec<Device>>,
    /// The CUDA devices among them, or all; why there are none. `None` if none was asked for.
    pub cuda: Option<Result<Vec<Examined>, String>>,
    /// Whether the machine has a display controller of NVIDIA, with or without a driver.
    pub has_gpu: bool,
    /// The processor, and how a worker of all its cores would run.
    pub processor: String,
}

/// Asks the driver and tests, unless only processors were named. Devices in use are not tested.
pub fn observe(config: &mut ServeConfig, in_use: &[String]) -> DeviceFacts {
    let numbers = number(config);
    let named = config.automatic.is_none().then(|| config.devices.clone());
    let is_cuda = |device: &Device| matches!(device, Device::Cuda(_));
    let asks = named.as_ref().is_none_or(|named| named.iter().any(is_cuda));
    let cuda = asks.then(|| {
        numbers?;
        let folder = Verdicts::of(&config.prepare.cache_dir).map_err(|why| why.to_string())?;
        let limit = config.sample_timeout.min(Duration::from_secs(30));
        examine(folder.path(), named.as_deref(), in_use, limit)
    });
    let found = Processor::of_worker(&config.worker.cpus);
    let threads = config.worker.threads as usize;
    let devices = named.clone().unwrap_or_else(|| found.devices());
    let seats = |device: &Device| {
        let of: Vec<_> = devices.iter().filter(|other| *other == device).collect();
        found.seats(*device, 0, of.len(), threads)
    };
    let first = devices.iter().find(|device| device.is_processor());
    let first = first.map(|device| format!("; {device} has {}", seats(device))).unwrap_or_default();
    let processor = found.summary() + &first;
    DeviceFacts { named, cuda, has_gpu: has_gpu(Path::new("/sys/bus/pci/devices")), processor }
}

/// Where verdicts of tests are kept: with the server's if the cache folder is this user's, so that a
/// start repeats no test; elsewhere otherwise, so that no file there belongs to another user.
enum Verdicts {
    Kept(PathBuf),
    Forgotten(tempfile::TempDir),
}

impl Verdicts {
    fn of(cache: &Path) -> std::io::Result<Verdicts> {
        use std::os::unix::fs::MetadataExt;
        let is_ours = cache_folder::check(cache).is_ok()
            && fs::metadata(cache).is_ok_and(|meta| meta.uid() == geteuid().as_raw());
        match is_ours {
            true => Ok(Verdicts::Kept(cache.join("selftest"))),
            false => tempfile::tempdir().map(Verdicts::Forgotten),
        }
    }

    fn path(&self) -> &Path {
        match self {
            Verdicts::Kept(path) => path,
            Verdicts::Forgotten(folder) => folder.path(),
        }
    }
}

fn has_gpu(devices: &Path) -> bool {
    let text = |path: PathBuf| fs::read_to_string(path).unwrap_or_default();
    fs::read_dir(devices).into_iter().flatten().flatten().any(|device| {
        let of = |name| text(device.path().join(name));
        of("vendor").trim() == "0x10de" && of("class").starts_with("0x03")
    })
}

/// Whether something serves, and nothing that could is left out.
pub fn judge(facts: &DeviceFacts) -> CheckVerdict {
    let DeviceFacts { named, cuda, has_gpu, processor } = facts;
    let examined = match cuda {
        None => {
            let names: Vec<String> =
                named.iter().flatten().map(|device| device.to_string()).collect();
            return CheckVerdict::ok(format!("{} serve; {processor}", names.join(", ")));
        }
        Some(Err(why)) if named.is_some() => {
            return CheckVerdict::problem(
                format!("CUDA devices were named, and cannot be used: {why}"),
                "name devices that nvidia-smi -L lists, install NVIDIA's driver, or give --device cpu",
            );
        }
        Some(Err(why)) if *has_gpu => {
            return CheckVerdict::warning(
                format!(
                    "this machine has a GPU of NVIDIA, and the driver does not work: {why}; {processor}"
                ),
                "install NVIDIA's driver (in containers: its container toolkit), or give --device cpu",
            );
        }
        Some(Err(_)) => return CheckVerdict::ok(format!("no CUDA device; {processor}")),
        Some(Ok(examined)) => examined,
    };
    let (bad, good): (Vec<_>, Vec<_>) = examined.iter().partition(|one| one.fault.is_some());
    let shown = |one: &Examined| match &one.fault {
        Some(fault) => format!("{} fails: {fault}", one.device),
        None if !one.is_tested => {
            format!("{} ({}) is in use by a server and was not tested", one.device, one.name)
        }
        None => format!("{} ({}) passes its test", one.device, one.name),
    };
    let list: Vec<String> = bad.iter().chain(&good).map(|one| shown(one)).collect();
    let list = list.join("; ");
    let Some(first) = bad.first() else {
        return match good.is_empty() {
            true => CheckVerdict::ok(format!("no CUDA device; {processor}")),
            false => without_fault(list, &good),
        };
    };
    let advice = format!(
        "see sepal selftest --quick --device {}; update the driver, or leave the device out with --device",
        first.device
    );
    match named.is_some() || good.is_empty() {
        true => CheckVerdict::problem(list, advice),
        false => CheckVerdict::warning(list, advice),
    }
}

/// The verdict on devices of which none is known to fail.
fn without_fault(list: String, devices: &[&Examined]) -> CheckVerdict {
    let advice = "to test it, stop the server and run sepal selftest --quick --device";
    match devices.iter().find(|one| !one.is_tested) {
        Some(one) => CheckVerdict::warning(list, format!("{advice} {}", one.device)),
        None => CheckVerdict::ok(list),
    }
}

#[cfg(test)]
mod tests {
    use super::super::check::Status;
    use super::*;

    fn facts(
        named: Option<Vec<Device>>,
        cuda: Option<Result<Vec<Examined>, String>>,
    ) -> DeviceFacts {
        DeviceFacts { named, cuda, has_gpu: false, processor: "4 cores".to_owned() }
    }

    fn card(ordinal: u32, fault: Option<&str>) -> Examined {
        let name = "H200".to_owned();
        let fault = fault.map(str::to_owned);
        Examined { device: Device::Cuda(ordinal), name, fault, is_tested: true }
    }

    fn is(facts: &DeviceFacts, status: Status, words: &[&str]) {
        let verdict = judge(facts);
        let text = format!("{} {}", verdict.found, verdict.advice.unwrap_or_default());
        assert_eq!(verdict.status, status, "{text}");
        assert!(words.iter().all(|word| text.contains(word)), "{text}");
    }

    #[test]
    fn processors_need_no_driver() {
        is(&facts(Some(vec![Device::Cpu]), None), Status::Ok, &["cpu serve", "4 cores"]);
        let none = facts(None, Some(Err("no libcuda.so".into())));
        is(&none, Status::Ok, &["no CUDA device"]);
        is(&DeviceFacts { has_gpu: true, ..none }, Status::Warning, &["no libcuda.so", "toolkit"]);
    }

    #[test]
    fn a_card_that_fails_its_test_is_named() {
        let named = Some(vec![Device::Cuda(0)]);
        is(
            &facts(named.clone(), Some(Err("no driver".into()))),
            Status::Problem,
            &["--device cpu"],
        );
        is(&facts(named.clone(), Some(Ok(vec![card(0, None)]))), Status::Ok, &["H200", "passes"]);
        let wrong = vec![card(0, Some("2 kinds are wrong"))];
        is(
            &facts(named, Some(Ok(wrong.clone()))),
            Status::Problem,
            &["2 kinds", "--device cuda:0"],
        );
        let half = [wrong, vec![card(1, None)]].concat();
        is(&facts(None, Some(Ok(half))), Status::Warning, &["cuda:0 fails", "cuda:1 (H200)"]);
        is(&facts(None, Some(Ok(Vec::new()))), Status::Ok, &["no CUDA device"]);
    }

    #[test]
    fn a_card_of_a_running_server_that_was_not_tested_is_no_problem() {
        let named = Some(vec![Device::Cuda(0)]);
        let used = Examined { is_tested: false, ..card(0, None) };
        let words = ["in use by a server and was not tested", "selftest --quick --device cuda:0"];
        is(&facts(named, Some(Ok(vec![used.clone()]))), Status::Warning, &words);
        let wrong = vec![card(1, Some("2 kinds are wrong")), used];
        is(&facts(None, Some(Ok(wrong))), Status::Warning, &["cuda:1 fails", "was not tested"]);
    }

    #[test]
    fn a_gpu_without_a_driver_is_seen_on_the_bus() {
        let bus = tempfile::tempdir().unwrap();
        assert!(!has_gpu(bus.path()));
        for (name, vendor, class, seen) in [
            ("a", "0x8086\n", "0x030000\n", false),
            ("b", "0x10de\n", "0x040300\n", false),
            ("c", "0x10de\n", "0x030200\n", true),
        ] {
            let device = bus.path().join(name);
            fs::create_dir(&device).unwrap();
            fs::write(device.join("vendor"), vendor).unwrap();
            fs::write(device.join("class"), class).unwrap();
            assert_eq!(has_gpu(bus.path()), seen, "{name}");
        }
    }
}
