//! Progress of a run on stderr: a bar on a terminal, otherwise a line from time to time.

use std::io::IsTerminal;
use std::time::{Duration, Instant};

use indicatif::{HumanDuration, ProgressBar, ProgressStyle};
use kintsugi_checkpoint::CheckpointInfo;
use kintsugi_engine::{Event, Rollback, StepReport};
use kintsugi_plan::{Compute, Plan};
use kintsugi_spec::units;

use super::compare::duration;
use crate::output;

/// Shows the progress of a run.
pub struct Progress {
    steps: u64,
    floor: Option<f64>,
    /// Whether the loss is scaled: only in fp16.
    scaled: bool,
    /// `None` if stderr is not a terminal.
    bar: Option<ProgressBar>,
    /// Whether lines are printed for steps.
    has_lines: bool,
    /// Those of the last step. Each is named once.
    stragglers: Vec<usize>,
    lines: LineSchedule,
    /// The first step of this run, and when it ended.
    first: Option<(u64, Instant)>,
}

/// Decides which steps get a line.
struct LineSchedule {
    /// Steps of the run.
    steps: u64,
    /// Steps between two lines.
    every: u64,
    /// The longest time between two lines.
    longest: Duration,
    /// The step of the last line, and when it was printed.
    last: Option<(u64, Instant)>,
}

/// The default number of steps between two log lines.
const DEFAULT_STEPS: u64 = 10;
/// The default for the longest time between two log lines.
const DEFAULT_TIME: Duration = Duration::from_secs(30);

impl LineSchedule {
    fn new(steps: u64, log_every: Option<u64>) -> Self {
        let longest = if log_every.is_some() { Duration::MAX } else { DEFAULT_TIME };
        LineSchedule { steps, every: log_every.unwrap_or(DEFAULT_STEPS), longest, last: None }
    }

    /// Whether the step that ended `now` gets a line. The first and the last step of a run always do.
    fn is_due(&mut self, step: u64, now: Instant) -> bool {
        let waited = |last: Instant| now.duration_since(last) >= self.longest;
        let due = match self.last {
            Some((_, last)) => step.is_multiple_of(self.every) || step == self.steps || waited(last),
            None => true,
        };
        if due {
            self.last = Some((step, now));
        }
        due
    }
}

impl Progress {
    /// The progress of a plan's run. `floor` is the loss of a perfect model, if known.
    pub fn new(plan: &Plan, floor: Option<f64>) -> Self {
        let steps = plan.run.steps;
        let style = ProgressStyle::with_template("{bar:30} {pos}/{len}  {msg}  {eta} left")
            .expect("the template is valid")
            .progress_chars("━╸ ");
        let bar = std::io::stderr().is_terminal().then(|| ProgressBar::new(steps).with_style(style));
        Progress {
            steps,
            floor,
            scaled: plan.precision.compute == Compute::Fp16,
            // The bar shows every step, so lines are printed only on request.
            has_lines: bar.is_none() || plan.run.log_every.is_some(),
            bar,
            stragglers: Vec::new(),
            lines: LineSchedule::new(steps, plan.run.log_every),
            first: None,
        }
    }

    /// Handles an event of the run.
    pub fn tell(&mut self, event: &Event) {
        match event {
            Event::Step(report) => self.step(report),
            Event::CheckpointSaved(saved) => self.saved(saved),
            Event::CheckpointFailed(failure) => self.warn(&failure.to_string()),
            Event::RolledBack(rollback) => self.rolled_back(rollback),
            Event::GraphUnavailable(reason) => {
                self.warn(&format!(
                    "steps cannot be captured as a graph, so every step is enqueued op by op: {reason}"
                ));
            }
            Event::LibraryReplaced(reason) => {
                self.warn(&format!("our own kernels are used, which are slower here: {reason}"));
            }
            Event::Autotuning { products, spent } => self.print(&tuning(*products, *spent)),
        }
    }

    /// Handles the return to a checkpoint.
    fn rolled_back(&mut self, rollback: &Rollback) {
        if let Some(bar) = &self.bar {
            bar.set_position(rollback.resumed_after);
        }
        // The speed of the steps that run again counts from here.
        self.first = None;
        self.warn(&rollback.to_string());
    }

