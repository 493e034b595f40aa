//! `out = weight * round(x * (mean(x^2) + eps)^-1/2)` per row (transformers `LlamaRMSNorm`: the
//! normalised value is cast to the model's dtype before the weight).

use shared::dtype::DType;

use super::{Elements, OpError, check_len, convert};

/// Arguments of the root-mean-square norm.
#[derive(Debug)]
pub struct Rmsnorm<'a, F: ?Sized> {
    /// Input `[rows, width]`.
    pub x: &'a F,
    /// Scale `[width]`.
    pub weight: &'a F,
    /// Output `[rows, width]`.
    pub out: &'a mut F,
    pub rows: usize,
    /// Features of a row.
    pub width: usize,
    /// Added to the mean square.
    pub eps: f32,
    /// Dtype to which the normalised value is rounded before it is scaled: the block dtype.
    pub round: DType,
}

impl<F: Elements + ?Sized> Rmsnorm<'_, F> {
    pub(crate) fn check(&self) -> Result<(), OpError> {
        check_len("rmsnorm", "x", self.x.len(), self.rows, self.width)?;
        check_len("rmsnorm", "weight", self.weight.len(), 1, self.width)?;
        check_len("rmsnorm", "out", self.out.len(), self.rows, self.width)
    }
}

/// The definition.
pub fn reference(args: Rmsnorm<'_, [f32]>) -> Result<(), OpError> {
    args.check()?;
    for row in 0..args.rows {
        let range = row * args.width..(row + 1) * args.width;
        let x = &args.x[range.clone()];
        let mean = x.iter().map(|v| v * v).sum::<f32>() / args.width as f32;
        let scale = 1.0 / (mean + args.eps).sqrt();
        for ((out, v), weight) in args.out[range].iter_mut().zip(x).zip(args.weight) {
            *out = weight * convert::round(args.round, v * scale);
        }
    }
    Ok(())
}
