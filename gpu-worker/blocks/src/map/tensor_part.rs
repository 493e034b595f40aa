//! What is held of one tensor: all of it or some rows where they lie in the file, a copy of other
//! parts, or a copy of whatever it is.

use std::collections::BTreeMap;
use std::ops::Range;

use kernels::quant::held_bytes;
use kernels::{QuantType, WeightSlice, WeightView};
use model::manifest::TensorEntry;
use model::shards::Slice;

use super::{FileMap, Keep};

/// What is held of one tensor.
#[derive(Debug)]
pub(super) struct HeldTensor {
    tensor: TensorEntry,
    part: HeldPart,
    /// Bytes that belong to the part; shared ones counted.
    bytes: u64,
}

#[derive(Debug)]
enum HeldPart {
    /// Mapped.
    All,
    /// Mapped: elements of a vector.
    Elements(Range<usize>),
    /// Mapped: rows that follow each other.
    Rows(Range<usize>),
    Copied(WeightSlice),
    /// All, copied as it is stored.
    CopiedWhole(Vec<u8>),
}

impl HeldTensor {
    /// Holds `slice` of `tensor` in `file`. `None` when the tensor does not lie in the file, does not
    /// fit its shape, or the slice has none of it or more than it.
    pub(super) fn new(
        file: &FileMap,
        tensor: &TensorEntry,
        slice: &Slice,
        keep: Keep,
    ) -> Option<HeldTensor> {
        let stored = file.bytes(tensor)?;
        let whole = whole(stored, tensor)?;
        let shape: Vec<usize> = tensor.shape.iter().map_while(|&n| n.try_into().ok()).collect();
        let is_vector = shape.len() == 1;
        let columns = || 0..whole.inputs();
        let copied = |rows: &[Range<usize>], columns| WeightSlice::new(whole, rows, columns);
        let part = match slice {
            Slice::All => HeldPart::All,
            Slice::None => return None,
            Slice::Rows(ranges) => match (&ranges[..], is_vector) {
                ([one], true) => HeldPart::Elements(one.clone()),
                ([one], false) => HeldPart::Rows(one.clone()),
                (several, true) => HeldPart::Copied(WeightSlice::elements(whole, several)?),
                (several, false) => HeldPart::Copied(copied(several, columns())?),
            },
            Slice::Columns(columns) => {
                let all = 0..whole.outputs();
                HeldPart::Copied(copied(std::slice::from_ref(&all), columns.clone())?)
            }
        };
        let part = match (keep, part) {
            (Keep::Copied, HeldPart::All) => HeldPart::CopiedWhole(stored.to_vec()),
            (Keep::Copied, HeldPart::Elements(one)) => {
                HeldPart::Copied(WeightSlice::elements(whole, std::slice::from_ref(&one))?)
            }
            (Keep::Copied, HeldPart::Rows(one)) => {
                HeldPart::Copied(copied(std::slice::from_ref(&one), columns())?)
            }
            (Keep::Mapped | Keep::Copied, part) => part,
        };
        let of = slice.of(&shape)?;
        let bytes = held_bytes(tensor.quant, tensor.dtype, of.whole, of.rows, of.columns)?;
        let held = HeldTensor { tensor: tensor.clone(), part, bytes: bytes as u64 };
        held.of(file)?;
        Some(held)
    }

    /// The part as a matrix.
    pub(super) fn view<'a>(&'a self, files: &'a BTreeMap<u32, FileMap>) -> Option<WeightView<'a>> {
        self.of(files.get(&self.tensor.file)?)
    }

    fn of<'a>(&'a self, file: &'a FileMap) -> Option<WeightView<'a>> {
        match &self.part {
            HeldPart::All => whole(file.bytes(&self.tensor)?, &self.tensor),
            HeldPart::Elements(range) => {
                let (dtype, size) = (self.tensor.dtype, self.tensor.dtype.size_bytes());
                let bytes = whole(file.bytes(&self.tensor)?, &self.tensor)?.row(0)?;
                let own = range.start.checked_mul(size)?..range.end.checked_mul(size)?;
                WeightView::new(dtype, 1, range.len(), bytes.get(own)?).ok()
            }
            HeldPart::Rows(range) => {
                whole(file.bytes(&self.tensor)?, &self.tensor)?.rows(range.clone())
            }
            HeldPart::Copied(slice) => slice.view(),
            HeldPart::CopiedWhole(bytes) => whole(bytes, &self.tensor),
        }
    }

    /// Asks the kernel to read what is mapped ahead.
    pub(super) fn read_ahead(&self, file: &FileMap) {
        if self.copied_bytes() == 0
            && let Some(view) = self.of(file)
        {
            file.read_ahead(view.bytes());
        }
    }

    /// How the tensor is stored.
    pub(super) fn quant(&self) -> QuantType {
        self.tensor.quant
    }

    /// Bytes that belong to the part.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Bytes of a copy.
    pub(super) fn copied_bytes(&self) -> u64 {
        match &self.part {
            HeldPart::Copied(slice) => slice.len() as u64,
            HeldPart::CopiedWhole(bytes) => bytes.len() as u64,
            HeldPart::All | HeldPart::Elements(_) | HeldPart::Rows(_) => 0,
        }
    }
}

/// The whole tensor, stored in `bytes`, as a matrix; a vector is one row.
fn whole<'a>(bytes: &'a [u8], tensor: &TensorEntry) -> Option<WeightView<'a>> {
    let (outputs, inputs) = match tensor.shape.as_slice() {
        [inputs] => (1, *inputs),
        [outputs, inputs] => (*outputs, *inputs),
        _ => return None,
    };
    let (outputs, inputs) = (usize::try_from(outputs).ok()?, usize::try_from(inputs).ok()?);
    WeightView::quantized(tensor.quant, tensor.dtype, outputs, inputs, bytes).ok()
}
