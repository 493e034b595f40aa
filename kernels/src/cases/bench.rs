//! Runs one case on a device: moves inputs there, guards outputs, compares results or takes the
//! time.

use super::*;

/// Why a check failed.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum Failure {
    /// The operation refused or the device failed.
    #[error("{case}")]
    Op {
        /// Operation and case.
        case: String,
        #[source]
        source: OpError,
    },
    /// A value is wrong.
    #[error("{case}: element {index}: expected {expected}, actual {actual}")]
    Value {
        /// Operation and case.
        case: String,
        index: usize,
        actual: f32,
        /// What should have come out.
        expected: f32,
    },
}

/// A row of a table of measurements.
#[derive(Clone, Debug)]
pub struct Row {
    /// Operation and shape.
    pub name: String,
    /// What one run moves and computes.
    pub work: Work,
}

/// Takes the time of a row. The second argument runs the operation so many times and waits for the
/// last.
pub type Timer<'t> =
    dyn FnMut(&Row, &mut dyn FnMut(usize) -> Result<(), OpError>) -> Result<(), OpError> + 't;

/// A device and the case that runs on it.
pub(super) struct Bench<'a, B: Subject> {
    pub(super) device: &'a mut B,
    row: Row,
    class: Class,
    /// Whether no other device of its group was checked before.
    pub(super) is_first: bool,
    measured: Option<(&'a [u8], &'a mut Timer<'a>)>,
}

impl<B: Subject> std::fmt::Debug for Bench<'_, B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Bench").field("row", &self.row).field("class", &self.class).finish()
    }
}

/// Elements behind an output that must stay as they were.
const GUARD: usize = 67;
/// Most matrices that measurements walk through.
const MAX_COPIES: usize = 64;
/// Rows of a host that are compared, by ranges of each length.
const COMPARED_ROWS: usize = 40;

impl<'a, B: Subject> Bench<'a, B> {
    /// Runs each operation once.
    pub(super) fn checking(device: &'a mut B, case: &str, class: Class) -> Self {
        let row = Row { name: case.to_owned(), work: Work::default() };
        Bench { device, row, class, is_first: true, measured: None }
    }

    /// Gives operations to `timer`, and takes weights out of `ring`.
    pub(super) fn measuring(
        device: &'a mut B,
        row: Row,
        ring: &'a [u8],
        timer: &'a mut Timer<'a>,
    ) -> Self {
        Bench { device, row, class: Class::Measured, is_first: true, measured: Some((ring, timer)) }
    }

    /// Runs the operation, or measures it. `operation` gets the number of the run.
    pub(super) fn launch(
        &mut self,
        mut operation: impl FnMut(&mut B, usize) -> Result<(), OpError>,
    ) -> Result<(), Failure> {
        let device = &mut *self.device;
        let done = match &mut self.measured {
            None => operation(device, 0),
            Some((_, timer)) => {
                let (mut run, mut value) = (0, [0.0]);
                let probe = device.buffer(1);
                timer(&self.row, &mut |count| {
                    for _ in 0..count {
                        run += 1;
                        operation(device, run)?;
                    }
                    device.download(&probe, &mut value)
                })
            }
        };
        self.op(done)
    }

    /// Host values on the device.
    pub(super) fn input(&mut self, values: &[f32]) -> Result<B::Buffer, Failure> {
        let mut buffer = self.device.buffer(values.len());
        let done = self.device.upload(values, &mut buffer);
        self.op(done)?;
        Ok(buffer)
    }

    /// NaN, for `len` elements and those that guard them.
    pub(super) fn output(&mut self, len: usize) -> Result<B::Buffer, Failure> {
        self.input(&vec![f32::NAN; len + GUARD])
    }

    /// Host values on the device for an operation in place, guarded like an output.
    pub(super) fn in_place(&mut self, values: &[f32]) -> Result<B::Buffer, Failure> {
        let mut guarded = values.to_vec();
        guarded.resize(values.len() + GUARD, f32::NAN);
        self.input(&guarded)
    }

    /// The first `len` elements of an output; none in a measurement.
    ///
    /// # Errors
    /// When an element behind them was written.
    pub(super) fn take(&mut self, from: &B::Floats, len: usize) -> Result<Vec<f32>, Failure> {
        if self.measured.is_some() {
            return Ok(Vec::new());
        }
        let mut values = vec![0.0; len + GUARD];
        let done = self.device.download(from, &mut values);
        self.op(done)?;
        let guard = values.split_off(len);
        match guard.iter().position(|v| !v.is_nan()) {
            None => Ok(values),
            Some(at) => Err(Failure::Value {
                case: format!("{}, behind an output", self.row.name),
                index: len + at,
                actual: guard[at],
                expected: f32::NAN,
            }),
        }
    }

