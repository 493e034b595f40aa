//! Writes the keys (rotated) and values of the new tokens into the pages of their rows, rounded to
//! the cache's dtype.

use super::{Elements, OpError, PagePool, check_len, convert};
use crate::kv::{KvPages, StepRow, total_tokens};

/// Arguments of the append; `P` is the backend's pages of one block.
#[derive(Debug)]
pub struct KvAppend<'a, F: ?Sized, P> {
    /// Keys `[tokens, kv_heads, head_dim]`.
    pub keys: &'a F,
    /// Values `[tokens, kv_heads, head_dim]`.
    pub values: &'a F,
    pub rows: &'a [StepRow<'a>],
    pub pages: &'a mut P,
}

impl<F: Elements + ?Sized, P: PagePool> KvAppend<'_, F, P> {
    pub(crate) fn check(&self) -> Result<(), OpError> {
        let layout = self.pages.layout();
        let (tokens, width) = (total_tokens(self.rows), layout.kv_heads * layout.head_dim);
        check_len("kv append", "keys", self.keys.len(), tokens, width)?;
        check_len("kv append", "values", self.values.len(), tokens, width)?;
        self.pages.check_rows(self.rows)
    }
}

/// The definition.
pub fn reference(args: KvAppend<'_, [f32], KvPages<'_>>) -> Result<(), OpError> {
    args.check()?;
    write(args);
    Ok(())
}

/// What it does with arguments that were checked, compiled for the instruction set of the function
/// that calls it.
#[inline(always)]
pub(crate) fn write(args: KvAppend<'_, [f32], KvPages<'_>>) {
    let layout = args.pages.layout();
    let width = layout.kv_heads * layout.head_dim;
    let positions = args
        .rows
        .iter()
        .flat_map(|row| (row.prefix..row.prefix + row.tokens).map(move |p| (row, p)));
    for (token, (row, position)) in positions.enumerate() {
        let (page, slot) = row.locate(position);
        for (half, source) in [args.keys, args.values].into_iter().enumerate() {
            let vectors = source[token * width..(token + 1) * width].chunks_exact(layout.head_dim);
            for (head, vector) in vectors.enumerate() {
                convert::narrow(layout.dtype, vector, args.pages.slot_mut(page, head, half, slot));
            }
        }
    }
}
