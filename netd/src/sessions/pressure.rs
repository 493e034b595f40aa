//! Whether the machine is short of memory: then new sessions are refused, before the OOM killer
//! chooses a process. What the kernel says of stalls (PSI) and of available memory is judged here;
//! [`crate::run`] looks once a second.

use std::fs;
use std::path::{Path, PathBuf};

/// Share of the last 10 seconds in which all tasks waited for memory, in percent, that counts as
/// short.
const SHORT_STALL: f64 = 10.0;

/// Below this share it is over.
const OVER_STALL: f64 = 2.0;

/// Available memory that counts as short: this share of all, and at most [`MAX_RESERVE`].
const RESERVE_SHARE: u64 = 100;

/// Most memory that is kept available, in bytes.
const MAX_RESERVE: u64 = 256 << 20;

/// What the kernel says.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Reading {
    /// `full avg10` of PSI, in percent, if the kernel has it.
    stall: Option<f64>,
    /// Available and total bytes, if they can be read.
    memory: Option<(u64, u64)>,
}

/// Whether memory is short, with some inertia.
#[derive(Debug)]
pub struct MemoryPressure {
    stalls: PathBuf,
    memory: PathBuf,
    is_short: bool,
}

impl MemoryPressure {
    /// The pressure of this process' control group, if it has one of its own (cgroup v2), else of the
    /// machine.
    pub fn of_this_process() -> MemoryPressure {
        let own = fs::read_to_string("/proc/self/cgroup").ok().and_then(|text| {
            let path = text.lines().find_map(|line| line.strip_prefix("0::/"))?.to_owned();
            let file = Path::new("/sys/fs/cgroup").join(path).join("memory.pressure");
            file.exists().then_some(file)
        });
        let stalls = own.unwrap_or_else(|| PathBuf::from("/proc/pressure/memory"));
        MemoryPressure { stalls, memory: PathBuf::from("/proc/meminfo"), is_short: false }
    }

    /// Whether memory is short.
    pub fn is_short(&self) -> bool {
        self.is_short
    }

    /// Reads the kernel's figures. What changed, as a sentence for the log.
    pub fn look(&mut self) -> Option<String> {
        let text = |path: &Path| fs::read_to_string(path).unwrap_or_default();
        let reading =
            Reading { stall: stall(&text(&self.stalls)), memory: memory(&text(&self.memory)) };
        let was_short = self.is_short;
        self.is_short = is_short(reading, was_short);
        (was_short != self.is_short).then(|| {
            let Reading { stall, memory } = reading;
            let available = memory.map_or(0, |(available, _)| available >> 20);
            let stalled = stall.unwrap_or(0.0);
            format!("all tasks stalled {stalled} % of 10 s, {available} MiB available")
        })
    }
}

/// Judges `reading`. It takes less to stay short than to become it.
fn is_short(reading: Reading, was_short: bool) -> bool {
    let (stall, factor) = if was_short { (OVER_STALL, 2) } else { (SHORT_STALL, 1) };
    let stalled = reading.stall.is_some_and(|percent| percent >= stall);
    let used_up = reading.memory.is_some_and(|(available, total)| {
        available < factor * (total / RESERVE_SHARE).min(MAX_RESERVE)
    });
    stalled || used_up
}

/// `avg10` of the line `full` of a PSI file.
fn stall(text: &str) -> Option<f64> {
    let line = text.lines().find_map(|line| line.strip_prefix("full "))?;
    let value = line.split_whitespace().find_map(|field| field.strip_prefix("avg10="))?;
    value.parse().ok().filter(|percent: &f64| percent.is_finite())
}

/// Available and total bytes of `/proc/meminfo`.
fn memory(text: &str) -> Option<(u64, u64)> {
    let field = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name))?;
        let kib: u64 = line.split_whitespace().next()?.parse().ok()?;
        kib.checked_mul(1024)
    };
    field("MemAvailable:").zip(field("MemTotal:"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn stalled(percent: f64) -> Reading {
        Reading { stall: Some(percent), memory: None }
    }

    fn available(bytes: u64) -> Reading {
        Reading { stall: None, memory: Some((bytes, 1 << 36)) }
    }

    #[test]
    fn memory_is_short_when_tasks_stall_or_nothing_is_left() {
        for (reading, from_calm, from_short) in [
            (stalled(0.0), false, false),
            (stalled(5.0), false, true),
            (stalled(10.0), true, true),
            (available(1 << 30), false, false),
            (available(400 * MIB), false, true),
            (available(200 * MIB), true, true),
            (Reading::default(), false, false),
        ] {
            assert_eq!(is_short(reading, false), from_calm, "{reading:?}");
            assert_eq!(is_short(reading, true), from_short, "{reading:?}");
        }
    }

    #[test]
    fn the_kernels_files_are_read() {
        let psi = "some avg10=31.00 avg60=0.00 avg300=0.00 total=7\nfull avg10=12.50 avg60=0.10 avg300=0.00 total=3\n";
        assert_eq!(stall(psi), Some(12.5));
        for wrong in ["", "full", "full avg10=x", "some avg10=1.00", "full avg10=NaN"] {
            assert_eq!(stall(wrong), None, "{wrong}");
        }
        let meminfo = "MemTotal:       16384 kB\nMemFree:  1 kB\nMemAvailable:   1024 kB\n";
        assert_eq!(memory(meminfo), Some((1 << 20, 1 << 24)));
        assert_eq!(memory("MemTotal: 1 kB"), None);
    }

    #[test]
    fn a_change_is_told_once() {
        let dir = tempfile::tempdir().unwrap();
        let file = |name: &str, text: &str| {
            let path = dir.path().join(name);
            fs::write(&path, text).unwrap();
            path
        };
        let stalls = file("stalls", "full avg10=50.00 avg60=0 avg300=0 total=0");
        let memory = file("memory", "MemTotal: 16384000 kB\nMemAvailable: 16000000 kB\n");
        let mut pressure = MemoryPressure { stalls, memory, is_short: false };
        let said = pressure.look().expect("a change");
        assert_eq!(said, "all tasks stalled 50 % of 10 s, 15625 MiB available");
        assert!(pressure.is_short() && pressure.look().is_none());
        file("stalls", "full avg10=0.00");
        assert!(pressure.look().is_some() && !pressure.is_short());
        assert!(!MemoryPressure::of_this_process().is_short());
    }
}
