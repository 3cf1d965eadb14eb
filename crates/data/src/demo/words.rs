//! The 128 words of the demo language, by category.
//!
//! A token is a word's position in the concatenated categories, in the order of [`WordCategory::ALL`]. Within a category the
//! first words are the most common, as in Zipf's law.

use Class::{Animal, Thing};
use Number::{Many, One};
use WordCategory::{
    Adjective, Adverb, Ask, Auxiliary, Comma, Determiner, Give, Join, Name, Noun, Place, Preposition,
    Question, React, Report, So, Start, Stop, Thank, That, To, Transitive, Verb, Who,
};

/// Singular or plural, which determines determiners, nouns and verbs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Number {
    One,
    Many,
}

/// The class of a noun, which determines its possible verbs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Class {
    Animal,
    Thing,
}

/// Words with the same grammatical role.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WordCategory {
    Start,
    Stop,
    Question,
    Comma,
    That,
    So,
    To,
    Who,
    Name,
    Report,
    React,
    Give,
    Thank,
    Ask,
    Auxiliary(Number),
    /// `None` agrees with either number.
    Determiner(Option<Number>),
    Adjective,
    Noun(Class, Number),
    Place(Number),
    Verb(Class, Number),
    Transitive(Number),
    Preposition,
    Adverb,
    Join,
}

/// The sum of the shares of a category's words.
pub(super) const WHOLE: u64 = 1 << 16;

impl WordCategory {
    /// Every category, in the order of the vocabulary.
    #[rustfmt::skip]
    pub(super) const ALL: [WordCategory; 35] = [
        Start, Stop, Question, Comma, That, So, To, Who,
        Name, Report, React, Give, Thank, Ask, Auxiliary(One), Auxiliary(Many),
        Determiner(None), Determiner(Some(One)), Determiner(Some(Many)), Adjective,
        Noun(Animal, One), Noun(Animal, Many), Noun(Thing, One), Noun(Thing, Many), Place(One), Place(Many),
        Verb(Animal, One), Verb(Animal, Many), Verb(Thing, One), Verb(Thing, Many),
        Transitive(One), Transitive(Many), Preposition, Adverb, Join,
    ];

    /// Its words, most common first.
    pub(super) fn words(self) -> &'static [&'static str] {
        match self {
            Start => &["<s>"],
            Stop => &["."],
            Question => &["?"],
            Comma => &[","],
            That => &["that"],
            So => &["so"],
            To => &["to"],
            Who => &["who"],
            Name => &["Ada", "Ben", "Cleo", "Dov", "Eva", "Finn", "Gus", "Hana"],
            Report => &["says", "thinks", "hears"],
            React => &["smiles", "laughs", "listens"],
            Give => &["gives", "brings", "lends"],
            Thank => &["thanks", "greets"],
            Ask => &["why", "where", "when"],
            Auxiliary(One) => &["does"],
            Auxiliary(Many) => &["do"],
            Determiner(None) => &["the", "my"],
            Determiner(Some(One)) => &["a", "this", "every"],
            Determiner(Some(Many)) => &["some", "these", "many"],
            Adjective => &["small", "red", "big", "quiet", "young", "bright", "round", "lost"],
            Noun(Animal, One) => &["dog", "cat", "bird", "horse", "fox", "bear"],
            Noun(Animal, Many) => &["dogs", "cats", "birds", "horses", "foxes", "bears"],
            Noun(Thing, One) => &["lamp", "stone", "boat", "kite", "bell", "cup"],
            Noun(Thing, Many) => &["lamps", "stones", "boats", "kites", "bells", "cups"],
            Place(One) => &["river", "hill", "house", "garden", "road"],
            Place(Many) => &["rivers", "hills", "houses", "gardens", "roads"],
            Verb(Animal, One) => &["sleeps", "runs", "sings", "waits", "jumps", "hides"],
            Verb(Animal, Many) => &["sleep", "run", "sing", "wait", "jump", "hide"],
            Verb(Thing, One) => &["shines", "falls", "breaks", "moves", "turns"],
            Verb(Thing, Many) => &["shine", "fall", "break", "move", "turn"],
            Transitive(One) => &["sees", "likes", "finds", "follows", "carries"],
            Transitive(Many) => &["see", "like", "find", "follow", "carry"],
            Preposition => &["near", "behind", "under", "beside"],
            Adverb => &["quickly", "often", "slowly", "quietly", "today", "again"],
            Join => &["and", "but", "while", "because"],
        }
    }

    /// The token of its first word. The others follow.
    pub(super) fn first_token(self) -> u32 {
        let before = WordCategory::ALL.iter().take_while(|&&category| category != self);
        before.map(|category| category.words().len() as u32).sum()
    }

    /// The frequency of each word, in parts of [`WHOLE`]: the n-th is proportional to 1 / n.
    ///
    /// The frequencies are integers, so that samples are the same on every machine.
    pub(super) fn shares(self) -> Vec<u64> {
        let raw: Vec<u64> = (0..self.words().len() as u64).map(|rank| WHOLE / (rank + 1)).collect();
        let total: u64 = raw.iter().sum();
        let mut shares: Vec<u64> = raw.iter().map(|share| WHOLE * share / total).collect();
        shares[0] += WHOLE - shares.iter().sum::<u64>();
        shares
    }
}

/// Every word, by token.
pub(super) fn vocabulary() -> Vec<&'static str> {
    WordCategory::ALL.iter().flat_map(|category| category.words()).copied().collect()
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn a_word_has_one_token_and_a_category_its_own_words() {
        let vocabulary = vocabulary();
        assert_eq!(vocabulary.len(), 128);
        assert_eq!(vocabulary.iter().collect::<HashSet<_>>().len(), 128);
        for category in WordCategory::ALL {
            assert_eq!(vocabulary[category.first_token() as usize], category.words()[0]);
        }
    }

    #[test]
    fn shares_fall_and_add_up() {
        for category in WordCategory::ALL {
            let shares = category.shares();
            assert_eq!(shares.iter().sum::<u64>(), WHOLE, "{category:?}");
            assert!(shares.is_sorted_by(|a, b| a > b), "{category:?}: {shares:?}");
        }
    }
}
