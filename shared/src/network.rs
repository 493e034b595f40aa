//! What is known of the network of this machine: the rate that was measured, kept in a file of the cache folder, and the link of
//! the default route. netd measures and writes; `sepal config` reads the same.
//!
//! The order in which a rate is taken, the first that there is: what the operator says (`--network_mbps`), what was measured, what
//! Petals assumes. All but the first are at most the speed of the link ([`Link::speed_bits_per_s`]).

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

/// Rate of a network that could not be measured (`petals/server/throughput.py`).
pub const ASSUMED_BITS_PER_S: f64 = 1e8;

/// How long a measurement holds.
pub const LIFE: Duration = Duration::from_secs(7 * 86400);

/// A larger file is not ours, and a larger file of the system is not read to its end.
const MAX_FILE_BYTES: u64 = 1 << 20;

/// Places kept: a machine that moves about has few.
const MAX_PLACES: usize = 16;

/// Faster than any link: a measurement that says so is nonsense.
const MAX_BITS_PER_S: f64 = 1e13;

/// How a rate is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum RateSource {
    /// The operator says so.
    Operator,
    /// Bytes went to and from servers of the swarm.
    Peers,
    /// Bytes went to and from the service that the operator named (`--network_test_url`).
    Url,
    /// The speed of the link, which is less than what was measured or assumed.
    Link,
    /// Nothing was measured.
    Assumed,
}

impl std::fmt::Display for RateSource {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            RateSource::Operator => "given by --network_mbps",
            RateSource::Peers => "measured with servers of the swarm",
            RateSource::Url => "measured with --network_test_url",
            RateSource::Link => "the speed of the link",
            RateSource::Assumed => "assumed, nothing was measured yet",
        })
    }
}

/// What the network carries each way.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct NetworkRate {
    /// The slower way, in bits per second.
    pub bits_per_s: f64,
    /// How that is known.
    pub source: RateSource,
}

impl NetworkRate {
    /// The rate that counts, in the order of the head of this file.
    pub fn of(asked: Option<f64>, measured: Option<NetworkRate>, link: &Link) -> NetworkRate {
        if let Some(bits_per_s) = asked {
            let source = RateSource::Operator;
            return NetworkRate { bits_per_s, source };
        }
        let rate = measured.unwrap_or(NetworkRate {
            bits_per_s: ASSUMED_BITS_PER_S,
            source: RateSource::Assumed,
        });
        match link.speed_bits_per_s {
            Some(bits_per_s) if bits_per_s < rate.bits_per_s => NetworkRate {
                bits_per_s,
                source: RateSource::Link,
            },
            _ => rate,
        }
    }

    /// Megabits per second, for people.
    pub fn mbps(&self) -> f64 {
        (self.bits_per_s / 1e4).round() / 1e2
    }
}

/// The interface of the default route. Measurements hold for one place: the interface with the gateway behind it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Link {
    /// Interface and gateway as the kernel names them; empty without a default route.
    pub place: String,
    /// What the interface can do; `None` where the kernel does not know, as for most radios.
    pub speed_bits_per_s: Option<f64>,
}

impl Link {
    /// The link of this process's network.
    pub fn of_system() -> Link {
        Link::under(Path::new("/"))
    }

    /// The same with another root of `proc` and `sys`.
    fn under(root: &Path) -> Link {
        let ip4 = default_ip4(&text(&root.join("proc/net/route")));
        let route = ip4.or_else(|| default_ip6(&text(&root.join("proc/net/ipv6_route"))));
        let Some((interface, gateway)) = route else {
            return Link::default();
        };
        let is_name = !interface.contains('/') && !interface.starts_with('.');
        let speed = root.join("sys/class/net").join(&interface).join("speed");
        // Megabits per second; -1 or an error where there is no such thing.
        let speed = if is_name { text(&speed) } else { String::new() };
        let megabits = speed.trim().parse::<u32>().ok().filter(|speed| *speed > 0);
        Link {
            place: format!("{interface} via {gateway}"),
            speed_bits_per_s: megabits.map(|megabits| f64::from(megabits) * 1e6),
        }
    }
}

/// A file as text; empty if it cannot be read.
fn text(path: &Path) -> String {
    let mut text = String::new();
    let read =
        File::open(path).and_then(|file| file.take(MAX_FILE_BYTES).read_to_string(&mut text));
    read.map(|_| text).unwrap_or_default()
}

