//! Runs programs with real tensors: a thread per rank, the training loop, evaluation, generation, and the check
//! that layouts agree.
#![forbid(unsafe_code)]

mod card;
mod deal;
mod error;
mod evaluate;
mod flight;
mod generate;
mod job;
mod report;
mod source;
mod start;
mod steps;
mod threads;
mod tokenizers;
mod trace;
mod train;
pub mod verify;

pub use error::{JobError, RankError, TrainError};
pub use evaluate::{EvaluateOptions, Evaluated, SourceLoss, evaluate};
pub use generate::{GenerateError, GenerateOptions, Generated, NewToken, Sampling, check_prompts, generate};
pub use job::{Job, MemoryChoice, Worker, device, run_for, run_job};
pub use report::{Outcome, StepReport};
pub use source::{dataset, evaluation_dataset, tokenizer};
pub use start::Start;
pub use threads::{ThreadError, start_shared_threads};
pub use tokenizers::{check_tokenizers, resume_end_of_document, with_end_of_document};
pub use trace::{Span, Work};
pub use train::{Event, Saves, TrainOptions, train};
