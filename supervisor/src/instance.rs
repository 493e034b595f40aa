//! The name of a run on this machine, and what tells a live run from a dead one.
//!
//! ```text
//! RUNTIME_DIR/            mode 0700, ours alone to write
//!   lock                  held for a moment while somebody claims, cleans or lists
//!   NAME.lock             held (flock) by the supervisor of instance NAME for its life; its pid is inside
//!   NAME.d/               manifests, a fresh identity, sockets of starting children; goes with the run
//!   NAME.d/status         the socket that `sepal status` asks
//!   PID.identity          the key of a run that process PID has ended to start another one ([`key`])
//! ```
//!
//! Shared memory has no names; it ends with the processes that map it.
//!
//! The kernel drops a lock with its holder, however that died: a free lock is a dead run, and
//! whoever finds one removes what that run left.

mod key;

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use shared::exit::ExitReason;
use shared::shm::segment::remove_names;
use tracing::{info, warn};

/// Longest instance name; it becomes part of file names and of the board.
pub const MAX_NAME_BYTES: usize = 32;

/// Numbers tried for an instance without a name.
const MAX_INSTANCES: u32 = 1000;

/// Longest path of an instance's folder: a socket address holds 107 bytes, and below the folder
/// come `/.tmpXXXXXX/socket`.
const MAX_FOLDER_BYTES: usize = 107 - "/.tmpXXXXXX/socket".len();

/// How long another process may hold the folder's lock, which it takes only for a moment.
const CLAIM_PATIENCE: Duration = Duration::from_secs(5);

/// Why an instance could not be claimed.
#[derive(Debug, thiserror::Error)]
pub enum InstanceError {
    /// The name cannot be part of a file name.
    #[error("instance name {0:?} must be 1 to {MAX_NAME_BYTES} letters, digits, '-' or '_'")]
    BadName(String),
    /// Another supervisor runs under this name.
    #[error(
        "instance {name} is running already (supervisor pid {pid}); stop it or choose another --instance"
    )]
    Busy {
        name: String,
        /// What the lock file says about its holder.
        pid: String,
    },
    /// Another process claims without end.
    #[error(
        "another sepal holds {0} for more than {CLAIM_PATIENCE:?}; end it or choose another --runtime_dir"
    )]
    Stuck(PathBuf),
    /// The folder belongs to somebody else, others can write to it, or it is no folder.
    #[error("runtime folder {path} {fault}; choose another --runtime_dir")]
    Unsafe { path: PathBuf, fault: String },
    /// A file operation failed.
    #[error("cannot {action} {path}")]
    Io {
        action: &'static str,
        /// On what.
        path: PathBuf,
        #[source]
        source: io::Error,
    },
}

impl InstanceError {
    /// The reason with which the process should exit.
    pub fn exit_reason(&self) -> ExitReason {
        match self {
            InstanceError::Busy { .. } | InstanceError::Stuck(_) => ExitReason::Busy,
            InstanceError::BadName(_) | InstanceError::Unsafe { .. } | InstanceError::Io { .. } => {
                ExitReason::BadConfig
            }
        }
    }
}

/// A claimed name; given back on drop, with everything that carries it.
#[derive(Debug)]
pub struct Instance {
    name: String,
    dir: PathBuf,
    lock: Flock<File>,
}

/// A live instance that somebody else runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LiveInstance {
    pub name: String,
    /// The socket on which its supervisor tells what runs.
    pub status_socket: PathBuf,
}

impl Instance {
    /// Claims `name`, or the first free number, in `runtime_dir` (made if missing), and removes
    /// what dead runs left there.
    ///
    /// # Errors
    /// [`InstanceError::Busy`] when a live run holds the name.
    pub fn claim(runtime_dir: &Path, name: Option<&str>) -> Result<Instance, InstanceError> {
        let dir = private_folder(runtime_dir)?;
        let _claiming = lock_folder(&dir)?;
        remove_dead(&dir)?;
        let (name, mut lock) = match name {
            Some(name) => (name.to_owned(), take_name(&dir, name)?),
            None => take_number(&dir)?,
        };
        let folder = folder_of(&dir, &name);
        check_folder_length(&folder)?;
        let failed = |action| {
            let path = folder.clone();
            move |source| InstanceError::Io { action, path, source }
        };
        let pid = std::process::id().to_string();
        lock.set_len(0)
            .and_then(|()| lock.write_all(pid.as_bytes()))
            .map_err(failed("write the lock of"))?;
        fs::DirBuilder::new().mode(0o700).create(&folder).map_err(failed("make folder"))?;
        let instance = Instance { name, dir, lock };
        instance.take_key();
        Ok(instance)
    }

