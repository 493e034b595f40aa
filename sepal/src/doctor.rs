//! `sepal doctor`: checks the machine, the network and the settings that a server would use, and says
//! what to do about what is wrong. Each check is a pure judgement of facts; thin observers collect the
//! facts in threads of their own, each with a time limit.
//!
//! | module | checks |
//! | --- | --- |
//! | [`check`] | what a finding is, and waiting for facts |
//! | `system` | kernel, limits, shared memory, memory |
//! | `tcp` | settings of TCP |
//! | `ports` | whether a server can listen |
//! | `network` | swarm, reachability, router, clock, Hub (observed by netd's crate) |
//! | `storage`, `model_source` | cache folder and disk; the model |
//! | `devices` | driver and self-tests |
//! | `instances` | other servers |
//! | `bundle`, `journal`, `secrets` | `--bundle`: a report for others, without secrets |

mod bundle;
pub mod check;
mod devices;
mod instances;
mod journal;
mod model_source;
mod network;
mod ports;
mod secrets;
mod storage;
mod system;
mod tcp;

use std::io::{self, Write};
use std::path::Path;
use std::time::Duration;

use netd::checkup::{self, HubFacts, HubQuestion, SwarmFacts};
use shared::config::{NetdConfig, QuantType};
use shared::error_chain::with_causes;
use shared::exit::ExitReason;
use shared::sandbox::Support;
use shared::sanitize_text::escaped_json;
use supervisor::cache_folder;

use crate::cli::DoctorOptions;
use check::{CheckVerdict, Finding, PendingObservation, Status, late};
use instances::{InstanceFacts, LiveServer};
use model_source::ModelKind;
use storage::DiskNeed;

/// Time for what only reads the machine.
const LOCAL_LIMIT: Duration = Duration::from_secs(10);
/// Time for the Hub: three requests at once, after the name of its host was resolved.
const HUB_LIMIT: Duration = Duration::from_secs(20);
/// Time for the swarm; its observer has a limit of its own.
const SWARM_LIMIT: Duration = Duration::from_secs(35);
/// Time for the self-tests of all devices, which take seconds once and nothing later: more than the
/// limits of the processes that make them.
const DEVICE_LIMIT: Duration = Duration::from_secs(600);

/// Why a check that needs the network is not made.
const OFFLINE: &str = "not checked with --offline";

/// Makes the checks, prints them, and packs the bundle if one was asked for. Exit reason
/// [`ExitReason::Failed`] if there is a problem.
pub fn run(options: &DoctorOptions) -> ExitReason {
    let complain = |error: &dyn std::error::Error| eprintln!("sepal: {}", with_causes(error));
    if let Some(Err(error)) = options.bundle.as_deref().map(bundle::check) {
        complain(&error);
        return ExitReason::BadConfig;
    }
    let (findings, running) = examine(options);
    // A reader that went away is told by the exit code alone.
    let _ = print(options, &findings, &mut io::stdout().lock());
    if let Some(path) = &options.bundle {
        if let Err(error) = bundle::write(path, options, &findings, &running) {
            complain(&error);
            return ExitReason::Failed;
        }
        eprintln!(
            "sepal: wrote {}; look through it before you send it: it names addresses, PeerIDs and paths",
            path.display()
        );
    }
    match findings.iter().any(|finding| finding.status == Status::Problem) {
        true => ExitReason::Failed,
        false => ExitReason::Clean,
    }
}

fn print(options: &DoctorOptions, findings: &[Finding], out: &mut impl Write) -> io::Result<()> {
    if options.json {
        let json = serde_json::to_string_pretty(findings)?;
        return writeln!(out, "{}", escaped_json(&json));
    }
    findings.iter().try_for_each(|finding| writeln!(out, "{}", finding.line()))?;
    let count = |status| findings.iter().filter(|finding| finding.status == status).count();
    let plural = |n: usize| if n == 1 { "" } else { "s" };
    let (problems, warnings) = (count(Status::Problem), count(Status::Warning));
    let (s, t) = (plural(problems), plural(warnings));
    writeln!(out, "{problems} problem{s}, {warnings} warning{t}")
}

