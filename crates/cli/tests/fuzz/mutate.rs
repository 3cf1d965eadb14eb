//! Small changes to valid bytes: of bits, of ranges, and for text of numbers, words and lines.

use kintsugi_spec::splitmix64::{GOLDEN, mix};

/// Random numbers that depend on a seed alone (SplitMix64).
pub struct Random(u64);

impl Random {
    /// The numbers of a seed.
    pub fn new(seed: u64) -> Self {
        Random(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(GOLDEN);
        mix(self.0)
    }

    /// A number below `end`; 0 where there is none.
    pub fn below(&mut self, end: usize) -> usize {
        if end == 0 { 0 } else { (self.next() % end as u64) as usize }
    }

    /// One of several.
    pub fn pick<'a, T: ?Sized>(&mut self, of: &[&'a T]) -> &'a T {
        of[self.below(of.len())]
    }
}

/// What stands in place of a number in a text.
const NUMBERS: [&str; 26] = [
    "0",
    "-1",
    "1",
    "2",
    "3",
    "7",
    "0.5",
    "16383",
    "16384",
    "65536",
    "4294967295",
    "4294967296",
    "9223372036854775807",
    "9223372036854775808",
    "18446744073709551615",
    "18446744073709551616",
    "1e18",
    "1e308",
    "-1e308",
    "1e-320",
    "1e999",
    "nan",
    "inf",
    "null",
    "true",
    "[]",
];
/// What stands in place of a word.
const WORDS: [&str; 10] =
    ["", " ", "\u{0}", "a", "ä", "\u{1F600}", "../../etc/passwd", "(((((((((((", "[", "\\p{N}{1,3}"];
/// Integers at which readers go wrong, as bytes.
const INTEGERS: [u64; 10] =
    [0, 1, 0x7F, 0xFF, 0x7FFF, 0xFFFF, 0x7FFF_FFFF, 0xFFFF_FFFF, 0x7FFF_FFFF_FFFF_FFFF, u64::MAX];
const DEPTH: usize = 3000;

/// Changes bytes, one to three times; `text` is whether they are one.
pub fn mutate(random: &mut Random, bytes: &mut Vec<u8>, text: bool) {
    for _ in 0..=random.below(3) {
        if text && random.below(4) > 0 {
            let changed = change_text(random, &String::from_utf8_lossy(bytes));
            *bytes = changed.into_bytes();
        } else {
            change_bytes(random, bytes);
        }
    }
}

fn change_bytes(random: &mut Random, bytes: &mut Vec<u8>) {
    let at = random.below(bytes.len());
    let range = at..(at + (1 << random.below(10))).min(bytes.len());
    match random.below(8) {
        0 | 1 if !bytes.is_empty() => bytes[at] ^= 1 << random.below(8),
        2 => bytes[range].fill(random.next() as u8),
        3 => {
            let integer = INTEGERS[random.below(INTEGERS.len())].to_le_bytes();
            let length = (1 << random.below(4)).min(bytes.len() - at);
            bytes[at..at + length].copy_from_slice(&integer[..length]);
        }
        4 => bytes.truncate(at),
        5 => drop(bytes.drain(range)),
        6 => {
            let copy = bytes[range].to_vec();
            let to = random.below(bytes.len() + 1);
            bytes.splice(to..to, copy);
        }
        _ => bytes.extend((0..random.below(64)).map(|i| (i * 37) as u8)),
    }
}

fn change_text(random: &mut Random, text: &str) -> String {
    let mut lines: Vec<&str> = text.split_inclusive('\n').collect();
    let at = random.below(lines.len());
    match random.below(8) {
        0..=2 => replace(random, text, |c| c.is_ascii_digit() || "+-.".contains(c), &NUMBERS),
        3 | 4 => replace(random, text, |c| c.is_alphanumeric() || "_-<>|".contains(c), &WORDS),
        5 if !lines.is_empty() => {
            lines.remove(at);
            lines.concat()
        }
        6 if !lines.is_empty() => {
            let line = lines[at];
            lines.insert(random.below(lines.len() + 1), line);
            lines.concat()
        }
        _ => {
            let nested =
                random.pick(&["[", "{\"a\":", "{a=", "\"", ",", "#"]).repeat(1 + random.below(DEPTH));
            let place = (0..=random.below(text.len() + 1)).rev().find(|&place| text.is_char_boundary(place));
            let (before, after) = text.split_at(place.unwrap_or(0));
            format!("{before}{nested}{after}")
        }
    }
}

/// Puts something else in place of one run of such characters: one of `by`, or another run of the text.
fn replace(random: &mut Random, text: &str, of: fn(char) -> bool, by: &[&str]) -> String {
    let mut runs = Vec::new();
    let mut begun = None;
    for (at, c) in text.char_indices().chain([(text.len(), '\n')]) {
        match (begun, of(c)) {
            (None, true) => begun = Some(at),
            (Some(start), false) => {
                runs.push(start..at);
                begun = None;
            }
            _ => {}
        }
    }
    if runs.is_empty() {
        return text.to_owned();
    }
    let run = runs[random.below(runs.len())].clone();
    let other = runs[random.below(runs.len())].clone();
    let new = if random.below(4) == 0 { &text[other] } else { random.pick(by) };
    [&text[..run.start], new, &text[run.end..]].concat()
}
