//! What cases need of a backend besides its operations.

use super::*;
use crate::ops::route;

/// What a backend rounds that the reference does not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arithmetic {
    /// Products and sums are f32.
    F32,
    /// f32, but for products of bfloat16 pairs where both sides are bfloat16.
    Bf16Pairs,
    /// Tensor cores of a CUDA device, and the approximate functions of its libraries.
    TensorCores,
}

/// A backend under test.
pub trait Subject: Backend {
    /// Memory of the KV pages of one block.
    type PageMemory;
    /// Whether it is the CPU: many small runs are then cheap.
    const IS_HOST: bool;
    /// Lengths of the segments of a gradient's sums to test; `None` is the one that is served.
    const SEGMENTS: &'static [Option<usize>] = &[None];

    /// What it rounds.
    fn arithmetic(&self) -> Arithmetic;
    /// Devices with the same number must give the same bits.
    fn group(&self) -> usize {
        0
    }
    /// Switches to the other kernels for many rows, and back by the next call. Says whether both
    /// promise the same bits; `None` when there are no others.
    fn alternate(&mut self) -> Option<bool> {
        None
    }

    /// Memory of pages that holds `bytes`.
    fn page_memory(&mut self, bytes: &[u8]) -> Result<Self::PageMemory, OpError>;
    /// The pages in `memory`.
    fn pages<'p>(memory: &'p mut Self::PageMemory, layout: PageLayout) -> Self::Pages<'p>;
    /// The bytes of the pages, and the keys and values that were appended for `rows`: of each token
    /// `[kv_heads, 2, head_dim]`.
    fn page_bytes(
        &mut self,
        memory: &Self::PageMemory,
        layout: PageLayout,
        rows: &[StepRow<'_>],
    ) -> Result<[Vec<u8>; 2], OpError>;

    /// The router alone, which is part of [`Backend::mixture`].
    fn route(&mut self, args: Route<'_, Self::Floats>) -> Result<(), OpError>;
    /// Its gradient.
    fn route_grad(&mut self, args: RouteGrad<'_, Self::Floats>) -> Result<(), OpError>;
    /// The bytes that `quant` stores of a matrix of numbers, as the bits of f32 values.
    fn quantize(
        &mut self,
        from: &Self::Matrix<'_>,
        quant: QuantType,
        to: &mut Self::Floats,
    ) -> Result<(), OpError>;
    /// [`Backend::linear_grad`] with segments of `segment` steps.
    fn linear_grad_by(
        &mut self,
        args: LinearGrad<'_, Self::Floats, Self::Matrix<'_>>,
        _segment: Option<usize>,
    ) -> Result<(), OpError> {
        self.linear_grad(args)
    }
    /// [`Backend::attention_grad`] with a workspace for one tile of keys.
    fn attention_grad_tight(
        &mut self,
        args: AttentionGrad<'_, Self::Floats, Self::Pages<'_>>,
    ) -> Result<(), OpError> {
        self.attention_grad(args)
    }
}

/// What all backends whose memory is the host's have alike.
macro_rules! host_memory {
    () => {
        type PageMemory = Vec<u8>;
        const IS_HOST: bool = true;

        fn page_memory(&mut self, bytes: &[u8]) -> Result<Vec<u8>, OpError> {
            Ok(bytes.to_vec())
        }

        fn pages<'p>(memory: &'p mut Vec<u8>, layout: PageLayout) -> KvPages<'p> {
            KvPages::new(layout, memory)
        }

        fn page_bytes(
            &mut self,
            memory: &Vec<u8>,
            layout: PageLayout,
            rows: &[StepRow<'_>],
        ) -> Result<[Vec<u8>; 2], OpError> {
            let (mut bytes, mut appended) = (memory.clone(), Vec::new());
            let mut pages = KvPages::new(layout, &mut bytes);
            for row in rows {
                for position in row.prefix..row.prefix + row.tokens {
                    let (page, slot) = row.locate(position);
                    for vector in 0..2 * layout.kv_heads {
                        let vector = pages.slot_mut(page, vector / 2, vector % 2, slot);
                        appended.extend_from_slice(vector);
                    }
                }
            }
            Ok([memory.clone(), appended])
        }

        fn route(&mut self, args: Route<'_, [f32]>) -> Result<(), OpError> {
            route::reference(args)
        }

        fn route_grad(&mut self, args: RouteGrad<'_, [f32]>) -> Result<(), OpError> {
            route::reference_grad(args)
        }

        fn quantize(
            &mut self,
            from: &WeightView<'_>,
            quant: QuantType,
            to: &mut [f32],
        ) -> Result<(), OpError> {
            quantize(from, quant, to)
        }
    };
}

impl Subject for Reference {
    host_memory!();

    fn arithmetic(&self) -> Arithmetic {
        Arithmetic::F32
    }
}

impl Subject for Cpu {
    host_memory!();

    fn arithmetic(&self) -> Arithmetic {
        match self.isa() {
            Isa::Amx | Isa::AmxModel | Isa::Avx512Bf16 => Arithmetic::Bf16Pairs,
            Isa::Avx512 | Isa::Avx2 | Isa::NeonBf16 | Isa::Neon | Isa::Portable => Arithmetic::F32,
        }
    }

    fn group(&self) -> usize {
        self.isa().bits() as usize
    }
}

fn quantize(from: &WeightView<'_>, quant: QuantType, to: &mut [f32]) -> Result<(), OpError> {
    let mut values = vec![0.0; from.inputs() * from.outputs()];
    for (index, row) in values.chunks_mut(from.inputs()).enumerate() {
        from.row_to_f32(index, row);
    }
    let bytes = match quant {
        QuantType::Nf4 => nf4::encode(&values),
        QuantType::Int8 | QuantType::None => int8::encode(&values, from.inputs()),
    };
    check_len("quantize", "to", to.len(), 1, bytes.len() / 4)?;
    for (to, word) in to.iter_mut().zip(bytes.as_chunks::<4>().0) {
        *to = f32::from_le_bytes(*word);
    }
    Ok(())
}
