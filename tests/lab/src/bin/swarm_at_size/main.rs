//! A swarm of a thousand servers and ten thousand clients on one clock, under the real decisions of [`netd::membership::placement`]: Petals'
//! rule, ours, and one half each, among the same machines and people. Clients route by [`swarm::routing`]. Prints a row for each run.
//!
//! `cargo run --release -p lab --bin swarm_at_size -- --servers 1000 --clients 10000 --seeds 10 --hours 2 --loss 0.333`
//!
//! ```text
//!   population  who comes when, with what, and where; what people want
//!       |
//!     fleet     servers: choose, load, serve, move, leave        directory  what was read of the servers
//!       |                                                           |
//!     crowd     sessions over servers  <──────────────────────── client   pings, bans, looks at the records
//!       |
//!     load      how long a step takes on servers that are shared
//! ```

#![forbid(unsafe_code)]

mod client;
mod clock;
mod crowd;
mod directory;
mod fleet;
mod load;
mod outcome;
mod population;
mod run;

use fleet::Rule;
use outcome::Outcome;
use parking_lot::Mutex;
use run::{Settings, simulate};

/// The sizes of the table, and how many runs go at once.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Arguments {
    servers: usize,
    clients: usize,
    seeds: u64,
    hours: f64,
    loss: f64,
    threads: usize,
}

impl Arguments {
    fn parse(arguments: impl IntoIterator<Item = String>) -> Result<Arguments, String> {
        let mut found = Arguments {
            servers: 1000,
            clients: 10_000,
            seeds: 10,
            hours: 2.0,
            loss: 0.0,
            threads: 2,
        };
        let mut arguments = arguments.into_iter();
        while let Some(name) = arguments.next() {
            let value = arguments.next().ok_or_else(|| format!("{name} needs a value"))?;
            let number = |value: &str| {
                value.parse::<f64>().ok().filter(|number| *number > 0.0 && number.is_finite())
            };
            let number = number(&value)
                .ok_or_else(|| format!("invalid {name} {value}: expected a positive number"))?;
            match name.as_str() {
                "--servers" => found.servers = number as usize,
                "--clients" => found.clients = number as usize,
                "--seeds" => found.seeds = number as u64,
                "--loss" => found.loss = number,
                "--hours" => found.hours = number,
                "--threads" => found.threads = number as usize,
                _ => return Err(format!("unknown flag {name}")),
            }
        }
        Ok(found)
    }

    fn runs(self) -> Vec<Settings> {
        let of = |seed: u64| {
            Rule::ALL.map(|rule| Settings {
                servers: self.servers,
                clients: self.clients,
                seconds: self.hours * 3600.0,
                loss: self.loss,
                rule,
                seed,
            })
        };
        (1..=self.seeds).flat_map(of).collect()
    }
}

/// Runs all, so many at a time.
fn run_all(runs: &[Settings], threads: usize) -> Vec<Outcome> {
    let (left, found) = (Mutex::new(runs.iter()), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..threads.max(1) {
            scope.spawn(|| {
                loop {
                    let next = left.lock().next();
                    let Some(settings) = next else { return };
                    let outcome = simulate(settings);
                    found.lock().push(outcome);
                }
            });
        }
    });
    let mut found = found.into_inner();
    let order = |rule: Rule| Rule::ALL.iter().position(|known| *known == rule);
    found.sort_by_key(|outcome: &Outcome| (outcome.seed, order(outcome.rule)));
    found
}

fn main() -> Result<(), String> {
    let arguments = Arguments::parse(std::env::args().skip(1))?;
    outcome::print(&run_all(&arguments.runs(), arguments.threads));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_are_read_and_nonsense_is_refused() {
        let parse = |text: &str| Arguments::parse(text.split_whitespace().map(str::to_owned));
        let found = parse("--servers 50 --hours 0.5 --loss 0.3").unwrap();
        assert_eq!((found.servers, found.hours, found.loss, found.seeds), (50, 0.5, 0.3, 10));
        assert_eq!(found.runs().len(), 30);
        assert_eq!(
            parse("--hours -1").unwrap_err(),
            "invalid --hours -1: expected a positive number"
        );
        assert!(parse("--servers").is_err() && parse("--server 5").is_err());
    }

    #[test]
    fn a_swarm_that_loses_a_third_is_served_again_with_half_the_moves() {
        let sizes = "--servers 150 --clients 100 --hours 0.8 --loss 0.333 --seeds 4";
        let sizes = Arguments::parse(sizes.split_whitespace().map(str::to_owned)).unwrap();
        let found = run_all(&sizes.runs(), 2);
        outcome::print(&found);
        let sum = |rule: Rule, of: fn(&Outcome) -> f64| {
            found.iter().filter(|o| o.rule == rule).map(of).sum::<f64>()
        };
        let (moves, tokens) = (|o: &Outcome| o.moves_per_hour, |o: &Outcome| o.tokens_per_s);
        assert!(sum(Rule::Petals, moves) > 0.0, "nobody moves");
        assert!(sum(Rule::Sepal, moves) <= 0.5 * sum(Rule::Petals, moves));
        assert!(sum(Rule::Sepal, tokens) > 0.95 * sum(Rule::Petals, tokens));
        assert!(found.iter().all(|o| o.broken_s == 0.0 && o.tokens_per_s > 0.0));
    }

    #[test]
    fn the_same_seed_gives_the_same_run() {
        let sizes = "--servers 60 --clients 60 --hours 0.2 --seeds 1";
        let sizes = Arguments::parse(sizes.split_whitespace().map(str::to_owned)).unwrap();
        let (first, second) = (run_all(&sizes.runs(), 1), run_all(&sizes.runs(), 2));
        assert_eq!(format!("{first:?}"), format!("{second:?}"));
    }
}
