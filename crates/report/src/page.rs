//! One HTML file with everything in it: data, style and script.
//!
//! The content security policy allows nothing but the page's own style and script, by their hashes. Data are JSON in a block
//! that no browser runs, and the script shows them as text.

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use serde::Serialize;
use sha2::{Digest, Sha256};

use crate::Report;

const PAGE: &str = include_str!("../page/page.html");
const STYLE: &str = include_str!("../page/style.css");
const SCRIPTS: [&str; 5] = [
    include_str!("../page/plot.js"),
    include_str!("../page/runs.js"),
    include_str!("../page/chart.js"),
    include_str!("../page/timeline.js"),
    include_str!("../page/page.js"),
];

/// A report as a file.
pub fn file(report: &Report) -> String {
    fill(&report.title, "", &policy("'none'"), &json(report))
}

/// The page that gets its data from the server it came from.
pub fn live() -> String {
    fill("Kintsugi", " data-live=\"true\"", &live_policy(), "{}")
}

/// The content security policy of the live page.
pub fn live_policy() -> String {
    policy("'self'")
}

/// JSON that can stand in an HTML page: no `<` ends the block that it is in.
pub fn json(value: &impl Serialize) -> String {
    serde_json::to_string(value).expect("reports have string keys").replace('<', "\\u003c")
}

fn script() -> String {
    format!("\"use strict\";\n(() => {{\n{}}})();\n", SCRIPTS.concat())
}

/// The page's own style and script, and requests to `connect`.
fn policy(connect: &str) -> String {
    let (script, style) = (hash(&script()), hash(STYLE));
    format!(
        "default-src 'none'; script-src 'sha256-{script}'; style-src 'sha256-{style}'; connect-src {connect}; \
         base-uri 'none'; form-action 'none'"
    )
}

fn fill(title: &str, live: &str, policy: &str, data: &str) -> String {
    let script = script();
    let title = escape(title);
    let parts = [
        ("policy", policy),
        ("title", &title),
        ("style", STYLE),
        ("live", live),
        ("data", data),
        ("script", &script),
    ];
    let mut page = String::with_capacity(PAGE.len() + STYLE.len() + script.len() + data.len());
    let mut rest = PAGE;
    while let Some((before, after)) = rest.split_once('{') {
        let (name, after) = after.split_once('}').expect("every part of the page is closed");
        let (_, part) =
            parts.iter().find(|(known, _)| *known == name).expect("every part of the page is known");
        page.push_str(before);
        page.push_str(part);
        rest = after;
    }
    page + rest
}

fn hash(text: &str) -> String {
    BASE64_STANDARD.encode(Sha256::digest(text.as_bytes()))
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_in_the_data_becomes_a_part_of_the_page() {
        let hostile = "</script><script>alert(1)</script>{script}<!--";
        let report =
            Report { title: hostile.to_owned(), notes: vec![hostile.to_owned()], ..Report::default() };
        let page = file(&report);
        assert_eq!(page.matches("<script").count(), 2, "the data and the script");
        assert_eq!(page.matches("alert(1)").count(), 4, "as text: twice as the title, twice in the data");
        assert!(!page.contains("<script>alert"));
        let data = page.split("id=\"data\">").nth(1).and_then(|rest| rest.split("</script>").next());
        let read: serde_json::Value = serde_json::from_str(data.expect("the data")).expect("JSON");
        assert_eq!(read["notes"][0], hostile);
    }

    #[test]
    fn the_policy_allows_the_pages_own_script_alone() {
        let page = file(&Report::default());
        let script = page.split("<script>").nth(1).and_then(|rest| rest.split("</script>").next());
        assert!(page.contains(&format!("script-src 'sha256-{}'", hash(script.expect("a script")))));
        assert!(page.contains("connect-src 'none'") && live().contains("connect-src 'self'"));
        assert!(!page.contains("http://") && !page.contains("https://"), "nothing is loaded from elsewhere");
        assert!(page.len() < 72_000, "{} bytes", page.len());
    }
}
