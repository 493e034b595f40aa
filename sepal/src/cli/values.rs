//! Values of flags, each read into its finished type with an error that names the value and what to
//! give.

use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use shared::config::{Device, FaultAction, FaultPlan, FaultPoint, LogFormat};
use shared::sandbox::SandboxMode;
use shared::warpgroups::WarpgroupKernel;

/// Longest duration of a flag: a year. Sums with points in time then never overflow.
const MAX_SECONDS: f64 = 365.0 * 86400.0;

/// Most tokens that can be guessed for one step: each costs the servers a token.
const MAX_GUESSES: usize = 64;

/// A duration in seconds, fractions allowed, above 0.
pub fn seconds(text: &str) -> Result<Duration, String> {
    let number: Option<f64> = text.parse().ok();
    number
        .filter(|seconds| (0.001..=MAX_SECONDS).contains(seconds))
        .map(Duration::from_secs_f64)
        .ok_or_else(|| "expected a number of seconds, at least 0.001".to_owned())
}

/// The bias of a token: `TOKEN=BIAS`.
pub fn token_bias(text: &str) -> Result<(u32, f32), String> {
    let parsed = text.split_once('=').and_then(|(token, bias)| {
        Some((token.parse().ok()?, bias.parse().ok().filter(|bias: &f32| bias.is_finite())?))
    });
    parsed.ok_or_else(|| "expected the number of a token and a bias, as in 1234=-100".to_owned())
}

/// Most tokens that are guessed for one step.
pub fn guesses(text: &str) -> Result<usize, String> {
    let number = text.parse().ok().filter(|number| *number <= MAX_GUESSES);
    number.ok_or_else(|| format!("expected a number from 0 to {MAX_GUESSES}"))
}

/// `on` or `off`.
pub fn on_off(text: &str) -> Result<bool, String> {
    match text {
        "on" => Ok(true),
        "off" => Ok(false),
        _ => Err("expected on or off".to_owned()),
    }
}

/// Whether children are confined.
pub fn sandbox(text: &str) -> Result<SandboxMode, String> {
    text.parse()
}

/// Seconds, or 0 for never.
pub fn pause(text: &str) -> Result<Duration, String> {
    match text.parse() {
        Ok(0.0) => Ok(Duration::ZERO),
        _ => seconds(text).map_err(|error| format!("{error}, or 0 for never")),
    }
}

/// A time that open sessions may take: whole seconds, 0 for none.
pub fn patience(text: &str) -> Result<Duration, String> {
    let most = supervisor::status::MAX_PATIENCE;
    let time = text.parse().ok().map(Duration::from_secs).filter(|time| *time <= most);
    time.ok_or_else(|| format!("expected whole seconds, 0 to {}", most.as_secs()))
}

/// An age: a whole number of seconds, or with a unit: `12h`, `30d`, `8w`.
pub fn age(text: &str) -> Result<Duration, String> {
    let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(end);
    let seconds = match unit {
        "" | "s" => Some(1),
        "m" | "min" => Some(60),
        "h" => Some(3600),
        "d" => Some(86400),
        "w" => Some(7 * 86400),
        _ => None,
    };
    let whole: Option<u64> = number.parse().ok();
    whole
        .zip(seconds)
        .and_then(|(whole, seconds)| whole.checked_mul(seconds))
        .map(Duration::from_secs)
        .ok_or_else(|| "expected an age such as 12h, 30d or 8w".to_owned())
}

/// A kernel for warpgroups, by its name.
pub fn warpgroup_kernel(text: &str) -> Result<WarpgroupKernel, String> {
    WarpgroupKernel::try_from(text.to_owned())
}

/// A part of a whole, above 0 and at most 1.
pub fn share(text: &str) -> Result<f64, String> {
    let number: Option<f64> = text.parse().ok();
    number
        .filter(|share| *share > 0.0 && *share <= 1.0)
        .ok_or_else(|| "expected a number above 0 and at most 1".to_owned())
}

/// Where metrics are served: a port of loopback, or an address with a port. A name is not looked up.
pub fn metrics_addr(text: &str) -> Result<SocketAddr, String> {
    let loopback = || text.parse().ok().map(|port: u16| (Ipv4Addr::LOCALHOST, port).into());
    text.parse().ok().or_else(loopback).ok_or_else(|| {
        "expected a port such as 9464, or an IP address with a port such as 127.0.0.1:9464 or [::]:9464"
            .to_owned()
    })
}