/// Interface and gateway of the default route with the least metric. Columns: interface, destination, gateway, flags, references,
/// use, metric, mask.
fn default_ip4(table: &str) -> Option<(String, String)> {
    let routes = table.lines().skip(1).filter_map(|line| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let [interface, destination, gateway, _, _, _, metric, mask, ..] = words[..] else {
            return None;
        };
        let is_default = destination == "00000000" && mask == "00000000";
        let metric: u32 = metric.parse().ok().filter(|_| is_default)?;
        Some((metric, interface.to_owned(), gateway.to_owned()))
    });
    let (_, interface, gateway) = routes.min()?;
    Some((interface, gateway))
}

/// The same of the table for IPv6. Columns: destination, its length, source, its length, next hop, metric, references, use, flags,
/// interface.
fn default_ip6(table: &str) -> Option<(String, String)> {
    let routes = table.lines().filter_map(|line| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let [destination, length, _, _, hop, metric, _, _, _, interface] = words[..] else {
            return None;
        };
        let is_default = length == "00" && destination.bytes().all(|digit| digit == b'0');
        let metric = u32::from_str_radix(metric, 16).ok()?;
        let leads_away = is_default && interface != "lo";
        leads_away.then(|| (metric, interface.to_owned(), hop.to_owned()))
    });
    let (_, interface, gateway) = routes.min()?;
    Some((interface, gateway))
}

/// A kept measurement.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
struct Kept {
    rate: NetworkRate,
    measured_unix_s: u64,
}

impl Kept {
    /// Whether it says something at this time. One from the future is of a clock that was off.
    fn holds(&self, now_unix_s: u64) -> bool {
        let sane = (1.0..MAX_BITS_PER_S).contains(&self.rate.bits_per_s);
        let age = now_unix_s.checked_sub(self.measured_unix_s);
        sane && age.is_some_and(|age| age < LIFE.as_secs())
    }
}

/// The file of measurements in a cache folder. Blocks; belongs outside the reactor.
#[derive(Clone, Debug)]
pub struct RateFile {
    file: PathBuf,
    lock: PathBuf,
}

impl RateFile {
    /// The file in `folder`.
    pub fn new(folder: &Path) -> RateFile {
        RateFile {
            file: folder.join("sepal_network_v1.json"),
            lock: folder.join("sepal_network.lock"),
        }
    }

    /// What was measured at this place and still holds.
    pub fn kept(&self, link: &Link) -> Option<NetworkRate> {
        let kept = self.read().get(&link.place).copied()?;
        kept.holds(unix_s()).then_some(kept.rate)
    }

    /// Keeps a measurement.
    ///
    /// # Errors
    /// When the file cannot be written; the next start measures again.
    pub fn keep(&self, link: &Link, rate: NetworkRate) -> io::Result<()> {
        let measured_unix_s = unix_s();
        let mut entries = self.read();
        entries.retain(|_, kept| kept.holds(measured_unix_s));
        while entries.len() >= MAX_PLACES && entries.pop_first().is_some() {}
        let kept = Kept {
            rate,
            measured_unix_s,
        };
        entries.insert(link.place.clone(), kept);
        // Under the lock nobody else writes this file.
        let new = self.file.with_extension("new");
        let mut file = File::create(&new)?;
        file.write_all(&serde_json::to_vec_pretty(&entries)?)?;
        file.sync_all()?;
        std::fs::rename(&new, &self.file)
    }

    /// The right to measure, until it is dropped; `None` while another server of this machine does. Two at once would each
    /// measure half.
    ///
    /// # Errors
    /// When the lock file cannot be made.
    pub fn lock(&self) -> io::Result<Option<File>> {
        let folder = self.lock.parent().unwrap_or(Path::new("."));
        std::fs::create_dir_all(folder)?;
        let file = OpenOptions::new()
            .create(true)
            .append(true)
            .open(&self.lock)?;
        match file.try_lock() {
            Ok(()) => Ok(Some(file)),
            Err(TryLockError::WouldBlock) => Ok(None),
            Err(TryLockError::Error(error)) => Err(error),
        }
    }

    /// All entries; none if the file is missing or makes no sense.
    fn read(&self) -> BTreeMap<String, Kept> {
        serde_json::from_str(&text(&self.file)).unwrap_or_default()
    }
}

fn unix_s() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| since.as_secs())
}

#[cfg(test)]
mod tests {
    use super::*;

    const PEERS: NetworkRate = NetworkRate {
        bits_per_s: 4e8,
        source: RateSource::Peers,
    };

    fn link(speed_bits_per_s: Option<f64>) -> Link {
        Link {
            place: "eth0 via 0101A8C0".into(),
            speed_bits_per_s,
        }
    }

