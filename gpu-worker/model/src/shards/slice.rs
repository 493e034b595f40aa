//! What one rank holds of a tensor.

use std::ops::Range;

/// What one rank holds of a tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Slice {
    All,
    /// Nothing.
    None,
    /// Some rows of a matrix or elements of a vector, one range behind the other.
    Rows(Vec<Range<usize>>),
    /// Some columns of a matrix.
    Columns(Range<usize>),
}

/// A slice by its size, as the bytes of a stored matrix depend on it; a vector is one row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SliceShape {
    /// Rows and columns of the whole tensor.
    pub whole: [usize; 2],
    /// Rows of the slice.
    pub rows: usize,
    /// Columns of the slice.
    pub columns: Range<usize>,
}

impl Slice {
    /// The slice of a tensor of shape `whole`; `None` when nothing of it is held, or the tensor is
    /// neither vector nor matrix.
    pub fn of(&self, whole: &[usize]) -> Option<SliceShape> {
        let ([rows, columns], is_vector) = match *whole {
            [len] => ([1, len], true),
            [rows, columns] => ([rows, columns], false),
            _ => return None,
        };
        let whole = [rows, columns];
        match self {
            Slice::All => Some(SliceShape { whole, rows, columns: 0..columns }),
            Slice::None => None,
            Slice::Rows(ranges) => {
                let held = ranges.iter().map(Range::len).sum();
                Some(match is_vector {
                    true => SliceShape { whole, rows, columns: 0..held },
                    false => SliceShape { whole, rows: held, columns: 0..columns },
                })
            }
            Slice::Columns(columns) => Some(SliceShape { whole, rows, columns: columns.clone() }),
        }
    }

    /// Whether it is no piece of the stored tensor, and has to be copied together.
    pub fn is_copied(&self) -> bool {
        match self {
            Slice::All | Slice::None => false,
            Slice::Rows(ranges) => ranges.len() > 1,
            Slice::Columns(_) => true,
        }
    }

    /// Whether it has all of `rows` rows.
    pub(super) fn is_all(&self, rows: usize) -> bool {
        match self {
            Slice::Rows(ranges) => matches!(&ranges[..], [all] if *all == (0..rows)),
            slice => *slice == Slice::All,
        }
    }
}

/// These rows, neighbouring ranges joined.
pub(super) fn rows(ranges: Vec<Range<usize>>) -> Slice {
    let mut joined: Vec<Range<usize>> = Vec::with_capacity(ranges.len());
    for range in ranges {
        match joined.last_mut() {
            Some(last) if last.end == range.start => last.end = range.end,
            _ => joined.push(range),
        }
    }
    Slice::Rows(joined)
}
