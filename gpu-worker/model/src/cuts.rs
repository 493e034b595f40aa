//! How the blocks of a model were cut among devices, and how the ranks of a group share a block:
//! decided at the first start, kept in files of the cache folder, and used again at every later
//! start.
//!
//! The manifest cannot hold the decisions: it is written after the cut, for one span of one
//! instance, and its folder is removed when the instance ends. The files are for all starts, and for
//! all spans of the same length.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::time::Duration;

use shared::block::MAX_BLOCKS;
use shared::files::EntryFile;
use shared::model::ModelFacts;
use tracing::warn;

use crate::shards::Shares;

/// Longest wait for another server of this machine that writes the file.
const LONGEST_WAIT: Duration = Duration::from_secs(5);

/// Most models and sets of devices in the file, and most cuts of each.
const MAX_ENTRIES: usize = 256;
const MAX_CUTS: usize = 64;

/// Blocks of each group of devices, in their order; the last groups may be left out.
pub type Cut = Vec<u32>;

/// The decisions for one model on some devices.
#[derive(Clone, Debug)]
pub struct CutFile {
    file: EntryFile,
    key: String,
    devices: usize,
}

impl CutFile {
    /// The decisions for `model` on `devices` (names, one for each group), in `folder`.
    pub fn new(folder: &Path, model: &ModelFacts, devices: &[String]) -> CutFile {
        CutFile {
            file: EntryFile::new(folder, "cuts", 1),
            key: key(model, devices),
            devices: devices.len(),
        }
    }

    /// Every earlier decision, one for each number of blocks; none if the file is damaged.
    pub fn read(&self) -> Vec<Cut> {
        let mut entries: BTreeMap<String, Vec<Cut>> = self.file.read();
        let mut cuts = entries.remove(&self.key).unwrap_or_default();
        cuts.retain(|cut| self.is_sane(cut));
        cuts.truncate(MAX_CUTS);
        cuts
    }

    /// Keeps a decision, unless there is one for as many blocks.
    ///
    /// # Errors
    /// When the file cannot be written; the next start decides anew.
    pub fn keep(&self, cut: &[u32]) -> io::Result<()> {
        if !self.is_sane(cut) {
            return Ok(());
        }
        let Some(_lock) = self.file.lock(LONGEST_WAIT)? else {
            return Err(io::ErrorKind::TimedOut.into());
        };
        let mut cuts = self.read();
        if cuts.iter().any(|known| blocks(known) == blocks(cut)) {
            return Ok(());
        }
        cuts.truncate(MAX_CUTS - 1);
        cuts.insert(0, cut.to_vec());
        let mut entries: BTreeMap<String, Vec<Cut>> = self.file.read();
        entries.remove(&self.key);
        while entries.len() >= MAX_ENTRIES && entries.pop_first().is_some() {}
        entries.insert(self.key.clone(), cuts);
        self.file.write(&entries)
    }

    fn is_sane(&self, cut: &[u32]) -> bool {
        let fits = (1..=self.devices).contains(&cut.len());
        fits && !cut.contains(&0) && blocks(cut) <= u64::from(MAX_BLOCKS)
    }
}

/// The decision how the devices of a group share a block of one model.
#[derive(Clone, Debug)]
pub struct ShareFile {
    file: EntryFile,
    key: String,
}

impl ShareFile {
    /// The decision for `model` on a group of `devices` (their names in the order of ranks), in
    /// `folder`.
    pub fn new(folder: &Path, model: &ModelFacts, devices: &[String]) -> ShareFile {
        ShareFile { file: EntryFile::new(folder, "shares", 1), key: key(model, devices) }
    }

    /// The earlier decision, unless there is none or it does not `fit` the model; else that of
    /// `decide`, which is kept. A file that cannot be written is logged: the next start decides
    /// anew.
    ///
    /// # Errors
    /// Those of `decide`.
    pub fn shares<E>(
        &self,
        fit: impl Fn(&Shares) -> bool,
        decide: impl FnOnce() -> Result<Shares, E>,
    ) -> Result<Shares, E> {
        // Servers that start together decide one after the other, and alike.
        let lock = self.file.lock(LONGEST_WAIT);
        let mut entries: BTreeMap<String, Shares> = self.file.read();
        if let Some(kept) = entries.remove(&self.key).filter(fit) {
            return Ok(kept);
        }
        let shares = decide()?;
        while entries.len() >= MAX_ENTRIES && entries.pop_first().is_some() {}
        entries.insert(self.key.clone(), shares.clone());
        let written = match lock {
            Ok(Some(_lock)) => self.file.write(&entries),
            Ok(None) => Err(io::ErrorKind::TimedOut.into()),
            Err(error) => Err(error),
        };
        if let Err(error) = written {
            let file = self.file.path().display();
            warn!(%error, %file, "cannot save how a group shares a block; a restart decides anew");
        }
        Ok(shares)
    }
}

