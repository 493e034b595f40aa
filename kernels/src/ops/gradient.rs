//! Gradients of the inputs of operations; weights are frozen and have none. Everything is f32: what
//! forward rounds, backward does not. One exception is left to the device: where a matrix is
//! bfloat16, it may round what it multiplies with it, as PyTorch does; and where it is float16 it
//! may round both to bfloat16, which has the range of gradients.
//!
//! ```text
//! linear     dx = dy W
//! norm       u = dy w; h = (x - m) r; dx = r (u - [mean(u)] - h mean(u h))      m = 0 and no [] for the root mean square
//! silu_mul   dup = dy silu(gate); dgate = dy up s (1 + gate (1 - s)), s = 1 / (1 + exp(-gate))
//! gelu tanh  dx = dy (w + 2 x w (1 - w) 0.79788456 (1 + 0.134145 x^2)), w = (1 + tanh) / 2
//! gelu erf   dx = dy (P(x) + x p(x)), P and p of the normal distribution
//! ```

use super::gelu::{GeluKind, erf};
use super::{Elements, MatrixShape, OpError, check_len};
use crate::tensor::WeightView;

/// Arguments of the gradient of a matrix product; `W` is the backend's matrix.
#[derive(Debug)]
pub struct LinearGrad<'a, F: ?Sized, W> {
    /// Gradient of the output `[rows, outputs]`.
    pub grad: &'a F,
    /// Matrix `[outputs, inputs]`.
    pub weight: W,
    /// Gradient of the input `[rows, inputs]`.
    pub out: &'a mut F,
    pub rows: usize,
}

/// Arguments of the gradient of a norm.
#[derive(Debug)]
pub struct NormGrad<'a, F: ?Sized> {
    /// What was normed `[rows, width]`.
    pub x: &'a F,
    /// Scale `[width]`.
    pub weight: &'a F,
    /// Gradient of the output, and that of the input in its place `[rows, width]`.
    pub grad: &'a mut F,
    pub rows: usize,
    /// Features of a row.
    pub width: usize,
    /// Added to the mean square or the variance.
    pub eps: f32,
    /// Whether the mean was taken off: a layer norm.
    pub centered: bool,
}

/// Arguments of the gradient of [`SiluMul`](super::SiluMul).
#[derive(Debug)]
pub struct SiluMulGrad<'a, F: ?Sized> {
    /// Gate before its activation, and its gradient in its place `[len]`.
    pub gate: &'a mut F,
    /// What it was multiplied with, and its gradient in its place `[len]`.
    pub up: &'a mut F,
    /// Gradient of the product `[len]`.
    pub grad: &'a F,
    /// Elements.
    pub len: usize,
}

/// Arguments of the gradient of [`Gelu`](super::Gelu).
#[derive(Debug)]
pub struct GeluGrad<'a, F: ?Sized> {
    /// What was activated `[len]`.
    pub x: &'a F,
    /// Gradient of the result, and that of `x` in its place `[len]`.
    pub grad: &'a mut F,
    /// Elements.
    pub len: usize,
    pub kind: GeluKind,
}

impl<F: Elements + ?Sized, W: MatrixShape> LinearGrad<'_, F, W> {
    pub(crate) fn check(&self) -> Result<(), OpError> {
        let (inputs, outputs) = (self.weight.inputs(), self.weight.outputs());
        check_len("linear grad", "grad", self.grad.len(), self.rows, outputs)?;
        check_len("linear grad", "out", self.out.len(), self.rows, inputs)
    }
}

impl<F: Elements + ?Sized> NormGrad<'_, F> {
    pub(crate) fn check(&self) -> Result<(), OpError> {
        check_len("norm grad", "x", self.x.len(), self.rows, self.width)?;
        check_len("norm grad", "weight", self.weight.len(), 1, self.width)?;
        check_len("norm grad", "grad", self.grad.len(), self.rows, self.width)
    }
}

