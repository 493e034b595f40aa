#![allow(
    clippy::multiple_unsafe_ops_per_block,
    reason = "instructions that belong together have one contract"
)]

use std::arch::asm;

use testkit::skip::ignored;

use super::*;

/// Numbers that are not: a few bits, all exponents, zeros, infinities and what is next to the least normal
/// number come up often.
fn noise(seed: u64) -> impl FnMut() -> u32 {
    let mut state = seed;
    move || {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 32) as u32
    }
}

/// A finite f32 of a kind that `choice` tells.
fn number(choice: u32, bits: u32) -> f32 {
    let sign = bits & 0x8000_0000;
    f32::from_bits(match choice % 8 {
        0 => sign,
        // Subnormal.
        1 => sign | bits & 0x007f_ffff,
        // Next to the least normal number.
        2 => sign | (0x0080_0000 + bits % 5),
        3 => sign | 0x0080_0000 | bits & 0x007f_ffff,
        // Near the root of the least normal number: products come close to it.
        4 => sign | 0x2000_0000 | bits & 0x00ff_ffff,
        5 => sign | 0x2000_0000,
        _ => sign | 0x3f00_0000 | bits & 0x00ff_ffff,
    })
}

/// `a * b + c` by the machine, which counts subnormal numbers as zero.
#[target_feature(enable = "fma")]
fn fused(a: f32, b: f32, c: f32) -> f32 {
    let (mut before, mut sum) = (0u32, c);
    let before = &raw mut before;
    let flushing = 0x1f80u32 | 1 << 15 | 1 << 6;
    // SAFETY: the control word is saved and restored; the machine has the instruction.
    unsafe {
        asm!(
            "stmxcsr [{before}]",
            "ldmxcsr [{flushing}]",
            "vfmadd231ss {sum}, {a}, {b}",
            "ldmxcsr [{before}]",
            before = in(reg) before,
            flushing = in(reg) &raw const flushing,
            sum = inout(xmm_reg) sum,
            a = in(xmm_reg) a,
            b = in(xmm_reg) b,
            options(nostack),
        );
    }
    sum
}

#[test]
fn sums_of_the_model_round_and_flush_as_the_machine_does() {
    if !is_x86_feature_detected!("fma") {
        let test = "sums_of_the_model_round_and_flush_as_the_machine_does";
        return ignored(test, "this processor has no FMA");
    }
    let (mut next, mut tiny, mut close) = (noise(1), 0, 0);
    for _ in 0..2_000_000 {
        let kinds = next();
        let [a, b] = [kinds, kinds >> 4].map(|kind| number(kind, next() & 0xffff_0000));
        let c = number(kinds >> 8, next());
        let flush = |value: f32| if value.is_subnormal() { 0.0f32.copysign(value) } else { value };
        let [x, y, z] = [a, b, c].map(flush);
        let sum = model::multiply_add(x, y, z);
        // SAFETY: the machine has the instruction.
        let wanted = unsafe { fused(a, b, c) };
        assert_eq!(sum.to_bits(), wanted.to_bits(), "{a:e} * {b:e} + {c:e}");
        tiny += u32::from(sum == 0.0 && x * y != 0.0);
        close += u32::from(sum.abs() == f32::MIN_POSITIVE);
    }
    assert!(tiny > 1000 && close > 100, "{tiny} {close}");
}

#[test]
fn what_rounds_up_to_the_least_normal_number_is_tiny_below_half_of_24_bits() {
    let least = f32::MIN_POSITIVE;
    let half = f32::from_bits(0x2000_0000); // 2^-63
    // 2^-126 - 2^-150 is tiny, although it rounds to 2^-126 as a subnormal number.
    let below = f32::from_bits((127 - 87) << 23); // 2^-87
    assert_eq!(model::multiply_add(-half, below, least), 0.0);
    // 2^-126 - 2^-151 is halfway, and goes up to the even number.
    let quarter = f32::from_bits((127 - 88) << 23);
    assert_eq!(model::multiply_add(-half, quarter, least), least);
    assert_eq!(model::multiply_add(half, quarter, -least), -least);
}

fn bf16(value: f32) -> u16 {
    (value.to_bits() >> 16) as u16
}

