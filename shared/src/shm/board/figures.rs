//! The figures of netd: it writes them, and the supervisor reads them.
//!
//! netd is less trusted than the supervisor. So the bytes are bounded before they are copied, are
//! decoded as something that anybody may have written, and nothing is decided from them that could lose
//! data. While they cannot be read, the last figures of the same netd stand for them; those of a netd
//! that has ended are not shown.

use std::time::Duration;

use parking_lot::Mutex;
use tracing::warn;

use super::super::seqlock::{DoNotFit, Unreadable};
use super::super::sync::Ordering;
use super::{BoardView, BoardWriter};
use crate::clock::monotonic_ns;
use crate::figures::{Figures, FiguresError};
use crate::ids::Generation;

/// Why the board has no figures of the netd that runs.
#[derive(Debug, thiserror::Error)]
enum NoFigures {
    #[error("cannot read the figures of netd from the board")]
    Unreadable(#[from] Unreadable),
    #[error(transparent)]
    Malformed(#[from] FiguresError),
}

/// The last figures that could be read.
#[derive(Debug, Default)]
pub(super) struct LastFigures(Mutex<Last>);

#[derive(Debug, Default)]
struct Last {
    /// Of the netd that wrote them.
    generation: Generation,
    figures: Figures,
    /// Whether what came after them could not be read, which is said once.
    is_failing: bool,
}

impl BoardView {
    /// What the netd of this generation, which runs, shows.
    pub(super) fn figures_of(&self, netd: Generation) -> Figures {
        self.last.update(netd, self.read_figures())
    }

    /// Nothing was counted before netd shows anything.
    fn read_figures(&self) -> Result<Figures, NoFigures> {
        let bytes = self.layout().figures.read()?;
        match bytes.is_empty() {
            true => Ok(Figures::default()),
            false => Ok(Figures::decode(&bytes)?),
        }
    }
}

impl LastFigures {
    /// The figures of the netd of this generation, after this came of reading them.
    fn update(&self, generation: Generation, read: Result<Figures, NoFigures>) -> Figures {
        let mut last = self.0.lock();
        if last.generation != generation {
            *last = Last { generation, ..Last::default() };
        }
        match read {
            Ok(figures) => {
                last.figures = figures;
                last.is_failing = false;
            }
            // A process that is stopped while it writes is no fault.
            Err(NoFigures::Unreadable(Unreadable::Busy)) => {}
            Err(error) => {
                if !std::mem::replace(&mut last.is_failing, true) {
                    let error = crate::error_chain::with_causes(&error);
                    warn!(error, "showing the figures that netd wrote before");
                }
            }
        }
        last.figures.clone()
    }
}

impl BoardWriter {
    /// Shows figures; netd alone may call this, on one thread at a time.
    ///
    /// # Errors
    /// Those before stay if these do not fit.
    pub fn set_figures(&self, figures: &Figures) -> Result<(), DoNotFit> {
        self.view().layout().figures.write(&figures.encode())
    }

    /// How long ago a person asked how the swarm looks; `None` = never.
    pub fn viewed_ago(&self) -> Option<Duration> {
        let viewed = self.view().layout().supervisor.viewed_ns.load(Ordering::Relaxed);
        (viewed > 0).then(|| Duration::from_nanos(monotonic_ns().saturating_sub(viewed)))
    }
}
