//! `kintsugi generate`: text from a model.

mod show;

use std::io::IsTerminal;
use std::path::PathBuf;

use clap::Args;
use kintsugi_checkpoint::WeightsFolder;
use kintsugi_comm::Connection;
use kintsugi_data::TextCodec;
use kintsugi_engine::{
    GenerateOptions, GenerationResult, MemoryChoice, Sampling, check_prompts, device, generate,
};
use kintsugi_plan::Plan;
use kintsugi_simulate::generation_memory;
use kintsugi_spec::input;
use serde::Serialize;

use crate::failure::{ErrorContext, Failure};
use crate::files::read_text;
use crate::model::{self, ModelArguments};
use crate::output::{self, Output};
use crate::processes;
use show::Show;

/// Continues text with a model, token by token.
///
/// FOLDER is the folder of a run, a checkpoint or a Hugging Face folder. Without --prompt, the prompt is read from
/// stdin. Every prompt is processed once; then each new token uses a cache of the keys and values before it. The model
/// runs on one rank, or on the layout that --set parallel.… gives. Prompts are distributed over the replicas, and
/// batch.micro of them pass through the stages at a time.
///
/// The same seed gives the same text, whatever the layout and the other prompts are.
#[derive(Args)]
#[command(after_long_help = EXAMPLES)]
pub struct Arguments {
    #[command(flatten)]
    model: ModelArguments,
    /// Text to continue; may be given several times
    #[arg(long, value_name = "TEXT")]
    prompt: Vec<String>,
    /// A file with one prompt
    #[arg(long, value_name = "FILE")]
    prompt_file: Vec<PathBuf>,
    /// A prompt as token numbers, as in --prompt-tokens "15 7 301"; prints token numbers, too
    #[arg(long, value_name = "TOKENS", conflicts_with_all = ["prompt", "prompt_file", "tokenizer"])]
    prompt_tokens: Vec<String>,
    /// Most new tokens per text; by default 100, or as many as learned positions allow
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    tokens: Option<u32>,
    /// Divisor of the logits: below 1, probable tokens become more probable; 0 takes the most probable
    #[arg(long, value_name = "T", default_value_t = 1.0)]
    temperature: f64,
    /// Samples only from the K most probable tokens; 0 for all
    #[arg(long, value_name = "K", default_value_t = 0)]
    top_k: usize,
    /// Samples only from the fewest most probable tokens whose probabilities add up to P
    #[arg(long, value_name = "P", default_value_t = 1.0)]
    top_p: f64,
    /// Seed of the sampling
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// The tokenizer, if not the one that the model was trained with: a tokenizer.json, a folder, or bytes
    #[arg(long, value_name = "FILE|FOLDER|bytes")]
    tokenizer: Option<String>,
    /// Continues after a token that ends the text
    #[arg(long)]
    ignore_end: bool,
    /// Prints the texts as JSON, and nothing else to stdout
    #[arg(long)]
    json: bool,
}

const EXAMPLES: &str = "\
Examples:
  kintsugi generate out --prompt 'the dog near a river'
      continues a prompt with the newest checkpoint of the run in out
  kintsugi generate gpt2 --prompt 'Once upon a time' --temperature 0.8 --top-p 0.95 --tokens 200
      a Hugging Face folder, with less random sampling
  echo 'Once upon a time' | kintsugi generate gpt2 --temperature 0
      a prompt from stdin, and always the most probable token
  kintsugi generate llama --prompt 'One' --prompt 'Two' --set parallel.tp=2 \\
      --set precision.compute=bf16
      two texts at once, on two ranks, in 16 bits";

/// Prompts that the model of a Hugging Face folder processes at a time.
const PROMPTS_AT_A_TIME: &str = "batch.micro=8";

