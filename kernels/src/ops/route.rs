//! The router of a mixture of experts: which experts a token goes to and with what weights, and the
//! moves of rows to and from the experts.
//!
//! ```text
//! p = softmax(round(logits)); E = the `chosen` largest, of equals the first; weights = round(p_e / sum over E of p) for e in E, else 0
//! ```
//! (transformers `MixtralSparseMoeBlock`.)

use shared::dtype::DType;

use super::{Elements, OpError, check_len, convert};

/// Arguments of the router.
#[derive(Debug)]
pub struct Route<'a, F: ?Sized> {
    /// `[tokens, experts]`: logits, and the weights in their place.
    pub logits: &'a mut F,
    pub tokens: usize,
    pub experts: usize,
    /// Experts per token, 1 to `experts`.
    pub chosen: usize,
    /// Dtype to which logits and weights are rounded: the block dtype.
    pub round: DType,
}

/// Arguments of `out[i] = x[index[i]]`, row by row.
#[derive(Debug)]
pub struct Gather<'a, F: ?Sized> {
    /// Rows to take from `[rows, width]`.
    pub x: &'a F,
    /// Which rows, in host memory.
    pub index: &'a [u32],
    /// Features of a row.
    pub width: usize,
    /// Output `[index.len(), width]`.
    pub out: &'a mut F,
}

/// Arguments of `out[index[i]] = round(out[index[i]] + round(weights[i] * round(x[i])))`, row by
/// row; no row is named twice.
#[derive(Debug)]
pub struct ScatterAdd<'a, F: ?Sized> {
    /// What is added `[index.len(), width]`.
    pub x: &'a F,
    /// Which rows of `out`, in host memory.
    pub index: &'a [u32],
    /// Weight of each, in host memory.
    pub weights: &'a [f32],
    /// Features of a row.
    pub width: usize,
    /// Sums `[rows, width]`.
    pub out: &'a mut F,
    /// Dtype to which products and sums are rounded.
    pub round: DType,
}

impl<F: Elements + ?Sized> Route<'_, F> {
    pub(crate) fn check(&self) -> Result<(), OpError> {
        check_chosen(self.chosen, self.experts)?;
        check_len("route", "logits", self.logits.len(), self.tokens, self.experts)
    }
}

/// The definition of [`Route`], also its fast path.
pub fn reference(args: Route<'_, [f32]>) -> Result<(), OpError> {
    args.check()?;
    let rows = args.logits.chunks_exact_mut(args.experts).take(args.tokens);
    for row in rows {
        row.iter_mut().for_each(|v| *v = convert::round(args.round, *v));
        let chosen = choose(row, args.chosen);
        let sum: f32 = chosen.iter().map(|&e| row[e]).sum();
        let weights: Vec<f32> =
            chosen.iter().map(|&e| convert::round(args.round, row[e] / sum)).collect();
        row.fill(0.0);
        for (e, weight) in chosen.into_iter().zip(weights) {
            row[e] = weight;
        }
    }
    Ok(())
}

/// Replaces the logits of a token by their probabilities; the experts it goes to, most probable
/// first.
pub(crate) fn choose(row: &mut [f32], count: usize) -> Vec<usize> {
    let top = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    row.iter_mut().for_each(|v| *v = (*v - top).exp());
    let total: f32 = row.iter().sum();
    row.iter_mut().for_each(|v| *v /= total);
    let mut order: Vec<usize> = (0..row.len()).collect();
    // Stable: of equals the first stays first.
    order.sort_by(|&a, &b| row[b].total_cmp(&row[a]));
    order.truncate(count);
    order
}

