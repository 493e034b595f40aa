//! The part of the model that a client runs itself: token embeddings, the final norm and the head,
//! read from the model folder. Only these tensors are read; the blocks are the servers' part.

use std::path::{Path, PathBuf};

use kernels::ops::{Layernorm, Linear, OpError, Rmsnorm};
use kernels::{Backend, Cpu, WeightView};
use model::client_tensors::ClientNames;
use model::{BlockSpec, Norm, context_length};
use serde::Deserialize;
use serde_json::Value;
use shared::dtype::{DType, QuantType};

pub use crate::checkpoint::LocalModelError;
use crate::checkpoint::{Checkpoint, CheckpointMatrix, parse, read};
use crate::generation_config::{GenerationConfig, TokenIds};

/// Fields of config.json that the client needs, beside those of the blocks.
#[derive(Debug, Deserialize)]
struct ClientConfig {
    model_type: String,
    vocab_size: usize,
    #[serde(default)]
    tie_word_embeddings: Option<bool>,
    #[serde(default)]
    eos_token_id: TokenIds,
    #[serde(default)]
    dht_prefix: Option<String>,
}

/// A scale, and a bias where the norm has one.
struct NormWeights {
    weight: Vec<f32>,
    bias: Option<Vec<f32>>,
}

impl NormWeights {
    fn read(
        checkpoint: &Checkpoint,
        names: &[&str],
        norm: &Norm,
        width: usize,
    ) -> Result<NormWeights, LocalModelError> {
        let of = |part: &str| {
            let names: Vec<String> = names.iter().map(|name| format!("{name}.{part}")).collect();
            checkpoint.vector(&names.iter().map(String::as_str).collect::<Vec<_>>(), width)
        };
        let bias = matches!(norm, Norm::Layer { .. }).then(|| of("bias")).transpose()?;
        Ok(NormWeights { weight: of("weight")?, bias })
    }

    /// Norms `x` `[rows, width]` into `out`, rounded to `round`.
    fn apply(
        &self,
        cpu: &mut Cpu,
        eps: f32,
        x: &[f32],
        out: &mut [f32],
        round: DType,
    ) -> Result<(), OpError> {
        let (weight, width) = (&self.weight[..], self.weight.len());
        let rows = x.len() / width.max(1);
        match &self.bias {
            None => cpu.rmsnorm(Rmsnorm { x, weight, out, rows, width, eps, round }),
            Some(bias) => {
                cpu.layernorm(Layernorm { x, weight, bias, out, rows, width, eps, round })
            }
        }
    }
}

/// Embeddings, final norm and head of a model, on the CPU.
pub struct LocalModel {
    config: ClientConfig,
    spec: BlockSpec,
    path: PathBuf,
    embedding: CheckpointMatrix,
    /// The norm behind the embeddings (BLOOM).
    embedding_norm: Option<NormWeights>,
    norm: NormWeights,
    /// `None` when the head shares the embedding's matrix.
    head: Option<CheckpointMatrix>,
    eos: Vec<u32>,
    context: Option<u32>,
    cpu: Cpu,
    normed: Vec<f32>,
    logits: Vec<f32>,
}

impl LocalModel {
    /// Reads the local part of the model in `folder`, to be computed in `dtype` (`None`: as stored)
    /// on `threads` threads.
    ///
    /// # Errors
    /// [`LocalModelError`] names the file and what is wrong with it.
    pub fn load(
        folder: &Path,
        dtype: Option<DType>,
        threads: usize,
    ) -> Result<LocalModel, LocalModelError> {
        let path = folder.join("config.json");
        let bad = |reason: String| LocalModelError::Content { path: path.clone(), reason };
        let value: Value = parse(&path, &read(&path)?)?;
        let spec = BlockSpec::from_config(&value).map_err(|error| bad(error.to_string()))?;
        let context = context_length(&value).map_err(|error| bad(error.to_string()))?;
        let config: ClientConfig = serde_json::from_value(value)
            .map_err(|source| LocalModelError::Parse { path: path.clone(), source })?;
        let names = ClientNames::of(&config.model_type).map_err(bad)?;
        if config.vocab_size == 0 {
            return Err(bad("vocab_size must not be 0".to_owned()));
        }
        let (width, norm) = (spec.hidden, &spec.norm);
        let shape = [config.vocab_size, width];
        let checkpoint = Checkpoint::open(folder)?;
        let embedding = checkpoint.matrix(names.embedding, shape)?.cast(dtype);
        let embedding_norm = (!names.embedding_norm.is_empty())
            .then(|| NormWeights::read(&checkpoint, names.embedding_norm, norm, width))
            .transpose()?;
        let final_norm = NormWeights::read(&checkpoint, names.norm, norm, width)?;
        let head = match config.tie_word_embeddings.unwrap_or(names.is_tied) {
            true => None,
            false => Some(checkpoint.matrix(names.head, shape)?.cast(dtype)),
        };
        config.eos_token_id.check(&path)?;
        let eos = eos_of(folder, &config.eos_token_id)?;
        Ok(LocalModel {
            config,
            spec,
            path,
            embedding,
            embedding_norm,
            norm: final_norm,
            head,
            eos,
            context,
            cpu: Cpu::new(threads),
            normed: Vec::new(),
            logits: Vec::new(),
        })
    }

