//! Guesses by a small model of this machine, which has the vocabulary of the large one. It computes on a
//! thread of its own, one text after the other; while it is busy, nothing is guessed.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use blocks::kv::page_layout;
use blocks::{BlockWeights, Workspace, forward};
use kernels::ops::{OpError, convert};
use kernels::{Cpu, KvPages, PAGE_TOKENS, PageLayout, StepRow};
use model::BlockSpec;
use shared::ids::PageId;
use tokenizers::Tokenizer;
use tokio::sync::{mpsc, oneshot};

use crate::checkpoint::{Checkpoint, CheckpointMatrix};
use crate::local_layers::{LocalModel, LocalModelError};
use crate::sampling::argmax;

/// Texts that wait for the model.
const QUEUE: usize = 4;
/// Tokens that go through the blocks at once.
const PIECE: usize = 256;
/// Keys and values of all texts together; a text that finds no room is not guessed for.
const MAX_CACHE_BYTES: usize = 1 << 30;

/// Why a model cannot guess.
#[derive(Debug, thiserror::Error)]
pub enum DraftError {
    #[error(transparent)]
    Model(#[from] LocalModelError),
    /// Its tokenizer, or that of the large model.
    #[error("cannot read the tokenizer {path}: {reason}")]
    Tokenizer { path: PathBuf, reason: String },
    /// It has other tokens.
    #[error(
        "the model {draft} cannot guess for {large}: its tokenizer has another vocabulary; give a small model of the same family with --draft"
    )]
    Vocabulary {
        /// The small model.
        draft: PathBuf,
        /// The large one.
        large: PathBuf,
    },
    #[error("the blocks of {path} cannot be computed: {reason}")]
    Blocks { path: PathBuf, reason: String },
    #[error("cannot start a thread for the draft model")]
    Thread(#[from] std::io::Error),
}

/// A handle on the model. Its thread ends with the last one.
#[derive(Clone, Debug)]
pub struct DraftModel {
    requests: mpsc::Sender<DraftRequest>,
    held: Arc<AtomicUsize>,
}

/// What the model knows of one text.
#[derive(Debug)]
struct Cache {
    /// Tokens whose keys and values are there.
    tokens: Vec<u32>,
    /// Pages of each block.
    blocks: Vec<Vec<u8>>,
    table: Vec<PageId>,
    /// Bytes of all texts.
    held: Arc<AtomicUsize>,
}

impl Cache {
    fn bytes(&self) -> usize {
        self.blocks.iter().map(Vec::len).sum()
    }

    /// Makes room for `tokens`; false if there is none.
    fn grow(&mut self, tokens: usize, layout: PageLayout) -> bool {
        let (had, pages) = (self.bytes(), tokens.div_ceil(PAGE_TOKENS).max(self.table.len()));
        let more = (pages - self.table.len()) * layout.page_bytes() * self.blocks.len();
        if self.held.fetch_add(more, Ordering::Relaxed) + more > MAX_CACHE_BYTES {
            self.held.fetch_sub(more, Ordering::Relaxed);
            return false;
        }
        for block in &mut self.blocks {
            block.resize(pages * layout.page_bytes(), 0);
        }
        debug_assert_eq!(self.bytes(), had + more);
        self.table.extend((self.table.len()..pages).map(|page| PageId(page as u32)));
        true
    }
}

impl Drop for Cache {
    fn drop(&mut self) {
        self.held.fetch_sub(self.bytes(), Ordering::Relaxed);
    }
}

#[derive(Debug)]
struct DraftRequest {
    cache: Cache,
    text: Vec<u32>,
    limit: usize,
    reply: oneshot::Sender<(Cache, Vec<u32>)>,
}