/// Arguments of `out[index[i], expert] = sum of silu(gate[i]) up[i] grad[i]`: the gradient of the
/// weight of one expert, where `grad` is that of the middle of its MLP when its output weighs one.
#[derive(Debug)]
pub struct GateDot<'a, F: ?Sized> {
    /// Gate before its activation `[index.len(), width]`.
    pub gate: &'a F,
    /// Shaped as the gate.
    pub up: &'a F,
    /// Shaped as the gate.
    pub grad: &'a F,
    /// Tokens of the expert, in host memory.
    pub index: &'a [u32],
    /// Width of the middle.
    pub width: usize,
    pub expert: usize,
    pub experts: usize,
    /// `[tokens, experts]`.
    pub out: &'a mut F,
}

/// Arguments of the gradient of [`Route`]: with `S` the sum of the probabilities of the chosen,
/// `dp_e = (dw_e - sum dw w) / S` for them and 0 for others, `dlogits = p (dp - sum p dp)`.
#[derive(Debug)]
pub struct RouteGrad<'a, F: ?Sized> {
    /// Logits, and their gradient in their place `[tokens, experts]`.
    pub logits: &'a mut F,
    /// Gradient of the weights, zero for experts that were not chosen `[tokens, experts]`.
    pub grad: &'a F,
    pub tokens: usize,
    pub experts: usize,
    /// Experts per token.
    pub chosen: usize,
    /// Dtype to which the logits are rounded, as in forward.
    pub round: DType,
}

impl<F: Elements + ?Sized> GateDot<'_, F> {
    pub(crate) fn check(&self) -> Result<(), OpError> {
        let op = "gate dot";
        for (what, has) in
            [("gate", self.gate.len()), ("up", self.up.len()), ("grad", self.grad.len())]
        {
            check_len(op, what, has, self.index.len(), self.width)?;
        }
        check_index(op, self.index, self.out.len(), self.experts)?;
        if self.expert >= self.experts {
            let what = "there is no such expert";
            return Err(OpError::Shape { op, what });
        }
        Ok(())
    }
}

impl<F: Elements + ?Sized> RouteGrad<'_, F> {
    pub(crate) fn check(&self) -> Result<(), OpError> {
        check_chosen(self.chosen, self.experts)?;
        let (tokens, experts) = (self.tokens, self.experts);
        check_len("route grad", "logits", self.logits.len(), tokens, experts)?;
        check_len("route grad", "grad", self.grad.len(), tokens, experts)
    }
}

pub(crate) fn check_chosen(chosen: usize, experts: usize) -> Result<(), OpError> {
    if chosen == 0 || chosen > experts {
        return Err(OpError::Shape {
            op: "route",
            what: "the number of chosen experts is not from 1 to all",
        });
    }
    Ok(())
}

/// The definition of [`GateDot`], also its fast path.
pub fn reference_gate_dot(args: GateDot<'_, [f32]>) -> Result<(), OpError> {
    args.check()?;
    for (i, &token) in args.index.iter().enumerate() {
        let range = i * args.width..(i + 1) * args.width;
        let (gate, up) = (&args.gate[range.clone()], &args.up[range.clone()]);
        let products = gate.iter().zip(up).zip(&args.grad[range]);
        let sum: f32 = products.map(|((x, up), grad)| x / (1.0 + (-x).exp()) * up * grad).sum();
        args.out[token as usize * args.experts + args.expert] = sum;
    }
    Ok(())
}

/// The definition of [`RouteGrad`], also its fast path.
pub fn reference_grad(args: RouteGrad<'_, [f32]>) -> Result<(), OpError> {
    args.check()?;
    let rows = args.logits.chunks_exact_mut(args.experts).take(args.tokens);
    for (row, grad) in rows.zip(args.grad.chunks_exact(args.experts)) {
        row.iter_mut().for_each(|v| *v = convert::round(args.round, *v));
        let chosen = choose(row, args.chosen);
        let sum: f32 = chosen.iter().map(|&e| row[e]).sum();
        let mean: f32 = chosen.iter().map(|&e| grad[e] * row[e] / sum).sum();
        let slopes: Vec<f32> = (0..args.experts)
            .map(|e| if chosen.contains(&e) { (grad[e] - mean) / sum } else { 0.0 })
            .collect();
        let level: f32 = row.iter().zip(&slopes).map(|(p, s)| p * s).sum();
        for (p, slope) in row.iter_mut().zip(&slopes) {
            *p *= slope - level;
        }
    }
    Ok(())
}

