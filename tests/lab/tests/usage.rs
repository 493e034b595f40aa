//! The programs as they are called: what is missing is said. A debug build has them from here, with the features of all tests.

#![forbid(unsafe_code)]

use std::process::Command;

/// What a program says of arguments that are not enough; it must fail.
fn refusal(program: &str, arguments: &[&str]) -> String {
    let ended = Command::new(program).args(arguments).output().unwrap();
    assert!(!ended.status.success(), "{program} takes {arguments:?}");
    String::from_utf8(ended.stderr).unwrap()
}

#[test]
fn programs_say_what_they_lack() {
    let programs = [
        (env!("CARGO_BIN_EXE_delay_line"), &[][..], "expected a plan"),
        (env!("CARGO_BIN_EXE_line_speed"), &[], "expected serve IP PORT, or ask"),
        (env!("CARGO_BIN_EXE_load"), &[], "ADDRESS is missing"),
        (env!("CARGO_BIN_EXE_swarm_at_size"), &["--servers"], "--servers"),
        (env!("CARGO_BIN_EXE_timed_server"), &["serve", "--no_such_flag"], "--no_such_flag"),
    ];
    for (program, arguments, expected) in programs {
        let said = refusal(program, arguments);
        assert!(said.contains(expected), "{program}: {said}");
    }
}
