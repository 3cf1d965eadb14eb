//! Events of a device that a person should know about.

use std::time::Duration;

/// An event that a device reports through [`Backend::set_notice_handler`](crate::Backend::set_notice_handler).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Notice {
    /// The device tries kernels for matrix products, so the first calls take longer. Reported when the first trial starts, and
    /// then every few seconds of trials.
    Autotuning {
        /// Products whose kernels have been chosen.
        products: usize,
        /// The time that this has taken.
        spent: Duration,
    },
    /// A library cannot do an operation, for this reason, so our own kernel runs instead. Reported once per shape.
    LibraryReplaced(String),
}
