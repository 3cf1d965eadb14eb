//! The lists of keys in the documentation are those that the declarations of the keys make.
//!
//! `KINTSUGI_WRITE_PAGES=1 cargo test -p kintsugi-plan pages` writes them.

use std::fs;
use std::path::Path;

use kintsugi_plan::config::{Key, keys};

/// What the line of a key begins with.
const ITEM: &str = "\n- `";

/// The keys of `[cluster.device]` that decide what fits. The others say how fast the device is, and are on the page about clusters.
const CAPACITY: [&str; 4] = ["kind", "name", "memory", "headroom"];

/// Keys of a device and of links that are measured, not written by hand. `kintsugi config` explains them.
const MEASURED: [&str; 12] = [
    "units",
    "matmul_8bit",
    "boost",
    "misaligned",
    "ramp",
    "epilogue",
    "attention",
    "portable_attention",
    "products",
    "kernels",
    "inner_latency",
    "rings",
];

/// A line for every key whose path starts with `prefix`, named without it.
fn lines(prefix: &str, has: impl Fn(&str) -> bool) -> String {
    let line = |key: Key| {
        let path = key.path();
        let name = path.strip_prefix(prefix).filter(|name| has(name))?;
        let default = if key.default == "none" { String::new() } else { format!(" ({})", key.default) };
        Some(format!("- `{name}`{default}: {}\n", key.meaning))
    };
    keys().into_iter().filter_map(line).collect()
}

/// The text of a page whose first list of keys under each heading has these lines.
fn with_lists<'a>(text: &str, lists: impl IntoIterator<Item = (&'a str, String)>) -> String {
    lists.into_iter().fold(text.to_owned(), |text, (heading, lines)| {
        let section = text.find(&format!("\n## {heading}\n")).unwrap_or_else(|| panic!("{heading}"));
        let start = section + text[section..].find(ITEM).expect("a list") + 1;
        let end = start + text[start..].find("\n\n").map_or(text.len() - start, |end| end + 1);
        format!("{}{lines}{}", &text[..start], &text[end..])
    })
}

#[test]
fn the_pages_have_the_declared_keys() {
    let device = |name: &str| name.strip_prefix("device.").is_some_and(|name| CAPACITY.contains(&name));
    let in_cluster = |name: &str| !name.contains('.') || device(name);
    let by_hand = |name: &str| !MEASURED.contains(&name) && !name.starts_with("short.");
    let plain = ["model", "batch", "parallel", "sharding", "precision", "memory", "optimizer", "data", "run"];
    let plain = plain.map(|table| (format!("[{table}]"), lines(&format!("{table}."), |_| true)));
    let configuration: Vec<(&str, String)> = plain
        .iter()
        .map(|(heading, lines)| (heading.as_str(), lines.clone()))
        // `kintsugi config` has the keys that describe a framework.
        .chain([
            ("[cluster]", lines("cluster.", in_cluster)),
            ("[framework]", lines("framework.", |name| name == "preset")),
        ])
        .collect();
    let clusters = vec![
        ("Keys of a device", lines("cluster.device.", |name| !CAPACITY.contains(&name) && by_hand(name))),
        ("Keys of a level's links", lines("cluster.links.cluster.", by_hand)),
        ("Emulated links", lines("cluster.emulated.cluster.", |_| true)),
    ];
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs");
    for (page, lists) in [("configuration.md", configuration), ("clusters.md", clusters)] {
        let text = fs::read_to_string(folder.join(page)).unwrap();
        let made = with_lists(&text, lists);
        if std::env::var_os("KINTSUGI_WRITE_PAGES").is_some() {
            fs::write(folder.join(page), &made).unwrap();
        } else {
            let differs = made.lines().zip(text.lines()).find(|(made, found)| made != found);
            assert!(made == text, "docs/{page} is not up to date; the first other line: {differs:#?}");
        }
    }
}
