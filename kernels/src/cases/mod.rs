//! One table of cases per operation, generic over the backend. The tests of the CPU's fast paths, of
//! the emulator and of a device, the sanitizers, `sepal selftest` and the benchmarks all run it.
//!
//! A file holds the cases of some operations: sizes, how the inputs are made, how the operation is
//! called, how far a result may lie from that of [`Reference`], and how much work it is. Outputs are
//! NaN before an operation, and the elements behind an output must be NaN afterwards.

mod append_attention;
mod attention;
mod attention_grad;
mod bench;
mod case;
mod class;
mod coverage;
mod cuda;
mod digest;
mod elementwise;
mod exchange;
mod heads;
mod inputs;
mod linear;
mod linear_grad;
mod lora;
mod mixture;
mod norms;
mod pages;
mod quantize;
mod reference;
mod repack;
mod route;
mod shapes;
mod slices;
mod subject;
#[cfg(test)]
mod tests;

// What the files of cases have in common, by `use super::*`.
use std::cell::OnceCell;
use std::collections::BTreeMap;
use std::ops::Range;

use bench::Bench;
pub use bench::{Failure, Row, Timer};
use case::{Case, Outcome, check_rows};
pub use class::{Class, Work};
pub use coverage::never_launched;
pub use cuda::cuda_operations;
pub use digest::{Digest, GOLDEN};
use inputs::{CaseMatrix, DTYPES, FORMATS, encode, noise, rows_of, view};
use pages::{Batch, Heads, frequencies};
pub use reference::Reference;
use shapes::HEAD_DIM;
pub use shapes::Shapes;
use shared::config::QuantType;
use shared::dtype::DType;
use shared::ids::PageId;
pub use subject::{Arithmetic, Subject};

use crate::backend::Backend;
use crate::cpu::{Cpu, Isa};
use crate::kv::{KvPages, PAGE_TOKENS, PageLayout, StepRow, total_tokens};
use crate::ops::experts::list_words;
use crate::ops::{
    Adapt, AdaptGrad, Adapter, Add, AddNorm, Alibi, Attention, AttentionGrad, Expert,
    ExpertAdapters, Gated, Gather, Gelu, GeluGrad, GeluKind, JoinQkv, Known, KvAppend, Layernorm,
    Linear, LinearGrad, Mixture, MixtureGrad, MixtureGradWorkspace, MixtureWorkspace, NormGrad,
    OpError, Product, Products, PromptAdd, RankInputs, Rmsnorm, Rope, RopeAppend, RopeTable, Route,
    RouteGrad, SiluMul, SiluMulGrad, SplitQkv, check_len, convert, kv_append, rope,
};
use crate::quant::{int8, nf4, stored_bytes};
use crate::tensor::WeightView;
use crate::tuning;

/// An operation and all its cases, for backend `B`.
#[derive(Clone, Copy, Debug)]
pub struct Operation<B> {
    pub name: &'static str,
    check: fn(&str, &mut [B], Class) -> Result<usize, Failure>,
    measure: fn(&str, &mut B, &mut Measurement<'_>) -> Result<(), Failure>,
    digest: fn(&str, &mut B, Class, &mut Digest) -> Result<(), Failure>,
}

impl<B> Operation<B> {
    /// Checks its cases up to a class on some devices; returns how many cases there are.
    ///
    /// # Errors
    /// The first case that fails.
    pub fn check(&self, devices: &mut [B], class: Class) -> Result<usize, Failure> {
        (self.check)(self.name, devices, class)
    }

    /// Adds the bits of its cases up to a class to a digest.
    ///
    /// # Errors
    /// The first case that fails.
    pub fn digest(&self, device: &mut B, class: Class, digest: &mut Digest) -> Result<(), Failure> {
        (self.digest)(self.name, device, class, digest)
    }

    /// Measures its cases of class [`Class::Measured`].
    ///
    /// # Errors
    /// The first case that fails.
    pub fn measure(&self, device: &mut B, of: &mut Measurement<'_>) -> Result<(), Failure> {
        (self.measure)(self.name, device, of)
    }
}

/// What to measure, and how.
pub struct Measurement<'m> {
    pub shapes: &'m Shapes,
    /// Bytes that serve as weights, more than the caches hold.
    pub ring: &'m [u8],
    /// Selects cases by their names.
    pub is_wanted: &'m dyn Fn(&str) -> bool,
    /// Takes the time of one case.
    pub timer: &'m mut Timer<'m>,
}

