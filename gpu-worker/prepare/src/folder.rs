//! `sepal.json` in a model folder that Sepal wrote: which model it is, and which of its blocks are
//! there, in which format. It is written last, so that a folder without it was not finished.
//!
//! Such a folder may come from another machine. What it says is checked like a checkpoint.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;

use serde::{Deserialize, Serialize};
use shared::block::{Span, longest_run};
use shared::config::{PrepareConfig, QuantType};
use shared::dtype::DType;
use shared::files::write_atomically;

use crate::checkpoint::read_bounded;
use crate::error::PrepareError;
use crate::repository::is_repo_id;

/// Name of the file.
pub const RECORD: &str = "sepal.json";

/// Raised with every change of the file.
const VERSION: u32 = 1;

/// Longest accepted file: 4,096 blocks with a sum each need a tenth of it.
const MAX_RECORD_BYTES: u64 = 8 << 20;

/// Longest accepted name of a model.
const MAX_NAME_BYTES: usize = 256;

/// What is in a folder.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FolderRecord {
    version: u32,
    /// Name of the model for people: a repository id, or that of the folder that it comes from.
    pub model: String,
    /// Repository id, of a model of the Hub.
    pub repository: Option<String>,
    pub commit: Option<String>,
    /// Blocks of the whole model.
    pub num_blocks: u32,
    /// How the blocks are stored; `None` = as in the checkpoint.
    pub format: Option<StoredFormat>,
    /// The blocks that are here.
    pub blocks: BTreeMap<u32, BlockFile>,
}

/// How converted blocks are stored.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoredFormat {
    /// Version of the layout of prepared blocks ([`crate::store::FORMAT_VERSION`]).
    pub layout: u32,
    /// `int8` or `nf4`.
    pub quant_type: String,
    /// Type of hidden states and of what is not quantized.
    pub dtype: String,
}

/// The file of a block.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlockFile {
    /// Its name in the folder.
    pub file: String,
    pub bytes: u64,
}

impl FolderRecord {
    /// A record without blocks.
    pub fn new(model: String, num_blocks: u32, format: Option<StoredFormat>) -> FolderRecord {
        FolderRecord {
            version: VERSION,
            model,
            repository: None,
            commit: None,
            num_blocks,
            format,
            blocks: BTreeMap::new(),
        }
    }

    /// The record of `folder`; `None` if it has none.
    ///
    /// # Errors
    /// [`PrepareError::BadFile`] when it makes no sense or is of another version.
    pub fn read(folder: &Path) -> Result<Option<FolderRecord>, PrepareError> {
        let path = folder.join(RECORD);
        if !path.is_file() {
            return Ok(None);
        }
        let json = read_bounded(&path, MAX_RECORD_BYTES)?;
        let bad = |reason: String| PrepareError::bad_file(&path, reason);
        let record: FolderRecord = serde_json::from_slice(&json)
            .map_err(|error| bad(format!("is no record of a folder of Sepal: {error}")))?;
        if record.version != VERSION {
            return Err(bad(format!(
                "has version {}, this build reads {VERSION}; write the folder again with this build",
                record.version
            )));
        }
        if let Some(block) = record.blocks.iter().find(|(_, block)| !is_plain(&block.file)) {
            let shown: String = block.1.file.chars().take(100).collect();
            return Err(bad(format!("names {shown:?}, which is no file of this folder")));
        }
        let is_name =
            record.model.len() <= MAX_NAME_BYTES && !record.model.contains(char::is_control);
        if !is_name {
            return Err(bad("names a model that nobody can read".to_owned()));
        }
        if record.repository.as_deref().is_some_and(|repository| !is_repo_id(repository)) {
            return Err(bad("names a repository that is none".to_owned()));
        }
        Ok(Some(record))
    }

    /// Writes the record of `folder`, whole or not at all.
    ///
    /// # Errors
    /// [`PrepareError::Write`].
    pub fn write(&self, path: &Path) -> Result<(), PrepareError> {
        let json =
            serde_json::to_vec_pretty(self).map_err(|e| PrepareError::write(path, e.into()))?;
        write_atomically(path, |file| file.write_all(&json))
            .map_err(|e| PrepareError::write(path, e))
    }

