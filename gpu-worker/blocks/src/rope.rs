//! Tables of the rotary encoding where they are more than the device computes by itself.

use kernels::ops::convert;
use kernels::{DType, StepRow};
use model::RopeScaling;

/// An encoding whose tables are made here, row by row, as the device's are by
/// `kernels::ops::RopeTable`: cos and sin of every new token `[tokens, 2, head_dim / 2]`. `None`
/// when the device makes them from the frequencies of short sequences.
pub(super) fn table(
    scaling: &RopeScaling,
    theta: f32,
    head_dim: usize,
    rows: &[StepRow<'_>],
    round: DType,
) -> Option<Vec<f32>> {
    let factor = scaling.attention_factor();
    let is_plain = factor == 1.0 && !rows.iter().any(|row| scaling.changes_at(row.length));
    if is_plain {
        return None;
    }
    let mut out = Vec::new();
    for row in rows {
        let frequencies = scaling.frequencies_at(theta, head_dim, row.length);
        for position in row.prefix..row.prefix + row.tokens {
            let angle = |frequency: &f32| position as f32 * frequency;
            let rounded = |value: f32| convert::round(round, value * factor);
            out.extend(frequencies.iter().map(|f| rounded(angle(f).cos())));
            out.extend(frequencies.iter().map(|f| rounded(angle(f).sin())));
        }
    }
    Some(out)
}