    /// Handles the end of a step.
    fn step(&mut self, report: &StepReport) {
        if let Some(bar) = &self.bar {
            bar.set_message(self.state(report));
            bar.set_position(report.step);
        }
        let now = Instant::now();
        let first = *self.first.get_or_insert((report.step, now));
        if report.skipped {
            self.line(report.step, &self.skipped(report));
        } else if self.has_lines && self.lines.is_due(report.step, now) {
            let step_s = match report.step - first.0 {
                0 => report.step_s,
                done => now.duration_since(first.1).as_secs_f64() / done as f64,
            };
            let left = time_left(self.steps - report.step, step_s);
            self.line(report.step, &format!("{}{left}", self.state(report)));
        }
        for straggler in &report.stragglers {
            if !self.stragglers.contains(&straggler.rank) {
                self.line(report.step, &straggler.to_string());
            }
        }
        self.stragglers = report.stragglers.iter().map(|straggler| straggler.rank).collect();
        if let Some(loss) = report.validation_loss {
            let each = report.validation_losses.iter().map(|(source, loss)| format!("{source} {loss:.4}"));
            let each = each.collect::<Vec<_>>().join(", ");
            let sources = if each.is_empty() { each } else { format!(" ({each})") };
            self.line(report.step, &format!("validation loss {loss:.4}{sources}"));
        }
    }

    /// Handles the end of the run.
    pub fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }

    fn state(&self, report: &StepReport) -> String {
        let floor = self.floor.map(|floor| format!(" (floor {floor:.4})")).unwrap_or_default();
        let mfu = report.mfu.map(|mfu| format!("  MFU {:.1} %", 100.0 * mfu)).unwrap_or_default();
        format!(
            "loss {:.4}{floor}  norm {:.3}  lr {:.2e}  {} tokens/s{mfu}",
            report.loss,
            report.grad_norm,
            report.lr,
            units::count(report.tokens_per_s.round())
        )
    }

    fn skipped(&self, report: &StepReport) -> String {
        let scale =
            if self.scaled { format!("; loss scale now {}", report.loss_scale) } else { String::new() };
        format!("skipped: the loss or a gradient is not finite, so the weights stay unchanged{scale}")
    }

    fn saved(&self, saved: &CheckpointInfo) {
        let (path, bytes) = (saved.path.display(), units::bytes(saved.bytes));
        let [blocked, written] = [saved.blocked, saved.seconds].map(duration);
        self.line(saved.step, &format!("saved {path}, {bytes} in {written}; training paused for {blocked}"));
        if let Some(left) = &saved.left {
            self.warn(&format!("an old checkpoint cannot be removed: {left}"));
        }
    }

    /// Prints a warning on its own line.
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

/// What is said about the choice of kernels.
fn tuning(products: usize, spent: Duration) -> String {
    match products {
        0 => "choosing kernels for matrix products on this GPU, so the first step takes longer".to_owned(),
        1 => format!("choosing kernels: 1 product, {} s so far", spent.as_secs()),
        _ => format!("choosing kernels: {products} products, {} s so far", spent.as_secs()),
    }
}

/// The remaining time of the run, if each of its steps takes `step_s` seconds.
fn time_left(steps: u64, step_s: f64) -> String {
    match Duration::try_from_secs_f64(steps as f64 * step_s) {
        Ok(left) if steps > 0 => format!("  {} left", HumanDuration(left)),
        _ => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The steps that get a line if a step takes this many seconds.
    fn lines(steps: u64, log_every: Option<u64>, seconds: u64) -> Vec<u64> {
        let (mut schedule, start) = (LineSchedule::new(steps, log_every), Instant::now());
        let mut is_due = |step| schedule.is_due(step, start + Duration::from_secs(step * seconds));
        (1..=steps).filter(|&step| is_due(step)).collect()
    }

    #[test]
    fn lines_come_by_steps_or_by_time() {
        assert_eq!(lines(35, None, 1), [1, 10, 20, 30, 35]);
        assert_eq!(lines(9, None, 10), [1, 4, 7, 9]);
        assert_eq!(lines(12, None, 10), [1, 4, 7, 10, 12]);
        assert_eq!(lines(3, None, 60), [1, 2, 3]);
        assert_eq!(lines(25, Some(8), 100), [1, 8, 16, 24, 25]);
        assert_eq!(lines(3, Some(1), 0), [1, 2, 3]);
    }

    #[test]
    fn the_choice_of_kernels_is_counted() {
        let lines = [(0, 0), (1, 3), (12, 9)].map(|(products, s)| tuning(products, Duration::from_secs(s)));
        assert_eq!(
            lines,
            [
                "choosing kernels for matrix products on this GPU, so the first step takes longer",
                "choosing kernels: 1 product, 3 s so far",
                "choosing kernels: 12 products, 9 s so far",
            ]
        );
    }

    #[test]
    fn the_time_left_is_in_words() {
        assert_eq!(time_left(99, 2.0), "  3 minutes left");
        assert_eq!(time_left(49, 1.0), "  49 seconds left");
        assert_eq!((time_left(0, 1.0), time_left(9, f64::NAN)), (String::new(), String::new()));
    }
}
