//! `gate = round(silu(round(gate))) * round(up)` with `silu(x) = x / (1 + exp(-x))`, the middle of
//! a gated MLP. The roundings are those of transformers, where each operation returns the block
//! dtype; the product is rounded by the matrix that takes it.

use shared::dtype::DType;

use super::{Elements, OpError, check_len, convert};

/// Arguments of the gate.
#[derive(Debug)]
pub struct SiluMul<'a, F: ?Sized> {
    /// Gate, and the result `[len]`.
    pub gate: &'a mut F,
    /// Multiplied with the activated gate `[len]`.
    pub up: &'a F,
    /// Elements.
    pub len: usize,
    /// Dtype to which gate, its activation and `up` are rounded: the block dtype.
    pub round: DType,
}

impl<F: Elements + ?Sized> SiluMul<'_, F> {
    pub(crate) fn check(&self) -> Result<(), OpError> {
        check_len("silu", "gate", self.gate.len(), 1, self.len)?;
        check_len("silu", "up", self.up.len(), 1, self.len)
    }
}

/// The definition.
pub fn reference(args: SiluMul<'_, [f32]>) -> Result<(), OpError> {
    args.check()?;
    for (gate, up) in args.gate.iter_mut().zip(args.up).take(args.len) {
        let x = convert::round(args.round, *gate);
        let activated = convert::round(args.round, x / (1.0 + (-x).exp()));
        *gate = activated * convert::round(args.round, *up);
    }
    Ok(())
}
