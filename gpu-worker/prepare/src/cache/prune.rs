//! Which files of the cache go.

use std::fs::File;
use std::path::Path;
use std::time::{Duration, Instant, SystemTime};

use super::Said;
use super::config::PruneConfig;
use super::inventory::{Inventory, Item};
use crate::disk_cache::{self, DiskCache};
use crate::error::PrepareError;
use crate::repository::map_repo;
use crate::table::decimal;

/// Whole files, of checkpoints of PyTorch, take the lock for as long as their download.
const LONGEST_WAIT: Duration = Duration::from_secs(600);

/// Deletes what `wanted` selects, except for files in use.
pub(super) fn run(folder: &Path, wanted: &PruneConfig) -> Result<Said, PrepareError> {
    // Nobody counts and deletes at the same time.
    let _lock = match folder.is_dir() && !wanted.dry_run {
        true => Some(lock(folder, LONGEST_WAIT, &mut |said| eprintln!("sepal: {said}"))?),
        false => None,
    };
    let inventory = Inventory::read(folder)?;
    let selected = select(&inventory.items, wanted, SystemTime::now());
    let (mut files, mut bytes) = (0usize, 0u64);
    let mut busy =
        inventory.items.iter().filter(|item| meets(item, wanted) && item.is_in_use).count();
    for item in selected {
        if !wanted.dry_run && !disk_cache::delete(&item.path) {
            busy += 1;
            continue;
        }
        (files, bytes) = (files + 1, bytes.saturating_add(item.bytes));
    }
    if !wanted.dry_run {
        disk_cache::remove_empty_folders(folder);
    }
    let verb = if wanted.dry_run { "would delete" } else { "deleted" };
    let kept = match busy {
        0 => String::new(),
        files => format!("; {files} files are in use and stay"),
    };
    let size = decimal(bytes);
    Ok(Said::well(format!("{verb} {files} files with {size} in {}{kept}\n", folder.display())))
}

/// The lock of the folder. `say` is told once when there is somebody to wait for.
fn lock(
    folder: &Path,
    longest_wait: Duration,
    say: &mut dyn FnMut(&str),
) -> Result<File, PrepareError> {
    let mut since: Option<Instant> = None;
    DiskCache::new(folder, None).lock(&mut |_| {
        if since.is_none() {
            say("waiting for a download to end, which uses the cache folder");
        }
        match since.get_or_insert_with(Instant::now).elapsed() < longest_wait {
            true => Ok(()),
            false => Err(PrepareError::Busy { folder: folder.to_owned(), waited: longest_wait }),
        }
    })
}

/// The files to delete, the least recently used first. Small files of the Hub, without which nothing
/// serves offline, go only with all other files of their model.
fn select<'a>(items: &'a [Item], wanted: &PruneConfig, now: SystemTime) -> Vec<&'a Item> {
    let old = |item: &Item| match wanted.older_than {
        Some(limit) => now.duration_since(item.used).unwrap_or(Duration::ZERO) >= limit,
        None => true,
    };
    let mut candidates: Vec<&Item> =
        items.iter().filter(|item| meets(item, wanted) && old(item) && !item.is_in_use).collect();
    candidates.sort_by_key(|item| (disk_cache::is_small(&item.path, item.bytes), item.used));
    if let Some(most) = wanted.max_bytes {
        let total: u64 = items.iter().map(|item| item.bytes).sum();
        let mut excess = total.saturating_sub(most);
        candidates.retain(|item| {
            let goes = excess > 0;
            excess = excess.saturating_sub(if goes { item.bytes } else { 0 });
            goes
        });
    }
    let goes = |item: &Item| candidates.iter().any(|other| other.path == item.path);
    let stays: Vec<&str> = items
        .iter()
        .filter(|item| !disk_cache::is_small(&item.path, item.bytes) && !goes(item))
        .map(|item| item.model.as_str())
        .collect();
    let is_kept = |item: &&Item| {
        disk_cache::is_small(&item.path, item.bytes) && stays.contains(&item.model.as_str())
    };
    let kept: Vec<&Path> =
        candidates.iter().copied().filter(is_kept).map(|item| item.path.as_path()).collect();
    candidates.retain(|item| !kept.contains(&item.path.as_path()));
    candidates
}

