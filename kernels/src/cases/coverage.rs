//! Which kernels the cases have launched.

use std::collections::BTreeSet;

/// Kernels that only measure: no case launches them.
const YARDSTICKS: [&str; 2] = ["peak_mma", "peak_wgmma"];

/// Kernels of `all` that were not launched in any of their types and sizes, by their names without
/// those.
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

/// The name without what says only which types and sizes a kernel was compiled for: `attention_decode`
/// of `attention_decode_bf16_d64`.
fn family_of(kernel: &str) -> String {
    let is_variant = |part: &str| {
        let is_size = part.contains(|c: char| c.is_ascii_digit())
            && part.chars().all(|c| matches!(c, 'd' | 'm' | 'n' | 'r' | '0'..='9'));
        is_size || ["f32", "bf16", "f16"].contains(&part)
    };
    let parts: Vec<&str> = kernel.split('_').filter(|part| !is_variant(part)).collect();
    parts.join("_")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kernel_is_missing_when_none_of_its_variants_was_launched() {
        let all = [
            "add_f32",
            "add_bf16",
            "attention_decode_bf16_d64",
            "attention_decode_bf16_d128",
            "linear_gemv_nf4_bf16_m1n2",
            "linear_gemv_int8_bf16_m1n2",
            "peak_mma_bf16",
        ];
        let launched = BTreeSet::from(["add_bf16", "attention_decode_bf16_d128"]);
        let missing = never_launched(all, &launched);
        let missing: Vec<&str> = missing.iter().map(String::as_str).collect();
        assert_eq!(missing, ["linear_gemv_int8", "linear_gemv_nf4"]);
    }
}
