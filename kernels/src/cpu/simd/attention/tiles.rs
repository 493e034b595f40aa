//! What attention multiplies, in register tiles over any [`Vector`]: products of some queries with many
//! keys, weighted sums of many values, and what a query adds to gradients.
//!
//! A tile has `R` queries, so that a key is loaded once for all of them. Each number is computed as by one
//! query alone, in the same order: products in sixteen lanes from first to last and one tree over the lanes
//! ([`dot`]), sums from the first key to the last.

#![allow(
    clippy::needless_range_loop,
    reason = "indexes that are constants keep the sums in registers"
)]

use crate::cpu::simd::lanes::{LANES, dot, mul_add};
use crate::cpu::simd::vector::Vector;

/// Loads a vector that begins at an element.
///
/// # Safety
/// The machine has the vector's instruction set, and `from[at..]` holds a vector.
#[inline(always)]
unsafe fn load<V: Vector>(from: &[f32], at: usize) -> V {
    debug_assert!(at + V::LANES <= from.len());
    // SAFETY: as the caller says.
    unsafe { V::load(from.as_ptr().wrapping_add(at).cast()) }
}

/// Stores a vector from an element on.
///
/// # Safety
/// As [`load`].
#[inline(always)]
unsafe fn store<V: Vector>(vector: V, to: &mut [f32], at: usize) {
    debug_assert!(at + V::LANES <= to.len());
    // SAFETY: as the caller says.
    unsafe { vector.store(to.as_mut_ptr().wrapping_add(at).cast()) };
}

/// Products of each of `x` (`dim` numbers) with each row of `y` `[rows, dim]`: the first `rows` of each of
/// `out`.
///
/// # Safety
/// The machine has the vector's instruction set.
#[inline(always)]
pub(super) unsafe fn dots<V: Vector, const FMA: bool, const R: usize>(
    x: [&[f32]; R],
    y: &[f32],
    out: &mut [&mut [f32]; R],
) {
    let dim = x[0].len();
    let rows = y.len() / dim.max(1);
    let mut row = 0;
    // Tiles of `T` queries and `K` keys: accumulators for them, and registers for what is loaded.
    macro_rules! tiles {
        ($T:tt, $K:literal) => {
            while rows - row >= $K {
                let y = &y[row * dim..][..$K * dim];
                for first in (0..R).step_by($T) {
                    // SAFETY: as the caller says.
                    unsafe { dots_tile::<V, R, { $T }, $K>(&x, y, first, row, out) };
                }
                row += $K;
            }
        };
    }
    if dim.is_multiple_of(LANES) {
        match (V::LANES == LANES && V::PARTS == 1, R) {
            (true, 4) => tiles!(4, 4),
            (true, _) => tiles!(R, 8),
            (false, 1) => tiles!(1, 4),
            (false, _) => tiles!(2, 2),
        }
        tiles!(R, 1);
    }
    for row in row..rows {
        for r in 0..R {
            out[r][row] = dot::<FMA>(x[r], &y[row * dim..][..dim]);
        }
    }
}

/// [`dots`] of the `T` of `x` from `first` on with the `K` rows `y`, which are those from `row` on.
#[inline(always)]
unsafe fn dots_tile<V: Vector, const R: usize, const T: usize, const K: usize>(
    x: &[&[f32]; R],
    y: &[f32],
    first: usize,
    row: usize,
    out: &mut [&mut [f32]; R],
) {
    let dim = x[0].len();
    let halves = LANES / V::LANES;
    // A vector of eight lanes holds half of the sixteen.
    let mut sums = [[[V::ZERO; K]; T]; 2];
    assert!(halves <= 2 && y.len() == K * dim && first + T <= R);
    assert!(x.iter().all(|x| x.len() == dim));
    for at in (0..dim).step_by(LANES) {
        for half in 0..halves {
            let at = at + half * V::LANES;
            let mut own = [V::ZERO; T];
            for t in 0..T {
                // SAFETY: `dim` is a multiple of the lanes, and each row has `dim` numbers.
                own[t] = unsafe { load::<V>(x[first + t], at) };
            }
            for k in 0..K {
                // SAFETY: as above.
                let other = unsafe { load::<V>(y, k * dim + at) };
                for t in 0..T {
                    // SAFETY: as the caller says.
                    sums[half][t][k] = unsafe { own[t].mul_add(other, sums[half][t][k]) };
                }
            }
        }
    }
    for t in 0..T {
        if halves == 2 {
            for k in 0..K {
                // SAFETY: as the caller says.
                sums[0][t][k] = unsafe { sums[0][t][k].add(sums[1][t][k]) };
            }
        }
        // SAFETY: as the caller says.
        let totals = unsafe { V::totals::<K>(&sums[0][t], 0, 1) };
        out[first + t][row..row + K].copy_from_slice(&totals);
    }
}

