//! Sums in the order of PyTorch's CPU kernels (`aten/src/ATen/native/cpu/SumKernel.cpp` and
//! `ReduceOpsKernel.cpp`, one thread, vectors of 8 floats), so that means and deviations have its
//! bits.

/// Floats in a vector.
const LANES: usize = 8;
/// Sums that run side by side.
const PARALLEL: usize = 4;
/// Depth of the tree of partial sums.
const LEVELS: usize = 4;

type Sums<const WIDTH: usize> = [[f32; WIDTH]; PARALLEL];

/// Sum of a contiguous row.
pub(super) fn sum(values: &[f32]) -> f32 {
    let (vectors, rest) = values.as_chunks::<LANES>();
    if vectors.is_empty() {
        return row_sum::<1>(values.as_chunks().0)[0];
    }
    let total: f32 = rest.iter().fold(0.0, |total, value| total + value);
    row_sum(vectors).iter().fold(total, |total, lane| total + lane)
}

/// Euclidean norm of a contiguous row.
pub(super) fn norm(values: &[f32]) -> f32 {
    let (vectors, rest) = values.as_chunks::<LANES>();
    let mut lanes = [0f32; LANES];
    for vector in vectors {
        lanes.iter_mut().zip(vector).for_each(|(lane, v)| *lane = v.mul_add(*v, *lane));
    }
    let [first, others @ ..] = lanes;
    let lanes = others.iter().fold(first, |total, lane| total + lane);
    rest.iter().fold(lanes, |total, v| v.mul_add(*v, total)).sqrt()
}

fn row_sum<const WIDTH: usize>(items: &[[f32; WIDTH]]) -> [f32; WIDTH] {
    let (groups, rest) = items.as_chunks::<PARALLEL>();
    let [mut total, others @ ..] = tree_sum(groups);
    rest.iter().for_each(|item| add(&mut total, item));
    others.iter().for_each(|partial| add(&mut total, partial));
    total
}

/// Adds groups level by level: a level that is full is carried to the next.
fn tree_sum<const WIDTH: usize>(groups: &[Sums<WIDTH>]) -> Sums<WIDTH> {
    let power = 4.max(ceil_log2(groups.len()) / LEVELS);
    let step = 1usize << power;
    let mut levels = [[[0f32; WIDTH]; PARALLEL]; LEVELS];
    let steps = groups.chunks_exact(step);
    let rest = steps.remainder();
    for (number, chunk) in steps.enumerate() {
        chunk.iter().for_each(|group| add_all(&mut levels[0], group));
        let added = (number + 1) * step;
        for level in 1..LEVELS {
            let full = std::mem::replace(&mut levels[level - 1], [[0.0; WIDTH]; PARALLEL]);
            add_all(&mut levels[level], &full);
            if added & ((step - 1) << (level * power)) != 0 {
                break;
            }
        }
    }
    let [mut total, others @ ..] = levels;
    rest.iter().for_each(|group| add_all(&mut total, group));
    others.iter().for_each(|level| add_all(&mut total, level));
    total
}

fn add_all<const WIDTH: usize>(totals: &mut Sums<WIDTH>, items: &Sums<WIDTH>) {
    totals.iter_mut().zip(items).for_each(|(total, item)| add(total, item));
}

fn add<const WIDTH: usize>(total: &mut [f32; WIDTH], item: &[f32; WIDTH]) {
    total.iter_mut().zip(item).for_each(|(total, item)| *total += item);
}

fn ceil_log2(count: usize) -> usize {
    if count <= 2 { 1 } else { (usize::BITS - (count - 1).leading_zeros()) as usize }
}
