//! Element types of weights, hidden states and caches.

use serde::{Deserialize, Serialize};
use strum::{Display, EnumString, FromRepr, IntoStaticStr};

/// Floating-point type in which blocks keep weights, hidden states and the KV cache ("block
/// dtype").
#[derive(Display, EnumString, FromRepr, IntoStaticStr)]
#[strum(parse_err_ty = UnknownDType, parse_err_fn = UnknownDType::of)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[repr(u8)]
pub enum DType {
    /// IEEE 754 binary32.
    #[strum(serialize = "float32")]
    F32 = 0,
    /// bfloat16: the upper half of an `f32`.
    #[strum(serialize = "bfloat16")]
    Bf16 = 1,
    /// IEEE 754 binary16.
    #[strum(serialize = "float16")]
    F16 = 2,
}

/// A dtype name that is not one of the three that blocks know.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("unknown dtype {0:?}: expected float32, bfloat16 or float16")]
pub struct UnknownDType(pub String);

impl UnknownDType {
    fn of(name: &str) -> UnknownDType {
        UnknownDType(name.chars().take(40).collect())
    }
}

impl DType {
    /// Bytes of one element.
    pub const fn size_bytes(self) -> usize {
        match self {
            DType::F32 => 4,
            DType::Bf16 | DType::F16 => 2,
        }
    }

    /// The name that PyTorch, Petals' records and wire tensors use.
    pub fn name(self) -> &'static str {
        self.into()
    }
}

/// The type of `--torch_dtype`: a name, or `auto` for that of the checkpoint.
///
/// # Errors
/// A sentence with the names that there are.
pub fn dtype_or_auto(text: &str) -> Result<Option<DType>, String> {
    match text {
        "auto" => Ok(None),
        name => name
            .parse()
            .map(Some)
            .map_err(|error: <DType as std::str::FromStr>::Err| error.to_string()),
    }
}

/// How the matrices of blocks are stored and computed with. Its name is read in upper or lower case
/// (`petals.cli.run_server` takes the names of its enum in any).
#[derive(Display, EnumString, IntoStaticStr)]
#[strum(serialize_all = "lowercase", ascii_case_insensitive)]
#[strum(parse_err_ty = String, parse_err_fn = expected_quant_types)]
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
    pub fn name(self) -> &'static str {
        self.into()
    }
}

/// How matrices are to be stored, and who says so.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum QuantChoice {
    /// The operator; a model that was converted to another type is refused.
    Named(QuantType),
    /// What suits the devices; a model that was converted stays as it is.
    ByDevice(QuantType),
}

impl QuantChoice {
    /// What was chosen.
    pub fn quant_type(self) -> QuantType {
        let (QuantChoice::Named(quant_type) | QuantChoice::ByDevice(quant_type)) = self;
        quant_type
    }

    /// What the operator said.
    pub fn named(self) -> Option<QuantType> {
        match self {
            QuantChoice::Named(quant_type) => Some(quant_type),
            QuantChoice::ByDevice(_) => None,
        }
    }
}

fn expected_quant_types(_: &str) -> String {
    "expected none, int8 or nf4".to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_codes_round_trip() {
        for dtype in [DType::F32, DType::Bf16, DType::F16] {
            assert_eq!(dtype.name().parse(), Ok(dtype));
            assert_eq!(DType::from_repr(dtype as u8), Some(dtype));
        }
        assert_eq!(DType::from_repr(3), None);
        assert!("float8".parse::<DType>().unwrap_err().to_string().contains("float8"));
        for quant in [QuantType::None, QuantType::Int8, QuantType::Nf4] {
            assert_eq!(quant.name().parse(), Ok(quant));
            assert_eq!(quant.name().to_uppercase().parse(), Ok(quant));
        }
        assert_eq!("int4".parse::<QuantType>(), Err("expected none, int8 or nf4".to_owned()));
    }
}
