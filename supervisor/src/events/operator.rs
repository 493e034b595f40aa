//! What the operator asks of the run, through the socket of [`crate::status`].

use shared::config::ServeConfig;
use tracing::info;

use super::Driver;
use crate::report::InstanceReport;
use crate::segments::Segments;
use crate::status::{Answer, Request};
use crate::tree::{ChildId, Event, Tree};

/// What runs, as `sepal status` shows it.
pub(super) fn report(segments: &Segments, tree: &Tree, config: &ServeConfig) -> InstanceReport {
    let held = |worker| tree.has(worker);
    InstanceReport::of(segments.board.view().snapshot(), tree.standing(), held)
        .with_warpgroups(&config.warpgroups)
}

impl Driver<'_> {
    /// Answers requests, and begins what they ask for.
    pub(super) fn serve_operator(&mut self) {
        let Driver { status, segments, tree, config, pending, deaths, metrics, .. } = self;
        let last = |role, worker| {
            let death = ChildId::of(role, worker).and_then(|id| deaths.last(id));
            death.map(|death| death.text.clone())
        };
        let mut has_ordered = false;
        status.answer(|request| match request.order() {
            Ok(None) => {
                if request == (Request::Report { brief: false }) {
                    segments.board.viewed();
                }
                let report = report(segments, tree, config).with_deaths(last, metrics.addr());
                Answer::Report(Box::new(report))
            }
            // The tree follows it at once, before it hears of another.
            Ok(Some(order)) if !has_ordered => match tree.refusal(order) {
                None => {
                    info!(?request, "order of the operator");
                    pending.push_back(Event::Ordered(order));
                    has_ordered = true;
                    Answer::Accepted
                }
                Some(error) => Answer::Refused { error },
            },
            Ok(Some(_)) => Answer::Refused { error: "busy: try again".to_owned() },
            Err(error) => Answer::Refused { error },
        });
    }

    /// No worker is left, as the operator wanted.
    pub(super) fn show_paused(&mut self) {
        info!("paused: the devices are free");
        if let Some(screen) = &mut self.screen {
            screen.line("paused: the devices are free; sepal resume starts the workers again");
        }
    }
}
