//! The cases on the processor, on the emulator, and on a device.

use super::*;
use crate::cpu::{Cpu, Isa};

fn with_source(failure: &Failure) -> String {
    let source = std::error::Error::source(failure);
    source.map_or_else(|| failure.to_string(), |s| format!("{failure}: {s}"))
}

fn check<B>(operation: &Operation<B>, devices: &mut [B], class: Class) {
    let cases = operation
        .check(devices, class)
        .unwrap_or_else(|failure| panic!("{}: {}", operation.name, with_source(&failure)));
    assert!(cases > 0, "{} has no cases", operation.name);
}

/// Each instruction set with few and with many threads; those of one set must agree in all bits.
fn processors(isas: &[Isa], threads: &[usize]) -> Vec<Cpu> {
    let of = |isa: &Isa| {
        let isa = *isa;
        threads.iter().map(move |threads| Cpu::with_isa(*threads, isa))
    };
    isas.iter().flat_map(of).collect()
}

/// Every instruction set of this machine in all cases; then, in the quick ones, also the models of those that
/// it lacks, and one thread beside five.
fn check_on_processors(operation: &Operation<Cpu>) {
    check(operation, &mut processors(Isa::available(), &[5]), Class::Full);
    check(operation, &mut processors(&Isa::computable(), &[1, 5]), Class::Quick);
}

#[test]
#[ignore = "twice the time of the tests in `cpu`: .ci/long emulator"]
fn threads_make_no_difference_in_any_case() {
    for operation in operations::<Cpu>() {
        check(&operation, &mut processors(Isa::available(), &[1, 5]), Class::Full);
    }
}

/// Tests of one operation each, so that they run side by side.
macro_rules! per_operation {
    ($($test:ident: $($name:literal),+;)+) => {
        mod cpu {
            $(#[test]
            fn $test() {
                super::check_named(
                    super::operations(),
                    &[$($name),+],
                    super::check_on_processors,
                );
            })+
        }

        #[cfg(feature = "emu")]
        mod emulator {
            $(#[test]
            #[ignore = "larger shapes on the emulator: .ci/long emulator"]
            fn $test() {
                super::check_named(super::cuda_operations(), &[$($name),+], super::check_emulated);
            })+
        }

        #[cfg(feature = "cuda")]
        mod device {
            $(#[test]
            fn $test() {
                super::check_named(super::cuda_operations(), &[$($name),+], super::check_on_device);
            })+
        }

        #[test]
        fn every_operation_has_a_test() {
            let tested = [$($($name),+),+];
            for operation in operations::<Cpu>() {
                assert!(tested.contains(&operation.name), "{}", operation.name);
            }
        }
    };
}

per_operation! {
    norms: "rmsnorm", "layernorm", "norm_grad", "add_norm";
    linear: "linear", "products";
    linear_grad: "linear_grad";
    adapters: "adapt", "adapt_grad";
    elementwise: "add", "prompt_add", "silu_mul", "gelu", "silu_mul_grad", "gelu_grad";
    heads: "split_qkv", "join_qkv", "rope_table", "rope";
    pages: "kv_append", "rope_append";
    attention: "attention";
    attention_grad: "attention_grad";
    routing: "gather", "route", "route_grad";
    mixture: "mixture";
    mixture_grad: "mixture_grad";
    quantization: "quantize";
}

/// In the time that an emulator of another processor has.
#[test]
#[cfg_attr(target_arch = "x86_64", ignore = "a part of the tests in `cpu`; for .ci/long arm")]
fn every_instruction_set_passes_the_quick_cases() {
    let mut all = processors(&Isa::computable(), &[2]);
    for operation in operations::<Cpu>() {
        check(&operation, &mut all, Class::Quick);
    }
}

fn check_named<B>(all: Vec<Operation<B>>, names: &[&str], check: impl Fn(&Operation<B>)) {
    for name in names {
        let named = all.iter().find(|operation| operation.name == *name);
        check(named.expect("an operation of this name"));
    }
}

/// Threads in order, then in a random one.
#[cfg(feature = "emu")]
fn check_emulated(operation: &Operation<crate::cuda::Cuda<crate::cuda::emu::Emu>>) {
    let mut devices = [1, 7].map(emulator);
    check(operation, &mut devices[..1], Class::Full);
    check(operation, &mut devices, Class::Quick);
}

#[cfg(feature = "emu")]
fn emulator(seed: u64) -> crate::cuda::Cuda<crate::cuda::emu::Emu> {
    let mut cuda = crate::cuda::Cuda::new(crate::cuda::emu::Emu::with_order(2, seed));
    cuda.use_warpgroups(shared::warpgroups::WarpgroupKernels::ALL);
    cuda
}

/// Device cuda:0, in the sizes that are served. A machine without one fails.
#[cfg(feature = "cuda")]
fn check_on_device(operation: &Operation<crate::cuda::Cuda<crate::cuda::driver::CudaDriver>>) {
    let driver = crate::cuda::driver::CudaDriver::open(0).expect("device cuda:0");
    let mut cuda = crate::cuda::Cuda::new(driver);
    cuda.choose_products().expect("a sample of products");
    check(operation, std::slice::from_mut(&mut cuda), Class::Served);
}

#[cfg(feature = "emu")]
mod kernels {
    use std::collections::BTreeSet;
    use std::sync::Mutex;

    use super::*;
    use crate::cuda::Cuda;
    use crate::cuda::emu::{Emu, kernels};

    #[test]
    fn the_smallest_cases_launch_every_kernel() {
        static LAUNCHED: Mutex<BTreeSet<&'static str>> = Mutex::new(BTreeSet::new());
        let mut cuda = Cuda::exact(Emu::new(2));
        cuda.use_warpgroups(shared::warpgroups::WarpgroupKernels::ALL);
        cuda.watch(Some(|kernel| {
            LAUNCHED.lock().unwrap().insert(kernel);
        }));
        for operation in cuda_operations::<Emu>() {
            check(&operation, std::slice::from_mut(&mut cuda), Class::Smallest);
        }
        let all = kernels();
        let missing = never_launched(all.iter().map(String::as_str), &LAUNCHED.lock().unwrap());
        assert!(missing.is_empty(), "never launched: {missing:?}");
    }

    #[test]
    #[ignore = "larger shapes on the emulator: .ci/long emulator"]
    fn warpgroups_alone_equal_their_reference() {
        check_named(cuda_operations(), &["wgmma"], check_emulated);
    }

    #[test]
    #[ignore = "larger shapes on the emulator: .ci/long emulator"]
    fn tiles_hold_the_stored_bytes() {
        check_named(cuda_operations(), &["repack"], check_emulated);
    }

    #[test]
    #[ignore = "larger shapes on the emulator: .ci/long emulator"]
    fn attention_of_new_keys_has_the_bits_of_an_append_before_it() {
        check_named(cuda_operations(), &["append_attention"], check_emulated);
    }

    #[test]
    #[ignore = "larger shapes on the emulator: .ci/long emulator"]
    fn exchanges_equal_sums_in_the_order_of_ranks() {
        check_named(cuda_operations(), &["exchange"], check_emulated);
    }

    /// With even seeds what is overwritten before others are done with it shows.
    #[test]
    #[ignore = "larger shapes on the emulator: .ci/long emulator"]
    fn copies_to_clusters_may_come_at_once_and_in_any_order() {
        let mut devices = [2, 1234, 98_765_432].map(emulator);
        let linear = cuda_operations::<Emu>().into_iter().find(|o| o.name == "linear");
        check(&linear.expect("it is there"), &mut devices, Class::Quick);
    }
}