    /// The blocks that are here, as ranges.
    pub fn ranges(&self) -> String {
        ranges(self.blocks.keys().copied())
    }

    /// The command that serves the folder `out` as far as one server can: what it holds in a row.
    pub fn serve_command(&self, out: &Path) -> String {
        let whole = format!("sepal serve {}", out.display());
        match longest_run(self.blocks.keys().copied()) {
            Some(run) if run.block_count() < self.num_blocks as usize => {
                format!("{whole} --block_indices {run}")
            }
            _ => whole,
        }
    }

    /// Checks that all blocks of `span` are in `folder`.
    ///
    /// # Errors
    /// [`PrepareError::BadFile`] that names those that are.
    pub fn check_span(&self, folder: &Path, span: Span) -> Result<(), PrepareError> {
        let missing = span.blocks().find(|block| !self.blocks.contains_key(&block.0));
        if missing.is_none() {
            return Ok(());
        }
        Err(PrepareError::bad_file(
            folder,
            format!(
                "holds blocks {} of {}, and not all of {span}; serve blocks that it holds (--block_indices START:END), or \
                 give the whole model",
                self.ranges(),
                self.num_blocks
            ),
        ))
    }

    /// Format and type of a converted folder; `None` when the blocks are as in the checkpoint.
    ///
    /// # Errors
    /// [`PrepareError::BadFile`] when this build does not know the format, or the operator asked for
    /// another (`--quant_type`, `--torch_dtype`).
    pub fn served_format(
        &self,
        folder: &Path,
        layout: u32,
        config: &PrepareConfig,
    ) -> Result<Option<(QuantType, DType)>, PrepareError> {
        let Some(format) = &self.format else {
            return Ok(None);
        };
        let refuse = |reason: String| PrepareError::bad_file(folder, reason);
        if format.layout != layout {
            return Err(refuse(format!(
                "was converted with layout {} of prepared blocks, this build maps {layout}; convert the model again",
                format.layout
            )));
        }
        let unknown =
            |why: String| refuse(format!("has a format that this build does not know: {why}"));
        let quant: QuantType = format.quant_type.parse().map_err(unknown)?;
        let dtype: DType = format.dtype.parse().map_err(|e| refuse(format!("{RECORD}: {e}")))?;
        if let Some(asked) = config.quant_type.named().filter(|asked| *asked != quant) {
            return Err(refuse(format!(
                "was converted to {quant} and cannot be served as {asked}; leave --quant_type {asked} out, or give the \
                 original model"
            )));
        }
        if let Some(asked) = config.dtype.filter(|asked| *asked != dtype) {
            return Err(refuse(format!(
                "was converted for {dtype} and cannot be served in {asked}; leave --torch_dtype {asked} out, or give the \
                 original model"
            )));
        }
        Ok(Some((quant, dtype)))
    }
}

/// Whether it names a file beside the record.
fn is_plain(name: &str) -> bool {
    !name.is_empty() && !name.contains(['/', '\\', '\0']) && name != "." && name != ".."
}

/// Ascending numbers as `0:4, 6:7`; `none` without any.
pub fn ranges(numbers: impl IntoIterator<Item = u32>) -> String {
    let mut spans: Vec<(u32, u32)> = Vec::new();
    for number in numbers {
        match spans.last_mut() {
            Some((_, end)) if *end == number => *end = number.saturating_add(1),
            _ => spans.push((number, number.saturating_add(1))),
        }
    }
    let spans: Vec<String> = spans.iter().map(|(start, end)| format!("{start}:{end}")).collect();
    if spans.is_empty() { "none".to_owned() } else { spans.join(", ") }
}

#[cfg(test)]
mod tests {
    use testkit::configs::prepare_config;

    use shared::config::QuantChoice::{self, ByDevice, Named};

