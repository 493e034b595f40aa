//! What two builds must have in common so that one may take over from the other while sessions go on
//! (`sepal upgrade`).

use serde::{Deserialize, Serialize};

/// Number of everything that processes of one instance exchange: layouts of segments, control messages,
/// jobs, and the state that a supervisor hands over. Raise it when any of them changes; a test compares
/// the sources with [`FORMAT_SOURCES`].
pub const FORMAT: u32 = 11;

/// Digest of the sources that define what [`FORMAT`] counts.
pub const FORMAT_SOURCES: u64 = 0xc38fd6ba8d17ebf4;

/// Number of the results: two builds with one number compute the same bits from the same weights, tokens
/// and pages. Raise it when a kernel or a block computes anything else; tests hold golden bits against it.
pub const NUMERICS: u32 = 3;

/// A build as it describes itself to the one before.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Build {
    /// Version of the package.
    pub version: String,
    /// [`FORMAT`].
    pub format: u32,
    /// [`NUMERICS`].
    pub numerics: u32,
}

impl Build {
    /// This one.
    pub fn this() -> Build {
        let version = env!("CARGO_PKG_VERSION").to_owned();
        Build { version, format: FORMAT, numerics: NUMERICS }
    }
}
