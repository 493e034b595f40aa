//! The part of the model that a client runs itself: token embeddings, the final norm and the head,
//! read from the model folder. Only these tensors are read; the blocks are the servers' part.

use std::collections::HashMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use kernels::ops::{Linear, Rmsnorm};
use kernels::{Backend, Cpu, WeightView};
use model::header::{Header, HeaderError};
use serde::Deserialize;
use shared::dtype::DType;

/// Why the local part of a model cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum LocalModelError {
    /// A file is missing or unreadable.
    #[error(
        "cannot read {path}; give a model folder in Hugging Face layout with safetensors files"
    )]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// A JSON file does not parse.
    #[error("cannot parse {path}")]
    Parse {
        /// The file.
        path: PathBuf,
        /// Why.
        source: serde_json::Error,
    },
    /// A checkpoint file has no header that can be used.
    #[error("{path} {source}")]
    Header {
        /// The file.
        path: PathBuf,
        /// Why; continues the sentence.
        source: HeaderError,
    },
    /// The content makes no sense.
    #[error("{path}: {reason}")]
    Content {
        /// The file.
        path: PathBuf,
        /// What is wrong, and the value.
        reason: String,
    },
}

/// Fields of config.json that the client needs.
#[derive(Debug, Deserialize)]
struct Config {
    model_type: String,
    hidden_size: usize,
    num_hidden_layers: u32,
    vocab_size: usize,
    #[serde(default = "default_eps")]
    rms_norm_eps: f32,
    #[serde(default)]
    tie_word_embeddings: bool,
    #[serde(default)]
    bos_token_id: Option<u32>,
    #[serde(default)]
    eos_token_id: Option<OneOrMany>,
    #[serde(default)]
    dht_prefix: Option<String>,
}

/// `eos_token_id` is a number or a list of numbers.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum OneOrMany {
    One(u32),
    Many(Vec<u32>),
}

fn default_eps() -> f32 {
    1e-6
}

struct Matrix {
    dtype: DType,
    rows: usize,
    columns: usize,
    bytes: Vec<u8>,
}

impl Matrix {
    /// The same numbers in `dtype`, rounded to nearest even.
    fn cast(self, dtype: Option<DType>) -> Matrix {
        let Some(dtype) = dtype.filter(|dtype| *dtype != self.dtype) else {
            return self;
        };
        let mut bytes = vec![0; self.rows * self.columns * dtype.size_bytes()];
        let rows = self.bytes.chunks(self.columns * self.dtype.size_bytes());
        let mut values = vec![0.0; self.columns];
        for (row, out) in rows.zip(bytes.chunks_mut(self.columns * dtype.size_bytes())) {
            kernels::ops::convert::to_f32(self.dtype, row, &mut values);
            kernels::ops::convert::from_f32(dtype, &values, out);
        }
        Matrix { dtype, bytes, ..self }
    }
}