/// What runs in threads while the rest is looked at.
struct Observations {
    swarm: Option<PendingObservation<Result<SwarmFacts, String>>>,
    hub: Option<PendingObservation<Result<HubFacts, String>>>,
    devices: PendingObservation<devices::DeviceFacts>,
    instances: PendingObservation<Result<Vec<LiveServer>, String>>,
    cache: PendingObservation<storage::CacheFacts>,
}

/// All checks, in the order in which they are shown, and the servers that run.
fn examine(options: &DoctorOptions) -> (Vec<Finding>, Vec<LiveServer>) {
    let config = &options.config;
    // The port first: the node that joins the swarm listens on it for a while.
    let port = ports::judge(&ports::observe(&config.netd.host_maddrs));
    let source = model_source::observe(options.model.as_deref());
    let Observations { swarm, hub, devices, instances, cache } = start(options, &source);
    let mut findings = vec![
        Finding::new("settings", judge_settings(options)),
        Finding::new("kernel", system::judge_kernel(&system::kernel())),
        Finding::new("sandbox", system::judge_sandbox(Support::of_this_kernel())),
        Finding::new("limits", system::judge_limits(&system::limits(config.file_limit))),
        Finding::new("shared memory", system::judge_shm(&system::shm(Path::new("/dev/shm")))),
        Finding::new("memory", system::judge_memory(system::memory())),
        Finding::new("tcp", tcp::judge(&tcp::observe(Path::new("/proc/sys/net/ipv4")))),
    ];
    let running = instances.wait();
    let of_instances = |running: Result<Vec<LiveServer>, String>| InstanceFacts {
        running,
        name: config.instance.clone(),
        peer_id: config.netd.identity_path.as_deref().map_or(Ok(None), checkup::peer_id),
    };
    let verdict = running.clone().map(|running| instances::judge(&of_instances(running)));
    findings.push(Finding::new("instances", verdict.unwrap_or_else(late)));
    findings.push(Finding::new("port", port));
    let hub = hub.map(|hub| hub.wait().unwrap_or_else(Err));
    let need = disk_need(&source, config.prepare.quant_type.quant_type(), hub.as_ref());
    let cache = cache.wait().map(|facts| storage::judge(&facts, need));
    findings.push(Finding::new("cache folder", cache.unwrap_or_else(late)));
    findings.push(Finding::new("model", judge_model(&source, hub.as_ref())));
    let is_offline = options.offline || config.prepare.hub.offline;
    let no_hub = || {
        CheckVerdict::skipped(if is_offline { OFFLINE } else { "no model of the Hub was named" })
    };
    findings.push(Finding::new("hub", hub.as_ref().map_or_else(no_hub, network::judge_hub)));
    let swarm = swarm.map(|swarm| swarm.wait().unwrap_or_else(Err));
    findings.extend(of_swarm(options, swarm.as_ref(), hub.as_ref()));
    let devices = devices.wait().map(|facts| devices::judge(&facts));
    findings.push(Finding::new("devices", devices.unwrap_or_else(late)));
    (findings, running.and_then(|running| running).unwrap_or_default())
}

fn start(options: &DoctorOptions, source: &ModelKind) -> Observations {
    let mut config = options.config.clone();
    let model = match source {
        ModelKind::Repository(name) => Some(name.clone()),
        _ => None,
    };
    let needs_hub = model.is_some() || *source == ModelKind::None;
    let question = HubQuestion { hub: config.prepare.hub.clone(), model };
    let (netd, cache) = (config.netd.clone(), config.prepare.cache_dir.clone());
    let runtime_dir = config.runtime_dir.clone();
    Observations {
        swarm: swarm_excuse(options)
            .is_none()
            .then(|| PendingObservation::start(SWARM_LIMIT, move || checkup::swarm(&netd))),
        hub: (needs_hub && !options.offline && !config.prepare.hub.offline)
            .then(|| PendingObservation::start(HUB_LIMIT, move || checkup::hub(&question))),
        devices: PendingObservation::start(DEVICE_LIMIT, move || {
            // A self-test beside a server that fills the device would fail, or take memory from it.
            let running = instances::observe(&config.runtime_dir).unwrap_or_default();
            devices::observe(&mut config, &instances::devices(&running))
        }),
        instances: PendingObservation::start(LOCAL_LIMIT, move || instances::observe(&runtime_dir)),
        cache: PendingObservation::start(LOCAL_LIMIT, move || {
            storage::observe(&cache, cache_folder::check(&cache))
        }),
    }
}