    /// The same with its head in `quant`, which is smaller and faster to multiply with; the embeddings stay as
    /// they are.
    ///
    /// # Errors
    /// Not a matrix that can be stored so.
    pub fn with_head(mut self, quant: QuantType) -> Result<LocalModel, LocalModelError> {
        let matrix = self.head.as_ref().unwrap_or(&self.embedding);
        self.head = matrix.quantize(quant).or(self.head);
        let head = self.head.as_ref().unwrap_or(&self.embedding);
        self.view(head).map(drop)?;
        Ok(self)
    }

    /// Width of the hidden states.
    pub fn hidden_size(&self) -> usize {
        self.spec.hidden
    }

    /// Blocks of the whole model.
    pub fn num_blocks(&self) -> u32 {
        u32::try_from(self.spec.num_blocks).unwrap_or(u32::MAX)
    }

    /// The same with one more token that ends a text, if there is one.
    #[must_use]
    pub fn ending_at(mut self, token: Option<u32>) -> LocalModel {
        self.eos.extend(token.filter(|token| !self.eos.contains(token)));
        self
    }

    /// Tokens that end a text.
    pub fn eos(&self) -> &[u32] {
        &self.eos
    }

    /// Its config.json.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Tokens of the vocabulary.
    pub fn vocabulary(&self) -> usize {
        self.config.vocab_size
    }

    /// DHT prefix that the model folder names.
    pub fn dht_prefix(&self) -> Option<&str> {
        self.config.dht_prefix.as_deref()
    }

    /// Most tokens of a text ([`context_length`]); most models with ALiBi name none.
    pub fn max_positions(&self) -> Option<u32> {
        self.context
    }

    pub(crate) fn spec(&self) -> &BlockSpec {
        &self.spec
    }

    /// Type of the hidden states that the client sends: that of the embeddings.
    pub fn dtype(&self) -> DType {
        self.embedding.dtype
    }

    /// Hidden states of `tokens` as `[tokens, hidden]` in [`LocalModel::dtype`].
    ///
    /// # Errors
    /// A token outside the vocabulary.
    pub fn embed(&mut self, tokens: &[u32]) -> Result<Vec<u8>, LocalModelError> {
        let failed = |reason: String| LocalModelError::Content { path: self.path.clone(), reason };
        let table = self.view(&self.embedding)?;
        let mut out = Vec::with_capacity(tokens.len() * table.row_bytes());
        for &token in tokens {
            let row = table.row(token as usize).ok_or_else(|| {
                let size = self.config.vocab_size;
                failed(format!("token {token} is outside the vocabulary of {size}"))
            })?;
            out.extend_from_slice(row);
        }
        let Some(norm) = &self.embedding_norm else {
            return Ok(out);
        };
        let (dtype, path) = (self.embedding.dtype, self.path.clone());
        let mut x = vec![0.0; tokens.len() * self.spec.hidden];
        kernels::ops::convert::to_f32(dtype, &out, &mut x);
        let mut normed = vec![0.0; x.len()];
        norm.apply(&mut self.cpu, self.spec.norm.eps(), &x, &mut normed, dtype)
            .map_err(|error| LocalModelError::Content { path, reason: error.to_string() })?;
        kernels::ops::convert::from_f32(dtype, &normed, &mut out);
        Ok(out)
    }

    /// Logits `[rows, vocabulary]` for hidden states `[rows, hidden]` as the last block left them,
    /// rounded to the dtype of the head as in transformers (`...ForCausalLM` and Petals'
    /// `LMHead`), so that ties fall the same way.
    ///
    /// # Errors
    /// A hidden state of another width.
    pub fn logits(&mut self, hidden: &[f32]) -> Result<&[f32], LocalModelError> {
        let width = self.spec.hidden;
        let failed = |reason: String| LocalModelError::Content { path: self.path.clone(), reason };
        let rows = hidden.len() / width.max(1);
        if rows == 0 || hidden.len() != rows * width {
            return Err(failed(format!(
                "a server sent a hidden state of {} values, not {width}",
                hidden.len()
            )));
        }
        let matrix = self.head.as_ref().unwrap_or(&self.embedding);
        self.normed.resize(rows * width, 0.0);
        self.logits.resize(rows * self.config.vocab_size, 0.0);
        let weight = matrix.view().map_err(failed)?;
        self.norm
            .apply(&mut self.cpu, self.spec.norm.eps(), hidden, &mut self.normed, matrix.dtype)
            .map_err(|e| failed(e.to_string()))?;
        let head =
            Linear { x: &self.normed[..], weight, bias: None, out: &mut self.logits[..], rows };
        self.cpu.linear(head).map_err(|e| failed(e.to_string()))?;
        for logit in &mut self.logits {
            *logit = kernels::ops::convert::round(matrix.dtype, *logit);
        }
        Ok(&self.logits)
    }

