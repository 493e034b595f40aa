//! Which cases there are, and how much work they are.

/// Which cases to run. Each class contains those before it, except [`Class::Measured`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Class {
    /// The fewest that launch every kernel: for an emulator under the thread sanitizer.
    Smallest,
    /// The smallest that take every path: for the address sanitizer and `selftest --quick`.
    Quick,
    /// For the CPU and the emulator.
    Full,
    /// The sizes that are served: for devices.
    Served,
    /// The shapes of [`Shapes`](super::Shapes), which are measured and not checked.
    Measured,
}

impl Class {
    /// Whether shapes of class `at` belong to this class. [`Class::Smallest`] has the shapes of
    /// [`Class::Quick`] in fewer types.
    pub(super) fn takes(self, at: Class) -> bool {
        at <= self.max(Class::Quick)
    }

    /// The shapes of this class, of a table whose last column says from which class on a shape is
    /// taken.
    pub(super) fn select<T: Copy>(self, table: &[(T, Class)]) -> Vec<T> {
        table.iter().filter(|(_, at)| self.takes(*at)).map(|(shape, _)| *shape).collect()
    }
}

/// What one run of an operation moves and computes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Work {
    /// Bytes of memory read and written; 0 where they say nothing about the speed.
    pub bytes: usize,
    /// Floating-point operations.
    pub operations: usize,
}

impl Work {
    pub(super) fn bytes(bytes: usize) -> Work {
        Work { bytes, operations: 0 }
    }
}
