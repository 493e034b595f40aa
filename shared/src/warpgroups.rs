//! What is known of the warpgroups (`wgmma`) of a CUDA device, kernel by kernel. Short-lived
//! processes that the supervisor starts find it out, the supervisor keeps it, and a worker follows
//! it.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

use crate::dtype::{DType, QuantType};

/// A kernel for warpgroups that another kernel, for warps (`mma.sync`), can replace.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum WarpgroupKernel {
    /// Products of many rows (`linear_wgmma.cu`).
    Product(QuantType, DType),
    /// Attention of many tokens with heads of so many elements (`attention_wgmma.cu`).
    Attention(u8, DType),
}

impl WarpgroupKernel {
    /// Every kernel, in the order in which samples are taken.
    pub const ALL: [WarpgroupKernel; 16] = [
        WarpgroupKernel::Product(QuantType::None, DType::Bf16),
        WarpgroupKernel::Product(QuantType::None, DType::F16),
        WarpgroupKernel::Product(QuantType::Int8, DType::Bf16),
        WarpgroupKernel::Product(QuantType::Int8, DType::F16),
        WarpgroupKernel::Product(QuantType::Nf4, DType::Bf16),
        WarpgroupKernel::Product(QuantType::Nf4, DType::F16),
        WarpgroupKernel::Attention(64, DType::Bf16),
        WarpgroupKernel::Attention(64, DType::F16),
        WarpgroupKernel::Attention(80, DType::Bf16),
        WarpgroupKernel::Attention(80, DType::F16),
        WarpgroupKernel::Attention(96, DType::Bf16),
        WarpgroupKernel::Attention(96, DType::F16),
        WarpgroupKernel::Attention(112, DType::Bf16),
        WarpgroupKernel::Attention(112, DType::F16),
        WarpgroupKernel::Attention(128, DType::Bf16),
        WarpgroupKernel::Attention(128, DType::F16),
    ];

    /// The kernel for a head dimension and dtype, if there is one.
    pub fn attention(head_dim: usize, dtype: DType) -> Option<WarpgroupKernel> {
        let kernel = WarpgroupKernel::Attention(u8::try_from(head_dim).ok()?, dtype);
        WarpgroupKernel::ALL.contains(&kernel).then_some(kernel)
    }

    /// The kernel of this name.
    pub fn named(name: &str) -> Option<WarpgroupKernel> {
        WarpgroupKernel::ALL.into_iter().find(|kernel| kernel.to_string() == name)
    }
}

impl Ord for WarpgroupKernel {
    fn cmp(&self, other: &WarpgroupKernel) -> std::cmp::Ordering {
        bit(*self).cmp(&bit(*other))
    }
}

impl PartialOrd for WarpgroupKernel {
    fn partial_cmp(&self, other: &WarpgroupKernel) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

/// Its name in the images of kernels.
impl fmt::Display for WarpgroupKernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let dtype = |dtype: &DType| match dtype {
            DType::F32 => "f32",
            DType::Bf16 => "bf16",
            DType::F16 => "f16",
        };
        match self {
            WarpgroupKernel::Product(quant, of) => {
                let format = match quant {
                    QuantType::None => "plain",
                    QuantType::Int8 => "int8",
                    QuantType::Nf4 => "nf4",
                };
                write!(f, "linear_wgmma_{format}_{}", dtype(of))
            }
            WarpgroupKernel::Attention(head_dim, of) => {
                write!(f, "attention_wgmma_{}_d{head_dim}", dtype(of))
            }
        }
    }
}

impl From<WarpgroupKernel> for String {
    fn from(kernel: WarpgroupKernel) -> String {
        kernel.to_string()
    }
}

impl std::str::FromStr for WarpgroupKernel {
    type Err = String;

    fn from_str(name: &str) -> Result<WarpgroupKernel, String> {
        WarpgroupKernel::named(name).ok_or_else(|| format!("no kernel for warpgroups: {name}"))
    }
}

impl TryFrom<String> for WarpgroupKernel {
    type Error = String;

    fn try_from(name: String) -> Result<WarpgroupKernel, String> {
        name.parse()
    }
}

/// A set of kernels for warpgroups.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WarpgroupKernels(u16);

impl WarpgroupKernels {
    /// No kernel.
    pub const NONE: WarpgroupKernels = WarpgroupKernels(0);
    /// Every kernel.
    pub const ALL: WarpgroupKernels = WarpgroupKernels(u16::MAX);

