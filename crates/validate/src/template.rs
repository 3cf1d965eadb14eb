//! Cells from other cells: `{a}` is the cell of column `a`, and `{a*b/1000}` a number computed from cells and constants.

use super::table::Row;

/// The text of a template for a row. It is empty if a cell that the template names is empty.
pub fn fill(template: &str, row: &Row) -> String {
    let mut text = String::new();
    let mut rest = template;
    while let Some((before, after)) = rest.split_once('{') {
        let Some((expression, remaining)) = after.split_once('}') else { break };
        let value = value(expression, row);
        if value.is_empty() {
            return String::new();
        }
        text.push_str(before);
        text.push_str(&value);
        rest = remaining;
    }
    text + rest
}

fn value(expression: &str, row: &Row) -> String {
    if !expression.contains(['*', '/']) {
        return row.text(expression).to_owned();
    }
    let number = |term: &str| if is_number(term) { term.parse().ok() } else { row.number(term) };
    let mut product: Option<f64> = Some(1.0);
    let (mut divides, mut term) = (false, String::new());
    for letter in expression.chars().chain(['*']) {
        if letter == '*' || letter == '/' {
            let factor = number(&term).map(|x| if divides { 1.0 / x } else { x });
            product = product.zip(factor).map(|(a, b)| a * b);
            (divides, term) = (letter == '/', String::new());
        } else {
            term.push(letter);
        }
    }
    product.map_or(String::new(), |number| number.to_string())
}

fn is_number(term: &str) -> bool {
    term.parse::<f64>().is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::table::rows;

    #[test]
    fn templates_copy_and_compute() {
        let row = &rows("a,b,c\n6,4,x\n").unwrap()[0];
        assert_eq!(fill("{c} on {a}", row), "x on 6");
        assert_eq!(fill("{a*b/12}", row), "2");
        assert_eq!(fill("{a/1000}", row), "0.006");
        assert_eq!(fill("plain", row), "plain");
        assert_eq!(fill("{a} {none}", row), "", "an empty cell makes an empty text");
    }
}
