//! Matrix products in register tiles: the choice of arithmetic and source for a matrix.
//!
//! | Matrix | AMX, AVX-512 BF16 | AVX-512 | AVX2 | any |
//! | --- | --- | --- | --- | --- |
//! | bfloat16 | bfloat16 pairs | f32, 16 lanes | f32, 8 lanes | f32, plain |
//! | f32, float16 | f32, 16 lanes | f32, 16 lanes | f32, 8 lanes | f32, plain |
//! | INT8 | bfloat16 pairs, else f32, 16 lanes | f32, 16 lanes | f32, 8 lanes | f32, plain |
//! | NF4, rows of whole groups | bfloat16 pairs, else f32, 16 lanes | f32, 16 lanes | f32, 8 lanes | f32, plain |
//! | NF4, other rows | f32, 16 lanes | f32, 16 lanes | f32, 8 lanes | f32, plain |
//!
//! On 64-bit ARM bfloat16 pairs are those of `bfdot`, where the processor has it; everything else is f32 in
//! 16 lanes of NEON.
//!
//! Pairs multiply matrices whose arithmetic is bfloat16, in tiles on AMX ([`tile_gemm`]). Every element of the output has one
//! accumulator vector that walks the inputs from first to last, and one fixed tree that sums its
//! lanes: the same bits in every tile, piece and thread ([`blocking`]). Products of many rows go over packed
//! panels in vectors of the whole instruction set, with the same bits ([`panels`]).

mod arithmetic;
mod blocking;
mod float;
#[cfg(target_arch = "aarch64")]
mod neon;
#[cfg(target_arch = "x86_64")]
pub(super) mod nf4;
#[cfg(target_arch = "x86_64")]
pub(super) mod pairs;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod panels;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
pub(super) mod sources;
#[cfg(target_arch = "x86_64")]
mod tile_gemm;

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::{__m256, __m512};
use std::mem::discriminant;

use shared::dtype::DType;

use arithmetic::Arithmetic;
pub(super) use arithmetic::MatrixSource;
use blocking::{Operand, Unpacked, multiply};
#[cfg(target_arch = "aarch64")]
use float::NeonGroups;
use float::{Bf16, DecodedMatrix, F16, F32, Float, StoredNumbers};
#[cfg(target_arch = "x86_64")]
use float::{Groups, WideGroups};
#[cfg(target_arch = "aarch64")]
use neon::BfDot;

#[cfg(target_arch = "aarch64")]
use super::neon::Neon;
#[cfg(target_arch = "x86_64")]
use super::outer::Pairs512;
use super::vector::{Plain, Vector};
use super::{Isa, Scratch, Vectors};
use crate::cpu::pool::{Disjoint, ThreadPool};
use crate::ops::{Linear, Product, Products};
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
use crate::quant::{self, int8};
use crate::tensor::{Format, WeightView};
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
use crate::tuning;

/// One matrix product.
pub(in crate::cpu) fn linear(
    isa: Isa,
    pool: &mut ThreadPool,
    scratch: &mut Scratch,
    args: Linear<'_, [f32], WeightView<'_>>,
) {
    let mut part = [Product { weight: args.weight, bias: args.bias, out: args.out }];
    let (x, rows, parts) = (args.x, args.rows, &mut part);
    products(isa, pool, scratch, Products { x, rows, parts });
}

/// Several products of the same inputs: neighbours of one kind are one heap of work, whose inputs
/// are packed once.
pub(in crate::cpu) fn products(
    isa: Isa,
    pool: &mut ThreadPool,
    scratch: &mut Scratch,
    args: Products<'_, '_, [f32], WeightView<'_>>,
) {
    let is_like = |a: &Product<'_, [f32], WeightView<'_>>,
                   b: &Product<'_, [f32], WeightView<'_>>| {
        let (a, b) = (a.weight, b.weight);
        (a.dtype(), a.inputs()) == (b.dtype(), b.inputs())
            && discriminant(&a.format()) == discriminant(&b.format())
    };
    let (x, rows) = (args.x, args.rows);
    for parts in args.parts.chunk_by_mut(is_like) {
        let Some(weight) = parts.first().map(|part| part.weight) else {
            continue;
        };
        let args = Products { x, rows, parts };
        let (dtype, inputs) = (weight.dtype(), weight.inputs());
        LikeProducts { isa, pool, scratch, args, dtype, inputs }.run(weight.format());
    }
}