/// Runs the command.
pub fn run(arguments: &Arguments) -> Result<(), Failure> {
    processes::refuse_several("generate")?;
    let output = Output { json: arguments.json };
    let weights = arguments.model.open()?;
    let under = match weights {
        WeightsFolder::HuggingFace(_) => vec![PROMPTS_AT_A_TIME.to_owned()],
        WeightsFolder::Checkpoint(_) => Vec::new(),
    };
    let plan = arguments.model.plan(&weights, &under, &[])?.for_generation();
    let Prompts { text, texts, tokens: prompts } = Prompts::read(arguments, &weights)?;
    // A prompt of token numbers needs no tokenizer, but the model's own tokenizer says which tokens exist.
    let known = match &text {
        Some(text) => text.vocab(),
        None => model::text(&weights, None).map_or(plan.model.vocab, |text| text.vocab()),
    };
    let mut options = GenerateOptions {
        tokens: arguments.tokens.map_or_else(|| default_tokens(&plan, &prompts), |tokens| tokens as usize),
        end_at: if arguments.ignore_end { Vec::new() } else { ends(&weights, text.as_ref()) },
        vocab: known.min(plan.model.vocab),
        sampling: Sampling {
            temperature: arguments.temperature,
            top_k: arguments.top_k,
            top_p: arguments.top_p,
            seed: arguments.seed,
        },
        memory: MemoryChoice::Heap,
    };
    check_prompts(&plan, &prompts, &options)?;
    options.memory = memory(&plan, &prompts, options.tokens)?;
    warn_beyond_positions(&plan, &prompts, options.tokens);
    let mut show = Show::new(output, text.as_ref(), &texts, &prompts);
    let mut shown = Ok(());
    let generated = arguments.model.with_store(&weights, &plan, |weights| {
        generate(&plan, weights, &prompts, &options, |new| {
            if shown.is_ok() {
                shown = show.token(new);
            }
        })
    })?;
    shown?;
    show.finish(&generated.tokens)?;
    output::stderr(&speed(&generated, &prompts));
    output.result(&Answer::new(text.as_ref(), texts, &prompts, &generated)?)
}

/// The prompts as text and as tokens.
struct Prompts {
    /// The tokenizer; `None` if tokens were given.
    text: Option<TextCodec>,
    texts: Vec<String>,
    tokens: Vec<Vec<u32>>,
}

impl Prompts {
    fn read(arguments: &Arguments, weights: &WeightsFolder) -> Result<Self, Failure> {
        if !arguments.prompt_tokens.is_empty() {
            let texts = arguments.prompt_tokens.clone();
            let tokens = texts.iter().map(|text| numbers(text)).collect::<Result<_, _>>()?;
            return Ok(Prompts { text: None, texts, tokens });
        }
        let text = model::text(weights, arguments.tokenizer.as_deref())?;
        let mut texts = arguments.prompt.clone();
        for path in &arguments.prompt_file {
            texts.push(read_text(path)?);
        }
        if texts.is_empty() {
            texts.push(from_stdin()?);
        }
        if let Some(number) = texts.iter().position(String::is_empty) {
            return Err(Failure::mistake(format!(
                "prompt {} is empty; it needs at least one word",
                number + 1
            )));
        }
        // Our own runs add no special tokens. For other models, their tokenizer decides.
        let encode = match weights {
            WeightsFolder::HuggingFace(_) => TextCodec::encode_prompt,
            WeightsFolder::Checkpoint(_) => TextCodec::encode,
        };
        let tokens = texts.iter().map(|prompt| encode(&text, prompt)).collect::<Result<_, _>>()?;
        Ok(Prompts { text: Some(text), texts, tokens })
    }
}

/// The tokens that end a text: from the model's own files, or else from the tokenizer.
fn ends(weights: &WeightsFolder, text: Option<&TextCodec>) -> Vec<u32> {
    let named = weights.end_tokens();
    if named.is_empty() { text.and_then(TextCodec::end).into_iter().collect() } else { named }
}

fn numbers(text: &str) -> Result<Vec<u32>, Failure> {
    let number = |word: &str| {
        let wrong =
            |_| Failure::mistake(format!("--prompt-tokens has \"{word}\", which is not a token number"));
        word.parse().map_err(wrong)
    };
    text.split([' ', ',', '\n']).filter(|word| !word.is_empty()).map(number).collect()
}

