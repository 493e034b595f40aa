//! The tile instructions in plain code, with the bits that the manual gives them.
//!
//! What a processor would refuse with an exception is a panic here. Only the payload of a NaN is left
//! open, as the manual leaves it.

use super::{REGISTERS, ROWS, Shape, TileConfig, Tiles};

/// Elements of a row: pairs of bfloat16, or f32.
const ELEMENTS: usize = 16;

/// A register: zeros beyond its shape.
type Tile = [[u32; ELEMENTS]; ROWS];

/// Eight registers and their shapes.
#[derive(Debug, Default)]
pub(in crate::cpu::simd) struct Model {
    config: Option<TileConfig>,
    tiles: [Tile; REGISTERS],
}

impl Model {
    /// The shape of a register.
    #[inline(always)]
    fn shape(&self, tile: usize) -> Shape {
        let shape = self.config.expect("tiles are configured").shape(tile);
        assert!(shape.rows > 0, "tile {tile} has no rows");
        shape
    }
}

impl Tiles for Model {
    unsafe fn configure(&mut self, config: &TileConfig) {
        *self = Model { config: Some(*config), ..Model::default() };
    }

    unsafe fn release(&mut self) {
        *self = Model::default();
    }

    #[inline(always)]
    unsafe fn zero<const T: usize>(&mut self) {
        self.shape(T);
        self.tiles[T] = Tile::default();
    }

    #[inline(always)]
    unsafe fn load<const T: usize>(&mut self, from: *const u8, stride: usize) {
        let Shape { rows, row_bytes } = self.shape(T);
        self.tiles[T] = Tile::default();
        for (i, row) in self.tiles[T].iter_mut().enumerate().take(rows) {
            let from = from.wrapping_add(i * stride);
            // SAFETY: a row that the caller says exists, and one that has room for it; they do not
            // overlap.
            unsafe { from.copy_to_nonoverlapping(row.as_mut_ptr().cast(), row_bytes) };
        }
    }

    #[inline(always)]
    unsafe fn store<const T: usize>(&self, to: *mut u8, stride: usize) {
        let Shape { rows, row_bytes } = self.shape(T);
        for (i, row) in self.tiles[T].iter().enumerate().take(rows) {
            let to = to.wrapping_add(i * stride);
            // SAFETY: as in `load`.
            unsafe { to.copy_from_nonoverlapping(row.as_ptr().cast(), row_bytes) };
        }
    }

    #[inline(always)]
    unsafe fn multiply_add<const C: usize, const A: usize, const B: usize>(&mut self) {
        let [c, a, b] = [C, A, B].map(|tile| self.shape(tile));
        assert!(C != A && A != B && B != C, "three tiles");
        assert!(c.rows == a.rows && c.row_bytes == b.row_bytes && a.row_bytes == 4 * b.rows);
        let (pairs, columns) = (b.rows, c.row_bytes / 4);
        let b = self.tiles[B];
        for m in 0..c.rows {
            let (a, c) = (self.tiles[A][m], &mut self.tiles[C][m]);
            let (mut first, mut second) = ([0.0; ELEMENTS], [0.0; ELEMENTS]);
            for (a, b) in a.iter().zip(&b).take(pairs) {
                add_products(widen(*a << 16), b.map(|b| widen(b << 16)), &mut first);
                add_products(widen(*a), b.map(widen), &mut second);
            }
            let sums = first.iter().zip(&second).map(|(first, second)| flush(first + second));
            for (c, sum) in c.iter_mut().zip(sums).take(columns) {
                *c = flush(flush(f32::from_bits(*c)) + sum).to_bits();
            }
        }
    }
}

/// The bfloat16 in the upper half, as f32; zero if it is subnormal.
#[inline(always)]
fn widen(bits: u32) -> f32 {
    flush(f32::from_bits(bits & 0xffff_0000))
}

/// Zero of the same sign for a subnormal number.
#[inline(always)]
fn flush(value: f32) -> f32 {
    if value.abs() < f32::MIN_POSITIVE { 0.0f32.copysign(value) } else { value }
}

/// Adds `a * b` to each sum, rounded once, by [`multiply_add`].
#[inline(always)]
fn add_products(a: f32, b: [f32; ELEMENTS], sums: &mut [f32; ELEMENTS]) {
    let before = *sums;
    let mut is_close = false;
    for n in 0..ELEMENTS {
        let sum = a.mul_add(b[n], before[n]);
        is_close |= sum.abs() == f32::MIN_POSITIVE;
        sums[n] = flush(sum);
    }
    if is_close {
        *sums = std::array::from_fn(|n| multiply_add(a, b[n], before[n]));
    }
}

/// Computes `a * b + c` for numbers that are not subnormal, rounded once, and zero if the result is
/// tiny: if it would be below the least normal number after rounding to 24 bits at any exponent.
pub(super) fn multiply_add(a: f32, b: f32, c: f32) -> f32 {
    // Halfway from the number of 24 bits below to the least normal one: ties go up, to the even one.
    const LEAST: f64 = f32::MIN_POSITIVE as f64 * (1.0 - 1.0 / (1u64 << 25) as f64);
    let sum = a.mul_add(b, c);
    // Close to `LEAST` this is exact: `c` is a multiple of 2^-149, and the product has 16 bits.
    let is_tiny = || f64::from(a).mul_add(f64::from(b), f64::from(c)).abs() < LEAST;
    match sum.abs() == f32::MIN_POSITIVE && is_tiny() {
        true => 0.0f32.copysign(sum),
        false => flush(sum),
    }
}
