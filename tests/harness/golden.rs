//! What transformers computed with the models of `tests/golden/blocks`, for servers of them.

use std::path::PathBuf;

use client::states::{Hidden, Prompts};
use safetensors::SafeTensors;
use shared::dtype::DType;

use super::peer::Peer;

/// Width of the hidden states of these models.
pub const HIDDEN: usize = 48;

/// [A session](Peer::run_fed_back) with a server that has the prefix `golden`.
pub async fn run_session(addr: &str, steps: usize, between: impl FnMut(usize)) -> Vec<Vec<f32>> {
    Peer::connect(addr, "golden").await.run_fed_back(0..2, (HIDDEN, 5), steps, between).await
}

/// The golden data of a model of two blocks.
pub struct Golden {
    /// Folder of the model.
    pub folder: PathBuf,
    bytes: Vec<u8>,
}

impl Golden {
    /// That of a folder of `tests/golden/blocks`.
    pub fn of(name: &str) -> Golden {
        let all = super::root().join("tests/golden/blocks");
        let folder = all.join(name);
        let bytes = std::fs::read(folder.join("expected.safetensors")).unwrap();
        Golden { folder, bytes }
    }

    /// Shape and bytes of a tensor.
    pub fn tensor(&self, name: &str) -> (Vec<usize>, Vec<u8>) {
        let all = SafeTensors::deserialize(&self.bytes).unwrap();
        let tensor = all.tensor(name).unwrap();
        (tensor.shape().to_vec(), tensor.data().to_vec())
    }

    /// Hidden states.
    pub fn states(&self, name: &str) -> Hidden {
        let (shape, bytes) = self.tensor(name);
        let [rows, tokens, _] = shape[..] else {
            panic!("{name} has shape {shape:?}");
        };
        Hidden { dtype: DType::F32, rows, tokens, bytes: bytes.into() }
    }

    /// Deep prompts.
    pub fn prompts(&self, name: &str) -> Prompts {
        let (shape, bytes) = self.tensor(name);
        let [blocks, rows, tokens, _] = shape[..] else {
            panic!("{name} has shape {shape:?}");
        };
        Prompts { dtype: DType::F32, blocks, rows, tokens, bytes: bytes.into() }
    }
}

/// Refuses values that are not those of transformers but for roundings.
///
/// # Panics
/// Naming `what`.
pub fn close(what: &str, got: &[u8], want: &[u8]) {
    let values = |bytes: &[u8]| -> Vec<f32> {
        let elements = bytes.as_chunks().0.iter();
        elements.map(|b| f32::from_le_bytes(*b)).collect()
    };
    let (got, want) = (values(got), values(want));
    assert_eq!(got.len(), want.len(), "{what}");
    let largest = want.iter().fold(0.0f32, |most, v| most.max(v.abs()));
    for (at, (got, want)) in got.iter().zip(&want).enumerate() {
        let error = (got - want).abs();
        assert!(error <= 1e-4 * largest, "{what} {at}: {got} is not {want}");
    }
}
