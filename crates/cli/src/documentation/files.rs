//! The links of the pages, and the files of the repository that they name.

use std::collections::HashMap;
use std::fs;
use std::path::Path;

use super::markdown::Page;
use super::{Finding, root};

/// Folders of the repository. A name that begins with one of them is a path from the root.
const FOLDERS: [&str; 6] = ["crates/", "docs/", "examples/", "scripts/", "packaging/", ".github/"];

/// Endings of files that only the repository has: a page names no others like them.
const ENDINGS: [&str; 5] = [".rs", ".cu", ".cuh", ".md", ".svg"];

/// The links that lead nowhere, and the names of files that do not exist.
pub fn findings(pages: &[Page]) -> Vec<Finding> {
    let mut files = Vec::new();
    add_files(&root(), "", &mut files);
    let mut anchors = HashMap::new();
    let mut findings = Vec::new();
    for page in pages {
        for (line, target) in page.links() {
            let problem = link_problem(page, target, &mut anchors);
            findings
                .extend(problem.map(|problem| Finding::new(page, line, format!("link {target}: {problem}"))));
        }
        for (line, text) in page.prose() {
            if !text.matches('`').count().is_multiple_of(2) {
                let what = "code goes on in another line, so that it cannot be checked";
                findings.push(Finding::new(page, line, what));
            }
        }
        for code in page.codes() {
            let name = code.text.split_whitespace().next().unwrap_or_default().trim_start_matches("./");
            let is_missing = is_file_name(name) && !exists(name, &files);
            findings
                .extend(is_missing.then(|| Finding::new(page, code.line, format!("`{name}`: no such file"))));
        }
        for block in page.blocks() {
            for (line, text) in (block.line..).zip(&block.lines) {
                let words = text.split_whitespace().map(|word| word.trim_start_matches("./"));
                let scripts = words.filter(|word| word.starts_with("scripts/"));
                let missing = scripts.filter(|name| !exists(name, &files));
                findings
                    .extend(missing.map(|name| Finding::new(page, line, format!("`{name}`: no such file"))));
            }
        }
    }
    findings
}

/// Adds the paths of all files and folders of the repository, from its root.
fn add_files(folder: &Path, prefix: &str, files: &mut Vec<String>) {
    let entries = fs::read_dir(folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    for entry in entries {
        let entry = entry.expect("an entry");
        let name = entry.file_name().to_string_lossy().into_owned();
        if name == "target" || (name.starts_with('.') && name != ".github") {
            continue;
        }
        let path = format!("{prefix}{name}");
        if entry.file_type().expect("a type").is_dir() {
            add_files(&entry.path(), &format!("{path}/"), files);
        }
        files.push(path);
    }
}

fn is_file_name(name: &str) -> bool {
    let has_ending =
        || ENDINGS.iter().any(|ending| name.strip_suffix(ending).is_some_and(|stem| !stem.is_empty()));
    let is_placeholder = name.chars().any(char::is_uppercase) && !name.contains('/');
    FOLDERS.iter().any(|folder| name.starts_with(folder)) || (has_ending() && !is_placeholder)
}

/// Whether a file or folder has this path, or a path that ends with it. One `*` stands for a part of a name.
fn exists(name: &str, files: &[String]) -> bool {
    let name = name.trim_end_matches('/');
    let is_whole = FOLDERS.iter().any(|folder| name.starts_with(folder));
    files.iter().any(|file| {
        let mut ends = std::iter::once(0).chain(file.match_indices('/').map(|(at, _)| at + 1));
        let is_named = |path: &str| match name.split_once('*') {
            Some((begin, end)) => {
                let middle = path.strip_prefix(begin).and_then(|rest| rest.strip_suffix(end));
                middle.is_some_and(|middle| !middle.contains('/'))
            }
            None => path == name,
        };
        if is_whole { is_named(file) } else { ends.any(|begin| is_named(&file[begin..])) }
    })
}

/// Why a link leads nowhere, if it does. The anchors of pages are remembered under their paths.
fn link_problem(
    page: &Page,
    target: &str,
    anchors: &mut HashMap<String, Vec<String>>,
) -> Option<&'static str> {
    if target.starts_with("https://") || target.starts_with("http://") {
        return None;
    }
    let (path, anchor) = target.split_once('#').map_or((target, None), |(path, anchor)| (path, Some(anchor)));
    let folder = page.name.rsplit_once('/').map_or("", |(folder, _)| folder);
    let path = match path {
        "" => page.name.clone(),
        path => format!("{folder}/{path}").trim_start_matches('/').to_owned(),
    };
    let file = root().join(&path);
    if path != page.name && !file.exists() {
        return Some("no such file");
    }
    let anchor = anchor?;
    let of_target = anchors.entry(path.clone()).or_insert_with(|| {
        // The page itself need not be a file, as in a test.
        let text = fs::read_to_string(&file).unwrap_or_else(|_| page.text.clone());
        Page { name: path, text }.anchors()
    });
    (!of_target.iter().any(|other| other == anchor)).then_some("no such heading")
}