impl DraftModel {
    /// Loads the model of `folder` to guess for that of `large`, on `threads` threads.
    ///
    /// # Errors
    /// [`DraftError`] names the file and what is wrong with it.
    pub fn start(folder: &Path, large: &Path, threads: usize) -> Result<DraftModel, DraftError> {
        let (requests, queue) = mpsc::channel(QUEUE);
        if words(folder)? != words(large)? {
            let (draft, large) = (folder.to_owned(), large.to_owned());
            return Err(DraftError::Vocabulary { draft, large });
        }
        let ends = LocalModel::load(folder, None, threads)?;
        let matrices = matrices(folder, &ends)?;
        // Found out here, not on the thread.
        blocks(&mut Cpu::new(1), &ends, &matrices).map_err(|reason| {
            let path = folder.to_owned();
            DraftError::Blocks { path, reason }
        })?;
        let thread = std::thread::Builder::new().name("draft".into());
        thread.spawn(move || run(ends, &matrices, threads, queue))?;
        Ok(DraftModel { requests, held: Arc::default() })
    }

    /// For one text.
    pub(super) fn reader(&self) -> DraftReader {
        let held = self.held.clone();
        let cache = Cache { tokens: Vec::new(), blocks: Vec::new(), table: Vec::new(), held };
        DraftReader { requests: self.requests.clone(), holder: CacheHolder::Here(cache) }
    }
}

/// The model for one text.
#[derive(Debug)]
pub(super) struct DraftReader {
    requests: mpsc::Sender<DraftRequest>,
    holder: CacheHolder,
}

/// Who has the cache of a text.
#[derive(Debug)]
enum CacheHolder {
    Here(Cache),
    /// With the model.
    Away(oneshot::Receiver<(Cache, Vec<u32>)>),
    /// The model has ended.
    Lost,
}

impl DraftReader {
    /// Has the model read `text`; nobody waits for it.
    pub fn read(&mut self, text: &[u32]) {
        if let Some(answer) = self.send(text, 0) {
            self.holder = CacheHolder::Away(answer);
        }
    }

    /// What may follow `text`; nothing while the model is busy with other texts, or reads this one.
    pub async fn guess(&mut self, text: &[u32], limit: usize) -> Vec<u32> {
        let Some(answer) = self.send(text, limit) else {
            return Vec::new();
        };
        let Ok((cache, guesses)) = answer.await else {
            return Vec::new();
        };
        self.holder = CacheHolder::Here(cache);
        guesses
    }

    /// Asks the model, with the cache if it is here.
    fn send(&mut self, text: &[u32], limit: usize) -> Option<oneshot::Receiver<(Cache, Vec<u32>)>> {
        let cache = match std::mem::replace(&mut self.holder, CacheHolder::Lost) {
            CacheHolder::Here(cache) => cache,
            CacheHolder::Away(mut answer) => match answer.try_recv() {
                Ok((cache, _)) => cache,
                Err(oneshot::error::TryRecvError::Empty) => {
                    self.holder = CacheHolder::Away(answer);
                    return None;
                }
                Err(oneshot::error::TryRecvError::Closed) => return None,
            },
            CacheHolder::Lost => return None,
        };
        let (reply, answer) = oneshot::channel();
        match self.requests.try_send(DraftRequest { cache, text: text.to_vec(), limit, reply }) {
            Ok(()) => Some(answer),
            Err(mpsc::error::TrySendError::Full(request)) => {
                self.holder = CacheHolder::Here(request.cache);
                None
            }
            Err(mpsc::error::TrySendError::Closed(_)) => None,
        }
    }
}

/// The words of a tokenizer with their numbers, without what was added to it.
fn words(folder: &Path) -> Result<std::collections::HashMap<String, u32>, DraftError> {
    let path = folder.join("tokenizer.json");
    let tokenizer = Tokenizer::from_file(&path)
        .map_err(|error| DraftError::Tokenizer { path, reason: error.to_string() })?;
    Ok(tokenizer.get_vocab(false).into_iter().collect())
}

/// The tensors of each block, in the type of the embeddings, with their names within the block.
fn matrices(
    folder: &Path,
    ends: &LocalModel,
) -> Result<Vec<Vec<(String, CheckpointMatrix)>>, LocalModelError> {
    let checkpoint = Checkpoint::open(folder)?;
    let tensors = |block: usize| {
        let read = |tensor: model::TensorSpec| {
            let matrix = checkpoint.block_tensor(&tensor.full_name, &tensor.shape)?;
            Ok((tensor.name, matrix.cast(Some(ends.dtype()))))
        };
        ends.spec().tensors(block).into_iter().map(read).collect()
    };
    (0..ends.spec().num_blocks).map(tensors).collect()
}