    fn view<'a>(&self, matrix: &'a CheckpointMatrix) -> Result<WeightView<'a>, LocalModelError> {
        let failed = |reason| LocalModelError::Content { path: self.path.clone(), reason };
        matrix.view().map_err(failed)
    }
}

impl std::fmt::Debug for LocalModel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LocalModel")
            .field("path", &self.path)
            .field("config", &self.config)
            .finish_non_exhaustive()
    }
}

/// Tokens that end a text: those of generation_config.json and those of config.json.
fn eos_of(folder: &Path, config: &TokenIds) -> Result<Vec<u32>, LocalModelError> {
    let first = GenerationConfig::load(folder)?.eos.0;
    let more = config.0.iter().filter(|token| !first.contains(token));
    Ok(first.iter().chain(more).copied().collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn demo() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("model")
    }

    #[test]
    fn the_demo_model_embeds_and_has_logits() {
        let mut model = LocalModel::load(&demo(), None, 1).unwrap();
        assert_eq!((model.hidden_size(), model.num_blocks()), (192, 8));
        assert_eq!(model.eos(), [1]);
        model = model.ending_at(Some(1)).ending_at(Some(7)).ending_at(None);
        assert_eq!(model.eos(), [1, 7]);
        assert_eq!(model.embed(&[0, 1023]).unwrap().len(), 2 * 192 * 2);
        assert!(model.embed(&[1024]).unwrap_err().to_string().contains("token 1024"));
        assert_eq!(model.logits(&[0.5; 192]).unwrap().len(), 1024);
        assert!(model.logits(&[0.5; 191]).unwrap_err().to_string().contains("191"));
    }

    #[test]
    fn broken_folders_name_file_and_reason() {
        let folder = tempfile::tempdir().unwrap();
        let error = || LocalModel::load(folder.path(), None, 1).unwrap_err().to_string();
        assert!(error().contains("config.json"));
        let config = std::fs::read_to_string(demo().join("config.json")).unwrap();
        std::fs::write(folder.path().join("config.json"), config.replace("\"llama\"", "\"gpt9\""))
            .unwrap();
        assert!(error().contains("gpt9"), "{}", error());
        std::fs::write(folder.path().join("config.json"), config).unwrap();
        assert!(error().contains("model.safetensors"), "{}", error());
        let weights = std::fs::read(demo().join("model.safetensors")).unwrap();
        let write = |bytes: &[u8]| {
            std::fs::write(folder.path().join("model.safetensors"), bytes).unwrap();
        };
        for cut in [0, 4, 9, 1000, weights.len() / 2] {
            write(&weights[..cut]);
            let error = error();
            let names_both = error.contains("model.safetensors") && error.contains("was cut short");
            assert!(names_both, "cut at {cut}: {error}");
        }
        let tensor = |dtype: &str, shape: &str, bytes: usize| {
            let info =
                format!(r#"{{"dtype":"{dtype}","shape":{shape},"data_offsets":[0,{bytes}]}}"#);
            let json = format!(r#"{{"model.embed_tokens.weight":{info}}}"#);
            write(&[&json.len().to_le_bytes()[..], json.as_bytes(), &vec![0; bytes]].concat());
            error()
        };
        assert!(tensor("I32", "[1024,192]", 4).contains("type I32"));
        assert!(tensor("F32", "[192,1024]", 4).contains("shape [192, 1024]"));
        assert!(tensor("F32", "[1024,192]", 4).contains("in 4 bytes"));
        assert!(
            tensor("BF16", "[1024,192]", 2 * 1024 * 192).contains("no tensor model.norm.weight")
        );
    }

    #[test]
    fn a_text_ends_at_what_generation_config_and_config_say() {
        let folder = tempfile::tempdir().unwrap();
        let both = [TokenIds(vec![7]), TokenIds(vec![8, 9])];
        assert!(eos_of(folder.path(), &TokenIds::default()).unwrap().is_empty());
        assert_eq!(eos_of(folder.path(), &both[1]).unwrap(), [8, 9]);
        let path = folder.path().join("generation_config.json");
        std::fs::write(&path, r#"{"eos_token_id": [1, 2], "top_p": 0.9}"#).unwrap();
        assert_eq!(eos_of(folder.path(), &both[0]).unwrap(), [1, 2, 7]);
        std::fs::write(&path, "{}").unwrap();
        assert_eq!(eos_of(folder.path(), &both[0]).unwrap(), [7]);
        std::fs::write(&path, "[").unwrap();
        assert!(
            eos_of(folder.path(), &both[0]).unwrap_err().to_string().contains("generation_config")
        );
    }
}
