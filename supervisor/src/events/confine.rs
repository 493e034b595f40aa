//! What each child may touch: the files of its work, beside what its role may
//! ([`shared::sandbox::table`]).

use std::path::PathBuf;

use shared::config::Device;
use shared::sandbox::{Confinement, SandboxMode, Support};
use tracing::{info, warn};

use super::TreeDriver;
use crate::cache_folder;
use crate::tree::ChildId;

impl TreeDriver<'_> {
    /// Says once what children are held to, and makes the folders that they write to.
    ///
    /// # Errors
    /// One sentence when the sandbox is required and the kernel has none, or when others can write to the
    /// cache folder.
    pub(super) fn prepare_confinement(&self) -> Result<(), String> {
        let (mode, support) = (self.config.sandbox, Support::of_this_kernel());
        match (mode, support.check()) {
            (SandboxMode::Off, _) => warn!("children are not confined (--sandbox off)"),
            (SandboxMode::Require, Err(error)) => {
                return Err(format!("--sandbox require: {error}"));
            }
            (SandboxMode::On, Err(error)) => warn!(confined = %support, "{error}"),
            (_, Ok(())) => info!(confined = %support, "children are confined"),
        }
        cache_folder::make(&self.config.prepare.cache_dir)?;
        let key = self.key_folder();
        let rates = self.config.netd.rates_dir.iter().chain(&self.config.worker.rates_dir);
        for folder in rates.chain([&self.config.prepare.cache_dir]).chain(&key) {
            if let Err(error) = std::fs::create_dir_all(folder) {
                warn!(folder = %folder.display(), %error, "cannot make a folder");
            }
        }
        Ok(())
    }

    /// How children are held, for `sepal status`.
    pub(super) fn confined(&self) -> String {
        match self.config.sandbox {
            SandboxMode::Off => "off".to_owned(),
            SandboxMode::On | SandboxMode::Require => Support::of_this_kernel().to_string(),
        }
    }

    /// What a child may touch.
    pub(super) fn confinement(&self, id: ChildId) -> Confinement {
        let mode = self.config.sandbox;
        let cache = self.config.prepare.cache_dir.clone();
        let has_driver = |device: &Device| !device.is_processor();
        match id {
            ChildId::Prepare => Confinement {
                mode,
                readable: Vec::new(),
                writable: vec![cache, self.instance.folder()],
                has_driver: self.config.devices.iter().any(has_driver),
            },
            ChildId::Netd => {
                // netd writes in its own folder, so a name there grants nothing: it may be a link.
                let key = self.config.netd.identity_path.clone();
                let key = key.filter(|path| path.exists() && self.key_folder().is_none());
                let rates = self.config.netd.rates_dir.clone();
                Confinement {
                    mode,
                    readable: key.into_iter().collect(),
                    writable: rates.into_iter().chain(self.key_folder()).collect(),
                    has_driver: false,
                }
            }
            ChildId::Worker(worker) => {
                let placed = self.tree.placed(worker);
                Confinement {
                    mode,
                    // Weights come as descriptors.
                    readable: Vec::new(),
                    writable: self.config.worker.rates_dir.clone().into_iter().collect(),
                    has_driver: placed.is_some_and(|(device, _)| has_driver(&device)),
                }
            }
        }
    }

    /// Where netd makes its key when nobody has named one.
    fn key_folder(&self) -> Option<PathBuf> {
        let path = self.config.netd.identity_path.as_deref()?;
        path.parent().filter(|folder| folder.starts_with(self.instance.folder())).map(Into::into)
    }
}
