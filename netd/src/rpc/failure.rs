//! Errors as peers see them: the text of a Python exception. Streams carry `str(exception)`, unary calls `repr(exception)`;
//! clients react to every error alike and parse no text, people read it.

use std::fmt;

use crate::sessions::admission::NoMemory;
use crate::sessions::table::TableError;
use crate::wire::metadata::MetadataError;
use crate::wire::stream_parts::PartError;
use crate::wire::tensor::TensorError;
use crate::workers::arena::TooLarge;
use crate::workers::link::JobFailure;

/// An error for the caller of an RPC.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    class: &'static str,
    text: String,
}

/// Longest piece of a peer's own text that goes back to it.
const MAX_QUOTED_CHARS: usize = 80;

impl Failure {
    /// A request that makes no sense here.
    pub fn bad(text: impl Into<String>) -> Failure {
        Failure {
            class: "ValueError",
            text: text.into(),
        }
    }

    /// Something that did not work out on this side.
    pub fn runtime(text: impl Into<String>) -> Failure {
        Failure {
            class: "RuntimeError",
            text: text.into(),
        }
    }

    /// A name that is not known here.
    pub fn unknown(name: impl Into<String>) -> Failure {
        Failure {
            class: "KeyError",
            text: name.into(),
        }
    }

    /// A block that is not served here.
    pub fn not_served(uid: &str) -> Failure {
        let uid: String = uid.chars().take(MAX_QUOTED_CHARS).collect();
        Failure::runtime(format!("Remote peer does not serve {uid}"))
    }

    /// An adapter that is not loaded.
    pub fn no_adapter(name: &str) -> Failure {
        let name: String = name.chars().take(MAX_QUOTED_CHARS).collect();
        Failure::unknown(format!("adapter {name} not found"))
    }

    /// A request or session took too long; Python's text for that is empty.
    pub fn timeout() -> Failure {
        Failure {
            class: "TimeoutError",
            text: String::new(),
        }
    }

    /// The text for a stream: `str(exception)`. A `KeyError` quotes its name there.
    pub fn stream_text(&self) -> String {
        if self.class == "KeyError" {
            quoted(&self.text)
        } else {
            self.text.clone()
        }
    }

    /// The text for a unary call: `repr(exception)`.
    pub fn unary_text(&self) -> String {
        let argument = if self.text.is_empty() {
            String::new()
        } else {
            quoted(&self.text)
        };
        format!("{}({argument})", self.class)
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.unary_text())
    }
}

/// Python's `repr` of a text: single quotes unless only those occur in it.
fn quoted(text: &str) -> String {
    let escaped = text.replace('\\', "\\\\").replace('\n', "\\n");
    match (text.contains('\''), text.contains('"')) {
        (true, false) => format!("\"{escaped}\""),
        _ => format!("'{}'", escaped.replace('\'', "\\'")),
    }
}

macro_rules! failure {
    ($($class:ident: $($error:ty),+;)*) => { $($(
        impl From<$error> for Failure {
            fn from(error: $error) -> Failure {
                Failure::$class(error.to_string())
            }
        }
    )+)* };
}

failure! {
    bad: TableError, MetadataError, PartError, TensorError, TooLarge;
    runtime: NoMemory, JobFailure;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_those_of_python() {
        let missing = Failure::unknown("nope.0");
        assert_eq!(
            (
                missing.stream_text().as_str(),
                missing.unary_text().as_str()
            ),
            ("'nope.0'", "KeyError('nope.0')")
        );
        assert_eq!(
            Failure::not_served("x.0").unary_text(),
            "RuntimeError('Remote peer does not serve x.0')"
        );
        assert_eq!(
            Failure::no_adapter("nope/x").stream_text(),
            "'adapter nope/x not found'"
        );
        assert_eq!(Failure::timeout().unary_text(), "TimeoutError()");
        assert_eq!(Failure::timeout().stream_text(), "");
        assert_eq!(Failure::bad("it's").unary_text(), "ValueError(\"it's\")");
        assert_eq!(Failure::bad("'\"").unary_text(), "ValueError('\\'\"')");
    }
}
