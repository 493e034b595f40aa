//! Errors as peers see them: the text of a Python exception. Streams carry `str(exception)`, unary
//! calls `repr(exception)`; clients react to every error alike and parse no text, people read it.

use std::fmt;

use p2p::InboundError;
use shared::figures::Trouble;
use swarm::wire::metadata::MetadataError;
use swarm::wire::packing::PackingError;
use swarm::wire::stream_parts::PartError;
use swarm::wire::tensor::TensorError;

use crate::sessions::admission::NoMemory;
use crate::sessions::eviction::MAX_SILENCE;
use crate::sessions::table::TableError;
use crate::workers::arena::TooLarge;
use crate::workers::gradients::NoRoute;
use crate::workers::link::JobFailure;

/// An error for the caller of an RPC.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    trouble: Trouble,
    class: &'static str,
    text: String,
}

/// Longest piece of a peer's own text that goes back to it.
const MAX_QUOTED_CHARS: usize = 80;

impl Failure {
    /// A request that makes no sense here.
    pub fn bad(text: impl Into<String>) -> Failure {
        Failure { trouble: Trouble::Malformed, class: "ValueError", text: text.into() }
    }

    /// A request that is over a limit.
    pub fn too_large(text: impl Into<String>) -> Failure {
        Failure::bad(text).counted(Trouble::TooLarge)
    }

    /// The same failure, counted as `trouble`.
    fn counted(self, trouble: Trouble) -> Failure {
        Failure { trouble, ..self }
    }

    /// What it is counted as.
    pub fn trouble(&self) -> Trouble {
        self.trouble
    }

    /// Something that did not work out on this side.
    pub fn runtime(text: impl Into<String>) -> Failure {
        Failure { trouble: Trouble::Failed, class: "RuntimeError", text: text.into() }
    }

    /// A name that is not known here.
    pub fn unknown(name: impl Into<String>) -> Failure {
        Failure { trouble: Trouble::NotServed, class: "KeyError", text: name.into() }
    }

    /// A block that is not served here.
    pub fn not_served(uid: &str) -> Failure {
        let uid: String = uid.chars().take(MAX_QUOTED_CHARS).collect();
        Failure::runtime(format!("Remote peer does not serve {uid}")).counted(Trouble::NotServed)
    }

    /// An adapter that is not loaded.
    pub fn no_adapter(name: &str) -> Failure {
        let name: String = name.chars().take(MAX_QUOTED_CHARS).collect();
        Failure::unknown(format!("adapter {name} not found"))
    }

    /// A request or session took too long; Python's text for that is empty.
    pub fn timeout() -> Failure {
        Failure { trouble: Trouble::TimedOut, class: "TimeoutError", text: String::new() }
    }

    /// A session that was silent while others wanted the memory that it held above its share.
    pub fn gave_way() -> Failure {
        Failure::runtime(format!(
            "this session was silent for {} s and held more than a fair share of the server's attention cache, which others want: open it again",
            MAX_SILENCE.as_secs()
        ))
        .counted(Trouble::OverShare)
    }

    /// A session whose connection ends, since another network daemon takes over.
    pub fn replaced() -> Failure {
        Failure::runtime(
            "the network daemon of this server is being replaced: connect again in a second and send the session's tokens again",
        )
    }

    /// The text for a stream: `str(exception)`. A `KeyError` quotes its name there.
    pub fn stream_text(&self) -> String {
        if self.class == "KeyError" { quoted(&self.text) } else { self.text.clone() }
    }

    /// The text for a unary call: `repr(exception)`.
    pub fn unary_text(&self) -> String {
        let argument = if self.text.is_empty() { String::new() } else { quoted(&self.text) };
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
    bad: MetadataError, PackingError, TensorError;
    too_large: TooLarge;
    runtime: JobFailure;
}

impl From<PartError> for Failure {
    fn from(error: PartError) -> Failure {
        match error {
            PartError::TooLarge { .. } => Failure::too_large(error.to_string()),
            PartError::NoHeader => Failure::bad(error.to_string()),
        }
    }
}

impl From<NoRoute> for Failure {
    fn from(error: NoRoute) -> Failure {
        match error {
            NoRoute::Job(error) => error.into(),
            NoRoute::TooLarge { .. } => Failure::too_large(error.to_string()),
        }
    }
}

impl From<TableError> for Failure {
    fn from(error: TableError) -> Failure {
        match error {
            TableError::TooLong { .. } => Failure::too_large(error.to_string()),
            _ => Failure::bad(error.to_string()),
        }
    }
}

impl From<NoMemory> for Failure {
    fn from(error: NoMemory) -> Failure {
        let trouble = match error {
            NoMemory::BadBlock(_) => Trouble::Malformed,
            NoMemory::TooLarge { .. } => Trouble::TooLarge,
            NoMemory::OverShare { .. } => Trouble::OverShare,
            NoMemory::Immediately { .. } | NoMemory::TimedOut { .. } | NoMemory::Pressure => {
                Trouble::NoMemory
            }
        };
        Failure::runtime(error.to_string()).counted(trouble)
    }
}

impl From<InboundError> for Failure {
    fn from(error: InboundError) -> Failure {
        match error {
            InboundError::TooLarge { .. } => Failure::too_large(error.to_string()),
            _ => Failure::bad(error.to_string()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_those_of_python() {
        let missing = Failure::unknown("nope.0");
        assert_eq!(
            (missing.stream_text().as_str(), missing.unary_text().as_str()),
            ("'nope.0'", "KeyError('nope.0')")
        );
        assert_eq!(
            Failure::not_served("x.0").unary_text(),
            "RuntimeError('Remote peer does not serve x.0')"
        );
        assert_eq!(Failure::no_adapter("nope/x").stream_text(), "'adapter nope/x not found'");
        assert_eq!(Failure::timeout().unary_text(), "TimeoutError()");
        assert_eq!(Failure::timeout().stream_text(), "");
        assert_eq!(Failure::bad("it's").unary_text(), "ValueError(\"it's\")");
        assert_eq!(Failure::bad("'\"").unary_text(), "ValueError('\\'\"')");
    }

    #[test]
    fn failures_are_counted_by_what_the_caller_may_do() {
        assert_eq!(Failure::not_served("x").trouble(), Trouble::NotServed);
        assert_eq!(Failure::no_adapter("x").trouble(), Trouble::NotServed);
        let full = Failure::from(NoMemory::Immediately { bytes: 1 });
        assert_eq!(full.trouble(), Trouble::NoMemory);
        let (bytes, held, most) = (1, 2, 2);
        let over = Failure::from(NoMemory::OverShare { bytes, held, most });
        assert_eq!(over.trouble(), Trouble::OverShare);
        let large = Failure::from(TooLarge { bytes: 2, most: 1 });
        assert_eq!(large.trouble(), Trouble::TooLarge);
    }
}