/// Refuses an index that names a row past `rows` elements.
pub(crate) fn check_index(
    op: &'static str,
    index: &[u32],
    rows: usize,
    width: usize,
) -> Result<(), OpError> {
    let needs = index.iter().max().map_or(0, |&last| last as usize + 1);
    check_len(op, "rows", rows, needs, width)
}

/// The definition of [`Gather`], also its fast path.
pub fn reference_gather(args: Gather<'_, [f32]>) -> Result<(), OpError> {
    check_index("gather", args.index, args.x.len(), args.width)?;
    check_len("gather", "out", args.out.len(), args.index.len(), args.width)?;
    let out = args.out.chunks_exact_mut(args.width.max(1));
    for (out, &row) in out.zip(args.index) {
        let start = row as usize * args.width;
        out.copy_from_slice(&args.x[start..start + args.width]);
    }
    Ok(())
}

/// The definition of [`ScatterAdd`], also its fast path.
pub fn reference_scatter_add(args: ScatterAdd<'_, [f32]>) -> Result<(), OpError> {
    check_index("scatter", args.index, args.out.len(), args.width)?;
    check_len("scatter", "x", args.x.len(), args.index.len(), args.width)?;
    check_len("scatter", "weights", args.weights.len(), 1, args.index.len())?;
    let round = |v| convert::round(args.round, v);
    let x = args.x.chunks_exact(args.width.max(1));
    for ((x, &row), &weight) in x.zip(args.index).zip(args.weights) {
        let start = row as usize * args.width;
        for (out, v) in args.out[start..start + args.width].iter_mut().zip(x) {
            *out = round(*out + round(weight * round(*v)));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn route(logits: &mut [f32], experts: usize, chosen: usize) -> Result<(), OpError> {
        reference(Route {
            tokens: logits.len() / experts,
            logits,
            experts,
            chosen,
            round: DType::F32,
        })
    }

    #[test]
    fn weights_of_the_chosen_sum_to_one_and_equals_go_to_the_first() {
        let mut logits = [0.0, 1.0, -3.0, 1.0, 2.0, 2.0, 2.0, 2.0];
        route(&mut logits, 4, 2).unwrap();
        assert_eq!(logits, [0.0, 0.5, 0.0, 0.5, 0.5, 0.5, 0.0, 0.0]);
        let mut logits = [3.0f32.ln(), 0.0, f32::MIN];
        route(&mut logits, 3, 3).unwrap();
        assert!((logits[0] - 0.75).abs() < 1e-6 && logits[2] == 0.0);
        assert!(route(&mut logits, 3, 4).is_err() && route(&mut logits, 3, 0).is_err());
    }

    #[test]
    fn rows_go_to_an_expert_and_come_back_weighed() {
        let x = [1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0];
        let mut taken = [f32::NAN; 4];
        let gather = |index: &[u32], out: &mut [f32]| {
            reference_gather(Gather { x: &x[..], index, width: 2, out })
        };
        gather(&[2, 0], &mut taken).unwrap();
        assert_eq!(taken, [5.0, 6.0, 1.0, 2.0]);
        assert!(gather(&[3], &mut taken).is_err());
        let mut out = [10.0f32; 6];
        let mut scatter = |index: &[u32]| {
            reference_scatter_add(ScatterAdd {
                x: &taken[..],
                index,
                weights: &[0.5, 2.0],
                width: 2,
                out: &mut out[..],
                round: DType::F32,
            })
        };
        scatter(&[2, 0]).unwrap();
        assert!(scatter(&[0, 3]).is_err());
        assert_eq!(out, [12.0, 14.0, 10.0, 10.0, 12.5, 13.0]);
    }
}
