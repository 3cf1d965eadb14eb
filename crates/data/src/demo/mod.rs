//! The built-in corpus: unlimited stories in a small artificial language whose entropy is known exactly.
//!
//! Nothing is stored: a sample is generated from the seed, the split and its index. A model's loss can be compared with
//! [`Dataset::floor`], the lowest possible loss.

mod automaton;
mod grammar;
mod words;

use self::automaton::Automaton;
use crate::random::RandomStream;
use crate::{DataError, Dataset, Split};

/// The demo language with a seed.
#[derive(Clone, Debug)]
pub struct Demo {
    seed: u64,
    /// The split that the validation samples are generated from.
    validation: [u64; 2],
    words: Vec<&'static str>,
    automaton: Automaton,
}

impl Demo {
    /// The corpus of a seed. All seeds use the same grammar, and have the same text for validation.
    pub fn new(seed: u64) -> Demo {
        // Training samples have another key, so they are never the same.
        let validation = [1, Split::Validation as u64];
        Demo { seed, validation, words: words::vocabulary(), automaton: grammar::automaton() }
    }

    /// The same corpus with `split` as its validation split.
    #[must_use]
    pub fn validated_on(self, split: Split) -> Demo {
        match split {
            Split::Train => Demo { validation: [self.seed, Split::Train as u64], ..self },
            Split::Validation => self,
        }
    }

    /// Every word, by token.
    pub fn words(&self) -> &[&'static str] {
        &self.words
    }

    /// Tokens as text, with a space between two words. A token without a word is its number in brackets, since a model's
    /// vocabulary may be larger.
    pub fn text(&self, tokens: &[u32]) -> String {
        let word = |&token: &u32| match self.words.get(token as usize) {
            Some(&word) => word.to_owned(),
            None => format!("[{token}]"),
        };
        tokens.iter().map(word).collect::<Vec<_>>().join(" ")
    }

    /// The tokens of a text whose words are separated by spaces. The word that begins every text may be omitted.
    pub fn tokens(&self, text: &str) -> Result<Vec<u32>, DataError> {
        let token = |word: &str| self.words.iter().position(|&known| known == word).map(|token| token as u32);
        let mut tokens = vec![0];
        for word in text.split_whitespace() {
            let unknown = || {
                let words = self.words.join(" ");
                DataError::Value(format!(
                    "\"{word}\" is not a word of the demo's language, which are: {words}"
                ))
            };
            tokens.push(token(word).ok_or_else(unknown)?);
        }
        // Token 0 is that first word.
        if tokens.get(1) == Some(&0) {
            tokens.remove(0);
        }
        Ok(tokens)
    }

    /// The loss of a perfect model on each of `tokens`, given the tokens before it, in nats. The first is always 0.
    ///
    /// Stops at the first token that the language does not allow.
    pub fn surprisals(&self, tokens: &[u32]) -> impl Iterator<Item = f64> {
        tokens.iter().scan(0, |state, &token| {
            let (probability, next) = self.automaton.follow(*state, token)?;
            *state = next;
            Some(-probability.ln())
        })
    }
}

impl Dataset for Demo {
    fn vocab(&self) -> usize {
        self.words.len()
    }

    fn floor(&self, sequence: usize) -> Option<f64> {
        // The first token is the first input, never a target.
        let total: f64 = self.automaton.entropies().skip(1).take(sequence).sum();
        Some(total / sequence as f64)
    }

