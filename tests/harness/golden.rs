//! What transformers computed with the models of `tests/golden/blocks`, for servers of them.

use std::path::PathBuf;

use client::states::{Hidden, Prompts};
use safetensors::SafeTensors;
use shared::dtype::DType;
use swarm::wire::tensor::{WireDtype, dummy_tensor};

use super::peer::{Peer, fed_back, noise};

/// Width of the hidden states of these models, and tokens of the prompt of [`run_session`].
pub const HIDDEN: usize = 48;
pub const PROMPT: usize = 21;

/// A prompt of two rows, then steps that feed the outputs back and swap or share rows now and then,
/// so that one wrong bit changes everything after it. The server has the prefix `golden`. Before each
/// step, `between` may do harm.
pub async fn run_session(
    addr: &str,
    steps: usize,
    mut between: impl FnMut(usize),
) -> Vec<Vec<f32>> {
    let peer = Peer::connect(addr, "golden").await;
    let mut session = peer.session(0..2, (PROMPT + steps) as u32).await;
    let prompt = noise(&[2, PROMPT, HIDDEN], 5);
    let mut outputs = vec![session.step(prompt, None).await.expect("prefill")];
    for step in 0..steps {
        between(step);
        let (hidden, order) = fed_back(outputs.last().unwrap(), HIDDEN, step);
        let none = dummy_tensor(WireDtype::F32);
        outputs.push(session.step_with(hidden, None, none, order).await.expect("a decode step"));
    }
    session.close().await;
    outputs
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
