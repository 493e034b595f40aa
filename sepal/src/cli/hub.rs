//! Variables of the library of the Hugging Face Hub that mean here what flags mean.

use std::path::{Path, PathBuf};

use shared::config::{HubConfig, Secret};

use super::Env;

/// Longest accepted token file; a token has some forty characters.
const MAX_TOKEN_BYTES: u64 = 4096;

/// Fills in what the variables of the Hub's own library say (`huggingface_hub`, `constants.py`, names them).
///
/// # Errors
/// A sentence, when a saved token is asked for and there is none.
pub fn complete(hub: &mut HubConfig, env: Env<'_>) -> Result<(), String> {
    let given = |name: &str| env.get(name).filter(|text| !text.is_empty());
    hub.endpoint = given("HF_ENDPOINT");
    hub.token = token(hub.token.take(), hub.use_auth_token, env)?;
    hub.offline |= given("HF_HUB_OFFLINE").is_some_and(|text| is_on(&text));
    Ok(())
}

/// The token given, else that of the environment, else the saved one.
fn token(given: Option<Secret>, insist: bool, env: Env<'_>) -> Result<Option<Secret>, String> {
    let variable = |name: &str| {
        env.get(name).map(|text| text.trim().to_owned()).filter(|text| !text.is_empty())
    };
    let direct = match insist {
        true => None,
        false => given.or_else(|| variable("HF_TOKEN").map(Secret::new)),
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
        saved => Ok(saved.map(Secret::new)),
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
