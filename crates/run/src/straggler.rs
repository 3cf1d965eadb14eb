//! A rank that computes more slowly than the others of its stage.

use std::fmt;

use serde::{Deserialize, Serialize};

/// A rank that computes more slowly than the others of its stage, in `metrics.jsonl`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Straggler {
    /// The rank.
    pub rank: usize,
    /// Its host.
    pub host: Option<String>,
    /// Seconds of a step in which it computes, without its waits for other ranks.
    pub compute_s: f64,
    /// The median of the ranks of its stage.
    pub median_s: f64,
}

impl fmt::Display for Straggler {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let Straggler { rank, host, compute_s, median_s } = self;
        let on = host.as_ref().map_or_else(String::new, |host| format!(" on {host}"));
        let (ratio, times) = (compute_s / median_s, [compute_s, median_s].map(|seconds| 1e3 * seconds));
        write!(f, "rank {rank}{on} is a straggler: it computes {:.1} ms a step, ", times[0])?;
        write!(f, "{ratio:.2} times the median of its stage, {:.1} ms", times[1])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_straggler_is_named_with_its_host_and_times() {
        let straggler = Straggler { rank: 3, host: Some("n2".into()), compute_s: 0.125, median_s: 0.1 };
        assert_eq!(
            straggler.to_string(),
            "rank 3 on n2 is a straggler: it computes 125.0 ms a step, 1.25 times the median of its stage, 100.0 ms"
        );
    }
}
