//! What is known of a library that is loaded at run time.

/// What `kintsugi doctor` reports about a library.
#[derive(Clone, Debug)]
pub struct Report {
    /// The library's name.
    pub name: &'static str,
    /// Its version, or `None` if it cannot be loaded.
    pub version: Option<String>,
    /// File names that were tried, in order.
    pub tried: Vec<String>,
    /// How to get it.
    pub remedy: &'static str,
}
