//! Matrices that products of bfloat16 pairs read, whatever the instructions.

use crate::quant::{int8, nf4};

/// bfloat16 as stored.
#[derive(Clone, Copy)]
pub(in crate::cpu::simd) struct Bf16<'a> {
    /// `[outputs, inputs]`.
    pub(in crate::cpu::simd) bytes: &'a [u8],
    pub(in crate::cpu::simd) inputs: usize,
}

impl Bf16<'_> {
    /// Where a row begins.
    pub(super) fn start(self, output: usize) -> *const u8 {
        self.bytes.as_ptr().wrapping_add(output * self.inputs * 2)
    }
}

/// INT8: the codes as bfloat16, which holds them exactly; the scale of a row comes after the sum.
#[derive(Clone, Copy)]
pub(in crate::cpu::simd) struct Int8<'a> {
    pub(in crate::cpu::simd) parts: int8::Int8Parts<'a>,
    pub(in crate::cpu::simd) inputs: usize,
}

impl Int8<'_> {
    /// Where the codes of a row begin.
    pub(super) fn start(self, output: usize) -> *const u8 {
        self.parts.codes.as_ptr().wrapping_add(output * self.inputs)
    }
}

/// NF4 whose rows are whole groups of 64: the sixteen levels times the group's scale, rounded to
/// bfloat16, are a table in a register.
#[derive(Clone, Copy)]
pub(in crate::cpu::simd) struct Nf4<'a> {
    pub(in crate::cpu::simd) parts: nf4::Nf4Parts<'a>,
    pub(in crate::cpu::simd) inputs: usize,
}

impl Nf4<'_> {
    /// Where the codes of a row begin.
    pub(super) fn start(self, output: usize) -> *const u8 {
        self.parts.codes.as_ptr().wrapping_add(output * self.inputs / 2)
    }
}
