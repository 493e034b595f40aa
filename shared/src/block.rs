//! Names of transformer blocks: an index, a half-open span, and the module uid under which the
//! swarm knows a block.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Largest number of blocks of one model that any part of Sepal handles (the largest published
/// models have 126).
pub const MAX_BLOCKS: u32 = 4096;

/// Longest accepted module uid in bytes; Hub names are at most 96 bytes, an index adds a handful.
pub const MAX_UID_BYTES: usize = 256;

/// Zero-based index of a transformer block within its model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct BlockIndex(pub u32);

impl fmt::Display for BlockIndex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Half-open range of blocks `start..end` that are served together; never empty.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Span {
    start: u32,
    end: u32,
}

/// Why a text or a pair of numbers is no [`Span`] or [`ModuleUid`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BlockError {
    /// The range is empty, reversed or beyond [`MAX_BLOCKS`].
    #[error(
        "invalid block range {start}:{end}: expected START:END with START < END <= {MAX_BLOCKS}"
    )]
    BadSpan {
        /// First block asked for.
        start: u32,
        /// One past the last block asked for.
        end: u32,
    },
    /// The text is not `start:end`.
    #[error("invalid block range {0:?}: expected START:END, for example 0:16")]
    BadSpanText(String),
    /// The text is not `PREFIX.INDEX`.
    #[error("invalid module uid {0:?}: expected PREFIX.INDEX")]
    BadUid(String),
}

impl Span {
    /// The span `start..end`.
    ///
    /// # Errors
    /// [`BlockError::BadSpan`] unless `start < end <= MAX_BLOCKS`.
    pub fn new(start: u32, end: u32) -> Result<Span, BlockError> {
        if start < end && end <= MAX_BLOCKS {
            Ok(Span { start, end })
        } else {
            Err(BlockError::BadSpan { start, end })
        }
    }

    /// First block.
    pub fn start(self) -> BlockIndex {
        BlockIndex(self.start)
    }

    /// One past the last block.
    pub fn end(self) -> BlockIndex {
        BlockIndex(self.end)
    }

    /// Number of blocks, at least 1.
    pub fn block_count(self) -> usize {
        (self.end - self.start) as usize
    }

    /// Whether `block` lies in the span.
    pub fn contains(self, block: BlockIndex) -> bool {
        (self.start..self.end).contains(&block.0)
    }

    /// Position of `block` within the span, counted from 0.
    pub fn local(self, block: BlockIndex) -> Option<usize> {
        self.contains(block).then(|| (block.0 - self.start) as usize)
    }

    /// The blocks in order.
    pub fn blocks(self) -> impl ExactSizeIterator<Item = BlockIndex> {
        (self.start..self.end).map(BlockIndex)
    }
}

/// The longest run of blocks among ascending numbers, the first of several; `None` without any.
pub fn longest_run(blocks: impl IntoIterator<Item = u32>) -> Option<Span> {
    let mut runs: Vec<Span> = Vec::new();
    for block in blocks {
        // No model has a block beyond the largest number.
        let Ok(one) = Span::new(block, block.saturating_add(1)) else {
            break;
        };
        match runs.last_mut().filter(|run| run.end == block) {
            Some(run) => run.end = one.end,
            None => runs.push(one),
        }
    }
    // Of equal ones, `max_by_key` gives the last.
    runs.into_iter().rev().max_by_key(|run| run.block_count())
}

impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.start, self.end)
    }
}

impl FromStr for Span {
    type Err = BlockError;

    fn from_str(text: &str) -> Result<Span, BlockError> {
        let bad = || BlockError::BadSpanText(text.chars().take(40).collect());
        let (start, end) = text.split_once(':').ok_or_else(bad)?;
        let number = |s: &str| s.trim().parse::<u32>().map_err(|_| bad());
        Span::new(number(start)?, number(end)?)
    }
}

/// Name of one block in the swarm, `PREFIX.INDEX` (petals `data_structures.py`, `ModuleUID`). The
/// prefix holds neither a dot nor a space, since several uids are joined with spaces.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ModuleUid {
    prefix: String,
    index: BlockIndex,
}

impl ModuleUid {
    /// The uid of block `index` under `prefix`.
    ///
    /// # Errors
    /// [`BlockError::BadUid`] when the prefix is empty, too long, or holds a dot or white space.
    pub fn new(prefix: &str, index: BlockIndex) -> Result<ModuleUid, BlockError> {
        if is_prefix(prefix) {
            Ok(ModuleUid { prefix: prefix.to_owned(), index })
        } else {
            Err(BlockError::BadUid(format!("{prefix}.{index}")))
        }
    }

    /// The DHT prefix of the model.
    pub fn prefix(&self) -> &str {
        &self.prefix
    }

    /// The block.
    pub fn index(&self) -> BlockIndex {
        self.index
    }
}

/// Whether `prefix` may be a DHT prefix: not empty, no dot, no white space, at most
/// [`MAX_UID_BYTES`] with an index.
pub fn is_prefix(prefix: &str) -> bool {
    !prefix.is_empty()
        && prefix.len() < MAX_UID_BYTES - 11
        && !prefix.contains(|c: char| c == '.' || c.is_whitespace())
}

impl fmt::Display for ModuleUid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.prefix, self.index)
    }
}

impl FromStr for ModuleUid {
    type Err = BlockError;

    fn from_str(text: &str) -> Result<ModuleUid, BlockError> {
        let bad = || BlockError::BadUid(text.chars().take(80).collect());
        let (prefix, index) = text.rsplit_once('.').ok_or_else(bad)?;
        if index.is_empty() || !index.bytes().all(|b| b.is_ascii_digit()) {
            return Err(bad());
        }
        let index = index.parse().map_err(|_| bad())?;
        ModuleUid::new(prefix, BlockIndex(index)).map_err(|_| bad())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn span_reads_start_and_end() {
        let span: Span = "2:6".parse().unwrap();
        assert_eq!(
            (span.block_count(), span.local(BlockIndex(5)), span.local(BlockIndex(6))),
            (4, Some(3), None)
        );
        assert_eq!(span.to_string(), "2:6");
    }

    #[test]
    fn the_longest_run_is_the_first_of_equal_ones() {
        let run = |blocks: &[u32]| {
            longest_run(blocks.iter().copied()).map_or("none".to_owned(), |run| run.to_string())
        };
        assert_eq!(run(&[0, 1, 4, 5, 8]), "0:2");
        assert_eq!(run(&[1, 3, 4, 5]), "3:6");
        assert_eq!(run(&[7]), "7:8");
        assert_eq!(
            (run(&[]), run(&[MAX_BLOCKS, u32::MAX])),
            ("none".to_owned(), "none".to_owned())
        );
    }

    #[test]
    fn bad_spans_name_the_value_and_the_form() {
        for text in ["", "3", "a:b", "4:4", "5:2", "0:99999999999", "-1:3", "0:5000"] {
            let error = text.parse::<Span>().unwrap_err().to_string();
            assert!(error.contains("START:END"), "{error}");
        }
    }

    #[test]
    fn uid_splits_at_the_last_dot_and_refuses_dots_in_the_prefix() {
        let uid: ModuleUid = "tiny-llama-hf.12".parse().unwrap();
        assert_eq!((uid.prefix(), uid.index()), ("tiny-llama-hf", BlockIndex(12)));
        for text in ["", "x", ".1", "a.b.1", "a b.1", "a.+1", "a.", "a.99999999999"] {
            assert!(text.parse::<ModuleUid>().is_err(), "{text:?}");
        }
    }
}
