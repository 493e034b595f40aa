//! The swarm and the Hub: judgements of what netd's crate observed.

use netd::checkup::{HubFacts, ModelState, SwarmFacts, TokenState};

use super::check::CheckVerdict;

/// A clock that differs by so many seconds is refused by peers (hivemind,
/// `MAX_DHT_TIME_DISCREPANCY_SECONDS`).
const MAX_SKEW_S: f64 = 3.0;
/// A clock that differs by so many will soon.
const LARGE_SKEW_S: f64 = 1.5;
/// Peers whose clocks together count for more than the Hub's.
const ENOUGH_CLOCKS: usize = 3;

/// Whether the swarm can be joined.
pub fn judge_swarm(facts: &Result<SwarmFacts, String>) -> CheckVerdict {
    match facts {
        Err(why) => CheckVerdict::problem(
            why,
            "check --initial_peers, the firewall of this machine, and the way to the Internet",
        ),
        Ok(facts) if facts.initial_peers == 0 => CheckVerdict::ok("a new swarm, nobody to join"),
        Ok(SwarmFacts { connected, known, initial_peers, .. }) => CheckVerdict::ok(format!(
            "joined through {initial_peers} addresses, connected to {connected} peers, {known} in the DHT"
        )),
    }
}

/// Whether peers can dial this machine.
pub fn judge_reachability(facts: &SwarmFacts, announces: bool, may_relay: bool) -> CheckVerdict {
    if facts.initial_peers == 0 {
        return CheckVerdict::skipped("a new swarm has no peers that could dial this machine");
    }
    let port = match facts.on_other_port {
        true => " (on a free port, the configured one is in use)",
        false => "",
    };
    let forward = match announces {
        true => "check that the announced address leads here and that a firewall lets it through",
        false => "forward a port of the router and give it with --port and --public_ip",
    };
    match (facts.reachable, facts.relayed) {
        (Some(true), _) => CheckVerdict::ok(format!("peers can dial this machine{port}")),
        (None, _) => CheckVerdict::warning(
            "no peer said whether it can dial this machine",
            "try again later; a server counts itself as reachable then, as in Petals",
        ),
        (Some(false), Some(true)) => CheckVerdict::warning(
            format!(
                "peers cannot dial this machine{port}, and a relay agreed to help: slower than a direct way"
            ),
            forward,
        ),
        (Some(false), _) => CheckVerdict::problem(
            format!("peers cannot dial this machine{port}, and no relay was found"),
            match may_relay {
                true => forward,
                false => {
                    "forward a port of the router (--port, --public_ip), or leave --no_auto_relay out"
                }
            },
        ),
    }
}

/// Whether the router forwards the port. `is_asked`: whether a server would ask it.
pub fn judge_router(facts: &SwarmFacts, is_asked: bool) -> CheckVerdict {
    match (is_asked, facts.forwarded, facts.reachable) {
        (false, ..) => CheckVerdict::skipped("the router is not asked with these settings"),
        (true, Some(true), _) => CheckVerdict::ok("the router forwards the port"),
        (true, _, Some(true)) => CheckVerdict::ok("no router forwards the port, and none needs to"),
        (true, _, Some(false)) => CheckVerdict::warning(
            "no router of this net forwards ports when asked",
            "enable UPnP in the router, or forward a port there by hand (--port, --public_ip)",
        ),
        (true, _, None) => {
            CheckVerdict::ok("no router answered; whether one is needed is not known")
        }
    }
}

/// Whether this machine's clock agrees with the swarm's, or with the Hub's.
pub fn judge_clock(swarm: Option<&SwarmFacts>, hub: Option<&HubFacts>) -> CheckVerdict {
    let peers = swarm.map(|facts| facts.clock_ahead_s.as_slice()).unwrap_or_default();
    let of_hub = hub.and_then(|facts| facts.clock_ahead_s);
    let (ahead, whose) = match (median(peers), of_hub) {
        (Some(ahead), of_hub) if peers.len() >= ENOUGH_CLOCKS || of_hub.is_none() => {
            (ahead, format!("{} peers", peers.len()))
        }
        (_, Some(ahead)) => (ahead, "the Hub".to_owned()),
        (_, None) => {
            return CheckVerdict::skipped("no clock of a peer or of the Hub to compare with");
        }
    };
    let way = if ahead < 0.0 { "behind" } else { "ahead of" };
    let found = format!("the clock is {:.1} s {way} that of {whose}", ahead.abs());
    let advice = "set it and keep it right (timedatectl set-ntp true, or chrony): records of the swarm expire by the clock";
    match ahead.abs() {
        skew if skew >= MAX_SKEW_S => CheckVerdict::problem(found, advice),
        skew if skew >= LARGE_SKEW_S => CheckVerdict::warning(found, advice),
        _ => CheckVerdict::ok(found),
    }
}

