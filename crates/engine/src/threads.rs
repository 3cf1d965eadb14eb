//! Starts threads. If the system refuses to start one, the result is an error with the limit, not a panic.

use std::error::Error;
use std::fs;
use std::sync::Arc;
use std::thread::{Builder, Scope, ScopedJoinHandle};

/// The system did not start a thread.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{what} cannot be started: {source}{}", hint(limit.as_deref()))]
pub struct ThreadError {
    /// The thread, or the pool of threads.
    pub what: String,
    /// The limit on the processes and threads of this user, if it is known: a number or `unlimited`.
    pub limit: Option<String>,
    /// The system's error.
    pub source: Arc<dyn Error + Send + Sync>,
}

impl ThreadError {
    /// The error for the thread `what`, with the limit that it may have reached.
    pub fn new(what: impl Into<String>, source: impl Error + Send + Sync + 'static) -> Self {
        ThreadError { what: what.into(), limit: process_limit(), source: Arc::new(source) }
    }
}

fn hint(limit: Option<&str>) -> String {
    let limit = limit.map(|limit| format!(", which is {limit}")).unwrap_or_default();
    format!("; raise the limit on processes and threads (ulimit -u{limit}; pids.max of the cgroup)")
}

/// The soft limit on processes, as in `Max processes  4  4  processes`.
fn process_limit() -> Option<String> {
    let limits = fs::read_to_string("/proc/self/limits").ok()?;
    let line = limits.lines().find_map(|line| line.strip_prefix("Max processes"))?;
    line.split_whitespace().next().map(str::to_owned)
}

/// Starts the global thread pool. Otherwise Rayon would start it at its first use, and panic if it cannot.
pub fn start_shared_threads() -> Result<(), ThreadError> {
    let pool = rayon::ThreadPoolBuilder::new().build_global();
    pool.map_err(|error| ThreadError::new("the pool of shared threads", error))
}

/// Starts a thread of a scope.
pub(crate) fn spawn<'scope, T: Send + 'scope>(
    scope: &'scope Scope<'scope, '_>,
    name: &str,
    work: impl FnOnce() -> T + Send + 'scope,
) -> Result<ScopedJoinHandle<'scope, T>, ThreadError> {
    let thread = Builder::new().name(name.to_owned()).spawn_scoped(scope, work);
    thread.map_err(|error| ThreadError::new(format!("the thread \"{name}\""), error))
}