/// Products with matrices of one dtype, format and width.
struct LikeProducts<'p, 'a, 'w> {
    /// One of [`Isa::available`].
    isa: Isa,
    pool: &'p mut ThreadPool,
    scratch: &'p mut Scratch,
    args: Products<'a, 'p, [f32], WeightView<'w>>,
    dtype: DType,
    inputs: usize,
}

impl<'w> LikeProducts<'_, '_, 'w> {
    /// Chooses the row of the table above.
    fn run(&mut self, format: Format<'_>) {
        match format {
            Format::Plain => self.plain(),
            Format::Int8(_) => self.int8(),
            Format::Nf4(_) => self.nf4(),
        }
    }

    /// Whether the matrices are multiplied in bfloat16 pairs.
    #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
    fn is_paired(&self) -> bool {
        self.isa.has_pairs() && self.dtype == DType::Bf16
    }

    fn plain(&mut self) {
        #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
        if self.is_paired() {
            let inputs = self.inputs;
            return self.pairs(|weight| Some(sources::Bf16 { bytes: weight.bytes(), inputs }));
        }
        match self.isa.vectors() {
            #[cfg(target_arch = "x86_64")]
            Vectors::Avx512 => self.stored::<__m512>(),
            #[cfg(target_arch = "x86_64")]
            Vectors::Avx2 => self.stored::<__m256>(),
            #[cfg(target_arch = "aarch64")]
            Vectors::Neon => self.stored::<Neon>(),
            Vectors::Plain => self.stored::<Plain>(),
        }
    }

    fn int8(&mut self) {
        #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
        {
            let inputs = self.inputs;
            if self.is_paired() {
                return self.pairs(|weight| {
                    int8_parts(weight).map(|parts| sources::Int8 { parts, inputs })
                });
            }
            let source =
                |weight| int8_parts(weight).map(|parts| StoredNumbers::int8(parts, inputs));
            match self.isa.vectors() {
                #[cfg(target_arch = "x86_64")]
                Vectors::Avx512 => return self.multiply::<Float<__m512>, _>(source),
                #[cfg(target_arch = "x86_64")]
                Vectors::Avx2 => return self.multiply::<Float<__m256>, _>(source),
                #[cfg(target_arch = "aarch64")]
                Vectors::Neon => return self.multiply::<Float<Neon>, _>(source),
                Vectors::Plain => {}
            }
        }
        self.multiply::<Float<Plain>, _>(|weight| Some(DecodedMatrix(weight)));
    }

    fn nf4(&mut self) {
        #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
        {
            let has_groups = |part: &Product<'_, [f32], WeightView<'_>>| {
                nf4_parts(part.weight).is_some_and(|parts| parts.is_grouped())
            };
            if self.isa.vectors() != Vectors::Plain && self.args.parts.iter().all(has_groups) {
                return self.grouped_nf4();
            }
        }
        self.any_nf4();
    }

    /// NF4 in any shape.
    fn any_nf4(&mut self) {
        match self.isa.vectors() {
            #[cfg(target_arch = "x86_64")]
            Vectors::Avx512 => {
                self.multiply::<Float<__m512>, _>(|weight| Some(DecodedMatrix(weight)))
            }
            #[cfg(target_arch = "x86_64")]
            Vectors::Avx2 => {
                self.multiply::<Float<__m256>, _>(|weight| Some(DecodedMatrix(weight)))
            }
            #[cfg(target_arch = "aarch64")]
            Vectors::Neon => self.multiply::<Float<Neon>, _>(|weight| Some(DecodedMatrix(weight))),
            Vectors::Plain => {
                self.multiply::<Float<Plain>, _>(|weight| Some(DecodedMatrix(weight)))
            }
        }
    }