    /// The bytes of a matrix; in a measurement those of several matrices of `len` bytes.
    pub(super) fn weights<'s>(&self, len: usize, stored: impl FnOnce() -> &'s [u8]) -> Vec<&'s [u8]>
    where
        'a: 's,
    {
        match &self.measured {
            None => vec![stored()],
            Some((ring, _)) => {
                assert!(ring.len() >= len, "the ring holds the largest matrix");
                ring.chunks_exact(len.max(1)).take(MAX_COPIES).collect()
            }
        }
    }

    /// Matrices on the device.
    pub(super) fn matrices<'w>(
        &mut self,
        views: impl IntoIterator<Item = WeightView<'w>>,
    ) -> Result<Vec<B::Matrix<'w>>, Failure> {
        views.into_iter().map(|view| self.matrix(view)).collect()
    }

    /// A matrix on the device.
    pub(super) fn matrix<'w>(&mut self, view: WeightView<'w>) -> Result<B::Matrix<'w>, Failure> {
        let done = self.device.matrix(view);
        self.op(done)
    }

    pub(super) fn op<T>(&self, done: Result<T, OpError>) -> Result<T, Failure> {
        done.map_err(|source| Failure::Op { case: self.row.name.clone(), source })
    }

    /// Ranges of rows whose bits are compared with those among all: alone and in batches of 2, 7,
    /// 16 and 32. Of a host those of the first rows; the first one of each length where another host
    /// of the group was checked before. Of a device some.
    pub(super) fn ranges(&self, rows: usize) -> Vec<Range<usize>> {
        if B::IS_HOST {
            let compared = if self.is_first { COMPARED_ROWS } else { 1 };
            let of = |len: usize| {
                let starts = (0..rows.min(compared)).step_by(len);
                starts.map(move |start| start..rows.min(start + len))
            };
            let all = [1, 2, 7, 16, 32, 1001].into_iter().filter(|len| *len < rows);
            return all.flat_map(of).collect();
        }
        let lens: &[usize] = match self.class {
            Class::Smallest => &[1, 20],
            Class::Quick => &[1, 2, 9, 20, 32],
            Class::Full => &[1, 2, 7, 9, 16, 32],
            Class::Served | Class::Measured => &[1, 2, 3, 7, 8, 9, 16, 20, 32, 33],
        };
        let tails = lens.iter().filter(|len| **len < rows).map(|len| rows - len..rows);
        let middle = rows / 3..rows * 7 / 8;
        let has_middle = self.class == Class::Served && !middle.is_empty();
        tails.chain((rows > 1).then_some(0..1)).chain(has_middle.then_some(middle)).collect()
    }

    /// Refuses outputs further from the expected ones than `tolerance`. A shorter list of expected
    /// values holds for the first ones.
    pub(super) fn all_close(
        &self,
        actual: &[Vec<f32>],
        expected: &[Vec<f32>],
        tolerance: f32,
        is_elementwise: bool,
    ) -> Result<(), Failure> {
        for (actual, expected) in actual.iter().zip(expected) {
            let actual = actual.get(..expected.len()).unwrap_or(actual);
            let is_good = |a: f32, e: f32| (a - e).abs() <= tolerance * e.abs().max(1.0);
            match is_elementwise && tolerance > 0.0 {
                true => self.compare(actual, expected, is_good)?,
                false => self.close(actual, expected, tolerance)?,
            }
        }
        Ok(())
    }

    /// Refuses values further than `tolerance` × the largest expected magnitude (at least 1) from
    /// the expected ones; any other bits when `tolerance` is 0.
    pub(super) fn close(
        &self,
        actual: &[f32],
        expected: &[f32],
        tolerance: f32,
    ) -> Result<(), Failure> {
        if tolerance == 0.0 {
            return self.same(actual, expected);
        }
        let size = expected.iter().fold(1.0f32, |m, v| m.max(v.abs()));
        self.compare(actual, expected, |a, e| (a - e).abs() <= tolerance * size)
    }

    /// Refuses any other bits in any output.
    pub(super) fn all_same(
        &self,
        actual: &[Vec<f32>],
        expected: &[Vec<f32>],
    ) -> Result<(), Failure> {
        let pairs = actual.iter().zip(expected);
        pairs.into_iter().try_for_each(|(actual, expected)| self.same(actual, expected))
    }

    /// Refuses any other bits.
    pub(super) fn same(&self, actual: &[f32], expected: &[f32]) -> Result<(), Failure> {
        self.compare(actual, expected, |a, e| a.to_bits() == e.to_bits())
    }

    /// Refuses the first pair of values that `is_good` refuses, and lists of different lengths.
    pub(super) fn compare(
        &self,
        actual: &[f32],
        expected: &[f32],
        is_good: impl Fn(f32, f32) -> bool,
    ) -> Result<(), Failure> {
        let bad = actual.iter().zip(expected).position(|(a, e)| !is_good(*a, *e));
        let shorter = actual.len().min(expected.len());
        let bad = bad.or((actual.len() != expected.len()).then_some(shorter));
        let value = |of: &[f32], at: usize| of.get(at).copied().unwrap_or(f32::NAN);
        bad.map_or(Ok(()), |index| {
            Err(Failure::Value {
                case: self.row.name.clone(),
                index,
                actual: value(actual, index),
                expected: value(expected, index),
            })
        })
    }
}
