//! Errors as a person reads them: in one line, with their causes.

use std::error::Error;

/// An error and its causes, separated by colons. A cause that its effect quotes already is left out.
pub fn with_causes(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(inner) = cause {
        let told = inner.to_string();
        if !text.contains(&told) {
            text = format!("{text}: {told}");
        }
        cause = inner.source();
    }
    text
}

/// The innermost cause of an error: what the operating system or a peer said.
pub fn root_cause(error: &dyn Error) -> String {
    error.source().map_or_else(|| error.to_string(), root_cause)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("{text}")]
    struct Failure {
        text: &'static str,
        source: Option<Box<Failure>>,
    }

    #[test]
    fn every_cause_follows_its_effect() {
        let disk = Failure { text: "no space", source: None };
        let file = Failure { text: "write cache", source: Some(Box::new(disk)) };
        assert_eq!(with_causes(&file), "write cache: no space");
        assert_eq!(root_cause(&file), "no space");
        let alone = Failure { text: "stopped", source: None };
        assert_eq!((with_causes(&alone), root_cause(&alone)), ("stopped".into(), "stopped".into()));
    }

    #[test]
    fn a_quoted_cause_is_told_once() {
        let inner = Failure { text: "no route", source: None };
        let outer = Failure { text: "ask the Hub: no route", source: Some(Box::new(inner)) };
        assert_eq!(with_causes(&outer), "ask the Hub: no route");
    }
}
