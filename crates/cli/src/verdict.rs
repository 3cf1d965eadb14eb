//! The verdict about a failed job: who is the cause, what the ranks did last, and who waited for whom. The process that prints the
//! error writes it to the run's folder, too.

use std::error::Error;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use kintsugi_comm::mpi::ConnectError;
use kintsugi_comm::{Blame, RankFailure};
use kintsugi_engine::{JobError, TrainError};
use kintsugi_run::{Flight, Verdict};

use crate::failure::Failure;
use crate::output;

/// The folder of the run that this process trains, and when it began, in seconds since 1970.
static RUN: OnceLock<(PathBuf, f64)> = OnceLock::new();

/// From now on this process trains a run in a folder.
pub fn set_run(out: &Path) {
    RUN.set((out.to_owned(), kintsugi_run::now())).ok();
}

/// Reports a failure of the job that this process was told of.
pub fn report(failure: &RankFailure) {
    if RUN.get().is_some_and(|(out, began)| is_known(out, *began)) {
        return;
    }
    output::stderr(&format!("error: {failure}"));
    add_and_print(failure);
}

/// Adds the verdict about a failure of this process, which was printed.
pub fn add_for(failure: &Failure) {
    for error in chain(failure) {
        match error.downcast_ref::<TrainError>() {
            Some(TrainError::Job(JobError::Failure(failure))) => return add_and_print(failure),
            Some(TrainError::Job(error @ JobError::Rank { rank, .. })) => {
                // The error names the rank and the op, and nobody waited in vain.
                return add(|out| Verdict::new(out, error.to_string(), Some(*rank), &[]), false);
            }
            _ => {}
        }
    }
}

/// Whether the message about a failure of this process names its cause. Otherwise it may be a consequence of what happened to another
/// rank.
pub fn names_cause(failure: &Failure) -> bool {
    for error in chain(failure) {
        if let Some(TrainError::Job(JobError::Failure(failure))) = error.downcast_ref() {
            return failure.culprit().is_some();
        }
        if let Some(failure) = error.downcast_ref::<RankFailure>() {
            return failure.culprit().is_some();
        }
        if let Some(error) = error.downcast_ref::<ConnectError>() {
            return match error {
                ConnectError::Call(_) | ConnectError::Exchange(_) | ConnectError::Rendezvous(_) => false,
                ConnectError::Load(_)
                | ConnectError::Threads(_)
                | ConnectError::NoProcessManager(_)
                | ConnectError::Launcher { .. } => true,
            };
        }
    }
    !matches!(failure, Failure::ReportedElsewhere(1))
}

/// A failure and its sources.
fn chain(failure: &Failure) -> impl Iterator<Item = &(dyn Error + 'static)> {
    let mut next: Option<&(dyn Error + 'static)> = Some(failure);
    std::iter::from_fn(move || {
        let error = next?;
        next = error.source();
        Some(error)
    })
}

/// Prints the verdict about a failure that one rank may have found and another caused, and adds it to the run's folder. `launch` does
/// so if the agents know more.
fn add_and_print(failure: &RankFailure) {
    if failure.blame == Blame::Agents {
        return;
    }
    let others: Vec<usize> = [failure.rank].into_iter().chain(failure.peer).collect();
    add(|out| Verdict::new(out, failure.to_string(), failure.culprit(), &others), true);
}

/// Prints and adds the verdict of the agents about a failed attempt that began at a time, unless a rank has named the cause. If the rank
/// that it has named `died_later`, as when MPI ends a rank whose peer has died, that was not the cause.
pub fn add_of_agents(out: &Path, began: f64, failure: &RankFailure, died_later: impl Fn(usize) -> bool) {
    let known = Verdict::read_all(out).pop().filter(|last| last.time >= began);
    let wrong = known.as_ref().and_then(|known| known.culprit).filter(|&rank| died_later(rank));
    let is_better = wrong.is_some() || known.as_ref().is_none_or(|known| known.culprit.is_none());
    if known.is_some() && !(is_better && failure.culprit().is_some()) {
        return;
    }
    let message = match wrong {
        Some(rank) => format!("{failure}, before that of rank {rank}"),
        None => failure.to_string(),
    };
    output::stderr(&format!("error: {message}"));
    let verdict = Verdict::new(out, message, failure.culprit(), &[failure.rank]);
    output::stderr(&verdict.to_string());
    // A run that has not begun has no folder yet.
    if !Flight::ranks(out).is_empty() {
        write(&verdict, out);
    }
}

/// Whether another process of this attempt has found the verdict. Only the first of an attempt counts: a process that was stopped
/// until the others had ended knows less than they did.
fn is_known(out: &Path, began: f64) -> bool {
    Verdict::read_all(out).last().is_some_and(|last| last.time >= began)
}

/// Adds a verdict to the run's folder, if this process trains one, and it is the first of the attempt.
fn add(verdict: impl FnOnce(&Path) -> Verdict, prints: bool) {
    let Some((out, began)) = RUN.get() else { return };
    if is_known(out, *began) {
        return;
    }
    let verdict = verdict(out);
    if prints {
        output::stderr(&verdict.to_string());
    }
    write(&verdict, out);
}

fn write(verdict: &Verdict, out: &Path) {
    if let Err(error) = verdict.add(out) {
        output::stderr(&format!("warning: cannot write the verdict to {}: {error}", out.display()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::failure::ErrorContext;

    #[test]
    fn a_failure_that_may_come_from_another_rank_names_no_cause() {
        let lost = RankFailure { blame: Blame::Agents, ..RankFailure::new(1, "", "its process has ended") };
        let own = RankFailure::new(0, "the end of a step", "the disk is full");
        let of_job = |failure: &RankFailure| Failure::from(TrainError::Job(failure.clone().into()));
        assert!(names_cause(&of_job(&own)) && !names_cause(&of_job(&lost)));
        assert!(names_cause(&Failure::from(own)) && !names_cause(&Failure::from(lost.clone())));
        let connecting = ConnectError::from(lost);
        assert!(!names_cause(&Failure::run(ErrorContext::new(
            "connecting the processes by MPI",
            connecting
        ))));
        assert!(names_cause(&Failure::mistake("--min-ranks 3 is more than --ranks 2")));
        assert!(!names_cause(&Failure::ReportedElsewhere(1)) && names_cause(&Failure::ReportedElsewhere(2)));
    }
}
