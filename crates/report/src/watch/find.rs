//! Finds the runs of a folder. Linked folders are left out.

use std::path::Path;

use kintsugi_run::{FolderPath, OpenFolder, has_metrics};

/// Folders between the one that is watched and a run.
const DEPTH: usize = 3;
/// Largest number of runs in the list.
const MAX_RUNS: usize = 1000;

/// The runs in a folder, with the names that they have in the list.
pub fn find(folder: &Path) -> Vec<(String, FolderPath)> {
    let path = FolderPath::new(folder);
    let mut found = Vec::new();
    let Ok(open) = path.open() else { return found };
    if has_metrics(&open) {
        let whole = folder.canonicalize().unwrap_or_else(|_| folder.to_owned());
        let name = whole.file_name().map(|name| name.to_string_lossy().into_owned());
        found.push((name.unwrap_or_else(|| "run".to_owned()), path));
    } else {
        search(&open, &path, "", DEPTH, &mut found);
    }
    found
}

fn search(
    folder: &OpenFolder,
    path: &FolderPath,
    prefix: &str,
    depth: usize,
    found: &mut Vec<(String, FolderPath)>,
) {
    for name in folder.folders().unwrap_or_default() {
        if found.len() >= MAX_RUNS {
            return;
        }
        let (inside, listed) = (path.join(&name), format!("{prefix}{}", name.to_string_lossy()));
        let Ok(open) = folder.folder(&name) else { continue };
        if has_metrics(&open) {
            found.push((listed, inside));
        } else if depth > 1 {
            search(&open, &inside, &format!("{listed}/"), depth - 1, found);
        }
    }
}
