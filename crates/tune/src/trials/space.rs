//! The space of a tuning: every point is a value for each setting, with what the planner predicts for it.

use std::collections::{BTreeMap, BTreeSet};

/// The values of settings by their keys in a configuration, as `parallel.tp` → `4`.
pub type Values = BTreeMap<String, String>;

/// A setting, and every value that it has in the space.
#[derive(Clone, Debug, PartialEq)]
pub struct Setting {
    /// Its key in a configuration.
    pub key: String,
    /// Its values, numbers in order.
    pub values: Vec<String>,
    /// The place of each value on a scale; `None` if the values are words.
    scale: Option<Vec<f64>>,
}

/// One point of the space.
#[derive(Clone, Debug, PartialEq)]
pub struct Point {
    /// For each setting the index of its value.
    pub levels: Vec<u16>,
    /// The predicted value of the objective, which is minimised. `None` where nothing is predicted.
    pub predicted: Option<f64>,
    /// The predicted memory of the fullest rank, as a share of what it may take.
    pub memory: Option<f64>,
}

/// A point before its settings are compared with the others.
#[derive(Clone, Debug, Default)]
pub struct Proposal {
    /// Its settings.
    pub values: Values,
    /// See [`Point::predicted`].
    pub predicted: Option<f64>,
    /// See [`Point::memory`].
    pub memory: Option<f64>,
}

/// Settings and points.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Space {
    /// The settings that are not the same everywhere.
    pub settings: Vec<Setting>,
    /// The points.
    pub points: Vec<Point>,
}

/// The text of a setting that a proposal does not have.
const ABSENT: &str = "–";

impl Space {
    /// The space of some proposals. A setting that all of them have alike is left out.
    pub fn new(proposals: &[Proposal]) -> Self {
        let mut keys: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
        for key in proposals.iter().flat_map(|proposal| proposal.values.keys()) {
            keys.entry(key).or_default();
        }
        for (key, values) in &mut keys {
            values.extend(proposals.iter().map(|proposal| value(proposal, key)));
        }
        let settings: Vec<Setting> = keys
            .iter()
            .filter(|(_, values)| values.len() > 1)
            .map(|(key, values)| Setting::new(key, values.iter().copied()))
            .collect();
        let index = |setting: &Setting| {
            let indexed = setting.values.iter().enumerate();
            indexed.map(|(i, value)| (value.clone(), i as u16)).collect::<BTreeMap<String, u16>>()
        };
        let indices: Vec<BTreeMap<String, u16>> = settings.iter().map(index).collect();
        let point = |proposal: &Proposal| {
            let levels = settings.iter().zip(&indices);
            Point {
                levels: levels.map(|(setting, index)| index[value(proposal, &setting.key)]).collect(),
                predicted: proposal.predicted,
                memory: proposal.memory,
            }
        };
        let points = proposals.iter().map(point).collect();
        Space { settings, points }
    }

    /// The points without what the planner predicts for them.
    #[must_use]
    pub fn without_predictions(&self) -> Space {
        let bare = |point: &Point| Point { predicted: None, memory: None, ..point.clone() };
        Space { settings: self.settings.clone(), points: self.points.iter().map(bare).collect() }
    }
}

fn value<'a>(proposal: &'a Proposal, key: &str) -> &'a str {
    proposal.values.get(key).map_or(ABSENT, String::as_str)
}

impl Setting {
    fn new<'a>(key: &str, values: impl Iterator<Item = &'a str>) -> Self {
        let mut values: Vec<String> = values.map(str::to_owned).collect();
        let numbers: Option<Vec<f64>> = values.iter().map(|value| value.parse().ok()).collect();
        let numbers = numbers.filter(|numbers| numbers.iter().all(|number| *number >= 0.0));
        let scale = numbers.map(|mut numbers| {
            values.sort_by(|a, b| number(a).total_cmp(&number(b)));
            numbers.sort_by(f64::total_cmp);
            // Counts differ by factors; a switch or a stage, which may be 0, by one.
            let counts = numbers.iter().all(|&number| number >= 1.0);
            numbers.into_iter().map(|number| if counts { number.log2() } else { number }).collect()
        });
        Setting { key: key.to_owned(), values, scale }
    }

    /// How far two values are apart: doublings for counts, 1 for words that differ.
    pub fn distance(&self, a: usize, b: usize) -> f64 {
        match &self.scale {
            Some(scale) => (scale[a] - scale[b]).abs(),
            None => f64::from(u8::from(a != b)),
        }
    }
}

fn number(text: &str) -> f64 {
    text.parse().expect("all values are numbers")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn proposal(tp: &str, recompute: &str) -> Proposal {
        let values = [("parallel.tp", tp), ("memory.recompute", recompute), ("batch.micro", "1")];
        let values = values.map(|(key, value)| (key.to_owned(), value.to_owned())).into();
        Proposal { values, ..Proposal::default() }
    }

    #[test]
    fn counts_are_apart_by_doublings_and_words_by_one() {
        let space = Space::new(&[proposal("16", "none"), proposal("2", "full"), proposal("4", "none")]);
        let keys: Vec<&str> = space.settings.iter().map(|setting| setting.key.as_str()).collect();
        assert_eq!(keys, ["memory.recompute", "parallel.tp"], "what is the same everywhere is left out");
        let tp = &space.settings[1];
        assert_eq!(tp.values, ["2", "4", "16"]);
        assert!((tp.distance(0, 2) - 3.0).abs() < 1e-12);
        assert!((space.settings[0].distance(0, 1) - 1.0).abs() < 1e-12);
        assert_eq!(space.points[1].levels, [0, 0]);
        assert_eq!(space.points[2].levels, [1, 1]);
    }
}
