//! The folder in which compiled kernels and tuning results are kept between runs.

use std::path::PathBuf;

use etcetera::{BaseStrategy, choose_base_strategy};

/// `kintsugi/<topic>` in the user's cache folder (`XDG_CACHE_HOME`, else `~/.cache`). `None` if the user has no home
/// folder.
pub(super) fn folder(topic: &str) -> Option<PathBuf> {
    Some(choose_base_strategy().ok()?.cache_dir().join("kintsugi").join(topic))
}
