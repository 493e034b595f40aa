//! The cache folder: whether it can be written, and whether the model fits.

use std::path::{Path, PathBuf};

use nix::sys::statvfs::statvfs;
use nix::unistd::{AccessFlags, access};

use super::check::CheckVerdict;
use super::system::size;

/// Bytes that downloads leave free on the disk, as prepare does (`disk_cache.rs`).
const MARGIN: u64 = 1 << 30;

/// The cache folder and its disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CacheFacts {
    pub folder: PathBuf,
    /// Whether it exists already.
    pub exists: bool,
    /// Why nothing can be written there.
    pub fault: Option<String>,
    /// Bytes free on its disk.
    pub free: u64,
}

/// Writes a file in the folder, which goes at once. A folder that does not exist is not made; the
/// one that it would be made in is looked at. Where `private` says why other users can write to the
/// folder, nothing is written.
pub fn observe(folder: &Path, private: Result<(), String>) -> CacheFacts {
    let folder = std::path::absolute(folder).unwrap_or_else(|_| folder.to_owned());
    let nearest = folder.ancestors().find(|path| path.symlink_metadata().is_ok());
    let nearest = nearest.unwrap_or(Path::new("/")).to_owned();
    let exists = nearest == folder;
    let fault = match (private, nearest.is_dir(), exists) {
        (Err(why), ..) => Some(why),
        (Ok(()), false, _) => Some(format!("{} is no folder", nearest.display())),
        (Ok(()), true, true) => tempfile::tempfile_in(&nearest)
            .and_then(|mut file| std::io::Write::write_all(&mut file, &[0; 4096]))
            .err()
            .map(|error| error.to_string()),
        (Ok(()), true, false) => access(&nearest, AccessFlags::W_OK | AccessFlags::X_OK)
            .err()
            .map(|errno| format!("it cannot be made in {}: {}", nearest.display(), errno.desc())),
    };
    let free = statvfs(&nearest).map_or(0, |disk| {
        let (blocks, size): (u64, u64) = (disk.blocks_available(), disk.fragment_size());
        blocks.saturating_mul(size)
    });
    CacheFacts { folder, exists, fault, free }
}

/// What a start may write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DiskNeed {
    /// Nothing worth speaking of: the model is mapped from where it lies.
    Little,
    /// Blocks of a model of so many bytes, if that is known.
    Blocks(Option<u64>),
}

/// Whether the folder can be written, and the disk holds what a start writes there.
pub fn judge(facts: &CacheFacts, need: DiskNeed) -> CheckVerdict {
    let CacheFacts { folder, exists, fault, free } = facts;
    let shown = folder.display();
    if let Some(fault) = fault {
        return CheckVerdict::problem(
            format!("{shown} cannot be written: {fault}"),
            "make it a folder that this user can write to, or choose another --cache_dir",
        );
    }
    let found = match exists {
        true => format!("{shown} can be written, {} are free", size(*free)),
        false => format!("{shown} will be made, {} are free", size(*free)),
    };
    let usable = free.saturating_sub(MARGIN);
    match need {
        DiskNeed::Little => CheckVerdict::ok(found),
        DiskNeed::Blocks(_) if usable == 0 => CheckVerdict::problem(
            format!("{found}: blocks are written only above a margin of {}", size(MARGIN)),
            "free space, or choose another --cache_dir",
        ),
        DiskNeed::Blocks(Some(bytes)) if bytes > usable => CheckVerdict::warning(
            format!("{found}, and the whole model has {}", size(bytes)),
            "serve fewer blocks (--num_blocks), free space, or choose another --cache_dir",
        ),
        DiskNeed::Blocks(_) => CheckVerdict::ok(found),
    }
}

#[cfg(test)]
mod tests {
    use super::super::check::Status;
    use super::*;

    #[test]
    fn a_folder_that_cannot_be_written_is_a_problem() {
        let folder = tempfile::tempdir().unwrap();
        let good = observe(folder.path(), Ok(()));
        assert_eq!(judge(&good, DiskNeed::Little).status, Status::Ok, "{good:?}");
        let missing = observe(&folder.path().join("a/b"), Ok(()));
        assert!(judge(&missing, DiskNeed::Little).found.contains("a/b will be made"));
        assert!(!folder.path().join("a").exists(), "looking makes nothing");
        let file = folder.path().join("file");
        std::fs::write(&file, "").unwrap();
        for path in [file.clone(), file.join("below")] {
            let verdict = judge(&observe(&path, Ok(())), DiskNeed::Little);
            assert_eq!(verdict.status, Status::Problem, "{verdict:?}");
            assert!(verdict.found.contains("file is no folder"), "{verdict:?}");
            assert!(verdict.advice.unwrap().contains("--cache_dir"));
        }
    }

    #[test]
    fn a_folder_that_another_user_can_write_to_is_a_problem() {
        let folder = tempfile::tempdir().unwrap();
        let facts = observe(folder.path(), Err("it belongs to user 7".into()));
        let verdict = judge(&facts, DiskNeed::Little);
        assert_eq!(verdict.status, Status::Problem);
        assert!(verdict.found.contains("it belongs to user 7"), "{verdict:?}");
    }

    #[test]
    fn the_free_space_must_hold_what_a_start_writes() {
        let facts = |free| CacheFacts { folder: "/c".into(), exists: true, fault: None, free };
        let of = |free, need| judge(&facts(free), need).status;
        assert_eq!(of(20 << 30, DiskNeed::Blocks(Some(15 << 30))), Status::Ok);
        assert_eq!(of(15 << 30, DiskNeed::Blocks(Some(15 << 30))), Status::Warning);
        assert_eq!(of(1 << 29, DiskNeed::Blocks(None)), Status::Problem);
        assert_eq!(of(1 << 29, DiskNeed::Little), Status::Ok);
        assert_eq!(of(15 << 30, DiskNeed::Blocks(None)), Status::Ok);
    }
}
