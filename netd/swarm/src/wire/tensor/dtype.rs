//! Element types by the names of the wire.

use shared::dtype::DType;
use strum::{EnumString, IntoStaticStr};

/// Element types that tensors of the wire name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, EnumString, IntoStaticStr)]
pub enum WireDtype {
    #[strum(serialize = "float32")]
    F32,
    #[strum(serialize = "float16")]
    F16,
    #[strum(serialize = "bfloat16")]
    Bf16,
    #[strum(serialize = "float64")]
    F64,
    #[strum(serialize = "int64")]
    I64,
    #[strum(serialize = "int32")]
    I32,
    #[strum(serialize = "int16")]
    I16,
    #[strum(serialize = "int8")]
    I8,
    #[strum(serialize = "uint8")]
    U8,
    #[strum(serialize = "bool")]
    Bool,
}

impl WireDtype {
    /// Itself if blocks compute in it, else float32.
    #[must_use]
    pub const fn block_dtype(self) -> DType {
        match self {
            Self::Bf16 => DType::Bf16,
            Self::F16 => DType::F16,
            _ => DType::F32,
        }
    }

    /// The dtype that a message calls `name`.
    #[must_use]
    pub fn parse(name: &str) -> Option<Self> {
        name.parse().ok()
    }

    /// Its name in messages.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.into()
    }

    /// Bytes of one raw element.
    #[must_use]
    pub fn size_bytes(self) -> usize {
        match self {
            Self::F64 | Self::I64 => 8,
            Self::F32 | Self::I32 => 4,
            Self::F16 | Self::Bf16 | Self::I16 => 2,
            Self::I8 | Self::U8 | Self::Bool => 1,
        }
    }

    pub(super) fn is_float(self) -> bool {
        matches!(self, Self::F32 | Self::F16 | Self::Bf16 | Self::F64)
    }
}

impl From<DType> for WireDtype {
    fn from(dtype: DType) -> Self {
        match dtype {
            DType::F32 => Self::F32,
            DType::Bf16 => Self::Bf16,
            DType::F16 => Self::F16,
        }
    }
}
