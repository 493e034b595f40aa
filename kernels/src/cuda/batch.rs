//! The rows of a step as kernels read them: one array of words, taken apart by `batch_of` in
//! `common.cuh`.
//!
//! ```text
//! 0 rows   1 tokens   2 at of token_row   3 of token_position   4 of row_prefix   5 of row_table   6 of pages   7 of row_start   8 first_slot
//! token_row [tokens]   token_position [tokens]   row_prefix [rows]   row_table [rows]   pages   row_start [rows + 1]   token_tile [tokens]
//! ```

use crate::kv::{PAGE_TOKENS, StepRow, total_tokens};
use crate::ops::OpError;

/// Words before the arrays.
const HEADER: usize = 9;

/// Positions of a tile of `attention_decode.cu`; `token_tile` counts tiles of its workspace.
pub(super) const TILE_TOKENS: usize = crate::sizes::attention_decode::TILE_KEYS;

/// Words of `rows` rows and `tokens` tokens, pages left out.
pub(super) fn words(rows: usize, tokens: usize) -> usize {
    HEADER + 3 * tokens + 3 * rows + 1
}

/// Tiles of all tokens.
pub(super) fn tiles(rows: &[StepRow<'_>]) -> usize {
    let of = |row: &StepRow<'_>| -> usize {
        let positions = row.prefix..row.prefix.saturating_add(row.tokens);
        positions.map(|position| position / TILE_TOKENS + 1).sum()
    };
    rows.iter().map(of).sum()
}

/// Writes the words of `rows` into `words`, for a unit that begins with the block `first` of its
/// span. Only the pages that positions need are listed.
///
/// # Errors
/// When a number does not fit a word; rows that name pages they do not have are the caller's to
/// refuse.
pub(super) fn write(
    rows: &[StepRow<'_>],
    first: usize,
    words: &mut Vec<u32>,
) -> Result<(), OpError> {
    let tokens = total_tokens(rows);
    let arrays = [tokens, tokens, rows.len(), rows.len()];
    words.clear();
    words.extend([word(rows.len())?, word(tokens)?]);
    let mut at = HEADER;
    for len in arrays {
        words.push(word(at)?);
        at = at.saturating_add(len);
    }
    let pages: usize = rows.iter().map(used).sum();
    words.extend([word(at)?, word(at.saturating_add(pages))?]);
    words.push(word(first.saturating_mul(tokens))?);
    for (index, row) in rows.iter().enumerate() {
        words.extend(std::iter::repeat_n(word(index)?, row.tokens));
    }
    for row in rows {
        let end = word(row.prefix.saturating_add(row.tokens))?;
        words.extend(word(row.prefix)?..end);
    }
    for row in rows {
        words.push(word(row.prefix)?);
    }
    let mut table = 0;
    for row in rows {
        words.push(word(table)?);
        table += used(row);
    }
    for row in rows {
        words.extend(row.pages.iter().take(used(row)).map(|page| page.0));
    }
    let mut start = 0;
    for row in rows {
        words.push(word(start)?);
        start += row.tokens;
    }
    words.push(word(start)?);
    let mut tile = 0;
    for row in rows {
        for position in row.prefix..row.prefix + row.tokens {
            words.push(word(tile)?);
            tile += position / TILE_TOKENS + 1;
        }
    }
    Ok(())
}

fn used(row: &StepRow<'_>) -> usize {
    (row.prefix + row.tokens).div_ceil(PAGE_TOKENS)
}

fn word(value: usize) -> Result<u32, OpError> {
    u32::try_from(value)
        .map_err(|_| OpError::TooManyTokens { tokens: value, limit: u32::MAX as usize })
}

#[cfg(test)]
mod tests {
    use shared::ids::PageId;

    use super::*;

    #[test]
    fn arrays_lie_where_the_header_says() {
        let (first, second) = ([PageId(7), PageId(9)], [PageId(3), PageId(4)]);
        let rows = [StepRow::new(2, 15, &first), StepRow::new(1, 0, &second)];
        let mut words = vec![1];
        write(&rows, 5, &mut words).unwrap();
        assert_eq!(words[..2], [2, 3]);
        assert_eq!(words[8], 5 * 3);
        let array = |n: usize, len: usize| &words[words[2 + n] as usize..][..len];
        assert_eq!(array(0, 3), [0, 0, 1]);
        assert_eq!(array(1, 3), [15, 16, 0]);
        assert_eq!(array(2, 2), [15, 0]);
        assert_eq!(array(3, 2), [0, 2]);
        assert_eq!(array(4, 3), [7, 9, 3]);
        assert_eq!(array(5, 3), [0, 2, 3]);
        assert_eq!(words[words.len() - 3..], [0, 1, 2]);
        assert_eq!(words.len(), super::words(2, 3) + 3);
    }
}
