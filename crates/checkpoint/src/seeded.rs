//! Deliberate bugs, with which `scripts/torture --self-test` proves that it detects such bugs. They exist only in a build with
//! the feature `seeded-bugs`, and only if the environment variable `KINTSUGI_SEEDED_BUG` names one.

/// A bug that can be seeded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Bug {
    /// Files are not compared with their checksums.
    Checksum,
    /// Files are not synced to the disk.
    Fsync,
    /// A run does not lock its folder.
    Lock,
    /// A checkpoint has its final name before its files are complete.
    Rename,
}

/// Whether this build and this process have the bug.
#[cfg(feature = "seeded-bugs")]
pub(crate) fn has(bug: Bug) -> bool {
    let name = match bug {
        Bug::Checksum => "checksum",
        Bug::Fsync => "fsync",
        Bug::Lock => "lock",
        Bug::Rename => "rename",
    };
    std::env::var_os("KINTSUGI_SEEDED_BUG").is_some_and(|seeded| seeded == name)
}

/// Whether this build and this process have the bug.
#[cfg(not(feature = "seeded-bugs"))]
pub(crate) const fn has(_: Bug) -> bool {
    false
}