/// One product of tiles with these pairs of bfloat16 in a row of `a` and a column of `b`.
fn product<T: Tiles>(a: &[[u16; 2]], b: &[[u16; 2]], start: f32) -> f32 {
    let config = |pairs: usize| {
        let [one, row, column] =
            [(1, 4), (1, 4 * pairs), (pairs, 4)].map(|(rows, row_bytes)| Shape { rows, row_bytes });
        let none = Shape::default();
        TileConfig::new([one, row, column, none, none, none, none, none])
    };
    let (mut session, mut sum) = (TileSession::<T>::default(), start);
    // SAFETY: the caller has the instructions; all memory is there.
    unsafe {
        let tiles = session.with(&config(a.len()));
        tiles.load::<0>((&raw const sum).cast(), 4);
        tiles.load::<1>(a.as_ptr().cast(), 64);
        tiles.load::<2>(b.as_ptr().cast(), 4);
        tiles.multiply_add::<0, 1, 2>();
        tiles.store::<0>((&raw mut sum).cast(), 4);
    }
    sum
}

#[test]
fn a_product_sums_first_halves_then_second_halves_then_what_was_there() {
    let big = 16_777_216.0; // 2^24: adding 1 is lost
    let ones = |count: usize| vec![[bf16(1.0); 2]; count];
    let pair = |first: f32, second: f32| [bf16(first), bf16(second)];
    // Pairs together would give 1 + 2^24 - 2^24.
    let a = [pair(1.0, big), pair(0.0, 0.0), pair(1.0, -big)];
    assert_eq!(product::<Model>(&a, &ones(3), 0.0), 2.0);
    // The halves are summed before they meet what was there.
    let a = [pair(1.0, 1.0)];
    assert_eq!(product::<Model>(&a, &ones(1), big), big + 2.0);
    // First halves in their order.
    let a = [pair(big, 0.0), pair(1.0, 0.0), pair(-big, 0.0)];
    assert_eq!(product::<Model>(&a, &ones(3), 0.0), 0.0);
    // Subnormal numbers count as zero: among inputs, products and sums.
    let tiny = f32::from_bits(0x0040_0000);
    assert_eq!(product::<Model>(&[pair(tiny, 0.0)], &[pair(1e30, 0.0)], 0.0), 0.0);
    let least = f32::MIN_POSITIVE;
    assert_eq!(product::<Model>(&[pair(least, 0.0)], &[pair(0.5, 0.0)], 0.0), 0.0);
    assert_eq!(product::<Model>(&ones(1), &[pair(0.0, 0.0)], tiny), 0.0);
}

/// Fills registers with noise and multiplies them, in shapes down to one row.
fn random_products<T: Tiles>(seed: u64) -> Vec<u32> {
    let (mut next, mut all, mut session) = (noise(seed), Vec::new(), TileSession::<T>::default());
    for round in 0..200usize {
        let (rows, pairs, columns) = (1 + round % 16, 1 + round / 3 % 16, 1 + round / 5 % 16);
        let shape = |rows: usize, elements: usize| Shape { rows, row_bytes: 4 * elements };
        let [c, a, b] = [shape(rows, columns), shape(rows, pairs), shape(pairs, columns)];
        let none = Shape::default();
        let config = TileConfig::new([a, none, b, none, c, none, none, c]);
        let mut pair = || {
            let (kinds, lower, upper) = (next(), next(), next());
            number(kinds, lower).to_bits() >> 16 | number(kinds >> 4, upper).to_bits() & 0xffff_0000
        };
        let (left, right): (Vec<u32>, Vec<u32>) = (0..256).map(|_| (pair(), pair())).unzip();
        let mut sums: Vec<u32> = (0..256).map(|_| number(next(), next()).to_bits()).collect();
        // SAFETY: the caller has the instructions; all memory is there.
        unsafe {
            let tiles = session.with(&config);
            tiles.load::<4>(sums.as_ptr().cast(), 64);
            tiles.load::<0>(left.as_ptr().cast(), 64);
            tiles.load::<2>(right.as_ptr().cast(), 64);
            tiles.zero::<7>();
            tiles.multiply_add::<4, 0, 2>();
            tiles.multiply_add::<7, 0, 2>();
            tiles.store::<4>(sums.as_mut_ptr().cast(), 64);
            all.extend_from_slice(&sums);
            tiles.store::<7>(sums.as_mut_ptr().cast(), 64);
        }
        all.extend(sums);
    }
    all
}