/// Whether a file is of the model that was named, if one was.
fn meets(item: &Item, wanted: &PruneConfig) -> bool {
    wanted.model.as_ref().is_none_or(|model| item.model == map_repo(model))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn item(model: &str, name: &str, bytes: u64, age_s: u64, now: SystemTime) -> Item {
        Item {
            path: Path::new("/cache").join(name),
            bytes,
            used: now - Duration::from_secs(age_s),
            model: model.to_owned(),
            revision: None,
            format: "checkpoint".to_owned(),
            block: None,
            is_in_use: false,
        }
    }

    #[test]
    fn conditions_are_met_together_and_files_in_use_stay() {
        let now = SystemTime::now();
        let mut items = vec![
            item("org/a", "a0", 2 << 20, 500, now),
            item("org/a", "a1", 2 << 20, 100, now),
            item("org/b", "b0", 2 << 20, 900, now),
            item("org/b", "b1", 2 << 20, 950, now),
        ];
        items[2].is_in_use = true;
        let names = |wanted: PruneConfig| -> Vec<String> {
            let selected = select(&items, &wanted, now).into_iter();
            selected.map(|item| item.path.file_name().unwrap().to_str().unwrap().into()).collect()
        };
        let of = |model: &str| Some(model.to_owned());
        let all = PruneConfig::default();
        assert_eq!(names(PruneConfig { model: of("org/a"), ..all.clone() }), ["a0", "a1"]);
        let older_than = Some(Duration::from_secs(400));
        assert_eq!(names(PruneConfig { older_than, ..all.clone() }), ["b1", "a0"]);
        let max = |bytes| PruneConfig { max_bytes: Some(bytes), ..all.clone() };
        assert_eq!(names(max(8 << 20)), [""; 0], "it fits");
        assert_eq!(names(max((8 << 20) - 1)), ["b1"]);
        assert_eq!(names(max(3 << 20)), ["b1", "a0", "a1"]);
        let both = PruneConfig { older_than, model: of("org/a"), ..max(0) };
        assert_eq!(names(both), ["a0"]);
    }

    #[test]
    fn a_download_is_waited_for_with_a_word_and_not_for_ever() {
        let folder = tempfile::tempdir().unwrap();
        let held = DiskCache::new(folder.path(), None).lock(&mut |_| Ok(())).unwrap();
        let dry = PruneConfig { dry_run: true, ..PruneConfig::default() };
        assert!(run(folder.path(), &dry).unwrap().text.contains("would delete 0 files"));
        let mut said = Vec::new();
        let wait = Duration::from_millis(250);
        let refused =
            lock(folder.path(), wait, &mut |words| said.push(words.to_owned())).unwrap_err();
        assert_eq!(said.len(), 1, "{said:?}");
        assert!(refused.to_string().contains("try again"), "{refused}");
        drop(held);
        // A process that another test is starting has a copy of every descriptor for a moment.
        assert!(lock(folder.path(), Duration::from_secs(60), &mut |_| ()).is_ok());
    }

    #[test]
    fn small_files_of_the_hub_go_with_the_last_of_their_model() {
        let now = SystemTime::now();
        let items = [
            item("org/a", "models--org--a/blobs/config", 700, 900, now),
            item("org/a", "models--org--a/sepal/c/block-0.safetensors", 2 << 20, 500, now),
            item("org/a", "models--org--a/sepal/c/block-1.safetensors", 2 << 20, 100, now),
        ];
        let count = |wanted: PruneConfig| select(&items, &wanted, now).len();
        let older = |seconds| PruneConfig {
            older_than: Some(Duration::from_secs(seconds)),
            ..PruneConfig::default()
        };
        assert_eq!((count(older(400)), count(older(50))), (1, 3));
    }
}
