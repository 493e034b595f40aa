//! `--bundle FILE`: what a bug report needs, in one `.tar.gz`. Secrets never go in: known ones and
//! what looks like one are removed from every text, and identity files are not read.

use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use flate2::Compression;
use flate2::write::GzEncoder;
use serde::Serialize;
use shared::bootstrap::build_id;
use shared::error_chain::with_causes;
use shared::sanitize_text::escaped_json;

use super::check::Finding;
use super::instances::LiveServer;
use super::journal;
use super::secrets::Remover;
use crate::cli::DoctorOptions;

/// Folder of everything in the archive.
const FOLDER: &str = "sepal-report";

/// Why there is no bundle.
#[derive(Debug, thiserror::Error)]
pub enum BundleError {
    /// Nothing is overwritten.
    #[error("--bundle {0} exists already; remove it or choose another file")]
    Exists(PathBuf),
    /// It cannot be written there.
    #[error("cannot write --bundle {path}; choose a file in a folder that this user can write to")]
    Write {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
}

/// Refuses a file that exists, before any check is made.
///
/// # Errors
/// [`BundleError::Exists`].
pub fn check(path: &Path) -> Result<(), BundleError> {
    match path.symlink_metadata() {
        Ok(_) => Err(BundleError::Exists(path.to_owned())),
        Err(_) => Ok(()),
    }
}

/// Writes the bundle to `path`, mode 0600; it appears there when it is complete.
///
/// # Errors
/// [`BundleError`]; no file is left then.
pub fn write(
    path: &Path,
    options: &DoctorOptions,
    findings: &[Finding],
    running: &[LiveServer],
) -> Result<(), BundleError> {
    let failed = |source| BundleError::Write { path: path.to_owned(), source };
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    // Made with mode 0600.
    let file = tempfile::NamedTempFile::new_in(folder.unwrap_or(Path::new("."))).map_err(failed)?;
    let texts = texts(options, findings, running, &remover(options));
    pack(file.as_file(), &texts).map_err(failed)?;
    file.as_file().sync_all().map_err(failed)?;
    match file.persist_noclobber(path) {
        Ok(_) => Ok(()),
        Err(error) if error.error.kind() == io::ErrorKind::AlreadyExists => {
            Err(BundleError::Exists(path.to_owned()))
        }
        Err(error) => Err(failed(error.error)),
    }
}

fn remover(options: &DoctorOptions) -> Remover {
    let token = options.config.prepare.hub.token.iter();
    Remover::new(token.map(|token| token.reveal().to_owned()))
}

/// The files of the bundle: name and text without secrets.
fn texts(
    options: &DoctorOptions,
    findings: &[Finding],
    running: &[LiveServer],
    remover: &Remover,
) -> Vec<(&'static str, String)> {
    let lines: Vec<String> = findings.iter().map(Finding::line).collect();
    let reports: Vec<_> = running.iter().filter_map(|one| one.report.as_ref()).collect();
    let mut texts = vec![
        ("version.txt", format!("sepal {} build {}\n", env!("CARGO_PKG_VERSION"), build_id())),
        ("doctor.txt", remover.clean(&(lines.join("\n") + "\n"))),
        ("doctor.json", json(findings, remover)),
        ("status.json", json(&reports, remover)),
        ("settings.toml", remover.clean(&options.shown)),
        ("log.txt", remover.clean(&log(options))),
    ];
    if let Some(file) = &options.file {
        let text = match journal::tail_of(file) {
            Ok(text) => remover.clean_settings(&text),
            Err(error) => remover.clean(&format!("{}: {error}\n", file.display())),
        };
        texts.push(("config-file.txt", text));
    }
    texts
}

/// A value as JSON. Its texts are cleaned one by one, so that the whole stays JSON.
fn json<T: Serialize + ?Sized>(value: &T, remover: &Remover) -> String {
    match serde_json::to_value(value) {
        Ok(mut value) => {
            remover.clean_json(&mut value);
            format!("{}\n", escaped_json(&format!("{value:#}")))
        }
        Err(error) => format!("{error}\n"),
    }
}

/// The log that was named, else the journal's, else why there is none.
fn log(options: &DoctorOptions) -> String {
    let read = match &options.log_file {
        Some(path) => journal::tail_of(path)
            .map_err(|error| format!("{}: {}", path.display(), with_causes(&error))),
        None => journal::read(),
    };
    read.unwrap_or_else(|why| format!("no log: {why}; name the file of the log with --log_file\n"))
}

fn pack(file: impl Write, texts: &[(&str, String)]) -> io::Result<()> {
    let mut archive = tar::Builder::new(GzEncoder::new(file, Compression::default()));
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    for (name, text) in texts {
        let mut header = tar::Header::new_gnu();
        header.set_size(text.len() as u64);
        header.set_mode(0o600);
        header.set_mtime(now);
        archive.append_data(&mut header, format!("{FOLDER}/{name}"), text.as_bytes())?;
    }
    archive.into_inner()?.finish()?.flush()
}
