//! Workers whose weights are being opened: they are told what they need once the files are open. One
//! whose files do not open in time ends by `--start_timeout`.

use std::time::Instant;

use shared::block::Span;
use shared::ids::Generation;
use tracing::warn;

use super::TreeDriver;
use super::compose::{fault_of, manifest_of};
use crate::segments::MakeError;
use crate::tree::{ChildId, Down, Init};

/// A worker that waits for the files of a span.
#[derive(Debug)]
pub(super) struct WaitingWorker {
    child: ChildId,
    generation: Generation,
    whole: Span,
    init: Init,
}

impl TreeDriver<'_> {
    /// Whether the files of a span are open.
    pub(super) fn has_weights(&self, whole: Span) -> bool {
        self.weights.has(whole, &manifest_of(self.instance, whole))
    }

    /// Has a worker wait for the files of a span.
    pub(super) fn await_weights(
        &mut self,
        index: usize,
        whole: Span,
        init: Init,
    ) -> Result<(), MakeError> {
        self.weights.begin(whole, manifest_of(self.instance, whole), &self.wake)?;
        if let Some(child) = self.processes.get(index) {
            let (child, generation) = (child.id, child.generation);
            self.waiting.push(WaitingWorker { child, generation, whole, init });
        }
        Ok(())
    }

    /// Tells workers what they need, whose files are open by now, or ends them, if that failed. While
    /// the executable changes, children hear of nothing new.
    pub(super) fn follow_weights(&mut self) {
        for span in self.weights.slow(Instant::now()) {
            warn!(%span, "opening the weights takes long, the file system does not answer");
        }
        if self.is_holding() {
            return;
        }
        for (whole, result) in self.weights.arrived() {
            let fault = result.err().map(|error| fault_of(&MakeError::from(error)));
            let arrived = self.waiting.extract_if(.., |waiting| waiting.whole == whole);
            for WaitingWorker { child, generation, init, .. } in arrived.collect::<Vec<_>>() {
                let is = |process: &crate::child_process::ChildProcess| {
                    (process.id, process.generation) == (child, generation) && process.end.is_none()
                };
                // One that has ended meanwhile is told nothing.
                let Some(index) = self.processes.iter().position(is) else { continue };
                match &fault {
                    None => self.tell(child, Down::Init(init)),
                    Some(fault) => self.cannot_begin(index, fault.clone()),
                }
            }
            self.weights.keep(&self.tree.served_spans());
        }
    }
}