impl std::fmt::Debug for Measurement<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Measurement").field("shapes", self.shapes).finish_non_exhaustive()
    }
}

/// All operations that every backend has, by their methods of [`Backend`].
pub fn operations<B: Subject>() -> Vec<Operation<B>> {
    let mut all = Vec::new();
    all.extend(of::<B, norms::NormCase>(&["rmsnorm", "layernorm", "norm_grad", "add_norm"]));
    all.extend(of::<B, linear::LinearCase>(&["linear"]));
    all.extend(of::<B, linear::ProductsCase>(&["products"]));
    all.extend(of::<B, linear_grad::LinearGradCase>(&["linear_grad"]));
    all.extend(of::<B, lora::AdaptCase>(&["adapt", "adapt_grad"]));
    all.extend(of::<B, elementwise::ElementCase>(&["add", "prompt_add"]));
    let activations = &["silu_mul", "gelu", "silu_mul_grad", "gelu_grad"];
    all.extend(of::<B, elementwise::ElementCase>(activations));
    all.extend(of::<B, heads::QkvCase>(&["split_qkv", "join_qkv"]));
    all.extend(of::<B, heads::RopeCase>(&["rope_table", "rope"]));
    all.extend(of::<B, pages::KvAppendCase>(&["kv_append"]));
    all.extend(of::<B, pages::RopeAppendCase>(&["rope_append"]));
    all.extend(of::<B, attention::AttentionCase>(&["attention"]));
    all.extend(of::<B, attention_grad::AttentionGradCase>(&["attention_grad"]));
    all.extend(of::<B, route::GatherCase>(&["gather"]));
    all.extend(of::<B, route::RouteCase>(&["route", "route_grad"]));
    all.extend(of::<B, mixture::MixtureCase>(&["mixture", "mixture_grad"]));
    all.extend(of::<B, quantize::QuantizeCase>(&["quantize"]));
    all
}

fn of<B: Subject, C: Case>(names: &[&'static str]) -> impl Iterator<Item = Operation<B>> {
    let of = |&name| Operation {
        name,
        check: check_cases::<B, C>,
        measure: measure_cases::<B, C>,
        digest: digest::digest_cases::<B, C>,
    };
    names.iter().map(of).collect::<Vec<_>>().into_iter()
}

/// Checks every case on every device. Devices of one [group](Subject::group) must agree in all bits.
fn check_cases<B: Subject, C: Case>(
    name: &str,
    devices: &mut [B],
    class: Class,
) -> Result<usize, Failure> {
    let mut cases = 0;
    for case in C::cases(class).into_iter().filter(|case| case.operation() == name) {
        let mut reference = Reference;
        let mut bench = Bench::checking(&mut reference, &case.name(), class);
        let expected = case.run(&mut bench, 0..case.reference_rows())?;
        let mut groups = BTreeMap::new();
        for device in devices.iter_mut() {
            let group = device.group();
            let is_first = !groups.contains_key(&group);
            let mut bench = Bench::checking(device, &case.name(), class);
            bench.is_first = is_first;
            let actual = case.check(&mut bench, &expected)?;
            let first = groups.entry(group).or_insert_with(|| actual.clone());
            bench.all_same(&actual, first)?;
        }
        cases += 1;
    }
    Ok(cases)
}

fn measure_cases<B: Subject, C: Case>(
    name: &str,
    device: &mut B,
    of: &mut Measurement<'_>,
) -> Result<(), Failure> {
    for case in C::measured(of.shapes).into_iter().filter(|case| case.operation() == name) {
        let row = Row { name: case.name(), work: case.work() };
        if (of.is_wanted)(&row.name) {
            let mut bench = Bench::measuring(&mut *device, row, of.ring, &mut *of.timer);
            case.run(&mut bench, 0..case.rows())?;
        }
    }
    Ok(())
}
