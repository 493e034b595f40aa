//! Brings what a client computes itself into folders, and makes or checks the cache, before a command begins.

use std::path::{Path, PathBuf};

use prepare::client_tensors;
use shared::causes::with_causes;
use shared::config::{CacheAction, CacheConfig, ConvertConfig, FetchConfig, GatewayConfig};
use shared::escape::escaped;
use shared::exit::ExitReason;
use supervisor::cache_folder;

/// A model and the prefix that it is announced under.
type Named<'a> = (&'a mut PathBuf, &'a mut Option<String>);

/// The models of a gateway.
pub fn of_gateway(config: &mut GatewayConfig) -> impl Iterator<Item = Named<'_>> {
    config.models.iter_mut().map(|model| (&mut model.folder, &mut model.dht_prefix))
}

/// Brings the models of a gateway. The page of a server is confined before, and shows the swarm without a chat, too.
pub fn for_gateway(config: &mut GatewayConfig, fetch: &FetchConfig) -> Option<ExitReason> {
    if let Err(error) = supervisor::web::confine(config, fetch) {
        eprintln!("sepal: {error}");
        return Some(ExitReason::BadConfig);
    }
    fetched(of_gateway(config), fetch).filter(|_| config.server.is_none())
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
    let model = Path::new(&config.prepare.model);
    checked(cache_folder::make_for(&config.prepare.cache_dir, [model]))
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