/// Why the swarm is not asked, if it is not.
fn swarm_excuse(options: &DoctorOptions) -> Option<&'static str> {
    match (options.offline, options.names_swarm || options.model.is_some()) {
        (true, _) => Some(OFFLINE),
        (false, false) => Some(
            "no swarm was named: give --initial_peers, or MODEL for the swarm that serve would join",
        ),
        (false, true) => None,
    }
}

fn of_swarm(
    options: &DoctorOptions,
    swarm: Option<&Result<SwarmFacts, String>>,
    hub: Option<&Result<HubFacts, String>>,
) -> [Finding; 4] {
    let netd = &options.config.netd;
    let facts = swarm.and_then(|facts| facts.as_ref().ok());
    let skipped =
        || CheckVerdict::skipped(swarm_excuse(options).unwrap_or("the swarm was not joined"));
    let reachability = |facts| {
        network::judge_reachability(facts, !netd.announce_maddrs.is_empty(), netd.use_auto_relay)
    };
    let router = |facts| network::judge_router(facts, asks_router(netd));
    let clock = network::judge_clock(facts, hub.and_then(|facts| facts.as_ref().ok()));
    [
        Finding::new("clock", clock),
        Finding::new("swarm", swarm.map_or_else(skipped, network::judge_swarm)),
        Finding::new("reachability", facts.map_or_else(skipped, reachability)),
        Finding::new("router", facts.map_or_else(skipped, router)),
    ]
}

/// Whether a server with these settings asks the router of its net to forward its port.
fn asks_router(netd: &NetdConfig) -> bool {
    let leaves = |addr: &String| addr.starts_with("/ip4/") && !addr.starts_with("/ip4/127.");
    netd.use_upnp && netd.announce_maddrs.is_empty() && netd.host_maddrs.iter().any(leaves)
}

fn judge_settings(options: &DoctorOptions) -> CheckVerdict {
    match (&options.complaint, &options.file) {
        (Some(complaint), _) => CheckVerdict::problem(
            complaint,
            "correct it; the other checks use flags and defaults alone",
        ),
        (None, Some(file)) => {
            CheckVerdict::ok(format!("settings are also read from {}", file.display()))
        }
        (None, None) => CheckVerdict::ok("no file of settings; flags and variables count"),
    }
}

fn judge_model(source: &ModelKind, hub: Option<&Result<HubFacts, String>>) -> CheckVerdict {
    match source {
        ModelKind::None => CheckVerdict::skipped("no MODEL was named"),
        ModelKind::Folder(facts) => model_source::judge_folder(facts),
        ModelKind::Neither(name) => model_source::judge_neither(name),
        ModelKind::Repository(name) => match hub {
            Some(facts) => network::judge_model(name, facts),
            None => {
                CheckVerdict::skipped(format!("{name} is not looked up on the Hub with --offline"))
            }
        },
    }
}

/// What a start would write into the cache folder. Quantized blocks are smaller than the checkpoint.
fn disk_need(
    source: &ModelKind,
    quant_type: QuantType,
    hub: Option<&Result<HubFacts, String>>,
) -> DiskNeed {
    match source {
        ModelKind::Repository(_) => {
            DiskNeed::Blocks(hub.and_then(|facts| facts.as_ref().ok()?.model_bytes))
        }
        ModelKind::Folder(facts) if quant_type != QuantType::None => {
            DiskNeed::Blocks(Some(facts.weight_bytes / 2))
        }
        _ => DiskNeed::Little,
    }
}
