//! Prints generated texts: a single one as it grows, several when they are complete.

use kintsugi_data::{StreamingDecoder, TextCodec};
use kintsugi_engine::NewToken;

use crate::failure::Failure;
use crate::output::{self, Output};

/// Shows what is generated.
pub struct Show<'a> {
    output: Output,
    text: Option<&'a TextCodec>,
    texts: &'a [String],
    prompts: &'a [Vec<u32>],
    /// The single text, unless stdout is reserved for JSON.
    growing: Option<Growing<'a>>,
}

enum Growing<'a> {
    Text(StreamingDecoder<'a>),
    Numbers,
}

impl<'a> Show<'a> {
    /// Shows the continuations of these prompts.
    pub fn new(
        output: Output,
        text: Option<&'a TextCodec>,
        texts: &'a [String],
        prompts: &'a [Vec<u32>],
    ) -> Self {
        let alone = prompts.len() == 1 && !output.json;
        let growing = alone.then(|| match text {
            Some(text) => Growing::Text(StreamingDecoder::new(text, &prompts[0])),
            None => Growing::Numbers,
        });
        Show { output, text, texts, prompts, growing }
    }

    /// Handles a new token.
    pub fn token(&mut self, new: NewToken) -> Result<(), Failure> {
        match &mut self.growing {
            Some(Growing::Text(growing)) => output::stdout(&growing.push(new.token)?),
            Some(Growing::Numbers) => output::stdout(&format!("{} ", new.token)),
            None => Ok(()),
        }
    }

    /// Handles the end of all texts.
    pub fn finish(self, generated: &[Vec<u32>]) -> Result<(), Failure> {
        match self.growing {
            Some(Growing::Text(growing)) => return output::stdout(&(growing.finish()? + "\n")),
            Some(Growing::Numbers) => return output::stdout("\n"),
            None if self.output.json => return Ok(()),
            None => {}
        }
        for ((prompt, given), new) in self.prompts.iter().zip(self.texts).zip(generated) {
            let continued = match self.text {
                Some(text) => continuation(text, prompt, new)?,
                None => new.iter().fold(String::new(), |text, token| text + " " + &token.to_string()),
            };
            output::stdout(&format!("── {given}\n{continued}\n"))?;
        }
        Ok(())
    }
}

/// The text that the new tokens add to a prompt.
pub fn continuation(text: &TextCodec, prompt: &[u32], new: &[u32]) -> Result<String, Failure> {
    let mut growing = StreamingDecoder::new(text, prompt);
    let mut continued = String::new();
    for &token in new {
        continued += &growing.push(token)?;
    }
    Ok(continued + &growing.finish()?)
}