/// The text on stdin, without the final line break.
fn from_stdin() -> Result<String, Failure> {
    if std::io::stdin().is_terminal() {
        return Err(Failure::mistake("there is no prompt; add --prompt TEXT or pipe it to stdin"));
    }
    let read = input::text_of(std::io::stdin(), input::MAX_WRITTEN_BY_HAND);
    let text = read
        .map_err(|error| Failure::mistake(ErrorContext::new("cannot read the prompt from stdin", error)))?;
    Ok(text.strip_suffix('\n').unwrap_or(&text).to_owned())
}

fn memory(plan: &Plan, prompts: &[Vec<u32>], tokens: usize) -> Result<MemoryChoice, Failure> {
    let lengths: Vec<usize> = prompts.iter().map(Vec::len).collect();
    model::memory(plan, &generation_memory(plan, device(plan, Connection::Threads), &lengths, tokens))
}

/// The default number of new tokens, limited by the learned positions.
fn default_tokens(plan: &Plan, prompts: &[Vec<u32>]) -> usize {
    const USUAL: usize = 100;
    let longest = prompts.iter().map(Vec::len).max().unwrap_or(0);
    // The last token of a text is not fed to the model.
    let room = |most: usize| (most + 1).saturating_sub(longest).clamp(1, USUAL);
    plan.model.max_tokens().map_or(USUAL, room)
}

/// Warns if a text is longer than the model was trained for, although rotary positions have no limit.
fn warn_beyond_positions(plan: &Plan, prompts: &[Vec<u32>], tokens: usize) {
    let longest = prompts.iter().map(Vec::len).max().unwrap_or(0) + tokens;
    let made_for = plan.model.positions;
    if longest > made_for + 1 {
        output::stderr(&format!(
            "warning: texts may have {longest} tokens, but the model was trained for {made_for}"
        ));
    }
}

fn speed(generated: &GenerationResult, prompts: &[Vec<u32>]) -> String {
    let prompt_tokens: usize = prompts.iter().map(Vec::len).sum();
    let tokens: usize = generated.tokens.iter().map(Vec::len).sum();
    let rate = generated.tokens_per_s().map_or(String::new(), |rate| format!(", {rate:.1} tokens/s"));
    format!("{prompt_tokens} tokens of prompt in {:.2} s; {tokens} new tokens{rate}", generated.prompts_s)
}

/// The result in JSON.
#[derive(Serialize)]
struct Answer {
    texts: Vec<Continuation>,
    prompt_tokens: usize,
    prompt_s: f64,
    new_tokens: usize,
    tokens_per_s: Option<f64>,
}

#[derive(Serialize)]
struct Continuation {
    prompt: String,
    /// The continuation; `null` if no tokenizer is known.
    text: Option<String>,
    prompt_tokens: Vec<u32>,
    tokens: Vec<u32>,
}

impl Answer {
    fn new(
        text: Option<&TextCodec>,
        texts: Vec<String>,
        prompts: &[Vec<u32>],
        generated: &GenerationResult,
    ) -> Result<Self, Failure> {
        let mut continued = Vec::new();
        for ((prompt, prompt_tokens), tokens) in texts.into_iter().zip(prompts).zip(&generated.tokens) {
            let text = text.map(|text| show::continuation(text, prompt_tokens, tokens)).transpose()?;
            let (prompt_tokens, tokens) = (prompt_tokens.clone(), tokens.clone());
            continued.push(Continuation { prompt, text, prompt_tokens, tokens });
        }
        Ok(Answer {
            texts: continued,
            prompt_tokens: prompts.iter().map(Vec::len).sum(),
            prompt_s: generated.prompts_s,
            new_tokens: generated.tokens.iter().map(Vec::len).sum(),
            tokens_per_s: generated.tokens_per_s(),
        })
    }
}
