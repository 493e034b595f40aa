//! What a test cannot try where it runs.

use std::io::Write;

/// Says what the test of this name did not try, in a line that begins with `ignored: `. It goes to standard
/// error past the harness, which hides what a passed test prints.
pub fn ignored(test: &str, what: &str) {
    let _ = writeln!(std::io::stderr(), "ignored: {test}: {what}");
}
