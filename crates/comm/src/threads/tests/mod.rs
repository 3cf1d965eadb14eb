//! What is the threads' own: failures, and the state of transfers. What all transports must do is in `tests/conformance`.
#![allow(clippy::float_cmp, reason = "the numbers are small integers, or the bits themselves are the point")]

#[allow(unsafe_code, reason = "tests look into buffers")]
mod buffers;
mod failures;
mod in_flight;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread;
use std::time::Duration;

use kintsugi_spec::{Axis, Group, Level, Span, Topology};

use super::ThreadsWorld;
use crate::{RankFailure, World};
pub(super) use buffers::TestBuffers;

/// Long enough that a lost wake-up hangs the test instead of passing unnoticed.
const HOUR: Duration = Duration::from_secs(3600);

/// A second group of the same ranks as [`Group::DATA`].
const HALF: Group = Group::Along(Axis::Data, Span::Inside(Level::Node));

fn world(ranks: usize) -> ThreadsWorld {
    ThreadsWorld::new(Topology::ONE_NODE, ranks, HOUR)
}

/// Runs `body` on a thread per rank. A panic stops the world, and the rank's result is the message.
fn try_run<T: Send>(
    world: &ThreadsWorld,
    ranks: usize,
    body: impl Fn(usize) -> T + Sync,
) -> Vec<Result<T, String>> {
    let run_rank = |rank| {
        catch_unwind(AssertUnwindSafe(|| body(rank))).map_err(|payload| {
            let text = payload.downcast_ref::<&str>().map(ToString::to_string);
            let reason = text.or_else(|| payload.downcast_ref::<String>().cloned()).unwrap_or_default();
            world.abort(RankFailure::new(rank, "a test", reason.clone()));
            reason
        })
    };
    thread::scope(|scope| {
        let threads: Vec<_> = (0..ranks).map(|rank| scope.spawn(move || run_rank(rank))).collect();
        threads.into_iter().map(|thread| thread.join().expect("panics are caught")).collect()
    })
}

/// Runs `body` on a thread per rank. None may panic.
fn run<T: Send>(world: &ThreadsWorld, ranks: usize, body: impl Fn(usize) -> T + Sync) -> Vec<T> {
    let results = try_run(world, ranks, body).into_iter().collect::<Result<_, _>>();
    results.unwrap_or_else(|reason| panic!("{reason}"))
}
