//! The folder where this user's compiled kernels and tuned products are kept between runs.

use std::path::PathBuf;

/// `$XDG_CACHE_HOME/kintsugi/<topic>`, by default in `~/.cache`; `None` if this user has neither.
pub(super) fn folder(topic: &str) -> Option<PathBuf> {
    let set = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let caches = set("XDG_CACHE_HOME").or_else(|| Some(set("HOME")?.join(".cache")))?;
    Some(caches.join("kintsugi").join(topic))
}