    #[test]
    fn the_operator_goes_before_a_measurement_before_what_is_assumed_and_the_link_bounds() {
        let rate = |asked, measured, speed| {
            let rate = NetworkRate::of(asked, measured, &link(speed));
            (rate.bits_per_s, rate.source)
        };
        let (fast, slow) = (Some(1e9), Some(1e7));
        assert_eq!(
            rate(Some(5.0), Some(PEERS), slow),
            (5.0, RateSource::Operator)
        );
        assert_eq!(rate(None, Some(PEERS), fast), (4e8, RateSource::Peers));
        assert_eq!(rate(None, Some(PEERS), None), (4e8, RateSource::Peers));
        assert_eq!(rate(None, Some(PEERS), slow), (1e7, RateSource::Link));
        assert_eq!(rate(None, None, fast), (1e8, RateSource::Assumed));
        assert_eq!(rate(None, None, slow), (1e7, RateSource::Link));
    }

    #[test]
    fn the_link_is_that_of_the_default_route_with_the_least_metric() {
        let root = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = root.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        let found = || Link::under(root.path());
        assert_eq!(found(), Link::default(), "no tables at all");
        write(
            "proc/net/ipv6_route",
            "fe800000000000000000000000000000 40 00000000000000000000000000000000 00 00000000000000000000000000000000 00000100 1 0 1 eth9\n\
             00000000000000000000000000000000 00 00000000000000000000000000000000 00 00000000000000000000000000000000 ffffffff 1 0 1 lo\n\
             00000000000000000000000000000000 00 00000000000000000000000000000000 00 fe800000000000000000000000000001 00000400 1 0 1 eth6\n",
        );
        assert_eq!(found().place, "eth6 via fe800000000000000000000000000001");
        write(
            "proc/net/route",
            "Iface Destination Gateway Flags RefCnt Use Metric Mask MTU Window IRTT\n\
             eth0 0001A8C0 00000000 0001 0 0 0 00FFFFFF 0 0 0\n\
             wlan0 00000000 0101A8C0 0003 0 0 600 00000000 0 0 0\n\
             nonsense\n\
             eth0 00000000 FE01A8C0 0003 0 0 100 00000000 0 0 0\n",
        );
        assert_eq!(
            (found().place.as_str(), found().speed_bits_per_s),
            ("eth0 via FE01A8C0", None)
        );
        for (text, speed) in [
            ("2500\n", Some(2.5e9)),
            ("-1\n", None),
            ("0\n", None),
            ("fast", None),
        ] {
            write("sys/class/net/eth0/speed", text);
            assert_eq!(found().speed_bits_per_s, speed, "{text:?}");
        }
    }

    #[test]
    fn a_measurement_is_kept_for_its_place_and_its_time() {
        let folder = tempfile::tempdir().unwrap();
        let file = RateFile::new(folder.path());
        let here = link(None);
        assert_eq!(file.kept(&here), None);
        file.keep(&here, PEERS).unwrap();
        assert_eq!(file.kept(&here), Some(PEERS));
        let elsewhere = Link {
            place: "wlan0 via 0101A8C0".into(),
            ..here.clone()
        };
        assert_eq!(file.kept(&elsewhere), None);
        let now = unix_s();
        let kept = |measured_unix_s, bits_per_s| Kept {
            measured_unix_s,
            rate: NetworkRate {
                bits_per_s,
                ..PEERS
            },
        };
        assert!(kept(now, 1e6).holds(now) && kept(now - 86400, 1e6).holds(now));
        assert!(!kept(now - LIFE.as_secs(), 1e6).holds(now), "too old");
        assert!(!kept(now + 1, 1e6).holds(now), "from the future");
        for nonsense in [0.0, -1.0, f64::NAN, f64::INFINITY, 1e20] {
            assert!(!kept(now, nonsense).holds(now), "{nonsense}");
        }
    }

    #[test]
    fn a_file_that_makes_no_sense_is_empty_and_places_are_bounded() {
        let folder = tempfile::tempdir().unwrap();
        let file = RateFile::new(folder.path());
        for nonsense in ["", "{", "[1]", "{\"a\": 1}", "\u{0}"] {
            std::fs::write(folder.path().join("sepal_network_v1.json"), nonsense).unwrap();
            assert_eq!(file.kept(&link(None)), None, "{nonsense:?}");
        }
        for place in 0..2 * MAX_PLACES {
            let there = Link {
                place: format!("eth{place}"),
                speed_bits_per_s: None,
            };
            file.keep(&there, PEERS).unwrap();
            assert_eq!(file.kept(&there), Some(PEERS));
        }
        assert_eq!(file.read().len(), MAX_PLACES);
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
