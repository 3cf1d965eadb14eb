//! What is played, for all plans that run the same programs: the codes of all stages in one order.
//!
//! Which stage waits for which other does not depend on how long anything takes, so an order in which nothing is asked
//! for before it is known can be found once. In that order every moment that is remembered has its place: a play
//! is additions and comparisons of numbers in an array.

use super::code::{Joint, KINDS};

/// The steps of a play.
#[derive(Debug)]
pub(super) struct Sheet {
    pub parts: Vec<Part>,
    /// The kinds of ops that are run in a row.
    pub rows: Vec<Vec<u8>>,
    pub stages: usize,
    /// How many moments are remembered.
    pub moments: usize,
}

impl Sheet {
    /// Whether there is a part that is played over and over.
    pub(super) fn repeats(&self) -> bool {
        self.parts.iter().any(|part| part.repeats.is_some())
    }
}

/// Steps that are played one after the other, once or over and over.
#[derive(Debug)]
pub(super) struct Part {
    pub steps: Vec<Step>,
    /// Whose steps they are: a stage's, and how many, in turns.
    pub turns: Vec<(u16, u32)>,
    /// How often each kind of op is run.
    pub runs: [usize; KINDS],
    /// What is run for all that a stage holds: the stages, and what.
    pub whole: Vec<(u16, u8)>,
    pub repeats: Option<Repeats>,
}

/// What there is to know about a part that is played over and over.
#[derive(Debug)]
pub(super) struct Repeats {
    /// Where to, at the end of a repetition, the moments go that the next one begins with: from and to.
    pub moves: Vec<(u32, u32)>,
    /// The moments that matter between repetitions beside the stages' clocks; some only if they are past that of a stage.
    pub live: Vec<(u32, Option<u16>)>,
    /// The most repetitions that may make a cycle.
    pub cycle: usize,
}

/// One step of a stage. `u32`s are moments that are remembered.
#[derive(Clone, Copy, Debug)]
pub(super) enum Step {
    /// Runs the ops of a row.
    Run(u16),
    /// Runs what it does for all that it holds.
    Whole(u8),
    /// Starts a transfer.
    Start(u8, u32),
    Wait(u8, u32),
    /// Sends over a link before there is room, and leaves the moment to the receiver.
    SendFirst(u16, u32),
    Send(u16, u32),
    /// Makes room before anything is sent, and leaves the moment to the sender.
    ExpectFirst(u32),
    Expect(u16, u32),
    Arrive(u32),
    Join(Joint),
    Meet(Joint),
}

/// Kinds of [`Joint`]: when the last stage joined each is what is remembered first.
pub(super) const JOINTS: usize = 2;
