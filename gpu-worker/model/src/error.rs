//! Why a config.json describes no model that can be served.

/// Why config.json describes no block that can be served.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum SpecError {
    /// A family that is not there.
    #[error("model_type {found:?} is not supported; supported are: {supported}")]
    UnknownModelType {
        /// What the config says, shortened.
        found: String,
        /// The families that are there.
        supported: String,
    },
    /// A field that must be there is not.
    #[error("{field} is missing")]
    Missing { field: &'static str },
    /// A field with a value that makes no sense.
    #[error("{field} is {value}, but must be {wanted}")]
    Bad {
        field: &'static str,
        /// What the config says, shortened.
        value: String,
        /// What would be accepted.
        wanted: String,
    },
}
