//! `FLAGS.md`: written from the flags and from `flag_tests.txt`, which names a test of the effect of each.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;

use clap::Arg;

use super::*;

/// Rows `COMMAND --FLAG: FILE FUNCTION`; `-` where no test is about the flag alone.
const TESTS: &str = include_str!("flag_tests.txt");

/// Characters of a line, without the indent of a list.
const WIDTH: usize = 118;

/// Writes the page anew.
const WRITE: &str = "SEPAL_WRITE_FLAGS";

const INTRODUCTION: &str = "\
Sepal accepts every flag of `petals.cli.run_server` and `petals.cli.run_dht`, with underscores or dashes. The log notes \
flags that have no effect when they are given.

A variable (`SEPAL_BLOCK_INDICES=0:4`) or a file (`--config FILE`: TOML, or the lines `name: value` of a Petals \
`config.yml`) can set each flag of `serve` and `dht`. A setting that does not exist is refused with its line and the \
nearest one that does. Flags override variables, variables override the file, and the file overrides defaults. `sepal \
config` takes the arguments of `sepal serve` and prints each setting with its origin.

This page is written from the flags and from `sepal/src/cli/tests/flag_tests.txt`, which names the test of each. To \
write it anew: `SEPAL_WRITE_FLAGS=1 cargo test -p sepal --lib flags_md`.";

const RUN_SERVER: &str = "converted_model_name_or_path config public_name token use_auth_token num_blocks block_indices \
     dht_prefix port public_ip no_auto_relay host_maddrs announce_maddrs daemon_startup_timeout compression num_handlers \
     prefetch_batches sender_threads inference_max_length min_batch_size max_batch_size max_chunk_size_bytes \
     attn_cache_tokens cache_dir max_disk_space device torch_dtype max_alloc_timeout revision throughput update_period \
     expiration request_timeout session_timeout step_timeout initial_peers new_swarm increase_file_limit \
     stats_report_interval custom_module_path identity_path balance_quality mean_balance_check_period quant_type \
     tensor_parallel_devices skip_reachability_check adapters";

const RUN_DHT: &str = "initial_peers host_maddrs announce_maddrs use_ipfs identity_path no_relay use_auto_relay refresh_period";

/// File and function of the test of a flag, `None` for `-`, by command and flag.
fn tests() -> BTreeMap<(&'static str, &'static str), Option<(&'static str, &'static str)>> {
    let row = |line: &'static str| {
        let (flag, test) = line.split_once(": ").unwrap_or_else(|| panic!("no row: {line}"));
        (flag.split_once(" --").unwrap_or_else(|| panic!("no flag: {line}")), test.split_once(' '))
    };
    TESTS.lines().map(row).collect()
}

/// The command of a name such as `cache ls`.
fn command_of(name: &str) -> clap::Command {
    let mut all = Sepal::command();
    all.build();
    name.split(' ').fold(all, |command, name| command.find_subcommand(name).unwrap().clone())
}

/// The flags that the help of a command shows, but for `--help`.
fn flags_of(name: &str) -> Vec<Arg> {
    let command = command_of(name);
    let shown =
        |arg: &&Arg| arg.get_long().is_some_and(|long| long != "help") && !arg.is_hide_set();
    command.get_arguments().filter(shown).cloned().collect()
}

/// A paragraph of lines of at most [`WIDTH`] characters, those after the first indented.
fn wrapped(text: &str, indent: &str) -> String {
    let mut lines = vec![String::new()];
    for word in text.split_whitespace() {
        let line = lines.last_mut().unwrap();
        if line.is_empty() {
            line.push_str(word);
        } else if line.chars().count() + 1 + word.chars().count() > WIDTH {
            lines.push(format!("{indent}{word}"));
        } else {
            write!(line, " {word}").unwrap();
        }
    }
    lines.join("\n")
}

