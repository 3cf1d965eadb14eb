//! Tuning results of earlier runs, in one text file per GPU model and cuBLASLt version. Each line has a product's key,
//! the variant, and the words of cuBLASLt's algorithm.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::fs::{self, OpenOptions};
use std::io::Write as _;
use std::path::{Path, PathBuf};

use super::library::Algorithm;
use super::product::Choice;
use crate::cache;

/// Version of the file's contents. Increase it when the variants, the speed of our kernels, or the way they are
/// measured changes, so that older choices are ignored.
const VERSION: u32 = 5;

/// The fastest known algorithm of each product.
#[derive(Debug)]
pub struct TuningCache {
    path: PathBuf,
    choices: HashMap<String, Choice>,
}

impl TuningCache {
    /// Reads the file of a GPU and a version; empty if there is none. `None` if the user has no cache folder.
    pub fn open(device: &str, version: usize) -> Option<Self> {
        let name: String = device.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '-' }).collect();
        Some(Self::at(&cache::folder("products")?.join(format!("{name}-{version}-{VERSION}.txt"))))
    }

    fn at(path: &Path) -> Self {
        let text = fs::read_to_string(path).unwrap_or_default();
        TuningCache { path: path.to_owned(), choices: text.split_inclusive('\n').filter_map(parse).collect() }
    }

    /// The choice for a product.
    pub fn get(&self, key: &str) -> Option<Choice> {
        self.choices.get(key).copied()
    }

    /// Adds a choice. Ranks append whole lines to the same file. A failed write is ignored.
    pub fn put(&mut self, key: &str, choice: Choice) {
        let line = format!("{}\n", line(key, &choice));
        self.choices.insert(key.to_owned(), choice);
        let folder = self.path.parent().map_or(Ok(()), fs::create_dir_all);
        let file = folder.and_then(|()| OpenOptions::new().create(true).append(true).open(&self.path));
        let _ = file.and_then(|mut file| file.write_all(line.as_bytes()));
    }
}

fn line(key: &str, choice: &Choice) -> String {
    let mut line = format!("{key}: {}", choice.variant);
    for word in choice.algorithm.data {
        let _ = write!(line, " {word:x}");
    }
    line
}

/// The inverse of [`line`]. Truncated lines are ignored, even if what is left of the last word is a number.
fn parse(line: &str) -> Option<(String, Choice)> {
    let (key, rest) = line.strip_suffix('\n')?.rsplit_once(':')?;
    let (variant, words) = rest.trim_start().split_once(' ')?;
    let words = words.split_whitespace().map(|word| u64::from_str_radix(word, 16));
    let words = words.collect::<Result<Vec<_>, _>>().ok()?;
    let algorithm = Algorithm { data: words.try_into().ok()? };
    Some((key.to_owned(), Choice { variant: variant.parse().ok()?, algorithm }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn choices_are_read_back_and_truncated_lines_are_ignored() {
        let path = std::env::temp_dir().join(format!("kintsugi-products-{}.txt", std::process::id()));
        let _ = fs::remove_file(&path);
        let algorithm = Algorithm { data: [0, 1, 2, 3, 4, 5, 6, u64::MAX] };
        TuningCache::at(&path).put("NN 1x2x3 [16, 16, 16]", Choice { variant: 1, algorithm });
        for truncated in [&b"TN 4x5x6: 0 1 2\n"[..], b"TN 4x5x6: 0 1 2 3 4 5 6 7 8"] {
            OpenOptions::new().append(true).open(&path).and_then(|mut f| f.write_all(truncated)).unwrap();
        }
        let cache = TuningCache::at(&path);
        let found = cache.get("NN 1x2x3 [16, 16, 16]");
        assert_eq!(found.map(|choice| (choice.variant, choice.algorithm.data)), Some((1, algorithm.data)));
        assert!(cache.get("TN 4x5x6").is_none());
        fs::remove_file(&path).unwrap();
    }
}
