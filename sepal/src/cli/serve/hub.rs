//! Flags of `serve` about the Hugging Face Hub, and the variables of its own library that mean the
//! same here.

use std::path::{Path, PathBuf};

use clap::Args;
use shared::config::{HubConfig, Secret};

use crate::cli::Env;
use crate::cli::values::size_bytes;

/// Longest accepted token file; a token has some forty characters.
const MAX_TOKEN_BYTES: u64 = 4096;

/// Longest accepted revision.
const MAX_REVISION_BYTES: usize = 200;

#[derive(Debug, Args)]
#[command(rename_all = "snake_case", next_help_heading = "Hugging Face Hub")]
pub struct HubArgs {
    /// Access token of the Hub for gated models [env: HF_TOKEN] [default: the token saved by
    /// huggingface-cli login]
    #[arg(long, value_name = "TOKEN", conflicts_with = "use_auth_token")]
    token: Option<String>,
    /// Use the token that `huggingface-cli login` saved, and fail if there is none
    #[arg(long)]
    use_auth_token: bool,
    /// Branch, tag or commit of the model [default: main]
    #[arg(long, value_name = "REVISION")]
    revision: Option<String>,
    /// Maximum disk space for downloads and prepared blocks, such as 300GB or 100GiB; the least
    /// recently used blocks are evicted first [default: the whole disk]
    #[arg(long, value_name = "SIZE", value_parser = size_bytes)]
    max_disk_space: Option<u64>,
    /// Download nothing; use files from earlier downloads [env: HF_HUB_OFFLINE]
    #[arg(long)]
    offline: bool,
    /// Accept an address of the Hub in HF_ENDPOINT that is not encrypted (http://) on other machines than
    /// this one; whoever is on the way can then change what is downloaded
    #[arg(long)]
    allow_plain_http: bool,
}

impl HubArgs {
    /// How to download (`huggingface_hub`, `constants.py`, names the variables).
    pub fn resolve(self, env: Env<'_>) -> Result<HubConfig, String> {
        let given = |name: &str| env.get(name).filter(|text| !text.is_empty());
        let on = |name| given(name).is_some_and(|text| is_on(&text));
        Ok(HubConfig {
            endpoint: given("HF_ENDPOINT"),
            is_plain_http_allowed: self.allow_plain_http,
            token: token(self.token, self.use_auth_token, env)?.map(Secret::new),
            revision: self.revision.map(checked_revision).transpose()?,
            offline: self.offline || on("HF_HUB_OFFLINE"),
            max_disk_bytes: self.max_disk_space,
        })
    }
}

/// The token given, else that of the environment, else the saved one.
fn token(given: Option<String>, insist: bool, env: Env<'_>) -> Result<Option<String>, String> {
    let variable = |name: &str| {
        env.get(name).map(|text| text.trim().to_owned()).filter(|text| !text.is_empty())
    };
    let direct = match insist {
        true => None,
        false => given.or_else(|| variable("HF_TOKEN")),
    };
    if direct.is_some() {
        return Ok(direct);
    }
    let home = || {
        variable("HF_HOME")
            .map(PathBuf::from)
            .or_else(|| Some(PathBuf::from(variable("HOME")?).join(".cache/huggingface")))
    };
    let path = variable("HF_TOKEN_PATH").map(PathBuf::from).or_else(|| Some(home()?.join("token")));
    match path.as_deref().and_then(saved_token) {
        None if insist => Err(format!(
            "--use_auth_token: no token in {}; run huggingface-cli login or give --token",
            path.unwrap_or_default().display()
        )),
        saved => Ok(saved),
    }
}

fn saved_token(path: &Path) -> Option<String> {
    let known =
        std::fs::metadata(path).is_ok_and(|stat| stat.is_file() && stat.len() <= MAX_TOKEN_BYTES);
    let text = known.then(|| std::fs::read_to_string(path).ok()).flatten()?;
    Some(text.trim().to_owned()).filter(|token| !token.is_empty())
}

fn is_on(text: &str) -> bool {
    ["1", "on", "yes", "true"].contains(&text.to_lowercase().as_str())
}

/// A revision that is safe in a path and an address.
pub fn checked_revision(text: String) -> Result<String, String> {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./".contains(c);
    let safe = !text.is_empty() && text.len() <= MAX_REVISION_BYTES && text.chars().all(plain);
    let inside = !text.starts_with(['/', '-', '.']) && !text.ends_with('/') && !text.contains("..");
    match safe && inside {
        true => Ok(text),
        false => Err(format!(
            "invalid --revision {text:?}: expected a branch, tag or commit such as main"
        )),
    }
}
