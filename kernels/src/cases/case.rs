//! What a case of an operation is.

use super::*;

/// The outputs of an operation, or why there are none.
pub(super) type Outcome = Result<Vec<Vec<f32>>, Failure>;

/// One case of an operation. Its result consists of rows whose bits must not depend on the other
/// rows of the batch.
pub(super) trait Case: Sized {
    /// Whether a device may compute it with different kernels of which it chooses one
    /// ([`Subject::alternate`]).
    const HAS_ALTERNATIVES: bool = false;
    /// Whether a host's values are compared one by one, not against the largest.
    const IS_ELEMENTWISE: bool = false;

    /// The cases of a class.
    fn cases(class: Class) -> Vec<Self>;
    /// The cases to measure.
    fn measured(_shapes: &Shapes) -> Vec<Self> {
        Vec::new()
    }
    /// The operation, by its method of [`Backend`].
    fn operation(&self) -> &'static str;
    /// Types and sizes.
    fn shape(&self) -> String;
    /// Both.
    fn name(&self) -> String {
        format!("{} {}", self.operation(), self.shape())
    }
    /// Rows of the result.
    fn rows(&self) -> usize {
        1
    }
    /// Rows that are compared with the reference, from the first on.
    fn reference_rows(&self) -> usize {
        self.rows()
    }
    /// Runs the operation for some of its rows.
    fn run<B: Subject>(&self, bench: &mut Bench<'_, B>, rows: Range<usize>) -> Outcome;
    /// How far the outputs may lie from those of the reference, as a share of the largest.
    fn tolerance(&self, _: Arithmetic) -> f32 {
        0.0
    }
    /// Ranges of rows that must have the bits that they have among all.
    fn ranges(&self, usual: Vec<Range<usize>>) -> Vec<Range<usize>> {
        usual
    }
    /// Compares with the reference's outputs, and with itself for fewer rows; returns the outputs.
    fn check<B: Subject>(&self, bench: &mut Bench<'_, B>, expected: &[Vec<f32>]) -> Outcome {
        check_rows(self, bench, expected, |bench, rows| self.run(bench, rows))
    }
    /// What it moves and computes.
    fn work(&self) -> Work {
        Work::default()
    }
}

/// The check of a case that `run` runs.
pub(super) fn check_rows<B: Subject, C: Case>(
    case: &C,
    bench: &mut Bench<'_, B>,
    expected: &[Vec<f32>],
    mut run: impl FnMut(&mut Bench<'_, B>, Range<usize>) -> Outcome,
) -> Outcome {
    let rows = case.rows();
    let tolerance = case.tolerance(bench.device.arithmetic());
    let is_elementwise = C::IS_ELEMENTWISE && B::IS_HOST;
    let all = run(bench, 0..rows)?;
    bench.all_close(&all, expected, tolerance, is_elementwise)?;
    if C::HAS_ALTERNATIVES
        && let Some(is_same) = bench.device.alternate()
    {
        let other = run(bench, 0..rows);
        bench.device.alternate();
        let other = other?;
        bench.all_close(&other, expected, tolerance, is_elementwise)?;
        if is_same {
            bench.all_same(&other, &all)?;
        }
    }
    for range in case.ranges(bench.ranges(rows)) {
        let some = run(bench, range.clone())?;
        for (some, all) in some.iter().zip(&all) {
            let width = all.len() / rows;
            bench.same(some, &all[range.start * width..range.end * width])?;
        }
    }
    Ok(all)
}
