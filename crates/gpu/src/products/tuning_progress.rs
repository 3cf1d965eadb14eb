//! Counts the products that are tuned and the time that it takes, and decides when to report them.

use std::time::Duration;

use kintsugi_tensor::Notice;

/// The time of trials between two reports.
const PAUSE: Duration = Duration::from_secs(3);

/// The products that have been tuned so far.
#[derive(Debug, Default)]
pub struct TuningProgress {
    products: usize,
    spent: Duration,
    /// The time spent when it was last reported; `None` before the first report.
    reported: Option<Duration>,
}

impl TuningProgress {
    /// A product is about to be tuned. Returns what to report, if anything.
    pub fn begin(&mut self) -> Option<Notice> {
        let due = self.reported.is_none_or(|reported| self.spent >= reported + PAUSE);
        due.then(|| {
            self.reported = Some(self.spent);
            Notice::Autotuning { products: self.products, spent: self.spent }
        })
    }

    /// A product has been tuned, which took this long.
    pub fn end(&mut self, took: Duration) {
        self.products += 1;
        self.spent += took;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_product_and_every_few_seconds_are_reported() {
        let mut progress = TuningProgress::default();
        let reported: Vec<Option<(usize, u64)>> = [1, 1, 1, 5, 0, 2]
            .into_iter()
            .map(|seconds| {
                let notice = progress.begin();
                progress.end(Duration::from_secs(seconds));
                notice.map(|notice| match notice {
                    Notice::Autotuning { products, spent } => (products, spent.as_secs()),
                    Notice::LibraryReplaced(reason) => panic!("{reason}"),
                })
            })
            .collect();
        assert_eq!(reported, [Some((0, 0)), None, None, Some((3, 3)), Some((4, 8)), None]);
    }
}