fn blocks<'w>(
    cpu: &mut Cpu,
    ends: &LocalModel,
    matrices: &'w [Vec<(String, CheckpointMatrix)>],
) -> Result<Vec<BlockWeights<'w, Cpu>>, String> {
    let block = |tensors: &'w Vec<(String, CheckpointMatrix)>| {
        let find = |name: &str| {
            let (_, m) = tensors.iter().find(|(other, _)| other == name)?;
            m.view().ok()
        };
        BlockWeights::new(cpu, ends.spec(), ends.dtype(), find).map_err(|error| error.to_string())
    };
    matrices.iter().map(block).collect()
}

fn run(
    ends: LocalModel,
    matrices: &[Vec<(String, CheckpointMatrix)>],
    threads: usize,
    mut queue: mpsc::Receiver<DraftRequest>,
) {
    let mut cpu = Cpu::new(threads);
    // They were made once before.
    let Ok(blocks) = blocks(&mut cpu, &ends, matrices) else { return };
    let work = Workspace::new(&mut cpu);
    let mut draft = Guesser { spec: ends.spec().clone(), ends, blocks, cpu, work };
    while let Some(DraftRequest { mut cache, text, limit, reply }) = queue.blocking_recv() {
        let guesses = draft.guess(&mut cache, &text, limit).unwrap_or_else(|error| {
            tracing::warn!(error, "the draft model fails");
            Vec::new()
        });
        // A text that has ended wants no guesses.
        let _ = reply.send((cache, guesses));
    }
}

struct Guesser<'w> {
    ends: LocalModel,
    spec: BlockSpec,
    blocks: Vec<BlockWeights<'w, Cpu>>,
    cpu: Cpu,
    work: Workspace<Cpu>,
}

