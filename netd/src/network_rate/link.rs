//! The link of the default route, as `/proc` and `/sys` describe it.

use std::fs::File;
use std::io::Read;
use std::path::Path;

/// A larger file of the system is not read to its end.
const MAX_FILE_BYTES: u64 = 1 << 20;

/// The interface of the default route. A measurement holds for one link: the
/// interface with the gateway behind it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct NetworkLink {
    /// Interface and gateway as the kernel names them; empty without a default route.
    pub name: String,
    /// What the interface can do; `None` where the kernel does not know, as for most radios.
    pub speed_bits_per_s: Option<f64>,
}

impl NetworkLink {
    /// The link of this process's network.
    pub fn of_system() -> NetworkLink {
        NetworkLink::under(Path::new("/"))
    }

    /// The same with another root of `proc` and `sys`.
    fn under(root: &Path) -> NetworkLink {
        let ip4 = default_ip4(&text(&root.join("proc/net/route")));
        let route = ip4.or_else(|| default_ip6(&text(&root.join("proc/net/ipv6_route"))));
        let Some((interface, gateway)) = route else {
            return NetworkLink::default();
        };
        let is_name = !interface.contains('/') && !interface.starts_with('.');
        let speed = root.join("sys/class/net").join(&interface).join("speed");
        // Megabits per second; -1 or an error where there is no such thing.
        let speed = if is_name { text(&speed) } else { String::new() };
        let megabits = speed.trim().parse::<u32>().ok().filter(|speed| *speed > 0);
        NetworkLink {
            name: format!("{interface} via {gateway}"),
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

/// Interface and gateway of the default route with the least metric. Columns: interface,
/// destination, gateway, flags, references, use, metric, mask.
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

/// The same of the table for IPv6. Columns: destination, its length, source, its length, next hop,
/// metric, references, use, flags, interface.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_link_is_that_of_the_default_route_with_the_least_metric() {
        let root = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = root.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        let found = || NetworkLink::under(root.path());
        assert_eq!(found(), NetworkLink::default(), "no tables at all");
        write(
            "proc/net/ipv6_route",
            "fe800000000000000000000000000000 40 00000000000000000000000000000000 00 00000000000000000000000000000000 00000100 1 0 1 eth9\n\
             00000000000000000000000000000000 00 00000000000000000000000000000000 00 00000000000000000000000000000000 ffffffff 1 0 1 lo\n\
             00000000000000000000000000000000 00 00000000000000000000000000000000 00 fe800000000000000000000000000001 00000400 1 0 1 eth6\n",
        );
        assert_eq!(found().name, "eth6 via fe800000000000000000000000000001");
        write(
            "proc/net/route",
            "Iface Destination Gateway Flags RefCnt Use Metric Mask MTU Window IRTT\n\
             eth0 0001A8C0 00000000 0001 0 0 0 00FFFFFF 0 0 0\n\
             wlan0 00000000 0101A8C0 0003 0 0 600 00000000 0 0 0\n\
             nonsense\n\
             eth0 00000000 FE01A8C0 0003 0 0 100 00000000 0 0 0\n",
        );
        assert_eq!((found().name.as_str(), found().speed_bits_per_s), ("eth0 via FE01A8C0", None));
        for (text, speed) in
            [("2500\n", Some(2.5e9)), ("-1\n", None), ("0\n", None), ("fast", None)]
        {
            write("sys/class/net/eth0/speed", text);
            assert_eq!(found().speed_bits_per_s, speed, "{text:?}");
        }
    }
}
