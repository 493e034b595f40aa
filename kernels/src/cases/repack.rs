//! NF4 matrices in tiles, as `repack.cu` makes them of the stored bytes, whole and in pieces.

use super::*;
use crate::cuda::ops::repack::upload;
use crate::cuda::{Cuda, Gpu};
use crate::quant::nf4::{GROUP, Nf4Parts};
use crate::tuning;

/// (outputs, blocks of 64 inputs, shift of the second scales): one; whole strips and chunks; off
/// them; many.
const SIZES: [((usize, usize, u32), Class); 6] = [
    ((1, 1, 8), Class::Smallest),
    ((37, 5, 0), Class::Smallest),
    ((16, 4, 1), Class::Quick),
    ((130, 7, 8), Class::Quick),
    ((300, 71, 8), Class::Full),
    ((1000, 448, 8), Class::Served),
];

/// Compares every byte with a layout that is made weight by weight.
pub(super) fn check<G: Gpu>(
    _: &str,
    devices: &mut [Cuda<G>],
    class: Class,
) -> Result<usize, Failure> {
    let mut cases = 0;
    for device in devices {
        for ((outputs, blocks, shift), _) in SIZES.into_iter().filter(|(_, at)| *at <= class) {
            let strip = 16 * blocks * GROUP / 2;
            for most in [1, 2 * strip, tuning::CUDA_REPACK_BYTES] {
                let case = format!("repack {outputs}x{blocks} shift {shift} pieces of {most}");
                let mut bench = Bench::checking(device, &case, class);
                compare(&mut bench, outputs, blocks, shift, most)?;
                cases += 1;
            }
        }
    }
    Ok(cases)
}

fn compare<G: Gpu>(
    bench: &mut Bench<'_, Cuda<G>>,
    outputs: usize,
    blocks: usize,
    shift: u32,
    most: usize,
) -> Result<(), Failure> {
    let groups = outputs * blocks;
    let bytes = |seed: u64, len: usize| -> Vec<u8> {
        noise(seed, len).iter().map(|v| (v * 127.0) as i8 as u8).collect()
    };
    let (codes, absmax) = (bytes(1, groups * GROUP / 2), bytes(2, groups));
    let seconds = bytes(3, groups.div_ceil(1 << shift) * 4);
    let parts = Nf4Parts::grouped(blocks * GROUP, shift, [&codes, &absmax, &seconds], 0.5);
    let parts = parts.expect("made for this shape");
    let mut expected = tiles(&codes, &absmax, outputs, blocks);
    expected.extend(&seconds);
    expected.extend(0.5f32.to_le_bytes());
    let memory = upload(bench.device, &parts, [outputs, blocks * GROUP], most);
    let memory = bench.op(memory)?;
    let mut actual = vec![0; expected.len()];
    let read = bench.device.download_bytes(&memory, 0, &mut actual);
    bench.op(read)?;
    let numbers = |bytes: &[u8]| bytes.iter().copied().map(f32::from).collect::<Vec<_>>();
    bench.same(&numbers(&actual), &numbers(&expected))
}

/// The tiles of `nf4.cuh`: codes, then those of the scales.
fn tiles(codes: &[u8], absmax: &[u8], outputs: usize, blocks: usize) -> Vec<u8> {
    let (strips, chunks) = (outputs.div_ceil(16), blocks.div_ceil(4));
    let scales = strips * blocks * 512;
    let mut tiles = vec![0; scales + strips * chunks * 64];
    for output in 0..outputs {
        let (strip, g, high) = (output / 16, output % 8, output % 16 / 8);
        for block in 0..blocks {
            let group = output * blocks + block;
            for byte in 0..GROUP / 2 {
                let lane = 4 * g + byte / 8;
                let at = (strip * blocks + block) * 512 + lane * 16 + high * 8 + byte % 8;
                tiles[at] = codes[group * (GROUP / 2) + byte];
            }
            let at = (strip * chunks + block / 4) * 64 + (4 * g + block % 4) * 2 + high;
            tiles[scales + at] = absmax[group];
        }
    }
    tiles
}
