//! Slopes of the position bias (Press et al., "Train Short, Test Long"; transformers
//! `build_alibi_tensor`).

/// The slopes of `heads` heads: powers of one base for the largest power of two of heads, and
/// between them for the rest.
pub(super) fn slopes(heads: usize) -> Vec<f32> {
    let whole = 1usize << heads.max(1).ilog2();
    let base = |count: usize| (-((-((count as f64).log2() - 3.0)).exp2())).exp2() as f32;
    let power = |base: f32, exponent: usize| f64::from(base).powf(exponent as f64) as f32;
    let between = (0..heads - whole).map(|n| power(base(2 * whole), 2 * n + 1));
    (1..=whole).map(|n| power(base(whole), n)).chain(between).collect()
}

#[cfg(test)]
mod tests {
    use std::f32::consts::FRAC_1_SQRT_2;

    use super::*;

    /// Values of transformers.
    #[test]
    fn slopes_are_those_of_transformers() {
        let near = |got: f32, wanted: f32| (got - wanted).abs() <= 4e-7 * wanted;
        let begins = |heads, wanted: &[f32]| {
            let slopes = slopes(heads);
            assert_eq!(slopes.len(), heads);
            let mut pairs = slopes.iter().zip(wanted);
            assert!(pairs.all(|(g, w)| near(*g, *w)), "{heads}: {slopes:?}");
        };
        begins(1, &[0.003_906_25]);
        begins(3, &[0.0625, 0.003_906_25, 0.25]);
        begins(16, &[FRAC_1_SQRT_2, 0.5, 0.353_553_38]);
        begins(32, &[0.840_896_4, FRAC_1_SQRT_2, 0.594_603_6]);
        begins(112, &[0.917_004_05, 0.840_896_4]);
        let last = &slopes(112)[109..];
        let wanted = [0.019_404_02, 0.017_793_56, 0.016_316_77];
        assert!(last.iter().zip(wanted).all(|(g, w)| near(*g, w)), "{last:?}");
    }
}
