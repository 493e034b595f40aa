//! LoRA adapters in PEFT layout: `adapter_config.json` and `adapter_model.safetensors` or `.bin`.
//!
//! A tensor belongs to the matrix whose whole path it names,
//! `PREFIX.layers.7.self_attn.q_proj.lora_A.weight`; nothing is matched by parts of names. What is
//! there must be what the config says and what the model has room for: an adapter that is
//! incomplete, of another model, or that changes more than matrices of blocks is refused, and the
//! server does not start. Tensors outside of the blocks (embeddings, head) are the client's.
//!
//! # Discrepancies
//! Petals takes a tensor for a module when the module's name is anywhere in the tensor's, which
//! loads wrong values for `dense` of BLOOM and for the experts of Mixtral, and it ignores
//! `rank_pattern`, `alpha_pattern` and everything it does not know.

mod config;
#[cfg(test)]
mod fuzz;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use config::AdapterConfig;
use model::{BlockSpec, LinearSpec};
use shared::block::BlockIndex;
use shared::config::{PrepareConfig, QuantType};
use shared::dtype::DType;
use shared::model::ModelFacts;
use tracing::{info, warn};

use crate::checkpoint::{CheckpointFile, open, read_bounded};
use crate::error::PrepareError;
use crate::hub::Hub;
use crate::repository::is_repo_id;
use crate::source::SourceTensor;

const CONFIG: &str = "adapter_config.json";
const WEIGHTS: [&str; 2] = ["adapter_model.safetensors", "adapter_model.bin"];

/// Longest accepted adapter_config.json.
const MAX_CONFIG_BYTES: u64 = 4 << 20;

/// An adapter whose tensors fit the model; their values are not yet looked at.
#[derive(Debug)]
pub struct Adapter {
    name: String,
    pub file: CheckpointFile,
    blocks: BTreeMap<u32, BTreeMap<String, LowRank>>,
}

/// What an adapter adds to one matrix.
#[derive(Debug)]
pub struct LowRank {
    /// Name of `lora_A` in the file.
    pub a: String,
    /// Name of `lora_B` in the file.
    pub b: String,
    /// Multiplies what they give.
    pub scale: f32,
    rank: u64,
    shape: [u64; 2],
}

impl Adapter {
    /// Opens the adapter `name`, a folder or a repository in the cache, for a model of form `spec`.
    ///
    /// # Errors
    /// [`PrepareError`], which names the file, the tensor and what is wrong with it.
    pub fn open(
        name: &str,
        config: &PrepareConfig,
        spec: &BlockSpec,
    ) -> Result<Adapter, PrepareError> {
        let folder = folder(name, config)?;
        let path = folder.join(CONFIG);
        let json = read_bounded(&path, MAX_CONFIG_BYTES)?;
        let config = AdapterConfig::parse(&json)
            .map_err(|reason| PrepareError::Unsupported { path, reason })?;
        let weights = WEIGHTS.iter().map(|w| folder.join(w)).find(|w| w.is_file());
        let weights = weights.ok_or_else(|| {
            let reason = format!("holds neither {} nor {}", WEIGHTS[0], WEIGHTS[1]);
            PrepareError::bad_file(&folder, reason)
        })?;
        let file = open(&weights)?;
        let blocks = Reading { file: &file, config: &config, spec }.blocks()?;
        let matrices: usize = blocks.values().map(BTreeMap::len).sum();
        info!(adapter = name, base = config.base, matrices, "adapter opened");
        Ok(Adapter { name: name.to_owned(), file, blocks })
    }

    /// Name for files: the last part of what the operator typed.
    pub fn short_name(&self) -> &str {
        self.name.rsplit('/').find(|part| !part.is_empty()).unwrap_or("adapter")
    }

    /// Type of its values as served. As Petals: one of quantized matrices computes in float32
    /// (petals `utils/peft.py`).
    pub fn served_dtype(facts: &ModelFacts) -> DType {
        match facts.quant_type {
            QuantType::None => facts.dtype,
            QuantType::Int8 | QuantType::Nf4 => DType::F32,
        }
    }

    /// Bytes of its parts for one block, of that which has most.
    pub fn block_bytes(&self, dtype: DType) -> u64 {
        self.most_bytes(|_, rank, [outputs, inputs]| {
            let elements =
                (rank as u64).saturating_mul((outputs as u64).saturating_add(inputs as u64));
            elements.saturating_mul(dtype.size_bytes() as u64)
        })
    }