impl<F: Elements + ?Sized> SiluMulGrad<'_, F> {
    pub(crate) fn check(&self) -> Result<(), OpError> {
        check_len("silu grad", "gate", self.gate.len(), 1, self.len)?;
        check_len("silu grad", "up", self.up.len(), 1, self.len)?;
        check_len("silu grad", "grad", self.grad.len(), 1, self.len)
    }
}

impl<F: Elements + ?Sized> GeluGrad<'_, F> {
    pub(crate) fn check(&self) -> Result<(), OpError> {
        check_len("gelu grad", "x", self.x.len(), 1, self.len)?;
        check_len("gelu grad", "grad", self.grad.len(), 1, self.len)
    }
}

/// The definition of [`LinearGrad`].
pub fn reference_linear(args: LinearGrad<'_, [f32], WeightView<'_>>) -> Result<(), OpError> {
    args.check()?;
    let (inputs, outputs) = (args.weight.inputs(), args.weight.outputs());
    let mut weight = vec![0.0; inputs];
    args.out[..args.rows * inputs].fill(0.0);
    for output in 0..outputs {
        args.weight.row_to_f32(output, &mut weight);
        for (row, out) in args.out.chunks_exact_mut(inputs).take(args.rows).enumerate() {
            let grad = args.grad[row * outputs + output];
            out.iter_mut().zip(&weight).for_each(|(out, w)| *out += grad * w);
        }
    }
    Ok(())
}

/// The definition of [`NormGrad`].
pub fn reference_norm(args: NormGrad<'_, [f32]>) -> Result<(), OpError> {
    args.check()?;
    let width = args.width as f32;
    let rows = args.x.chunks_exact(args.width.max(1)).take(args.rows);
    for (x, grad) in rows.zip(args.grad.chunks_exact_mut(args.width.max(1))) {
        let mean = if args.centered { x.iter().sum::<f32>() / width } else { 0.0 };
        let square = x.iter().map(|v| (v - mean) * (v - mean)).sum::<f32>() / width;
        let scale = 1.0 / (square + args.eps).sqrt();
        let u: Vec<f32> = grad.iter().zip(args.weight).map(|(g, w)| g * w).collect();
        let h: Vec<f32> = x.iter().map(|v| (v - mean) * scale).collect();
        let level = if args.centered { u.iter().sum::<f32>() / width } else { 0.0 };
        let along = u.iter().zip(&h).map(|(u, h)| u * h).sum::<f32>() / width;
        for (i, grad) in grad.iter_mut().enumerate() {
            *grad = scale * (u[i] - level - h[i] * along);
        }
    }
    Ok(())
}

/// The definition of [`SiluMulGrad`].
pub fn reference_silu_mul(args: SiluMulGrad<'_, [f32]>) -> Result<(), OpError> {
    args.check()?;
    let pairs = args.gate.iter_mut().zip(args.up.iter_mut()).zip(args.grad);
    for ((gate, up), grad) in pairs.take(args.len) {
        let (x, sigmoid) = (*gate, 1.0 / (1.0 + (-*gate).exp()));
        *gate = grad * *up * sigmoid * (1.0 + x * (1.0 - sigmoid));
        *up = grad * x * sigmoid;
    }
    Ok(())
}

/// The definition of [`GeluGrad`], in f64.
pub fn reference_gelu(args: GeluGrad<'_, [f32]>) -> Result<(), OpError> {
    args.check()?;
    for (x, grad) in args.x.iter().zip(args.grad.iter_mut()).take(args.len) {
        let x = f64::from(*x);
        let slope = match args.kind {
            GeluKind::Tanh => {
                let t = (0.797_884_56 * x * (1.0 + 0.044_715 * x * x)).tanh();
                let inner = 0.797_884_56 * (1.0 + 0.134_145 * x * x);
                0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * inner
            }
            GeluKind::Erf => {
                let density = (-0.5 * x * x).exp() / (2.0 * std::f64::consts::PI).sqrt();
                0.5 * (1.0 + erf(x / std::f64::consts::SQRT_2)) + x * density
            }
        };
        *grad = (f64::from(*grad) * slope) as f32;
    }
    Ok(())
}
