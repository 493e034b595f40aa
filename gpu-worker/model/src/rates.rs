//! A file that keeps what workers measured between starts. Source:
//! `petals/server/throughput.py` (time of the lock, "unreadable is empty").
//!
//! # Discrepancies
//! Upstream's key knows neither software nor the number of cores; [`Key`] names both. Upstream's
//! `eval` throws other models' entries away; here they stay. The file is our own
//! (`sepal_throughput_v1.json`): numbers of Petals do not hold for Sepal. It does not hold the
//! network's rate, which changes with the place of a machine and not with its devices.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use shared::bootstrap::build_id;
use shared::config::{Device, WorkerConfig};
use shared::files::EntryFile;
use shared::model::ModelFacts;
use shared::processor::shown;
use shared::survey::Capacity;
use thiserror::Error;
use tracing::warn;

/// What measured rates hold for; anything that differs asks for a new measurement.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Key {
    /// Repository of the model.
    pub model: String,
    /// Devices of the tensor-parallel group, by name, with what else changes their speed (threads,
    /// CPUs, driver).
    pub devices: Vec<String>,
    /// Block dtype.
    pub dtype: String,
    /// Quant type.
    pub quant: String,
    /// Version of the executable, or a hash of it.
    pub build: String,
}

impl Key {
    /// The key of a group with workers of these settings on `devices`.
    pub fn of(model: &ModelFacts, devices: &[Device], worker: &WorkerConfig) -> Key {
        Key {
            model: model.name.clone(),
            devices: devices.iter().map(|&device| device_name(device, worker)).collect(),
            dtype: model.dtype.name().to_owned(),
            quant: model.quant_type.name().to_owned(),
            build: build_id(),
        }
    }

    /// As in the file. Parts are written with their quotes, so that no two keys read the same.
    fn text(&self) -> String {
        format!(
            "model={:?} devices={:?} dtype={:?} quant={:?} build={:?}",
            self.model, self.devices, self.dtype, self.quant, self.build
        )
    }
}

/// Whether kept rates are good enough.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Freshness {
    /// Kept rates are taken (`auto`).
    Kept,
    /// Capacity are measured and kept (`eval`, `dry_run`).
    Measured,
}

/// Why there are no rates.
#[derive(Debug, Error)]
pub enum ThroughputError<E> {
    /// The lock file cannot be opened or locked.
    #[error("cannot lock {path} to measure throughput")]
    Lock {
        path: PathBuf,
        /// What the system said.
        #[source]
        source: io::Error,
    },
    /// Another server has been measuring for too long.
    #[error("another server still measures its throughput after {waited:?}")]
    Busy { waited: Duration },
    #[error(transparent)]
    Measurement(E),
}

fn is_usable(rates: &Capacity) -> bool {
    [rates.inference_rps, rates.forward_rps].iter().all(|rate| rate.is_finite() && *rate > 0.0)
}

/// The file of rates in a cache directory. Blocks; belongs outside the reactor.
#[derive(Clone, Debug)]
pub struct RateCache {
    file: EntryFile,
    longest_wait: Duration,
}

impl RateCache {
    /// The cache in `directory`; a caller waits at most `longest_wait` for other servers that
    /// measure.
    #[must_use]
    pub fn new(directory: &Path, longest_wait: Duration) -> Self {
        Self { file: EntryFile::new(directory, "throughput", 1), longest_wait }
    }

    /// The rates for `key`, kept or from `measure`. Servers that start together measure one after
    /// the other. A file that cannot be written is logged and costs the next start a
    /// measurement.
    pub fn rates<E>(
        &self,
        key: &Key,
        freshness: Freshness,
        measure: impl FnOnce() -> Result<Capacity, E>,
    ) -> Result<Capacity, ThroughputError<E>> {
        let _lock = self.lock()?;
        let mut entries: BTreeMap<String, Capacity> = self.file.read();
        let kept = entries.get(&key.text()).copied().filter(is_usable);
        if let (Some(rates), Freshness::Kept) = (kept, freshness) {
            return Ok(rates);
        }
        let rates = measure().map_err(ThroughputError::Measurement)?;
        entries.insert(key.text(), rates);
        if let Err(error) = self.file.write(&entries) {
            warn!(%error, file = %self.file.path().display(), "cannot save the measured throughput");
        }
        Ok(rates)
    }