/// The first machine that has tiles confirms the model by this.
#[test]
fn tiles_of_this_machine_equal_the_model() {
    if is_available() {
        for seed in 0..20 {
            assert_eq!(random_products::<Hardware>(seed), random_products::<Model>(seed));
        }
    } else {
        ignored("tiles_of_this_machine_equal_the_model", "this processor has no AMX");
    }
    assert_eq!(random_products::<Model>(7), random_products::<Model>(7));
}

#[test]
#[should_panic(expected = "a.row_bytes == 4 * b.rows")]
fn the_model_refuses_shapes_that_do_not_go_together() {
    let shape = |rows| Shape { rows, row_bytes: 64 };
    let none = Shape::default();
    let config = TileConfig::new([shape(16), shape(16), shape(15), none, none, none, none, none]);
    let mut session = TileSession::<Model>::default();
    // SAFETY: the model needs no instructions.
    unsafe { session.with(&config).multiply_add::<0, 1, 2>() };
}

#[test]
fn a_configuration_lies_as_the_instruction_reads_it() {
    let shapes = std::array::from_fn(|i| Shape { rows: 9 + i, row_bytes: 4 * (i + 1) });
    let config = TileConfig::new(shapes);
    let mut wanted = [0u8; 64];
    wanted[0] = 1;
    for i in 0..8 {
        (wanted[16 + 2 * i], wanted[48 + i]) = (4 * (i as u8 + 1), 9 + i as u8);
    }
    assert_eq!(config.0, wanted);
    assert!((0..8).all(|i| config.shape(i) == shapes[i]));
}

/// The instructions with registers that the calling convention fixes: memory in rdi, stride in rsi.
mod encoded {
    use super::*;

    macro_rules! encoded {
        ($($name:ident($($argument:ident: $type:ty),*) $body:expr;)+) => {
            $(#[inline(never)]
            pub(super) extern "C" fn $name($($argument: $type),*) {
                // SAFETY: never called.
                unsafe { $body }
            })+
        };
    }
    encoded! {
        configure(config: &TileConfig) Hardware.configure(config);
        release() Hardware.release();
        zero() Hardware.zero::<3>();
        load(from: *const u8, stride: usize) Hardware.load::<5>(from, stride);
        store(to: *mut u8, stride: usize) Hardware.store::<6>(to, stride);
        multiply_add() Hardware.multiply_add::<2, 4, 7>();
    }
}

/// Encodings of the manual: VEX prefix of three bytes, opcode, ModRM, SIB.
#[test]
fn instructions_have_the_encodings_of_the_manual() {
    let has = |start: *const (), wanted: &[u8]| {
        // SAFETY: a function of this executable is longer than its one instruction and its return; what
        // follows it is mapped, as others follow.
        let code = unsafe { std::slice::from_raw_parts(start.cast::<u8>(), 48) };
        assert!(
            code.windows(wanted.len()).any(|bytes| bytes == wanted),
            "{code:02x?} {wanted:02x?}"
        );
    };
    // The index of the SIB byte is the stride.
    const SIB_RDI_RSI: u8 = 6 << 3 | 7;
    has(encoded::configure as *const (), &[0xc4, 0xe2, 0x78, 0x49, 0x07]);
    has(encoded::release as *const (), &[0xc4, 0xe2, 0x78, 0x49, 0xc0]);
    has(encoded::zero as *const (), &[0xc4, 0xe2, 0x7b, 0x49, 0xc0 | 3 << 3]);
    has(encoded::load as *const (), &[0xc4, 0xe2, 0x7b, 0x4b, 5 << 3 | 4, SIB_RDI_RSI]);
    has(encoded::store as *const (), &[0xc4, 0xe2, 0x7a, 0x4b, 6 << 3 | 4, SIB_RDI_RSI]);
    // The second source, B, is in the prefix, inverted.
    let prefix = (!7u8 & 0xf) << 3 | 2;
    has(encoded::multiply_add as *const (), &[0xc4, 0xe2, prefix, 0x5c, 0xc0 | 2 << 3 | 4]);
}