    /// NF4 whose rows are whole groups.
    #[cfg(target_arch = "x86_64")]
    fn grouped_nf4(&mut self) {
        let (dtype, inputs) = (self.dtype, self.inputs);
        if self.is_paired() {
            return self
                .pairs(|weight| nf4_parts(weight).map(|parts| sources::Nf4 { parts, inputs }));
        }
        match (self.isa.vectors(), dtype) {
            (Vectors::Avx512, _) => self.groups::<WideGroups, Float<__m512>, _>(|weight| {
                nf4_parts(weight).map(|parts| nf4::WideNf4 { parts, inputs, dtype })
            }),
            (_, DType::Bf16) => self.groups::<Groups, Float<__m256>, _>(|weight| {
                nf4_parts(weight).map(|parts| nf4::Nf4Bf16 { parts, inputs })
            }),
            _ => self.groups::<Groups, Float<__m256>, _>(|weight| {
                nf4_parts(weight).map(|parts| nf4::Nf4 { parts, inputs, dtype })
            }),
        }
    }

    /// Multiplies a single row by groups `G`, several in vectors `V`: both have the same bits.
    #[cfg(target_arch = "x86_64")]
    fn groups<G: Arithmetic, V: Arithmetic, S: MatrixSource<G> + MatrixSource<V>>(
        &mut self,
        source: impl Fn(WeightView<'w>) -> Option<S>,
    ) {
        match self.args.rows {
            1 => self.multiply::<G, S>(source),
            _ => self.multiply::<V, S>(source),
        }
    }

    /// NF4 whose rows are whole groups.
    #[cfg(target_arch = "aarch64")]
    fn grouped_nf4(&mut self) {
        let inputs = self.inputs;
        let source = |weight| nf4_parts(weight).map(|parts| sources::Nf4 { parts, inputs });
        match self.dtype {
            DType::Bf16 if self.is_paired() => self.pairs(source),
            DType::Bf16 if self.args.rows == 1 => self.multiply::<NeonGroups, _>(source),
            DType::Bf16 => self.multiply::<Float<Neon>, _>(source),
            DType::F16 | DType::F32 => self.any_nf4(),
        }
    }

    /// Multiplies bfloat16 with the matrices from which `source` makes a source.
    #[cfg(target_arch = "aarch64")]
    fn pairs<S: MatrixSource<BfDot>>(&mut self, source: impl Fn(WeightView<'w>) -> Option<S>) {
        self.multiply::<BfDot, _>(source);
    }

    /// Multiplies bfloat16 with the matrices from which `source` makes a source: in tiles where the
    /// instruction set has them, for any number of rows.
    #[cfg(target_arch = "x86_64")]
    fn pairs<S: tile_gemm::InPlace>(&mut self, source: impl Fn(WeightView<'w>) -> Option<S>) {
        let (inputs, rows) = (self.inputs, self.args.rows);
        match self.isa {
            Isa::Amx | Isa::AmxModel => {
                let from = Unpacked { x: self.args.x, rows, inputs };
                let operands = operands(&mut self.args, source);
                let (pool, panels) = (&mut *self.pool, &mut self.scratch.panels);
                // SAFETY: the machine has `isa`, or the model has the tiles that it lacks; a view
                // holds all rows of its shape.
                unsafe { tile_gemm::multiply(self.isa, pool, panels, from, &operands) };
            }
            _ if tuning::pairs_take_panels(rows, inputs) => {
                let from = Unpacked { x: self.args.x, rows, inputs };
                let operands = operands(&mut self.args, source);
                let (pool, panels, dtype) = (&mut *self.pool, &mut self.scratch.panels, self.dtype);
                // SAFETY: the machine has bfloat16 pairs; a view holds all rows of its shape.
                unsafe {
                    panels::multiply::<Pairs512, pairs::Pairs, S>(
                        pool, panels, dtype, from, &operands,
                    );
                }
            }
            _ => self.multiply::<pairs::Pairs, _>(source),
        }
    }

    /// Numbers as stored, in one kind of vectors.
    fn stored<V: Vector>(&mut self)
    where
        Float<V>: Arithmetic<Weights = [V; 1]>,
    {
        let inputs = self.inputs;
        match self.dtype {
            DType::F32 => self.multiply::<Float<V>, _>(|weight| {
                Some(StoredNumbers::<F32>::new(weight.bytes(), inputs))
            }),
            DType::Bf16 => self.multiply::<Float<V>, _>(|weight| {
                Some(StoredNumbers::<Bf16>::new(weight.bytes(), inputs))
            }),
            DType::F16 => self.multiply::<Float<V>, _>(|weight| {
                Some(StoredNumbers::<F16>::new(weight.bytes(), inputs))
            }),
        }
    }

    /// Multiplies with the matrices from which `source` makes a source.
    fn multiply<A: Arithmetic, S: MatrixSource<A>>(
        &mut self,
        source: impl Fn(WeightView<'w>) -> Option<S>,
    ) {
        assert!(self.isa.contains(A::SET), "the arithmetic is that of the instruction set");
        let (dtype, inputs, rows) = (self.dtype, self.inputs, self.args.rows);
        let from = Unpacked { x: self.args.x, rows, inputs };
        let operands = operands(&mut self.args, source);
        #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
        if A::HAS_PANELS && tuning::linear_takes_panels(rows, inputs) {
            let (pool, panels) = (&mut *self.pool, &mut self.scratch.panels);
            match self.isa.vectors() {
                // SAFETY: the machine has `isa`, which the arithmetic and the vectors need; a view
                // holds all rows of its shape.
                #[cfg(target_arch = "x86_64")]
                Vectors::Avx512 => unsafe {
                    return panels::multiply::<__m512, A, S>(pool, panels, dtype, from, &operands);
                },
                // SAFETY: as above.
                #[cfg(target_arch = "x86_64")]
                Vectors::Avx2 => unsafe {
                    return panels::multiply::<__m256, A, S>(pool, panels, dtype, from, &operands);
                },
                // SAFETY: as above.
                #[cfg(target_arch = "aarch64")]
                Vectors::Neon => unsafe {
                    return panels::multiply::<Neon, A, S>(pool, panels, dtype, from, &operands);
                },
                Vectors::Plain => {}
            }
        }
        // SAFETY: the machine has `isa`, which the arithmetic names; a view holds all rows of its
        // shape.
        unsafe { multiply::<A, S>(self.pool, &mut self.scratch.panels, dtype, from, &operands) };
    }
}

/// The matrices of some products as the kernels read them.
fn operands<'o, 'w, S>(
    args: &'o mut Products<'_, '_, [f32], WeightView<'w>>,
    source: impl Fn(WeightView<'w>) -> Option<S>,
) -> Vec<Operand<'o, S>> {
    let rows = args.rows;
    let operands = args.parts.iter_mut().filter_map(|part| {
        let (weight, bias) = (part.weight, part.bias);
        let (outputs, row_bytes) = (weight.outputs(), weight.row_bytes());
        let out = Disjoint::new(&mut part.out[..rows * outputs]);
        Some(Operand { source: source(weight)?, outputs, row_bytes, bias, out })
    });
    operands.collect()
}

#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
fn int8_parts(weight: WeightView<'_>) -> Option<int8::Int8Parts<'_>> {
    match weight.format() {
        Format::Int8(parts) => Some(parts),
        Format::Plain | Format::Nf4(_) => None,
    }
}

#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
fn nf4_parts(weight: WeightView<'_>) -> Option<quant::nf4::Nf4Parts<'_>> {
    match weight.format() {
        Format::Nf4(parts) => Some(parts),
        Format::Plain | Format::Int8(_) => None,
    }
}
