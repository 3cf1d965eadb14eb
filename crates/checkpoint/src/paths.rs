//! Paths that mean the same from any folder.

use std::path::{Path, PathBuf, absolute};

use kintsugi_plan::{Data, Plan};

/// The same plan with absolute paths to its data, tokenizer and initial weights: a run's configuration and checkpoints are
/// also read from other folders than the one that it was started in.
pub fn with_absolute_paths(plan: &Plan) -> Plan {
    let mut plan = plan.clone();
    plan.init = plan.init.as_deref().map(anchored);
    if let Data::Tokens(tokens) = &mut plan.data {
        for source in tokens.sources.iter_mut().chain(&mut tokens.validation) {
            source.path = anchored(&source.path);
        }
        // The name of a built-in tokenizer is no path.
        let file = tokens.tokenizer.as_deref().map(Path::new).filter(|path| path.exists());
        if let Some(path) = file.map(anchored).and_then(|path| path.to_str().map(str::to_owned)) {
            tokens.tokenizer = Some(path);
        }
    }
    plan
}

/// A path as it reads in the current folder.
pub(crate) fn from_here(path: &Path) -> PathBuf {
    let here = std::env::current_dir().ok();
    let path = anchored(path);
    here.and_then(|here| path.strip_prefix(here).map(Path::to_owned).ok()).unwrap_or(path)
}

/// Without a current folder a path stays as it is.
fn anchored(path: &Path) -> PathBuf {
    absolute(path).unwrap_or_else(|_| path.to_owned())
}
