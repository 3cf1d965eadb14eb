//! Samples of token files: documents are packed end to end, and a sample is a window of that stream.
//!
//! The tokens of training sample `i` depend only on the seed and `i`: the blend selects the source, and a keyed permutation
//! per epoch selects the window. There is no index to build and no dependence on the layout, so the step of a run determines
//! its position in the data. Validation samples come in the order of the files.

use std::ops::Range;
use std::path::{self, Path, PathBuf};
use std::sync::Arc;

use crate::blend::Blend;
use crate::permutation::Permutation;
use crate::{DataError, Dataset, Split, TokenFile, ValidationSource};

/// The files and options of a packed dataset.
#[derive(Clone, Debug, PartialEq)]
pub struct PackedOptions {
    /// Token files by prefix, with their weights.
    pub sources: Vec<(PathBuf, f64)>,
    /// The share of every source's tokens, at its end, that is reserved for validation. `None`: the documents that
    /// `prepare` has drawn for it.
    pub split: Option<f64>,
    /// Token files for validation only, with their weights. If there are none, `split` is used.
    pub validation: Vec<(PathBuf, f64)>,
    /// Targets per sample.
    pub sequence: usize,
    /// The model's vocabulary: every token must be below it.
    pub vocab: usize,
    /// Seed of the order.
    pub seed: u64,
    /// Whether document starts are needed, so that the index must be checked.
    pub documents: bool,
}

/// A blend of token files.
#[derive(Debug)]
pub struct PackedBlend {
    training: Vec<PackedSource>,
    validation: Vec<PackedSource>,
    blend: Blend,
    sequence: usize,
    vocab: usize,
    seed: u64,
}

/// A range of a pair of token files.
#[derive(Clone, Debug)]
struct PackedSource {
    file: Arc<TokenFile>,
    name: String,
    weight: f64,
    /// Its tokens.
    range: Range<u64>,
}

impl PackedBlend {
    /// Opens the files. The time does not depend on the number of documents, unless document starts are needed.
    pub fn open(options: &PackedOptions) -> Result<PackedBlend, DataError> {
        let &PackedOptions { sequence, vocab, seed, split, .. } = options;
        let open = |source: &(PathBuf, f64)| PackedSource::open(source, options);
        let mut training = options.sources.iter().map(open).collect::<Result<Vec<_>, _>>()?;
        let mut validation = options.validation.iter().map(open).collect::<Result<Vec<_>, _>>()?;
        check_apart(&training, &validation)?;
        shorten_names(&mut training);
        shorten_names(&mut validation);
        if validation.is_empty() {
            validation = training.iter_mut().map(|source| source.cut(split)).collect::<Result<_, _>>()?;
        }
        let weights: Vec<f64> = training.iter().map(|source| source.weight).collect();
        let packed = PackedBlend { training, validation, blend: Blend::new(&weights), sequence, vocab, seed };
        packed.check_length(Split::Train)?;
        Ok(packed)
    }

    /// The same dataset with `split` as its validation split.
    #[must_use]
    pub fn validated_on(self, split: Split) -> PackedBlend {
        match split {
            Split::Train => PackedBlend { validation: self.training.clone(), ..self },
            Split::Validation => self,
        }
    }

    /// Fails if a source has no complete sample in a split.
    pub fn check_length(&self, split: Split) -> Result<(), DataError> {
        let sources = match split {
            Split::Train => &self.training,
            Split::Validation => &self.validation,
        };
        let short = sources.iter().find(|source| source.samples(self.sequence) == 0);
        short.map_or(Ok(()), |source| Err(source.too_short(split, self.sequence)))
    }

    /// The source of a sample, and its first token there.
    fn window(&self, split: Split, index: u64) -> (&PackedSource, u64) {
        let (source, window) = match split {
            Split::Train => self.shuffled(index),
            Split::Validation => self.in_order(index),
        };
        (source, source.range.start + window * self.sequence as u64)
    }

    fn shuffled(&self, index: u64) -> (&PackedSource, u64) {
        let (number, within) = self.blend.place(index);
        let source = &self.training[number];
        let samples = source.samples(self.sequence);
        let (epoch, place) = (within / samples, within % samples);
        let order = Permutation::new(samples, &[self.seed, Split::Train as u64, number as u64, epoch]);
        (source, order.at(place))
    }

