//! `sepal gateway`: OpenAI's API over models of a swarm. `sepal chat`: a conversation with one of them.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use shared::config::{
    ChatConfig, FetchConfig, GatewayConfig, GatewayModel, LogConfig, SamplingConfig, Secret,
    ShownServer,
};
use shared::sandbox::SandboxMode;

use super::Env;
use super::local::{FetchArgs, LocalArgs, OneModelArgs};
use super::log::{DEFAULT_LOG, LogArgs, QUIET_LOG};
use super::values::{check_maddrs, is_maddr, metrics_addr, pause, seconds, size_bytes};

const PROTECTION: &str = "Protection";

#[derive(Debug, Args)]
#[command(rename_all = "snake_case")]
pub struct GatewayArgs {
    /// Model folders in Hugging Face layout, each with tokenizer.json, embeddings and head, or models of the Hub, of
    /// which just these are downloaded; MODEL, whose last part is the name in the API, or NAME=MODEL
    #[arg(value_name = "MODEL")]
    models: Vec<String>,
    /// Peers of the swarm
    #[arg(long, num_args = 1.., value_name = "MULTIADDR")]
    initial_peers: Vec<String>,
    /// A peer of the swarm of one model, in place of --initial_peers; may be given several times
    #[arg(long, value_name = "NAME=MULTIADDR")]
    peer_of: Vec<String>,
    /// Prefix under which the servers announce a model, in place of that in its folder; for one of several
    /// models, NAME=PREFIX
    #[arg(long, value_name = "PREFIX")]
    dht_prefix: Vec<String>,
    /// Where to answer: a port of this machine, or an address with a port
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:8080", value_parser = metrics_addr)]
    listen: SocketAddr,
    #[command(flatten)]
    local: LocalArgs,
    #[command(flatten)]
    fetch: FetchArgs,
    /// Folder of a small model of the same family that guesses next tokens on this machine; for one of several
    /// models, NAME=FOLDER
    #[arg(long, value_name = "FOLDER")]
    draft: Vec<String>,
    /// Chat template (Jinja) in place of those of the models
    #[arg(long, value_name = "FILE")]
    chat_template: Option<PathBuf>,
    /// Maximum number of tokens of a text whose request names none
    #[arg(long, value_name = "N", default_value_t = 1024, value_parser = clap::value_parser!(u32).range(1..))]
    max_tokens: u32,
    /// Sessions of each model that stay open after their text, so that a conversation sends its new tokens only
    #[arg(long, value_name = "N", default_value_t = 16)]
    sessions_kept: usize,
    /// How long such a session stays open without use, in seconds
    #[arg(long, value_name = "SECONDS", default_value = "120", value_parser = pause)]
    session_idle: Duration,
    /// File of API keys, one a line, at least 16 characters each; lines that begin with # do not count
    /// [default: everybody may call]
    #[arg(long, value_name = "FILE", help_heading = PROTECTION)]
    api_keys: Option<PathBuf>,
    /// Certificate chain (PEM) for HTTPS
    #[arg(long, value_name = "FILE", requires = "tls_key", help_heading = PROTECTION)]
    tls_cert: Option<PathBuf>,
    /// Key of the certificate (PEM)
    #[arg(long, value_name = "FILE", requires = "tls_cert", help_heading = PROTECTION)]
    tls_key: Option<PathBuf>,
    /// Origin of web pages that may call the API, such as https://chat.example.org; * for all
    #[arg(long, value_name = "ORIGIN", help_heading = PROTECTION)]
    cors_origin: Vec<String>,
    /// Texts under way at once; more are refused
    #[arg(long, value_name = "N", default_value_t = 512, value_parser = clap::value_parser!(u32).range(1..=65536), help_heading = PROTECTION)]
    max_streams: u32,
    /// Requests of one caller (API key, else IP address) in a minute [default: no limit]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..), help_heading = PROTECTION)]
    requests_per_minute: Option<u32>,
    /// Largest request
    #[arg(long, value_name = "BYTES", default_value = "8MiB", value_parser = size_bytes, help_heading = PROTECTION)]
    max_body: u64,
    /// How long a request waits for servers of all blocks, in seconds
    #[arg(long, value_name = "SECONDS", default_value = "5", value_parser = seconds)]
    route_timeout: Duration,
    /// Timeout for reaching the swarm, in seconds
    #[arg(long, value_name = "SECONDS", default_value = "60", value_parser = seconds)]
    startup_timeout: Duration,
    /// Supervisor of the server whose page this is
    #[arg(long, value_name = "PID", hide = true, requires = "num_blocks")]
    of_server: Option<u32>,
    /// Descriptor from which the token of the Hub is read
    #[arg(long, value_name = "FD", hide = true, requires = "of_server")]
    token_fd: Option<i32>,
    /// Blocks of its model
    #[arg(long, value_name = "N", hide = true)]
    num_blocks: Option<u32>,
    /// Whether its process is confined
    #[arg(long, value_name = "MODE", default_value = "on", hide = true)]
    sandbox: SandboxMode,
    #[command(flatten)]
    log: LogArgs,
}

