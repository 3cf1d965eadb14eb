//! Tests that README.md and the pages of `docs` agree with the program: commands parse, keys exist, configurations resolve,
//! links and file names lead somewhere, and what is "not available" is refused.

mod commands;
mod files;
mod keys;
mod markdown;
mod unavailable;

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

use crate::HELP_WIDTH;
use markdown::Page;

/// Something that a page states and that is not so.
struct Finding {
    page: String,
    line: usize,
    what: String,
}

impl Finding {
    fn new(page: &Page, line: usize, what: impl Into<String>) -> Self {
        Finding { page: page.name.clone(), line, what: what.into() }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "{}:{}: {}", self.page, self.line, self.what)
    }
}

/// The root of the repository.
fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// The pages for users and for people who change the code. The changelog and the journal are about the past.
fn pages() -> Vec<Page> {
    let mut pages = Vec::new();
    for folder in ["", "docs/", "examples/"] {
        let entries = fs::read_dir(root().join(folder)).unwrap_or_else(|error| panic!("{folder}: {error}"));
        for path in entries.map(|entry| entry.expect("an entry").path()) {
            let name = format!("{folder}{}", path.file_name().expect("a name").to_string_lossy());
            if path.extension().is_some_and(|extension| extension == "md") && name != "CHANGELOG.md" {
                pages.push(Page { name, text: fs::read_to_string(&path).expect("UTF-8") });
            }
        }
    }
    pages.sort_by(|a, b| a.name.cmp(&b.name));
    assert!(pages.len() > 20, "{} pages", pages.len());
    pages
}

/// The findings by page and line, one in a line.
fn listed(mut findings: Vec<Finding>) -> String {
    findings.sort_by(|a, b| (&a.page, a.line).cmp(&(&b.page, b.line)));
    findings.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n")
}

/// Fails with every finding.
fn assert_none(findings: Vec<Finding>) {
    assert!(findings.is_empty(), "the documentation is wrong:\n{}", listed(findings));
}

#[test]
fn every_command_of_pages_help_texts_and_examples_parses() {
    let pages = [pages(), commands::help_texts(), commands::examples()].concat();
    assert_none(commands::findings(&pages));
}

#[test]
fn every_example_of_a_help_text_is_one_line_of_a_terminal() {
    let too_long = |page: &Page| {
        let lines = (1..).zip(page.text.lines()).filter(|(_, line)| line.chars().count() + 2 > HELP_WIDTH);
        lines.map(|(number, line)| Finding::new(page, number, line)).collect::<Vec<_>>()
    };
    assert_none(commands::help_texts().iter().flat_map(too_long).collect());
}

#[test]
fn every_key_exists_and_every_configuration_resolves() {
    assert_none(keys::findings(&pages()));
}

#[test]
fn every_link_and_every_file_name_leads_to_a_file() {
    assert_none(files::findings(&pages()));
}

#[test]
fn what_is_not_available_is_refused() {
    assert_none(unavailable::findings(&pages()));
}

#[test]
fn mistakes_are_found_with_their_page_and_line() {
    let text = "\
# Page
Run `kintsugi trian run.toml`, `kintsugi eval` or `plan --chekc`, and set `run.stepz`, `parallel.tp = \"two\"` or `run.steps = 5`.
See [the plan](docs/plan.md#ops), [a page](docs/nothing.md), [a part](docs/plan.md#nothing), [above](#page),
`scripts/test`, `scripts/tset`, `crates/plan/src/*.rs`, `crates/plan/src/*.py` and `nothing.rs`. This `code
ends` here.
```
$ kintsugi train run.toml --resume --set parallel.pp=2 --set parallel.pq=2
kintsugi is not a command here
$ kintsugi launch --ranks 2 train --fast
$ kintsugi plan run.toml --sweep batch.micr=1,2 && scripts/nothing
```
```toml
model.preset = \"demo\"
parallel.tp = 3
```
";
    let pages = [Page { name: "page.md".into(), text: text.into() }];
    let mut findings = commands::findings(&pages);
    findings.extend(keys::findings(&pages));
    findings.extend(files::findings(&pages));
    insta::assert_snapshot!(listed(findings), @r#"
    page.md:2: `kintsugi trian run.toml`: unrecognized subcommand 'trian'
    page.md:2: `kintsugi plan --chekc`: unexpected argument '--chekc' found
    page.md:2: unknown key run.stepz in --set; did you mean steps?
    page.md:2: parallel.tp = "two" must be a whole number
    page.md:3: link docs/nothing.md: no such file
    page.md:3: link docs/plan.md#nothing: no such heading
    page.md:4: code goes on in another line, so that it cannot be checked
    page.md:4: `scripts/tset`: no such file
    page.md:4: `crates/plan/src/*.py`: no such file
    page.md:4: `nothing.rs`: no such file
    page.md:5: code goes on in another line, so that it cannot be checked
    page.md:7: unknown key parallel.pq in --set; did you mean pp?
    page.md:9: `kintsugi launch --ranks 2 train --fast`: unexpected argument '--fast' found
    page.md:10: unknown key batch.micr in --set; did you mean micro?
    page.md:10: `scripts/nothing`: no such file
    page.md:13: parallel.tp = 3 does not divide model.heads = 4; use 1, 2 or 4
    "#);
}

#[test]
fn a_feature_that_is_available_is_found_in_a_row_that_denies_it() {
    let text = "\
| feature | Kintsugi |
|---|---|
| tensor parallelism | not available: `parallel.tp = 2` |
| expert parallelism | not available: `parallel.ep` |
| fp9 | not available: `precision.compute = \"fp9\"` |
| a misspelt key | not available: `parallel.epp = 2` |
| something else | not available; see `parallel.tp` |
";
    let pages = [Page { name: unavailable::PAGE.into(), text: text.into() }];
    let of_rows = unavailable::of_rows(&pages[0]);
    insta::assert_snapshot!(listed(of_rows), @r#"
    docs/coming-from.md:3: `parallel.tp = 2` is available
    docs/coming-from.md:6: `parallel.epp = 2` is refused only because there is no such key
    docs/coming-from.md:7: something else: name a key or value that is refused, as in "not available: `parallel.ep`", or add the row to REVIEWED
    "#);
}
