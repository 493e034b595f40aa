//! Fuzzes the decoders of every crate. A [`Target`] is a corpus of valid inputs and a bound on
//! memory; [`Target::fuzz`] runs a decoder on mutations of the corpus. A decoder fails by a panic,
//! and by holding more memory than its bound.
//!
//! ```text
//!   cargo test           corpus ─> edits that proptest draws ─────> decoder     10,000 runs
//!   tests/fuzzing/run    corpus ─> libFuzzer, guided by coverage ─> decoder     as long as one likes
//! ```
//!
//! Targets are tests called `fuzz_...`, so that they reach what is private to their crate.
#![deny(unsafe_code)]

mod allocator;
#[cfg(feature = "libfuzzer")]
mod libfuzzer;
mod mutation;

use std::collections::HashSet;
use std::panic::{AssertUnwindSafe, catch_unwind};

use parking_lot::Mutex;
use proptest::strategy::Strategy;
use proptest::test_runner::{Config, RngAlgorithm, TestCaseError, TestRng, TestRunner};

/// Inputs per target in the short form, unless `PROPTEST_CASES` says another number.
const SHORT_RUNS: u32 = 10_000;

/// Longest script of edits: about twelve of them.
const MAX_SCRIPT_BYTES: usize = 64;

/// Bytes of a failing input that are printed.
const MAX_PRINTED_BYTES: usize = 4096;

/// One decoder under test.
#[derive(Debug)]
pub struct Target {
    name: &'static str,
    corpus: Vec<Vec<u8>>,
    fixed_bytes: usize,
    bytes_per_byte: usize,
}

/// What the runs of a target came to.
#[derive(Debug, Default)]
struct Summary {
    runs: u64,
    /// Different outcomes, without their numbers.
    outcomes: HashSet<String>,
    /// Most memory that the decoder held for one input.
    most_bytes: usize,
}

impl Target {
    /// A target whose inputs are mutations of `corpus`. The decoder may hold 1 MiB, and 64 bytes for
    /// each byte of its input.
    ///
    /// # Panics
    /// If the corpus is empty: mutations of nothing reach nothing.
    #[must_use]
    pub fn new(name: &'static str, corpus: impl IntoIterator<Item = Vec<u8>>) -> Target {
        let corpus: Vec<Vec<u8>> = corpus.into_iter().collect();
        assert!(!corpus.is_empty(), "{name} has no corpus");
        Target { name, corpus, fixed_bytes: 1 << 20, bytes_per_byte: 64 }
    }

    /// The same target with another bound on memory: `fixed`, and `per_byte` for each byte of the
    /// input.
    #[must_use]
    pub fn with_bound(self, fixed: usize, per_byte: usize) -> Target {
        Target { fixed_bytes: fixed, bytes_per_byte: per_byte, ..self }
    }

    /// Runs the decoder on the corpus and on mutations of it, and prints how many there were. The
    /// decoder returns its outcome in words, such as the text of its error.
    ///
    /// # Panics
    /// If the decoder panics or exceeds its bound on memory; the input is printed.
    #[cfg(not(feature = "libfuzzer"))]
    pub fn fuzz(self, decode: impl Fn(&[u8]) -> String + 'static) {
        let name = self.name;
        let Summary { runs, outcomes, most_bytes } =
            self.run_short(decode).unwrap_or_else(|failure| panic!("fuzz {name}: {failure}"));
        let (outcomes, most_kib) = (outcomes.len(), most_bytes >> 10);
        println!("fuzz {name}: {runs} runs, {outcomes} outcomes, at most {most_kib} KiB held");
    }

    /// Hands the decoder to libFuzzer, which ends the process.
    #[cfg(feature = "libfuzzer")]
    pub fn fuzz(self, decode: impl Fn(&[u8]) -> String + 'static) {
        let Target { name, ref corpus, .. } = self;
        let corpus = corpus.clone();
        libfuzzer::run(name, &corpus, move |input| self.run(input, &decode).map(drop));
    }