    use super::*;

    fn record() -> FolderRecord {
        let format = StoredFormat { layout: 2, quant_type: "nf4".into(), dtype: "bfloat16".into() };
        let mut record = FolderRecord::new("org/name".into(), 8, Some(format));
        for block in [0, 1, 4] {
            let file = format!("block-{block}.safetensors");
            record.blocks.insert(block, BlockFile { file, bytes: 7 });
        }
        record
    }

    fn config(quant_type: QuantChoice) -> PrepareConfig {
        PrepareConfig { quant_type, ..prepare_config("m", "/nowhere") }
    }

    #[test]
    fn a_record_is_read_back_and_names_the_blocks_that_are_there() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(FolderRecord::read(folder.path()).unwrap(), None);
        record().write(&folder.path().join(RECORD)).unwrap();
        let read = FolderRecord::read(folder.path()).unwrap().unwrap();
        assert_eq!((read.ranges().as_str(), &read), ("0:2, 4:5", &record()));
        assert_eq!(ranges([]), "none");
        let mut whole = record();
        let command = |record: &FolderRecord| record.serve_command(Path::new("/models/m"));
        assert_eq!(command(&whole), "sepal serve /models/m --block_indices 0:2");
        whole.num_blocks = 2;
        whole.blocks.remove(&4);
        assert_eq!(command(&whole), "sepal serve /models/m");
        let check = |start, end| {
            read.check_span(folder.path(), Span::new(start, end).unwrap())
                .map_err(|e| e.to_string())
        };
        assert_eq!((check(0, 2), check(4, 5)), (Ok(()), Ok(())));
        let refused = check(1, 3).unwrap_err();
        for part in ["holds blocks 0:2, 4:5 of 8", "1:3", "--block_indices"] {
            assert!(refused.contains(part), "{refused}");
        }
    }

    #[test]
    fn another_format_than_that_of_the_folder_is_refused() {
        let folder = Path::new("/models/llama-nf4");
        let of = |config: &PrepareConfig| record().served_format(folder, 2, config);
        let nf4 = Some((QuantType::Nf4, DType::Bf16));
        assert_eq!(of(&config(ByDevice(QuantType::None))).unwrap(), nf4);
        assert_eq!(of(&config(Named(QuantType::Nf4))).unwrap(), nf4);
        let refused = of(&config(Named(QuantType::Int8))).unwrap_err().to_string();
        for part in ["/models/llama-nf4", "converted to nf4", "--quant_type int8"] {
            assert!(refused.contains(part), "{refused}");
        }
        let other = PrepareConfig { dtype: Some(DType::F16), ..config(ByDevice(QuantType::None)) };
        assert!(of(&other).unwrap_err().to_string().contains("--torch_dtype float16"));
        let newer = record().served_format(folder, 3, &config(ByDevice(QuantType::None)));
        assert!(newer.unwrap_err().to_string().contains("layout 2"));
        let plain = FolderRecord::new("m".into(), 1, None);
        assert_eq!(plain.served_format(folder, 2, &config(Named(QuantType::Int8))).unwrap(), None);
    }

    #[test]
    fn a_record_that_makes_no_sense_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(RECORD);
        let mut outside = record();
        outside.blocks.insert(2, BlockFile { file: "../secret".into(), bytes: 1 });
        let mut future = record();
        future.version = 9;
        let mut stranger = record();
        stranger.repository = Some("../..".into());
        let mut unreadable = record();
        unreadable.model = "\u{1b}[2J".into();
        let cases = [
            (outside, "../secret"),
            (future, "version 9"),
            (stranger, "repository"),
            (unreadable, "nobody can read"),
        ];
        for (record, words) in cases {
            record.write(&path).unwrap();
            let refused = FolderRecord::read(folder.path()).unwrap_err().to_string();
            assert!(refused.contains(words), "{refused}");
        }
        std::fs::write(&path, "{").unwrap();
        assert!(FolderRecord::read(folder.path()).is_err());
    }
}
