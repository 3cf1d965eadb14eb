//! Runs programs with real tensors: the ranks of a process, the training loop, evaluation, generation, and the comparison of
//! layouts (`verify`).
#![forbid(unsafe_code)]

mod checksums;
mod error;
mod evaluate;
mod generate;
mod gpu_health;
mod gpu_monitor;
mod job;
mod loop_state;
mod op_watch;
mod pending_step;
mod rank_trainer;
mod replication;
mod report;
mod reported;
mod resume_split;
mod rollback;
mod skipping;
mod source;
mod spikes;
mod start;
mod stragglers;
mod threads;
mod tokenizers;
mod trace;
mod train;
mod validation_batches;
pub mod verify;

pub use error::{JobError, RankError, TrainError};
pub use evaluate::{EvaluateOptions, EvaluationResult, SourceLoss, evaluate};
pub use generate::{
    GenerateError, GenerateOptions, GenerationResult, NewToken, Sampling, check_prompts, generate,
};
pub use job::{Job, MemoryChoice, Worker, device, nccl_settings, platform, run_job, run_ranks};
pub use kintsugi_run::{Rollback, StepReport};
pub use replication::CopiedStart;
pub use report::TrainOutcome;
pub use resume_split::resume_split;
pub use skipping::WithoutSkipped;
pub use source::{dataset, evaluation_dataset, tokenizer, with_steps};
pub use start::Start;
pub use threads::{ThreadError, start_shared_threads};
pub use tokenizers::{check_tokenizers, resume_end_of_document, with_end_of_document};
pub use trace::{MeasuredSpan, SpanKind};
pub use train::{Event, SaveStatistics, TrainOptions, train};
