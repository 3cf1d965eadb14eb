//! The tables of keys in the documentation are those that the declarations of the keys make.
//!
//! `KINTSUGI_WRITE_PAGES=1 cargo test -p kintsugi-plan pages` writes them.

use std::fs;
use std::path::Path;

use kintsugi_plan::config::{Key, keys};

const RULE: &str = "\n|---|---|---|\n";

/// The keys of `[cluster.device]` that decide what fits. The others say how fast the device is, and are on the page about clusters.
const CAPACITY: [&str; 4] = ["kind", "name", "memory", "headroom"];

/// The rows of the keys whose path starts with `prefix`, named without it.
fn rows(prefix: &str, has: impl Fn(&str) -> bool) -> String {
    let row = |key: Key| {
        let path = key.path();
        let name = path.strip_prefix(prefix)?;
        has(name).then(|| format!("| `{name}` | {} | {} |\n", key.default, key.meaning))
    };
    keys().into_iter().filter_map(row).collect()
}

/// The text of a page whose first table of keys under each heading has these rows.
fn with_tables<'a>(text: &str, tables: impl IntoIterator<Item = (&'a str, String)>) -> String {
    tables.into_iter().fold(text.to_owned(), |text, (heading, rows)| {
        let section = text.find(&format!("\n## {heading}\n")).unwrap_or_else(|| panic!("{heading}"));
        let start = section + text[section..].find(RULE).expect("a table") + RULE.len();
        let end = start + text[start..].find("\n\n").map_or(text.len() - start, |end| end + 1);
        format!("{}{rows}{}", &text[..start], &text[end..])
    })
}

#[test]
fn the_pages_have_the_declared_keys() {
    let device = |name: &str| name.strip_prefix("device.").is_some_and(|name| CAPACITY.contains(&name));
    let in_cluster = |name: &str| !name.contains('.') || device(name);
    let plain = [
        "model",
        "batch",
        "parallel",
        "sharding",
        "precision",
        "memory",
        "optimizer",
        "data",
        "framework",
        "run",
    ];
    let plain = plain.map(|table| (format!("[{table}]"), rows(&format!("{table}."), |_| true)));
    let configuration: Vec<(&str, String)> = plain
        .iter()
        .map(|(heading, rows)| (heading.as_str(), rows.clone()))
        .chain([("[cluster]", rows("cluster.", in_cluster))])
        .collect();
    let clusters = vec![
        ("Keys of a device", rows("cluster.device.", |name| !CAPACITY.contains(&name))),
        ("Keys of a level's links", rows("cluster.links.cluster.", |_| true)),
        ("Emulated links", rows("cluster.emulated.cluster.", |_| true)),
    ];
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs");
    for (page, tables) in [("configuration.md", configuration), ("clusters.md", clusters)] {
        let text = fs::read_to_string(folder.join(page)).unwrap();
        let made = with_tables(&text, tables);
        if std::env::var_os("KINTSUGI_WRITE_PAGES").is_some() {
            fs::write(folder.join(page), &made).unwrap();
        } else {
            let differs = made.lines().zip(text.lines()).find(|(made, found)| made != found);
            assert!(made == text, "docs/{page} is not up to date; the first other line: {differs:#?}");
        }
    }
}
