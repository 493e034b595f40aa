//! Tensors as a client holds them: hidden states between blocks, and deep prompts. Bytes are
//! shared, so that clones and whole rows are cheap; a part of several rows' tokens is copied.

use std::ops::Range;

use bytes::Bytes;
use shared::dtype::DType;
use swarm::wire::messages::Tensor;
use swarm::wire::tensor::{ShapeLimits, TensorError, WireTensor, raw_tensor};

/// Hidden states `[rows, tokens, hidden]`.
#[derive(Clone, Debug, PartialEq)]
pub struct Hidden {
    /// Type of the elements.
    pub dtype: DType,
    /// Sequences.
    pub rows: usize,
    /// Tokens of each.
    pub tokens: usize,
    /// Elements, row-major, little-endian.
    pub bytes: Bytes,
}

/// Why an answer holds no states.
#[derive(Debug, thiserror::Error)]
pub enum AnswerError {
    /// A tensor is malformed.
    #[error("the answer of the server holds no usable tensor")]
    Tensor(#[from] TensorError),
    /// A tensor is missing, or has another shape than the question makes it.
    #[error("the server answered with shape {got:?} instead of {want:?}")]
    Shape {
        /// Received; empty if there is none.
        got: Vec<usize>,
        want: Vec<usize>,
    },
}

impl Hidden {
    /// Whether the bytes make at least one element per token, and whole elements.
    pub fn is_whole(&self) -> bool {
        let elements = self.rows * self.tokens * self.dtype.size_bytes();
        elements > 0 && !self.bytes.is_empty() && self.bytes.len().is_multiple_of(elements)
    }

    /// Elements of one token.
    pub fn width(&self) -> usize {
        self.bytes.len() / (self.rows * self.tokens * self.dtype.size_bytes()).max(1)
    }

    pub fn shape(&self) -> [usize; 3] {
        [self.rows, self.tokens, self.width()]
    }

    /// The first `tokens` tokens of every row.
    pub fn first(&self, tokens: usize) -> Hidden {
        self.cut(0..tokens.min(self.tokens))
    }

    /// The last `tokens` tokens of every row.
    pub fn last(&self, tokens: usize) -> Hidden {
        self.cut(self.tokens.saturating_sub(tokens)..self.tokens)
    }

    /// The rows `range`.
    pub fn rows(&self, range: Range<usize>) -> Hidden {
        let row = self.bytes.len() / self.rows.max(1);
        Hidden {
            dtype: self.dtype,
            rows: range.len(),
            tokens: self.tokens,
            bytes: self.bytes.slice(range.start * row..range.end * row),
        }
    }

    /// The same in another type.
    pub fn to(&self, dtype: DType) -> Hidden {
        Hidden { dtype, bytes: convert(self.dtype, &self.bytes, dtype), ..self.clone() }
    }

    /// Elements as f32.
    pub fn to_f32(&self) -> Vec<f32> {
        let mut out = vec![0.0; self.bytes.len() / self.dtype.size_bytes()];
        kernels::ops::convert::to_f32(self.dtype, &self.bytes, &mut out);
        out
    }

    /// The last token of every row as f32 `[rows, hidden]`.
    pub fn last_f32(&self) -> Vec<f32> {
        self.last(1).to_f32()
    }

    /// Rows after rows; all are converted to the type of the first. `None` without parts.
    pub fn join_rows(parts: &[Hidden]) -> Option<Hidden> {
        let first = parts.first()?;
        let bytes: Vec<u8> = parts.iter().flat_map(|part| part.to(first.dtype).bytes).collect();
        Some(Hidden {
            dtype: first.dtype,
            rows: parts.iter().map(|part| part.rows).sum(),
            tokens: first.tokens,
            bytes: bytes.into(),
        })
    }

    /// Tokens after tokens, row `order[i]` of each part for row `i`; all are converted to the type
    /// of the first. `None` without parts.
    pub fn join_tokens(parts: &[(Hidden, Vec<usize>)]) -> Option<Hidden> {
        let (first, order) = parts.first()?;
        let converted: Vec<(Hidden, &Vec<usize>)> =
            parts.iter().map(|(part, order)| (part.to(first.dtype), order)).collect();
        let mut bytes = Vec::new();
        for row in 0..order.len() {
            for (part, order) in &converted {
                let source = *order.get(row)?;
                bytes.extend_from_slice(&part.rows(source..source + 1).bytes);
            }
        }
        Some(Hidden {
            dtype: first.dtype,
            rows: order.len(),
            tokens: parts.iter().map(|(part, _)| part.tokens).sum(),
            bytes: bytes.into(),
        })
    }

    /// The message that carries them.
    ///
    /// # Errors
    /// [`TensorError`] when the bytes do not fit the shape.
    pub fn message(&self) -> Result<Tensor, TensorError> {
        raw_tensor(&self.shape(), self.dtype.into(), self.bytes.clone())
    }

