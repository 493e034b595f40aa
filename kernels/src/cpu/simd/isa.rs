//! Instruction sets of processors: which there are, which this machine has, and what each contains.

#[cfg(target_arch = "x86_64")]
use super::amx;

/// Instruction sets with their own paths. Results of different sets may differ in the last bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Isa {
    /// AMX tiles of bfloat16, beside all of [`Isa::Avx512Bf16`].
    Amx,
    /// [`Isa::Amx`] by a model of the tile instructions, with the same bits: for tests on machines without
    /// tiles. It is slow, and no machine chooses it.
    AmxModel,
    /// AVX-512 with products of bfloat16 pairs.
    Avx512Bf16,
    /// AVX-512 F, BW, DQ, VL; bfloat16 weights are widened.
    Avx512,
    /// AVX2, FMA, F16C.
    Avx2,
    /// NEON of 64-bit ARM with products of bfloat16 pairs.
    NeonBf16,
    /// NEON of 64-bit ARM; bfloat16 weights are widened.
    Neon,
    /// Plain code, with nothing beyond what the target guarantees.
    Portable,
}

/// Vectors of f32 that an instruction set computes with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Vectors {
    #[cfg(target_arch = "x86_64")]
    Avx512,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "aarch64")]
    Neon,
    /// Plain code.
    Plain,
}

impl Isa {
    /// The best set of this machine.
    pub fn detect() -> Isa {
        Isa::available()[0]
    }

    /// All sets of this machine, best first.
    pub fn available() -> &'static [Isa] {
        #[cfg(target_arch = "x86_64")]
        {
            const ALL: &[Isa] = &[Isa::Amx, Isa::Avx512Bf16, Isa::Avx512, Isa::Avx2, Isa::Portable];
            let avx2 = is_x86_feature_detected!("avx2")
                && is_x86_feature_detected!("fma")
                && is_x86_feature_detected!("f16c");
            let avx512 = avx2
                && is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vl");
            let pairs = avx512 && is_x86_feature_detected!("avx512bf16");
            match () {
                () if pairs && amx::is_available() => ALL,
                () if pairs => &ALL[1..],
                () if avx512 => &ALL[2..],
                () if avx2 => &ALL[3..],
                () => &ALL[4..],
            }
        }
        #[cfg(target_arch = "aarch64")]
        {
            const ALL: &[Isa] = &[Isa::NeonBf16, Isa::Neon, Isa::Portable];
            if std::arch::is_aarch64_feature_detected!("bf16") { ALL } else { &ALL[1..] }
        }
        #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
        &[Isa::Portable]
    }

    /// All sets that this machine can compute with: its own, and those of which it lacks the tiles alone.
    pub fn computable() -> Vec<Isa> {
        let own = Isa::available();
        let model = own.contains(&Isa::Avx512Bf16).then_some(Isa::AmxModel);
        own.iter().copied().chain(model).collect()
    }

    /// The set whose bits this one has: itself, unless it is a model.
    pub fn bits(self) -> Isa {
        match self {
            Isa::AmxModel => Isa::Amx,
            own => own,
        }
    }

    pub(super) fn vectors(self) -> Vectors {
        match self {
            #[cfg(target_arch = "x86_64")]
            Isa::Amx | Isa::AmxModel | Isa::Avx512Bf16 | Isa::Avx512 => Vectors::Avx512,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => Vectors::Avx2,
            #[cfg(target_arch = "aarch64")]
            Isa::NeonBf16 | Isa::Neon => Vectors::Neon,
            _ => Vectors::Plain,
        }
    }

    /// Whether it has products of bfloat16 pairs.
    #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
    pub(super) fn has_pairs(self) -> bool {
        matches!(self, Isa::Amx | Isa::AmxModel | Isa::Avx512Bf16 | Isa::NeonBf16)
    }

    /// Whether what is written for `other` runs on it.
    pub(super) fn contains(self, other: Isa) -> bool {
        match other {
            Isa::Amx | Isa::AmxModel | Isa::NeonBf16 => self == other,
            Isa::Avx512Bf16 => {
                matches!(self, Isa::Amx | Isa::AmxModel | Isa::Avx512Bf16)
            }
            Isa::Avx512 => self == other || self.contains(Isa::Avx512Bf16),
            Isa::Avx2 => self == other || self.contains(Isa::Avx512),
            Isa::Neon => matches!(self, Isa::NeonBf16 | Isa::Neon),
            Isa::Portable => true,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn better_sets_contain_what_lesser_ones_run() {
        let own = Isa::available();
        for (index, isa) in own.iter().enumerate() {
            for (other, lesser) in own.iter().enumerate() {
                assert_eq!(isa.contains(*lesser), index <= other, "{isa:?} {lesser:?}");
            }
            assert_eq!(isa.bits(), *isa);
        }
        assert_eq!(own.last(), Some(&Isa::Portable));
        assert!(!own.contains(&Isa::AmxModel) && Isa::detect() != Isa::AmxModel);
        assert_eq!(Isa::AmxModel.bits(), Isa::Amx);
    }
}