    /// Whether a kernel is in it.
    pub fn contains(self, kernel: WarpgroupKernel) -> bool {
        self.0 & bit(kernel) != 0
    }

    /// The kernels of this set that are not in `others`.
    pub fn without(self, others: WarpgroupKernels) -> WarpgroupKernels {
        WarpgroupKernels(self.0 & !others.0)
    }

    /// Whether there is no kernel in it.
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// The kernels, in their order.
    pub fn iter(self) -> impl Iterator<Item = WarpgroupKernel> {
        WarpgroupKernel::ALL.into_iter().filter(move |kernel| self.contains(*kernel))
    }
}

impl FromIterator<WarpgroupKernel> for WarpgroupKernels {
    fn from_iter<I: IntoIterator<Item = WarpgroupKernel>>(kernels: I) -> WarpgroupKernels {
        WarpgroupKernels(kernels.into_iter().fold(0, |all, kernel| all | bit(kernel)))
    }
}

/// 0 for a kernel that there is not.
fn bit(kernel: WarpgroupKernel) -> u16 {
    let at = WarpgroupKernel::ALL.iter().position(|other| *other == kernel);
    at.map_or(0, |at| 1 << at)
}

/// What a sample of one kernel showed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum SampleVerdict {
    /// It gives the bits of the kernel for warps: it is used.
    SameBits,
    /// It gives other bits: it is not used.
    OtherBits,
    /// It failed. Says why; it is not launched at all.
    Failed(String),
}

/// Verdicts of kernels. A kernel without one is not used.
pub type Verdicts = BTreeMap<WarpgroupKernel, SampleVerdict>;

/// Which kernels for warpgroups (`wgmma`) a device uses instead of those for warps (`mma.sync`).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Warpgroups {
    /// The device has no warpgroups.
    Missing,
    /// Samples were taken. A kernel is used if it gave the same bits.
    Sampled(Verdicts),
    /// Nothing is known of them, or they are given up. Says why; no kernel is launched.
    Unknown(String),
}

/// How much longer a product takes that is bound by tensor cores, computed: `mma.sync` on Hopper has
/// the rate of an A100, 1,024 products per clock and multiprocessor, and `wgmma` 2,048. Source:
/// NVIDIA, H100 whitepaper; kernels/prebuilt/model/devices.py.
pub const COMPUTED_FACTOR: f64 = 2.0;

impl Warpgroups {
    /// The kernels that are used.
    pub fn used(&self) -> WarpgroupKernels {
        self.those(|verdict| *verdict == Some(&SampleVerdict::SameBits))
    }

    /// The kernels that may be launched, if only for comparisons.
    pub fn harmless(&self) -> WarpgroupKernels {
        self.those(|verdict| {
            matches!(verdict, Some(SampleVerdict::SameBits | SampleVerdict::OtherBits))
        })
    }

    /// The kernels that failed, and why.
    pub fn failed(&self) -> impl Iterator<Item = (WarpgroupKernel, &str)> {
        let Warpgroups::Sampled(verdicts) = self else {
            return None.into_iter().flatten();
        };
        let failed = verdicts.iter().filter_map(|(kernel, verdict)| match verdict {
            SampleVerdict::Failed(why) => Some((*kernel, why.as_str())),
            SampleVerdict::SameBits | SampleVerdict::OtherBits => None,
        });
        Some(failed).into_iter().flatten()
    }

    /// Whether a kernel is replaced although the device has warpgroups.
    pub fn falls_back(&self) -> bool {
        *self != Warpgroups::Missing && self.used() != WarpgroupKernels::ALL
    }

    fn those(&self, is_wanted: impl Fn(&Option<&SampleVerdict>) -> bool) -> WarpgroupKernels {
        match self {
            Warpgroups::Sampled(verdicts) => WarpgroupKernel::ALL
                .into_iter()
                .filter(|kernel| is_wanted(&verdicts.get(kernel)))
                .collect(),
            Warpgroups::Missing | Warpgroups::Unknown(_) => WarpgroupKernels::NONE,
        }
    }
}

