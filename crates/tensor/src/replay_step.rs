//! Replay of a training step: its operations are the same every time, so a device can capture them as a graph.

/// What the device asks the host to do for a step.
pub enum ReplayRequest<'a> {
    /// Enqueue all operations of the step.
    WholeStep,
    /// Pass only the tokens of the step to this function, in the order in which the whole step uploads them.
    Tokens(&'a mut dyn FnMut(&[u32])),
}

/// How a step was run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReplayOutcome {
    /// The host enqueued its operations.
    Enqueued,
    /// The device replayed the captured graph with new tokens.
    Replayed,
    /// The device cannot capture the step, for this reason. The host enqueued its operations and will do so for every later
    /// step.
    Refused(String),
}