/// Embeddings, final norm and head of a model, on the CPU.
pub struct LocalModel {
    config: Config,
    path: PathBuf,
    embedding: Matrix,
    norm: Vec<f32>,
    /// `None` when the head shares the embedding's matrix.
    head: Option<Matrix>,
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
        let config: Config = parse(&path, &read(&path)?)?;
        let bad = |reason: String| LocalModelError::Content { path: path.clone(), reason };
        if config.model_type != "llama" {
            return Err(bad(format!(
                "model type {:?} has no client yet; the client knows llama",
                config.model_type
            )));
        }
        if config.hidden_size == 0 || config.vocab_size == 0 || config.num_hidden_layers == 0 {
            return Err(bad(
                "hidden_size, vocab_size and num_hidden_layers must not be 0".to_owned()
            ));
        }
        let shape = [config.vocab_size, config.hidden_size];
        let checkpoint = Checkpoint::open(folder)?;
        let embedding = checkpoint.matrix("model.embed_tokens.weight", shape)?.cast(dtype);
        let norm = checkpoint.vector("model.norm.weight", config.hidden_size)?;
        let head = match config.tie_word_embeddings {
            true => None,
            false => Some(checkpoint.matrix("lm_head.weight", shape)?.cast(dtype)),
        };
        let (normed, logits) = (vec![0.0; config.hidden_size], vec![0.0; config.vocab_size]);
        Ok(LocalModel {
            config,
            path,
            embedding,
            norm,
            head,
            cpu: Cpu::new(threads),
            normed,
            logits,
        })
    }

    /// Width of the hidden states.
    pub fn hidden_size(&self) -> usize {
        self.config.hidden_size
    }

    /// Blocks of the whole model.
    pub fn num_blocks(&self) -> u32 {
        self.config.num_hidden_layers
    }

    /// Token that starts a sequence.
    pub fn bos(&self) -> Option<u32> {
        self.config.bos_token_id
    }

    /// Whether `token` ends a text.
    pub fn is_eos(&self, token: u32) -> bool {
        match &self.config.eos_token_id {
            Some(OneOrMany::One(id)) => *id == token,
            Some(OneOrMany::Many(ids)) => ids.contains(&token),
            None => false,
        }
    }

    /// DHT prefix that the model folder names.
    pub fn dht_prefix(&self) -> Option<&str> {
        self.config.dht_prefix.as_deref()
    }

    /// Type of the hidden states that the client sends: that of the embeddings.
    pub fn dtype(&self) -> DType {
        self.embedding.dtype
    }

    /// Hidden states of `tokens` as `[tokens, hidden]` in [`LocalModel::dtype`].
    ///
    /// # Errors
    /// A token outside the vocabulary.
    pub fn embed(&self, tokens: &[u32]) -> Result<Vec<u8>, LocalModelError> {
        let table = self.view(&self.embedding)?;
        let mut out = Vec::with_capacity(tokens.len() * table.row_bytes());
        for &token in tokens {
            let row = table.row(token as usize).ok_or_else(|| LocalModelError::Content {
                path: self.path.clone(),
                reason: format!(
                    "token {token} is outside the vocabulary of {}",
                    self.config.vocab_size
                ),
            })?;
            out.extend_from_slice(row);
        }
        Ok(out)
    }

    /// Logits `[vocabulary]` for one token's hidden state `[hidden]` as the last block left it,
    /// rounded to the dtype of the head as in transformers (`LlamaForCausalLM` and Petals'
    /// `LMHead`), so that ties fall the same way.
    ///
    /// # Errors
    /// A hidden state of another width.
    pub fn logits(&mut self, hidden: &[f32]) -> Result<&[f32], LocalModelError> {
        let width = self.config.hidden_size;
        let failed = |reason: String| LocalModelError::Content { path: self.path.clone(), reason };
        if hidden.len() != width {
            return Err(failed(format!(
                "a server sent a hidden state of {} values, not {width}",
                hidden.len()
            )));
        }
        let matrix = self.head.as_ref().unwrap_or(&self.embedding);
        let weight = WeightView::new(matrix.dtype, matrix.rows, matrix.columns, &matrix.bytes)
            .map_err(|e| failed(e.to_string()))?;
        let norm = Rmsnorm {
            x: hidden,
            weight: &self.norm,
            out: &mut self.normed,
            rows: 1,
            width,
            eps: self.config.rms_norm_eps,
            round: matrix.dtype,
        };
        self.cpu.rmsnorm(norm).map_err(|e| failed(e.to_string()))?;
        let head =
            Linear { x: &self.normed[..], weight, bias: None, out: &mut self.logits[..], rows: 1 };
        self.cpu.linear(head).map_err(|e| failed(e.to_string()))?;
        for logit in &mut self.logits {
            *logit = kernels::ops::convert::round(matrix.dtype, *logit);
        }
        Ok(&self.logits)
    }

    fn view<'a>(&self, matrix: &'a Matrix) -> Result<WeightView<'a>, LocalModelError> {
        WeightView::new(matrix.dtype, matrix.rows, matrix.columns, &matrix.bytes).map_err(|e| {
            LocalModelError::Content { path: self.path.clone(), reason: e.to_string() }
        })
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

