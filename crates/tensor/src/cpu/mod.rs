//! The CPU backend (under construction).

/// Bytes of workspace for a rank with so many threads.
pub fn workspace_bytes(threads: usize) -> u64 {
    threads as u64 * (1 << 20)
}
