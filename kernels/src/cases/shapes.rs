//! Shapes that are measured: those of blocks of a size.

use shared::config::QuantType;
use shared::dtype::DType;

/// Elements of a head.
pub(super) const HEAD_DIM: usize = 128;

/// Which shapes to measure.
#[derive(Clone, Copy, Debug)]
pub struct Shapes {
    /// Width of the hidden states, of the middle of the MLP, and of keys.
    pub hidden: usize,
    /// Width of the middle of the MLP.
    pub middle: usize,
    /// Width of the keys of a token.
    pub kv: usize,
    /// (outputs, inputs) of matrix products.
    pub matrices: &'static [(usize, usize)],
    /// How matrices are stored, and the block dtype.
    pub formats: &'static [(QuantType, DType)],
    /// Rows of products and of all that goes once over the hidden states.
    pub rows: &'static [usize],
    /// Rows of the gradient of a product.
    pub gradient_rows: &'static [usize],
    /// (sessions, cached tokens, new tokens) of attention.
    pub attention: &'static [(usize, usize, usize)],
    /// Tokens of a sequence whose attention has a gradient.
    pub gradient_tokens: &'static [usize],
    /// (rank, rows) of adapters.
    pub adapters: &'static [(usize, usize)],
    /// Bytes of weights that are walked.
    pub ring_bytes: usize,
}

const FORMATS: [(QuantType, DType); 3] =
    [(QuantType::Nf4, DType::Bf16), (QuantType::Int8, DType::Bf16), (QuantType::None, DType::Bf16)];

impl Shapes {
    /// A block of a 70B Llama, for devices.
    pub const LARGE: Shapes = Shapes {
        hidden: 8192,
        middle: 28672,
        kv: 1024,
        matrices: &[(8192, 8192), (1024, 8192), (28672, 8192), (8192, 28672)],
        formats: &FORMATS,
        rows: &[1, 8, 32, 1024],
        gradient_rows: &[256],
        attention: &[(1, 2047, 1), (8, 2047, 1), (32, 2047, 1), (1, 0, 1024)],
        gradient_tokens: &[256],
        adapters: &[(16, 1), (16, 8), (16, 32), (16, 1024)],
        ring_bytes: 512 << 20,
    };
    /// A block of a 1B Llama, for processors.
    pub const SMALL: Shapes = Shapes {
        hidden: 2048,
        middle: 5632,
        kv: 256,
        matrices: &[(2048, 2048), (256, 2048), (5632, 2048), (2048, 5632)],
        formats: &FORMATS,
        rows: &[1, 8, 128],
        gradient_rows: &[64],
        attention: &[(1, 511, 1), (8, 511, 1), (1, 0, 128)],
        gradient_tokens: &[64],
        adapters: &[(16, 1), (16, 8), (16, 128)],
        ring_bytes: 256 << 20,
    };
    /// For the emulator, whose times mean nothing.
    pub const TINY: Shapes = Shapes {
        hidden: 256,
        middle: 512,
        kv: 128,
        matrices: &[(256, 256), (128, 256), (512, 256), (256, 512)],
        formats: &FORMATS,
        rows: &[1, 3],
        gradient_rows: &[17],
        attention: &[(1, 39, 1), (3, 39, 1)],
        gradient_tokens: &[17],
        adapters: &[(16, 1), (16, 3)],
        ring_bytes: 256 << 10,
    };
    /// Blocks of a 7B and of a 1B Llama and one matrix of a tiny model, for the benchmarks of the
    /// processor beside its peers.
    pub const BENCHMARK: Shapes = Shapes {
        hidden: 4096,
        middle: 11008,
        kv: 1024,
        matrices: &[
            (11008, 4096),
            (4096, 11008),
            (4096, 4096),
            (5632, 2048),
            (2048, 2048),
            (352, 128),
        ],
        formats: &[
            (QuantType::None, DType::Bf16),
            (QuantType::Int8, DType::Bf16),
            (QuantType::Nf4, DType::Bf16),
            (QuantType::None, DType::F16),
            (QuantType::None, DType::F32),
        ],
        rows: &[1, 4, 16, 32, 64, 128, 512],
        gradient_rows: &[16, 64, 512],
        attention: &[(1, 127, 1), (1, 2047, 1), (1, 0, 128), (1, 1920, 128), (1, 496, 16)],
        gradient_tokens: &[16, 128, 512],
        adapters: &[(16, 1), (16, 16), (64, 1), (64, 512)],
        ring_bytes: 384 << 20,
    };
}
