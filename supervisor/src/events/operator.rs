//! What the operator asks of the run, through the socket of [`crate::status`].

use std::time::Duration;

use shared::config::ServeConfig;
use tracing::{info, warn};

use super::TreeDriver;
use crate::report::InstanceReport;
use crate::segments::Segments;
use crate::status::{InstanceAnswer, InstanceRequest, MAX_PATIENCE};
use crate::tree::{ChildId, Tree, TreeEvent};

/// What runs, as `sepal status` shows it.
pub(super) fn report(segments: &Segments, tree: &Tree, config: &ServeConfig) -> InstanceReport {
    let held = |worker| tree.has(worker);
    InstanceReport::of(segments.board.view().snapshot(), tree.standing(), held)
        .with_warpgroups(&config.warpgroups)
}

impl TreeDriver<'_> {
    /// Answers requests, and begins what they ask for.
    pub(super) fn serve_operator(&mut self) {
        let stage = self.upgrade_stage();
        let is_holding = self.is_holding();
        let confined = self.confined();
        let mut wanted = None;
        let TreeDriver {
            status, segments, tree, config, pending, deaths, metrics, web, notes, ..
        } = self;
        let last = |role, worker| {
            let death = ChildId::of(role, worker).and_then(|id| deaths.last(id));
            death.map(|death| death.text.clone())
        };
        let mut has_ordered = false;
        status.answer(|request| match request.order() {
            Ok(Some(_)) if is_holding => {
                InstanceAnswer::Refused { error: "busy: try again".to_owned() }
            }
            Ok(None) if matches!(request, InstanceRequest::Upgrade { .. }) => {
                match wanted.is_some() {
                    true => InstanceAnswer::Refused { error: "busy: try again".to_owned() },
                    false => {
                        wanted = Some(request);
                        InstanceAnswer::Accepted
                    }
                }
            }
            Ok(None) => {
                if request == (InstanceRequest::Report { brief: false }) {
                    segments.board.viewed();
                }
                let report = report(segments, tree, config).with_deaths(last);
                let report = report.with_addresses(metrics.addr(), web.addr());
                let report = report
                    .with_sandbox(confined.clone())
                    .with_upgrade(stage.clone(), notes.failure.clone());
                InstanceAnswer::Report(Box::new(report))
            }
            // The tree follows it at once, before it hears of another.
            Ok(Some(order)) if !has_ordered => match tree.refusal(order) {
                None => {
                    info!(?request, "order of the operator");
                    pending.push_back(TreeEvent::Ordered(order));
                    has_ordered = true;
                    InstanceAnswer::Accepted
                }
                Some(error) => InstanceAnswer::Refused { error },
            },
            Ok(Some(_)) => InstanceAnswer::Refused { error: "busy: try again".to_owned() },
            Err(error) => InstanceAnswer::Refused { error },
        });
        if let Some(InstanceRequest::Upgrade { path, patience_s }) = wanted {
            let patience = Duration::from_secs(patience_s).min(MAX_PATIENCE);
            if let Err(why) = self.begin_upgrade(path, patience) {
                warn!("no upgrade begins: {why}");
                self.notes.failure = Some(why);
            }
        }
    }

    /// No worker is left, as the operator wanted.
    pub(super) fn show_paused(&mut self) {
        info!("paused: the devices are free");
        if let Some(screen) = &mut self.screen {
            screen.line("paused: the devices are free; sepal resume starts the workers again");
        }
    }
}
