//! What a machine or a user lacks for a check.

use std::io::Write;

/// Says that `check` is left out and why, in a line that begins with `ignored: `. It goes past the
/// harness, which keeps to itself what a passed test prints.
pub fn ignored(check: &str, why: &str) {
    let _ = writeln!(std::io::stderr(), "ignored: {check}: {why}");
}
