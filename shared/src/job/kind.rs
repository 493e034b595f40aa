//! What a decode step is, for the schedule of workers and for every counter.

/// A step of at most this many tokens over all its rows is a decode step: it is cheaper to run than
/// to cut.
pub const DECODE_TOKENS: u32 = 32;

/// Whether a step of `batch` rows with `tokens` tokens each is a decode step.
pub fn is_decode(batch: u32, tokens: u32) -> bool {
    u64::from(batch) * u64::from(tokens) <= u64::from(DECODE_TOKENS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_of_all_rows_count() {
        for (batch, tokens, expected) in
            [(1, 1, true), (1, 32, true), (32, 1, true), (1, 33, false), (u32::MAX, 2, false)]
        {
            assert_eq!(is_decode(batch, tokens), expected, "{batch} rows of {tokens}");
        }
    }
}