    /// The corpus, then mutations that proptest draws; a failure is shrunk to fewer edits.
    fn run_short(self, decode: impl Fn(&[u8]) -> String) -> Result<Summary, String> {
        let summary = Mutex::new(Summary::default());
        let run = |input: &[u8]| {
            let (outcome, held) = self.run(input, &decode)?;
            let mut summary = summary.lock();
            summary.runs += 1;
            summary.most_bytes = summary.most_bytes.max(held);
            summary.outcomes.insert(outcome.chars().filter(|c| !c.is_ascii_digit()).collect());
            Ok::<(), String>(())
        };
        self.corpus.iter().try_for_each(|input| run(input))?;
        let cases = if std::env::var_os("PROPTEST_CASES").is_some() {
            Config::default().cases
        } else {
            SHORT_RUNS
        };
        let config = Config { cases, failure_persistence: None, ..Config::default() };
        let script = proptest::collection::vec(proptest::num::u8::ANY, 0..MAX_SCRIPT_BYTES);
        let inputs = script.prop_map(|script| mutation::input(&self.corpus, &script));
        let inputs = inputs.prop_map(Printed);
        // The same runs each time; new ones are libFuzzer's task.
        let random = TestRng::deterministic_rng(RngAlgorithm::ChaCha);
        TestRunner::new_with_rng(config, random)
            .run(&inputs, |Printed(input)| run(&input).map_err(TestCaseError::fail))
            .map_err(|error| error.to_string())?;
        Ok(summary.into_inner())
    }

    /// Runs the decoder on one input: its outcome, and the bytes that it held.
    fn run(
        &self,
        input: &[u8],
        decode: &impl Fn(&[u8]) -> String,
    ) -> Result<(String, usize), String> {
        let mut outcome = String::new();
        let work = || allocator::most_held(|| outcome = decode(input));
        let held = catch_unwind(AssertUnwindSafe(work))
            .map_err(|_| "the decoder panicked; its message stands above".to_owned())?;
        let (len, bound) = (input.len(), self.fixed_bytes + self.bytes_per_byte * input.len());
        match held <= bound {
            true => Ok((outcome, held)),
            false => Err(format!("the decoder held {held} bytes for {len} of input")),
        }
    }
}

/// The outcome of a decoder that returns a `Result`: the text of the error, or that it succeeded.
#[must_use]
pub fn outcome<T, E: std::fmt::Display>(result: &Result<T, E>) -> String {
    result.as_ref().map_or_else(ToString::to_string, |_| "decoded".to_owned())
}

/// An input, shown as it may stand in a test: `b"..."`.
#[derive(Clone)]
struct Printed(Vec<u8>);

impl std::fmt::Debug for Printed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Printed(input) = self;
        let shown = &input[..input.len().min(MAX_PRINTED_BYTES)];
        write!(f, "b\"{}\" ({} bytes)", shown.escape_ascii(), input.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(seeds: &[&[u8]], decode: impl Fn(&[u8]) -> String) -> Result<Summary, String> {
        Target::new("a test", seeds.iter().map(|seed| seed.to_vec())).run_short(decode)
    }

    #[test]
    fn panics_and_memory_beyond_the_bound_fail_a_target() {
        let takes = |bytes: usize| {
            move |_: &[u8]| {
                // What is given back before more is taken does not count twice.
                (0..9).for_each(|_| drop(Vec::<u8>::with_capacity(bytes)));
                String::new()
            }
        };
        let summary = run(&[b"seed"], takes(1 << 19)).expect("within the bound");
        assert!(summary.runs > 1 && summary.most_bytes >= 1 << 19);
        assert!(run(&[b"seed"], takes(16 << 20)).unwrap_err().contains("held 16777216 bytes"));
        assert!(run(&[b"seed"], |input| panic!("{input:?}")).unwrap_err().contains("panicked"));
    }

    #[test]
    fn mutations_find_a_byte_that_the_corpus_lacks_and_are_printed() {
        let decode = |input: &[u8]| {
            assert!(!input.starts_with(b"\x80\x01"), "found");
            String::new()
        };
        let error = run(&[b"\x00\x01abc"], decode).unwrap_err();
        assert!(error.contains("b\"\\x80\\x01"), "{error}");
    }
}
