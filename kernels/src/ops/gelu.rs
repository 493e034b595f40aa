//! `x = gelu(round(x))`, the middle of a plain MLP, in the two forms that families use; the result
//! is rounded by the matrix that takes it.
//!
//! ```text
//! Tanh  x/2 (1 + tanh(0.79788456 x (1 + 0.044715 x^2)))       transformers `bloom_gelu_forward`
//! Erf   x/2 (1 + erf(x / 2^1/2))                              torch `gelu`
//! ```

use shared::dtype::DType;

use super::{Elements, OpError, check_len, convert};

/// Form of the function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GeluKind {
    /// By a hyperbolic tangent.
    Tanh,
    /// By the error function.
    Erf,
}

/// Arguments of the activation.
#[derive(Debug)]
pub struct Gelu<'a, F: ?Sized> {
    /// Input, and the result `[len]`.
    pub x: &'a mut F,
    /// Elements.
    pub len: usize,
    pub kind: GeluKind,
    /// Dtype to which the input is rounded: the block dtype.
    pub round: DType,
}

impl<F: Elements + ?Sized> Gelu<'_, F> {
    pub(crate) fn check(&self) -> Result<(), OpError> {
        check_len("gelu", "x", self.x.len(), 1, self.len)
    }
}

/// The definition, in f64.
pub fn reference(args: Gelu<'_, [f32]>) -> Result<(), OpError> {
    args.check()?;
    for x in args.x.iter_mut().take(args.len) {
        let v = f64::from(convert::round(args.round, *x));
        let half = match args.kind {
            GeluKind::Tanh => (0.797_884_56 * v * (1.0 + 0.044_715 * v * v)).tanh(),
            GeluKind::Erf => erf(v / std::f64::consts::SQRT_2),
        };
        *x = (0.5 * v * (1.0 + half)) as f32;
    }
    Ok(())
}

/// The error function by its Taylor series, and by the continued fraction of its complement where
/// the series loses digits.
pub(crate) fn erf(x: f64) -> f64 {
    let z = x.abs();
    if z < 3.0 {
        let (mut term, mut sum) = (x, x);
        for n in 1..120 {
            let n = f64::from(n);
            term *= -x * x / n;
            sum += term / (2.0 * n + 1.0);
        }
        return sum * std::f64::consts::FRAC_2_SQRT_PI;
    }
    let fraction = (1..80).rev().fold(z, |f, k| z + 0.5 * f64::from(k) / f);
    let complement = (-z * z).exp() / (fraction * std::f64::consts::PI.sqrt());
    (1.0 - complement).copysign(x)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn erf_has_its_known_values() {
        let known = [
            (0.0, 0.0),
            (0.5, 0.520_499_877_813_046_5),
            (1.0, 0.842_700_792_949_714_9),
            (-2.0, -0.995_322_265_018_952_7),
            (2.99, 0.9999764743969194),
            (3.5, 0.999_999_256_901_627_7),
        ];
        for (x, wanted) in known {
            assert!((erf(x) - wanted).abs() < 1e-9, "erf({x}) = {}", erf(x));
        }
    }
}