/// A processor, or the part of it at a NUMA node.
pub fn processor(text: &str) -> Result<Device, String> {
    let expected = "expected cpu or cpu:N";
    let device = device(text).map_err(|_| expected.to_owned())?;
    Some(device).filter(|device| device.is_processor()).ok_or_else(|| expected.to_owned())
}

/// `terminal`, `text` or `json`.
pub fn log_format(text: &str) -> Result<LogFormat, String> {
    let named = LogFormat::ALL.into_iter().find(|format| format.name() == text);
    named.ok_or_else(|| "expected terminal, text or json".to_owned())
}

/// One device.
pub fn device(text: &str) -> Result<Device, String> {
    let text = text.trim();
    // Without a number it is the first one.
    let numbered = |kind: &str| match text.strip_prefix(kind)? {
        "" => Some(0),
        ordinal => ordinal.strip_prefix(':')?.parse().ok(),
    };
    let node = || text.strip_prefix("cpu:")?.parse().ok().map(Device::Node);
    let found = match text {
        "cpu" => Some(Device::Cpu),
        _ => numbered("cuda")
            .map(Device::Cuda)
            .or_else(|| numbered("emu").map(Device::Emulator))
            .or_else(node),
    };
    found.ok_or_else(|| format!("unknown device {text:?}: expected cpu, cpu:N or cuda:N"))
}

/// A size in bytes: a number, or one with a unit such as `512MiB` or `1.5 GB`, as
/// `humanfriendly.parse_size` reads it: only the units with an `i` count in steps of 1024.
pub fn size_bytes(text: &str) -> Result<u64, String> {
    let text = text.trim();
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(end);
    let bytes = || {
        let unit = unit_bytes(&unit.trim().to_lowercase())?;
        match number.parse::<u64>() {
            Ok(whole) => whole.checked_mul(unit),
            // Rounded down, like int() in Python; sizes of disks fit.
            Err(_) => Some(number.parse::<f64>().ok()? * unit as f64)
                .filter(|bytes| (0.0..9e18).contains(bytes))
                .map(|bytes| bytes as u64),
        }
    };
    bytes().ok_or_else(|| "expected a size in bytes such as 536870912, 512MiB or 1.5GB".to_owned())
}

fn unit_bytes(unit: &str) -> Option<u64> {
    const NAMES: [(&str, &str); 6] =
        [("k", "kibi"), ("m", "mebi"), ("g", "gibi"), ("t", "tebi"), ("p", "pebi"), ("e", "exbi")];
    if !unit.chars().all(|c| c.is_ascii_alphabetic()) {
        return None;
    }
    if unit.is_empty() || unit.starts_with('b') {
        return Some(1);
    }
    let power = NAMES.iter().position(|(letter, _)| unit.starts_with(letter))?;
    let (letter, name) = NAMES.get(power)?;
    let binary =
        unit == format!("{letter}ib") || unit == format!("{letter}i") || unit.starts_with(name);
    let step: u64 = if binary { 1024 } else { 1000 };
    step.checked_pow(u32::try_from(power).ok()? + 1)
}

/// `ACTION@POINT#JOB[xTIMES][rRANK]`, for example `kill@block:2#5x3`.
pub fn fault(text: &str) -> Result<FaultPlan, String> {
    let form = || {
        "expected ACTION@POINT#JOB[xTIMES][rRANK] with ACTION kill, abort, hang or (at completion) repeat and POINT start, taken, copies, block:N, \
         output or completion, for example kill@block:2#5x3"
            .to_owned()
    };
    let plan = || {
        let (action, rest) = text.split_once('@')?;
        let (point, rest) = rest.split_once('#')?;
        let (rest, rank) = match rest.split_once('r') {
            Some((rest, rank)) => (rest, Some(rank.parse().ok()?)),
            None => (rest, None),
        };
        let (job, times) = rest.split_once('x').unwrap_or((rest, "1"));
        let action = match action {
            "kill" => FaultAction::Kill,
            "abort" => FaultAction::Abort,
            "hang" => FaultAction::Hang,
            "repeat" => FaultAction::Repeat,
            _ => return None,
        };
        let point = match point {
            "start" => FaultPoint::Start,
            "taken" => FaultPoint::Taken,
            "copies" => FaultPoint::Copies,
            "output" => FaultPoint::Output,
            "completion" => FaultPoint::Completion,
            block => FaultPoint::Block(block.strip_prefix("block:")?.parse().ok()?),
        };
        if action == FaultAction::Repeat && point != FaultPoint::Completion {
            return None;
        }
        let (job, times) = (job.parse().ok()?, times.parse().ok()?);
        Some(FaultPlan { action, point, job, times, rank })
    };
    plan().ok_or_else(form)
}

