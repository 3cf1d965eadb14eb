//! The summary of a run at its end.

use kintsugi_engine::{Start, TrainOutcome};
use kintsugi_plan::Plan;
use kintsugi_rank::StepMetrics;
use kintsugi_run::{RestartSummary, RollbackSummary, SavingSummary, Summary};

use crate::signals;

/// The summary of a finished run.
pub fn summary<'a>(
    plan: &Plan,
    predicted: &'a StepMetrics,
    outcome: &'a TrainOutcome,
    floor: Option<f64>,
    start: &Start,
) -> Summary<'a> {
    Summary {
        params: plan.parameter_count(),
        ranks: plan.mesh.ranks(),
        steps: outcome.steps,
        skipped: outcome.skipped,
        stopped: outcome.stopped,
        stopped_by: signals::received().filter(|_| outcome.stopped),
        failure: outcome.failure.as_ref().map(ToString::to_string),
        loss_first: outcome.loss_first,
        loss_last: outcome.loss_last,
        loss_floor: floor,
        validation_loss: outcome.validation_loss,
        resumed_after: Some(start.progress().step).filter(|&step| step > 0),
        restarts: RestartSummary::of_run(&plan.run.out),
        rollbacks: (outcome.rollbacks > 0).then_some(RollbackSummary {
            rollbacks: outcome.rollbacks,
            skipped_samples: outcome.skipped_samples,
        }),
        checkpoints: SavingSummary {
            last: outcome.saves.last.as_ref().map(|saved| saved.path.as_path()),
            saved: outcome.saves.saved,
            failed: outcome.saves.failed,
            blocked_s: outcome.saves.blocked_s,
            write_s: outcome.saves.write_s,
        },
        predicted,
        measured: &outcome.measured,
    }
}
