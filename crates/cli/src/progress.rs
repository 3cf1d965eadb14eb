//! Progress of long work on stderr: a bar with the time left on a terminal, a line now and then elsewhere.

use std::io::IsTerminal;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use indicatif::{HumanDuration, ProgressBar, ProgressStyle};

use crate::output;

/// Shows how far something is. It may be told from several threads.
pub struct Progress {
    /// `None` where stderr is no terminal.
    bar: Option<ProgressBar>,
    state: Mutex<State>,
}

struct State {
    what: &'static str,
    done: u64,
    total: u64,
    begun: Instant,
    /// When the last line was printed.
    told: Instant,
}

/// The time between two lines.
const BETWEEN_LINES: Duration = Duration::from_secs(30);

impl Progress {
    /// The progress of `total` things; `what` says what is done with them.
    pub fn new(what: &'static str, total: u64) -> Self {
        let style = ProgressStyle::with_template("{prefix} {bar:30} {percent:>3} %  {msg}  {eta} left")
            .expect("the template is valid")
            .progress_chars("━╸ ");
        let bar = || ProgressBar::new(total).with_style(style).with_prefix(what);
        let bar = std::io::stderr().is_terminal().then(bar);
        let now = Instant::now();
        let state = State { what, done: 0, total, begun: now, told: now };
        Progress { bar, state: Mutex::new(state) }
    }

    /// The next part of the work: `total` other things.
    pub fn begin(&self, what: &'static str, total: u64) {
        let mut state = self.state();
        if state.what == what && state.total == total {
            return;
        }
        let now = Instant::now();
        *state = State { what, done: 0, total, begun: now, told: state.told };
        if let Some(bar) = &self.bar {
            bar.reset();
            bar.set_length(total);
            bar.set_prefix(what);
        }
    }

    /// So many more are done.
    pub fn add(&self, more: u64) {
        self.add_with(more, "");
    }

    /// The same; `message` says more on a terminal.
    pub fn add_with(&self, more: u64, message: &str) {
        let (done, total) = {
            let state = self.state();
            (state.done + more, state.total)
        };
        self.set(done, total, message);
    }

    /// So many are done; `message` says more on a terminal.
    pub fn set(&self, done: u64, total: u64, message: &str) {
        let mut state = self.state();
        (state.done, state.total) = (done, total);
        if let Some(bar) = &self.bar {
            bar.set_length(total);
            bar.set_position(done);
            bar.set_message(message.to_owned());
        } else if state.told.elapsed() >= BETWEEN_LINES {
            state.told = Instant::now();
            output::stderr(&line(&state, state.begun.elapsed()));
        }
    }

    /// Prints to stdout, with the bar out of the way.
    pub fn suspend<T>(&self, print: impl FnOnce() -> T) -> T {
        match &self.bar {
            Some(bar) => bar.suspend(print),
            None => print(),
        }
    }

    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// It is over.
impl Drop for Progress {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

fn line(state: &State, elapsed: Duration) -> String {
    let State { what, done, total, .. } = *state;
    let share = 100.0 * done as f64 / total.max(1) as f64;
    let left = elapsed.as_secs_f64() * (total.saturating_sub(done)) as f64 / done.max(1) as f64;
    let left = Duration::try_from_secs_f64(left).unwrap_or_default();
    let left = if done == 0 { String::new() } else { format!(", {} left", HumanDuration(left)) };
    format!("{what}: {done} of {total} ({share:.0} %){left}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_has_the_time_left() {
        let now = Instant::now();
        let state = |done| State { what: "timing", done, total: 400, begun: now, told: now };
        assert_eq!(line(&state(100), Duration::from_secs(60)), "timing: 100 of 400 (25 %), 3 minutes left");
        assert_eq!(line(&state(0), Duration::from_secs(60)), "timing: 0 of 400 (0 %)");
    }
}
