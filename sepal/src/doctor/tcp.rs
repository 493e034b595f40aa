//! TCP of the kernel: whether states of large models leave at once after a pause, and whether one connection can fill a long line.
//! `deploy/sysctl/60-sepal.conf` has the settings that are advised here.

use std::path::Path;

use super::check::CheckVerdict;
use super::system::size;

/// Bytes under way on a line of 1 Gbit/s with a round trip of 100 ms, and as many again for what the kernel adds.
const ENOUGH_BUFFER: u64 = 25_000_000;
/// What the advice sets.
const ADVISED_BUFFER: u64 = 32 << 20;

/// Settings of `net.ipv4`; `None` where the kernel does not show one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TcpFacts {
    /// Whether a connection begins anew with few packets after a pause.
    pub slow_after_idle: Option<bool>,
    /// Congestion control of new connections.
    pub congestion: Option<String>,
    /// Least, usual and greatest send buffer, bytes.
    pub send: Option<[u64; 3]>,
    /// The same of receive buffers.
    pub receive: Option<[u64; 3]>,
}

/// Reads them from `folder`, which is /proc/sys/net/ipv4.
pub fn observe(folder: &Path) -> TcpFacts {
    let text = |name: &str| std::fs::read_to_string(folder.join(name)).ok();
    let sizes = |name: &str| {
        let text = text(name)?;
        let sizes: Option<Vec<u64>> = text.split_whitespace().map(|n| n.parse().ok()).collect();
        <[u64; 3]>::try_from(sizes?).ok()
    };
    TcpFacts {
        slow_after_idle: text("tcp_slow_start_after_idle").map(|text| text.trim() != "0"),
        congestion: text("tcp_congestion_control").map(|text| text.trim().to_owned()),
        send: sizes("tcp_wmem"),
        receive: sizes("tcp_rmem"),
    }
}

/// Whether they slow a server down.
pub fn judge(facts: &TcpFacts) -> CheckVerdict {
    let congestion = facts.congestion.as_deref().unwrap_or("unknown");
    let (mut slow, mut settings) = (Vec::new(), Vec::new());
    // BBR keeps what it knows of the line.
    if facts.slow_after_idle == Some(true) && congestion != "bbr" {
        slow.push("states of large models take a round trip more after each pause".to_owned());
        settings.push("net.ipv4.tcp_slow_start_after_idle=0".to_owned());
    }
    for (sizes, name, does) in
        [(facts.send, "tcp_wmem", "send"), (facts.receive, "tcp_rmem", "receive")]
    {
        let Some([least, usual, most]) = sizes.filter(|sizes| sizes[2] < ENOUGH_BUFFER) else {
            continue;
        };
        slow.push(format!("a connection can {does} at most {} per round trip", size(most)));
        settings.push(format!("'net.ipv4.{name}={least} {usual} {ADVISED_BUFFER}'"));
    }
    if slow.is_empty() {
        return CheckVerdict::ok(format!("TCP ({congestion}) is set for long lines"));
    }
    CheckVerdict::warning(
        format!("TCP ({congestion}): {}", slow.join("; ")),
        format!("as root: sysctl -w {}", settings.join(" ")),
    )
}

#[cfg(test)]
mod tests {
    use super::super::check::Status;
    use super::*;

    fn facts(values: &[(&str, &str)]) -> TcpFacts {
        let folder = tempfile::tempdir().unwrap();
        values.iter().for_each(|(name, text)| {
            std::fs::write(folder.path().join(name), text).unwrap();
        });
        observe(folder.path())
    }

    const LINUX: [(&str, &str); 4] = [
        ("tcp_slow_start_after_idle", "1\n"),
        ("tcp_congestion_control", "cubic\n"),
        ("tcp_wmem", "4096\t16384\t4194304\n"),
        ("tcp_rmem", "4096\t131072\t6291456\n"),
    ];

    #[test]
    fn what_linux_has_by_default_is_a_warning_with_one_command() {
        let verdict = judge(&facts(&LINUX));
        assert_eq!(verdict.status, Status::Warning);
        assert_eq!(
            verdict.advice.as_deref(),
            Some(
                "as root: sysctl -w net.ipv4.tcp_slow_start_after_idle=0 \
                 'net.ipv4.tcp_wmem=4096 16384 33554432' 'net.ipv4.tcp_rmem=4096 131072 33554432'"
            )
        );
        assert!(verdict.found.contains("at most 4.0 MiB"), "{}", verdict.found);
    }

    #[test]
    fn bbr_does_not_start_slowly_after_a_pause() {
        let mut values = LINUX;
        values[1].1 = "bbr\n";
        let advice = judge(&facts(&values)).advice.unwrap();
        assert!(!advice.contains("slow_start") && advice.contains("tcp_wmem"), "{advice}");
    }

    #[test]
    fn the_packaged_settings_suffice_and_what_cannot_be_read_is_no_warning() {
        let packaged = include_str!("../../../deploy/sysctl/60-sepal.conf");
        let settings = packaged.lines().filter_map(|line| line.strip_prefix("net.ipv4."));
        let values: Vec<(&str, &str)> =
            settings.filter_map(|line| line.split_once(" = ")).collect();
        assert_eq!(values.len(), 3);
        assert_eq!(judge(&facts(&values)).status, Status::Ok);
        assert_eq!(judge(&facts(&[])).status, Status::Ok);
        assert_eq!(facts(&[("tcp_wmem", "1 2"), ("tcp_rmem", "a b c")]), TcpFacts::default());
    }
}
