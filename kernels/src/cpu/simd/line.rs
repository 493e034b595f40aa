//! A cache line of packed numbers: the unit in which panels and strips are stored, so that vector
//! loads never straddle two lines.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;

/// Bytes of a cache line and of an AVX-512 vector.
pub(super) const LINE: usize = 64;

/// 64 bytes, aligned to a cache line.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
pub(super) struct CacheLine([u8; LINE]);

/// A line of zeros.
pub(super) const ZEROS: CacheLine = CacheLine([0; LINE]);

#[cfg(target_arch = "x86_64")]
impl CacheLine {
    /// Returns the line as a vector.
    #[inline]
    #[target_feature(enable = "avx512f")]
    pub(super) fn get(&self) -> __m512i {
        // SAFETY: 64 bytes on a line.
        unsafe { _mm512_load_si512(self.0.as_ptr().cast()) }
    }

    /// Stores a vector in the line.
    #[inline]
    #[target_feature(enable = "avx512f")]
    pub(super) fn set(&mut self, vector: __m512i) {
        // SAFETY: 64 bytes on a line.
        unsafe { _mm512_store_si512(self.0.as_mut_ptr().cast(), vector) };
    }
}

/// Sets the length of reused memory to `lines`; the content of lines it already had is unspecified.
pub(super) fn resize(memory: &mut Vec<CacheLine>, lines: usize) {
    memory.resize(lines, ZEROS);
}

/// Views lines as f32 numbers.
#[inline(always)]
pub(super) fn floats(lines: &mut [CacheLine]) -> &mut [f32] {
    let count = lines.len() * (LINE / size_of::<f32>());
    // SAFETY: the same initialized memory, aligned more than f32 asks for; every pattern is an f32.
    unsafe { std::slice::from_raw_parts_mut(lines.as_mut_ptr().cast(), count) }
}

/// Asks for the cache line at `p`: into the first-level cache if it `IS_NEAR` to be read, else into the
/// second. The next strip of a wide matrix does not fit the first beside the present one, which also holds
/// the inputs.
#[inline(always)]
pub(super) fn prefetch<const IS_NEAR: bool>(p: *const u8) {
    #[cfg(target_arch = "x86_64")]
    match IS_NEAR {
        // SAFETY: a prefetch reads nothing, whatever the address; every x86-64 has it.
        true => unsafe { _mm_prefetch::<_MM_HINT_T0>(p.cast()) },
        // SAFETY: as above.
        false => unsafe { _mm_prefetch::<_MM_HINT_T1>(p.cast()) },
    }
    #[cfg(target_arch = "aarch64")]
    match IS_NEAR {
        // SAFETY: as above; every 64-bit ARM has it.
        true => unsafe {
            std::arch::asm!("prfm pldl1keep, [{}]", in(reg) p,
                options(readonly, nostack, preserves_flags));
        },
        // SAFETY: as above.
        false => unsafe {
            std::arch::asm!("prfm pldl2keep, [{}]", in(reg) p,
                options(readonly, nostack, preserves_flags));
        },
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let _ = p;
}
