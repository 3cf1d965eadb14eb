//! Passes the git commit of the sources to the compiler, for `kintsugi --version`.
//!
//! The commit is `unknown` without git, or if the sources are not the root of a git work tree. Cargo runs this again only
//! when a commit is made or another one is checked out.

use std::path::Path;
use std::process::Command;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    let commit = if is_own_work_tree() { git(&["rev-parse", "--short=9", "HEAD"]) } else { None };
    if commit.is_some() {
        watch_commits();
    }
    println!("cargo::rustc-env=KINTSUGI_COMMIT={}", commit.as_deref().unwrap_or("unknown"));
}

/// Whether git's work tree is this workspace: an unpacked archive may lie inside a work tree of another project.
fn is_own_work_tree() -> bool {
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize();
    let root = git(&["rev-parse", "--show-toplevel"]).map(|root| Path::new(&root).canonicalize());
    matches!((workspace, root), (Ok(workspace), Some(Ok(root))) if workspace == root)
}

/// Names the files that change with the commit. Cargo runs a build script every time if a named file does not exist, so
/// only the ones that do are named.
fn watch_commits() {
    let branch = git(&["rev-parse", "--symbolic-full-name", "HEAD"]);
    let files = ["HEAD", "logs/HEAD", "packed-refs"].into_iter().chain(branch.as_deref());
    for path in files.filter_map(|file| git(&["rev-parse", "--git-path", file])) {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(path);
        if path.is_file() {
            println!("cargo::rerun-if-changed={}", path.display());
        }
    }
}

/// What git answers in the folder of this crate, if it does.
fn git(arguments: &[&str]) -> Option<String> {
    let answer = Command::new("git").args(arguments).current_dir(env!("CARGO_MANIFEST_DIR")).output().ok()?;
    let text = String::from_utf8(answer.stdout).ok()?.trim().to_owned();
    (answer.status.success() && !text.is_empty()).then_some(text)
}