    /// The largest sum of the `bytes` of the parts for one block, each given by the name of its
    /// matrix, the rank of its factors, and the shape of the matrix.
    pub fn most_bytes(&self, bytes: impl Fn(&str, usize, [usize; 2]) -> u64) -> u64 {
        let size = |side: u64| usize::try_from(side).unwrap_or(usize::MAX);
        let blocks = self.blocks.values().map(|parts| {
            let of_part = |(name, part): (&String, &LowRank)| {
                bytes(name, size(part.rank), part.shape.map(size))
            };
            parts.iter().map(of_part).fold(0, u64::saturating_add)
        });
        blocks.max().unwrap_or(0)
    }

    /// Its parts for a block by the names of the matrices.
    pub fn parts(&self, block: BlockIndex) -> impl Iterator<Item = (&str, &LowRank)> {
        let parts = self.blocks.get(&block.0).into_iter().flatten();
        parts.map(|(name, part)| (name.as_str(), part))
    }

    /// The tensors of those parts, each under its name in the file.
    ///
    /// # Errors
    /// [`PrepareError::BadTensor`] for a tensor of a wrong type or size.
    pub fn sources(&self, block: BlockIndex) -> Result<Vec<SourceTensor<'_>>, PrepareError> {
        let mut sources = Vec::new();
        for (_, part) in self.parts(block) {
            let [outputs, inputs] = part.shape;
            let shapes = [[part.rank, inputs], [outputs, part.rank]];
            for (name, shape) in [&part.a, &part.b].into_iter().zip(shapes) {
                let info = self.file.header.tensors.get(name).ok_or_else(|| {
                    PrepareError::bad_tensor(&self.file.shown, name, "is missing")
                })?;
                sources.push(SourceTensor::new(name, name, &shape, &self.file, info)?);
            }
        }
        Ok(sources)
    }
}

fn folder(name: &str, config: &PrepareConfig) -> Result<PathBuf, PrepareError> {
    let path = Path::new(name);
    if path.is_dir() {
        return path.canonicalize().map_err(|e| PrepareError::read(path, e));
    }
    if is_repo_id(name) {
        return Hub::adapter(config, name, CONFIG, &WEIGHTS);
    }
    let reason = format!(
        "is no folder; --adapters takes repositories of the Hub and folders with {CONFIG} and {}",
        WEIGHTS[0]
    );
    Err(PrepareError::bad_file(path, reason))
}

/// The two matrices.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Side {
    A,
    B,
}

/// Where a tensor of an adapter belongs.
struct LayerName<'a> {
    /// Path of the module without what PEFT puts before it.
    module: &'a str,
    /// What comes before the index of the block.
    before: &'a str,
    block: u32,
    linear: &'a str,
}

struct Reading<'a> {
    file: &'a CheckpointFile,
    config: &'a AdapterConfig,
    spec: &'a BlockSpec,
}

