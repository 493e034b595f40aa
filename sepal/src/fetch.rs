//! Brings what a client computes itself into folders, and makes or checks the cache, before a command begins.

use std::fs::DirEntry;
use std::path::{Path, PathBuf};

use gateway::config::{EngineConfig, GatewayConfig};
use prepare::cache::{CacheAction, CacheConfig};
use prepare::client_tensors::{self, FetchConfig};
use prepare::convert::ConvertConfig;
use shared::error_chain::with_causes;
use shared::exit::ExitReason;
use shared::sandbox::{self, Confinement, SandboxError, SandboxSubject};
use shared::sanitize_text::escaped;
use supervisor::cache_folder;

/// Links in the folder of a model that are followed.
const MAX_LINKS: usize = 4096;

/// A model and the prefix that it is announced under.
type Named<'a> = (&'a mut PathBuf, &'a mut Option<String>);

/// The models of a gateway.
fn of_engine(config: &mut EngineConfig) -> impl Iterator<Item = Named<'_>> {
    config.models.iter_mut().map(|model| (&mut model.folder, &mut model.dht_prefix))
}

/// Brings the models of a gateway. The page of a server is confined before, and shows the swarm without a chat, too.
pub fn for_gateway(config: &mut GatewayConfig, fetch: &FetchConfig) -> Option<ExitReason> {
    if let Err(error) = confine(config, fetch) {
        eprintln!("sepal: {error}");
        return Some(ExitReason::BadConfig);
    }
    fetched(of_engine(&mut config.engine), fetch).filter(|_| config.engine.server.is_none())
}

/// Confines this process where it is the page of a server: it reads its models and what names of hosts take, and writes to the cache.
/// To be called first, while the process has one thread.
///
/// # Errors
/// [`SandboxError`] if `--sandbox require` asks for more than the kernel can.
fn confine(config: &GatewayConfig, fetch: &FetchConfig) -> Result<(), SandboxError> {
    let Some(server) = config.engine.server else { return Ok(()) };
    let confinement = Confinement {
        mode: server.sandbox,
        readable: config
            .engine
            .models
            .iter()
            .flat_map(|model| with_targets(&model.folder))
            .collect(),
        writable: vec![fetch.cache_dir.clone()],
        has_driver: false,
    };
    sandbox::enter(SandboxSubject::Page, &confinement).map(drop)
}

/// A folder and the files that links in it lead to.
fn with_targets(folder: &Path) -> Vec<PathBuf> {
    let folders = [folder.to_owned(), folder.join("additional_chat_templates")];
    let entries = folders.iter().flat_map(std::fs::read_dir).flatten().flatten();
    let is_link = |entry: &DirEntry| entry.file_type().is_ok_and(|kind| kind.is_symlink());
    let links = entries.filter(is_link).take(MAX_LINKS);
    let targets = links.filter_map(|entry| entry.path().canonicalize().ok());
    [folder.to_owned()].into_iter().chain(targets).collect()
}

/// Makes the folder around a cache that is changed or copied from, and checks it for one that is looked at. Why the
/// command ends here, if others can write to the cache.
pub fn for_cache(config: &CacheConfig) -> Option<ExitReason> {
    let looks = match &config.action {
        CacheAction::List { .. } | CacheAction::Verify { repair: false, .. } => true,
        CacheAction::Prune(prune) => prune.dry_run,
        CacheAction::Verify { repair: true, .. } | CacheAction::Export { .. } => false,
    };
    checked(match looks {
        true => cache_folder::check(&config.cache_dir),
        false => cache_folder::make(&config.cache_dir),
    })
}

/// The same for the cache that `sepal convert` downloads to.
pub fn for_convert(config: &ConvertConfig) -> Option<ExitReason> {
    let model = Path::new(&config.model);
    checked(cache_folder::make_for(&config.cache_dir, [model]))
}

/// Why the command ends here, if the cache folder is refused; says so.
fn checked(folder: Result<(), String>) -> Option<ExitReason> {
    let why = folder.err()?;
    eprintln!("sepal: {}", escaped(&why));
    Some(ExitReason::BadConfig)
}

/// Puts in place of each model the folder with what a client needs of it. Why the command ends here, if something
/// is wrong.
pub fn fetched<'a>(
    models: impl IntoIterator<Item = Named<'a>>,
    fetch: &FetchConfig,
) -> Option<ExitReason> {
    for (model, prefix) in models {
        let cache = checked(cache_folder::make_for(&fetch.cache_dir, [model.as_path()]));
        if cache.is_some() {
            return cache;
        }
        let folder = client_tensors::folder(model, fetch);
        match folder {
            Ok(found) => {
                *model = found.path;
                *prefix = prefix.take().or(found.dht_prefix);
            }
            Err(error) => {
                eprintln!("sepal: {}", escaped(&with_causes(&error)));
                return Some(error.exit_reason());
            }
        }
    }
    None
}
