//! Low-rank adapters (LoRA) beside a matrix product, each over its own part of the rows.
//!
//! ```text
//! for the rows of a part:  t = round_a(A round_a(x))    d = round_a(B round_a(t))
//!                          out = round(out) + round_a(scale d)
//! gradient:                out = out + scale A^T (B^T grad)                        f32 throughout
//! ```
//! `out` holds the product of the adapted matrix, bias included. `round` is that of the block dtype
//! and `round_a` that of the adapter's matrices: what PEFT rounds in `lora.Linear.forward`. Where the
//! ranks of a group have parts of the inputs, A round_a(x) is summed over them. The sum
//! itself is rounded by whoever reads it, as is that of a plain product. Rows that belong to no
//! part keep their bits.

use shared::dtype::DType;

use super::{Elements, MatrixShape, OpError, check_len, convert};
use crate::tensor::WeightView;

/// Consecutive rows and the adapter they go through; `W` is the backend's matrix.
#[derive(Clone, Debug)]
pub struct LoraPart<W> {
    /// First row.
    pub first: usize,
    pub rows: usize,
    /// Into the rank, `[rank, inputs]`.
    pub a: W,
    /// Out of the rank, `[outputs, rank]`, of the dtype of `a`.
    pub b: W,
    /// Multiplies what comes out.
    pub scale: f32,
}

/// What of its inputs a rank of a group has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RankInputs {
    /// All of them.
    Whole,
    /// Possibly a part: `t` is the sum over all ranks.
    Cut,
}

/// Arguments of the product.
#[derive(Debug)]
pub struct Lora<'a, F: ?Sized, W> {
    /// Input of the adapted matrix `[rows, inputs]`.
    pub x: &'a F,
    /// The parts, in the order of their rows, without overlap.
    pub parts: &'a [LoraPart<W>],
    /// Memory for `t`: `[rows, largest rank]`; its content is unspecified before and after.
    pub middle: &'a mut F,
    /// Product of the adapted matrix, and the sum `[rows, outputs]`.
    pub out: &'a mut F,
    pub rows: usize,
    /// Dtype to which the product of the adapted matrix is rounded: the block dtype.
    pub round: DType,
    /// Whether `x` and `a` are whole.
    pub inputs: RankInputs,
}

/// An adapter beside a matrix; `W` is the backend's matrix.
#[derive(Clone, Debug)]
pub struct Adapter<W> {
    /// Into the rank, `[rank, inputs]`.
    pub a: W,
    /// Out of the rank, `[outputs, rank]`, of the dtype of `a`.
    pub b: W,
    /// Multiplies what comes out.
    pub scale: f32,
}

/// Arguments of adapters that every row chooses for itself: [`Lora`] over the rows of each; `A` is
/// the backend's [`Backend::Adapters`](crate::Backend::Adapters).
#[derive(Debug)]
pub struct Adapt<'a, F: ?Sized, A: ?Sized> {
    /// Input of the adapted matrix `[rows, inputs]`.
    pub x: &'a F,
    /// The adapters of the matrix.
    pub adapters: &'a A,
    /// Which of them each row goes through; one that the matrix does not have changes nothing. A
    /// device whose step is recorded takes those of the step instead.
    pub of_rows: &'a [Option<u32>],
    /// Memory for `t`: `[rows, largest rank]`; its content is unspecified before and after.
    pub middle: &'a mut F,
    /// Product of the adapted matrix, and the sum `[rows, outputs]`.
    pub out: &'a mut F,
    /// Dtype to which the product of the adapted matrix is rounded: the block dtype.
    pub round: DType,
    /// Whether `x` and the matrices `a` are whole.
    pub inputs: RankInputs,
}

/// Arguments of the gradient of [`Adapt`]: [`LoraGrad`] over the rows of each adapter.
#[derive(Debug)]
pub struct AdaptGrad<'a, F: ?Sized, A: ?Sized> {
    /// Gradient of the output `[rows, outputs]`.
    pub grad: &'a F,
    /// The adapters of the matrix.
    pub adapters: &'a A,
    /// Which of them each row goes through; one that the matrix does not have changes nothing.
    pub of_rows: &'a [Option<u32>],
    /// Memory for `B^T grad`: `[rows, largest rank]`; its content is unspecified before and after.
    pub middle: &'a mut F,
    /// Gradient through the adapted matrix, and the sum `[rows, inputs]`.
    pub out: &'a mut F,
}

