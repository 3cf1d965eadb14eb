//! The program of a plan, run on paper: memory and traffic to the byte, and the schedule as a timeline.
//!
//! There is no second set of formulas here. A [`kintsugi_rank::Rank`] runs its program on the paper backend; what
//! its arena gave out is the predicted memory, and what its groups would have sent is the predicted traffic.
#![forbid(unsafe_code)]

pub mod calibrate;
mod clock;
mod fit;
mod footprint;
pub mod frontier;
mod inference;
mod kept;
mod predict;
mod screen;
pub mod time;
pub mod timeline;
mod traffic;
pub mod validate;

pub use clock::{Clock, Score, ScoreKey};
pub use fit::{Misfit, check_fit, check_memory};
pub use footprint::{memory_by_stage, memory_of};
pub use inference::{evaluation_memory, generation_memory};
pub use predict::{Play, Prediction, predict};
pub use screen::Screen;
pub use time::{Timing, time};
