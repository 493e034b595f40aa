//! The cache folder of a user without a home: it lies in a folder of the user's own in `/tmp`, where
//! any other user may have made a folder of that name before. What lies in the cache is served, so
//! Sepal uses the folder only if nobody else can write to it. Settings name the folder and do not
//! touch it: a command calls [`check`] before it reads there and [`make`] before it writes.
//!
//! A cache folder that the operator named is the operator's to protect.

use std::io;
use std::path::{Path, PathBuf};

use crate::instance::{fault_of, make_private};

/// The folder in which every user may make folders.
pub const TMP: &str = "/tmp";

/// The folder of this user in `tmp`.
pub fn own_folder(tmp: &Path) -> PathBuf {
    tmp.join(format!("sepal-{}", nix::unistd::geteuid()))
}

/// The cache folder of this user in `tmp`.
pub fn without_home(tmp: &Path) -> PathBuf {
    own_folder(tmp).join("cache")
}

/// Refuses a cache that another user can write to; makes nothing. A folder that is missing is empty.
///
/// # Errors
/// A sentence for the operator.
pub fn check(cache: &Path) -> Result<(), String> {
    check_in(Path::new(TMP), cache)
}

/// Makes the folder in `/tmp` that the cache lies in, with mode 0700, if it is missing.
///
/// # Errors
/// A sentence for the operator, if another user can write there or the folder cannot be made.
pub fn make(cache: &Path) -> Result<(), String> {
    make_in(Path::new(TMP), cache)
}

/// [`make`] if one of these models or adapters is in no folder and comes from the Hub, else [`check`].
///
/// # Errors
/// As of those two.
pub fn make_for<'a>(
    cache: &Path,
    models: impl IntoIterator<Item = &'a Path>,
) -> Result<(), String> {
    match models.into_iter().all(Path::is_dir) {
        true => check(cache),
        false => make(cache),
    }
}

/// [`check`] with `tmp` in place of `/tmp`.
pub fn check_in(tmp: &Path, cache: &Path) -> Result<(), String> {
    let own = own_folder(tmp);
    if cache != without_home(tmp) {
        return Ok(());
    }
    match fault_of(&own) {
        Ok(None) => Ok(()),
        Ok(Some(fault)) => Err(refusal(&own, &fault)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(refusal(&own, &format!("cannot be accessed: {error}"))),
    }
}

fn make_in(tmp: &Path, cache: &Path) -> Result<(), String> {
    let own = own_folder(tmp);
    if cache == without_home(tmp) {
        make_private(&own).map_err(|error| refusal(&own, &format!("cannot be made: {error}")))?;
    }
    check_in(tmp, cache)
}

fn refusal(own: &Path, fault: &str) -> String {
    format!("no --cache_dir and no HOME: {} {fault}", own.display())
}

#[cfg(test)]
mod tests {
    use std::fs::{self, Permissions};
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;
    use crate::instance::fault_for;

    #[test]
    fn the_folder_is_made_for_a_write_and_for_this_user_alone() {
        let tmp = tempfile::tempdir().unwrap();
        let (own, cache) = (own_folder(tmp.path()), without_home(tmp.path()));
        assert_eq!(check_in(tmp.path(), &cache), Ok(()));
        assert!(!own.exists(), "a check makes nothing");
        assert_eq!(make_in(tmp.path(), &cache), Ok(()));
        assert_eq!(own.metadata().unwrap().permissions().mode() & 0o777, 0o700);
        assert_eq!(make_in(tmp.path(), &cache), Ok(()), "it may be there already");
        assert_eq!(check_in(tmp.path(), &cache), Ok(()));
    }

    #[test]
    fn a_folder_that_another_user_can_write_to_is_neither_read_nor_written() {
        let tmp = tempfile::tempdir().unwrap();
        let (own, cache) = (own_folder(tmp.path()), without_home(tmp.path()));
        let refused = |part: &str| {
            for outcome in [check_in(tmp.path(), &cache), make_in(tmp.path(), &cache)] {
                let error = outcome.unwrap_err();
                assert!(error.contains("--cache_dir") && error.contains(part), "{error}");
            }
        };
        fs::create_dir(&own).unwrap();
        for mode in [0o777, 0o720, 0o702] {
            fs::set_permissions(&own, Permissions::from_mode(mode)).unwrap();
            refused(&format!("has mode {mode:o}"));
        }
        fs::remove_dir(&own).unwrap();
        let elsewhere = tempfile::tempdir().unwrap();
        symlink(elsewhere.path(), &own).unwrap();
        refused("is not a folder");
        fs::remove_file(&own).unwrap();
        fs::write(&own, "").unwrap();
        refused("is not a folder");
    }

    #[test]
    fn a_folder_of_another_user_is_refused() {
        let tmp = tempfile::tempdir().unwrap();
        let ours = nix::unistd::geteuid().as_raw();
        assert_eq!(fault_for(tmp.path(), ours).unwrap(), None);
        let fault = fault_for(tmp.path(), ours + 1).unwrap();
        assert_eq!(fault, Some(format!("belongs to user {ours}, not to {}", ours + 1)));
    }

    #[test]
    fn folders_that_the_operator_named_are_not_judged() {
        let tmp = tempfile::tempdir().unwrap();
        let named = tmp.path().join("shared");
        fs::create_dir(&named).unwrap();
        fs::set_permissions(&named, Permissions::from_mode(0o777)).unwrap();
        assert_eq!(check_in(tmp.path(), &named.join("cache")), Ok(()));
        assert_eq!(make_in(tmp.path(), &tmp.path().join("none/cache")), Ok(()));
        assert!(!tmp.path().join("none").exists());
    }
}
