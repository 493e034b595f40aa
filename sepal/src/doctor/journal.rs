//! The log of the units of systemd, as `journalctl` tells it.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Time for `journalctl`.
const LIMIT: Duration = Duration::from_secs(10);
/// Lines that it is asked for, the newest.
const LINES: &str = "--lines=20000";
/// Bytes of a log that are taken, the newest.
pub const MAX_BYTES: u64 = 8 << 20;

/// The newest lines of the units of Sepal.
///
/// # Errors
/// A sentence, when there is no journal or this user may not read it.
pub fn read() -> Result<String, String> {
    let output = tempfile::tempfile().map_err(|error| error.to_string())?;
    let sink = output.try_clone().map_err(|error| error.to_string())?;
    let mut command = Command::new("journalctl");
    command.args(["--no-pager", "--quiet", "--output=short-iso", LINES, "--unit=sepal*"]);
    let spawned = command.stdin(Stdio::null()).stdout(sink).stderr(Stdio::null()).spawn();
    let mut child = spawned.map_err(|error| format!("journalctl: {error}"))?;
    let deadline = Instant::now() + LIMIT;
    let status = loop {
        match child.try_wait().map_err(|error| error.to_string())? {
            Some(status) => break status,
            None if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(20)),
            None => {
                let killed = child.kill().and_then(|()| child.wait().map(drop));
                let also =
                    killed.err().map_or(String::new(), |error| format!(", nor end: {error}"));
                return Err(format!("journalctl did not answer within {LIMIT:?}{also}"));
            }
        }
    };
    let text = tail(output).map_err(|error| error.to_string())?;
    match (status.success(), text.trim().is_empty()) {
        (true, false) => Ok(text),
        (true, true) => Err("the journal has no lines of units called sepal*".to_owned()),
        (false, _) => Err(format!("journalctl ended with {status}")),
    }
}

/// The newest part of the file at `path`.
///
/// # Errors
/// When it cannot be read.
pub fn tail_of(path: &Path) -> io::Result<String> {
    tail(File::open(path)?)
}

/// The last whole lines, of at most [`MAX_BYTES`].
fn tail(mut file: File) -> io::Result<String> {
    let length = file.seek(SeekFrom::End(0))?;
    let start = length.saturating_sub(MAX_BYTES);
    file.seek(SeekFrom::Start(start))?;
    let mut bytes = Vec::new();
    file.take(MAX_BYTES).read_to_end(&mut bytes)?;
    let text = String::from_utf8_lossy(&bytes).into_owned();
    Ok(match text.split_once('\n') {
        Some((_, whole)) if start > 0 => whole.to_owned(),
        _ => text,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_whole_lines_of_a_long_log_are_taken() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("log");
        std::fs::write(&path, "one\ntwo\n").unwrap();
        assert_eq!(tail_of(&path).unwrap(), "one\ntwo\n");
        let long = "0123456789\n".repeat(MAX_BYTES as usize / 11 + 100);
        std::fs::write(&path, &long).unwrap();
        let text = tail_of(&path).unwrap();
        assert!(text.len() as u64 <= MAX_BYTES && text.len() as u64 > MAX_BYTES - 11);
        assert!(text.lines().all(|line| line == "0123456789"));
        assert!(tail_of(&folder.path().join("none")).is_err());
    }
}
