//! `sepal plan`: what `sepal serve` would do with the same settings, before anything is fetched or
//! loaded. The decision is that of `serve`: [`Memory::served`] and [`Memory::placements`] over a
//! [`Survey`](shared::survey::Survey), and the throughput is what netd announces
//! ([`netd::throughput`]). Only what is printed is decided here.
//!
//! The survey is taken in this process by a function of package `prepare` that the caller gives:
//! files from outside are parsed there, and a malformed one ends nothing but this command.

mod report;
mod table;

use std::io::{self, Write};
use std::path::Path;

use model::survey::{CheckpointSource, FormatSurvey, ModelSurvey, SurveyFailure, SurveyRequest};
use netd::network_rate;
use netd::throughput::{Rates, Reach, announced, network_rps};
use shared::block::{Span, longest_run};
use shared::config::{Device, NetdConfig, QuantType, ServeConfig, SpanChoice, Throughput};
use shared::exit::ExitReason;
use shared::network::NetworkRate;
use shared::survey::Capacity;

pub use report::{FormatPlan, GroupPlan, Plan, RateOrigin, VERSION};

use crate::cli::{PlanOptions, log_notes, with_log};
use supervisor::cache_folder;
use supervisor::devices;
use supervisor::placement::{DeviceShare, Placement};
use supervisor::sizing::{GroupFit, InstanceMemory};
use supervisor::spawn::count_along_bus;

/// Prints the plan to standard output; errors go to standard error. Ends with
/// [`ExitReason::BadConfig`] when `serve` would refuse every format.
pub fn run(options: PlanOptions) -> ExitReason {
    let log = options.config.log.clone();
    with_log(&log, "plan", || print(options))
}

fn print(options: PlanOptions) -> ExitReason {
    count_along_bus();
    log_notes(&options.notes);
    let plan = match make(options.config, &options.formats) {
        Ok(plan) => plan,
        Err((reason, message)) => {
            eprintln!("sepal: {message}");
            return reason;
        }
    };
    let text = match options.json {
        true => serde_json::to_string_pretty(&plan).map(|json| json + "\n").unwrap_or_default(),
        false => table::text(&plan),
    };
    if let Err(error) = io::stdout().lock().write_all(text.as_bytes()) {
        eprintln!("sepal: cannot write the plan: {error}");
        return ExitReason::Failed;
    }
    match plan.formats.iter().all(|format| format.refusal.is_some()) {
        true => ExitReason::BadConfig,
        false => ExitReason::Clean,
    }
}

/// Chooses devices as `serve` does, surveys, and plans.
fn make(mut config: ServeConfig, formats: &[QuantType]) -> Result<Plan, SurveyFailure> {
    devices::choose(&mut config).map_err(|why| (ExitReason::BadConfig, why))?;
    let groups: Vec<Vec<Device>> =
        config.devices.chunks(config.world_size.max(1)).map(<[Device]>::to_vec).collect();
    let cache = &config.prepare.cache_dir;
    let adapters = config.prepare.adapters.iter().map(Path::new);
    let models = adapters.chain([Path::new(&config.prepare.model)]);
    // The shares of the devices of a group are kept there.
    let made = match config.world_size > 1 {
        true => cache_folder::make(cache),
        false => cache_folder::make_for(cache, models),
    };
    made.map_err(|why| (ExitReason::BadConfig, why))?;
    let survey = prepare::survey_model(SurveyRequest {
        prepare: &config.prepare,
        groups: &groups,
        worker: &config.worker,
        formats,
        choice: config.netd.span,
    })?;
    Ok(plan(&config, &InstanceMemory::of(&config), &survey, network_rate::known(&config.netd)))
}

/// What a run with these settings would serve in each surveyed format, `memory` being what it may
/// use before its devices were surveyed.
pub fn plan(
    config: &ServeConfig,
    memory: &InstanceMemory,
    survey: &ModelSurvey,
    network: NetworkRate,
) -> Plan {
    let planner = Planner { config, memory, survey, network };
    let facts = survey.formats.first().map(|format| &format.survey.facts);
    let limits = facts.map(|facts| config.netd.limits(facts));
    Plan {
        version: VERSION,
        model: facts.map_or_else(String::new, |facts| facts.name.clone()),
        model_type: facts.map_or_else(String::new, |facts| facts.model_type.clone()),
        commit: match &survey.source {
            CheckpointSource::Folder => None,
            CheckpointSource::Hub { commit } => Some(commit.clone()),
        },
        model_blocks: facts.map_or(0, |facts| facts.num_blocks),
        dtype: facts.map_or("", |facts| facts.dtype.name()).to_owned(),
        max_model_len: facts.and_then(|facts| facts.context_tokens),
        inference_max_length: limits.map_or(0, |limits| limits.inference_max_length),
        attn_cache_tokens: limits.map_or(0, |limits| limits.attn_cache_tokens),
        memory_bytes: memory.available_bytes,
        network_mbps: network.mbps(),
        network_source: network.source.to_string(),
        formats: survey.formats.iter().map(|format| planner.format(format)).collect(),
    }
}

struct Planner<'a> {
    config: &'a ServeConfig,
    memory: &'a InstanceMemory,
    survey: &'a ModelSurvey,
    network: NetworkRate,
}

