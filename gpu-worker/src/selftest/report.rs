//! What `sepal selftest --report FILE` writes: everything that was found about a device, to be sent in. The
//! file is written at the start and after each part, so that a kernel that never ends leaves what came
//! before it.

use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use kernels::cuda::Properties;
use kernels::cuda::peaks::{HostRates, LaunchCosts};
use serde::Serialize;
use shared::files::write_atomically;
use shared::warpgroups::Warpgroups;

use super::budget;

/// The report of one device.
#[derive(Debug, Serialize)]
pub(super) struct SelftestReport {
    #[serde(skip)]
    path: Option<PathBuf>,
    sepal: &'static str,
    taken_at: u64,
    system: String,
    /// The NVIDIA kernel module, in its own words.
    driver: Option<String>,
    device: String,
    class: String,
    compute_capability: Option<String>,
    multiprocessors: Option<u32>,
    kernels: Option<String>,
    warpgroups: Option<Warpgroups>,
    checks: Vec<Check>,
    copy_gb_s: Option<f64>,
    matrix_tflop_s: Option<f64>,
    launch_us: Option<f64>,
    replayed_launch_us: Option<f64>,
    host_to_device_gb_s: Option<f64>,
    device_to_host_gb_s: Option<f64>,
    mirror_gb_s: Option<f64>,
    measured: Vec<Measured>,
    /// Why the self-test ended early, or what it found wrong.
    failure: Option<String>,
    is_complete: bool,
}

/// One operation against its reference.
#[derive(Debug, Serialize)]
pub(super) struct Check {
    pub operation: String,
    /// Its cases; 0 if one failed.
    pub cases: usize,
    pub failure: Option<String>,
}

/// One row of the table of times.
#[derive(Debug, Serialize)]
pub(super) struct Measured {
    pub name: String,
    /// Microseconds.
    pub us: f64,
    /// Microseconds that the budget of the kernels computes for this device, where it does.
    pub computed_us: Option<f64>,
    /// Bytes that have to be moved.
    pub bytes: usize,
    /// Multiplications and additions.
    pub operations: usize,
}

impl SelftestReport {
    /// A report that nothing is in yet, for `path` if there is one.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn begin(path: Option<&Path>) -> io::Result<SelftestReport> {
        let text =
            |path: &str| std::fs::read_to_string(path).ok().map(|text| text.trim().to_owned());
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        let report = SelftestReport {
            path: path.map(Path::to_owned),
            sepal: env!("CARGO_PKG_VERSION"),
            taken_at: now.map_or(0, |since| since.as_secs()),
            system: text("/proc/version").unwrap_or_default(),
            driver: text("/proc/driver/nvidia/version"),
            device: String::new(),
            class: String::new(),
            compute_capability: None,
            multiprocessors: None,
            kernels: None,
            warpgroups: None,
            checks: Vec::new(),
            copy_gb_s: None,
            matrix_tflop_s: None,
            launch_us: None,
            replayed_launch_us: None,
            host_to_device_gb_s: None,
            device_to_host_gb_s: None,
            mirror_gb_s: None,
            measured: Vec::new(),
            failure: None,
            is_complete: false,
        };
        report.save()?;
        Ok(report)
    }

    /// Writes what there is.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn save(&self) -> io::Result<()> {
        let Some(path) = &self.path else { return Ok(()) };
        let mut json = serde_json::to_vec_pretty(self)?;
        json.push(b'\n');
        write_atomically(path, |file| file.write_all(&json))
    }

    /// The self-test has ended, by this failure or without one.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn end(&mut self, failure: Option<&str>) -> io::Result<()> {
        self.failure = failure.map(str::to_owned);
        self.is_complete = true;
        self.save()
    }

    /// A processor is tested.
    pub fn of_processor(&mut self, name: String) {
        self.device = name;
    }

    /// A device with these properties is tested, by cases of `class`.
    pub fn of_device(&mut self, properties: &Properties, class: String) {
        let architecture = properties.architecture;
        self.device.clone_from(&properties.name);
        self.class = class;
        self.compute_capability = Some(format!("{}.{}", architecture / 10, architecture % 10));
        self.multiprocessors = Some(properties.multiprocessors);
        self.kernels = Some(properties.image.clone());
    }

    /// What was decided about warpgroups.
    pub fn decided(&mut self, warpgroups: &Warpgroups) {
        self.warpgroups = Some(warpgroups.clone());
    }

    /// An operation was compared with its reference.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn checked(&mut self, check: Check) -> io::Result<()> {
        self.checks.push(check);
        self.save()
    }

    /// What the device gives at best.
    pub fn peaks(&mut self, copy: f64, matrix: f64, launch: LaunchCosts, host: HostRates) {
        let us = |seconds: f64| seconds * 1e6;
        self.copy_gb_s = Some(copy / 1e9);
        self.matrix_tflop_s = Some(matrix / 1e12);
        self.launch_us = Some(us(launch.launch_s));
        self.replayed_launch_us = launch.replayed_s.map(us);
        self.host_to_device_gb_s = Some(host.to_device / 1e9);
        self.device_to_host_gb_s = Some(host.from_device / 1e9);
        self.mirror_gb_s = host.to_registered.map(|rate| rate / 1e9);
    }

    /// A row of the table; returns the microseconds that were computed for it, if any were.
    pub fn measured(
        &mut self,
        name: &str,
        us: f64,
        bytes: usize,
        operations: usize,
    ) -> Option<f64> {
        let computed_us = budget::block_us(&self.device, name);
        self.measured.push(Measured { name: name.to_owned(), us, computed_us, bytes, operations });
        computed_us
    }
}
