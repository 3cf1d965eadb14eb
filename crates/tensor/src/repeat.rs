//! Steps that are the same every time but for their tokens, so that a device need not be told each time.

/// What is left for the host to do of a step that is repeated.
pub enum Repeat<'a> {
    /// All of it: its operations are enqueued one by one.
    Whole,
    /// Its tokens alone are handed over, all of them, in the order in which the whole step uploads them.
    Tokens(&'a mut dyn FnMut(&[u32])),
}

/// How a step was repeated.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Repeated {
    /// Its operations were enqueued one by one.
    Enqueued,
    /// The device did what it had done before, with new tokens.
    Replayed,
    /// Its operations were enqueued one by one, and those of every step after it will be, for this reason.
    Refused(String),
}