    fn sample(&self, split: Split, index: u64, out: &mut [u32]) -> Result<(), DataError> {
        let [seed, split] = match split {
            Split::Train => [self.seed, split as u64],
            Split::Validation => self.validation,
        };
        let mut random = RandomStream::new(&[seed, split, index]);
        self.automaton.generate(&mut random, out);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SEQUENCE: usize = 64;

    fn sample(seed: u64, split: Split, index: u64) -> Vec<u32> {
        let mut tokens = vec![0; SEQUENCE + 1];
        Demo::new(seed).sample(split, index, &mut tokens).unwrap();
        tokens
    }

    #[test]
    fn the_floor_is_what_samples_cost_a_perfect_model() {
        const SAMPLES: usize = 4000;
        let demo = Demo::new(5);
        let mut tokens = [0; SEQUENCE + 1];
        let losses: Vec<f64> = (0..SAMPLES as u64)
            .map(|index| {
                demo.sample(Split::Train, index, &mut tokens).unwrap();
                let surprisals: Vec<f64> = demo.surprisals(&tokens).collect();
                assert_eq!(surprisals.len(), tokens.len());
                surprisals[1..].iter().sum::<f64>() / SEQUENCE as f64
            })
            .collect();
        let mean = losses.iter().sum::<f64>() / SAMPLES as f64;
        let variance = losses.iter().map(|loss| (loss - mean).powi(2)).sum::<f64>() / (SAMPLES - 1) as f64;
        let error = (variance / SAMPLES as f64).sqrt();
        let floor = demo.floor(SEQUENCE).unwrap();
        assert!((mean - floor).abs() < 3.0 * error, "{mean} +- {error}, floor {floor}");
        assert!(error < 0.005, "too few samples to tell: {error}");
    }

    #[test]
    fn a_sample_is_its_seed_split_and_index() {
        let one = sample(1, Split::Train, 1);
        assert_eq!(one, sample(1, Split::Train, 1));
        assert_ne!(one, sample(2, Split::Train, 1));
        assert_ne!(one, sample(1, Split::Validation, 1));
        assert_ne!(one, sample(1, Split::Train, 2));
        assert_eq!(sample(1, Split::Validation, 1), sample(2, Split::Validation, 1));
    }

    #[test]
    fn a_shorter_sample_is_the_beginning_of_a_longer_one() {
        let mut short = [0; 10];
        Demo::new(1).sample(Split::Train, 1, &mut short).unwrap();
        assert_eq!(short, sample(1, Split::Train, 1)[..10]);
    }

    fn tokens(text: &str) -> Vec<u32> {
        let words = words::vocabulary();
        let token =
            |word| words.iter().position(|&known| known == word).expect("a word of the language") as u32;
        text.split(' ').map(token).collect()
    }

    /// How many tokens of the text the language allows, and how many there are.
    fn allowed(text: &str) -> (usize, usize) {
        let tokens = tokens(text);
        (Demo::new(0).surprisals(&tokens).count(), tokens.len())
    }

    #[test]
    fn verbs_agree_with_their_subject_across_other_nouns() {
        assert_eq!(allowed("<s> the dogs near a small river sleep"), (8, 8));
        assert_eq!(allowed("<s> the dogs near a small river sleeps"), (7, 8), "the number is wrong");
        assert_eq!(allowed("<s> the dogs that see a bear shine"), (7, 8), "the class is wrong");
        assert_eq!(allowed("<s> why does the dog that sees the cats sleep ?"), (11, 11));
        assert_eq!(allowed("<s> why does the dog that sees the cats sleeps"), (9, 10), "the form is wrong");
    }

    #[test]
    fn a_sentence_comes_back_to_the_name_it_opened_with() {
        assert_eq!(allowed("<s> Ada gives a bell to Ben , who thanks Ada ."), (12, 12));
        assert_eq!(allowed("<s> Ada gives a bell to Ben , who thanks Ben"), (10, 11));
        assert_eq!(allowed("<s> Gus says that a cat runs , so Gus smiles . Eva hears"), (14, 14));
        assert_eq!(allowed("<s> Gus says that a cat runs , so Eva"), (9, 10));
    }

    #[test]
    fn what_must_come_costs_nothing() {
        let demo = Demo::new(0);
        let surprisals: Vec<f64> =
            demo.surprisals(&tokens("<s> Ada gives a bell to Ben , who thanks Ada .")).collect();
        let free: Vec<usize> = (0..surprisals.len()).filter(|&i| surprisals[i] == 0.0).collect();
        assert_eq!(free, [0, 5, 7, 8, 10, 11]);
    }

    #[test]
    fn text_becomes_tokens_and_text_again() {
        let demo = Demo::new(1);
        for text in
            ["the dogs near a small river sleep", "<s> the dogs near a small river sleep", " the  dogs "]
        {
            let tokens = demo.tokens(text).unwrap();
            let words: Vec<&str> = text.trim_start_matches("<s> ").split_whitespace().collect();
            assert_eq!(demo.text(&tokens), format!("<s> {}", words.join(" ")));
        }
        assert_eq!(demo.tokens("").unwrap(), [0]);
        assert_eq!(demo.text(&[0, 128]), "<s> [128]");
        let unknown = demo.tokens("the unicorn").unwrap_err().to_string();
        assert!(
            unknown.starts_with("\"unicorn\" is not a word of the demo's language, which are: <s> "),
            "{unknown}"
        );
    }

    #[test]
    fn samples_never_change() {
        let demo = Demo::new(1);
        assert_eq!(
            demo.text(&sample(1, Split::Train, 0)),
            "<s> Ben brings a stone to Cleo , who greets Ben . this dog sleeps . Hana gives the lamp to Ada , who \
             thanks Hana . Hana says that the birds near many small small small hills sleep , so Hana smiles . why \
             do the birds see the bell ? Gus thinks that my bells near these rivers shine , so Gus laughs"
        );
        assert_eq!(format!("{:.12}", demo.floor(SEQUENCE).unwrap()), "1.540878693036");
    }
}
