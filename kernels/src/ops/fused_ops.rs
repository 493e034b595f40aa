//! Operations that are several of the others, one after the other, with their bits: a device that
//! does them in one launch reads what lies between them once. Their definition is those operations.

use shared::dtype::DType;

use super::{
    Add, Alibi, Attention, Elements, KvAppend, MatrixShape, OpError, PagePool, Rmsnorm, Rope,
    SiluMul, check_len,
};
use crate::kv::{StepRow, total_tokens};

/// Several products of the same input: [`Linear`](super::Linear), each with its own matrix.
#[derive(Debug)]
pub struct Products<'a, 'p, F: ?Sized, W> {
    /// Input `[rows, inputs]`.
    pub x: &'a F,
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
    pub rows: usize,
    /// Gate, whose output becomes the result, and up, whose output is unspecified afterwards.
    pub parts: [Product<'a, F, W>; 2],
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
    pub rows: usize,
    /// Features of a row.
    pub width: usize,
    /// Added to the mean square or the variance.
    pub eps: f32,
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
    pub rows: &'a [StepRow<'a>],
    /// Query heads per kv head.
    pub group: usize,
    /// Where keys and values go.
    pub pages: &'a mut P,
}

/// Arguments of the attention of new tokens whose keys and values are not in the pages yet:
/// [`RopeAppend`], or [`KvAppend`] where nothing rotates, then [`Attention`].
#[derive(Debug)]
pub struct AppendAttention<'a, F: ?Sized, P> {
    /// Queries before rotation `[tokens, heads, head_dim]`; unspecified afterwards.
    pub q: &'a mut F,
    /// Keys before rotation `[tokens, kv_heads, head_dim]`; unspecified afterwards.
    pub k: &'a mut F,
    /// Values, shaped as the keys.
    pub v: &'a F,
    /// From [`RopeTable`](super::RopeTable), of the dtype of the pages; `None` where positions do
    /// not rotate.
    pub table: Option<&'a F>,
    pub rows: &'a [StepRow<'a>],
    /// Query heads per kv head.
    pub group: usize,
    /// Where keys and values go, beside those of the prefixes.
    pub pages: &'a mut P,
    /// Divides the scores: `head_dim^1/2`.
    pub divisor: f32,
    /// Bias of the scores by position.
    pub alibi: Option<Alibi<'a>>,
    /// As in [`Attention`].
    pub window: usize,
    /// Output, shaped as `q`.
    pub out: &'a mut F,
}

/// Arguments of an addition, a norm, and products with what comes out: [`AddNorm`], then
/// [`Products`] or [`Gated`].
#[derive(Debug)]
pub struct NormedProducts<'a, 'p, F: ?Sized, W> {
    /// The addition and the norm, whose output is unspecified afterwards.
    pub norm: AddNorm<'a, F>,
    /// A place for the sum beside `x` of the norm, shaped alike; one of the two has it afterwards,
    /// as [`SumPlace`] says, and the other is unspecified.
    pub sum: &'a mut F,
    pub parts: &'p mut [Product<'a, F, W>],
    /// Whether they are gate and up, as in [`Gated`].
    pub is_gated: bool,
}

/// Where the sum of [`NormedProducts`] is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SumPlace {
    /// In `x` of the norm.
    X,
    /// In [`NormedProducts::sum`].
    Sum,
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

impl<F: Elements + ?Sized, W: MatrixShape + Clone> NormedProducts<'_, '_, F, W> {
    pub(crate) fn check(&mut self) -> Result<(), OpError> {
        self.norm.check()?;
        check_len("normed products", "sum", self.sum.len(), self.norm.rows, self.norm.width)?;
        if self.parts.iter().any(|part| part.weight.inputs() != self.norm.width) {
            let what = "a matrix with other inputs than the norm has outputs";
            return Err(OpError::Shape { op: "normed products", what });
        }
        let (rows, round, is_gated) = (self.norm.rows, self.norm.round, self.is_gated);
        let (x, mut parts) = self.products();
        match is_gated {
            true => Gated { x, rows, parts: pair(parts)?, round }.check(),
            false => Products { x, rows, parts: &mut parts }.check(),
        }
    }
}

impl<F: ?Sized, W: Clone> NormedProducts<'_, '_, F, W> {
    /// What is multiplied, and the products.
    pub(crate) fn products(&mut self) -> (&F, Vec<Product<'_, F, W>>) {
        let parts = self.parts.iter_mut().map(|part| Product {
            weight: part.weight.clone(),
            bias: part.bias,
            out: &mut *part.out,
        });
        (&*self.norm.out, parts.collect())
    }
}

/// Gate and up.
///
/// # Errors
/// When there are not two products.
pub(crate) fn pair<T>(parts: Vec<T>) -> Result<[T; 2], OpError> {
    let what = "other than two matrices";
    parts.try_into().map_err(|_| OpError::Shape { op: "gated", what })
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

impl<F: Elements + ?Sized, P: PagePool> AppendAttention<'_, F, P> {
    pub(crate) fn check(&mut self) -> Result<(), OpError> {
        let (rows, group) = (self.rows, self.group);
        let (q, k, v, pages) = (&mut *self.q, &mut *self.k, self.v, &mut *self.pages);
        match self.table {
            Some(table) => RopeAppend { q, k, v, table, rows, group, pages }.check()?,
            None => KvAppend { keys: &*k, values: v, rows, pages }.check()?,
        }
        self.attention().check()
    }
}

impl<F: ?Sized, P> AppendAttention<'_, F, P> {
    /// The last of the operations.
    pub(crate) fn attention(&mut self) -> Attention<'_, F, P> {
        Attention {
            q: &*self.q,
            pages: &*self.pages,
            rows: self.rows,
            group: self.group,
            divisor: self.divisor,
            alibi: self.alibi,
            window: self.window,
            out: &mut *self.out,
            logsum: None,
        }
    }
}