/// Sizes of the adapters of a matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AdapterSizes {
    /// Features that go in.
    pub inputs: usize,
    /// Largest rank.
    pub rank: usize,
    /// Features that come out.
    pub outputs: usize,
}

/// The sizes of adapters beside one matrix; nothing where an adapter leaves it alone.
///
/// # Errors
/// When none is there, or their matrices do not go together.
pub fn sizes_of<W: MatrixShape>(adapters: &[Option<Adapter<W>>]) -> Result<AdapterSizes, OpError> {
    let op = "adapters";
    let wrong = |what| OpError::Shape { op, what };
    let mut there = adapters.iter().flatten();
    let first = there.next().ok_or(wrong("there are none"))?;
    let sizes = AdapterSizes {
        inputs: first.a.inputs(),
        rank: first.a.outputs(),
        outputs: first.b.outputs(),
    };
    adapters.iter().flatten().try_fold(sizes, |sizes, adapter| {
        let (a, b) = (&adapter.a, &adapter.b);
        if a.dtype() != b.dtype() {
            return Err(wrong("the matrices of an adapter differ in dtype"));
        }
        if a.outputs() != b.inputs() || [a.inputs(), b.outputs()] != [sizes.inputs, sizes.outputs] {
            return Err(wrong("the matrices of the adapters do not go together"));
        }
        let rank = sizes.rank.max(a.outputs());
        Ok(AdapterSizes { rank, ..sizes })
    })
}

/// The parts of rows that go through `adapters`, neighbours with the same adapter together.
pub fn parts_of<W: Clone>(
    adapters: &[Option<Adapter<W>>],
    of_rows: &[Option<u32>],
) -> Vec<LoraPart<W>> {
    let mut parts = Vec::new();
    let mut first = 0;
    for alike in of_rows.chunk_by(|a, b| a == b) {
        let number = alike.first().copied().flatten().map(|n| n as usize);
        let adapter = number.and_then(|number| adapters.get(number)?.as_ref());
        parts.extend(adapter.map(|adapter| LoraPart {
            first,
            rows: alike.len(),
            a: adapter.a.clone(),
            b: adapter.b.clone(),
            scale: adapter.scale,
        }));
        first += alike.len();
    }
    parts
}

/// Arguments of its gradient.
#[derive(Debug)]
pub struct LoraGrad<'a, F: ?Sized, W> {
    /// Gradient of the output `[rows, outputs]`.
    pub grad: &'a F,
    /// The parts, in the order of their rows, without overlap.
    pub parts: &'a [LoraPart<W>],
    /// Memory for `B^T grad`: `[rows, largest rank]`; its content is unspecified before and after.
    pub middle: &'a mut F,
    /// Gradient through the adapted matrix, and the sum `[rows, inputs]`.
    pub out: &'a mut F,
    pub rows: usize,
}

impl<F: Elements + ?Sized, W: MatrixShape> Lora<'_, F, W> {
    pub(crate) fn check(&self) -> Result<(), OpError> {
        let lens = [self.x.len(), self.middle.len(), self.out.len()];
        check("lora", self.parts, self.rows, lens)
    }
}

impl<F: Elements + ?Sized, A: ?Sized> Adapt<'_, F, A> {
    pub(crate) fn check(&self, sizes: AdapterSizes) -> Result<(), OpError> {
        let rows = self.of_rows.len();
        check_len("adapt", "x", self.x.len(), rows, sizes.inputs)?;
        check_len("adapt", "middle", self.middle.len(), rows, sizes.rank)?;
        check_len("adapt", "out", self.out.len(), rows, sizes.outputs)
    }
}

impl<F: Elements + ?Sized, A: ?Sized> AdaptGrad<'_, F, A> {
    pub(crate) fn check(&self, sizes: AdapterSizes) -> Result<(), OpError> {
        let (op, rows) = ("adapt grad", self.of_rows.len());
        check_len(op, "grad", self.grad.len(), rows, sizes.outputs)?;
        check_len(op, "middle", self.middle.len(), rows, sizes.rank)?;
        check_len(op, "out", self.out.len(), rows, sizes.inputs)
    }
}

impl<F: Elements + ?Sized, W: MatrixShape> LoraGrad<'_, F, W> {
    pub(crate) fn check(&self) -> Result<(), OpError> {
        let lens = [self.out.len(), self.middle.len(), self.grad.len()];
        check("lora grad", self.parts, self.rows, lens)
    }
}

