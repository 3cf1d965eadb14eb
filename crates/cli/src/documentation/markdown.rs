//! The parts of a Markdown page that are checked: code blocks, code in the text, links, headings and rows of tables.

/// A page.
#[derive(Clone)]
pub struct Page {
    /// Its path in the repository.
    pub name: String,
    pub text: String,
}

/// A code block.
pub struct Block<'a> {
    /// What stands after the fence: `toml`, or nothing.
    pub language: &'a str,
    /// The number of its first line, from 1.
    pub line: usize,
    pub lines: Vec<&'a str>,
}

/// Code in the text, between backquotes.
pub struct Code {
    pub line: usize,
    pub text: String,
    /// The cell of a table that it is in, from 0.
    pub cell: Option<usize>,
    /// Whether only a comma is between it and the code before, as in `optimizer.lr`, `betas`.
    pub is_listed: bool,
}

/// A row of a table, without its heading.
pub struct Row<'a> {
    pub line: usize,
    pub cells: Vec<&'a str>,
}

impl Page {
    /// The code blocks.
    pub fn blocks(&self) -> Vec<Block<'_>> {
        let mut blocks: Vec<Block> = Vec::new();
        let mut is_inside = false;
        for (number, line) in self.numbered() {
            match line.strip_prefix("```") {
                Some(_) if is_inside => is_inside = false,
                Some(language) => {
                    is_inside = true;
                    blocks.push(Block { language, line: number + 1, lines: Vec::new() });
                }
                None if is_inside => blocks.last_mut().expect("an open block").lines.push(line),
                None => {}
            }
        }
        blocks
    }

    /// The lines outside of code blocks, with their numbers.
    pub fn prose(&self) -> Vec<(usize, &str)> {
        let mut is_inside = false;
        let is_prose = |(_, line): &(usize, &str)| {
            let is_fence = line.starts_with("```");
            is_inside ^= is_fence;
            !is_inside && !is_fence
        };
        self.numbered().filter(is_prose).collect()
    }

    /// The code in the text.
    pub fn codes(&self) -> Vec<Code> {
        let of_line = |(line, text): (usize, &str)| match cells(text) {
            Some(cells) => (0..).zip(cells).flat_map(|(cell, text)| codes(line, Some(cell), text)).collect(),
            None => codes(line, None, text),
        };
        self.prose().into_iter().flat_map(of_line).collect()
    }

    /// The rows of all tables.
    pub fn rows(&self) -> Vec<Row<'_>> {
        let rows = self.prose().into_iter();
        rows.filter_map(|(line, text)| Some(Row { line, cells: cells(text)? })).collect()
    }

    /// The targets of links and pictures, with the lines in which they are.
    pub fn links(&self) -> Vec<(usize, &str)> {
        let mut links = Vec::new();
        for (number, line) in self.prose() {
            let targets = line.split("](").skip(1).filter_map(|rest| Some(rest.split_once(')')?.0));
            links.extend(targets.map(|target| (number, target)));
        }
        links
    }

    /// The anchors of its headings, as GitHub makes them.
    pub fn anchors(&self) -> Vec<String> {
        let heading =
            |(_, line): (usize, &str)| Some(anchor(line.strip_prefix('#')?.trim_start_matches('#')));
        self.prose().into_iter().filter_map(heading).collect()
    }

    fn numbered(&self) -> impl Iterator<Item = (usize, &str)> {
        (1..).zip(self.text.lines())
    }
}

/// The code in a line or a cell.
pub fn codes(line: usize, cell: Option<usize>, text: &str) -> Vec<Code> {
    let parts: Vec<&str> = text.split('`').collect();
    let code = |pair: &[&str]| {
        // In a table a bar inside of code is written `\|`.
        let text = pair[1].replace("\\|", "|");
        Code { line, text, cell, is_listed: pair[0] == ", " }
    };
    parts.chunks_exact(2).map(code).collect()
}

/// The cells of a row; `None` if the line is no row, or the line below a table's heading.
fn cells(line: &str) -> Option<Vec<&str>> {
    let row = line.strip_prefix("| ")?.trim_end().strip_suffix('|')?;
    // `\|` is a bar in the text of a cell.
    let mut cells = Vec::new();
    let mut begin = 0;
    for (at, _) in row.match_indices('|').filter(|&(at, _)| !row[..at].ends_with('\\')) {
        cells.push(row[begin..at].trim());
        begin = at + 1;
    }
    cells.push(row[begin..].trim());
    Some(cells)
}

/// The anchor of a heading: small letters, digits, hyphens for spaces.
fn anchor(heading: &str) -> String {
    let kept = |c: &char| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_');
    heading.trim().to_lowercase().chars().filter(kept).map(|c| if c == ' ' { '-' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_is_taken_apart() {
        let text = "# A, `b` & C\n| `a\\|b` | see [c](d.md#e) |\n|---|---|\n```toml\n# no heading\nx = 1\n```\nend `f`\n";
        let page = Page { name: "page.md".into(), text: text.into() };
        assert_eq!(page.anchors(), ["a-b--c"]);
        assert_eq!(page.links(), [(2, "d.md#e")]);
        let codes: Vec<_> = page.codes().into_iter().map(|code| (code.line, code.cell, code.text)).collect();
        assert_eq!(codes, [(1, None, "b".into()), (2, Some(0), "a|b".into()), (8, None, "f".into())]);
        let rows: Vec<_> = page.rows().into_iter().map(|row| (row.line, row.cells)).collect();
        assert_eq!(rows, [(2, vec!["`a\\|b`", "see [c](d.md#e)"])]);
        let blocks = page.blocks();
        assert_eq!((blocks[0].language, blocks[0].line), ("toml", 5));
        assert_eq!(blocks[0].lines, ["# no heading", "x = 1"]);
    }
}