/// Adds to each of `out` (`dim` numbers) the rows of `y` `[rows, dim]`, each times its weight, in their order.
///
/// # Safety
/// The machine has the vector's instruction set.
#[inline(always)]
pub(super) unsafe fn add_weighted<V: Vector, const FMA: bool, const R: usize>(
    weights: [&[f32]; R],
    y: &[f32],
    out: &mut [&mut [f32]; R],
) {
    let dim = out[0].len();
    let mut at = 0;
    // With two queries, sixteen accumulators of sixteen lanes, or eight of eight.
    while V::LANES == LANES && V::PARTS == 1 && at + 8 * V::LANES <= dim {
        // SAFETY: as the caller says.
        unsafe { weighted_tile::<V, R, 8>(weights, y, at, out) };
        at += 8 * V::LANES;
    }
    while V::PARTS == 1 && at + 4 * V::LANES <= dim {
        // SAFETY: as the caller says.
        unsafe { weighted_tile::<V, R, 4>(weights, y, at, out) };
        at += 4 * V::LANES;
    }
    while at + V::LANES <= dim {
        // SAFETY: as the caller says.
        unsafe { weighted_tile::<V, R, 1>(weights, y, at, out) };
        at += V::LANES;
    }
    for at in at..dim {
        for r in 0..R {
            let rows = y.chunks_exact(dim).zip(weights[r]);
            out[r][at] = rows.fold(out[r][at], |sum, (y, w)| mul_add::<FMA>(*w, y[at], sum));
        }
    }
}

/// [`add_weighted`] for `C` vectors from `at` on.
#[inline(always)]
unsafe fn weighted_tile<V: Vector, const R: usize, const C: usize>(
    weights: [&[f32]; R],
    y: &[f32],
    at: usize,
    out: &mut [&mut [f32]; R],
) {
    let dim = out[0].len();
    let mut rows = y.len() / dim;
    for r in 0..R {
        rows = rows.min(weights[r].len());
        assert!(out[r].len() == dim && at + C * V::LANES <= dim);
    }
    let mut sums = [[V::ZERO; C]; R];
    for r in 0..R {
        for c in 0..C {
            // SAFETY: the vectors lie within `dim`.
            sums[r][c] = unsafe { load(&*out[r], at + c * V::LANES) };
        }
    }
    for row in 0..rows {
        let mut own = [V::ZERO; R];
        for r in 0..R {
            // SAFETY: as the caller says.
            own[r] = unsafe { V::splat(weights[r][row]) };
        }
        for c in 0..C {
            // SAFETY: `y` has `dim` numbers for each row.
            let value = unsafe { load::<V>(y, row * dim + at + c * V::LANES) };
            for r in 0..R {
                // SAFETY: as the caller says.
                sums[r][c] = unsafe { own[r].mul_add(value, sums[r][c]) };
            }
        }
    }
    for r in 0..R {
        for c in 0..C {
            // SAFETY: as at the loads.
            unsafe { store(sums[r][c], out[r], at + c * V::LANES) };
        }
    }
}

