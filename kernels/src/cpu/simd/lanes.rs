//! Building blocks of the plain paths: sixteen lanes, inlined into functions that are compiled per
//! instruction set.

/// Lanes of a group.
pub(super) const LANES: usize = 16;

/// `a * b + c`, fused where the instruction set fuses.
#[inline(always)]
pub(super) fn mul_add<const FMA: bool>(a: f32, b: f32, c: f32) -> f32 {
    if FMA { a.mul_add(b, c) } else { a * b + c }
}

/// Sum of the lanes as a balanced tree.
#[inline(always)]
pub(super) fn tree_sum(mut lanes: [f32; LANES]) -> f32 {
    let mut width = LANES / 2;
    while width > 0 {
        for i in 0..width {
            lanes[i] += lanes[i + width];
        }
        width /= 2;
    }
    lanes[0]
}

/// Dot product of two slices of one length.
#[inline(always)]
pub(super) fn dot<const FMA: bool>(a: &[f32], b: &[f32]) -> f32 {
    let mut sums = [0.0; LANES];
    let (mut a, mut b) = (a.chunks_exact(LANES), b.chunks_exact(LANES));
    for (a, b) in (&mut a).zip(&mut b) {
        for i in 0..LANES {
            sums[i] = mul_add::<FMA>(a[i], b[i], sums[i]);
        }
    }
    for (i, (a, b)) in a.remainder().iter().zip(b.remainder()).enumerate() {
        sums[i] = mul_add::<FMA>(*a, *b, sums[i]);
    }
    tree_sum(sums)
}

/// `e^x` to about 2 units in the last place; 0 below -87.3, infinite above 88.7 (Cephes `expf`: a
/// polynomial on `[-ln 2 / 2, ln 2 / 2]`). Branch-free, so that loops over it become vector code.
#[inline(always)]
pub(super) fn exp<const FMA: bool>(x: f32) -> f32 {
    const ROUND: f32 = 12_582_912.0; // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
    let clamped = x.clamp(-87.3, 88.72);
    let shifted = mul_add::<FMA>(clamped, std::f32::consts::LOG2_E, ROUND);
    let n = shifted - ROUND;
    let r = mul_add::<FMA>(n, -0.693_359_4, clamped);
    let r = mul_add::<FMA>(n, 2.121_944_4e-4, r);
    let mut p = 1.987_569_1e-4;
    for c in [1.398_2e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5] {
        p = mul_add::<FMA>(p, r, c);
    }
    let e = mul_add::<FMA>(p * r, r, r) + 1.0;
    // n reaches 128, one more than an exponent holds: scale in two steps.
    let exponent = (shifted.to_bits() as i32).wrapping_sub(ROUND.to_bits() as i32);
    let half = exponent >> 1;
    let two = |k: i32| f32::from_bits((k.wrapping_add(127) as u32) << 23);
    let value = e * two(half) * two(exponent.wrapping_sub(half));
    if x < -87.3 {
        0.0
    } else if x > 88.72 {
        f32::INFINITY
    } else {
        value
    }
}

/// `1 - erf(z)` for `z >= 0` to about 2e-7 of one (Numerical Recipes `erfcc`: a Chebyshev fit times
/// `exp(-z^2)`). Branch-free.
#[inline(always)]
pub(super) fn erfc<const FMA: bool>(z: f32) -> f32 {
    let t = 1.0 / mul_add::<FMA>(0.5, z, 1.0);
    let mut p = 0.170_872_77;
    for c in [
        -0.822_152_23,
        1.488_515_9,
        -1.135_204,
        0.278_868_07,
        -0.186_288_06,
        0.096_784_18,
        0.374_091_96,
        1.000_023_7,
        -1.265_512_2,
    ] {
        p = mul_add::<FMA>(p, t, c);
    }
    t * exp::<FMA>(mul_add::<FMA>(-z, z, p))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_accurate_over_its_whole_range() {
        let mut worst = 0.0f64;
        for i in -87_000..88_700 {
            let x = i as f32 * 1e-3;
            let wanted = f64::from(x).exp();
            for got in [exp::<true>(x), exp::<false>(x)] {
                worst = worst.max((f64::from(got) - wanted).abs() / wanted);
            }
        }
        assert!(worst < 2.5e-7, "{worst}");
        assert_eq!(exp::<true>(0.0), 1.0);
        assert_eq!(exp::<true>(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp::<false>(100.0), f32::INFINITY);
        assert!(exp::<true>(f32::NAN).is_nan());
    }

    #[test]
    fn erfc_is_accurate_over_its_whole_range() {
        for i in 0..10_000 {
            let z = i as f32 * 1e-3;
            let wanted = 1.0 - crate::ops::gelu::erf(f64::from(z));
            for got in [erfc::<true>(z), erfc::<false>(z)] {
                assert!((f64::from(got) - wanted).abs() < 4e-7, "{z}: {got} {wanted}");
            }
        }
    }

    #[test]
    fn dot_takes_lengths_off_the_lanes() {
        for n in [0, 1, 15, 16, 17, 48, 100] {
            let a: Vec<f32> = (0..n).map(|i| i as f32).collect();
            let wanted: f32 = a.iter().map(|v| v * 2.0).sum();
            assert_eq!(dot::<true>(&a, &vec![2.0; n]), wanted);
        }
    }
}