/// The middle one: a peer whose clock is wrong, or who lies, changes little.
fn median(values: &[f64]) -> Option<f64> {
    let mut sorted: Vec<f64> = values.iter().copied().filter(|value| value.is_finite()).collect();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len().checked_sub(1)? / 2).copied()
}

/// Whether the Hub answers and knows the token.
pub fn judge_hub(facts: &Result<HubFacts, String>) -> CheckVerdict {
    let facts = match facts {
        Err(why) => {
            return CheckVerdict::problem(
                format!("the Hub does not answer: {why}"),
                "check the way to the Internet, the proxy and HF_ENDPOINT; or give a folder as MODEL",
            );
        }
        Ok(facts) => facts,
    };
    let endpoint = &facts.endpoint;
    match &facts.token {
        None => CheckVerdict::ok(format!(
            "{endpoint} answers; there is no token, which only gated models need"
        )),
        Some(TokenState::Valid(name)) => {
            CheckVerdict::ok(format!("{endpoint} answers, and the token belongs to {name}"))
        }
        Some(TokenState::Refused) => CheckVerdict::problem(
            format!("{endpoint} refuses the token"),
            "make a new one on https://huggingface.co/settings/tokens and give it with --token or huggingface-cli login",
        ),
        Some(TokenState::Unknown(why)) => CheckVerdict::warning(
            format!("{endpoint} does not say whether the token is valid: {why}"),
            "try again later",
        ),
    }
}

/// Whether the Hub lets this operator read the model `name`.
pub fn judge_model(name: &str, facts: &Result<HubFacts, String>) -> CheckVerdict {
    let state = match facts {
        Err(_) => {
            return CheckVerdict::problem(
                format!("{name} cannot be looked up"),
                "see the check of the Hub",
            );
        }
        Ok(facts) => facts.model.as_ref(),
    };
    match state {
        Some(ModelState::Readable) => CheckVerdict::ok(format!("{name} can be read on the Hub")),
        Some(ModelState::Missing) => CheckVerdict::problem(
            format!("the Hub has no model {name} at this revision"),
            "check the name and --revision, or give a folder",
        ),
        Some(ModelState::Forbidden) => CheckVerdict::problem(
            format!(
                "the Hub does not let this token read {name}: it does not exist, is private, or is gated"
            ),
            format!(
                "check the name, ask for access on https://huggingface.co/{name}, then give the token with --token"
            ),
        ),
        Some(ModelState::Unknown(why)) => CheckVerdict::warning(
            format!("the Hub does not say whether {name} can be read: {why}"),
            "try again later",
        ),
        None => CheckVerdict::skipped("no model was named"),
    }
}

#[cfg(test)]
mod tests {
    use super::super::check::Status::{self, Ok as Good, Problem, Skipped, Warning};
    use super::*;

    fn swarm() -> SwarmFacts {
        SwarmFacts {
            initial_peers: 2,
            connected: 3,
            known: 9,
            clock_ahead_s: vec![0.1, -0.1, 0.2],
            reachable: Some(true),
            forwarded: Some(false),
            ..SwarmFacts::default()
        }
    }

    fn is(verdict: CheckVerdict, status: Status, word: &str) {
        let text = format!("{} {}", verdict.found, verdict.advice.unwrap_or_default());
        assert_eq!(verdict.status, status, "{text}");
        assert!(text.contains(word), "no {word:?} in {text}");
    }