/// What `R` queries add to the gradients of the keys and values that they see, and keys to theirs.
pub(super) struct TileGradients<'a, const R: usize> {
    /// How much each score changes, `[queries][rows]`.
    pub changes: [&'a [f32]; R],
    /// Weights of the values, as many.
    pub weights: [&'a [f32]; R],
    /// The queries, `dim` numbers each.
    pub q: [&'a [f32]; R],
    /// Gradients of what they computed, as many.
    pub grad: [&'a [f32]; R],
    /// Keys `[rows, dim]`.
    pub keys: &'a [f32],
}

/// Adds `changes` times keys to `q_grad`, `changes` times queries to `k_grad` `[rows, dim]` and `weights` times
/// `grad` to `v_grad` `[rows, dim]`: the queries in their order, the rows in theirs.
///
/// # Safety
/// The machine has the vector's instruction set.
#[inline(always)]
pub(super) unsafe fn add_gradients<V: Vector, const FMA: bool, const R: usize>(
    from: &TileGradients<'_, R>,
    q_grad: &mut [&mut [f32]; R],
    k_grad: &mut [f32],
    v_grad: &mut [f32],
) {
    let dim = q_grad[0].len();
    let mut at = 0;
    // Three vectors of each query and column: those of eight lanes have half the registers.
    while V::LANES == LANES && V::PARTS == 1 && at + 2 * V::LANES <= dim {
        // SAFETY: as the caller says.
        unsafe { gradient_tile::<V, R, 2>(from, at, q_grad, k_grad, v_grad) };
        at += 2 * V::LANES;
    }
    while at + V::LANES <= dim {
        // SAFETY: as the caller says.
        unsafe { gradient_tile::<V, R, 1>(from, at, q_grad, k_grad, v_grad) };
        at += V::LANES;
    }
    for row in 0..from.keys.len() / dim {
        for i in at..dim {
            for r in 0..R {
                let (change, weight) = (from.changes[r][row], from.weights[r][row]);
                let own = row * dim + i;
                q_grad[r][i] = mul_add::<FMA>(change, from.keys[own], q_grad[r][i]);
                k_grad[own] = mul_add::<FMA>(change, from.q[r][i], k_grad[own]);
                v_grad[own] = mul_add::<FMA>(weight, from.grad[r][i], v_grad[own]);
            }
        }
    }
}

/// [`add_gradients`] for `C` vectors from `at` on.
#[inline(always)]
unsafe fn gradient_tile<V: Vector, const R: usize, const C: usize>(
    from: &TileGradients<'_, R>,
    at: usize,
    q_grad: &mut [&mut [f32]; R],
    k_grad: &mut [f32],
    v_grad: &mut [f32],
) {
    let dim = q_grad[0].len();
    let rows = from.keys.len() / dim;
    assert!(k_grad.len() >= rows * dim && v_grad.len() >= rows * dim);
    assert!(at + C * V::LANES <= dim);
    let (mut sums, mut q, mut grad) = ([[V::ZERO; C]; R], [[V::ZERO; C]; R], [[V::ZERO; C]; R]);
    for r in 0..R {
        assert!(q_grad[r].len() == dim && from.q[r].len() == dim && from.grad[r].len() == dim);
        assert!(from.changes[r].len() >= rows && from.weights[r].len() >= rows);
        for c in 0..C {
            let at = at + c * V::LANES;
            // SAFETY: the vectors lie within `dim`.
            sums[r][c] = unsafe { load(&*q_grad[r], at) };
            // SAFETY: as above.
            q[r][c] = unsafe { load(from.q[r], at) };
            // SAFETY: as above.
            grad[r][c] = unsafe { load(from.grad[r], at) };
        }
    }
    for row in 0..rows {
        for c in 0..C {
            let at = row * dim + at + c * V::LANES;
            // SAFETY: there are `dim` numbers for each row.
            let key = unsafe { load::<V>(from.keys, at) };
            // SAFETY: as above.
            let mut k = unsafe { load::<V>(k_grad, at) };
            // SAFETY: as above.
            let mut v = unsafe { load::<V>(v_grad, at) };
            for r in 0..R {
                // SAFETY: as the caller says.
                let change = unsafe { V::splat(from.changes[r][row]) };
                // SAFETY: as above.
                let weight = unsafe { V::splat(from.weights[r][row]) };
                // SAFETY: as above.
                sums[r][c] = unsafe { change.mul_add(key, sums[r][c]) };
                // SAFETY: as above.
                k = unsafe { change.mul_add(q[r][c], k) };
                // SAFETY: as above.
                v = unsafe { weight.mul_add(grad[r][c], v) };
            }
            // SAFETY: as at the loads.
            unsafe { store(k, k_grad, at) };
            // SAFETY: as above.
            unsafe { store(v, v_grad, at) };
        }
    }
    for r in 0..R {
        for c in 0..C {
            // SAFETY: as at the loads.
            unsafe { store(sums[r][c], q_grad[r], at + c * V::LANES) };
        }
    }
}
