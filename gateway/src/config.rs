//! Settings of `sepal gateway` and of the engine that `sepal chat` has in common with it: their flags.

use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use clap::Args;
use clap::builder::RangedU64ValueParser;
use client::config::LocalConfig;
use ipnet::IpNet;
use shared::config::values::{maddr, metrics_addr, pause, seconds, size_bytes};
use shared::sandbox::SandboxMode;

const PROTECTION: &str = "Protection";

/// Settings of `sepal gateway`.
#[derive(Clone, Debug, PartialEq, Args)]
#[command(rename_all = "snake_case")]
pub struct GatewayConfig {
    #[command(flatten)]
    pub engine: EngineConfig,
    #[command(flatten)]
    named: NamedArgs,
    /// Where to answer: a port of this machine, or an address with a port
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:8080", value_parser = metrics_addr)]
    pub listen: SocketAddr,
    /// Maximum number of tokens of a text whose request names none
    #[arg(id = "max_tokens", long = "max_tokens", value_name = "N", default_value_t = 1024, value_parser = clap::value_parser!(u32).range(1..))]
    pub default_max_tokens: u32,
    /// File of API keys, one a line, at least 16 characters each; lines that begin with # do not count
    /// [default: everybody may call]
    #[arg(long, value_name = "FILE", help_heading = PROTECTION)]
    pub api_keys: Option<PathBuf>,
    /// Certificate chain (PEM) for HTTPS
    #[arg(long, value_name = "FILE", requires = "tls_key", help_heading = PROTECTION)]
    pub tls_cert: Option<PathBuf>,
    /// Key of the certificate (PEM)
    #[arg(long, value_name = "FILE", requires = "tls_cert", help_heading = PROTECTION)]
    pub tls_key: Option<PathBuf>,
    /// Origin of web pages that may call the API, such as https://chat.example.org; * for all
    #[allow(rustdoc::bare_urls)]
    #[arg(id = "cors_origin", long = "cors_origin", value_name = "ORIGIN", value_parser = origin, help_heading = PROTECTION)]
    pub cors_origins: Vec<String>,
    /// Requests of one caller (API key, else IP address) in a minute [default: no limit]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..), help_heading = PROTECTION)]
    pub requests_per_minute: Option<u32>,
    /// Tokens of one caller (API key, else IP address) in a minute, of prompts and answers [default: no limit]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..), help_heading = PROTECTION)]
    pub tokens_per_minute: Option<u32>,
    /// Proxy, or net of proxies, whose X-Forwarded-For names the caller, such as 127.0.0.1 or 10.0.0.0/8; may be
    /// given several times [default: none is believed]
    #[arg(id = "trusted_proxy", long = "trusted_proxy", value_name = "ADDR", value_parser = net, help_heading = PROTECTION)]
    pub trusted_proxies: Vec<IpNet>,
    /// Largest request
    #[arg(id = "max_body", long = "max_body", value_name = "BYTES", default_value = "8MiB", value_parser = body_bytes, help_heading = PROTECTION)]
    pub max_body_bytes: usize,
    #[command(flatten)]
    page: PageArgs,
}

/// What the models are computed with.
#[derive(Clone, Debug, PartialEq, Args)]
#[command(rename_all = "snake_case")]
pub struct EngineConfig {
    /// Model folders in Hugging Face layout, each with tokenizer.json, embeddings and head, or models of the Hub, of
    /// which just these are downloaded; MODEL, whose last part is the name in the API, or NAME=MODEL
    #[arg(value_name = "MODEL")]
    pub models: Vec<GatewayModel>,
    /// Peers of the swarm
    #[arg(long, num_args = 1.., value_name = "MULTIADDR", value_parser = maddr)]
    pub initial_peers: Vec<String>,
    #[command(flatten)]
    pub local: LocalConfig,
    /// Chat template (Jinja) in place of those of the models
    #[arg(long, value_name = "FILE")]
    pub chat_template: Option<PathBuf>,
    /// Sessions of each model that stay open after their text, so that a conversation sends its new tokens only
    #[arg(long, value_name = "N", default_value_t = 16)]
    pub sessions_kept: usize,
    /// How long such a session stays open without use, in seconds
    #[arg(long, value_name = "SECONDS", default_value = "120", value_parser = pause)]
    pub session_idle: Duration,
    /// Texts under way at once; more are refused
    #[arg(long, value_name = "N", default_value_t = 512, value_parser = RangedU64ValueParser::<usize>::new().range(1..=65536), help_heading = PROTECTION)]
    pub max_streams: usize,
    /// How long a request waits for servers of all blocks, in seconds
    #[arg(long, value_name = "SECONDS", default_value = "5", value_parser = seconds)]
    pub route_timeout: Duration,
    /// Timeout for reaching the swarm, in seconds
    #[arg(long, value_name = "SECONDS", default_value = "60", value_parser = seconds)]
    pub startup_timeout: Duration,
    /// The server of this machine whose page this is; `None` for a gateway of its own.
    #[arg(skip)]
    pub server: Option<ShownServer>,
}

