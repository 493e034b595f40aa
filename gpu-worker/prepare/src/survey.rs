//! What prepare tells of a model and of its devices before any weight is there, to the supervisor of
//! `sepal serve` and to `sepal plan` alike.

use std::collections::BTreeMap;
use std::time::Duration;

use model::cuts::CutFile;
use model::rates::{RateCache, slowest};
use model::shards::Shard;
use model::survey::{
    BlockSource, CheckpointSource, FormatSurvey, ModelSurvey, SurveyFailure, SurveyRequest,
};
use shared::block::{BlockIndex, Span};
use shared::config::{Device, SpanChoice, WorkerConfig};
use shared::model::RankShare;
use shared::survey::{DeviceMemory, Speeds, Survey};
use tracing::{info, warn};

use crate::devices::{self, device_memory};
use crate::error::PrepareError;
use crate::estimate::Peaks;
use crate::files::Files;
use crate::groups;
use crate::inspect::Inspected;
use crate::source::{SourceTensor, Wanted};

/// Surveys a model in every format asked for, without a byte of its weights: config.json, the index
/// and headers of checkpoint files are read. Of a fixed choice of blocks only those are looked at.
///
/// # Errors
/// What the operator can do, in one sentence.
pub fn survey_model(request: SurveyRequest<'_>) -> Result<ModelSurvey, SurveyFailure> {
    look(request).map_err(|error| (error.exit_reason(), error.to_string()))
}

fn look(request: SurveyRequest<'_>) -> Result<ModelSurvey, PrepareError> {
    let SurveyRequest { prepare, groups, worker, formats, choice } = request;
    let mut inspected = Inspected::headers_only(prepare)?;
    let mut peaks = Peaks::default();
    let mut surveys = Vec::new();
    // What was converted cannot be served in another format.
    let own = [inspected.facts.quant_type];
    let formats = if inspected.converted().is_some() { &own[..] } else { formats };
    for &quant_type in formats {
        inspected.store_as(quant_type);
        let (survey, _) = survey(&inspected, groups, worker)?;
        let estimate = match survey.kept {
            Some(_) => None,
            None => peaks.estimate(&inspected.spec, &survey.facts, groups, worker),
        };
        surveys.push(FormatSurvey { quant_type, survey, estimate });
    }
    let count = inspected.facts.num_blocks;
    let wanted = match choice {
        // Blocks that the model does not have are the supervisor's to refuse.
        SpanChoice::Fixed(span) => span.start().0.min(count)..span.end().0.min(count),
        SpanChoice::Count(_) | SpanChoice::All => 0..count,
    };
    if let Some(record) = &inspected.record {
        let all = Span::new(0, count).ok().filter(|_| choice == SpanChoice::All);
        let span = if let SpanChoice::Fixed(span) = choice { Some(span) } else { all };
        span.map_or(Ok(()), |span| record.check_span(&inspected.folder, span))?;
    }
    let held = inspected.record.as_ref().map(|record| record.blocks.clone());
    let is_held = |block: &u32| held.as_ref().is_none_or(|held| held.contains_key(block));
    let blocks = wanted.filter(is_held);
    let blocks = blocks.map(|block| Ok((block, inspected.source(BlockIndex(block))?)));
    let blocks: BTreeMap<u32, BlockSource> = blocks.collect::<Result<_, PrepareError>>()?;
    let source = match &inspected.hub {
        Some(hub) => CheckpointSource::Hub { commit: hub.commit().to_owned() },
        None => CheckpointSource::Folder,
    };
    Ok(ModelSurvey { source, formats: surveys, blocks })
}

/// The model on these groups of devices, and where its cuts among them are kept.
///
/// # Errors
/// [`PrepareError`] when a device cannot be asked, or cannot share blocks.
pub fn survey(
    inspected: &Inspected,
    groups: &[Vec<Device>],
    worker: &WorkerConfig,
) -> Result<(Survey, CutFile), PrepareError> {
    let facts = &inspected.facts;
    let (shards, ranks) = shares(inspected, groups, worker)?;
    let devices = memory(inspected, groups, worker, &shards)?;
    let kept = worker.rates_dir.as_ref().filter(|_| !worker.measure_anew).and_then(|folder| {
        let cache = RateCache::new(folder, Duration::ZERO);
        slowest(&cache.kept(facts, groups.iter().map(Vec::as_slice), worker)?)
    });
    let names = devices::group_names(groups, worker);
    let cuts = CutFile::new(&inspected.cache_dir, facts, &names);
    let all = groups.concat();
    let speeds = (all.len() > 1).then(|| {
        let rates = devices::speeds(&all, facts, worker);
        info!(?rates, "compared the speeds of the devices");
        Speeds { rates, cuts: cuts.read() }
    });
    Ok((Survey { facts: facts.clone(), ranks, devices, kept, speeds }, cuts))
}

