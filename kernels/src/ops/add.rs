//! Additions: the residual, and deep prompts at the first positions of a row.

use shared::dtype::DType;

use super::convert::with_rounding;
use super::{Elements, OpError, check_len};

/// Arguments of `x = round(x + round(y))`; the inner rounding is that of the operation that made
/// `y` in transformers.
#[derive(Debug)]
pub struct Add<'a, F: ?Sized> {
    /// First summand, and the sum `[len]`.
    pub x: &'a mut F,
    /// Second summand `[len]`.
    pub y: &'a F,
    /// Elements.
    pub len: usize,
    /// Dtype to which the sum is rounded.
    pub round: DType,
}

/// Arguments of `x[offset..] = round(x[offset..] + round(prompt))`.
#[derive(Debug)]
pub struct PromptAdd<'a, F: ?Sized> {
    /// Hidden states `[tokens, hidden]`.
    pub x: &'a mut F,
    /// First element that the prompt is added to.
    pub offset: usize,
    /// The prompt, in host memory.
    pub prompt: &'a [f32],
    /// Dtype to which the sum is rounded.
    pub round: DType,
}

impl<F: Elements + ?Sized> Add<'_, F> {
    pub(crate) fn check(&self) -> Result<(), OpError> {
        check_len("add", "x", self.x.len(), 1, self.len)?;
        check_len("add", "y", self.y.len(), 1, self.len)
    }
}

/// The definition of [`Add`].
pub fn reference(args: Add<'_, [f32]>) -> Result<(), OpError> {
    args.check()?;
    with_rounding!(args.round, round => sum(round, &mut args.x[..args.len], args.y));
    Ok(())
}

/// The definition of [`PromptAdd`], also its fast path.
pub fn reference_prompt(args: PromptAdd<'_, [f32]>) -> Result<(), OpError> {
    let has = args.x.len();
    let needs = args.offset.saturating_add(args.prompt.len());
    let x = args.x.get_mut(args.offset..needs).ok_or(OpError::Short {
        op: "prompt add",
        what: "x",
        has,
        needs,
    })?;
    with_rounding!(args.round, round => sum(round, x, args.prompt));
    Ok(())
}

/// The loop of both, compiled for the instruction set of the function that calls it.
#[inline(always)]
pub(crate) fn sum(round: impl Fn(f32) -> f32, x: &mut [f32], y: &[f32]) {
    for (x, y) in x.iter_mut().zip(y) {
        *x = round(*x + round(*y));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_are_rounded_and_prompts_touch_only_their_positions() {
        let mut x = [1.0f32, 1.0, 1.0];
        reference(Add { x: &mut x[..], y: &[0.001f32, 0.5, 9.0][..], len: 2, round: DType::Bf16 })
            .unwrap();
        assert_eq!(x, [1.0, 1.5, 1.0]);
        reference_prompt(PromptAdd { x: &mut x[..], offset: 1, prompt: &[1.0], round: DType::F32 })
            .unwrap();
        assert_eq!(x, [1.0, 2.5, 1.0]);
        let refused = reference_prompt(PromptAdd {
            x: &mut x[..],
            offset: 3,
            prompt: &[1.0],
            round: DType::F32,
        });
        assert!(matches!(refused, Err(OpError::Short { needs: 4, .. })));
    }
}
