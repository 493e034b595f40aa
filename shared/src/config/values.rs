//! Readers of values of flags, for the configuration structs of all crates: each gives the finished type, or
//! an error that says what is expected.

use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

/// Longest duration of a flag: a year. Sums with points in time then never overflow.
const MAX_SECONDS: f64 = 365.0 * 86400.0;

/// A duration in seconds, fractions allowed, above 0.
pub fn seconds(text: &str) -> Result<Duration, String> {
    let number: Option<f64> = text.parse().ok();
    number
        .filter(|seconds| (0.001..=MAX_SECONDS).contains(seconds))
        .map(Duration::from_secs_f64)
        .ok_or_else(|| "expected a number of seconds, at least 0.001".to_owned())
}

/// `on` or `off`.
pub fn on_off(text: &str) -> Result<bool, String> {
    match text {
        "on" => Ok(true),
        "off" => Ok(false),
        _ => Err("expected on or off".to_owned()),
    }
}

/// Seconds, or 0 for never.
pub fn pause(text: &str) -> Result<Duration, String> {
    match text.parse() {
        Ok(0.0) => Ok(Duration::ZERO),
        _ => seconds(text).map_err(|error| format!("{error}, or 0 for never")),
    }
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

/// What can be a multiaddr; netd reads it for good.
///
/// # Errors
/// A sentence with an example.
pub fn maddr(text: &str) -> Result<String, String> {
    let example = || "expected a multiaddr such as /ip4/127.0.0.1/tcp/31337".to_owned();
    is_maddr(text).then(|| text.to_owned()).ok_or_else(example)
}

/// Whether this looks like a multiaddr.
pub fn is_maddr(text: &str) -> bool {
    const FIRST: [&str; 7] = ["ip4", "ip6", "dns", "dns4", "dns6", "dnsaddr", "p2p"];
    let mut parts = text.split('/');
    parts.next() == Some("")
        && parts.next().is_some_and(|protocol| FIRST.contains(&protocol))
        && parts.next().is_some_and(|address| !address.is_empty())
}

/// Bits per second of so many megabits per second: at least a thousand.
///
/// # Errors
/// A sentence with what is expected.
pub fn megabits(text: &str) -> Result<f64, String> {
    let number = text.parse().ok().filter(|mbps| (1e-3..1e9).contains(mbps));
    let bits = number.map(|mbps: f64| mbps * 1e6);
    bits.ok_or_else(|| "expected a positive number of megabits per second".to_owned())
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