/// Refuses what cannot be a multiaddr at all; netd reads them for good.
pub fn check_maddrs(flag: &str, maddrs: &[String]) -> Result<(), String> {
    match maddrs.iter().find(|text| !is_maddr(text)) {
        Some(bad) => Err(format!(
            "invalid {flag} {bad:?}: expected a multiaddr such as /ip4/127.0.0.1/tcp/31337"
        )),
        None => Ok(()),
    }
}

/// The model, which a list of multiaddrs before it swallows: `--initial_peers /ip4/... MODEL`.
pub fn model_or_last(model: Option<String>, lists: &mut [&mut Vec<String>]) -> Option<String> {
    model.or_else(|| {
        let ends_so =
            |list: &&mut &mut Vec<String>| list.last().is_some_and(|last| !is_maddr(last));
        lists.iter_mut().find(ends_so)?.pop()
    })
}

/// Whether this looks like a multiaddr.
pub fn is_maddr(text: &str) -> bool {
    const FIRST: [&str; 7] = ["ip4", "ip6", "dns", "dns4", "dns6", "dnsaddr", "p2p"];
    let mut parts = text.split('/');
    parts.next() == Some("")
        && parts.next().is_some_and(|protocol| FIRST.contains(&protocol))
        && parts.next().is_some_and(|address| !address.is_empty())
}

/// Bits per second of so many megabits: at least a thousand.
pub fn bits_per_s(flag: &str, mbps: f64) -> Result<f64, String> {
    match (1e-3..1e9).contains(&mbps) {
        true => Ok(mbps * 1e6),
        false => {
            Err(format!("invalid {flag} {mbps}: expected a positive number of megabits per second"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_alone_is_one_of_loopback_and_names_are_refused() {
        for (text, expected) in [
            ("9464", "127.0.0.1:9464"),
            ("0", "127.0.0.1:0"),
            ("0.0.0.0:9464", "0.0.0.0:9464"),
            ("[::1]:9464", "[::1]:9464"),
        ] {
            assert_eq!(metrics_addr(text).map(|addr| addr.to_string()).as_deref(), Ok(expected));
        }
        for text in ["", "70000", "-1", "localhost:9464", "127.0.0.1", ":9464", "::1", "9464 "] {
            let error = metrics_addr(text).unwrap_err();
            assert!(error.contains("a port such as 9464"), "{text}: {error}");
        }
    }

    #[test]
    fn ages_have_units() {
        for (text, seconds) in [("90", 90), ("5min", 300), ("12h", 43_200), ("2w", 1_209_600)] {
            assert_eq!(age(text), Ok(Duration::from_secs(seconds)), "{text}");
        }
        for bad in ["", "d", "-1d", "1.5h", "3x", "99999999999999999999w", "9999999999999999999w"] {
            assert!(age(bad).unwrap_err().contains("30d"), "{bad}");
        }
    }

    #[test]
    fn sizes_read_as_by_humanfriendly() {
        for (text, bytes) in [
            ("1572864000", 1_572_864_000),
            ("1.5GB", 1_500_000_000),
            ("1500MB", 1_500_000_000),
            ("50 GB", 50_000_000_000),
            ("100GiB", 100 << 30),
            ("512mib", 512 << 20),
            ("5 k", 5000),
            ("2tb", 2_000_000_000_000),
            ("7 bytes", 7),
            ("1 gigabyte", 1_000_000_000),
        ] {
            assert_eq!(size_bytes(text), Ok(bytes), "{text}");
        }
        for bad in ["", "GB", "-1", "1.2.3GB", "5x", "1e3", "99999999999EiB"] {
            assert!(size_bytes(bad).unwrap_err().contains("512MiB"), "{bad}");
        }
    }
}