/// What is given for one of the models.
#[derive(Clone, Debug, PartialEq, Args)]
#[command(rename_all = "snake_case")]
struct NamedArgs {
    /// A peer of the swarm of one model, in place of --initial_peers; may be given several times
    #[arg(long, value_name = "NAME=MULTIADDR")]
    peer_of: Vec<String>,
    /// Prefix under which the servers announce a model, in place of that in its folder; for one of several
    /// models, NAME=PREFIX
    #[arg(long, value_name = "PREFIX")]
    dht_prefix: Vec<String>,
    /// Folder of a small model of the same family that guesses next tokens on this machine; for one of several
    /// models, NAME=FOLDER
    #[arg(long, value_name = "FOLDER")]
    draft: Vec<String>,
}

/// What a supervisor says of the server whose page this is.
#[derive(Clone, Copy, Debug, PartialEq, Args)]
#[command(rename_all = "snake_case")]
struct PageArgs {
    /// Supervisor of the server whose page this is
    #[arg(long, value_name = "PID", hide = true, requires = "num_blocks")]
    of_server: Option<u32>,
    /// Blocks of its model
    #[arg(long, value_name = "N", hide = true)]
    num_blocks: Option<u32>,
    /// Whether its process is confined
    #[arg(long, value_name = "MODE", default_value = "on", hide = true)]
    sandbox: SandboxMode,
}

/// A server that has the page of its swarm shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShownServer {
    /// Its supervisor, whose end is the end of the page.
    pub pid: u32,
    /// Blocks of the model.
    pub num_blocks: u32,
    /// Whether the process of the page is confined.
    pub sandbox: SandboxMode,
}

/// A model that a gateway offers.
#[derive(Clone, Debug, PartialEq)]
pub struct GatewayModel {
    /// Its name in the API.
    pub name: String,
    /// Folder in Hugging Face layout.
    pub folder: PathBuf,
    /// Prefix of the module uids; `None` = the folder's.
    pub dht_prefix: Option<String>,
    /// Peers of its swarm; none = those of the gateway.
    pub initial_peers: Vec<String>,
    /// Folder of a small model that guesses for it.
    pub draft: Option<PathBuf>,
}

impl FromStr for GatewayModel {
    type Err = String;

    /// `FOLDER`, whose last part is the name, or `NAME=FOLDER`.
    fn from_str(text: &str) -> Result<GatewayModel, String> {
        let (name, folder) = match text.split_once('=') {
            Some((name, folder)) => (Some(name.to_owned()), folder),
            None => {
                let last = Path::new(text).file_name();
                (last.map(|name| name.to_string_lossy().into_owned()), text)
            }
        };
        let name = name.filter(|name| !name.is_empty() && !folder.is_empty());
        Ok(GatewayModel {
            name: name.ok_or("expected FOLDER or NAME=FOLDER")?,
            folder: folder.into(),
            dht_prefix: None,
            initial_peers: Vec::new(),
            draft: None,
        })
    }
}

/// An origin as browsers write it: without a slash at its end, in lower case.
fn origin(text: &str) -> Result<String, String> {
    let origin = text.trim_end_matches('/').to_ascii_lowercase();
    let is_host = |host: &str| {
        !host.is_empty() && host.chars().all(|c| c.is_ascii_graphic() && !"/?#@*".contains(c))
    };
    match origin.split_once("://") {
        Some((scheme, host)) if !scheme.is_empty() && is_host(host) => Ok(origin),
        None if origin == "*" || origin == "null" => Ok(origin),
        _ => Err("expected an origin such as https://chat.example.org, or * for all".to_owned()),
    }
}

