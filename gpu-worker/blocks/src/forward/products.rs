//! Products with the matrices of a block and what adapters add to them, whole or in parts that the
//! ranks of a group sum.

use super::*;

/// A product with a matrix that is cut by inputs, as one rank has it.
pub(super) struct CutProduct<'p, 'w, B: Backend> {
    pub(super) x: &'p B::Floats,
    pub(super) linear: &'p Linear<'w, B>,
    /// The product `[tokens, hidden]`.
    pub(super) out: &'p mut B::Floats,
}

/// A product with a matrix, without its adapters.
pub(super) fn product<'p, 'w, B: Backend>(
    linear: &'p Linear<'w, B>,
    out: &'p mut B::Floats,
) -> Product<'p, B::Floats, B::Matrix<'w>> {
    Product { weight: linear.weight.clone(), bias: linear.bias.as_deref(), out }
}

impl<'w, B: Backend> Pass<'_, 'w, B> {
    /// Products of `x` with several matrices.
    pub(crate) fn products<const N: usize>(
        &mut self,
        x: &B::Floats,
        linears: [&Linear<'_, B>; N],
        rows: usize,
        mut outs: [&mut B::Floats; N],
    ) -> Result<(), OpError> {
        let mut outs_of = outs.iter_mut();
        let mut next = || &mut **outs_of.next().expect("as many outputs as matrices");
        let mut parts = linears.map(|linear| product(linear, next()));
        self.backend.products(Products { x, rows, parts: &mut parts })?;
        let mut parts = linears.into_iter().zip(outs);
        parts.try_for_each(|(linear, out)| self.adapt(x, linear, RankInputs::Whole, out))
    }

    pub(crate) fn linear(
        &mut self,
        x: &B::Floats,
        linear: &Linear<'_, B>,
        rows: usize,
        out: &mut B::Floats,
    ) -> Result<(), OpError> {
        self.part(x, linear, rows, &mut *out)?;
        self.adapt(x, linear, RankInputs::Whole, out)
    }

    /// Whether something is to be added to one of these products.
    pub(super) fn is_adapted<'l, 'm: 'l>(
        &self,
        linears: impl IntoIterator<Item = &'l Linear<'m, B>>,
    ) -> bool
    where
        B: 'l,
    {
        linears.into_iter().any(|linear| linear.adapters_for(&self.adapted).is_some())
    }

    /// A product without adapters: of a matrix that is cut by inputs this rank's summand.
    pub(super) fn part(
        &mut self,
        x: &B::Floats,
        linear: &Linear<'_, B>,
        rows: usize,
        out: &mut B::Floats,
    ) -> Result<(), OpError> {
        let (weight, bias) = (linear.weight.clone(), linear.bias.as_deref());
        self.backend.linear(ops::Linear { x, weight, bias, out, rows })
    }

    /// Makes products with matrices that are cut by inputs whole: sums what the ranks have of all of
    /// them at once, and adds what adapters make.
    pub(super) fn whole<const N: usize>(
        &mut self,
        mut products: [CutProduct<'_, 'w, B>; N],
    ) -> Result<(), OpError> {
        let mut outs = products.each_mut().map(|product| &mut *product.out);
        self.backend.all_reduce(&mut outs, self.tokens * self.spec.hidden)?;
        let mut products = products.into_iter();
        products.try_for_each(|product| {
            self.adapt(product.x, product.linear, RankInputs::Cut, product.out)
        })
    }

    /// Adds what adapters make of `x` to the product with their matrix.
    fn adapt(
        &mut self,
        x: &B::Floats,
        linear: &Linear<'_, B>,
        inputs: RankInputs,
        out: &mut B::Floats,
    ) -> Result<(), OpError> {
        // A step that is recorded is recorded for any adapters: what is given here only says that
        // it has some.
        let Some(adapters) = linear.adapters_for(&self.adapted) else {
            return Ok(());
        };
        self.backend.adapt(Adapt {
            x,
            adapters,
            of_rows: &self.adapted,
            middle: &mut *self.rank,
            out,
            round: self.weights.dtype,
            inputs,
        })
    }
}
