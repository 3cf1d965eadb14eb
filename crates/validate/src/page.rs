//! Pages of published studies beside our predictions, written from templates.

/// A page and the pictures that it shows.
pub struct Page {
    /// The text, in Markdown.
    pub text: String,
    /// The pictures, as SVG under their names.
    pub pictures: Vec<(String, String)>,
}

/// A template with a text for each name in braces.
pub(crate) fn fill(template: &str, texts: &[(&str, String)]) -> String {
    texts.iter().fold(template.to_owned(), |page, (name, text)| page.replace(&format!("{{{name}}}"), text))
}

/// A row of a table in Markdown.
pub(crate) fn row(cells: &[String]) -> String {
    format!("| {} |", cells.join(" | "))
}