    #[test]
    fn a_swarm_that_cannot_be_joined_is_a_problem() {
        is(judge_swarm(&Ok(swarm())), Good, "9 in the DHT");
        is(judge_swarm(&Ok(SwarmFacts::default())), Good, "new swarm");
        is(judge_swarm(&Err("no initial peer answers".into())), Problem, "no initial peer answers");
    }

    #[test]
    fn a_machine_that_peers_cannot_dial_needs_a_relay_or_a_port() {
        let of = |facts: SwarmFacts| judge_reachability(&facts, false, true);
        is(of(swarm()), Good, "peers can dial");
        is(of(SwarmFacts { on_other_port: true, ..swarm() }), Good, "configured one is in use");
        let not = SwarmFacts { reachable: Some(false), ..swarm() };
        is(of(not.clone()), Problem, "--public_ip");
        is(judge_reachability(&not, false, false), Problem, "--no_auto_relay");
        is(judge_reachability(&not, true, true), Problem, "the announced address");
        is(of(SwarmFacts { relayed: Some(true), ..not }), Warning, "a relay agreed");
        is(of(SwarmFacts { reachable: None, ..swarm() }), Warning, "no peer said");
        is(of(SwarmFacts::default()), Skipped, "new swarm");
    }

    #[test]
    fn a_router_matters_when_peers_cannot_dial() {
        is(judge_router(&swarm(), true), Good, "none needs to");
        is(judge_router(&swarm(), false), Skipped, "not asked");
        is(judge_router(&SwarmFacts { forwarded: Some(true), ..swarm() }, true), Good, "forwards");
        let not = SwarmFacts { reachable: Some(false), ..swarm() };
        is(judge_router(&not, true), Warning, "UPnP");
    }

    #[test]
    fn a_clock_is_compared_with_most_peers_or_with_the_hub() {
        let peers = |clocks: &[f64]| SwarmFacts { clock_ahead_s: clocks.to_vec(), ..swarm() };
        let hub = |ahead| HubFacts { clock_ahead_s: Some(ahead), ..HubFacts::default() };
        is(judge_clock(Some(&swarm()), None), Good, "0.1 s ahead of that of 3 peers");
        is(judge_clock(Some(&peers(&[40.0, 0.0, -0.2])), None), Good, "0.0 s");
        is(judge_clock(Some(&peers(&[40.0, 39.0, f64::NAN])), None), Problem, "39.0 s");
        is(judge_clock(Some(&peers(&[-2.0, -2.0, 0.0])), None), Warning, "2.0 s behind");
        is(judge_clock(Some(&peers(&[900.0])), Some(&hub(0.3))), Good, "the Hub");
        is(judge_clock(None, Some(&hub(-3.5))), Problem, "timedatectl");
        is(judge_clock(None, Some(&HubFacts::default())), Skipped, "no clock");
    }

    #[test]
    fn a_hub_that_is_away_and_a_token_that_it_refuses_are_problems() {
        let hub =
            |token| Ok(HubFacts { endpoint: "https://hub".into(), token, ..HubFacts::default() });
        is(judge_hub(&hub(None)), Good, "no token");
        is(judge_hub(&hub(Some(TokenState::Valid("ada".into())))), Good, "belongs to ada");
        is(judge_hub(&hub(Some(TokenState::Refused))), Problem, "settings/tokens");
        is(judge_hub(&hub(Some(TokenState::Unknown("503".into())))), Warning, "503");
        is(judge_hub(&Err("refused".into())), Problem, "HF_ENDPOINT");
    }

    #[test]
    fn a_model_must_be_there_and_readable() {
        let model = |state| Ok(HubFacts { model: Some(state), ..HubFacts::default() });
        let of = |facts: &Result<HubFacts, String>| judge_model("org/name", facts);
        is(of(&model(ModelState::Readable)), Good, "org/name");
        is(of(&model(ModelState::Missing)), Problem, "--revision");
        is(of(&model(ModelState::Forbidden)), Problem, "https://huggingface.co/org/name");
        is(of(&model(ModelState::Unknown("503".into()))), Warning, "503");
        is(of(&Err("down".into())), Problem, "check of the Hub");
        is(of(&Ok(HubFacts::default())), Skipped, "no model");
    }
}