/// What is chosen for prefill, what falls back to warps and why, and what that costs.
impl fmt::Display for Warpgroups {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let verdicts = match self {
            Warpgroups::Missing => return f.write_str("by warps"),
            Warpgroups::Unknown(why) => {
                return write!(f, "by warps instead of warpgroups ({why}){}", Cost);
            }
            Warpgroups::Sampled(verdicts) => verdicts,
        };
        if !self.falls_back() {
            return f.write_str("by warpgroups");
        }
        match self.used().is_empty() {
            true => f.write_str("by warps instead of warpgroups: ")?,
            false => f.write_str("by warpgroups, except by warps: ")?,
        }
        let mut separator = "";
        for kernel in WarpgroupKernels::ALL.without(self.used()).iter() {
            let why = match verdicts.get(&kernel) {
                Some(SampleVerdict::Failed(why)) => why,
                Some(_) => "other bits",
                None => "not sampled",
            };
            write!(f, "{separator}{kernel} ({why})")?;
            separator = ", ";
        }
        write!(f, "{Cost}")
    }
}

/// What a fallback costs.
struct Cost;

impl fmt::Display for Cost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "; prefill by mma.sync instead of wgmma takes up to {COMPUTED_FACTOR:.1} times as long (computed)"
        )
    }
}

/// A line of JSON on standard output of `sepal sample`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum SampleLine {
    /// The sample of this kernel begins.
    Samples(WarpgroupKernel),
    /// This kernel is launched next.
    Launches(String),
    /// The sample of a kernel is done. The verdict is never [`SampleVerdict::Failed`].
    Found(WarpgroupKernel, SampleVerdict),
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sampled(others: &[(WarpgroupKernel, Option<SampleVerdict>)]) -> Warpgroups {
        let mut all: Verdicts = WarpgroupKernel::ALL
            .into_iter()
            .map(|kernel| (kernel, SampleVerdict::SameBits))
            .collect();
        for (kernel, verdict) in others {
            match verdict {
                Some(verdict) => all.insert(*kernel, verdict.clone()),
                None => all.remove(kernel),
            };
        }
        Warpgroups::Sampled(all)
    }

    #[test]
    fn a_kernel_is_used_only_where_its_own_sample_gave_the_same_bits() {
        let [plain, f16, int8, ..] = WarpgroupKernel::ALL;
        let some = sampled(&[
            (plain, Some(SampleVerdict::OtherBits)),
            (f16, Some(SampleVerdict::Failed("it faulted".to_owned()))),
            (int8, None),
        ]);
        let not_used = [plain, f16, int8].into_iter().collect();
        assert_eq!(some.used(), WarpgroupKernels::ALL.without(not_used));
        assert!(some.harmless().contains(plain) && !some.harmless().contains(f16));
        assert!(!some.harmless().contains(int8));
        assert_eq!(some.failed().collect::<Vec<_>>(), [(f16, "it faulted")]);
        let text = some.to_string();
        for part in [
            "by warpgroups, except by warps: ",
            "linear_wgmma_plain_bf16 (other bits), linear_wgmma_plain_f16 (it faulted)",
            "linear_wgmma_int8_bf16 (not sampled)",
            "up to 2.0 times as long (computed)",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
        assert!(some.falls_back() && !sampled(&[]).falls_back());
        assert_eq!(sampled(&[]).to_string(), "by warpgroups");
        assert!(!Warpgroups::Missing.falls_back());
    }

    #[test]
    fn every_kernel_has_a_name_that_is_read_again() {
        for kernel in WarpgroupKernel::ALL {
            let line = serde_json::to_string(&SampleLine::Samples(kernel)).unwrap();
            assert_eq!(
                serde_json::from_str::<SampleLine>(&line).unwrap(),
                SampleLine::Samples(kernel)
            );
            assert_eq!(WarpgroupKernels::from_iter([kernel]).iter().collect::<Vec<_>>(), [kernel]);
        }
        assert_eq!(WarpgroupKernel::named("linear_wgmma_nf4"), None);
        assert_eq!(WarpgroupKernels::ALL.iter().count(), WarpgroupKernel::ALL.len());
        let (large, odd) = (
            WarpgroupKernel::attention(256, DType::Bf16),
            WarpgroupKernel::attention(128, DType::F32),
        );
        assert_eq!((large, odd), (None, None));
        let verdicts = sampled(&[]);
        let text = serde_json::to_string(&verdicts).unwrap();
        assert_eq!(serde_json::from_str::<Warpgroups>(&text).unwrap(), verdicts);
    }
}
