//! What a device tells whoever listens to it.

/// Something that a person should know of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Notice {
    /// The device begins to try out how it does operations best, for which first calls take longer. Told once.
    Trying,
    /// A library cannot do what it was meant for, for this reason, and our own kernels do it. Told once for each shape.
    Replaced(String),
}
