//! Every CUDA kernel against the CPU reference of its operation, over one table of cases: by tests on the emulator (feature `emu`), by
//! tests on a device (feature `cuda`), and by `sepal selftest` on the machine of an operator.
//!
//! A check makes its inputs, runs the backend and the reference, and compares; outputs are filled with NaN before, and what lies beyond
//! an output must be NaN afterwards.

mod attention;
mod elementwise;
mod experts;
mod experts_grad;
mod fused;
mod linear;
mod lora;
mod norms;
mod quantize;
mod rmsnorm;
mod route;
mod wgmma;

use std::collections::BTreeSet;

use crate::cuda::{Buffer, Cuda, Floats, Gpu};
use crate::ops::OpError;

/// How large cases are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Extent {
    /// Of the slowest operations a few of the smallest, for an emulator that watches every access: each kernel, but not each of its types.
    Least,
    /// For an instrumented emulator: the smallest that take every path.
    Small,
    /// For the emulator.
    Middle,
    /// For devices: what is served.
    Full,
}

impl Extent {
    /// Whether cases that belong to `at` are among these.
    fn takes(self, at: Extent) -> bool {
        at <= self.max(Extent::Small)
    }
}

/// Why a check failed.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum Failure {
    /// The operation refused or the device failed.
    #[error("{case}")]
    Op {
        /// Which case.
        case: String,
        /// Why.
        #[source]
        source: OpError,
    },
    /// A value is not what it should be.
    #[error("{case}: element {index} is {got}, not {wanted}")]
    Value {
        /// Which case.
        case: String,
        /// Where.
        index: usize,
        /// What came out.
        got: f32,
        /// What the reference gives.
        wanted: f32,
    },
}

/// Checks all cases of an operation up to an extent; their number.
pub type Check<G> = fn(&mut Cuda<G>, Extent) -> Result<usize, Failure>;

/// All operations.
pub fn checks<G: Gpu>() -> Vec<(&'static str, Check<G>)> {
    vec![
        ("rmsnorm", rmsnorm::check),
        ("norms", norms::check),
        ("linear", linear::check),
        ("linear gradient", linear::check_grad),
        ("lora", lora::check),
        ("pages", attention::check_pages),
        ("attention", attention::check),
        ("attention gradient", attention::check_grad),
        ("elementwise", elementwise::check),
        ("fused", fused::check),
        ("route", route::check),
        ("experts", experts::check),
        ("quantize", quantize::check),
        ("wgmma", wgmma::check),
    ]
}

/// Kernels that only measure: [`checks`] launch none of them.
const YARDSTICKS: [&str; 2] = ["peak_mma", "peak_wgmma"];

/// Kernels of `all` that were not launched in any of their types and sizes, by their names without those.
pub fn never_launched<'n>(
    all: impl IntoIterator<Item = &'n str>,
    launched: &BTreeSet<&'static str>,
) -> BTreeSet<String> {
    let launched: BTreeSet<String> = launched.iter().map(|name| family_of(name)).collect();
    let families = all.into_iter().map(family_of);
    families
        .filter(|family| !launched.contains(family) && !YARDSTICKS.contains(&family.as_str()))
        .collect()
}

/// The name without what says only which types and sizes a kernel was compiled for: `attention_few` of `attention_few_bf16_d64`.
fn family_of(kernel: &str) -> String {
    let is_variant = |part: &str| {
        let is_size = part.contains(|c: char| c.is_ascii_digit())
            && part
                .chars()
                .all(|c| matches!(c, 'd' | 'm' | 'n' | '0'..='9'));
        is_size || ["f32", "bf16", "f16"].contains(&part)
    };
    let parts: Vec<&str> = kernel.split('_').filter(|part| !is_variant(part)).collect();
    parts.join("_")
}

/// Tests of a file of checks: on the emulator and on a device.
macro_rules! test_on_devices {
    ($check:path) => {
        #[cfg(all(test, feature = "emu"))]
        mod emulated {
            #[test]
            fn equals_its_reference_on_the_emulator() {
                $crate::selftest::assert_emulated($check);
            }
        }
        #[cfg(all(test, feature = "cuda"))]
        mod on_a_device {
            #[test]
            fn equals_its_reference_on_the_device() {
                $crate::selftest::assert_on_device($check);
            }
        }
    };
}
use test_on_devices;

/// Runs a check on the emulator: threads in order, then in a random one.
#[cfg(all(test, feature = "emu"))]
fn assert_emulated(check: Check<crate::cuda::emu::Emu>) {
    use crate::cuda::emu::Emu;
    // Set by whoever built with a sanitizer, which makes the emulator 10 to 500 times slower.
    let extent = match option_env!("SEPAL_EMU_SANITIZE") {
        Some(_) => Extent::Small,
        None => Extent::Middle,
    };
    for (seed, extent) in [(1, extent), (7, Extent::Small)] {
        let mut cuda = Cuda::new(Emu::with_order(2, seed));
        cuda.use_warpgroups(true);
        let cases = check(&mut cuda, extent)
            .unwrap_or_else(|failure| panic!("order {seed}: {}", with_source(&failure)));
        assert!(cases > 0);
    }
}

/// Runs a check on device cuda:0, in the sizes that are served. A machine without one says so; the test then tells nothing.
#[cfg(all(test, feature = "cuda"))]
fn assert_on_device(check: Check<crate::cuda::driver::Driver>) {
    use crate::cuda::driver::{Driver, OpenError};
    let driver = match Driver::open(0) {
        Ok(driver) => driver,
        Err(OpenError::NoCuda(why)) => {
            eprintln!("ignored: no device ({why})");
            return;
        }
        Err(failure) => panic!("{failure}"),
    };
    let mut cuda = Cuda::new(driver);
    cuda.choose_products().expect("a sample of products");
    let cases = check(&mut cuda, Extent::Full)
        .unwrap_or_else(|failure| panic!("{}", with_source(&failure)));
    assert!(cases > 0);
}