/// What a decision holds for. Parts are written with their quotes, so that no two keys read the
/// same.
fn key(model: &ModelFacts, devices: &[String]) -> String {
    let (name, dtype, quant) = (&model.name, model.dtype.name(), model.quant_type.name());
    format!("model={name:?} dtype={dtype:?} quant={quant:?} devices={devices:?}")
}

fn blocks(cut: &[u32]) -> u64 {
    cut.iter().map(|&count| u64::from(count)).sum()
}

#[cfg(test)]
mod tests {
    use shared::config::QuantType;
    use shared::dtype::DType;

    use super::*;

    fn facts(quant_type: QuantType) -> ModelFacts {
        let (name, dtype) = ("owner/model".into(), DType::Bf16);
        ModelFacts { name, num_blocks: 16, dtype, quant_type, ..testkit::facts::facts() }
    }

    fn names(count: usize) -> Vec<String> {
        (0..count).map(|ordinal| format!("cuda:{ordinal} of H200")).collect()
    }

    #[test]
    fn a_decision_is_kept_for_its_model_and_devices_and_is_not_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let file = |quant, devices| CutFile::new(folder.path(), &facts(quant), &names(devices));
        let first = file(QuantType::None, 2);
        assert_eq!(first.read(), [[0u32; 0]; 0]);
        first.keep(&[12, 4]).unwrap();
        first.keep(&[8, 8]).unwrap();
        first.keep(&[5, 3]).unwrap();
        // As at the next start.
        let again = file(QuantType::None, 2);
        assert_eq!(again.read(), [vec![5, 3], vec![12, 4]]);
        assert_eq!(file(QuantType::Nf4, 2).read(), [[0u32; 0]; 0]);
        assert_eq!(file(QuantType::None, 3).read(), [[0u32; 0]; 0]);
        file(QuantType::Nf4, 2).keep(&[1, 15]).unwrap();
        assert_eq!(again.read().len(), 2);
    }

    #[test]
    fn shares_are_decided_once_for_a_model_and_devices() {
        let folder = tempfile::tempdir().unwrap();
        let shares = |heads: [usize; 2]| Shares { heads: heads.to_vec(), columns: vec![64, 64] };
        let decided = |quant, devices, heads| {
            let file = ShareFile::new(folder.path(), &facts(quant), &names(devices));
            let decide = || Ok::<_, ()>(shares(heads));
            file.shares(|kept| kept.heads.iter().sum::<usize>() == 4, decide).unwrap()
        };
        assert_eq!(decided(QuantType::None, 2, [1, 3]), shares([1, 3]));
        // As at the next start, when the speeds look different.
        assert_eq!(decided(QuantType::None, 2, [2, 2]), shares([1, 3]));
        assert_eq!(decided(QuantType::Nf4, 2, [2, 2]), shares([2, 2]));
        assert_eq!(decided(QuantType::None, 3, [3, 1]), shares([3, 1]));
        assert_eq!(decided(QuantType::None, 2, [2, 2]), shares([1, 3]), "others are kept beside");
        // What does not fit the model, or is no decision at all, counts for nothing.
        let path = folder.path().join("sepal_shares_v1.json");
        let text = std::fs::read_to_string(&path).unwrap();
        for damaged in [text.replace('3', "30"), String::new(), "{\"x\": 7}".to_owned()] {
            std::fs::write(&path, damaged).unwrap();
            assert_eq!(decided(QuantType::None, 2, [2, 2]), shares([2, 2]));
        }
        let refused = ShareFile::new(folder.path(), &facts(QuantType::Int8), &names(2));
        assert_eq!(refused.shares(|_| true, || Err("no")), Err("no"));
    }

    #[test]
    fn a_damaged_file_or_a_cut_that_makes_no_sense_decides_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let file = CutFile::new(folder.path(), &facts(QuantType::None), &names(2));
        let path = folder.path().join("sepal_cuts_v1.json");
        let entry = |cuts: &str| format!("{{{:?}: {cuts}}}", file.key);
        for damaged in [
            String::new(),
            "{".to_owned(),
            "[[12, 4]]".to_owned(),
            entry("[[-1, 17]]"),
            entry("[[0, 16]]"),
            entry("[[]]"),
            entry("[[4, 4, 8]]"),
            entry("[[4294967295, 4294967295]]"),
        ] {
            std::fs::write(&path, &damaged).unwrap();
            assert_eq!(file.read(), [[0u32; 0]; 0], "{damaged}");
        }
        file.keep(&[0, 16]).unwrap();
        file.keep(&[12, 4]).unwrap();
        assert_eq!(file.read(), [vec![12, 4]]);
    }
}
