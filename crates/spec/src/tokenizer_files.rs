//! The files that a tokenizer of Hugging Face's may have in its folder.

/// The tokenizer itself, where it is in one file.
pub const TOKENIZER: &str = "tokenizer.json";
/// What is said about its special tokens.
pub const CONFIG: &str = "tokenizer_config.json";
/// GPT-2's vocabulary.
pub const VOCABULARY: &str = "vocab.json";
/// GPT-2's merges.
pub const MERGES: &str = "merges.txt";
/// The model of `SentencePiece`.
pub const SENTENCE_PIECE: &str = "tokenizer.model";
/// How a model generates text: which tokens end it.
pub const GENERATION: &str = "generation_config.json";

/// Those that we write ourselves.
pub const WRITTEN: [&str; 2] = [TOKENIZER, CONFIG];

/// All of them: they go along when a tokenizer is copied.
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