impl Reading<'_> {
    fn blocks(&self) -> Result<BTreeMap<u32, BTreeMap<String, LowRank>>, PrepareError> {
        let mut found: BTreeMap<(u32, String), BTreeMap<Side, &str>> = BTreeMap::new();
        let (mut before, mut outside) = (None, 0);
        for name in self.file.header.tensors.keys() {
            let Some(place) = self.place(name)? else {
                outside += 1;
                continue;
            };
            let side = self.side(name)?;
            let path = *before.get_or_insert(place.before);
            if path != place.before {
                return Err(self.bad(name, format!("is not below {path}, as others are")));
            }
            let known = self.config.targets(place.module, place.block);
            if known == Some(false) {
                let reason =
                    "is for a module that target_modules of adapter_config.json does not name";
                return Err(self.bad(name, reason));
            }
            let sides = found.entry((place.block, place.linear.to_owned())).or_default();
            if sides.insert(side, name).is_some() {
                return Err(self.bad(name, "is there twice under other names"));
            }
        }
        if outside > 0 {
            warn!(file = %self.file.shown.display(), outside, "adapter has tensors outside the blocks, leaving them to clients");
        }
        let Some(before) = before else {
            let reason = format!(
                "has no tensor for the blocks of this model ({}.N)",
                self.spec.checkpoint_prefix
            );
            return Err(PrepareError::bad_file(&self.file.shown, reason));
        };
        self.complete(before, &found)?;
        let mut blocks: BTreeMap<u32, BTreeMap<String, LowRank>> = BTreeMap::new();
        for ((block, linear), sides) in found {
            let part = self.part(block, &linear, before, &sides)?;
            blocks.entry(block).or_default().insert(linear, part);
        }
        Ok(blocks)
    }

    /// Refuses an adapter that lacks a matrix its config names.
    fn complete(
        &self,
        before: &str,
        found: &BTreeMap<(u32, String), BTreeMap<Side, &str>>,
    ) -> Result<(), PrepareError> {
        let count = u32::try_from(self.spec.num_blocks).unwrap_or(u32::MAX);
        for block in 0..count {
            for linear in self.spec.linears() {
                let module = format!("{before}{block}.{}", linear.name);
                let is_there = found.contains_key(&(block, linear.name.to_string()));
                if self.config.targets(&module, block) == Some(true) && !is_there {
                    let name = format!("{module}.lora_A.weight");
                    let reason = "is missing; target_modules of adapter_config.json names it: the adapter is incomplete or of another model";
                    return Err(self.bad(&name, reason));
                }
            }
        }
        Ok(())
    }

    fn part(
        &self,
        block: u32,
        linear: &str,
        before: &str,
        sides: &BTreeMap<Side, &str>,
    ) -> Result<LowRank, PrepareError> {
        let module = format!("{before}{block}.{linear}");
        let (Some(a), Some(b)) = (sides.get(&Side::A), sides.get(&Side::B)) else {
            let missing = if sides.contains_key(&Side::A) { "lora_B" } else { "lora_A" };
            let name = format!("{module}.{missing}.weight");
            return Err(self.bad(&name, "is missing; the adapter is incomplete"));
        };
        let own = |l: &&LinearSpec| l.name == linear;
        let spec = self.spec.linears().into_iter().find(own);
        let spec =
            spec.ok_or_else(|| self.bad(a, "is for a module that the blocks do not have"))?;
        let (rank, shape) = (self.config.rank(&module), [spec.outputs as u64, spec.inputs as u64]);
        for (name, wanted) in [(a, [rank, shape[1]]), (b, [shape[0], rank])] {
            let found = self.file.header.tensors.get(*name).map(|info| info.shape.as_slice());
            if found != Some(&wanted[..]) {
                let base = self.config.base.as_deref().unwrap_or("another model");
                let reason = format!(
                    "has shape {:?} where rank {rank} and this model ask for {wanted:?}; the adapter was made for {base}",
                    found.unwrap_or_default()
                );
                return Err(self.bad(name, reason));
            }
        }
        Ok(LowRank {
            a: (*a).to_owned(),
            b: (*b).to_owned(),
            scale: self.config.scale(&module),
            rank,
            shape,
        })
    }

    /// Where `name` belongs; `None` when that is outside of the blocks.
    fn place<'n>(&self, name: &'n str) -> Result<Option<LayerName<'n>>, PrepareError> {
        let path = name.strip_prefix("base_model.model.").unwrap_or(name);
        let folder = self.spec.checkpoint_prefix.rsplit('.').next().unwrap_or_default();
        let Some((before, rest)) = split_after(path, folder) else {
            return Ok(None);
        };
        let Some((index, inner)) = rest.split_once('.') else {
            return Ok(None);
        };
        let Ok(block) = index.parse::<u32>() else {
            return Ok(None);
        };
        let blocks = self.spec.num_blocks;
        if block as usize >= blocks {
            return Err(self.bad(name, format!("is for block {block} of a model that has {blocks}; the adapter was made for another model")));
        }
        let linears = self.spec.linears().into_iter();
        let mut own =
            linears.filter(|l| inner.strip_prefix(&*l.name).is_some_and(|r| r.starts_with('.')));
        let Some(linear) = own.next() else {
            return Err(self.bad(name, "is for a module that the blocks of this model do not have, or that adapters cannot change here"));
        };
        let module = path.len() - inner.len() + linear.name.len();
        Ok(Some(LayerName {
            module: &path[..module],
            before,
            block,
            linear: &inner[..linear.name.len()],
        }))
    }

    /// Which matrix `name` is: the end of the name is `.lora_A.weight`, perhaps with the adapter's
    /// own name in between.
    fn side(&self, name: &str) -> Result<Side, PrepareError> {
        for (word, side) in [(".lora_A.", Side::A), (".lora_B.", Side::B)] {
            if let Some((_, rest)) = name.rsplit_once(word)
                && (rest == "weight"
                    || rest.strip_suffix(".weight").is_some_and(|own| !own.contains('.')))
            {
                return Ok(side);
            }
        }
        Err(self.bad(name, "is neither lora_A nor lora_B of a matrix; adapters that train more than that are not supported"))
    }

    fn bad(&self, name: &str, reason: impl Into<String>) -> PrepareError {
        let shown: String = name.chars().take(200).collect();
        PrepareError::bad_tensor(&self.file.shown, &shown, reason)
    }
}

/// Cuts `path` behind its first component `folder`: what is before, that component included, and
/// what is after.
fn split_after<'a>(path: &'a str, folder: &str) -> Option<(&'a str, &'a str)> {
    let mut at = 0;
    for part in path.split_inclusive('.') {
        at += part.len();
        if part.strip_suffix('.') == Some(folder) {
            return Some(path.split_at(at));
        }
    }
    None
}

#[cfg(test)]
mod tests;