/// What the page says of a flag.
fn item(command: &str, arg: &Arg) -> String {
    let long = arg.get_long().unwrap();
    let names = arg.get_value_names().unwrap_or_default().iter().map(ToString::to_string);
    let names: Vec<String> = names.collect();
    let value = match layers::is_switch(arg) {
        true => String::new(),
        false => format!(" {}", names.join(" ")),
    };
    let help = arg.get_help().map(ToString::to_string).unwrap_or_default();
    let mut text = format!("- `--{long}{value}`: {help}");
    let defaults: Vec<_> = arg.get_default_values().iter().map(|v| v.to_string_lossy()).collect();
    if !layers::is_switch(arg) && !arg.is_hide_default_value_set() && !defaults.is_empty() {
        write!(text, " [default: {}]", defaults.join(" ")).unwrap();
    }
    text = wrapped(&text, "  ");
    let test = tests().get(&(command, long)).copied().flatten();
    if let Some((file, function)) = test {
        let line = wrapped(&format!("Test: `{file}` `{function}`."), "  ");
        write!(text, "\n  {line}").unwrap();
    }
    text + "\n"
}

fn page() -> String {
    let mut page = String::from("# Flags\n");
    for paragraph in INTRODUCTION.split("\n\n") {
        write!(page, "\n{}\n", wrapped(paragraph, "")).unwrap();
    }
    for (name, petals, heading) in [
        ("serve", RUN_SERVER, "run_server: `sepal serve`"),
        ("dht", RUN_DHT, "run_dht: `sepal dht`"),
    ] {
        let flags = flags_of(name);
        let is_of_petals =
            |arg: &&Arg| petals.split_whitespace().any(|flag| arg.get_long() == Some(flag));
        let (theirs, ours): (Vec<&Arg>, Vec<&Arg>) = flags.iter().partition(is_of_petals);
        for (heading, flags) in
            [(format!("## {heading}"), theirs), (format!("## Sepal's own: `sepal {name}`"), ours)]
        {
            write!(page, "\n{heading}\n\n").unwrap();
            flags.iter().for_each(|arg| page.push_str(&item(name, arg)));
        }
    }
    let serve = flags_of("serve");
    for name in ["plan", "cache ls", "cache prune", "cache verify", "cache export", "convert"] {
        write!(page, "\n## `sepal {name}`\n\n").unwrap();
        let is_of_serve = |arg: &Arg| serve.iter().any(|other| other.get_id() == arg.get_id());
        let flags = flags_of(name);
        if name == "plan" {
            page.push_str("Takes the flags of `sepal serve`, too.\n\n");
        }
        let own = flags.iter().filter(|arg| name != "plan" || !is_of_serve(arg));
        own.for_each(|arg| page.push_str(&item(name, arg)));
    }
    page
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap()
}

#[test]
fn flags_md_is_what_the_flags_say() {
    let path = root().join("sepal/FLAGS.md");
    let page = page();
    if std::env::var_os(WRITE).is_some() {
        std::fs::write(&path, &page).unwrap();
    }
    let written = std::fs::read_to_string(&path).unwrap();
    let differs = page.lines().zip(written.lines()).find(|(page, written)| page != written);
    assert!(
        page == written,
        "FLAGS.md is not what the flags say, first at {differs:?}; write it with {WRITE}=1 cargo test -p sepal --lib flags_md"
    );
}

#[test]
fn every_flag_has_a_row_and_the_tests_of_all_rows_exist() {
    let rows = tests();
    let names =
        ["serve", "dht", "cache ls", "cache prune", "cache verify", "cache export", "convert"];
    for name in names {
        for arg in flags_of(name) {
            let flag = arg.get_long().unwrap();
            let has_row = rows.contains_key(&(name, flag));
            assert!(has_row, "flag_tests.txt has no row for {name} --{flag}");
        }
    }
    for ((name, flag), test) in rows {
        let command = command_of(name);
        let is_known = command.get_arguments().any(|arg| arg.get_long() == Some(flag));
        assert!(is_known, "sepal {name} does not know --{flag}");
        if let Some((file, function)) = test {
            let text = std::fs::read_to_string(root().join(file)).unwrap_or_default();
            assert!(text.contains(&format!("fn {function}(")), "{file} has no test {function}");
        }
    }
}

#[test]
fn every_flag_of_petals_is_known_and_has_a_test() {
    let rows = tests();
    for (name, flags) in [("serve", RUN_SERVER), ("dht", RUN_DHT)] {
        for flag in flags.split_whitespace() {
            let test = rows.get(&(name, flag));
            assert!(test.is_some_and(Option::is_some), "no test of {name} --{flag}");
        }
    }
}
