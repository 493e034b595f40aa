//! Slices of quantized matrices, as ranks of a group hold them.
#![allow(clippy::single_range_in_vec_init, reason = "lists of ranges, some of one range")]

use super::*;
use crate::quant::nf4::GROUP;
use crate::slice::WeightSlice;

/// Sizes of a whole matrix (inputs, outputs), some of its rows, and some of its columns.
type Cut = ((usize, usize), &'static [Range<usize>], Range<usize>);

/// Rows that follow each other; several ranges; columns at the ends of groups that share second
/// scales with few and with many neighbours; then the same beside the ends of groups and with odd
/// widths, one of them as wide as whole groups. Most have more than 256 groups.
const CUTS: [(Cut, Class); 10] = [
    (((128, 300), &[150..261], 0..128), Class::Smallest),
    (((320, 120), &[3..40, 41..52, 90..120], 0..320), Class::Quick),
    (((448, 77), &[0..77], 128..320), Class::Quick),
    (((1024, 70), &[0..70], 512..1024), Class::Quick),
    (((8192, 20), &[0..20], 4096..8192), Class::Full),
    (((1024, 70), &[7..11, 30..62], 256..768), Class::Full),
    (((320, 120), &[3..40, 70..111], 50..197), Class::Smallest),
    (((320, 120), &[0..120], 32..288), Class::Quick),
    (((100, 400), &[201..260], 0..100), Class::Quick),
    (((101, 9), &[1..4, 5..9], 3..98), Class::Full),
];

/// What of a whole matrix is taken.
#[derive(Clone, Debug)]
pub(super) struct Slice {
    whole: (usize, usize),
    rows: Vec<Range<usize>>,
    columns: Range<usize>,
    /// Made when it is first used, unless the rows are used where they lie.
    copy: OnceCell<Option<WeightSlice>>,
}

impl Slice {
    pub(super) fn new(
        whole: (usize, usize),
        rows: &[Range<usize>],
        columns: Range<usize>,
    ) -> Slice {
        Slice { whole, rows: rows.to_vec(), columns, copy: OnceCell::new() }
    }

    /// (inputs, outputs) of the slice.
    fn size(&self) -> (usize, usize) {
        (self.columns.len(), self.rows.iter().map(Range::len).sum())
    }

    /// The slice of the matrix `whole`.
    pub(super) fn view<'b>(&'b self, whole: WeightView<'b>) -> WeightView<'b> {
        let slice = match &self.rows[..] {
            [rows] if self.columns.len() == whole.inputs() => whole.rows(rows.clone()),
            rows => {
                let copy = || WeightSlice::new(whole, rows, self.columns.clone());
                self.copy.get_or_init(copy).as_ref().and_then(WeightSlice::view)
            }
        };
        slice.expect("a part of this matrix")
    }

    pub(super) fn name(&self) -> String {
        let ((inputs, outputs), columns) = (self.whole, &self.columns);
        format!(" of {outputs}x{inputs}: rows {:?} columns {columns:?}", self.rows)
    }
}

impl CaseMatrix {
    /// A slice of a matrix.
    pub(super) fn slice(quant: QuantType, dtype: DType, part: Slice) -> CaseMatrix {
        let (inputs, outputs) = part.size();
        let mut matrix = CaseMatrix::new(quant, dtype, inputs, outputs);
        matrix.part = Some(part);
        matrix
    }

    /// A matrix of the same kind and shape, with other values.
    pub(super) fn other(&self) -> CaseMatrix {
        let other = match &self.part {
            None => CaseMatrix::new(self.quant, self.dtype, self.inputs, self.outputs),
            Some(Slice { whole, rows, columns, .. }) => {
                let part = Slice::new(*whole, rows, columns.clone());
                CaseMatrix::slice(self.quant, self.dtype, part)
            }
        };
        let (inputs, outputs) = self.stored_size();
        other.of_values(&noise(11, inputs * outputs))
    }

    /// (inputs, outputs) as stored: of the whole matrix.
    pub(super) fn stored_size(&self) -> (usize, usize) {
        self.part.as_ref().map_or((self.inputs, self.outputs), |part| part.whole)
    }

    /// Whether it is NF4 some of whose rows begin or end within a group.
    fn cuts_groups(&self) -> bool {
        let ends = match &self.part {
            Some(Slice { whole, columns, .. }) => [whole.0, columns.start, columns.end],
            None => [self.inputs; 3],
        };
        self.quant == QuantType::Nf4 && ends.iter().any(|end| !end.is_multiple_of(GROUP))
    }

    /// Whether tensor cores multiply it.
    pub(super) fn is_tiled(&self) -> bool {
        tuning::cuda_linear_is_tiled(self.dtype, self.inputs) && !self.cuts_groups()
    }

    /// The whole matrix whose slice this is, if the same code takes it.
    pub(super) fn whole(&self) -> Option<CaseMatrix> {
        let (inputs, outputs) = self.part.as_ref()?.whole;
        let whole = CaseMatrix::new(self.quant, self.dtype, inputs, outputs);
        let kind = |of: &CaseMatrix| (of.is_tiled(), of.cuts_groups());
        (kind(&whole) == kind(self)).then_some(whole)
    }

    /// The outputs of its products, of those of the whole matrix; `None` when columns are missing,
    /// with which sums are others.
    pub(super) fn own_outputs(&self, of_whole: &[f32]) -> Option<Vec<f32>> {
        let Slice { whole: (inputs, outputs), rows, columns, .. } = self.part.as_ref()?;
        let own = |all: &[f32]| rows.iter().flat_map(|rows| all[rows.clone()].to_vec()).collect();
        (*columns == (0..*inputs))
            .then(|| of_whole.chunks(*outputs).flat_map::<Vec<_>, _>(own).collect())
    }

    /// The gradients of its inputs, of those of the whole matrix; `None` when rows are missing.
    pub(super) fn own_inputs(&self, of_whole: &[f32]) -> Option<Vec<f32>> {
        let Slice { whole: (inputs, outputs), rows, columns, .. } = self.part.as_ref()?;
        let own = |all: &[f32]| all[columns.clone()].to_vec();
        (*rows == [0..*outputs]).then(|| of_whole.chunks(*inputs).flat_map(own).collect())
    }
}

/// Slices and rows of the cases of products and of their gradients.
pub(super) fn slices(class: Class) -> Vec<(CaseMatrix, usize)> {
    let smallest = class == Class::Smallest;
    let quants = if smallest { &FORMATS[2..] } else { &FORMATS[1..] };
    let dtypes = if smallest { &DTYPES[1..2] } else { &DTYPES[..] };
    let of = |(whole, rows, columns): &Cut| {
        let part = Slice::new(*whole, rows, columns.clone());
        let kinds =
            quants.iter().flat_map(|quant| dtypes.iter().map(move |dtype| (*quant, *dtype)));
        let slices =
            kinds.map(|(quant, dtype)| (CaseMatrix::slice(quant, dtype, part.clone()), 35));
        slices.collect::<Vec<_>>()
    };
    CUTS.iter().filter(|(_, at)| *at <= class).flat_map(|(cut, _)| of(cut)).collect()
}
