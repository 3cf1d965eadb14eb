//! Progress of a preparation: a bar on stderr, on a terminal only.

use std::io::IsTerminal;
use std::time::Instant;

use indicatif::{ProgressBar, ProgressStyle};
use kintsugi_data::prepare::PrepareProgress as State;
use kintsugi_spec::units;

/// Shows the progress.
pub struct Progress {
    /// `None` if stderr is not a terminal.
    bar: Option<ProgressBar>,
    begun: Instant,
}

impl Progress {
    /// Nothing has been read yet.
    pub fn new() -> Self {
        let style = ProgressStyle::with_template("{bar:30} {percent:>3} %  {msg}  {eta} left")
            .expect("the template is valid")
            .progress_chars("━╸ ");
        let bar = std::io::stderr().is_terminal().then(|| ProgressBar::new(0).with_style(style));
        Progress { bar, begun: Instant::now() }
    }

    /// Handles a chunk that was written.
    pub fn update(&mut self, state: &State) {
        let Some(bar) = &self.bar else { return };
        let speed = state.text as f64 / 1e6 / self.begun.elapsed().as_secs_f64();
        let bad =
            if state.bad_lines > 0 { format!("  {} bad lines", state.bad_lines) } else { String::new() };
        bar.set_length(state.total);
        bar.set_position(state.read);
        bar.set_message(format!("{} tokens  {speed:.1} MB/s{bad}", units::count(state.tokens as f64)));
    }

    /// Handles the end.
    pub fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}
