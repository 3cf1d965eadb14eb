//! Ranks as threads, held against the plain definitions.
#![allow(clippy::float_cmp, reason = "the numbers are small integers, or the bits themselves are the point")]

#[allow(unsafe_code, reason = "tests look into buffers")]
mod buffers;
mod collectives;
mod failures;
mod in_flight;
mod messages;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread;

use super::{RankFailure, World};
pub(super) use buffers::TestBuffers;

/// Runs `body` on a thread per rank. A panic stops the world, and the rank's result is the message.
fn try_run<T: Send>(
    world: &Arc<World>,
    ranks: usize,
    body: impl Fn(usize) -> T + Sync,
) -> Vec<Result<T, String>> {
    let run_rank = |rank| {
        catch_unwind(AssertUnwindSafe(|| body(rank))).map_err(|payload| {
            let text = payload.downcast_ref::<&str>().map(ToString::to_string);
            let reason = text.or_else(|| payload.downcast_ref::<String>().cloned()).unwrap_or_default();
            world.abort(RankFailure { rank, during: "a test".to_owned(), reason: reason.clone() });
            reason
        })
    };
    thread::scope(|scope| {
        let threads: Vec<_> = (0..ranks).map(|rank| scope.spawn(move || run_rank(rank))).collect();
        threads.into_iter().map(|thread| thread.join().expect("panics are caught")).collect()
    })
}

/// Runs `body` on a thread per rank, none of which may panic.
fn run<T: Send>(world: &Arc<World>, ranks: usize, body: impl Fn(usize) -> T + Sync) -> Vec<T> {
    let results = try_run(world, ranks, body).into_iter().collect::<Result<_, _>>();
    results.unwrap_or_else(|reason| panic!("{reason}"))
}
