//! What the driver does for devices whose blocks a fallback serves: tests them in short-lived
//! processes, and tells the tree when no session is open.

use shared::config::Device;
use tracing::info;

use super::TreeDriver;
use crate::devices::Examination;
use crate::tree::TreeEvent;

impl TreeDriver<'_> {
    /// Begins to test a device.
    pub(super) fn examine(&mut self, device: Device) {
        info!(%device, "testing a device that failed");
        self.examinations.push((device, Examination::start(device)));
    }

    /// Hears of the tests that have ended.
    pub(super) fn follow_examinations(&mut self) {
        let TreeDriver { examinations, pending, .. } = self;
        examinations.retain_mut(|(device, examination)| match examination.poll() {
            None => true,
            Some(fault) => {
                pending.push_back(TreeEvent::Examined(*device, fault));
                false
            }
        });
    }

    /// Tells the tree that no session is open, if it waits for that.
    pub(super) fn look_for_sessions(&mut self) {
        if !self.tree.waits_for_idle() {
            return;
        }
        if self.segments.board.view().figures().is_some_and(|of| of.clients.sessions == 0) {
            self.pending.push_back(TreeEvent::Idle);
        }
    }
}
