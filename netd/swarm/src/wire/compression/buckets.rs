//! The two compressions that sort elements into 256 buckets and send the mean of each.

use super::super::tensor::WireDtype;
use super::{floats, sums};
use half::{bf16, f16};

/// Buckets, and entries of the codebook.
const BUCKETS: usize = 256;
/// Width of all buckets of the uniform kind together, in deviations.
const RANGE_DEVIATIONS: f32 = 6.0;
/// Fewest elements whose quantiles are taken at once.
const CHUNK_ELEMENTS: usize = 100_000;

/// `UNIFORM_8BIT`: buckets of equal width around the mean, six deviations in all; the outer ones
/// take the rest.
pub(super) fn uniform(values: &[f32], dtype: WireDtype) -> Vec<u8> {
    let mean = mean(values, dtype);
    let centred: Vec<f32> = values.iter().map(|value| value - mean).collect();
    let deviation = sums::norm(&centred) / ((values.len() - 1) as f64).sqrt() as f32;
    let scale = RANGE_DEVIATIONS * deviation / BUCKETS as f32;
    let (factor, middle) = (1.0 / scale, (BUCKETS / 2) as f32);
    // `as` clamps, and takes the NaN of a tensor whose elements are all equal to 0, as PyTorch
    // does.
    let bucket = |value: &f32| ((value * factor).round_ties_even() + middle) as u8;
    coded(values, centred.iter().map(bucket).collect())
}

/// The mean as PyTorch gives it in `dtype`.
fn mean(values: &[f32], dtype: WireDtype) -> f32 {
    let mean = sums::sum(values) / values.len() as f32;
    match dtype {
        WireDtype::F16 => f16::from_f32(mean).to_f32(),
        WireDtype::Bf16 => bf16::from_f32(mean).to_f32(),
        _ => mean,
    }
}

/// `QUANTILE_8BIT`: buckets of equal population.
pub(super) fn quantile(values: &[f32]) -> Vec<u8> {
    let borders = borders(values);
    let bucket = |value: &f32| {
        let below = borders.partition_point(
            |border| !matches!(border.partial_cmp(value), Some(order) if order.is_ge()),
        );
        u8::try_from(below).unwrap_or(u8::MAX)
    };
    coded(values, values.iter().map(bucket).collect())
}

/// The 255 inner ones of 257 quantiles; those of a large tensor are the quantiles of its chunks'
/// quantiles.
fn borders(values: &[f32]) -> Vec<f32> {
    let mut of_chunks: Vec<f32> =
        values.chunks(chunk_elements(values.len())).flat_map(quantiles).collect();
    if of_chunks.len() > BUCKETS + 1 || values.len() <= CHUNK_ELEMENTS {
        of_chunks = quantiles(&of_chunks);
    }
    of_chunks.get(1..BUCKETS).unwrap_or_default().to_vec()
}

/// Chunks are enlarged until they are about equal (`get_chunk_size`).
fn chunk_elements(count: usize) -> usize {
    let chunks = count / CHUNK_ELEMENTS;
    if chunks == 0 || count == CHUNK_ELEMENTS {
        return CHUNK_ELEMENTS;
    }
    CHUNK_ELEMENTS + (count % CHUNK_ELEMENTS).div_ceil(chunks)
}

/// 257 evenly spaced quantiles with linear interpolation, all in f32, as NumPy computes them.
fn quantiles(values: &[f32]) -> Vec<f32> {
    let mut sorted = values.to_vec();
    sorted.sort_unstable_by(f32::total_cmp);
    let last = sorted.len().saturating_sub(1);
    let at = |index: usize| sorted.get(index.min(last)).copied().unwrap_or(f32::NAN);
    let quantile = |number: usize| {
        let place = last as f32 * (number as f32 / BUCKETS as f32);
        let before = place.floor();
        let (a, b, t) = (at(before as usize), at(before as usize + 1), place - before);
        if t >= 0.5 { b - (b - a) * (1.0 - t) } else { a + (b - a) * t }
    };
    (0..=BUCKETS).map(quantile).collect()
}

/// Count, codebook and indexes. The codebook has the mean of every bucket, 0 for an empty one.
fn coded(values: &[f32], indexes: Vec<u8>) -> Vec<u8> {
    let (mut totals, mut counts) = ([0f32; BUCKETS], [0usize; BUCKETS]);
    for (value, index) in values.iter().zip(&indexes) {
        totals[usize::from(*index)] += value;
        counts[usize::from(*index)] += 1;
    }
    let mut codebook = totals;
    codebook.iter_mut().zip(counts).for_each(|(total, count)| *total /= count.max(1) as f32);
    let mut buffer = Vec::with_capacity(8 + 4 * BUCKETS + indexes.len());
    buffer.extend((BUCKETS as u64).to_le_bytes());
    buffer.extend(floats(&codebook));
    buffer.extend(indexes);
    buffer
}
