//! `sepal config`: what is in force and where each value comes from, as a TOML file that `--config`
//! reads.

use clap::{Arg, ArgAction, Command};
use netd::network_rate;
use shared::config::{ServeConfig, SpanChoice, Throughput};

use super::layers::{Layered, Origin, is_of_command_line, is_switch};

/// Settings that are never shown.
const SECRET: [&str; 1] = ["token"];

/// Column at which origins are written.
const ORIGIN_COLUMN: usize = 48;

/// All settings of `sepal serve`, grouped as in its help, one a line.
pub fn text(command: &Command, layered: &Layered, config: &ServeConfig) -> String {
    let mut text = String::from("# Settings of sepal serve in force, and where each comes from.\n");
    if let Some(path) = &layered.file {
        text.push_str(&format!("# File: {}\n", path.display()));
    }
    text.push_str(&line(
        &format!("model = {}", quoted(&config.prepare.model)),
        &model_origin(layered),
    ));
    let shown = |arg: &&Arg| {
        let id = arg.get_id().as_str();
        let other = is_of_command_line(id) || id == "converted_model_name_or_path";
        arg.get_long().is_some() && !arg.is_hide_set() && !other
    };
    let settings: Vec<&Arg> = command.get_arguments().filter(shown).collect();
    let mut headings = Vec::new();
    for heading in settings.iter().map(|arg| arg.get_help_heading()) {
        if !headings.contains(&heading) {
            headings.push(heading);
        }
    }
    for heading in headings {
        if let Some(heading) = heading {
            text.push_str(&format!("\n# {heading}\n"));
        }
        let below = settings.iter().filter(|arg| arg.get_help_heading() == heading);
        below.for_each(|arg| text.push_str(&setting(arg, layered, config)));
    }
    text
}

fn model_origin(layered: &Layered) -> Origin {
    match layered.origin("converted_model_name_or_path") {
        Origin::Default => Origin::Flag,
        other => other,
    }
}

fn setting(arg: &Arg, layered: &Layered, config: &ServeConfig) -> String {
    let id = arg.get_id().as_str();
    let origin = layered.origin(id);
    let given = layered.matches.subcommand().and_then(|(_, given)| given.get_raw(id));
    let values: Vec<String> =
        given.into_iter().flatten().map(|value| value.to_string_lossy().into_owned()).collect();
    if SECRET.contains(&id) && origin != Origin::Default {
        return line(&format!("# {id} is set and not shown"), &origin);
    }
    let many = arg.get_num_args().is_some_and(|range| range.max_values() > 1);
    let value = match values.as_slice() {
        [] => chosen(id, config),
        [on] if is_switch(arg) => {
            // What a switch turns off is true without it.
            let turns_off = matches!(arg.get_action(), ArgAction::SetFalse);
            Some(((on == "true") != turns_off).to_string())
        }
        [one] if !many => Some(number_or_text(one)),
        several => Some(list(several)),
    };
    match value {
        Some(value) => line(&format!("{id} = {value}"), &origin),
        None => line(&format!("# {id} is not set{}", in_force(id, config)), &origin),
    }
}

/// What holds where nothing was given and clap knows no default.
fn chosen(id: &str, config: &ServeConfig) -> Option<String> {
    let netd = &config.netd;
    Some(match id {
        "threads" => config.worker.threads.to_string(),
        "initial_peers" if !netd.initial_peers.is_empty() => list(&netd.initial_peers),
        "host_maddrs" => list(&netd.host_maddrs),
        "announce_maddrs" if !netd.announce_maddrs.is_empty() => list(&netd.announce_maddrs),
        "reachability_monitor" => quoted(netd.monitor.as_deref()?),
        "expiration" => netd.expiration.as_secs_f64().to_string(),
        "log" => quoted(&config.log.filter),
        "num_blocks" => match netd.span {
            SpanChoice::Count(count) => count.to_string(),
            _ => return None,
        },
        _ => return None,
    })
}

/// What holds although it is not set, where that is more than a value: a value that is written
/// would be taken for the operator's.
fn in_force(id: &str, config: &ServeConfig) -> String {
    let netd = &config.netd;
    if id == "device" {
        return "; every CUDA device that passes its self-test serves, else the processor"
            .to_owned();
    }
    if id == "quant_type" {
        return match config.automatic {
            Some(_) => "; nf4 on CUDA devices, none on the CPU".to_owned(),
            None => format!("; in force: {}", config.prepare.quant_type.quant_type().name()),
        };
    }
    if id == "network_mbps" && matches!(netd.throughput, Throughput::Fixed(_)) {
        return "; not needed beside a given --throughput".to_owned();
    }
    if id != "network_mbps" {
        return String::new();
    }
    let rate = network_rate::known(netd);
    format!("; in force: {} ({})", rate.mbps(), rate.source)
}

fn line(setting: &str, origin: &Origin) -> String {
    format!("{setting:<ORIGIN_COLUMN$} # {origin}\n")
}

fn list(values: &[String]) -> String {
    let items: Vec<String> = values.iter().map(|value| quoted(value)).collect();
    format!("[{}]", items.join(", "))
}

fn number_or_text(value: &str) -> String {
    let is_number = value.parse::<i64>().is_ok_and(|number| number.to_string() == value);
    if is_number { value.to_owned() } else { quoted(value) }
}

/// A basic string of TOML.
fn quoted(value: &str) -> String {
    let mut text = String::from("\"");
    for c in value.chars() {
        match c {
            '"' | '\\' => text.extend(['\\', c]),
            c if c.is_control() => text.push_str(&format!("\\u{:04X}", u32::from(c))),
            c => text.push(c),
        }
    }
    text.push('"');
    text
}
