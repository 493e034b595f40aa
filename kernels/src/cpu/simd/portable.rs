//! Tiles of the matrix product without intrinsics, for any target.

use half::f16;
use shared::dtype::DType;

use super::lanes::{LANES, mul_add, tree_sum};
use super::linear::Kernel;

/// f32 weights.
pub(super) struct F32;
/// bfloat16 weights.
pub(super) struct Bf16;
/// float16 weights.
pub(super) struct F16;

const FMA: bool = cfg!(any(target_arch = "aarch64", target_feature = "fma"));

macro_rules! portable {
    ($kernel:ty, $bytes:literal, |$b:ident| $widen:expr) => {
        impl Kernel for $kernel {
            const INPUT: DType = DType::F32;
            const WEIGHT_BYTES: usize = $bytes;

            unsafe fn tile<const O: usize, const R: usize>(
                weight: &[u8],
                x: &[u8],
                inputs: usize,
            ) -> [[f32; O]; R] {
                std::array::from_fn(|r| {
                    let x = &x[r * inputs * 4..(r + 1) * inputs * 4];
                    std::array::from_fn(|o| {
                        dot(
                            &weight[o * inputs * $bytes..(o + 1) * inputs * $bytes],
                            x,
                            |$b: [u8; $bytes]| $widen,
                        )
                    })
                })
            }
        }
    };
}
portable!(F32, 4, |b| f32::from_le_bytes(b));
portable!(Bf16, 2, |b| f32::from_bits(
    u32::from(u16::from_le_bytes(b)) << 16
));
portable!(F16, 2, |b| f16::from_le_bytes(b).to_f32());

#[inline(always)]
fn dot<const BYTES: usize>(weight: &[u8], x: &[u8], widen: impl Fn([u8; BYTES]) -> f32) -> f32 {
    let mut sums = [0.0; LANES];
    let (weight, _) = weight.as_chunks::<BYTES>();
    let (x, _) = x.as_chunks::<4>();
    let (mut weight, mut x) = (weight.chunks_exact(LANES), x.chunks_exact(LANES));
    for (weight, x) in (&mut weight).zip(&mut x) {
        for i in 0..LANES {
            sums[i] = mul_add::<FMA>(widen(weight[i]), f32::from_le_bytes(x[i]), sums[i]);
        }
    }
    for (i, (weight, x)) in weight.remainder().iter().zip(x.remainder()).enumerate() {
        sums[i] = mul_add::<FMA>(widen(*weight), f32::from_le_bytes(*x), sums[i]);
    }
    tree_sum(sums)
}