    /// What is kept for each of these groups of devices, with workers of these settings; `None` unless
    /// all have been measured.
    pub fn kept<'a>(
        &self,
        model: &ModelFacts,
        groups: impl IntoIterator<Item = &'a [Device]>,
        worker: &WorkerConfig,
    ) -> Option<Vec<Capacity>> {
        let entries: BTreeMap<String, Capacity> = self.file.read();
        let of = |devices: &[Device]| {
            let key = Key::of(model, devices, worker).text();
            entries.get(&key).copied().filter(is_usable)
        };
        groups.into_iter().map(of).collect()
    }

    /// Locks until the file is dropped.
    fn lock<E>(&self) -> Result<File, ThroughputError<E>> {
        let locked = self.file.lock(self.longest_wait).map_err(|source| ThroughputError::Lock {
            path: self.file.lock_path().to_owned(),
            source,
        })?;
        locked.ok_or(ThroughputError::Busy { waited: self.longest_wait })
    }
}

/// The rates of the slowest device, by which a chain of all is announced.
pub fn slowest(rates: &[Capacity]) -> Option<Capacity> {
    rates.iter().copied().reduce(|one, other| Capacity {
        inference_rps: one.inference_rps.min(other.inference_rps),
        forward_rps: one.forward_rps.min(other.forward_rps),
    })
}

/// Compute threads of a worker on the processor.
pub fn threads(config: &WorkerConfig) -> usize {
    match config.threads {
        0 => std::thread::available_parallelism().map_or(1, |n| n.get()),
        n => n as usize,
    }
}

/// The name of the hardware behind `device`, with what else changes the speed of its worker.
pub fn device_name(device: Device, worker: &WorkerConfig) -> String {
    let threads = threads(worker);
    match device {
        Device::Cpu | Device::Node(_) => {
            let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
            let model = field(&text, "model name").or_else(|| field(&text, "CPU part"));
            let model = model.unwrap_or_else(|| std::env::consts::ARCH.to_owned());
            let part = if device == Device::Cpu { "" } else { ", one NUMA node" };
            let cpus = match &worker.cpus[..] {
                [] => String::new(),
                cpus => format!(" on CPUs {}", shown(cpus)),
            };
            format!("{model}{part}, {threads} threads{cpus}")
        }
        Device::Cuda(_) => {
            let gpus =
                std::fs::read_dir("/proc/driver/nvidia/gpus").into_iter().flatten().flatten();
            let mut models: Vec<String> = gpus
                .filter_map(|gpu| {
                    field(&std::fs::read_to_string(gpu.path().join("information")).ok()?, "Model")
                })
                .collect();
            models.sort();
            format!("{device} of {}", models.join(", "))
        }
        Device::Emulator(_) => format!("emulator, {threads} threads"),
    }
}