/// Turns flags into settings.
pub fn resolve(
    mut args: GatewayArgs,
    env: Env<'_>,
) -> Result<(GatewayConfig, FetchConfig, LogConfig), String> {
    let mut fetch = args.fetch.resolve(env)?;
    if let Some(fd) = args.token_fd {
        let token = supervisor::spawn::take_secret(fd);
        fetch.hub.token = Some(Secret::new(
            token.map_err(|error| format!("cannot read --token_fd {fd}: {error}"))?,
        ));
    }
    // `--initial_peers A B MODEL` takes the models along.
    let first = args.initial_peers.iter().position(|text| !is_maddr(text));
    let first = first.filter(|first| *first > 0).unwrap_or(args.initial_peers.len());
    args.models.extend(args.initial_peers.split_off(first));
    check_maddrs("--initial_peers", &args.initial_peers)?;
    let mut models: Vec<GatewayModel> = Vec::new();
    for text in &args.models {
        let model = model(text)?;
        if models.iter().any(|other| other.name == model.name) {
            let name = &model.name;
            return Err(format!(
                "two models are called {name:?}; give one another name: NAME=FOLDER"
            ));
        }
        models.push(model);
    }
    if models.is_empty() {
        return Err(
            "no model given: name a folder or a model of the Hub, as in sepal gateway MODEL"
                .to_owned(),
        );
    }
    each_named(&mut models, "--dht_prefix", &args.dht_prefix, |model, prefix| {
        model.dht_prefix = Some(prefix.to_owned());
    })?;
    each_named(&mut models, "--draft", &args.draft, |model, folder| {
        model.draft = Some(folder.into());
    })?;
    give_peers(&mut models, &args.peer_of, !args.initial_peers.is_empty())?;
    let config = GatewayConfig {
        models,
        initial_peers: args.initial_peers,
        listen: args.listen,
        local: args.local.resolve()?,
        chat_template: args.chat_template,
        api_keys: args.api_keys,
        tls: args.tls_cert.zip(args.tls_key),
        cors_origins: args.cors_origin,
        max_streams: args.max_streams as usize,
        requests_per_minute: args.requests_per_minute,
        max_body_bytes: usize::try_from(args.max_body).unwrap_or(usize::MAX),
        default_max_tokens: args.max_tokens,
        sessions_kept: args.sessions_kept,
        session_idle: args.session_idle,
        route_timeout: args.route_timeout,
        startup_timeout: args.startup_timeout,
        server: args.of_server.zip(args.num_blocks).map(|(pid, num_blocks)| ShownServer {
            pid,
            num_blocks,
            sandbox: args.sandbox,
        }),
    };
    Ok((config, fetch, args.log.resolve(env, DEFAULT_LOG)))
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
        check_maddrs("--peer_of", &[peer.to_owned()])?;
        named(models, "--peer_of", name)?.initial_peers.push(peer.to_owned());
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

#[derive(Debug, Args)]
#[command(rename_all = "snake_case")]
pub struct ChatArgs {
    /// Model folder in Hugging Face layout, with tokenizer.json, embeddings, head and chat template, or a model of
    /// the Hub, of which just these are downloaded; required
    model: Option<String>,
    #[command(flatten)]
    of: OneModelArgs,
    /// Chat template (Jinja) in place of that of the model
    #[arg(long, value_name = "FILE")]
    chat_template: Option<PathBuf>,
    /// What the assistant is told first
    #[arg(long, value_name = "TEXT")]
    system: Option<String>,
    /// Maximum number of tokens of an answer
    #[arg(long, value_name = "N", default_value_t = 1024, value_parser = clap::value_parser!(u32).range(1..))]
    max_tokens: u32,
    /// Sample tokens at this temperature; 0 takes the most probable one
    #[arg(long, value_name = "T", default_value_t = 0.7)]
    temperature: f32,
    /// Sample from the most probable tokens whose probabilities sum to P
    #[arg(long, value_name = "P", default_value_t = 0.9)]
    top_p: f32,
    /// Seed of the sampling; the same seed gives the same answers
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
    #[command(flatten)]
    log: LogArgs,
}

/// Turns flags into settings of a conversation.
pub fn resolve_chat(
    args: ChatArgs,
    env: Env<'_>,
) -> Result<(ChatConfig, FetchConfig, LogConfig), String> {
    let of = args.of.resolve(args.model, "chat", env)?;
    if args.temperature.is_nan() || args.temperature < 0.0 {
        let given = args.temperature;
        return Err(format!("invalid --temperature {given}: expected 0 or a positive number"));
    }
    let model = GatewayModel { dht_prefix: of.dht_prefix, draft: of.draft, ..model(&of.model)? };
    let engine = GatewayConfig {
        models: vec![model],
        initial_peers: of.initial_peers,
        listen: SocketAddr::from(([127, 0, 0, 1], 0)),
        local: of.local,
        chat_template: args.chat_template,
        api_keys: None,
        tls: None,
        cors_origins: Vec::new(),
        max_streams: 1,
        requests_per_minute: None,
        max_body_bytes: 0,
        default_max_tokens: args.max_tokens,
        sessions_kept: 1,
        session_idle: Duration::from_secs(240),
        route_timeout: of.startup_timeout,
        startup_timeout: of.startup_timeout,
        server: None,
    };
    let sampling = SamplingConfig {
        temperature: (args.temperature > 0.0).then_some(args.temperature),
        top_p: Some(args.top_p),
        seed: args.seed,
        ..SamplingConfig::default()
    };
    let config = ChatConfig { engine, system: args.system, sampling, history: history(env) };
    Ok((config, of.fetch, args.log.resolve(env, QUIET_LOG)))
}

/// `$XDG_STATE_HOME/sepal/chat_history`, by default in `~/.local/state`.
fn history(env: Env<'_>) -> Option<PathBuf> {
    let given = |name| env.get(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let state = given("XDG_STATE_HOME").or_else(|| Some(given("HOME")?.join(".local/state")));
    state.map(|state| state.join("sepal").join("chat_history"))
}

fn model(text: &str) -> Result<GatewayModel, String> {
    let (name, folder) = match text.split_once('=') {
        Some((name, folder)) => (Some(name.to_owned()), folder),
        None => {
            let last = Path::new(text).file_name();
            (last.map(|name| name.to_string_lossy().into_owned()), text)
        }
    };
    let name = name.filter(|name| !name.is_empty() && !folder.is_empty());
    let name =
        name.ok_or_else(|| format!("invalid model {text:?}: expected FOLDER or NAME=FOLDER"))?;
    Ok(GatewayModel {
        name,
        folder: folder.into(),
        dht_prefix: None,
        initial_peers: Vec::new(),
        draft: None,
    })
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

#[cfg(test)]
mod tests {
    use clap::Parser;
    use shared::config::QuantType;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: GatewayArgs,
    }

    fn parse(line: &str) -> Result<GatewayConfig, String> {
        let words = std::iter::once("gateway").chain(line.split_whitespace());
        let line = Line::try_parse_from(words).map_err(|error| error.to_string())?;
        resolve(line.args, Env::of_machine(&|_| None)).map(|(config, ..)| config)
    }

    const PEER: &str = "/ip4/127.0.0.1/tcp/31337/p2p/A";

    #[test]
    fn models_have_names_prefixes_and_swarms_of_their_own() {
        let line = format!(
            "/models/llama b=/models/bloom --dht_prefix b=bloom-hf --peer_of b={PEER} --initial_peers {PEER}"
        );
        let config = parse(&line).unwrap();
        let names: Vec<&str> = config.models.iter().map(|model| model.name.as_str()).collect();
        assert_eq!(names, ["llama", "b"]);
        assert_eq!(config.models[1].folder, Path::new("/models/bloom"));
        assert_eq!(config.models[1].dht_prefix.as_deref(), Some("bloom-hf"));
        assert_eq!(config.models[1].initial_peers, [PEER]);
        assert!(config.models[0].initial_peers.is_empty());
        let config =
            parse(&format!("--initial_peers {PEER} /models/llama --dht_prefix p")).unwrap();
        assert_eq!(config.models[0].dht_prefix.as_deref(), Some("p"));
        assert_eq!(config.listen.to_string(), "127.0.0.1:8080");
        let config = parse(&format!(
            "a=/m/a b=/m/b --draft b=/m/tiny --head_quant_type nf4 --initial_peers {PEER}"
        ));
        let config = config.unwrap();
        let drafts: Vec<_> = config.models.iter().map(|model| model.draft.as_deref()).collect();
        assert_eq!(drafts, [None, Some(Path::new("/m/tiny"))]);
        assert_eq!(config.local.head, QuantType::Nf4);
    }

    #[test]
    fn the_page_of_a_server_reads_the_token_of_the_hub_from_a_pipe() {
        use std::os::fd::IntoRawFd;
        let resolved = |fd: i32| {
            let line = format!(
                "gateway m --of_server 1 --num_blocks 2 --token_fd {fd} --initial_peers {PEER}"
            );
            let line = Line::try_parse_from(line.split_whitespace()).unwrap();
            let variables = |name: &str| (name == "HF_TOKEN").then(|| "other".to_owned());
            resolve(line.args, Env::of_machine(&variables))
        };
        let fd = supervisor::spawn::pass_secret("hf_secret").unwrap().into_raw_fd();
        let token = resolved(fd).unwrap().1.hub.token.unwrap();
        assert_eq!(token.reveal(), "hf_secret");
        assert!(resolved(2).unwrap_err().contains("--token_fd 2"), "a standard one");
        assert!(supervisor::spawn::pass_secret(&"x".repeat(5000)).is_err());
    }

    #[test]
    fn what_cannot_be_meant_is_refused_with_what_to_do() {
        for (line, part) in [
            (format!("--initial_peers {PEER}"), "no model given"),
            ("m".to_owned(), "no peers for \"m\""),
            (format!("m x/m --initial_peers {PEER}"), "two models"),
            (format!("m n --dht_prefix p --initial_peers {PEER}"), "NAME=VALUE"),
            (format!("m n --draft d --initial_peers {PEER}"), "NAME=VALUE"),
            (format!("m --head_quant_type int3 --initial_peers {PEER}"), "--head_quant_type int3"),
            (format!("m --peer_of x={PEER} --initial_peers {PEER}"), "the models are m"),
            (format!("=m --initial_peers {PEER}"), "NAME=FOLDER"),
            (format!("m --tls_cert c --initial_peers {PEER}"), "--tls_key"),
            (format!("m --listen nowhere --initial_peers {PEER}"), "a port such as"),
        ] {
            let error = parse(&line).unwrap_err();
            assert!(error.contains(part), "{line}: {error}");
        }
    }
}
