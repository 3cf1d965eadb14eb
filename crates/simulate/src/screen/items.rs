//! What a rank holds beyond what stays: a few kinds of things, counted instead of weighed.
//!
//! How many there are at each moment follows from the schedule alone; what one of them weighs follows from the
//! shapes alone. So the two are found apart and multiplied late.

use kintsugi_plan::{Block, Part, Unit};

/// A kind of thing that comes and goes within a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Item {
    /// A block's input, a gradient of one, or a message.
    Stream,
    /// Tokens, targets or beginnings of documents of a micro-batch: a number for each row.
    Ids,
    /// What a layer keeps under full recomputation: its input.
    KeptLayer,
    /// What a layer keeps for its backward.
    SavedLayer,
    /// What the head keeps for its backward.
    SavedHead,
    /// What a layer keeps between the two parts of its backward.
    DeferredLayer,
    /// The same of the head.
    DeferredHead,
    /// The nothing that stands for weights while they are refreshed.
    Placeholder,
    /// Whole weights of a unit that is sharded.
    Gathered(UnitKind),
    /// The whole gradient of a unit whose gradient is sharded.
    Gradient(UnitKind),
}

/// The units that differ in size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum UnitKind {
    Table,
    Positions,
    Layer,
    Head,
}

impl From<Unit> for UnitKind {
    fn from(unit: Unit) -> Self {
        match unit {
            Unit::Table => UnitKind::Table,
            Unit::Positions => UnitKind::Positions,
            Unit::Layer(_) => UnitKind::Layer,
            Unit::Head => UnitKind::Head,
        }
    }
}

const SINGLE: usize = 8;
const UNITS: usize = 4;
/// Number of kinds.
pub(super) const ITEMS: usize = SINGLE + 2 * UNITS;

impl Item {
    pub(super) fn index(self) -> usize {
        match self {
            Item::Stream => 0,
            Item::Ids => 1,
            Item::KeptLayer => 2,
            Item::SavedLayer => 3,
            Item::SavedHead => 4,
            Item::DeferredLayer => 5,
            Item::DeferredHead => 6,
            Item::Placeholder => 7,
            Item::Gathered(unit) => SINGLE + unit as usize,
            Item::Gradient(unit) => SINGLE + UNITS + unit as usize,
        }
    }
}

/// How many of each kind there are.
pub(super) type Holding = [i32; ITEMS];

/// A computation: it takes more for a moment than it leaves behind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Work {
    /// None: nothing is taken beyond what is held.
    Rest,
    Forward(BlockKind),
    Evaluate(BlockKind),
    Recompute,
    Backward(BlockKind, Part),
}

/// The blocks that differ in size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BlockKind {
    Embedding,
    Layer,
    Head,
}

impl From<Block> for BlockKind {
    fn from(block: Block) -> Self {
        match block {
            Block::Embedding => BlockKind::Embedding,
            Block::Layer(_) => BlockKind::Layer,
            Block::Head => BlockKind::Head,
        }
    }
}

const BLOCKS: usize = 3;
/// Number of computations.
pub(super) const WORKS: usize = 2 + 5 * BLOCKS;

impl Work {
    pub(super) fn index(self) -> usize {
        match self {
            Work::Rest => 0,
            Work::Recompute => 1,
            Work::Forward(block) => 2 + block as usize,
            Work::Evaluate(block) => 2 + BLOCKS + block as usize,
            Work::Backward(block, Part::Both) => 2 + 2 * BLOCKS + block as usize,
            Work::Backward(block, Part::Input) => 2 + 3 * BLOCKS + block as usize,
            Work::Backward(block, Part::Weight) => 2 + 4 * BLOCKS + block as usize,
        }
    }
}
