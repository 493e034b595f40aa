//! `gate = gate / (1 + exp(-gate)) * up`, the middle of a gated MLP.

use super::{OpError, check_len};

/// Arguments of the gate.
#[derive(Debug)]
pub struct SiluMul<'a, F: ?Sized> {
    /// Gate, and the result `[len]`.
    pub gate: &'a mut F,
    /// Multiplied with the activated gate `[len]`.
    pub up: &'a F,
    /// Elements.
    pub len: usize,
}

impl SiluMul<'_, [f32]> {
    pub(crate) fn check(&self) -> Result<(), OpError> {
        check_len("silu", "gate", self.gate.len(), 1, self.len)?;
        check_len("silu", "up", self.up.len(), 1, self.len)
    }
}

/// The definition.
pub fn reference(args: SiluMul<'_, [f32]>) -> Result<(), OpError> {
    args.check()?;
    for (gate, up) in args.gate.iter_mut().zip(args.up).take(args.len) {
        *gate = *gate / (1.0 + (-*gate).exp()) * up;
    }
    Ok(())
}
