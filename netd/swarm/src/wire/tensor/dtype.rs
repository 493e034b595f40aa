//! Element types by the names of the wire.

use shared::dtype::DType;

/// Element types that tensors of the wire name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WireDtype {
    /// `float32`.
    F32,
    /// `float16`.
    F16,
    /// `bfloat16`.
    Bf16,
    /// `float64`.
    F64,
    /// `int64`.
    I64,
    /// `int32`.
    I32,
    /// `int16`.
    I16,
    /// `int8`.
    I8,
    /// `uint8`.
    U8,
    /// `bool`.
    Bool,
}

impl WireDtype {
    const ALL: [(Self, &'static str); 10] = [
        (Self::F32, "float32"),
        (Self::F16, "float16"),
        (Self::Bf16, "bfloat16"),
        (Self::F64, "float64"),
        (Self::I64, "int64"),
        (Self::I32, "int32"),
        (Self::I16, "int16"),
        (Self::I8, "int8"),
        (Self::U8, "uint8"),
        (Self::Bool, "bool"),
    ];

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
        Self::ALL.iter().find(|(_, n)| *n == name).map(|(dtype, _)| *dtype)
    }

    /// Its name in messages.
    #[must_use]
    pub fn name(self) -> &'static str {
        Self::ALL.iter().find(|(dtype, _)| *dtype == self).map_or("", |(_, name)| name)
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
