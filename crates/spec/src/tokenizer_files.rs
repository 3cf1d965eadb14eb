//! The files that the folder of a Hugging Face tokenizer may contain.

/// The tokenizer itself, in one file.
pub const TOKENIZER: &str = "tokenizer.json";
/// The configuration of its special tokens.
pub const CONFIG: &str = "tokenizer_config.json";
/// GPT-2's vocabulary.
pub const VOCABULARY: &str = "vocab.json";
/// GPT-2's merges.
pub const MERGES: &str = "merges.txt";
/// The model of `SentencePiece`.
pub const SENTENCE_PIECE: &str = "tokenizer.model";
/// The generation settings: which tokens end a text.
pub const GENERATION: &str = "generation_config.json";

/// The files that Kintsugi writes.
pub const WRITTEN: [&str; 2] = [TOKENIZER, CONFIG];

/// All files, which are copied together with a tokenizer.
pub const ALL: [&str; 9] = [
    TOKENIZER,
    CONFIG,
    SENTENCE_PIECE,
    VOCABULARY,
    MERGES,
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    GENERATION,
];