    /// The instance that the executable before claimed; `lock` is the file whose lock it holds.
    ///
    /// # Errors
    /// [`InstanceError`] when the lock is not held.
    pub fn adopt(
        runtime_dir: &Path,
        name: String,
        lock: OwnedFd,
    ) -> Result<Instance, InstanceError> {
        let dir = private_folder(runtime_dir)?;
        let path = lock_of(&dir, &name);
        // The lock is one of the open file, which this process never closed.
        let lock = Flock::lock(File::from(lock), FlockArg::LockExclusiveNonblock);
        let failed = |(_, errno): (File, Errno)| InstanceError::Io {
            action: "take over the lock",
            path,
            source: errno.into(),
        };
        Ok(Instance { name, dir, lock: lock.map_err(failed)? })
    }

    /// Another descriptor of the file whose lock it holds.
    ///
    /// # Errors
    /// When the process is out of descriptors.
    pub fn lock(&self) -> io::Result<OwnedFd> {
        Ok(self.lock.try_clone()?.into())
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    /// Folder for its short-lived files, mode 0700.
    pub fn folder(&self) -> PathBuf {
        folder_of(&self.dir, &self.name)
    }

    /// Name of a segment of this instance, for `/proc/PID/maps`; `what` holds letters, digits, '-'
    /// and '.' alone.
    pub fn segment(&self, what: &str) -> String {
        format!("sepal-{}.{what}", self.name)
    }

    /// Path of the socket that `sepal status` asks.
    pub fn status_socket(&self) -> PathBuf {
        status_socket_of(&self.dir, &self.name)
    }
}

impl Drop for Instance {
    /// The lock file goes first: whoever opens it later makes a new one, and whoever has it open
    /// sees that it is not the file of that name any more.
    fn drop(&mut self) {
        remove_leftovers(&self.dir, &self.name);
    }
}

/// The instances in `runtime_dir` that run now; none if there is no such folder. Makes nothing.
///
/// # Errors
/// When the folder cannot be read.
pub fn live_instances(runtime_dir: &Path) -> Result<Vec<LiveInstance>, InstanceError> {
    if !runtime_dir.exists() {
        return Ok(Vec::new());
    }
    let dir = existing_folder(runtime_dir)?;
    // Whoever claims the first instance makes the lock, and it stays.
    if !dir.join("lock").exists() {
        return Ok(Vec::new());
    }
    let _listing = lock_folder(&dir)?;
    let mut live = Vec::new();
    for name in names(&dir)? {
        if is_held(&lock_of(&dir, &name))? {
            let status_socket = status_socket_of(&dir, &name);
            live.push(LiveInstance { name, status_socket });
        }
    }
    Ok(live)
}

/// Makes the folder if needed; it must be ours alone to write, since what lies in it is trusted.
/// Others may look: what it holds is closed to them.
fn private_folder(path: &Path) -> Result<PathBuf, InstanceError> {
    let failed = |action| move |source| InstanceError::Io { action, path: path.to_owned(), source };
    make_private(path).map_err(failed("make runtime folder"))?;
    existing_folder(path)
}

/// The same for a folder that is there.
fn existing_folder(path: &Path) -> Result<PathBuf, InstanceError> {
    let failed = |action| move |source| InstanceError::Io { action, path: path.to_owned(), source };
    match fault_of(path).map_err(failed("access runtime folder"))? {
        Some(fault) => Err(InstanceError::Unsafe { path: path.to_owned(), fault }),
        None => path.canonicalize().map_err(failed("resolve runtime folder")),
    }
}

/// Makes a folder with mode 0700, unless something has its name.
pub(crate) fn make_private(path: &Path) -> io::Result<()> {
    match path.exists() {
        true => Ok(()),
        false => fs::DirBuilder::new().mode(0o700).recursive(true).create(path),
    }
}

/// Why others than this user can write to a folder; `None` if they cannot.
pub(crate) fn fault_of(path: &Path) -> io::Result<Option<String>> {
    fault_for(path, nix::unistd::geteuid().as_raw())
}

/// The same for this user.
pub(crate) fn fault_for(path: &Path, uid: u32) -> io::Result<Option<String>> {
    let meta = fs::symlink_metadata(path)?;
    let mode = meta.permissions().mode() & 0o777;
    Ok(if !meta.is_dir() {
        Some("is not a folder".to_owned())
    } else if meta.uid() != uid {
        Some(format!("belongs to user {}, not to {uid}", meta.uid()))
    } else if mode & 0o022 != 0 {
        Some(format!("has mode {mode:03o}, so that others can write to it; make it 700"))
    } else {
        None
    })
}

fn check_folder_length(folder: &Path) -> Result<(), InstanceError> {
    let bytes = folder.as_os_str().len();
    if bytes <= MAX_FOLDER_BYTES {
        return Ok(());
    }
    let fault = format!("makes paths of {bytes} bytes, and sockets allow {MAX_FOLDER_BYTES}");
    Err(InstanceError::Unsafe { path: folder.parent().unwrap_or(folder).to_owned(), fault })
}

fn lock_folder(dir: &Path) -> Result<Flock<File>, InstanceError> {
    let path = dir.join("lock");
    let deadline = Instant::now() + CLAIM_PATIENCE;
    loop {
        if let Some(lock) = try_lock(&path)? {
            return Ok(lock);
        }
        if Instant::now() >= deadline {
            return Err(InstanceError::Stuck(path));
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn take_name(dir: &Path, name: &str) -> Result<Flock<File>, InstanceError> {
    if !is_name(name) {
        return Err(InstanceError::BadName(name.chars().take(MAX_NAME_BYTES).collect()));
    }
    let path = lock_of(dir, name);
    match try_lock(&path)? {
        Some(lock) => Ok(lock),
        None => Err(InstanceError::Busy { name: name.to_owned(), pid: holder(&path) }),
    }
}

fn take_number(dir: &Path) -> Result<(String, Flock<File>), InstanceError> {
    for number in 0..MAX_INSTANCES {
        let name = number.to_string();
        if let Some(lock) = try_lock(&lock_of(dir, &name))? {
            return Ok((name, lock));
        }
    }
    Err(InstanceError::Busy { name: format!("0 to {}", MAX_INSTANCES - 1), pid: "all".to_owned() })
}

fn is_name(name: &str) -> bool {
    let plain = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
    (1..=MAX_NAME_BYTES).contains(&name.len()) && name.chars().all(plain)
}

/// Locks the file at `path`, made if missing; `None` if somebody holds it. A file that was replaced
/// between opening and locking is not the one others look at, so it is opened again.
fn try_lock(path: &Path) -> Result<Option<Flock<File>>, InstanceError> {
    let failed = |action| move |source| InstanceError::Io { action, path: path.to_owned(), source };
    for _ in 0..16 {
        let open = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(path);
        let file = open.map_err(failed("open lock file"))?;
        let lock = match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            Ok(lock) => lock,
            Err((_, Errno::EWOULDBLOCK)) => return Ok(None),
            Err((_, errno)) => return Err(failed("lock")(errno.into())),
        };
        let ours = lock.metadata().map_err(failed("access lock file"))?;
        if fs::metadata(path)
            .is_ok_and(|named| (named.dev(), named.ino()) == (ours.dev(), ours.ino()))
        {
            return Ok(Some(lock));
        }
    }
    Err(failed("lock")(io::Error::other("another process keeps replacing the file")))
}

/// Whether somebody holds the lock of the file at `path`; nobody does if there is no file.
fn is_held(path: &Path) -> Result<bool, InstanceError> {
    let failed = |action| move |source| InstanceError::Io { action, path: path.to_owned(), source };
    let file = match OpenOptions::new().read(true).write(true).open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        Err(error) => return Err(failed("open lock file")(error)),
    };
    match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
        Ok(_free) => Ok(false),
        Err((_, Errno::EWOULDBLOCK)) => Ok(true),
        Err((_, errno)) => Err(failed("lock")(errno.into())),
    }
}

fn holder(lock: &Path) -> String {
    let mut text = String::new();
    let read = File::open(lock).and_then(|file| file.take(20).read_to_string(&mut text));
    if read.is_ok_and(|len| len > 0) { text } else { "unknown".to_owned() }
}

fn remove_dead(dir: &Path) -> Result<(), InstanceError> {
    if let Err(error) = remove_names() {
        warn!(%error, "cannot list /dev/shm");
    }
    for name in names(dir)? {
        if let Some(_dead) = try_lock(&lock_of(dir, &name))? {
            info!(instance = %name, "removing files of a dead run");
            remove_leftovers(dir, &name);
        }
    }
    key::remove_orphans(dir);
    Ok(())
}

/// Removes lock and folder of an instance whose lock the caller holds.
fn remove_leftovers(dir: &Path, name: &str) {
    let folder = folder_of(dir, name);
    for result in [
        remove_if_there(fs::remove_dir_all(&folder)),
        remove_if_there(fs::remove_file(lock_of(dir, name))),
    ] {
        if let Err(error) = result {
            warn!(%error, folder = %folder.display(), "cannot remove files of an instance");
        }
    }
}

fn remove_if_there(result: io::Result<()>) -> io::Result<()> {
    result.or_else(
        |error| {
            if error.kind() == io::ErrorKind::NotFound { Ok(()) } else { Err(error) }
        },
    )
}

fn names(dir: &Path) -> Result<Vec<String>, InstanceError> {
    let failed = |source| InstanceError::Io { action: "list", path: dir.to_owned(), source };
    let name = |entry: fs::DirEntry| {
        let file = entry.file_name().into_string().ok()?;
        file.strip_suffix(".lock").filter(|name| is_name(name)).map(str::to_owned)
    };
    let mut names: Vec<String> =
        fs::read_dir(dir).map_err(failed)?.filter_map(|entry| name(entry.ok()?)).collect();
    names.sort();
    Ok(names)
}

fn lock_of(dir: &Path, name: &str) -> PathBuf {
    dir.join(format!("{name}.lock"))
}

fn folder_of(dir: &Path, name: &str) -> PathBuf {
    dir.join(format!("{name}.d"))
}

fn status_socket_of(dir: &Path, name: &str) -> PathBuf {
    folder_of(dir, name).join("status")
}

#[cfg(test)]
mod tests {
    use std::fs::Permissions;

