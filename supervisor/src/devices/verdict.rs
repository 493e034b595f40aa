//! Verdicts about a device that outlive a run: one file for each device and kind of test in the
//! cache folder. A verdict holds for the driver and the build it was found with; any other is found
//! again and replaces it.

use std::fs::{self, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use nix::libc;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use shared::bootstrap::build_id;
use shared::control::CudaDevice;
use shared::files::write_atomically;
use tracing::warn;

use crate::cache_folder;

/// A longer file is not ours.
const MAX_FILE_BYTES: u64 = 64 << 10;

/// Characters of a sentence in a verdict.
const MAX_SENTENCE_CHARS: usize = 400;

/// Where NVIDIA's kernel module names its version.
const MODULE: &str = "/proc/driver/nvidia/version";

/// What a verdict is about, and holds for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VerdictSubject {
    /// Name and compute capability of the device.
    pub device: String,
    /// What tells it from all others.
    uuid: [u8; 16],
    /// Version of CUDA that the driver supports.
    driver_version: u32,
    /// The kernel module, in its own words; empty where it is silent.
    module: String,
    /// This build.
    build: String,
}

/// A file.
#[derive(Serialize, Deserialize)]
struct VerdictFile<T> {
    of: VerdictSubject,
    verdict: T,
}

impl VerdictSubject {
    /// A device, with the present driver and build.
    pub fn new(device: &CudaDevice, driver_version: u32) -> VerdictSubject {
        VerdictSubject {
            device: device.name.clone(),
            uuid: device.uuid,
            driver_version,
            module: fs::read_to_string(MODULE).unwrap_or_default(),
            build: build_id(),
        }
    }

    /// The file for its verdicts of a kind.
    pub fn path(&self, folder: &Path, kind: &str) -> PathBuf {
        let uuid: String = self.uuid.iter().map(|byte| format!("{byte:02x}")).collect();
        folder.join(format!("{uuid}-{kind}.json"))
    }

    /// What was found at an earlier start. A file that is missing, damaged, too long, no file at all
    /// or about something else holds nothing.
    pub fn read<T: DeserializeOwned>(&self, folder: &Path, kind: &str) -> Option<T> {
        // Opening a pipe without the flag waits for its writer.
        let file = OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_NONBLOCK)
            .open(self.path(folder, kind))
            .ok()?;
        let metadata = file.metadata().ok()?;
        if !metadata.is_file() || metadata.len() > MAX_FILE_BYTES {
            return None;
        }
        let mut text = Vec::new();
        file.take(MAX_FILE_BYTES).read_to_end(&mut text).ok()?;
        let entry: VerdictFile<T> = serde_json::from_slice(&text).ok()?;
        (entry.of == *self).then_some(entry.verdict)
    }

    /// Writes what was found, for later starts. A failure costs them time, nothing else.
    pub fn write<T: Serialize>(&self, folder: &Path, kind: &str, verdict: T) {
        let path = self.path(folder, kind);
        let write = || -> io::Result<()> {
            let text = serde_json::to_vec_pretty(&VerdictFile { of: self.clone(), verdict })?;
            let cache = folder.parent().unwrap_or(folder);
            cache_folder::make(cache).map_err(io::Error::other)?;
            fs::create_dir_all(folder)?;
            write_atomically(&path, |file| file.write_all(&text))
        };
        if let Err(error) = write() {
            warn!(%error, path = %path.display(), "verdict about a device not saved");
        }
    }
}

/// A sentence, cut to what a verdict holds.
pub fn sentence(text: &str) -> String {
    text.chars().take(MAX_SENTENCE_CHARS).collect()
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// A device of this name with the driver of this version.
    pub fn subject(name: &str, driver_version: u32) -> VerdictSubject {
        let device = CudaDevice { name: name.to_owned(), uuid: [7; 16], has_warpgroups: true };
        VerdictSubject::new(&device, driver_version)
    }

    #[test]
    fn a_verdict_holds_for_its_device_driver_and_build_alone() {
        let folder = tempfile::tempdir().unwrap();
        let folder = &folder.path().join("made");
        let of = subject("H200", 12_080);
        of.write(folder, "test", 5);
        assert_eq!(of.read(folder, "test"), Some(5));
        let others = [
            subject("H100", 12_080),
            subject("H200", 13_000),
            VerdictSubject { uuid: [8; 16], ..of.clone() },
            VerdictSubject { module: "another".to_owned(), ..of.clone() },
            VerdictSubject { build: "another".to_owned(), ..of.clone() },
        ];
        for other in others {
            assert_eq!(other.read::<u32>(folder, "test"), None, "{other:?}");
        }
        assert_eq!(of.read::<u32>(folder, "another test"), None);
    }

    #[test]
    fn a_file_that_is_no_verdict_holds_none() {
        let folder = tempfile::tempdir().unwrap();
        let (folder, of) = (folder.path(), subject("H200", 12_080));
        let path = of.path(folder, "test");
        of.write(folder, "test", 5);
        let whole = fs::read(&path).unwrap();
        let long = [&whole[..], &vec![b' '; MAX_FILE_BYTES as usize]].concat();
        let another = String::from_utf8_lossy(&whole).replace("5\n", "\"five\"\n").into_bytes();
        for bad in [b"".to_vec(), b"{}".to_vec(), whole[..whole.len() / 2].to_vec(), another] {
            fs::write(&path, &bad).unwrap();
            let read: Option<u32> = of.read(folder, "test");
            assert_eq!(read, None, "{}", String::from_utf8_lossy(&bad));
        }
        fs::write(&path, long).unwrap();
        assert_eq!(of.read::<u32>(folder, "test"), None, "a file that is too long");
        fs::remove_file(&path).unwrap();
        nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).unwrap();
        assert_eq!(of.read::<u32>(folder, "test"), None, "a pipe without a writer");
        fs::remove_file(&path).unwrap();
        fs::create_dir(&path).unwrap();
        assert_eq!(of.read::<u32>(folder, "test"), None, "a folder");
        // Nor can one be written there, which is no failure.
        of.write(folder, "test", 5);
    }
}
