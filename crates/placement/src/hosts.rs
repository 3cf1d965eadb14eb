//! Lists of nodes as Slurm writes them: `n[1-3,7],login`, with leading zeros that are kept.

use std::cmp::Ordering;

/// The most nodes that a list may name.
const MAX_NODES: usize = 1 << 20;

/// The names of a list; `None` if it is not one.
pub fn expand(list: &str) -> Option<Vec<String>> {
    let mut names = Vec::new();
    for part in split(list)? {
        expand_part(part, &mut names)?;
    }
    Some(names)
}

/// The parts of a list between commas that are not in brackets.
fn split(list: &str) -> Option<Vec<&str>> {
    let (mut parts, mut begun, mut inside) = (Vec::new(), 0, false);
    for (at, byte) in list.bytes().enumerate() {
        match byte {
            b'[' if !inside => inside = true,
            b']' if inside => inside = false,
            b'[' | b']' => return None,
            b',' if !inside => {
                parts.push(&list[begun..at]);
                begun = at + 1;
            }
            _ => {}
        }
    }
    parts.push(&list[begun..]);
    (!inside && parts.iter().all(|part| !part.is_empty())).then_some(parts)
}

/// Adds the names of one part. A part may have several brackets, as in `rack[1-2]n[1-4]`.
fn expand_part(part: &str, names: &mut Vec<String>) -> Option<()> {
    let Some((before, rest)) = part.split_once('[') else {
        names.push(part.to_owned());
        return Some(());
    };
    let (ranges, after) = rest.split_once(']')?;
    let mut ends = Vec::new();
    expand_part_or_nothing(after, &mut ends)?;
    for range in ranges.split(',') {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let digits = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
        if !digits(first) || !digits(last) {
            return None;
        }
        let (from, to): (usize, usize) = (first.parse().ok()?, last.parse().ok()?);
        if from > to || names.len() + (to - from + 1) * ends.len() > MAX_NODES {
            return None;
        }
        for number in from..=to {
            let number = format!("{before}{number:0width$}", width = first.len());
            names.extend(ends.iter().map(|end| format!("{number}{end}")));
        }
    }
    Some(())
}

fn expand_part_or_nothing(part: &str, names: &mut Vec<String>) -> Option<()> {
    if part.is_empty() {
        names.push(String::new());
        return Some(());
    }
    expand_part(part, names)
}

/// The text before a number, the width of the number, and ranges of it.
type Ranges<'a> = (&'a str, usize, Vec<(u64, u64)>);

/// The names as a list of Slurm, in the order of the names: numbers at their ends become ranges.
pub fn compressed(names: &[String]) -> String {
    let mut names: Vec<&str> = names.iter().map(String::as_str).collect();
    names.sort_by(|a, b| by_name(a, b));
    names.dedup();
    let mut parts: Vec<Ranges> = Vec::new();
    for name in names {
        let letters = name.trim_end_matches(|c: char| c.is_ascii_digit());
        let digits = &name[letters.len()..];
        let Ok(number) = digits.parse::<u64>() else {
            parts.push((name, 0, Vec::new()));
            continue;
        };
        // Without leading zeros, numbers of any width stand in one bracket.
        let width = if digits.starts_with('0') { digits.len() } else { 0 };
        match parts.last_mut() {
            Some((before, same, ranges))
                if *before == letters && (*same == width || *same == digits.len()) && !ranges.is_empty() =>
            {
                match ranges.last_mut() {
                    Some((_, last)) if *last + 1 == number => *last = number,
                    _ => ranges.push((number, number)),
                }
            }
            _ => parts.push((letters, width, vec![(number, number)])),
        }
    }
    let text = |(before, width, ranges): &Ranges| {
        let number = |n: u64| format!("{n:0width$}");
        let range = |&(a, b): &(u64, u64)| {
            if a == b { number(a) } else { format!("{}-{}", number(a), number(b)) }
        };
        match ranges.as_slice() {
            [] => (*before).to_owned(),
            [(a, b)] if a == b => format!("{before}{}", number(*a)),
            ranges => format!("{before}[{}]", ranges.iter().map(range).collect::<Vec<_>>().join(",")),
        }
    };
    parts.iter().map(text).collect::<Vec<_>>().join(",")
}

/// The order of names in which numbers count as numbers: `n2` is before `n10`.
pub fn by_name(a: &str, b: &str) -> Ordering {
    let (mut a, mut b) = (a, b);
    loop {
        let digits = |text: &str| text.bytes().take_while(u8::is_ascii_digit).count();
        let (of_a, of_b) = (digits(a), digits(b));
        if of_a > 0 && of_b > 0 {
            let number = |text: &str| text.trim_start_matches('0').to_owned();
            let (x, y) = (number(&a[..of_a]), number(&b[..of_b]));
            let order = x.len().cmp(&y.len()).then_with(|| x.cmp(&y)).then(of_a.cmp(&of_b));
            if order != Ordering::Equal {
                return order;
            }
            (a, b) = (&a[of_a..], &b[of_b..]);
            continue;
        }
        let (mut rest_a, mut rest_b) = (a.chars(), b.chars());
        match (rest_a.next(), rest_b.next()) {
            (Some(x), Some(y)) if x == y => (a, b) = (rest_a.as_str(), rest_b.as_str()),
            (x, y) => return x.cmp(&y),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_expanded_as_slurm_does() {
        let names = |list: &str| expand(list).map(|names| names.join(" "));
        assert_eq!(names("n[1-3,7],login").as_deref(), Some("n1 n2 n3 n7 login"));
        assert_eq!(
            names("frontier[00009-00011]").as_deref(),
            Some("frontier00009 frontier00010 frontier00011")
        );
        assert_eq!(names("r[1-2]n[1-2]").as_deref(), Some("r1n1 r1n2 r2n1 r2n2"));
        for wrong in ["n[1-3", "n]1", "n[3-1]", "n[a-b]", "a,,b", "", "n[1-99999999]", "n[-1]"] {
            assert_eq!(expand(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn a_list_of_names_names_them_again() {
        let names = |list: &str| expand(list).expect("a list");
        for list in ["n[1-3,7]", "frontier[00009-00011,00128]", "login,n[1-2]", "n[8-12]", "a7", "x[01-10]"] {
            let short = compressed(&names(list));
            assert_eq!(short, list);
            assert_eq!(names(&short), names(list));
        }
        assert_eq!(compressed(&names("n10,n9,n2")), "n[2,9-10]");
        assert_eq!(by_name("n2", "n10"), Ordering::Less);
        assert_eq!(by_name("n02", "n2"), Ordering::Greater);
    }
}
