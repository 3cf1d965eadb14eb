//! Events of a device that a person should know about.

/// An event that a device reports through [`Backend::set_notice_handler`](crate::Backend::set_notice_handler).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Notice {
    /// The device starts to tune its kernels, so the first calls take longer. Reported once.
    Autotuning,
    /// A library cannot do an operation, for this reason, so our own kernel runs instead. Reported once per shape.
    LibraryReplaced(String),
}