/// `lens`: of what has the width of the inputs, of the rank, of the outputs.
fn check<W: MatrixShape>(
    op: &'static str,
    parts: &[LoraPart<W>],
    rows: usize,
    lens: [usize; 3],
) -> Result<(), OpError> {
    let shape = |what| OpError::Shape { op, what };
    let mut next = 0;
    for part in parts {
        let (a, b) = (&part.a, &part.b);
        let fits = |first: &LoraPart<W>| {
            first.a.inputs() == a.inputs() && first.b.outputs() == b.outputs()
        };
        if a.outputs() != b.inputs() || !parts.first().is_some_and(fits) {
            return Err(shape("the matrices of the adapters do not go together"));
        }
        if part.first < next || part.rows > rows || part.first > rows - part.rows {
            return Err(shape("the parts overlap, are out of order or out of the rows"));
        }
        next = part.first + part.rows;
        let widths = [a.inputs(), a.outputs(), b.outputs()];
        for ((what, width), has) in
            ["inputs", "middle", "outputs"].into_iter().zip(widths).zip(lens)
        {
            check_len(op, what, has, rows, width)?;
        }
    }
    Ok(())
}

/// The definition of [`Lora`].
pub fn reference(args: Lora<'_, [f32], WeightView<'_>>) -> Result<(), OpError> {
    args.check()?;
    check_dtypes("lora", args.parts)?;
    for part in args.parts {
        let (inputs, outputs) = (part.a.inputs(), part.b.outputs());
        let round = |v| convert::round(part.a.dtype(), v);
        for row in part.first..part.first + part.rows {
            let x: Vec<f32> =
                args.x[row * inputs..(row + 1) * inputs].iter().map(|&v| round(v)).collect();
            let t: Vec<f32> = product(&part.a, &x).into_iter().map(round).collect();
            let out = &mut args.out[row * outputs..(row + 1) * outputs];
            for (out, d) in out.iter_mut().zip(product(&part.b, &t)) {
                *out = convert::round(args.round, *out) + round(part.scale * round(d));
            }
        }
    }
    Ok(())
}

/// The definition of [`LoraGrad`].
pub fn reference_grad(args: LoraGrad<'_, [f32], WeightView<'_>>) -> Result<(), OpError> {
    args.check()?;
    for part in args.parts {
        let (inputs, outputs) = (part.a.inputs(), part.b.outputs());
        for row in part.first..part.first + part.rows {
            let t = transposed_product(&part.b, &args.grad[row * outputs..(row + 1) * outputs]);
            let out = &mut args.out[row * inputs..(row + 1) * inputs];
            for (out, d) in out.iter_mut().zip(transposed_product(&part.a, &t)) {
                *out += part.scale * d;
            }
        }
    }
    Ok(())
}

/// Refuses adapters of two dtypes, which no definition covers.
pub(crate) fn check_dtypes(
    op: &'static str,
    parts: &[LoraPart<WeightView<'_>>],
) -> Result<(), OpError> {
    let what = "the matrices of an adapter differ in dtype";
    let differs = parts.iter().any(|part| part.a.dtype() != part.b.dtype());
    if differs { Err(OpError::Shape { op, what }) } else { Ok(()) }
}

fn product(matrix: &WeightView<'_>, x: &[f32]) -> Vec<f32> {
    let mut weights = vec![0.0; matrix.inputs()];
    let mut dot = |output| {
        matrix.row_to_f32(output, &mut weights);
        weights.iter().zip(x).map(|(w, x)| w * x).sum()
    };
    (0..matrix.outputs()).map(&mut dot).collect()
}

fn transposed_product(matrix: &WeightView<'_>, grad: &[f32]) -> Vec<f32> {
    let (mut weights, mut sums) = (vec![0.0; matrix.inputs()], vec![0.0; matrix.inputs()]);
    for (output, grad) in grad.iter().enumerate().take(matrix.outputs()) {
        matrix.row_to_f32(output, &mut weights);
        sums.iter_mut().zip(&weights).for_each(|(sum, w)| *sum += grad * w);
    }
    sums
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbouring_rows_with_one_adapter_are_one_part() {
        let adapter = |number| Some(Adapter { a: number, b: number, scale: 1.0 });
        let adapters = [adapter(0), adapter(1), None];
        let rows = [Some(1), Some(1), None, Some(2), Some(1), Some(0), Some(7)];
        let parts: Vec<_> = parts_of(&adapters, &rows)
            .into_iter()
            .map(|part| (part.first, part.rows, part.a))
            .collect();
        assert_eq!(parts, [(0, 2, 1), (4, 1, 1), (5, 1, 0)]);
        assert!(parts_of(&adapters, &[]).is_empty());
    }
}
