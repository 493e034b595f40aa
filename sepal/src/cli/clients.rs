//! `sepal generate`, `gateway` and `chat`: flags beside those of the crates that carry them out.

use std::path::PathBuf;

use clap::Args;
use client::generate::GenerateConfig;
use gateway::chat::ChatConfig;
use gateway::config::GatewayConfig;
use prepare::client_tensors::FetchConfig;
use shared::config::{LogConfig, Secret};

use super::log::{DEFAULT_LOG, LogArgs, QUIET_LOG};
use super::{Env, hub};

/// A command of a client that may download its part of a model.
#[derive(Debug, Args)]
pub struct ClientArgs<T: Args> {
    #[command(flatten)]
    config: T,
    #[command(flatten)]
    fetch: FetchConfig,
    #[command(flatten)]
    log: LogArgs,
}

/// What to run, how its part of the model comes, and how it logs.
type Resolved<T> = Result<(T, FetchConfig, LogConfig), String>;

/// Flags of `sepal gateway`.
#[derive(Debug, Args)]
#[command(rename_all = "snake_case")]
pub struct GatewayArgs {
    #[command(flatten)]
    of: ClientArgs<GatewayConfig>,
    /// Descriptor from which the token of the Hub is read
    #[arg(long, value_name = "FD", hide = true, requires = "of_server")]
    token_fd: Option<i32>,
}

/// Settings of `sepal generate`.
pub fn generate(args: ClientArgs<GenerateConfig>, env: Env<'_>) -> Resolved<GenerateConfig> {
    resolve(args, env, QUIET_LOG)
}

/// Settings of `sepal gateway`.
pub fn gateway(args: GatewayArgs, env: Env<'_>) -> Resolved<GatewayConfig> {
    let (mut config, mut fetch, log) = resolve(args.of, env, DEFAULT_LOG)?;
    if let Some(fd) = args.token_fd {
        let token = supervisor::spawn::take_secret(fd);
        fetch.hub.token = Some(Secret::new(
            token.map_err(|error| format!("cannot read --token_fd {fd}: {error}"))?,
        ));
    }
    config.complete()?;
    Ok((config, fetch, log))
}

/// Settings of `sepal chat`.
pub fn chat(args: ClientArgs<ChatConfig>, env: Env<'_>) -> Resolved<ChatConfig> {
    let (config, fetch, log) = resolve(args, env, QUIET_LOG)?;
    Ok((ChatConfig { history: history(env), ..config }, fetch, log))
}

fn resolve<T: Args>(args: ClientArgs<T>, env: Env<'_>, default_log: &str) -> Resolved<T> {
    let ClientArgs { config, mut fetch, log } = args;
    hub::complete(&mut fetch.hub, env)?;
    Ok((config, fetch, log.resolve(env, default_log)))
}

/// `$XDG_STATE_HOME/sepal/chat_history`, by default in `~/.local/state`.
fn history(env: Env<'_>) -> Option<PathBuf> {
    let given = |name| env.get(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let state = given("XDG_STATE_HOME").or_else(|| Some(given("HOME")?.join(".local/state")));
    state.map(|state| state.join("sepal").join("chat_history"))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use shared::config::QuantType;

    use super::*;
    use crate::cli::{Command, parse_in};

    fn run(line: &str, env: Env<'_>) -> Result<(GatewayConfig, FetchConfig), String> {
        let words = ["sepal", "gateway"].into_iter().chain(line.split_whitespace());
        match parse_in(Path::new(""), words.map(Into::into), env) {
            Ok(Command::Gateway(config, fetch, _)) => Ok((*config, fetch)),
            Ok(other) => panic!("{other:?}"),
            Err(error) => Err(error.to_string()),
        }
    }

    fn parse(line: &str) -> Result<GatewayConfig, String> {
        run(line, Env::of_machine(&|_| None)).map(|(config, _)| config)
    }

    const PEER: &str = "/ip4/127.0.0.1/tcp/31337/p2p/A";

    #[test]
    fn models_have_names_prefixes_and_swarms_of_their_own() {
        let line = format!(
            "/models/llama b=/models/bloom --dht_prefix b=bloom-hf --peer_of b={PEER} --initial_peers {PEER}"
        );
        let config = parse(&line).unwrap();
        let names: Vec<&str> =
            config.engine.models.iter().map(|model| model.name.as_str()).collect();
        assert_eq!(names, ["llama", "b"]);
        assert_eq!(config.engine.models[1].folder, Path::new("/models/bloom"));
        assert_eq!(config.engine.models[1].dht_prefix.as_deref(), Some("bloom-hf"));
        assert_eq!(config.engine.models[1].initial_peers, [PEER]);
        assert!(config.engine.models[0].initial_peers.is_empty());
        let config =
            parse(&format!("--initial_peers {PEER} /models/llama --dht_prefix p")).unwrap();
        assert_eq!(config.engine.models[0].dht_prefix.as_deref(), Some("p"));
        assert_eq!(config.listen.to_string(), "127.0.0.1:8080");
        let config = parse(&format!(
            "a=/m/a b=/m/b --draft b=/m/tiny --head_quant_type nf4 --initial_peers {PEER}"
        ));
        let config = config.unwrap();
        let drafts: Vec<_> =
            config.engine.models.iter().map(|model| model.draft.as_deref()).collect();
        assert_eq!(drafts, [None, Some(Path::new("/m/tiny"))]);
        assert_eq!(config.engine.local.head, QuantType::Nf4);
    }

    #[test]
    fn the_page_of_a_server_reads_the_token_of_the_hub_from_a_pipe() {
        use std::os::fd::IntoRawFd;
        let resolved = |fd: i32| {
            let line =
                format!("m --of_server 1 --num_blocks 2 --token_fd {fd} --initial_peers {PEER}");
            let variables = |name: &str| (name == "HF_TOKEN").then(|| "other".to_owned());
            run(&line, Env::of_machine(&variables))
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
            (
                format!("m --head_quant_type int3 --initial_peers {PEER}"),
                "'int3' for '--head_quant_type",
            ),
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
