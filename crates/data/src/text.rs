//! Text for a model and back: its tokenizer, or the words of the demo language.

use crate::{DataError, Demo, Tokenizer};

/// What turns text into a model's tokens.
#[derive(Clone)]
pub enum Text {
    /// The demo's language, word by word.
    Demo(Demo),
    /// A tokenizer.
    Tokenizer(Tokenizer),
}

impl Text {
    /// A tokenizer by its name, as [`Tokenizer::open`] has it; `demo` is the demo's language.
    pub fn open(name: &str) -> Result<Text, DataError> {
        // The language is the same for every seed.
        if name == "demo" { Ok(Text::Demo(Demo::new(0))) } else { Tokenizer::open(name).map(Text::Tokenizer) }
    }

    /// The tokens of a text to go on from. A text of the demo's language begins with the word that all of them do.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, DataError> {
        match self {
            Text::Demo(demo) => demo.tokens(text),
            Text::Tokenizer(tokenizer) => tokenizer.encoder().encode(text).map(<[u32]>::to_vec),
        }
    }

    /// The same with what the tokenizer itself puts around a text, such as a token that begins every one.
    pub fn encode_prompt(&self, text: &str) -> Result<Vec<u32>, DataError> {
        match self {
            Text::Demo(_) => self.encode(text),
            Text::Tokenizer(tokenizer) => tokenizer.encoder().encode_prompt(text).map(<[u32]>::to_vec),
        }
    }

    /// The text of tokens.
    pub fn decode(&self, tokens: &[u32]) -> Result<String, DataError> {
        match self {
            Text::Demo(demo) => Ok(demo.text(tokens)),
            Text::Tokenizer(tokenizer) => tokenizer.decode(tokens),
        }
    }

    /// Size of the vocabulary: every token is below it.
    pub fn vocab(&self) -> usize {
        match self {
            Text::Demo(demo) => demo.words().len(),
            Text::Tokenizer(tokenizer) => tokenizer.vocab(),
        }
    }

    /// The token that ends a text, where there is one.
    pub fn end(&self) -> Option<u32> {
        match self {
            Text::Demo(_) => None,
            Text::Tokenizer(tokenizer) => tokenizer.end_of_document(),
        }
    }
}

/// A text that grows token by token.
pub struct GrowingText<'a> {
    text: &'a Text,
    tokens: Vec<u32>,
    /// From here on tokens are decoded: some of what was shown, as the look of a token may depend on those before it.
    from: usize,
    /// Up to here they were shown.
    shown: usize,
}

impl<'a> GrowingText<'a> {
    /// A text that begins with these tokens, which have been shown.
    pub fn new(text: &'a Text, prompt: &[u32]) -> Self {
        let shown = prompt.len();
        // A few tokens are enough to know how the next ones look.
        GrowingText { text, tokens: prompt.to_vec(), from: shown.saturating_sub(8), shown }
    }

    /// What to show for one token more: nothing while it ends within a character.
    pub fn push(&mut self, token: u32) -> Result<String, DataError> {
        self.tokens.push(token);
        let all = self.text.decode(&self.tokens[self.from..])?;
        if all.ends_with(char::REPLACEMENT_CHARACTER) { Ok(String::new()) } else { self.show(&all) }
    }

    /// What is left to show at the end.
    pub fn finish(mut self) -> Result<String, DataError> {
        let all = self.text.decode(&self.tokens[self.from..])?;
        self.show(&all)
    }

    fn show(&mut self, all: &str) -> Result<String, DataError> {
        let before = self.text.decode(&self.tokens[self.from..self.shown])?;
        (self.from, self.shown) = (self.shown.saturating_sub(8).max(self.from), self.tokens.len());
        Ok(all.strip_prefix(&before).unwrap_or(all).to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is shown of a text that grows, token by token.
    fn shown(text: &Text, prompt: &str, tokens: &[u32]) -> Vec<String> {
        let mut growing = GrowingText::new(text, &text.encode(prompt).unwrap());
        let mut shown: Vec<String> = tokens.iter().map(|&token| growing.push(token).unwrap()).collect();
        shown.push(growing.finish().unwrap());
        shown
    }

    #[test]
    fn a_character_is_shown_when_it_is_whole() {
        let bytes = Text::open("bytes").unwrap();
        let tokens = bytes.encode("naïve ☕!").unwrap();
        let whole = shown(&bytes, "so ", &tokens);
        assert_eq!(whole, ["n", "a", "", "ï", "v", "e", " ", "", "", "☕", "!", ""]);
        let cut = &tokens[..tokens.len() - 2];
        assert_eq!(shown(&bytes, "so ", cut).concat(), "naïve \u{fffd}", "the end is shown as it is");
        assert_eq!(bytes.end(), Some(256));
    }

    #[test]
    fn a_long_text_is_shown_as_it_is() {
        let bytes = Text::open("bytes").unwrap();
        let text = "Ein längerer Text über viele Zeichen – und zurück. ".repeat(5);
        assert_eq!(shown(&bytes, "ä", &bytes.encode(&text).unwrap()).concat(), text);
    }

    #[test]
    fn words_of_the_demo_are_apart() {
        let demo = Text::open("demo").unwrap();
        let tokens = demo.encode("the dog sleeps .").unwrap();
        assert_eq!(shown(&demo, "the dog", &tokens[3..]), [" sleeps", " .", ""]);
        assert_eq!(demo.end(), None);
    }

    #[test]
    fn a_tokenizer_that_is_not_there_is_an_error() {
        assert!(Text::open("/nowhere/tokenizer.json").is_err());
    }
}
