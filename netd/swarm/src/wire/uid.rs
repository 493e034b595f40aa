//! Chains of module uids on the wire: `PREFIX.INDEX` joined by single spaces. Source:
//! `CHAIN_DELIMITER` and `UID_DELIMITER` in Petals' `data_structures.py`.

use shared::block::{BlockError, BlockIndex, ModuleUid};
use thiserror::Error;

/// Uids that a request may chain: as many as the deepest served models have blocks, with room.
pub const MAX_CHAIN: usize = 1024;

/// A text that is no chain of uids of one model.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum UidError {
    /// One uid is malformed.
    #[error(transparent)]
    Malformed(#[from] BlockError),
    /// Two uids name different models.
    #[error("uids of one request name two models: {0} and {1}")]
    Mixed(String, String),
    /// Longer than [`MAX_CHAIN`].
    #[error("a request chains more than {MAX_CHAIN} uids")]
    TooLong,
}

/// The uid of one block, without a check of the prefix.
#[must_use]
pub fn module_uid(prefix: &str, block: u32) -> String {
    format!("{prefix}.{block}")
}

/// The chain of the blocks of `range`.
#[must_use]
pub fn chain(prefix: &str, range: std::ops::Range<u32>) -> String {
    range.map(|block| module_uid(prefix, block)).collect::<Vec<_>>().join(" ")
}

/// Splits a chain into the common prefix and the blocks in the order given. Contiguity is not asked
/// for: servers run the blocks as named.
///
/// # Errors
/// [`UidError`] if a uid is malformed (an empty chain is one empty uid), if prefixes differ, or if
/// the chain is too long.
pub fn parse_chain(chain: &str) -> Result<(String, Vec<BlockIndex>), UidError> {
    let mut prefix: Option<String> = None;
    let mut blocks = Vec::new();
    for text in chain.split(' ') {
        if blocks.len() == MAX_CHAIN {
            return Err(UidError::TooLong);
        }
        let uid: ModuleUid = text.parse()?;
        let common = prefix.get_or_insert_with(|| uid.prefix().to_owned());
        if common != uid.prefix() {
            return Err(UidError::Mixed(common.clone(), uid.prefix().to_owned()));
        }
        blocks.push(uid.index());
    }
    Ok((prefix.unwrap_or_default(), blocks))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn parsed(chain: &str) -> (String, Vec<u32>) {
        let (prefix, blocks) = parse_chain(chain).unwrap();
        (prefix, blocks.into_iter().map(|b| b.0).collect())
    }

    #[test]
    fn chain_round_trips() {
        assert_eq!(chain("tiny", 3..6), "tiny.3 tiny.4 tiny.5");
        assert_eq!(parsed("tiny.3 tiny.4 tiny.5"), ("tiny".into(), vec![3, 4, 5]));
        assert_eq!(parsed("a/b-petals.7"), ("a/b-petals".into(), vec![7]));
        assert_eq!(parsed("tiny.5 tiny.2"), ("tiny".into(), vec![5, 2]));
    }

    #[test]
    fn malformed_chains_are_refused() {
        for chain in [
            "",
            "tiny",
            "tiny.",
            ".3",
            "tiny.+3",
            "a.b.3",
            "tiny.4294967296",
            "tiny.3 ",
            "x.1  x.2",
        ] {
            assert!(matches!(parse_chain(chain), Err(UidError::Malformed(_))), "{chain:?}");
        }
        assert!(matches!(parse_chain("a.0 b.1"), Err(UidError::Mixed(..))));
        assert_eq!(parse_chain(&chain("t", 0..1025)), Err(UidError::TooLong));
    }

    proptest! {
        #[test]
        fn no_text_panics(text in ".{0,200}") {
            let _ = parse_chain(&text);
        }
    }
}