/// A net, or one address.
fn net(text: &str) -> Result<IpNet, String> {
    let one = || text.parse().ok().map(|ip: IpAddr| IpNet::from(ip.to_canonical()));
    text.parse().ok().or_else(one).ok_or_else(|| {
        "expected an IP address such as 127.0.0.1, or a net such as 10.0.0.0/8".to_owned()
    })
}

fn body_bytes(text: &str) -> Result<usize, String> {
    size_bytes(text).map(|bytes| usize::try_from(bytes).unwrap_or(usize::MAX))
}

impl GatewayConfig {
    /// Gives each model what was given under its name, and the page its server.
    ///
    /// # Errors
    /// A sentence, for models that lack something and for names of no model.
    pub fn complete(&mut self) -> Result<(), String> {
        let EngineConfig { models, initial_peers, server, .. } = &mut self.engine;
        for (index, model) in models.iter().enumerate() {
            if models[..index].iter().any(|other| other.name == model.name) {
                let name = &model.name;
                return Err(format!(
                    "two models are called {name:?}; give one another name: NAME=FOLDER"
                ));
            }
        }
        if models.is_empty() {
            return Err(
                "no model given: name a folder or a model of the Hub, as in sepal gateway MODEL"
                    .to_owned(),
            );
        }
        each_named(models, "--dht_prefix", &self.named.dht_prefix, |model, prefix| {
            model.dht_prefix = Some(prefix.to_owned());
        })?;
        each_named(models, "--draft", &self.named.draft, |model, folder| {
            model.draft = Some(folder.into());
        })?;
        give_peers(models, &self.named.peer_of, !initial_peers.is_empty())?;
        let PageArgs { of_server, num_blocks, sandbox } = self.page;
        *server = of_server.zip(num_blocks).map(|(pid, num_blocks)| ShownServer {
            pid,
            num_blocks,
            sandbox,
        });
        Ok(())
    }

    /// Certificate chain and key; `None` speaks plain HTTP.
    pub fn tls(&self) -> Option<(&Path, &Path)> {
        self.tls_cert.as_deref().zip(self.tls_key.as_deref())
    }
}

/// Gives each model that `values` name (`NAME=VALUE`, or `VALUE` of the only one) its value.
fn each_named(
    models: &mut [GatewayModel],
    flag: &str,
    values: &[String],
    give: impl Fn(&mut GatewayModel, &str),
) -> Result<(), String> {
    for text in values {
        match (text.split_once('='), &mut *models) {
            (Some((name, value)), _) => give(named(models, flag, name)?, value),
            (None, [only]) => give(only, text),
            (None, _) => {
                return Err(format!("invalid {flag} {text:?}: with several models, NAME=VALUE"));
            }
        }
    }
    Ok(())
}

/// Gives each model that `peers` name (`NAME=MULTIADDR`) a peer; each has one unless all
/// `have_common` ones.
fn give_peers(
    models: &mut [GatewayModel],
    peers: &[String],
    have_common: bool,
) -> Result<(), String> {
    for text in peers {
        let (name, peer) = text
            .split_once('=')
            .ok_or_else(|| format!("invalid --peer_of {text:?}: expected NAME=MULTIADDR"))?;
        let peer = maddr(peer).map_err(|why| format!("invalid --peer_of {peer:?}: {why}"))?;
        named(models, "--peer_of", name)?.initial_peers.push(peer);
    }
    if let Some(alone) = models.iter().find(|model| model.initial_peers.is_empty())
        && !have_common
    {
        let name = &alone.name;
        return Err(format!(
            "no peers for {name:?}: give --initial_peers, or --peer_of {name}=MULTIADDR"
        ));
    }
    Ok(())
}

fn named<'a>(
    models: &'a mut [GatewayModel],
    flag: &str,
    name: &str,
) -> Result<&'a mut GatewayModel, String> {
    let known: Vec<String> = models.iter().map(|model| model.name.clone()).collect();
    let found = models.iter_mut().find(|model| model.name == name);
    found.ok_or_else(|| format!("invalid {flag} {name:?}: the models are {}", known.join(", ")))
}
