//! Operations that are several of the others, one after the other, with their bits: a device that
//! does them in one launch reads what lies between them once. Their definition is those operations.

use shared::dtype::DType;

use super::{
    Add, Elements, KvAppend, MatrixShape, OpError, PagePool, Rmsnorm, Rope, SiluMul, check_len,
};
use crate::kv::{StepRow, total_tokens};

/// Several products of the same input: [`Linear`](super::Linear), each with its own matrix.
#[derive(Debug)]
pub struct Products<'a, 'p, F: ?Sized, W> {
    /// Input `[rows, inputs]`.
    pub x: &'a F,
    /// Rows.
    pub rows: usize,
    /// What it is multiplied with.
    pub parts: &'p mut [Product<'a, F, W>],
}

/// One of several products of the same input; `W` is the backend's matrix.
#[derive(Debug)]
pub struct Product<'a, F: ?Sized, W> {
    /// Matrix `[outputs, inputs]`.
    pub weight: W,
    /// Added to every row, `[outputs]`.
    pub bias: Option<&'a F>,
    /// Output `[rows, outputs]`.
    pub out: &'a mut F,
}

/// Arguments of the products of a gated MLP and its activation: [`Products`], then
/// [`SiluMul`].
#[derive(Debug)]
pub struct Gated<'a, F: ?Sized, W> {
    /// Input `[rows, inputs]`.
    pub x: &'a F,
    /// Rows.
    pub rows: usize,
    /// Gate, whose output becomes the result, and up, whose output is unspecified afterwards.
    pub parts: [Product<'a, F, W>; 2],
    /// The block dtype.
    pub round: DType,
}

/// Arguments of a residual and the norm behind it: [`Add`], then [`Rmsnorm`] or, with a bias,
/// [`Layernorm`](super::Layernorm) of the sum.
#[derive(Debug)]
pub struct AddNorm<'a, F: ?Sized> {
    /// First summand, and the sum `[rows, width]`.
    pub x: &'a mut F,
    /// Second summand `[rows, width]`.
    pub y: &'a F,
    /// Scale of the norm `[width]`.
    pub weight: &'a F,
    /// Added at the end, of a layer norm `[width]`.
    pub bias: Option<&'a F>,
    /// The norm of the sum `[rows, width]`.
    pub out: &'a mut F,
    /// Rows.
    pub rows: usize,
    /// Features of a row.
    pub width: usize,
    /// Added to the mean square or the variance.
    pub eps: f32,
    /// The block dtype.
    pub round: DType,
}

/// Arguments of the rotation of queries and keys, and of the append: [`Rope`] twice, then
/// [`KvAppend`].
#[derive(Debug)]
pub struct RopeAppend<'a, F: ?Sized, P> {
    /// Queries, rotated in place `[tokens, heads, head_dim]`.
    pub q: &'a mut F,
    /// Keys before rotation `[tokens, kv_heads, head_dim]`; unspecified afterwards.
    pub k: &'a mut F,
    /// Values, shaped as the keys.
    pub v: &'a F,
    /// From [`RopeTable`](super::RopeTable), of the dtype of the pages.
    pub table: &'a F,
    /// The batch.
    pub rows: &'a [StepRow<'a>],
    /// Query heads per kv head.
    pub group: usize,
    /// Where keys and values go.
    pub pages: &'a mut P,
}

impl<F: Elements + ?Sized, W: MatrixShape> Products<'_, '_, F, W> {
    pub(crate) fn check(&self) -> Result<(), OpError> {
        for part in self.parts.iter() {
            let (outputs, inputs) = (part.weight.outputs(), part.weight.inputs());
            check_len("linear", "x", self.x.len(), self.rows, inputs)?;
            check_len("linear", "out", part.out.len(), self.rows, outputs)?;
            let bias = part.bias.map_or(outputs, Elements::len);
            check_len("linear", "bias", bias, 1, outputs)?;
        }
        Ok(())
    }
}

impl<F: Elements + ?Sized, W: MatrixShape> Gated<'_, F, W> {
    pub(crate) fn check(&mut self) -> Result<(), OpError> {
        let [gate, up] = &self.parts;
        if gate.weight.outputs() != up.weight.outputs() {
            return Err(OpError::Shape { op: "gated", what: "gate and up have different outputs" });
        }
        Products { x: self.x, rows: self.rows, parts: &mut self.parts }.check()
    }

    /// The activation, as an operation of its own.
    pub(crate) fn activation(&mut self) -> SiluMul<'_, F> {
        let [gate, up] = &mut self.parts;
        let len = self.rows * gate.weight.outputs();
        SiluMul { gate: &mut *gate.out, up: &*up.out, len, round: self.round }
    }
}

impl<F: Elements + ?Sized> AddNorm<'_, F> {
    pub(crate) fn check(&mut self) -> Result<(), OpError> {
        let (rows, width, round) = (self.rows, self.width, self.round);
        Rmsnorm {
            x: self.y,
            weight: self.weight,
            out: &mut *self.out,
            rows,
            width,
            eps: self.eps,
            round,
        }
        .check()?;
        let (x, y, len) = (&mut *self.x, self.y, rows * width);
        Add { x, y, len, round }.check()?;
        let bias = self.bias.map_or(width, Elements::len);
        check_len("layernorm", "bias", bias, 1, width)
    }
}

impl<F: Elements + ?Sized, P: PagePool> RopeAppend<'_, F, P> {
    pub(crate) fn check(&mut self) -> Result<(), OpError> {
        let layout = self.pages.layout();
        Rope {
            x: &mut *self.q,
            table: self.table,
            tokens: total_tokens(self.rows),
            heads: layout.kv_heads * self.group,
            head_dim: layout.head_dim,
            round: layout.dtype,
            inverse: false,
        }
        .check()?;
        KvAppend { keys: &*self.k, values: self.v, rows: self.rows, pages: &mut *self.pages }
            .check()
    }
}
