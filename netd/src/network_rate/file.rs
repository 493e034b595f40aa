//! Measured rates in a file of the cache folder, which all servers of a machine share.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use shared::files::EntryFile;
use shared::network::NetworkRate;

use super::link::NetworkLink;

/// How long a measurement holds.
const LIFE: Duration = Duration::from_secs(7 * 86400);

/// Links with an entry: a machine that moves about has few.
const MAX_LINKS: usize = 16;

/// Faster than any link: a measurement that says so is nonsense.
const MAX_BITS_PER_S: f64 = 1e13;

/// A kept measurement.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
struct Measurement {
    rate: NetworkRate,
    measured_unix_s: u64,
}

impl Measurement {
    /// Whether it says something at this time. One from the future is of a clock that was off.
    fn holds(&self, now_unix_s: u64) -> bool {
        let sane = (1.0..MAX_BITS_PER_S).contains(&self.rate.bits_per_s);
        let age = now_unix_s.checked_sub(self.measured_unix_s);
        sane && age.is_some_and(|age| age < LIFE.as_secs())
    }
}

/// The file of measurements in a cache folder. Blocks; belongs outside the reactor.
#[derive(Clone, Debug)]
pub struct RateFile(EntryFile);

impl RateFile {
    /// The file in `folder`.
    pub fn new(folder: &Path) -> RateFile {
        RateFile(EntryFile::new(folder, "network", 1))
    }

    /// What was measured on this link and still holds.
    pub fn kept(&self, link: &NetworkLink) -> Option<NetworkRate> {
        let kept = self.0.read::<Measurement>().get(&link.name).copied()?;
        kept.holds(unix_s()).then_some(kept.rate)
    }

    /// Keeps a measurement.
    ///
    /// # Errors
    /// When the file cannot be written; the next start measures again.
    pub fn keep(&self, link: &NetworkLink, rate: NetworkRate) -> io::Result<()> {
        let measured_unix_s = unix_s();
        let mut entries: BTreeMap<String, Measurement> = self.0.read();
        entries.retain(|_, kept| kept.holds(measured_unix_s));
        while entries.len() >= MAX_LINKS && entries.pop_first().is_some() {}
        let kept = Measurement { rate, measured_unix_s };
        entries.insert(link.name.clone(), kept);
        self.0.write(&entries)
    }

    /// The right to measure, until it is dropped; `None` while another server of this machine does.
    /// Two at once would each measure half.
    ///
    /// # Errors
    /// When the lock file cannot be made.
    pub fn lock(&self) -> io::Result<Option<File>> {
        self.0.lock(Duration::ZERO)
    }
}

fn unix_s() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| since.as_secs())
}

#[cfg(test)]
mod tests {
    use super::*;
    use shared::network::RateSource;

    const PEERS: NetworkRate = NetworkRate { bits_per_s: 4e8, source: RateSource::Peers };

    fn link() -> NetworkLink {
        NetworkLink { name: "eth0 via 0101A8C0".into(), speed_bits_per_s: None }
    }

    #[test]
    fn a_measurement_is_kept_for_its_link_and_its_time() {
        let folder = tempfile::tempdir().unwrap();
        let file = RateFile::new(folder.path());
        let here = link();
        assert_eq!(file.kept(&here), None);
        file.keep(&here, PEERS).unwrap();
        assert_eq!(file.kept(&here), Some(PEERS));
        let elsewhere = NetworkLink { name: "wlan0 via 0101A8C0".into(), ..here.clone() };
        assert_eq!(file.kept(&elsewhere), None);
        let now = unix_s();
        let kept = |measured_unix_s, bits_per_s| Measurement {
            measured_unix_s,
            rate: NetworkRate { bits_per_s, ..PEERS },
        };
        assert!(kept(now, 1e6).holds(now) && kept(now - 86400, 1e6).holds(now));
        assert!(!kept(now - LIFE.as_secs(), 1e6).holds(now), "too old");
        assert!(!kept(now + 1, 1e6).holds(now), "from the future");
        for nonsense in [0.0, -1.0, f64::NAN, f64::INFINITY, 1e20] {
            assert!(!kept(now, nonsense).holds(now), "{nonsense}");
        }
    }

    #[test]
    fn a_file_that_makes_no_sense_is_empty_and_links_are_bounded() {
        let folder = tempfile::tempdir().unwrap();
        let file = RateFile::new(folder.path());
        for nonsense in ["", "{", "[1]", "{\"a\": 1}", "\u{0}"] {
            std::fs::write(folder.path().join("sepal_network_v1.json"), nonsense).unwrap();
            assert_eq!(file.kept(&link()), None, "{nonsense:?}");
        }
        for number in 0..2 * MAX_LINKS {
            let there = NetworkLink { name: format!("eth{number}"), speed_bits_per_s: None };
            file.keep(&there, PEERS).unwrap();
            assert_eq!(file.kept(&there), Some(PEERS));
        }
        assert_eq!(file.0.read::<Measurement>().len(), MAX_LINKS);
    }

    #[test]
    fn one_server_of_a_machine_measures_at_a_time() {
        let folder = tempfile::tempdir().unwrap();
        let file = RateFile::new(&folder.path().join("cache"));
        let first = file.lock().unwrap();
        assert!(first.is_some() && file.lock().unwrap().is_none());
        drop(first);
        assert!(file.lock().unwrap().is_some());
    }
}
