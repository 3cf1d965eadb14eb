//! The horizontal axes of a run beside its steps: tokens seen and wall time. Charts have steps; a page that shows tokens or time
//! looks up where each step is.

use kintsugi_run::Columns;
use serde::Serialize;

use crate::thin::{Detail, rounded};

/// Where the steps of a run are on other axes, at some of its steps; between them a page interpolates.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct RunAxis {
    /// The run's name.
    pub name: String,
    /// Some of its steps, in order.
    pub step: Vec<f64>,
    /// Tokens seen after each; empty if they are not known.
    pub tokens: Vec<f64>,
    /// Seconds between the start of the first step and the end of each, pauses included; empty if they are not known.
    pub seconds: Vec<f64>,
}

impl RunAxis {
    /// The axes of a run.
    pub(crate) fn new(name: &str, steps: &Columns, detail: Detail) -> Self {
        let most = detail.bins() / 5;
        let count = steps.step.len();
        let places: Vec<usize> = if count <= most {
            (0..count).collect()
        } else {
            (0..most).map(|i| i * (count - 1) / (most - 1)).collect()
        };
        let begun = steps.time.first().zip(steps.step_s.first()).map(|(time, step_s)| {
            // A first step of unknown duration has none.
            time - if step_s.is_finite() { *step_s } else { 0.0 }
        });
        let seconds: Vec<f64> =
            begun.map_or_else(Vec::new, |begun| places.iter().map(|&i| steps.time[i] - begun).collect());
        RunAxis {
            name: name.to_owned(),
            step: places.iter().map(|&i| steps.step[i]).collect(),
            tokens: rising(places.iter().map(|&i| steps.tokens[i]).collect()),
            seconds: rising(seconds),
        }
    }
}

/// Numbers that never fall, as after a change of the clock; nothing if one of them is not finite.
fn rising(mut numbers: Vec<f64>) -> Vec<f64> {
    if numbers.iter().any(|number| !number.is_finite()) {
        return Vec::new();
    }
    let mut most = f64::NEG_INFINITY;
    for number in &mut numbers {
        most = most.max(rounded(*number));
        *number = most;
    }
    numbers
}

#[cfg(test)]
mod tests {
    use super::*;

    fn columns(count: usize) -> Columns {
        let steps: Vec<f64> = (1..=count).map(|step| step as f64).collect();
        Columns {
            time: steps.iter().map(|step| 1000.0 + 2.0 * step).collect(),
            tokens: steps.iter().map(|step| 64.0 * step).collect(),
            step_s: vec![2.0; count],
            step: steps,
            ..Columns::default()
        }
    }

    #[test]
    fn steps_have_tokens_and_seconds_since_the_first_began() {
        let axis = RunAxis::new("a", &columns(3), Detail::File);
        assert_eq!((&axis.tokens[..], &axis.seconds[..]), (&[64.0, 128.0, 192.0][..], &[2.0, 4.0, 6.0][..]));
        let long = RunAxis::new("a", &columns(50_000), Detail::File);
        assert_eq!((long.step.len(), long.step[0], long.step[999]), (1000, 1.0, 50_000.0));
        assert!((long.seconds[999] - 100_000.0).abs() < 1e-9);
    }

    #[test]
    fn a_clock_that_was_set_back_does_not_reorder_steps() {
        let mut steps = columns(4);
        steps.time[2] = 0.0;
        assert_eq!(RunAxis::new("a", &steps, Detail::File).seconds, [2.0, 4.0, 4.0, 8.0]);
        steps.time[1] = f64::NAN;
        assert!(RunAxis::new("a", &steps, Detail::File).seconds.is_empty());
    }
}
