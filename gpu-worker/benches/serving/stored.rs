//! Stored tensors without a file: whole blocks, and what a rank of a group holds of them.

use std::collections::BTreeMap;
use std::ops::Range;
use std::slice::from_ref;

use kernels::{DType, QuantType, WeightSlice, WeightView, quant};
use model::BlockSpec;
use model::shards::{Shard, Slice};
use serde_json::json;

/// Hidden size, intermediate size, blocks, heads and kv heads.
pub type Sizes = [usize; 5];

/// A Llama of these sizes.
pub fn spec([hidden, intermediate, blocks, heads, kv_heads]: Sizes) -> BlockSpec {
    let config = json!({
        "model_type": "llama", "hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": blocks,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    });
    BlockSpec::from_config(&config).expect("a Llama")
}

/// Shape and bytes of a tensor.
type Stored = (Vec<usize>, Vec<u8>);

/// Stored tensors of each block, by name.
pub struct Bytes {
    pub spec: BlockSpec,
    pub dtype: DType,
    quant: QuantType,
    tensors: Vec<BTreeMap<String, Stored>>,
}

impl Bytes {
    pub fn new(spec: BlockSpec, dtype: DType, quant: QuantType) -> Bytes {
        let tensors = (0..spec.num_blocks).map(|block| {
            let tensors = spec.tensors(block).into_iter().map(|tensor| {
                let (outputs, inputs) = sides(&tensor.shape);
                let quant = kept(quant, outputs);
                let size = quant::stored_bytes(quant, dtype, outputs, inputs);
                // Small numbers of both signs; the scales of quantized matrices among them.
                let words = (0..size.expect("a size") / 2).map(|i| 0x3a00 | (i % 251) as u16);
                let bytes = words.flat_map(u16::to_le_bytes).collect();
                (tensor.name, (tensor.shape, bytes))
            });
            tensors.collect()
        });
        let tensors = tensors.collect();
        Bytes { spec, dtype, quant, tensors }
    }

    pub fn view(&self, block: usize, name: &str) -> Option<WeightView<'_>> {
        let (shape, bytes) = self.tensors[block].get(name)?;
        let (outputs, inputs) = sides(shape);
        let quant = kept(self.quant, outputs);
        WeightView::quantized(quant, self.dtype, outputs, inputs, bytes).ok()
    }
}

/// What a rank holds: rows where they lie, columns in memory of its own, as
/// `blocks::map` does it.
pub struct Held<'b> {
    bytes: &'b Bytes,
    /// Of each block, by name; `None` for what is held whole.
    parts: Vec<BTreeMap<String, HeldPart>>,
}

enum HeldPart {
    Rows(Range<usize>),
    Copied(WeightSlice),
}

impl<'b> Held<'b> {
    pub fn new(bytes: &'b Bytes, shard: &Shard) -> Held<'b> {
        let part = |block: usize, name: &str| {
            let whole = bytes.view(block, name)?;
            match shard.slice(name)? {
                Slice::Rows(rows) => Some(HeldPart::Rows(rows.first()?.clone())),
                Slice::Columns(columns) => {
                    let rows = 0..whole.outputs();
                    WeightSlice::new(whole, from_ref(&rows), columns.clone()).map(HeldPart::Copied)
                }
                Slice::All | Slice::None => None,
            }
        };
        let of_block = |(block, tensors): (usize, &BTreeMap<String, Stored>)| {
            let parts = tensors.keys().filter_map(|name| Some((name.clone(), part(block, name)?)));
            parts.collect()
        };
        Held { bytes, parts: bytes.tensors.iter().enumerate().map(of_block).collect() }
    }

    pub fn view(&self, block: usize, name: &str) -> Option<WeightView<'_>> {
        match self.parts[block].get(name) {
            None => self.bytes.view(block, name),
            Some(HeldPart::Rows(rows)) => self.bytes.view(block, name)?.rows(rows.clone()),
            Some(HeldPart::Copied(slice)) => slice.view(),
        }
    }
}

/// Vectors are single rows, and are never quantized.
fn sides(shape: &[usize]) -> (usize, usize) {
    match *shape {
        [outputs, inputs] => (outputs, inputs),
        _ => (1, shape.iter().product()),
    }
}

fn kept(quant: QuantType, outputs: usize) -> QuantType {
    if outputs == 1 { QuantType::None } else { quant }
}