    /// Reads an answer that must have the shape of `like`.
    pub fn read(message: Option<&Tensor>, like: &Hidden) -> Result<Hidden, AnswerError> {
        let (dtype, bytes) = read(message, &like.shape())?;
        Ok(Hidden { dtype, rows: like.rows, tokens: like.tokens, bytes })
    }

    fn cut(&self, range: Range<usize>) -> Hidden {
        let token = self.bytes.len() / (self.rows * self.tokens).max(1);
        let of = |row: usize| {
            let start = row * self.tokens;
            (start + range.start) * token..(start + range.end) * token
        };
        let bytes = match self.rows {
            _ if range.len() == self.tokens => self.bytes.clone(),
            1 => self.bytes.slice(of(0)),
            rows => (0..rows).flat_map(|row| self.bytes[of(row)].iter().copied()).collect(),
        };
        Hidden { dtype: self.dtype, rows: self.rows, tokens: range.len(), bytes }
    }
}

/// Deep prompts `[blocks, rows, tokens, hidden]`: what is added to the first tokens of the input of
/// each block (petals `client/ptune.py`, `deep_ptune`). Gradients of prompts have the same form.
#[derive(Clone, Debug, PartialEq)]
pub struct Prompts {
    /// Type of the elements.
    pub dtype: DType,
    pub blocks: usize,
    /// Sequences.
    pub rows: usize,
    /// Tokens of each.
    pub tokens: usize,
    /// Elements, row-major, little-endian.
    pub bytes: Bytes,
}

impl Prompts {
    /// Whether the bytes make at least one element per token, and whole elements.
    pub fn is_whole(&self) -> bool {
        self.flat().is_whole()
    }

    /// Elements of one token.
    pub fn width(&self) -> usize {
        self.flat().width()
    }

    /// The same in another type.
    pub fn to(&self, dtype: DType) -> Prompts {
        self.like(self.blocks, self.rows, self.flat().to(dtype))
    }

    /// Those of the blocks `range`, counted from the first.
    pub fn of_blocks(&self, range: Range<usize>) -> Prompts {
        let flat = self.flat().rows(range.start * self.rows..range.end * self.rows);
        self.like(range.len(), self.rows, flat)
    }

    /// Those of the sequences `range`.
    pub fn of_rows(&self, range: Range<usize>) -> Prompts {
        let flat = self.flat();
        let parts: Vec<Hidden> = (0..self.blocks)
            .map(|block| flat.rows(block * self.rows + range.start..block * self.rows + range.end))
            .collect();
        let joined = Hidden::join_rows(&parts).unwrap_or(flat);
        self.like(self.blocks, range.len(), joined)
    }

    /// Row `order[i]` for row `i`.
    pub fn in_order(&self, order: &[usize]) -> Prompts {
        let rows: Vec<Prompts> = order.iter().map(|&row| self.of_rows(row..row + 1)).collect();
        Prompts::join_rows(&rows).unwrap_or_else(|| self.clone())
    }

    /// Those of the first `tokens` tokens.
    pub fn first(&self, tokens: usize) -> Prompts {
        self.like(self.blocks, self.rows, self.flat().first(tokens))
    }

    /// Blocks after blocks. `None` without parts.
    pub fn join_blocks(parts: &[Prompts]) -> Option<Prompts> {
        let flat: Vec<Hidden> = parts.iter().map(Prompts::flat).collect();
        let blocks = parts.iter().map(|part| part.blocks).sum();
        Some(parts.first()?.like(blocks, parts.first()?.rows, Hidden::join_rows(&flat)?))
    }

    /// Sequences after sequences. `None` without parts.
    pub fn join_rows(parts: &[Prompts]) -> Option<Prompts> {
        let blocks = parts.first()?.blocks;
        let flat: Vec<Hidden> = (0..blocks)
            .flat_map(|block| parts.iter().map(move |part| part.of_blocks(block..block + 1).flat()))
            .collect();
        let rows = parts.iter().map(|part| part.rows).sum();
        Some(parts.first()?.like(blocks, rows, Hidden::join_rows(&flat)?))
    }

    /// The message that carries them.
    ///
    /// # Errors
    /// [`TensorError`] when the bytes do not fit the shape.
    pub fn message(&self) -> Result<Tensor, TensorError> {
        raw_tensor(&self.shape(), self.dtype.into(), self.bytes.clone())
    }

    /// Reads an answer that must have the shape of `like`.
    pub fn read(message: Option<&Tensor>, like: &Prompts) -> Result<Prompts, AnswerError> {
        let (dtype, bytes) = read(message, &like.shape())?;
        Ok(Prompts { dtype, bytes, ..like.clone() })
    }

