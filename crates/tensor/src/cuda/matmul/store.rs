//! Choices of earlier runs, in one text file per card and cuBLASLt version: a line for each product, with the way and
//! the words of the algorithm.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::fs::{self, OpenOptions};
use std::io::Write as _;
use std::path::{Path, PathBuf};

use super::library::Algorithm;
use super::product::Chosen;
use crate::cuda::cache;

/// Counted up when the ways to do a product change, how fast ours is, or how they are compared, so that choices among
/// others, or made in another manner, are not taken for them.
const WAYS: u32 = 4;

/// Algorithms that were found to be the fastest.
#[derive(Debug)]
pub struct Store {
    path: PathBuf,
    choices: HashMap<String, Chosen>,
}

impl Store {
    /// What was kept for a card and a version, empty if nothing was. `None` if this user has no cache folder.
    pub fn open(device: &str, version: usize) -> Option<Self> {
        let name: String = device.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '-' }).collect();
        Some(Self::at(&cache::folder("products")?.join(format!("{name}-{version}-{WAYS}.txt"))))
    }

    fn at(path: &Path) -> Self {
        let text = fs::read_to_string(path).unwrap_or_default();
        Store { path: path.to_owned(), choices: text.split_inclusive('\n').filter_map(parse).collect() }
    }

    /// The choice for a product.
    pub fn get(&self, key: &str) -> Option<Chosen> {
        self.choices.get(key).copied()
    }

    /// Keeps a choice. Ranks append whole lines to the same file; that it cannot be written is no failure.
    pub fn put(&mut self, key: &str, chosen: Chosen) {
        let line = format!("{}\n", line(key, &chosen));
        self.choices.insert(key.to_owned(), chosen);
        let folder = self.path.parent().map_or(Ok(()), fs::create_dir_all);
        let file = folder.and_then(|()| OpenOptions::new().create(true).append(true).open(&self.path));
        let _ = file.and_then(|mut file| file.write_all(line.as_bytes()));
    }
}

fn line(key: &str, chosen: &Chosen) -> String {
    let mut line = format!("{key}: {}", chosen.way);
    for word in chosen.algorithm.data {
        let _ = write!(line, " {word:x}");
    }
    line
}

/// The inverse of [`line`]; lines that were cut short are none, even if what is left of the last word is a number too.
fn parse(line: &str) -> Option<(String, Chosen)> {
    let (key, rest) = line.strip_suffix('\n')?.rsplit_once(':')?;
    let (way, words) = rest.trim_start().split_once(' ')?;
    let words = words.split_whitespace().map(|word| u64::from_str_radix(word, 16));
    let words = words.collect::<Result<Vec<_>, _>>().ok()?;
    let algorithm = Algorithm { data: words.try_into().ok()? };
    Some((key.to_owned(), Chosen { way: way.parse().ok()?, algorithm }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn choices_are_found_again_and_a_torn_line_is_none() {
        let path = std::env::temp_dir().join(format!("kintsugi-products-{}.txt", std::process::id()));
        let _ = fs::remove_file(&path);
        let algorithm = Algorithm { data: [0, 1, 2, 3, 4, 5, 6, u64::MAX] };
        Store::at(&path).put("NN 1x2x3 [16, 16, 16]", Chosen { way: 1, algorithm });
        for torn in [&b"TN 4x5x6: 0 1 2\n"[..], b"TN 4x5x6: 0 1 2 3 4 5 6 7 8"] {
            OpenOptions::new().append(true).open(&path).and_then(|mut f| f.write_all(torn)).unwrap();
        }
        let store = Store::at(&path);
        let found = store.get("NN 1x2x3 [16, 16, 16]");
        assert_eq!(found.map(|chosen| (chosen.way, chosen.algorithm.data)), Some((1, algorithm.data)));
        assert!(store.get("TN 4x5x6").is_none());
        fs::remove_file(&path).unwrap();
    }
}
