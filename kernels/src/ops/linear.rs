//! `out = round(x) weight^T + bias`: the inputs are rounded to the dtype of the weight, products
//! are summed in f32.

use super::{Elements, MatrixShape, OpError, check_len, convert};
use crate::tensor::WeightView;

/// Arguments of a matrix product; `W` is the backend's matrix.
#[derive(Debug)]
pub struct Linear<'a, F: ?Sized, W> {
    /// Input `[rows, inputs]`.
    pub x: &'a F,
    /// Matrix `[outputs, inputs]`.
    pub weight: W,
    /// Added to every row, `[outputs]`.
    pub bias: Option<&'a F>,
    /// Output `[rows, outputs]`.
    pub out: &'a mut F,
    pub rows: usize,
}

impl<F: Elements + ?Sized, W: MatrixShape> Linear<'_, F, W> {
    pub(crate) fn check(&self) -> Result<(), OpError> {
        check_len("linear", "x", self.x.len(), self.rows, self.weight.inputs())?;
        check_len("linear", "out", self.out.len(), self.rows, self.weight.outputs())?;
        self.bias.map_or(Ok(()), |bias| {
            check_len("linear", "bias", bias.len(), 1, self.weight.outputs())
        })
    }
}

/// The definition.
pub fn reference(args: Linear<'_, [f32], WeightView<'_>>) -> Result<(), OpError> {
    args.check()?;
    let (inputs, outputs) = (args.weight.inputs(), args.weight.outputs());
    let mut weight = vec![0.0; inputs];
    for output in 0..outputs {
        args.weight.row_to_f32(output, &mut weight);
        for row in 0..args.rows {
            let x = &args.x[row * inputs..(row + 1) * inputs];
            let sum: f32 = x
                .iter()
                .zip(&weight)
                .map(|(x, w)| convert::round(args.weight.dtype(), *x) * w)
                .sum();
            args.out[row * outputs + output] = sum + args.bias.map_or(0.0, |bias| bias[output]);
        }
    }
    Ok(())
}