    fn shape(&self) -> [usize; 4] {
        [self.blocks, self.rows, self.tokens, self.width()]
    }

    /// As states of `blocks * rows` sequences.
    fn flat(&self) -> Hidden {
        Hidden {
            dtype: self.dtype,
            rows: self.blocks * self.rows,
            tokens: self.tokens,
            bytes: self.bytes.clone(),
        }
    }

    fn like(&self, blocks: usize, rows: usize, flat: Hidden) -> Prompts {
        Prompts { dtype: flat.dtype, blocks, rows, tokens: flat.tokens, bytes: flat.bytes }
    }
}

fn read(message: Option<&Tensor>, want: &[usize]) -> Result<(DType, Bytes), AnswerError> {
    let wrong = |got: &[usize]| AnswerError::Shape { got: got.to_vec(), want: want.to_vec() };
    let limits = ShapeLimits { max_rank: want.len(), max_elements: want.iter().product() };
    let tensor = WireTensor::parse(message.ok_or_else(|| wrong(&[]))?, limits)?;
    if tensor.shape() != want {
        return Err(wrong(tensor.shape()));
    }
    let (dtype, bytes) = tensor.to_block()?;
    Ok((dtype, bytes.into()))
}

fn convert(from: DType, bytes: &Bytes, to: DType) -> Bytes {
    if from == to {
        return bytes.clone();
    }
    let mut values = vec![0.0; bytes.len() / from.size_bytes()];
    kernels::ops::convert::to_f32(from, bytes, &mut values);
    let mut out = vec![0; values.len() * to.size_bytes()];
    kernels::ops::convert::from_f32(to, &values, &mut out);
    out.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(values: impl IntoIterator<Item = u16>) -> Bytes {
        let floats = values.into_iter().map(f32::from);
        floats.flat_map(f32::to_le_bytes).collect()
    }

    fn states(rows: usize, tokens: usize, values: impl IntoIterator<Item = u16>) -> Hidden {
        Hidden { dtype: DType::F32, rows, tokens, bytes: bytes(values) }
    }

    #[test]
    fn first_and_last_take_tokens_of_every_row() {
        let one = states(1, 3, 0..6);
        assert_eq!(one.last(2).bytes, one.bytes.slice(8..));
        assert_eq!(one.last_f32(), [4.0, 5.0]);
        assert_eq!(one.last(9), one);
        let two = states(2, 3, 0..6);
        assert_eq!(two.first(1), states(2, 1, [0, 3]));
        assert_eq!(two.last(2), states(2, 2, [1, 2, 4, 5]));
        assert_eq!(two.last(0).tokens, 0);
    }

    #[test]
    fn tokens_join_in_order_in_the_first_dtype_and_with_their_rows() {
        let first = states(2, 1, [1, 2]).to(DType::Bf16);
        let parts = [(first, vec![1, 1]), (states(2, 2, 3..7), vec![0, 1])];
        let joined = Hidden::join_tokens(&parts).unwrap();
        assert_eq!(joined, states(2, 3, [2, 3, 4, 2, 5, 6]).to(DType::Bf16));
        assert_eq!(Hidden::join_tokens(&[]), None);
    }

    #[test]
    fn prompts_are_cut_and_joined_along_blocks_rows_and_tokens() {
        let whole =
            Prompts { dtype: DType::F32, blocks: 2, rows: 3, tokens: 2, bytes: bytes(0..24) };
        assert!(whole.is_whole() && whole.width() == 2);
        let rows = [whole.of_rows(0..1), whole.of_rows(1..3)];
        assert_eq!(rows[0].bytes, bytes([0, 1, 2, 3, 12, 13, 14, 15]));
        assert_eq!(Prompts::join_rows(&rows).unwrap(), whole);
        let blocks = [whole.of_blocks(0..1), whole.of_blocks(1..2)];
        assert_eq!(blocks[1].bytes, bytes(12..24));
        assert_eq!(Prompts::join_blocks(&blocks).unwrap(), whole);
        let swapped = whole.of_blocks(1..2).in_order(&[2, 0, 2]);
        assert_eq!(swapped.bytes, bytes([20, 21, 22, 23, 12, 13, 14, 15, 20, 21, 22, 23]));
        let short = whole.first(1).of_blocks(0..1);
        assert_eq!(short.bytes, bytes([0, 1, 4, 5, 8, 9]));
    }

    #[test]
    fn an_answer_has_the_shape_of_the_question_or_is_refused() {
        let like = states(2, 1, 0..4);
        let message = like.message().unwrap();
        assert_eq!(Hidden::read(Some(&message), &like).unwrap(), like);
        for wrong in [Some(states(1, 2, 0..4).message().unwrap()), None] {
            let error = Hidden::read(wrong.as_ref(), &like).unwrap_err();
            assert!(matches!(error, AnswerError::Shape { .. }), "{error}");
        }
    }
}