    use super::*;

    fn folder() -> tempfile::TempDir {
        tempfile::tempdir().unwrap()
    }

    #[test]
    fn the_first_free_number_is_the_name_and_is_given_back() {
        let dir = folder();
        let zero = Instance::claim(dir.path(), None).unwrap();
        let one = Instance::claim(dir.path(), None).unwrap();
        assert_eq!((zero.name(), one.name()), ("0", "1"));
        drop(zero);
        assert_eq!(Instance::claim(dir.path(), None).unwrap().name(), "0");
    }

    #[test]
    fn a_second_start_of_a_live_instance_names_its_holder() {
        let dir = folder();
        let _first = Instance::claim(dir.path(), Some("llama")).unwrap();
        let error = Instance::claim(dir.path(), Some("llama")).unwrap_err();
        assert_eq!(error.exit_reason(), ExitReason::Busy);
        assert!(error.to_string().contains(&std::process::id().to_string()), "{error}");
    }

    #[test]
    fn what_a_dead_run_left_is_removed_and_what_a_live_run_has_is_not() {
        let dir = folder();
        let live = Instance::claim(dir.path(), Some("a-b")).unwrap();
        let path = dir.path().canonicalize().unwrap();
        let name = format!("/dev/shm/sepal-mapping-0-instance-{}", std::process::id());
        let left = Path::new(&name);
        fs::write(left, "").unwrap();
        fs::write(path.join("a.lock"), "1").unwrap();
        fs::create_dir(path.join("a.d")).unwrap();

        let next = Instance::claim(dir.path(), None).unwrap();
        assert_eq!(next.name(), "0");
        assert!(!left.exists());
        assert!(live.folder().exists() && path.join("a-b.lock").exists());
        assert!(!path.join("a.d").exists() && !path.join("a.lock").exists());
    }

