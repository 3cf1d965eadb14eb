//! Converts between text and a model's tokens, with a tokenizer or the words of the demo language.

use crate::{DataError, Demo, Tokenizer};

/// Converts text to a model's tokens and back.
#[derive(Clone)]
pub enum TextCodec {
    /// The demo's language, word by word.
    Demo(Demo),
    /// A tokenizer.
    Tokenizer(Tokenizer),
}

impl TextCodec {
    /// Opens a tokenizer by name, as [`Tokenizer::open`] does. `demo` is the demo's language.
    pub fn open(name: &str) -> Result<TextCodec, DataError> {
        // The language is the same for every seed.
        if name == "demo" {
            Ok(TextCodec::Demo(Demo::new(0)))
        } else {
            Tokenizer::open(name).map(TextCodec::Tokenizer)
        }
    }

    /// The tokens of a prompt. A text of the demo's language begins with the word that begins all its texts.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, DataError> {
        match self {
            TextCodec::Demo(demo) => demo.tokens(text),
            TextCodec::Tokenizer(tokenizer) => tokenizer.encoder().encode(text).map(<[u32]>::to_vec),
        }
    }

    /// The same with the special tokens of the tokenizer, such as a token at the beginning of every text.
    pub fn encode_prompt(&self, text: &str) -> Result<Vec<u32>, DataError> {
        match self {
            TextCodec::Demo(_) => self.encode(text),
            TextCodec::Tokenizer(tokenizer) => tokenizer.encoder().encode_prompt(text).map(<[u32]>::to_vec),
        }
    }

    /// The text of tokens.
    pub fn decode(&self, tokens: &[u32]) -> Result<String, DataError> {
        match self {
            TextCodec::Demo(demo) => Ok(demo.text(tokens)),
            TextCodec::Tokenizer(tokenizer) => tokenizer.decode(tokens),
        }
    }

    /// Size of the vocabulary: every token is below it.
    pub fn vocab(&self) -> usize {
        match self {
            TextCodec::Demo(demo) => demo.words().len(),
            TextCodec::Tokenizer(tokenizer) => tokenizer.vocab(),
        }
    }

    /// The token that ends a text, if there is one.
    pub fn end(&self) -> Option<u32> {
        match self {
            TextCodec::Demo(_) => None,
            TextCodec::Tokenizer(tokenizer) => tokenizer.end_of_document(),
        }
    }
}

/// Decodes a text token by token while it is generated.
pub struct StreamingDecoder<'a> {
    text: &'a TextCodec,
    tokens: Vec<u32>,
    /// The first token to decode. It includes some that were returned before, since the text of a token may depend on them.
    from: usize,
    /// Number of tokens whose text was returned.
    shown: usize,
}

impl<'a> StreamingDecoder<'a> {
    /// A decoder for a text that begins with these tokens. Their own text is not returned.
    pub fn new(text: &'a TextCodec, prompt: &[u32]) -> Self {
        let shown = prompt.len();
        // The text of a token depends only on the few tokens before it.
        StreamingDecoder { text, tokens: prompt.to_vec(), from: shown.saturating_sub(8), shown }
    }

    /// Adds a token and returns the new text. It is empty while the tokens end within a character.
    pub fn push(&mut self, token: u32) -> Result<String, DataError> {
        self.tokens.push(token);
        let all = self.text.decode(&self.tokens[self.from..])?;
        if all.ends_with(char::REPLACEMENT_CHARACTER) { Ok(String::new()) } else { self.show(&all) }
    }

    /// The rest of the text at the end.
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
    fn shown(text: &TextCodec, prompt: &str, tokens: &[u32]) -> Vec<String> {
        let mut growing = StreamingDecoder::new(text, &text.encode(prompt).unwrap());
        let mut shown: Vec<String> = tokens.iter().map(|&token| growing.push(token).unwrap()).collect();
        shown.push(growing.finish().unwrap());
        shown
    }

    #[test]
    fn a_character_is_shown_when_it_is_whole() {
        let bytes = TextCodec::open("bytes").unwrap();
        let tokens = bytes.encode("naïve ☕!").unwrap();
        let whole = shown(&bytes, "so ", &tokens);
        assert_eq!(whole, ["n", "a", "", "ï", "v", "e", " ", "", "", "☕", "!", ""]);
        let cut = &tokens[..tokens.len() - 2];
        assert_eq!(shown(&bytes, "so ", cut).concat(), "naïve \u{fffd}", "the end is shown as it is");
        assert_eq!(bytes.end(), Some(256));
    }

    #[test]
    fn a_long_text_is_shown_as_it_is() {
        let bytes = TextCodec::open("bytes").unwrap();
        let text = "Ein längerer Text über viele Zeichen – und zurück. ".repeat(5);
        assert_eq!(shown(&bytes, "ä", &bytes.encode(&text).unwrap()).concat(), text);
    }

    #[test]
    fn words_of_the_demo_are_apart() {
        let demo = TextCodec::open("demo").unwrap();
        let tokens = demo.encode("the dog sleeps .").unwrap();
        assert_eq!(shown(&demo, "the dog", &tokens[3..]), [" sleeps", " .", ""]);
        assert_eq!(demo.end(), None);
    }

    #[test]
    fn a_tokenizer_that_is_not_there_is_an_error() {
        assert!(TextCodec::open("/nowhere/tokenizer.json").is_err());
    }
}
