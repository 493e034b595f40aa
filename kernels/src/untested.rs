//! What tests cannot test on this machine.

use std::io::Write;

/// Says that a test leaves something out, and why. The line goes past the harness, which keeps what a
/// passing test prints to itself.
pub(crate) fn ignored(test: &str, why: &str) {
    let _ = writeln!(std::io::stderr(), "ignored: {test}: {why}");
}