    #[test]
    fn live_instances_are_listed_and_dead_ones_are_not() {
        let dir = folder();
        assert_eq!(live_instances(&dir.path().join("none")).unwrap(), []);
        let live = Instance::claim(dir.path(), Some("x")).unwrap();
        fs::write(dir.path().join("dead.lock"), "1").unwrap();
        let expected = LiveInstance { name: "x".into(), status_socket: live.status_socket() };
        assert_eq!(live_instances(dir.path()).unwrap(), [expected]);
    }

    #[test]
    fn a_look_at_instances_makes_nothing() {
        let dir = folder();
        assert_eq!(live_instances(dir.path()).unwrap(), []);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
        fs::set_permissions(dir.path(), Permissions::from_mode(0o775)).unwrap();
        let error = live_instances(dir.path()).unwrap_err().to_string();
        assert!(error.contains("mode 775"), "{error}");
    }

    #[test]
    fn names_that_are_no_file_names_are_refused() {
        let dir = folder();
        for name in ["", "a/b", "..", "a.b", "a b", &"x".repeat(33)] {
            let error = Instance::claim(dir.path(), Some(name)).unwrap_err();
            assert!(matches!(error, InstanceError::BadName(_)), "{error}");
        }
    }

    #[test]
    fn a_folder_that_others_can_write_is_refused_with_the_remedy() {
        let dir = folder();
        fs::set_permissions(dir.path(), Permissions::from_mode(0o775)).unwrap();
        let error = Instance::claim(dir.path(), None).unwrap_err();
        assert!(error.to_string().contains("mode 775"), "{error}");
        assert_eq!(error.exit_reason(), ExitReason::BadConfig);
    }

    #[test]
    fn a_folder_too_deep_for_sockets_is_refused() {
        let dir = folder();
        let deep = dir.path().join("x".repeat(100));
        let error = Instance::claim(&deep, None).unwrap_err();
        assert!(error.to_string().contains("--runtime_dir"), "{error}");
    }
}