    fn in_order(&self, index: u64) -> (&PackedSource, u64) {
        let mut left = index;
        for source in &self.validation {
            match left.checked_sub(source.samples(self.sequence)) {
                Some(after) => left = after,
                None => return (source, left),
            }
        }
        panic!("sample {index} is after the last of the validation split")
    }
}

impl Dataset for PackedBlend {
    fn vocab(&self) -> usize {
        self.vocab
    }

    fn floor(&self, _sequence: usize) -> Option<f64> {
        None
    }

    fn validation(&self) -> Vec<ValidationSource> {
        let part = |source: &PackedSource| ValidationSource {
            name: source.name.clone(),
            weight: source.weight,
            samples: Some(source.samples(self.sequence)),
        };
        self.validation.iter().map(part).collect()
    }

    fn epochs(&self, samples: u64) -> Vec<(String, f64)> {
        let counts = self.blend.counts(samples);
        let epochs = |(source, count): (&PackedSource, u64)| {
            (source.name.clone(), count as f64 / source.samples(self.sequence) as f64)
        };
        self.training.iter().zip(counts).map(epochs).collect()
    }

    fn sample(&self, split: Split, index: u64, out: &mut [u32]) -> Result<(), DataError> {
        assert_eq!(out.len(), self.sequence + 1, "a sample has one token more than targets");
        let (source, first) = self.window(split, index);
        source.file.read(first, self.vocab, out)
    }

    fn starts(&self, split: Split, index: u64, out: &mut [u32]) -> Result<(), DataError> {
        let (source, first) = self.window(split, index);
        source.file.read_starts(first, out)
    }
}

/// Fails if a file for validation is also used for training, even under another path.
fn check_apart(training: &[PackedSource], validation: &[PackedSource]) -> Result<(), DataError> {
    for (trained, validated) in
        training.iter().flat_map(|one| validation.iter().map(move |other| (one, other)))
    {
        if trained.file.is_same(&validated.file)? {
            let (validated, trained) = (validated.file.path().display(), trained.file.path().display());
            return Err(DataError::Value(format!(
                "{validated} of data.validation is the same file as {trained} of data.source, so it would be trained on"
            )));
        }
    }
    Ok(())
}

/// Names every source by the shortest suffix of its absolute path that is unique. So a run keeps the names when it is resumed
/// with absolute paths.
fn shorten_names(sources: &mut [PackedSource]) {
    let names: Vec<String> = sources.iter().map(|source| source.name.clone()).collect();
    for (number, source) in sources.iter_mut().enumerate() {
        let own = |end: &str| {
            (0..names.len()).all(|other| other == number || !Path::new(&names[other]).ends_with(end))
        };
        let mut ends = names[number].rmatch_indices('/').map(|(at, _)| &names[number][at + 1..]);
        if let Some(end) = ends.find(|end| own(end)) {
            end.clone_into(&mut source.name);
        }
    }
}

impl PackedSource {
    /// Opens token files, with all their tokens.
    fn open((prefix, weight): &(PathBuf, f64), options: &PackedOptions) -> Result<PackedSource, DataError> {
        let file = TokenFile::open(prefix)?;
        if options.documents {
            file.check_documents()?;
        }
        let path =
            path::absolute(file.path()).map_err(|error| DataError::file("read", file.path(), error))?;
        let (name, range) = (path.with_extension("").display().to_string(), 0..file.tokens());
        let source = PackedSource { file: Arc::new(file), name, weight: *weight, range };
        source.check_vocab(options.vocab)?;
        Ok(source)
    }

    /// Splits off the tokens that are reserved for validation, and returns them.
    fn cut(&mut self, split: Option<f64>) -> Result<PackedSource, DataError> {
        let cut = self.file.validation_start(split)?;
        self.range = 0..cut;
        Ok(PackedSource { range: cut..self.file.tokens(), ..self.clone() })
    }

    /// Number of complete samples. Each begins with the last token of the previous one, which was only a target there.
    fn samples(&self, sequence: usize) -> u64 {
        (self.range.end - self.range.start).saturating_sub(1) / sequence as u64
    }

    fn check_vocab(&self, vocab: usize) -> Result<(), DataError> {
        match self.file.about() {
            Some(about) if about.vocab > vocab => Err(DataError::Value(format!(
                "model.vocab = {vocab} is less than the {} tokens of {} (tokenizer {}); use {} or more",
                about.vocab,
                self.file.path().display(),
                about.tokenizer,
                about.vocab
            ))),
            _ => Ok(()),
        }
    }

