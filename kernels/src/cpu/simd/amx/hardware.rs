//! The tile instructions of the machine. Stable Rust has no functions for them; the assembler knows them.
//!
//! No compiler touches tile registers on its own, so nothing is clobbered. All of these are volatile:
//! the compiler keeps their order.

use std::arch::asm;

use super::{TileConfig, Tiles};

/// The registers of this thread.
#[derive(Debug, Default)]
pub(in crate::cpu::simd) struct Hardware;

impl Tiles for Hardware {
    #[inline(always)]
    unsafe fn configure(&mut self, config: &TileConfig) {
        // SAFETY: 64 bytes that are a valid configuration; the machine has the instruction.
        unsafe {
            asm!("ldtilecfg [{}]", in(reg) config, options(nostack, preserves_flags, readonly));
        }
    }

    #[inline(always)]
    unsafe fn release(&mut self) {
        // SAFETY: as the caller says.
        unsafe { asm!("tilerelease", options(nomem, nostack, preserves_flags)) };
    }

    #[inline(always)]
    unsafe fn zero<const T: usize>(&mut self) {
        // SAFETY: as the caller says.
        unsafe { asm!("tilezero tmm{}", const T, options(nomem, nostack, preserves_flags)) };
    }

    #[inline(always)]
    unsafe fn load<const T: usize>(&mut self, from: *const u8, stride: usize) {
        // SAFETY: as the caller says.
        unsafe {
            asm!("tileloadd tmm{}, [{} + 1*{}]", const T, in(reg) from, in(reg) stride,
                options(nostack, preserves_flags, readonly));
        }
    }

    #[inline(always)]
    unsafe fn store<const T: usize>(&self, to: *mut u8, stride: usize) {
        // SAFETY: as the caller says.
        unsafe {
            asm!("tilestored [{} + 1*{}], tmm{}", in(reg) to, in(reg) stride, const T,
                options(nostack, preserves_flags));
        }
    }

    #[inline(always)]
    unsafe fn multiply_add<const C: usize, const A: usize, const B: usize>(&mut self) {
        // SAFETY: as the caller says.
        unsafe {
            asm!("tdpbf16ps tmm{}, tmm{}, tmm{}", const C, const A, const B,
                options(nomem, nostack, preserves_flags));
        }
    }
}
