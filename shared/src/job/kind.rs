//! The kinds of work: what a job says in a ring, what workers schedule by, and what counters tell
//! apart.

use serde::{Deserialize, Serialize};

/// A step of at most this many tokens over all its rows is a decode step: it is cheaper to run than
/// to cut.
pub const DECODE_TOKENS: u32 = 32;

/// What a job computes, in order of precedence.
#[derive(
    Clone,
    Copy,
    Debug,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
    Serialize,
    Deserialize,
    strum::IntoStaticStr,
)]
#[serde(rename_all = "snake_case")]
#[strum(serialize_all = "lowercase")]
#[repr(u8)]
pub enum WorkKind {
    /// A step of cached inference, which reads and writes KV pages, of at most [`DECODE_TOKENS`].
    /// Decode steps are batched.
    Decode = 0,
    /// A step of more tokens.
    Prefill = 1,
    /// Blocks over whole sequences, without a cache.
    Forward = 2,
    /// Gradient of the inputs (and prompts) of [`WorkKind::Forward`].
    Backward = 3,
}

impl WorkKind {
    /// All of them, in the order of their values.
    pub const ALL: [WorkKind; 4] =
        [WorkKind::Decode, WorkKind::Prefill, WorkKind::Forward, WorkKind::Backward];

    /// That of a step of `batch` rows with `tokens` tokens each.
    pub fn of_step(batch: u32, tokens: u32) -> WorkKind {
        match u64::from(batch) * u64::from(tokens) <= u64::from(DECODE_TOKENS) {
            true => WorkKind::Decode,
            false => WorkKind::Prefill,
        }
    }

    /// Whether it is a step, with pages of the KV cache.
    pub fn is_step(self) -> bool {
        matches!(self, WorkKind::Decode | WorkKind::Prefill)
    }

    /// Its name in reports.
    pub fn name(self) -> &'static str {
        self.into()
    }

    /// In rings; none is 0.
    pub(super) fn code(self) -> u64 {
        self as u64 + 1
    }

    pub(super) fn from_code(code: u64) -> Option<WorkKind> {
        Self::ALL.into_iter().find(|kind| kind.code() == code)
    }
}

#[cfg(test)]
mod tests {
    use super::WorkKind::{Decode, Prefill};
    use super::*;

    #[test]
    fn tokens_of_all_rows_make_a_step_decode_or_prefill() {
        for (batch, tokens, expected) in [
            (1, 1, Decode),
            (1, 32, Decode),
            (32, 1, Decode),
            (1, 33, Prefill),
            (u32::MAX, 2, Prefill),
        ] {
            assert_eq!(WorkKind::of_step(batch, tokens), expected, "{batch} rows of {tokens}");
        }
    }
}