    fn too_short(&self, split: Split, sequence: usize) -> DataError {
        let Range { start, end } = self.range;
        let (what, remedy) = match split {
            Split::Train => ("training", "use more text, or lower batch.sequence or data.split"),
            // Files for validation only begin at their first token.
            Split::Validation if start == 0 => ("validation", "use more text, or set run.eval_every = 0"),
            Split::Validation => ("validation", "raise data.split, or set run.eval_every = 0"),
        };
        let found = format!("{} tokens for {what}", end - start);
        let expected =
            format!("at least {}, one more than batch.sequence = {sequence}; {remedy}", sequence + 1);
        DataError::foreign(self.file.path(), found, expected)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;
    use crate::testing::TestFolder;
    use crate::{TokenFileInfo, TokenType, TokenWriter};

    /// Documents of ten tokens each: token `t` of the file is `first + t`.
    fn write(prefix: &Path, first: u32, tokens: u32) {
        let mut writer = TokenWriter::create(prefix, TokenType::U16).unwrap();
        let all: Vec<u32> = (first..first + tokens).collect();
        for document in all.chunks(10) {
            let mut bytes = Vec::new();
            TokenType::U16.write(document, &mut bytes);
            writer.append(&bytes, &[document.len() as u32], true).unwrap();
        }
        let (documents, tokenizer) = (writer.documents(), "none".to_owned());
        let vocab = (first + tokens) as usize;
        writer
            .finish(&TokenFileInfo {
                vocab,
                tokenizer,
                end_of_document: None,
                documents,
                tokens: tokens.into(),
                validation: None,
            })
            .unwrap();
    }

    fn options(sources: &[(&Path, f64)]) -> PackedOptions {
        PackedOptions {
            sources: sources.iter().map(|&(path, weight)| (path.to_owned(), weight)).collect(),
            split: Some(0.1),
            validation: Vec::new(),
            sequence: 8,
            vocab: 30_000,
            seed: 1,
            documents: false,
        }
    }

    fn first_tokens(packed: &PackedBlend, split: Split, samples: Range<u64>) -> Vec<u32> {
        let first = |index| {
            let mut out = [0; 9];
            packed.sample(split, index, &mut out).unwrap();
            assert!(out.windows(2).all(|pair| pair[1] == pair[0] + 1), "a window of the stream: {out:?}");
            out[0]
        };
        samples.map(first).collect()
    }

    #[test]
    fn an_epoch_has_every_window_once_and_the_next_another_order() {
        let folder = TestFolder::new("packed-epoch");
        let prefix = folder.join("a");
        write(&prefix, 0, 1000);
        let packed = PackedBlend::open(&options(&[(&prefix, 1.0)])).unwrap();
        // Of 900 tokens, 112 windows of 8 and one more.
        assert_eq!(packed.training[0].samples(8), 112);
        assert_eq!(packed.validation()[0].samples, Some(12));
        let epochs = [0..112, 112..224].map(|samples| first_tokens(&packed, Split::Train, samples));
        assert_ne!(epochs[0], epochs[1]);
        let windows: HashSet<u32> = (0..112).map(|window| 8 * window).collect();
        for epoch in epochs {
            assert_eq!(epoch.into_iter().collect::<HashSet<_>>(), windows);
        }
        assert_eq!(packed.epochs(168), [("a".to_owned(), 1.5)]);
        let validation: Vec<u32> = (900..).step_by(8).take(12).collect();
        assert_eq!(first_tokens(&packed, Split::Validation, 0..12), validation, "in the order of the file");
        let mut other = options(&[(&prefix, 1.0)]);
        other.seed = 2;
        let other = PackedBlend::open(&other).unwrap();
        assert_ne!(first_tokens(&other, Split::Train, 0..112), first_tokens(&packed, Split::Train, 0..112));
    }

    #[test]
    fn the_split_falls_between_documents() {
        let folder = TestFolder::new("packed-split");
        let prefix = folder.join("a");
        write(&prefix, 0, 1000);
        for (validation, cut) in [(0.1, 900), (0.057, 950), (0.5, 500), (0.0, 1000), (0.001, 999)] {
            let mut training =
                PackedSource::open(&(prefix.clone(), 1.0), &options(&[(&prefix, 1.0)])).unwrap();
            let kept = training.cut(Some(validation)).unwrap();
            assert_eq!((training.range, kept.range), (0..cut, cut..1000), "{validation}");
        }
    }

    #[test]
    fn starts_are_those_of_the_sample_in_any_blend() {
        let folder = TestFolder::new("packed-starts");
        let (a, b) = (folder.join("a"), folder.join("b"));
        write(&a, 0, 200);
        write(&b, 10_000, 5000);
        let packed = PackedBlend::open(&options(&[(&a, 1.0), (&b, 3.0)])).unwrap();
        for (split, index) in
            [Split::Train, Split::Validation].into_iter().flat_map(|s| (0..40).map(move |i| (s, i)))
        {
            let (mut tokens, mut starts) = ([0; 9], [99; 8]);
            packed.sample(split, index, &mut tokens).unwrap();
            packed.starts(split, index, &mut starts).unwrap();
            // Documents begin with every tenth token, and tokens count up.
            let expected: Vec<u32> =
                tokens[..8].iter().map(|token| (token / 10 * 10).saturating_sub(tokens[0])).collect();
            assert_eq!(starts[..], expected, "{split:?} {index}");
        }
    }

    #[test]
    fn sources_are_blended_by_weight() {
        let folder = TestFolder::new("packed-blend");
        let (a, b) = (folder.join("a"), folder.join("b"));
        write(&a, 0, 200);
        write(&b, 10_000, 5000);
        let packed = PackedBlend::open(&options(&[(&a, 1.0), (&b, 3.0)])).unwrap();
        let firsts = first_tokens(&packed, Split::Train, 0..400);
        assert_eq!(firsts.iter().filter(|&&first| first < 10_000).count(), 100);
        // The small source is read four times over, each time whole.
        let small: Vec<u32> = firsts.into_iter().filter(|&first| first < 10_000).collect();
        for epoch in small.chunks_exact(22) {
            assert_eq!(epoch.iter().collect::<HashSet<_>>().len(), 22);
        }
    }

    #[test]
    fn what_does_not_fit_is_refused_at_the_start() {
        let folder = TestFolder::new("packed-refused");
        let prefix = folder.join("a");
        write(&prefix, 0, 100);
        let refused = |change: fn(&mut PackedOptions)| {
            let mut options = options(&[(&prefix, 1.0)]);
            change(&mut options);
            let opened =
                PackedBlend::open(&options).and_then(|packed| packed.check_length(Split::Validation));
            opened.unwrap_err().to_string().replace(&format!("{}/", folder.display()), "")
        };
        assert_eq!(
            refused(|options| options.vocab = 99),
            "model.vocab = 99 is less than the 100 tokens of a.bin (tokenizer none); use 100 or more"
        );
        assert_eq!(
            refused(|options| options.sequence = 90),
            "a.bin: found 90 tokens for training, expected at least 91, one more than batch.sequence = 90; \
             use more text, or lower batch.sequence or data.split"
        );
        assert_eq!(
            refused(|options| options.sequence = 10),
            "a.bin: found 10 tokens for validation, expected at least 11, one more than batch.sequence = 10; \
             raise data.split, or set run.eval_every = 0"
        );
    }

    #[test]
    fn names_are_the_shortest_ends_of_paths_that_differ() {
        let folder = TestFolder::new("packed-names");
        for name in ["en", "de"] {
            std::fs::create_dir(folder.join(name)).unwrap();
        }
        let paths = ["en/a", "de/a", "b"].map(|name| folder.join(name));
        for path in &paths {
            write(path, 0, 100);
        }
        let names = |paths: &[&Path]| {
            let sources: Vec<(&Path, f64)> = paths.iter().map(|&path| (path, 1.0)).collect();
            let packed = PackedBlend::open(&options(&sources)).unwrap();
            packed.validation().into_iter().map(|part| part.name).collect::<Vec<_>>()
        };
        assert_eq!(names(&[&paths[0], &paths[1], &paths[2]]), ["en/a", "de/a", "b"]);
        assert_eq!(names(&[&paths[0], &folder.join("b.bin")]), ["a", "b"]);
    }

    #[test]
    fn a_file_that_shrinks_is_an_error_and_no_panic() {
        let folder = TestFolder::new("packed-shrinks");
        let prefix = folder.join("a");
        write(&prefix, 0, 100);
        let packed = PackedBlend::open(&options(&[(&prefix, 1.0)])).unwrap();
        std::fs::write(folder.join("a.bin"), [0; 6]).unwrap();
        let mut out = [0; 9];
        let said = packed.sample(Split::Train, 0, &mut out).unwrap_err().to_string();
        assert!(said.contains("a.bin: found the end of the file, expected 18 more at byte "), "{said}");
    }
}