impl Guesser<'_> {
    /// The most probable tokens behind `text`, one after the other; none where it is too long.
    fn guess(&mut self, cache: &mut Cache, text: &[u32], limit: usize) -> Result<Vec<u32>, String> {
        let same = cache.tokens.iter().zip(text).take_while(|(a, b)| a == b).count();
        cache.tokens.truncate(same.min(text.len().saturating_sub(1)));
        let mut guesses: Vec<u32> = Vec::new();
        let mut next = text.get(cache.tokens.len()..).unwrap_or_default().to_vec();
        let most = self.ends.max_positions().map_or(usize::MAX, |most| most as usize);
        let vocabulary = self.ends.vocabulary();
        if next.iter().any(|token| *token as usize >= vocabulary) {
            return Ok(guesses);
        }
        while !next.is_empty() && cache.tokens.len() + next.len() <= most {
            let Some(state) = self.feed(cache, &next)? else { break };
            let logits = self.ends.logits(&state).map_err(|error| error.to_string())?;
            let token = argmax(logits).filter(|_| guesses.len() < limit);
            let Some(token) = token else { break };
            guesses.push(token);
            let is_last = guesses.len() == limit || self.ends.eos().contains(&token);
            next = if is_last { Vec::new() } else { vec![token] };
        }
        Ok(guesses)
    }

    /// Sends tokens through the blocks; the last hidden state, or `None` without room for them.
    fn feed(&mut self, cache: &mut Cache, tokens: &[u32]) -> Result<Option<Vec<f32>>, String> {
        let (dtype, width) = (self.ends.dtype(), self.ends.hidden_size());
        let layout = page_layout(&self.spec, dtype);
        cache.blocks.resize_with(self.blocks.len(), Vec::new);
        let mut hidden = Vec::new();
        for piece in tokens.chunks(PIECE) {
            if !cache.grow(cache.tokens.len() + piece.len(), layout) {
                return Ok(None);
            }
            let bytes = self.ends.embed(piece).map_err(|error| error.to_string())?;
            hidden.resize(piece.len() * width, 0.0);
            convert::to_f32(dtype, &bytes, &mut hidden);
            self.compute(cache, piece.len(), &mut hidden, layout).map_err(|e| e.to_string())?;
            cache.tokens.extend(piece);
        }
        Ok(hidden.len().checked_sub(width).map(|last| hidden.split_off(last)))
    }

    fn compute(
        &mut self,
        cache: &mut Cache,
        tokens: usize,
        hidden: &mut [f32],
        layout: PageLayout,
    ) -> Result<(), OpError> {
        let rows = [StepRow::new(tokens, cache.tokens.len(), &cache.table)];
        for (block, pages) in self.blocks.iter().zip(&mut cache.blocks) {
            let mut pages = KvPages::new(layout, pages);
            let (cpu, work) = (&mut self.cpu, &mut self.work);
            forward(cpu, &self.spec, block, work, &rows, hidden, &mut pages)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn golden(name: &str) -> (PathBuf, Vec<u32>, Vec<u32>) {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("golden").join(name);
        let golden: serde_json::Value =
            serde_json::from_slice(&std::fs::read(folder.join("golden.json")).unwrap()).unwrap();
        let tokens = |key: &str| serde_json::from_value(golden[key].clone()).unwrap();
        (folder.clone(), tokens("prompt"), tokens("greedy"))
    }

    /// The golden models have no tokenizer: the text does not matter here.
    fn with_tokenizer(folder: &Path) -> tempfile::TempDir {
        let copy = tempfile::tempdir().unwrap();
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("model/tokenizer.json");
        std::fs::copy(source, copy.path().join("tokenizer.json")).unwrap();
        for name in ["config.json", "model.safetensors"] {
            std::fs::copy(folder.join(name), copy.path().join(name)).unwrap();
        }
        copy
    }

    #[tokio::test]
    async fn guesses_are_the_greedy_continuation_however_the_text_came() {
        for name in ["mistral", "bloom", "falcon", "qwen2", "qwen3", "mixtral"] {
            let (folder, prompt, greedy) = golden(name);
            let folder = with_tokenizer(&folder);
            let draft = DraftModel::start(folder.path(), folder.path(), 1).unwrap();
            let mut reader = draft.reader();
            assert_eq!(reader.guess(&prompt, 8).await, greedy[..8], "{name}");
            let text = [&prompt[..], &greedy[..5]].concat();
            assert_eq!(reader.guess(&text, 4).await, greedy[5..9], "{name}: they were right");
            let wrong = [&prompt[..], &[7, 7, 7]].concat();
            reader.guess(&wrong, 3).await;
            assert_eq!(reader.guess(&text, 3).await, greedy[5..8], "{name}: another text before");
            assert!(draft.held.load(Ordering::Relaxed) > 0);
            drop(reader);
            assert_eq!(draft.held.load(Ordering::Relaxed), 0, "{name}");
            let mut reader = draft.reader();
            reader.read(&prompt);
            let mut guesses = Vec::new();
            while guesses.is_empty() {
                tokio::task::yield_now().await;
                guesses = reader.guess(&text, 3).await;
            }
            assert_eq!(guesses, greedy[5..8], "{name}: read before");
            let unknown = reader.guess(&[u32::MAX, 1], 3).await;
            assert_eq!(unknown, [0u32; 0], "{name}: a token that it does not know");
        }
    }

    #[test]
    fn another_vocabulary_and_broken_folders_are_refused_by_name() {
        let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("model");
        let (folder, ..) = golden("mistral");
        let folder = with_tokenizer(&folder);
        let start = || DraftModel::start(folder.path(), &demo, 1).map(drop);
        start().unwrap();
        let path = folder.path().join("tokenizer.json");
        let text = std::fs::read_to_string(&path).unwrap();
        let mut file: serde_json::Value = serde_json::from_str(&text).unwrap();
        file["model"]["vocab"]["surely-new"] = 1024.into();
        std::fs::write(&path, file.to_string()).unwrap();
        assert!(start().unwrap_err().to_string().contains("another vocabulary"));
        std::fs::write(&path, "{").unwrap();
        assert!(start().unwrap_err().to_string().contains("tokenizer.json"));
        std::fs::write(&path, text).unwrap();
        std::fs::write(folder.path().join("model.safetensors"), b"x").unwrap();
        assert!(start().unwrap_err().to_string().contains("model.safetensors"));
    }
}