#[cfg(all(test, any(feature = "emu", feature = "cuda")))]
fn with_source(failure: &Failure) -> String {
    let source = std::error::Error::source(failure);
    source.map_or_else(|| failure.to_string(), |s| format!("{failure}: {s}"))
}

/// Reproducible values in -1..1.
fn noise(seed: u64, len: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..len).map(|_| next()).collect()
}

/// A device and the case that it is at.
struct Bench<'a, G: Gpu> {
    cuda: &'a mut Cuda<G>,
    case: String,
    cases: usize,
}

/// Elements beyond an output that must stay as they were.
const GUARD: usize = 67;

impl<'a, G: Gpu> Bench<'a, G> {
    fn new(cuda: &'a mut Cuda<G>) -> Self {
        Bench {
            cuda,
            case: String::new(),
            cases: 0,
        }
    }

    fn begin(&mut self, case: String) {
        self.case = case;
        self.cases += 1;
    }

    /// Host values on the device.
    fn input(&mut self, values: &[f32]) -> Result<Buffer<G>, Failure> {
        let mut buffer = self.cuda.buffer(values.len());
        let done = self.cuda.upload(values, &mut buffer);
        self.op(done)?;
        Ok(buffer)
    }

    /// NaN, for `len` elements and those that guard them.
    fn output(&mut self, len: usize) -> Result<Buffer<G>, Failure> {
        self.input(&vec![f32::NAN; len + GUARD])
    }

    /// Host values on the device for an operation in place, guarded like an output.
    fn in_place(&mut self, values: &[f32]) -> Result<Buffer<G>, Failure> {
        let mut guarded = values.to_vec();
        guarded.resize(values.len() + GUARD, f32::NAN);
        self.input(&guarded)
    }

    /// The first `len` elements of a buffer made by [`output`](Self::output).
    ///
    /// # Errors
    /// When an element behind them was written.
    fn take(&mut self, from: &Floats, len: usize) -> Result<Vec<f32>, Failure> {
        let mut values = vec![0.0; len + GUARD];
        let done = self.cuda.download(from, &mut values);
        self.op(done)?;
        let guard = values.split_off(len);
        match guard.iter().position(|v| !v.is_nan()) {
            None => Ok(values),
            Some(at) => Err(Failure::Value {
                case: format!("{}, behind the output", self.case),
                index: len + at,
                got: guard[at],
                wanted: f32::NAN,
            }),
        }
    }

    fn op<T>(&self, done: Result<T, OpError>) -> Result<T, Failure> {
        done.map_err(|source| Failure::Op {
            case: self.case.clone(),
            source,
        })
    }

    /// Refuses values further than `tolerance` × the largest wanted magnitude (at least 1) from the wanted ones.
    fn close(&self, got: &[f32], wanted: &[f32], tolerance: f32) -> Result<(), Failure> {
        let size = wanted.iter().fold(1.0f32, |m, v| m.max(v.abs()));
        self.compare(got, wanted, |g, w| (g - w).abs() <= tolerance * size)
    }

    /// Refuses any other bits.
    fn same(&self, got: &[f32], wanted: &[f32]) -> Result<(), Failure> {
        self.compare(got, wanted, |g, w| g.to_bits() == w.to_bits())
    }

    fn compare(
        &self,
        got: &[f32],
        wanted: &[f32],
        is_good: impl Fn(f32, f32) -> bool,
    ) -> Result<(), Failure> {
        let bad = got.iter().zip(wanted).position(|(g, w)| !is_good(*g, *w));
        let bad = bad.or((got.len() != wanted.len()).then_some(got.len().min(wanted.len())));
        let value = |of: &[f32], at: usize| of.get(at).copied().unwrap_or(f32::NAN);
        bad.map_or(Ok(()), |index| {
            Err(Failure::Value {
                case: self.case.clone(),
                index,
                got: value(got, index),
                wanted: value(wanted, index),
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kernel_is_missing_when_none_of_its_variants_was_launched() {
        let all = [
            "add_f32",
            "add_bf16",
            "attention_few_bf16_d64",
            "attention_few_bf16_d128",
            "linear_few_nf4_bf16_m1n2",
            "linear_few_int8_bf16_m1n2",
            "peak_mma_bf16",
        ];
        let launched = BTreeSet::from(["add_bf16", "attention_few_bf16_d128"]);
        let missing = never_launched(all, &launched);
        let missing: Vec<&str> = missing.iter().map(String::as_str).collect();
        assert_eq!(missing, ["linear_few_int8", "linear_few_nf4"]);
    }
}

#[cfg(all(test, feature = "emu"))]
mod emulated {
    use std::sync::Mutex;

    use super::*;
    use crate::cuda::emu::{Emu, kernels};

    #[test]
    fn the_smallest_cases_launch_every_kernel() {
        static LAUNCHED: Mutex<BTreeSet<&'static str>> = Mutex::new(BTreeSet::new());
        let mut cuda = Cuda::exact(Emu::new(2));
        cuda.use_warpgroups(true);
        cuda.watch(Some(|kernel| {
            LAUNCHED.lock().unwrap().insert(kernel);
        }));
        for (name, check) in checks::<Emu>() {
            check(&mut cuda, Extent::Least).unwrap_or_else(|e| panic!("{name}: {e}"));
        }
        let all = kernels();
        let missing = never_launched(all.iter().map(String::as_str), &LAUNCHED.lock().unwrap());
        assert!(missing.is_empty(), "never launched: {missing:?}");
    }
}
