//! Element types of weights, hidden states and caches.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Floating-point type in which blocks keep weights, hidden states and the KV cache ("block
/// dtype").
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[repr(u8)]
pub enum DType {
    /// IEEE 754 binary32.
    F32 = 0,
    /// bfloat16: the upper half of an `f32`.
    Bf16 = 1,
    /// IEEE 754 binary16.
    F16 = 2,
}

/// A dtype name that is not one of the three that blocks know.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("unknown dtype {0:?}: expected float32, bfloat16 or float16")]
pub struct UnknownDType(pub String);

impl DType {
    /// Bytes of one element.
    pub const fn size_bytes(self) -> usize {
        match self {
            DType::F32 => 4,
            DType::Bf16 | DType::F16 => 2,
        }
    }

    /// The name that PyTorch, Petals' records and wire tensors use.
    pub const fn name(self) -> &'static str {
        match self {
            DType::F32 => "float32",
            DType::Bf16 => "bfloat16",
            DType::F16 => "float16",
        }
    }

    /// The dtype of a number that another process wrote (`DType as u8`).
    pub const fn from_code(code: u8) -> Option<DType> {
        match code {
            0 => Some(DType::F32),
            1 => Some(DType::Bf16),
            2 => Some(DType::F16),
            _ => None,
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The type of `--torch_dtype`: a name, or `auto` for that of the checkpoint.
///
/// # Errors
/// A sentence with the names that there are.
pub fn dtype_or_auto(text: &str) -> Result<Option<DType>, String> {
    match text {
        "auto" => Ok(None),
        name => name.parse().map(Some).map_err(|error: <DType as FromStr>::Err| error.to_string()),
    }
}

impl FromStr for DType {
    type Err = UnknownDType;

    fn from_str(name: &str) -> Result<DType, UnknownDType> {
        [DType::F32, DType::Bf16, DType::F16]
            .into_iter()
            .find(|d| d.name() == name)
            .ok_or_else(|| UnknownDType(name.chars().take(40).collect()))
    }
}

/// How the matrices of blocks are stored and computed with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum QuantType {
    /// In the block dtype.
    #[default]
    None,
    /// Eight bits with a scale per row.
    Int8,
    /// Four bits (NF4) with scales for groups of 64.
    Nf4,
}

impl QuantType {
    /// The name in Petals' records and flags.
    pub const fn name(self) -> &'static str {
        match self {
            QuantType::None => "none",
            QuantType::Int8 => "int8",
            QuantType::Nf4 => "nf4",
        }
    }
}

impl std::fmt::Display for QuantType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

impl std::str::FromStr for QuantType {
    type Err = String;

    /// Upper or lower case (`petals.cli.run_server` takes the names of its enum in any).
    fn from_str(name: &str) -> Result<QuantType, String> {
        [QuantType::None, QuantType::Int8, QuantType::Nf4]
            .into_iter()
            .find(|quant| quant.name().eq_ignore_ascii_case(name))
            .ok_or_else(|| "expected none, int8 or nf4".to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_codes_round_trip() {
        for dtype in [DType::F32, DType::Bf16, DType::F16] {
            assert_eq!(dtype.name().parse(), Ok(dtype));
            assert_eq!(DType::from_code(dtype as u8), Some(dtype));
        }
        assert_eq!(DType::from_code(3), None);
        assert!("float8".parse::<DType>().unwrap_err().to_string().contains("float8"));
    }
}
