//! `out = round(weight * (x - mean) / (variance + eps)^1/2 + bias)` per row, with the biased
//! variance (torch `layer_norm`: sums in f32, one rounding at the end).

use shared::dtype::DType;

use super::{Elements, OpError, check_len, convert};

/// Arguments of the layer norm.
#[derive(Debug)]
pub struct Layernorm<'a, F: ?Sized> {
    /// Input `[rows, width]`.
    pub x: &'a F,
    /// Scale `[width]`.
    pub weight: &'a F,
    /// Added at the end `[width]`.
    pub bias: &'a F,
    /// Output `[rows, width]`.
    pub out: &'a mut F,
    pub rows: usize,
    /// Features of a row.
    pub width: usize,
    /// Added to the variance.
    pub eps: f32,
    /// Dtype to which the result is rounded: the block dtype.
    pub round: DType,
}

impl<F: Elements + ?Sized> Layernorm<'_, F> {
    pub(crate) fn check(&self) -> Result<(), OpError> {
        check_len("layernorm", "x", self.x.len(), self.rows, self.width)?;
        check_len("layernorm", "weight", self.weight.len(), 1, self.width)?;
        check_len("layernorm", "bias", self.bias.len(), 1, self.width)?;
        check_len("layernorm", "out", self.out.len(), self.rows, self.width)
    }
}

/// The definition.
pub fn reference(args: Layernorm<'_, [f32]>) -> Result<(), OpError> {
    args.check()?;
    for row in 0..args.rows {
        let range = row * args.width..(row + 1) * args.width;
        let x = &args.x[range.clone()];
        let mean = x.iter().sum::<f32>() / args.width as f32;
        let variance = x.iter().map(|v| (v - mean) * (v - mean)).sum::<f32>() / args.width as f32;
        let scale = 1.0 / (variance + args.eps).sqrt();
        for (i, out) in args.out[range].iter_mut().enumerate() {
            let value = args.weight[i] * ((x[i] - mean) * scale) + args.bias[i];
            *out = convert::round(args.round, value);
        }
    }
    Ok(())
}
