//! The errors of operations, whatever device runs them.

use shared::error_chain::with_causes;
use shared::ids::PageId;
use shared::shm::group::GroupError;

/// Why an operation refused its arguments. Unless the device failed, nothing was written.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OpError {
    /// A buffer is shorter than its shape.
    #[error("{op}: {what} has {has} elements, its shape needs {needs}")]
    Short {
        op: &'static str,
        what: &'static str,
        has: usize,
        /// The elements that the shape needs.
        needs: usize,
    },
    /// Sizes that do not go together.
    #[error("{op}: {what}")]
    Shape {
        op: &'static str,
        /// What does not fit.
        what: &'static str,
    },
    /// A page id outside the pool.
    #[error("page {} does not exist, the pool has {pages}", page.0)]
    NoSuchPage {
        page: PageId,
        /// Pages of the pool.
        pages: usize,
    },
    /// A row has more positions than pages for them.
    #[error("{pages} pages do not hold {tokens} tokens")]
    ShortPageTable {
        /// Positions of the row, prefix and new tokens.
        tokens: usize,
        /// Pages in its table.
        pages: usize,
    },
    /// More tokens than fit.
    #[error("{tokens} tokens, at most {limit} fit")]
    TooManyTokens {
        /// Tokens asked for.
        tokens: usize,
        limit: usize,
    },
    /// The device failed; what it holds is unspecified.
    #[error(transparent)]
    Device(#[from] DeviceFailure),
    /// An exchange between the ranks of a group failed: the group is of no more use.
    #[error("exchange with the other ranks: {0}")]
    Group(GroupFailure),
}

/// How a device failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DeviceFailure {
    /// The device has less memory left than an operation needs.
    #[error("no device memory for {bytes} bytes")]
    OutOfMemory {
        /// Bytes asked for.
        bytes: usize,
    },
    /// Any other failure, in the words of the device's driver.
    #[error("{0}")]
    Fault(String),
}

/// How an exchange failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GroupFailure {
    /// The supervisor ended the group, since another rank died or hangs.
    #[error("the group was aborted")]
    Aborted,
    /// A rank or a doorbell is at fault.
    #[error("{0}")]
    Fault(String),
}

impl From<GroupError> for OpError {
    fn from(error: GroupError) -> OpError {
        OpError::Group(match error {
            GroupError::Aborted => GroupFailure::Aborted,
            other => GroupFailure::Fault(with_causes(&other)),
        })
    }
}
