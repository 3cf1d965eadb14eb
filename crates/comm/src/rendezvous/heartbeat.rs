//! The thread that tells the other processes every second that this one is alive, and what it waits for.
//!
//! It also looks at what the rank's own thread cannot: calls of a library that do not return, and a failure of the job that the
//! rank does not notice because it is in such a call.

use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

use kintsugi_spec::work::{self, finished_pieces};

use super::end::end_process;
use super::frame::Kind;
use super::peer::Status;
use super::{CurrentWait, Rendezvous};
use crate::RankFailure;
use crate::patience::{Decision, NOTICE, Patience, SLICE};

/// How often a heartbeat is sent.
pub(super) const HEARTBEAT: Duration = Duration::from_secs(1);

/// How long a process may take to end after its job has failed.
const GRACE: Duration = Duration::from_secs(8);

impl Rendezvous {
    /// The loop of the thread.
    pub(super) fn send_heartbeats(&self, owns_process: bool) {
        let mut until_heartbeat = Duration::ZERO;
        let mut since_failure = Duration::ZERO;
        let mut blocking: Option<(u64, Patience)> = None;
        loop {
            if until_heartbeat.is_zero() {
                until_heartbeat = HEARTBEAT;
                let status = postcard::to_stdvec(&self.status()).unwrap_or_default();
                for peer in &self.peers {
                    // A lost connection is noticed by the thread that receives.
                    peer.write(Kind::Heartbeat, &status).ok();
                }
            }
            let begun = Instant::now();
            thread::sleep(SLICE);
            self.stops.look();
            let passed = begun.elapsed().min(2 * SLICE);
            until_heartbeat = until_heartbeat.saturating_sub(passed);
            if self.has_failed() {
                since_failure += passed;
                if owns_process && since_failure > GRACE {
                    self.report();
                    end_process(1);
                }
                continue;
            }
            self.watch_blocking_call(&mut blocking, passed);
        }
    }

    fn status(&self) -> Status {
        let pieces = if self.rank == 0 { self.pieces() } else { finished_pieces() };
        let paused = if self.rank == 0 { self.is_paused() } else { work::is_paused() };
        let wait = self.current_wait().map(CurrentWait::described);
        Status { pieces, wait, paused, compute_us: self.compute_us.load(Ordering::Relaxed) }
    }

    /// Says that a call does not return, and ends the job when the limit is over.
    fn watch_blocking_call(&self, watched: &mut Option<(u64, Patience)>, passed: Duration) {
        let Some(wait) = self.current_wait().filter(|wait| wait.is_blocking) else {
            *watched = None;
            return;
        };
        let (number, patience) =
            watched.get_or_insert_with(|| (wait.number, Patience::new(self.limit(), NOTICE)));
        if *number != wait.number {
            (*number, *patience) = (wait.number, Patience::new(self.limit(), NOTICE));
        }
        patience.set_limit(self.limit());
        match patience.pass(passed, self.pieces()) {
            Decision::Wait => {}
            Decision::Notify => self.notify(wait.peer, wait.activity, patience.waited()),
            Decision::GiveUp => {
                let failure = RankFailure::stalled(self.rank, wait.activity.to_string(), wait.peer);
                let failure = RankFailure { host: Some(self.host.clone()), ..failure };
                self.abort(failure);
                self.report();
            }
        }
    }
}
