//! What `sepal plan` is told of a model: its [`Survey`] in every format, and what its checkpoint takes.

use std::collections::BTreeMap;

use shared::block::Span;
use shared::config::{Device, PrepareConfig, QuantType, SpanChoice, WorkerConfig};
use shared::exit::ExitReason;
use shared::survey::{Capacity, Survey};

/// What is to be surveyed.
#[derive(Clone, Copy, Debug)]
pub struct SurveyRequest<'a> {
    pub prepare: &'a PrepareConfig,
    /// The devices, in groups that share every block.
    pub groups: &'a [Vec<Device>],
    /// Settings of their workers.
    pub worker: &'a WorkerConfig,
    /// The formats to survey it in.
    pub formats: &'a [QuantType],
    /// Which blocks may be served.
    pub choice: SpanChoice,
}

/// Why there is no survey: the reason for an exit code, and a sentence for the operator.
pub type SurveyFailure = (ExitReason, String);

/// A model in every format that was asked for, and its checkpoint.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelSurvey {
    /// Where it comes from: a folder, or a repository with its commit.
    pub source: CheckpointSource,
    /// One for each format.
    pub formats: Vec<FormatSurvey>,
    /// What the surveyed blocks take of the checkpoint.
    pub blocks: BTreeMap<u32, BlockSource>,
}

/// Where a checkpoint comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CheckpointSource {
    /// A folder of this machine.
    Folder,
    /// The Hub, at this commit.
    Hub { commit: String },
}

/// A model in one format, with an estimate of its speed.
#[derive(Clone, Debug, PartialEq)]
pub struct FormatSurvey {
    /// How matrices are stored.
    pub quant_type: QuantType,
    /// What decides over the blocks.
    pub survey: Survey,
    /// The speed of the slowest group as far as it can be computed; `None` where nothing is known.
    pub estimate: Option<Estimate>,
}

/// A speed that nobody measured on this model.
#[derive(Clone, Debug, PartialEq)]
pub struct Estimate {
    pub capacity: Capacity,
    /// What it is computed from, for people.
    pub basis: String,
}

/// What one block takes of the checkpoint.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BlockSource {
    /// Bytes of its tensors as they are stored.
    pub stored_bytes: u64,
    /// What must be fetched for it: names and bytes of files. Blocks may share a file.
    pub missing: BTreeMap<String, u64>,
}

impl ModelSurvey {
    /// Bytes to fetch for the blocks of `span`, each file once.
    pub fn download_bytes(&self, span: Span) -> u64 {
        let blocks = self.blocks.range(span.start().0..span.end().0);
        let files: BTreeMap<&str, u64> = blocks
            .flat_map(|(_, block)| &block.missing)
            .map(|(name, bytes)| (name.as_str(), *bytes))
            .collect();
        files.values().fold(0, |sum, bytes| sum.saturating_add(*bytes))
    }

    /// Most bytes to fetch for `count` blocks in a row among those that were surveyed.
    pub fn most_download_bytes(&self, count: u32) -> u64 {
        let first = self.blocks.keys().next().copied().unwrap_or(0);
        let end = self.blocks.keys().next_back().map_or(0, |last| last.saturating_add(1));
        let spans = (first..end).filter_map(|start| {
            let stop = start.checked_add(count).filter(|stop| *stop <= end)?;
            Span::new(start, stop).ok()
        });
        spans.map(|span| self.download_bytes(span)).max().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block(missing: &[(&str, u64)]) -> BlockSource {
        let missing = missing.iter().map(|(name, bytes)| ((*name).to_owned(), *bytes)).collect();
        BlockSource { stored_bytes: 10, missing }
    }

    #[test]
    fn files_count_once_and_the_worst_place_decides() {
        let blocks = [
            block(&[("a", 100)]),
            block(&[("a", 100), ("b", 50)]),
            block(&[("b", 50)]),
            block(&[]),
            block(&[("c", u64::MAX)]),
        ];
        let survey = ModelSurvey {
            source: CheckpointSource::Folder,
            formats: Vec::new(),
            blocks: (0..).zip(blocks).collect(),
        };
        let span = |start, end| survey.download_bytes(Span::new(start, end).unwrap());
        assert_eq!((span(0, 1), span(0, 2), span(0, 3), span(3, 4)), (100, 150, 150, 0));
        assert_eq!(span(0, 5), u64::MAX);
        assert_eq!(survey.most_download_bytes(1), u64::MAX);
        let first = ModelSurvey {
            blocks: survey.blocks.range(..4).map(|(k, v)| (*k, v.clone())).collect(),
            ..survey
        };
        assert_eq!((first.most_download_bytes(2), first.most_download_bytes(4)), (150, 150));
        assert_eq!((first.most_download_bytes(0), first.most_download_bytes(5)), (0, 0));
    }
}
