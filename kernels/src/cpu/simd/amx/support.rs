//! Whether this machine and its kernel let the process use tiles.

use std::arch::asm;
use std::arch::x86_64::{__cpuid_count, __get_cpuid_max};
use std::sync::OnceLock;

use nix::libc;

/// Asks the kernel for the use of a state that is large; of `arch_prctl`.
const REQUEST_PERMISSION: libc::c_long = 0x1023;
/// The state of tiles, by its number in XCR0.
const TILE_DATA: libc::c_long = 18;

/// Whether tiles of bfloat16 can be used. The first call asks the kernel, for all threads of the process;
/// a sandbox of this project lets it.
pub(in crate::cpu::simd) fn is_available() -> bool {
    static IS_AVAILABLE: OnceLock<bool> = OnceLock::new();
    *IS_AVAILABLE.get_or_init(|| has_tiles(leaf, extended_states()) && is_permitted())
}

/// Registers of a leaf of CPUID: EAX, EBX, ECX, EDX; zero beyond the last leaf.
fn leaf(number: u32, sub: u32) -> [u32; 4] {
    if number > __get_cpuid_max(0).0 {
        return [0; 4];
    }
    let found = __cpuid_count(number, sub);
    [found.eax, found.ebx, found.ecx, found.edx]
}

/// What the kernel saves of a thread (XCR0); 0 where it does not say.
fn extended_states() -> u64 {
    const OSXSAVE: u32 = 1 << 27;
    if leaf(1, 0)[2] & OSXSAVE == 0 {
        return 0;
    }
    let (low, high): (u32, u32);
    // SAFETY: the kernel enabled the instruction.
    unsafe {
        asm!("xgetbv", in("ecx") 0, out("eax") low, out("edx") high,
            options(nomem, nostack, preserves_flags));
    }
    u64::from(high) << 32 | u64::from(low)
}

/// Whether a processor has tiles of bfloat16 in the sizes that the kernels use, and a kernel that saves
/// them.
fn has_tiles(leaf: impl Fn(u32, u32) -> [u32; 4], extended_states: u64) -> bool {
    const BF16_AND_TILE: u32 = 1 << 22 | 1 << 24;
    const CONFIG_AND_DATA: u64 = 1 << 17 | 1 << 18;
    let [_, _, _, features] = leaf(7, 0);
    if features & BF16_AND_TILE != BF16_AND_TILE
        || extended_states & CONFIG_AND_DATA != CONFIG_AND_DATA
    {
        return false;
    }
    let ([_, tile, rows, _], [_, unit, ..]) = (leaf(0x1d, 1), leaf(0x1e, 0));
    let (row_bytes, registers) = (tile & 0xffff, tile >> 16);
    let (most_pairs, most_column_bytes) = (unit & 0xff, unit >> 8 & 0xffff);
    row_bytes >= 64
        && registers >= 8
        && rows & 0xffff >= 16
        && most_pairs >= 16
        && most_column_bytes >= 64
}

/// Whether the kernel lets this process use tiles.
fn is_permitted() -> bool {
    // SAFETY: a call that reads and writes no memory of the process.
    unsafe { libc::syscall(libc::SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Leaves of a Sapphire Rapids server, as the manual describes them.
    fn sapphire_rapids(number: u32, sub: u32) -> [u32; 4] {
        match (number, sub) {
            (7, 0) => [2, 0xf3bf_bfbf, 0xfb41_5f6e, 0xffdd_4432],
            (0x1d, 0) => [1, 0, 0, 0],
            (0x1d, 1) => [0x0400_2000, 0x0008_0040, 16, 0],
            (0x1e, 0) => [0, 0x0000_4010, 0, 0],
            _ => [0; 4],
        }
    }

    #[test]
    fn tiles_need_the_processor_and_the_kernel() {
        let all = 0x000e_02e7 | 1 << 17 | 1 << 18;
        assert!(has_tiles(sapphire_rapids, all));
        assert!(!has_tiles(sapphire_rapids, all & !(1 << 18)));
        assert!(!has_tiles(sapphire_rapids, 0));
        for (number, sub, register, bits) in
            [(7, 0, 3, 1 << 22), (7, 0, 3, 1 << 24), (0x1d, 1, 1, 0x40), (0x1e, 0, 1, 0x10)]
        {
            let lesser = |asked, asked_sub| {
                let mut registers = sapphire_rapids(asked, asked_sub);
                if (asked, asked_sub) == (number, sub) {
                    registers[register] &= !bits;
                }
                registers
            };
            assert!(!has_tiles(lesser, all), "{number:#x} {register}");
        }
    }
}
