//! Progress of a run on stderr: a bar on a terminal, a line now and then elsewhere.

use std::io::IsTerminal;

use indicatif::{ProgressBar, ProgressStyle};
use kintsugi_checkpoint::CheckpointInfo;
use kintsugi_engine::{Event, StepReport};
use kintsugi_plan::{Compute, Plan};
use kintsugi_spec::units;

use super::compare::duration;
use crate::output;

/// Shows how a run goes.
pub struct Progress {
    steps: u64,
    floor: Option<f64>,
    /// Whether the loss is scaled: in fp16 alone.
    scaled: bool,
    /// `None` where stderr is no terminal.
    bar: Option<ProgressBar>,
}

/// Lines in all where there is no terminal.
const LINES: u64 = 10;

impl Progress {
    /// The progress of a plan's run towards a loss, where that is known.
    pub fn new(plan: &Plan, floor: Option<f64>) -> Self {
        let steps = plan.run.steps;
        let style = ProgressStyle::with_template("{bar:30} {pos}/{len}  {msg}  {eta} left")
            .expect("the template is valid")
            .progress_chars("━╸ ");
        let bar = std::io::stderr().is_terminal().then(|| ProgressBar::new(steps).with_style(style));
        Progress { steps, floor, scaled: plan.precision.compute == Compute::Fp16, bar }
    }

    /// Something has happened.
    pub fn tell(&mut self, event: &Event) {
        match event {
            Event::Step(report) => self.step(report),
            Event::CheckpointSaved(saved) => self.saved(saved),
            Event::CheckpointFailed(failure) => self.warn(&failure.to_string()),
            Event::GraphUnavailable(reason) => {
                self.warn(&format!(
                    "steps cannot be captured as a graph, so each is enqueued anew: {reason}"
                ));
            }
            Event::LibraryReplaced(reason) => {
                self.warn(&format!("our own kernels, which are slower here, stand in: {reason}"));
            }
            Event::Autotuning => {
                self.print("matrix products are tried out on this card, so the first step takes longer");
            }
        }
    }

    /// A step has ended.
    fn step(&mut self, report: &StepReport) {
        if let Some(bar) = &self.bar {
            bar.set_message(self.state(report));
            bar.set_position(report.step);
        }
        if report.skipped {
            self.line(report.step, &self.skipped(report));
        } else if self.bar.is_none() && self.is_due(report.step) {
            self.line(report.step, &self.state(report));
        }
        if let Some(loss) = report.validation_loss {
            let each = report.validation_losses.iter().map(|(source, loss)| format!("{source} {loss:.4}"));
            let each = each.collect::<Vec<_>>().join(", ");
            let sources = if each.is_empty() { each } else { format!(" ({each})") };
            self.line(report.step, &format!("validation loss {loss:.4}{sources}"));
        }
    }

    /// The run is over.
    pub fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }

    /// Whether a tenth of the run ends with this step, or the run itself begins or ends.
    fn is_due(&self, step: u64) -> bool {
        let tenth = |step: u64| step * LINES / self.steps;
        step == 1 || step == self.steps || tenth(step) > tenth(step - 1)
    }

    fn state(&self, report: &StepReport) -> String {
        let floor = self.floor.map(|floor| format!(" (floor {floor:.4})")).unwrap_or_default();
        format!("loss {:.4}{floor}  {} tokens/s", report.loss, units::count(report.tokens_per_s.round()))
    }

    fn skipped(&self, report: &StepReport) -> String {
        let scale =
            if self.scaled { format!("; loss scale now {}", report.loss_scale) } else { String::new() };
        format!("skipped: the loss or a gradient is not finite, so no weight was changed{scale}")
    }

    fn saved(&self, saved: &CheckpointInfo) {
        let (path, bytes) = (saved.path.display(), units::bytes(saved.bytes));
        let [blocked, written] = [saved.blocked, saved.seconds].map(duration);
        self.line(saved.step, &format!("saved {path}, {bytes} in {written}; training paused for {blocked}"));
        if let Some(left) = &saved.left {
            self.warn(&format!("an old checkpoint cannot be removed: {left}"));
        }
    }

    /// Something that a person should know, on a line of its own.
    pub fn warn(&self, text: &str) {
        self.print(&format!("warning: {text}"));
    }

    fn line(&self, step: u64, text: &str) {
        let width = self.steps.to_string().len();
        self.print(&format!("step {step:>width$}/{}  {text}", self.steps));
    }

    fn print(&self, line: &str) {
        match &self.bar {
            Some(bar) => bar.println(line),
            None => output::stderr(line),
        }
    }
}