fn read(path: &Path) -> Result<Vec<u8>, LocalModelError> {
    std::fs::read(path).map_err(|source| LocalModelError::Read { path: path.to_owned(), source })
}

fn parse<'a, T: Deserialize<'a>>(path: &Path, bytes: &'a [u8]) -> Result<T, LocalModelError> {
    serde_json::from_slice(bytes)
        .map_err(|source| LocalModelError::Parse { path: path.to_owned(), source })
}

/// The safetensors files of a folder: one, or those of an index.
struct Checkpoint {
    folder: PathBuf,
    /// File of each tensor; empty when there is a single file.
    index: HashMap<String, String>,
}

#[derive(Deserialize)]
struct Index {
    weight_map: HashMap<String, String>,
}

impl Checkpoint {
    fn open(folder: &Path) -> Result<Checkpoint, LocalModelError> {
        let path = folder.join("model.safetensors.index.json");
        let index = match path.exists() {
            true => parse::<Index>(&path, &read(&path)?)?.weight_map,
            false => HashMap::new(),
        };
        Ok(Checkpoint { folder: folder.to_owned(), index })
    }

    fn file_of(&self, tensor: &str) -> Result<PathBuf, LocalModelError> {
        if self.index.is_empty() {
            return Ok(self.folder.join("model.safetensors"));
        }
        let path = self.folder.join("model.safetensors.index.json");
        match self.index.get(tensor) {
            Some(name) if !name.contains('/') => Ok(self.folder.join(name)),
            Some(name) => Err(LocalModelError::Content {
                path,
                reason: format!("names the file {name:?} outside the folder"),
            }),
            None => Err(LocalModelError::Content {
                path,
                reason: format!("does not name the tensor {tensor}"),
            }),
        }
    }

    fn matrix(&self, name: &str, [rows, columns]: [usize; 2]) -> Result<Matrix, LocalModelError> {
        let (dtype, bytes) = self.tensor(name, &[rows, columns])?;
        Ok(Matrix { dtype, rows, columns, bytes })
    }

    fn vector(&self, name: &str, len: usize) -> Result<Vec<f32>, LocalModelError> {
        let (dtype, bytes) = self.tensor(name, &[len])?;
        let mut out = vec![0.0; len];
        kernels::ops::convert::to_f32(dtype, &bytes, &mut out);
        Ok(out)
    }

    fn tensor(&self, name: &str, shape: &[usize]) -> Result<(DType, Vec<u8>), LocalModelError> {
        let path = self.file_of(name)?;
        let bad = |reason: String| LocalModelError::Content { path: path.clone(), reason };
        let io = |source| LocalModelError::Read { path: path.clone(), source };
        let file = File::open(&path).map_err(io)?;
        let file_bytes = file.metadata().map_err(io)?.len();
        let header = Header::read(&file, file_bytes)
            .map_err(|source| LocalModelError::Header { path: path.clone(), source })?;
        let info = header.tensors.get(name).ok_or_else(|| bad(format!("has no tensor {name}")))?;
        let dtype = info.block_dtype().ok_or_else(|| {
            bad(format!(
                "tensor {name} is of type {:.20}; float32, bfloat16 or float16 is needed",
                info.dtype
            ))
        })?;
        let has_shape = info.shape.iter().copied().eq(shape.iter().map(|&side| side as u64));
        if !has_shape || info.block_elements(dtype).is_none() {
            return Err(bad(format!(
                "tensor {name} has shape {:?} in {} bytes instead of {shape:?}",
                info.shape,
                info.bytes()
            )));
        }
        // The header lies within the file, and so does the tensor.
        let mut bytes = vec![0; info.bytes() as usize];
        file.read_exact_at(&mut bytes, header.data_start + info.data_offsets.0).map_err(io)?;
        Ok((dtype, bytes))
    }
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
        assert_eq!((model.hidden_size(), model.num_blocks(), model.bos()), (192, 8, Some(0)));
        assert!(model.is_eos(1) && !model.is_eos(0));
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
}