/// The value in a line `name : value`.
fn field(text: &str, name: &str) -> Option<String> {
    let line = text.lines().find(|line| line.starts_with(name))?;
    line.split_once(':').map(|(_, value)| value.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    const RATES: Capacity = Capacity { inference_rps: 500.0, forward_rps: 48_000.0 };

    fn key() -> Key {
        Key {
            model: "owner/model".into(),
            devices: vec!["NVIDIA H200".into()],
            dtype: "bfloat16".into(),
            quant: "nf4".into(),
            build: "0.1.0".into(),
        }
    }

    fn cache(directory: &Path) -> RateCache {
        RateCache::new(directory, Duration::from_millis(20))
    }

    fn measured(rates: Capacity) -> Result<Capacity, String> {
        Ok(rates)
    }

    fn must_not_measure() -> Result<Capacity, String> {
        Err("measured".into())
    }

    #[test]
    fn kept_rates_spare_a_measurement_until_asked_for_one() {
        let directory = tempfile::tempdir().unwrap();
        let cache = cache(directory.path());
        assert_eq!(cache.rates(&key(), Freshness::Kept, || measured(RATES)).unwrap(), RATES);
        assert_eq!(cache.rates(&key(), Freshness::Kept, must_not_measure).unwrap(), RATES);
        let faster = Capacity { forward_rps: 50_000.0, ..RATES };
        assert_eq!(cache.rates(&key(), Freshness::Measured, || measured(faster)).unwrap(), faster);
        assert_eq!(cache.rates(&key(), Freshness::Kept, must_not_measure).unwrap(), faster);
    }

    #[test]
    fn any_change_of_the_key_asks_for_a_measurement_and_keeps_the_others() {
        let directory = tempfile::tempdir().unwrap();
        let cache = cache(directory.path());
        cache.rates(&key(), Freshness::Kept, || measured(RATES)).unwrap();
        let others = [
            Key { model: "owner/other".into(), ..key() },
            Key { devices: vec!["CPU".into()], ..key() },
            Key { devices: vec!["NVIDIA H200".into(), "NVIDIA H200".into()], ..key() },
            Key { dtype: "float32".into(), ..key() },
            Key { quant: "none".into(), ..key() },
            Key { build: "0.2.0".into(), ..key() },
        ];
        for other in &others {
            let calls = Cell::new(0);
            let count = || {
                calls.set(calls.get() + 1);
                measured(RATES)
            };
            cache.rates(other, Freshness::Measured, count).unwrap();
            assert_eq!(calls.get(), 1, "{other:?}");
        }
        for kept in others.iter().chain([&key()]) {
            assert!(cache.rates(kept, Freshness::Kept, must_not_measure).is_ok(), "{kept:?}");
        }
    }

    #[test]
    fn what_is_kept_for_all_devices_is_that_of_the_slowest() {
        let directory = tempfile::tempdir().unwrap();
        let cache = cache(directory.path());
        let model = testkit::facts::facts();
        let worker = WorkerConfig { threads: 3, ..WorkerConfig::default() };
        let devices = [Device::Cpu, Device::Emulator(0)];
        let kept = || cache.kept(&model, devices.chunks(1), &worker);
        assert_eq!(kept(), None);
        let slower = Capacity { forward_rps: 1.0, ..RATES };
        for (device, rates) in devices.into_iter().zip([RATES, slower]) {
            assert_eq!(kept(), None, "not all are known");
            let key = Key::of(&model, &[device], &worker);
            cache.rates(&key, Freshness::Kept, || measured(rates)).unwrap();
        }
        assert_eq!(kept(), Some(vec![RATES, slower]));
        assert_eq!(slowest(&[RATES, slower]), Some(slower));
        let other = WorkerConfig::default();
        for other in [
            WorkerConfig { threads: 5, ..other.clone() },
            WorkerConfig { cpus: vec![0, 1], ..worker },
        ] {
            assert_eq!(cache.kept(&model, devices.chunks(1), &other), None);
        }
    }

    #[test]
    fn file_that_makes_no_sense_is_empty() {
        let directory = tempfile::tempdir().unwrap();
        let cache = cache(directory.path());
        let zero = format!("{{{:?}: {{\"inference_rps\": 0, \"forward_rps\": 1}}}}", key().text());
        for nonsense in ["", "{", "[1]", "{\"a\": 1}", "\u{0}", zero.as_str()] {
            std::fs::write(directory.path().join("sepal_throughput_v1.json"), nonsense).unwrap();
            let rates = cache.rates(&key(), Freshness::Kept, || measured(RATES));
            assert_eq!(rates.unwrap(), RATES, "{nonsense:?}");
            assert!(cache.rates(&key(), Freshness::Kept, must_not_measure).is_ok());
        }
    }

    #[test]
    fn failure_to_measure_keeps_nothing() {
        let directory = tempfile::tempdir().unwrap();
        let cache = cache(directory.path());
        let failed = cache.rates(&key(), Freshness::Kept, must_not_measure);
        assert!(matches!(failed, Err(ThroughputError::Measurement(text)) if text == "measured"));
        assert!(!directory.path().join("sepal_throughput_v1.json").exists());
    }

    #[test]
    fn file_that_cannot_be_written_costs_only_the_memory_of_it() {
        let directory = tempfile::tempdir().unwrap();
        std::fs::create_dir(directory.path().join("sepal_throughput_v1.json")).unwrap();
        let rates = cache(directory.path()).rates(&key(), Freshness::Kept, || measured(RATES));
        assert_eq!(rates.unwrap(), RATES);
    }

    #[test]
    fn server_that_measures_keeps_others_waiting_until_their_deadline() {
        let directory = tempfile::tempdir().unwrap();
        let first = cache(directory.path());
        let second = cache(directory.path());
        let within = || {
            let refused = second.rates(&key(), Freshness::Kept, must_not_measure);
            assert!(matches!(refused, Err(ThroughputError::Busy { .. })), "{refused:?}");
            measured(RATES)
        };
        first.rates(&key(), Freshness::Kept, within).unwrap();
        assert!(second.rates(&key(), Freshness::Kept, must_not_measure).is_ok());
    }
}
