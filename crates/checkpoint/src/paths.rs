//! Paths that are valid from any current folder.

use std::path::{Path, PathBuf, absolute};

use kintsugi_plan::{Data, Plan};

/// The built-in tokenizer, which has no file.
const BUILT_IN: &str = "bytes";

/// The same plan with absolute paths to its data, tokenizer and initial weights, since a run's configuration and checkpoints
/// are also read from other folders.
pub fn with_absolute_paths(plan: &Plan) -> Plan {
    let mut plan = plan.clone();
    plan.init = plan.init.as_deref().map(absolute_or_same);
    if let Data::Tokens(tokens) = &mut plan.data {
        for source in tokens.sources.iter_mut().chain(&mut tokens.validation) {
            source.path = absolute_or_same(&source.path);
        }
        let file = tokens.tokenizer.as_deref().filter(|name| *name != BUILT_IN).map(Path::new);
        let file = file.filter(|path| path.exists());
        if let Some(path) = file.map(absolute_or_same).and_then(|path| path.to_str().map(str::to_owned)) {
            tokens.tokenizer = Some(path);
        }
    }
    plan
}

/// A path relative to the current folder, if it is in it.
pub(crate) fn relative_to_current_folder(path: &Path) -> PathBuf {
    let here = std::env::current_dir().ok();
    let path = absolute_or_same(path);
    here.and_then(|here| path.strip_prefix(here).map(Path::to_owned).ok()).unwrap_or(path)
}

/// The absolute path, or the same path if there is no current folder.
fn absolute_or_same(path: &Path) -> PathBuf {
    absolute(path).unwrap_or_else(|_| path.to_owned())
}