impl Planner<'_> {
    fn format(&self, format: &FormatSurvey) -> FormatPlan {
        let survey = &format.survey;
        let facts = &survey.facts;
        let choice = self.config.netd.span;
        let memory = self.memory.clone().surveyed(survey);
        let mut shares = DeviceShare::groups(&self.config.devices, self.config.world_size);
        let mut cuts: &[Vec<u32>] = &[];
        if let Some(speeds) = &survey.speeds {
            DeviceShare::set_rates(&mut shares, &speeds.rates);
            cuts = &speeds.cuts;
        }
        let served = memory.served(choice, facts, &shares).map(|blocks| blocks.min(self.held()));
        let span = span(choice, served.as_ref().copied().unwrap_or(0));
        let cut = |span| memory.placements(span, Some(facts), &shares, cuts);
        let placements = span.map(cut).unwrap_or_default();
        let fits = memory.fits(facts, &shares);
        let blocks = span.map_or(0, |span| span.end().0 - span.start().0);
        let (capacity, origin) = self.capacity(format);
        let network_rps =
            network_rps(self.network.bits_per_s, self.network.bits_per_s, facts.hidden_size);
        let download_bytes = match (choice, span) {
            (SpanChoice::Fixed(span), Some(_)) => self.survey.download_bytes(span),
            _ => self.survey.most_download_bytes(blocks),
        };
        FormatPlan {
            quant_type: format.quant_type.name().to_owned(),
            // One alone was named, or is that of a folder that was converted.
            is_default: self.survey.formats.len() == 1
                || format.quant_type == self.config.prepare.quant_type.quant_type(),
            block_bytes: facts.block_bytes,
            kv_token_bytes: facts.kv_token_bytes() as u64,
            blocks,
            refusal: served.err(),
            throughput_rps: self.throughput(capacity, network_rps, blocks),
            throughput_origin: origin,
            estimate_basis: match origin {
                RateOrigin::Estimated => format.estimate.as_ref().map(|of| of.basis.clone()),
                _ => None,
            },
            inference_rps: capacity.map(|capacity| capacity.inference_rps),
            forward_rps: capacity.map(|capacity| capacity.forward_rps),
            network_rps,
            download_bytes,
            download_s: download_bytes as f64 * 8.0 / self.download_bits_per_s(),
            groups: group_plans(&shares, &fits, &placements),
        }
    }

    /// Most blocks that one server finds side by side: a folder may hold some blocks of its model
    /// alone.
    fn held(&self) -> u32 {
        let run = longest_run(self.survey.blocks.keys().copied());
        run.map_or(u32::MAX, |run| run.end().0 - run.start().0)
    }

    /// The speed of the slowest group, and how it is known.
    fn capacity(&self, format: &FormatSurvey) -> (Option<Capacity>, RateOrigin) {
        let estimate = format.estimate.as_ref().map(|estimate| estimate.capacity);
        let (capacity, origin) = match (format.survey.kept, estimate) {
            (Some(kept), _) => (Some(kept), RateOrigin::Measured),
            (None, Some(estimate)) => (Some(estimate), RateOrigin::Estimated),
            (None, None) => (None, RateOrigin::Unknown),
        };
        match self.config.netd.throughput {
            Throughput::Fixed(_) => (capacity, RateOrigin::Given),
            _ => (capacity, origin),
        }
    }

    /// What netd would announce if peers can dial it, and nothing was lost.
    /// A limit of uploads does not slow downloads.
    fn download_bits_per_s(&self) -> f64 {
        let rate = match self.config.netd.max_upload_bits_per_s {
            None => self.network,
            Some(_) => {
                let unlimited =
                    NetdConfig { max_upload_bits_per_s: None, ..self.config.netd.clone() };
                network_rate::known(&unlimited)
            }
        };
        rate.bits_per_s.max(1.0)
    }

    fn throughput(&self, capacity: Option<Capacity>, network_rps: f64, blocks: u32) -> Option<f64> {
        let asked = self.config.netd.throughput;
        if blocks == 0 || (capacity.is_none() && !matches!(asked, Throughput::Fixed(_))) {
            return None;
        }
        let Capacity { inference_rps, forward_rps } = capacity.unwrap_or_default();
        let rates = Rates { inference_rps, forward_rps, network_rps };
        Some(announced(asked, &rates, blocks, Reach::Direct))
    }
}

/// The blocks that are asked for, or so many; `None` when it is not one.
fn span(choice: SpanChoice, blocks: u32) -> Option<Span> {
    match choice {
        _ if blocks == 0 => None,
        SpanChoice::Fixed(span) => Some(span),
        // The swarm decides where they begin.
        SpanChoice::Count(_) | SpanChoice::All => Span::new(0, blocks).ok(),
    }
}

fn group_plans(
    shares: &[DeviceShare],
    fits: &[GroupFit],
    placements: &[Placement],
) -> Vec<GroupPlan> {
    let of_group = |(index, (share, fit)): (usize, (&DeviceShare, &GroupFit))| {
        let placement = placements.iter().find(|placement| placement.share == index);
        let blocks = placement.map_or(0, |placement| placement.span.block_count());
        GroupPlan {
            devices: share.devices.iter().map(Device::to_string).collect(),
            free_bytes: fit.free_bytes,
            weights_bytes: fit.need.weights,
            kv_bytes: fit.need.kv,
            recorded_bytes: fit.need.graphs,
            workspace_bytes: fit.need.fixed,
            most_blocks: fit.most,
            blocks: u32::try_from(blocks).unwrap_or(u32::MAX),
        }
    };
    shares.iter().zip(fits).enumerate().map(of_group).collect()
}

#[cfg(test)]
mod tests;
