//! A digest of the bits of all operations, which tells whether two builds compute the same.

use super::case::Case;
use super::*;

/// Digests of the smallest cases, by the name of the instruction set, for the present
/// [`shared::build::NUMERICS`]. What `sepal upgrade` promises rests on them: a change of any bit raises
/// that number.
#[cfg(not(target_arch = "aarch64"))]
pub const GOLDEN: &[(&str, u64)] = &[
    ("Amx", 0xac03_f267_b202_8d1e),
    ("Avx512Bf16", 0x73aa_0ecb_b6d8_7e74),
    ("Avx512", 0xc5fb_620e_714c_0507),
    ("Avx2", 0x4564_058b_4a2a_f194),
    ("Portable", 0x15fc_9b84_517b_d60a),
];
/// Those of 64-bit ARM, whose plain code has fused products.
#[cfg(target_arch = "aarch64")]
pub const GOLDEN: &[(&str, u64)] = &[
    ("NeonBf16", 0x76b1_ca00_e203_a73e),
    ("Neon", 0xc5fb_620e_714c_0507),
    ("Portable", 0x53fe_a605_2894_afa2),
];

/// FNV-1a over the bits of numbers.
pub struct Digest(u64);

impl Default for Digest {
    fn default() -> Digest {
        Digest(0xcbf2_9ce4_8422_2325)
    }
}

impl Digest {
    fn feed(&mut self, outputs: &[Vec<f32>]) {
        for value in outputs.iter().flatten() {
            self.0 = (self.0 ^ u64::from(value.to_bits())).wrapping_mul(0x0000_0100_0000_01b3);
        }
    }

    /// The digest of what was fed so far.
    pub fn value(&self) -> u64 {
        self.0
    }
}

/// Feeds the outputs of all cases of an operation.
pub(super) fn digest_cases<B: Subject, C: Case>(
    name: &str,
    device: &mut B,
    class: Class,
    digest: &mut Digest,
) -> Result<(), Failure> {
    for case in C::cases(class).into_iter().filter(|case| case.operation() == name) {
        let mut bench = Bench::checking(&mut *device, &case.name(), class);
        digest.feed(&case.run(&mut bench, 0..case.rows())?);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use shared::build::NUMERICS;
    use testkit::skip::ignored;

    use super::*;
    use crate::cpu::{Cpu, Isa};

    /// Names of instruction sets, separated by commas, that the machine must have: for CI, where a test
    /// that leaves one out is an error.
    const EXPECTED: &str = "SEPAL_TEST_ISAS";

    fn of(isa: Isa) -> u64 {
        let (mut cpu, mut digest) = (Cpu::with_isa(2, isa), Digest::default());
        for operation in operations::<Cpu>() {
            operation.digest(&mut cpu, Class::Smallest, &mut digest).expect(operation.name);
        }
        digest.value()
    }

    #[test]
    fn results_are_those_of_this_numerics() {
        let found = Isa::computable().into_iter().map(|isa| (format!("{:?}", isa.bits()), of(isa)));
        let found: Vec<(String, u64)> = found.collect();
        let lines = found.iter().map(|(name, digest)| format!("(\"{name}\", {digest:#018x}),"));
        let lines = lines.collect::<Vec<_>>().join(" ");
        let expected = std::env::var(EXPECTED).unwrap_or_default();
        let is_found = |name: &str| found.iter().any(|(of, _)| of == name);
        for name in expected.split(',').filter(|name| !name.is_empty()) {
            assert!(is_found(name), "{EXPECTED} names {name}, which this processor lacks");
        }
        for (name, _) in GOLDEN.iter().filter(|(name, _)| !is_found(name)) {
            let why = format!("no digest of {name}, which this processor lacks");
            ignored("results_are_those_of_this_numerics", &why);
        }
        for (name, digest) in &found {
            let golden = GOLDEN.iter().find(|(known, _)| known == name).map(|(_, golden)| golden);
            assert_eq!(
                golden,
                Some(digest),
                "{name} computes other bits than NUMERICS {NUMERICS} promises: raise it in \
                 shared/src/build.rs, and put into GOLDEN: {lines}"
            );
        }
    }
}