/// The shards of all ranks in the order of the devices, and what each rank of each group holds of a
/// block; nothing where no group has several devices.
#[expect(clippy::type_complexity, reason = "two lists that belong together")]
fn shares(
    inspected: &Inspected,
    groups: &[Vec<Device>],
    worker: &WorkerConfig,
) -> Result<(Vec<Option<Shard>>, Vec<Vec<RankShare>>), PrepareError> {
    if groups.iter().all(|devices| devices.len() < 2) {
        return Ok((Vec::new(), Vec::new()));
    }
    let (mut shards, mut shares) = (Vec::new(), Vec::new());
    for devices in groups {
        if devices.len() < 2 {
            shards.push(None);
            shares.push(Vec::new());
            continue;
        }
        let rates = devices::speeds(devices, &inspected.facts, worker);
        let names = devices::names(devices, worker);
        let of_group = groups::shards(inspected, &names, &rates)?;
        let ranks: Vec<RankShare> =
            of_group.iter().map(|shard| groups::of_rank(inspected, shard)).collect();
        info!(?devices, ?ranks, "shared the blocks among the ranks of a group");
        for (device, _) in devices.iter().zip(&ranks).filter(|(_, rank)| rank.is_slow) {
            warn!(%device, "the inputs of its matrices are cut beside multiples of 64: it computes slowly");
        }
        shares.push(ranks);
        shards.extend(of_group.into_iter().map(Some));
    }
    Ok((shards, shares))
}

/// The memory of each device that has its own. `shards` are those of all ranks, in the order of the
/// devices; none where a device has whole blocks.
fn memory(
    inspected: &Inspected,
    groups: &[Vec<Device>],
    worker: &WorkerConfig,
    shards: &[Option<Shard>],
) -> Result<Vec<DeviceMemory>, PrepareError> {
    let whole = &inspected.spec;
    let held = |index: usize| {
        let shard = shards.get(index).and_then(Option::as_ref);
        shard.map_or(whole, |shard| &shard.spec).clone()
    };
    let memory = device_memory(&groups.concat(), worker.device_bytes, whole, held);
    let memory = memory.map_err(|(ordinal, failure)| {
        let (reason, message) = failure.told(ordinal);
        PrepareError::Device { reason, message }
    })?;
    for one in &memory {
        let (free_bytes, work_bytes) = (one.free_bytes, one.work_bytes);
        info!(device = %one.device, free_bytes, work_bytes, "measured device memory");
    }
    Ok(memory)
}

impl Inspected {
    /// What a block takes of the checkpoint, by headers alone, which are checked as when it is made
    /// ready.
    fn source(&mut self, block: BlockIndex) -> Result<BlockSource, PrepareError> {
        if let Some(converted) = self.converted() {
            let tensors = converted.block(block, &mut Files::default())?;
            let stored_bytes = tensors.values().map(|tensor| tensor.len).sum();
            return Ok(BlockSource { stored_bytes, missing: BTreeMap::new() });
        }
        let wanted = self.wanted(block)?;
        if let Some(hub) = &mut self.hub {
            let found = hub.source(&mut self.checkpoint, block.0, &wanted, &mut |_| Ok(()))?;
            if let Some(source) = found {
                return Ok(source);
            }
        }
        let mut stored_bytes = 0u64;
        for Wanted { name, full_name, shape } in &wanted {
            self.checkpoint.open(full_name)?;
            let (file, info) = self.checkpoint.tensor(full_name)?;
            let source = SourceTensor::new(name, full_name, shape, file, info)?;
            stored_bytes = stored_bytes.saturating_add(source.len);
        }
        Ok(BlockSource { stored_bytes, missing: BTreeMap::new() })
    }
}

#[cfg(test)]
mod tests;
