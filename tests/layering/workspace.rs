//! The manifests of the workspace, read through `cargo metadata --no-deps`, which needs no network
//! and builds nothing.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::process::Command;

use serde_json::Value;

use super::source::root;

/// What `cargo metadata` says of the workspace.
pub struct Workspace {
    pub packages: Vec<Package>,
    pub members: BTreeSet<String>,
    pub default_members: BTreeSet<String>,
}

/// A package of the workspace.
pub struct Package {
    pub name: String,
    pub manifest: PathBuf,
    pub dependencies: Vec<Dependency>,
    /// First source files of its library and its executables.
    pub roots: Vec<PathBuf>,
}

/// A dependency of a package.
pub struct Dependency {
    pub name: String,
    /// `normal`, `dev` or `build`.
    pub kind: String,
}

impl Workspace {
    /// Asks cargo, without the network.
    pub fn read() -> Self {
        let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
        let output = Command::new(cargo)
            .args(["metadata", "--no-deps", "--offline", "--format-version", "1"])
            .current_dir(root())
            .output()
            .expect("cargo starts");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let metadata: Value = serde_json::from_slice(&output.stdout).expect("cargo writes JSON");
        Self {
            packages: list(&metadata["packages"]).iter().map(Package::parse).collect(),
            members: list(&metadata["workspace_members"]).iter().map(text).collect(),
            default_members: list(&metadata["workspace_default_members"])
                .iter()
                .map(text)
                .collect(),
        }
    }
}

impl Package {
    fn parse(value: &Value) -> Self {
        let dependency = |d: &Value| Dependency {
            name: text(&d["name"]),
            kind: d["kind"].as_str().unwrap_or("normal").to_owned(),
        };
        let is_root = |target: &&Value| {
            list(&target["kind"]).iter().any(|kind| ["lib", "bin"].contains(&text(kind).as_str()))
        };
        Self {
            name: text(&value["name"]),
            manifest: text(&value["manifest_path"]).into(),
            dependencies: list(&value["dependencies"]).iter().map(dependency).collect(),
            roots: list(&value["targets"])
                .iter()
                .filter(is_root)
                .map(|target| text(&target["src_path"]).into())
                .collect(),
        }
    }
}

fn list(value: &Value) -> &[Value] {
    value.as_array().map(Vec::as_slice).expect("cargo metadata has this list")
}

fn text(value: &Value) -> String {
    value.as_str().expect("cargo metadata has this text").to_owned()
}
