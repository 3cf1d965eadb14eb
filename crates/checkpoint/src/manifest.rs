//! The manifest: the contents of a checkpoint, and what a run needs to resume from it.
//!
//! It is JSON in an envelope with a format version and a checksum, which detects any change. The plan of the run is stored as
//! data ([`record`]).

use std::path::Path;

use kintsugi_plan::Plan;
use kintsugi_rank::StoredTensor;
use kintsugi_spec::input;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use crate::checks::{self, ContentError};
use crate::shard::Shard;
use crate::slice::Slice;
use crate::{CheckpointError, SpikeRecord, files, record, with_absolute_paths};

/// Name of the manifest in a checkpoint's folder.
pub(crate) const MANIFEST: &str = "manifest.json";
const FORMAT: &str = "kintsugi checkpoint";
/// No release has written version 1.
const VERSION: u32 = 2;

/// The contents of a checkpoint.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    /// The progress of the run.
    pub progress: RunProgress,
    /// The plan of the run, without its cluster and framework.
    #[serde(with = "record")]
    pub plan: Plan,
    /// The whole configuration of the run as TOML, for people. The program does not read it.
    pub config: String,
    /// The stored tensors, of the parameters that have them.
    #[serde(rename = "kept")]
    pub stored_tensors: Vec<StoredTensor>,
    /// The files beside the manifest.
    pub files: Vec<FileRecord>,
    /// The location of every element.
    pub slices: Vec<Slice>,
}

/// The progress of a run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RunProgress {
    /// Finished steps, including skipped ones.
    pub step: u64,
    /// Samples that the run was trained on. Samples that it skips do not count.
    pub samples: u64,
    /// Optimizer updates, for Adam's bias correction.
    pub updates: u64,
    /// Loss scale of the next step.
    pub loss_scale: f64,
    /// Successful steps since the loss scale last changed.
    pub good_steps: u64,
    /// Consecutive skipped steps.
    pub skipped_in_a_row: u64,
    /// Skipped steps in total.
    pub skipped: u64,
    /// Loss of the run's first step, if it is finite.
    pub loss_first: Option<f32>,
    /// Validation loss after this step, if the step was evaluated and the loss is finite.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub validation_loss: Option<f64>,
    /// What the run remembers about spikes. It is empty, and not stored, unless the run goes back to a checkpoint after one.
    #[serde(default, skip_serializing_if = "is_default")]
    pub spikes: SpikeRecord,
}

fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

/// A file of a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileRecord {
    /// Its name in the checkpoint's folder.
    pub name: String,
    /// Its length.
    pub bytes: u64,
    /// Its checksum.
    pub checksum: String,
}

/// Why a manifest cannot be used.
#[derive(Debug, thiserror::Error)]
enum ManifestError {
    #[error("it is not a complete manifest: {0}")]
    Json(#[from] serde_json::Error),
    #[error("its format is {0:?} and not {FORMAT:?}")]
    Format(String),
    #[error("its version is {0}; this program reads version {VERSION}")]
    Version(u32),
    #[error("its checksum is {found} and should be {expected}")]
    Checksum { found: String, expected: String },
    #[error(transparent)]
    Content(#[from] ContentError),
}

#[derive(Serialize, Deserialize)]
struct Envelope {
    format: String,
    version: u32,
    checksum: String,
    manifest: Box<RawValue>,
}

impl Manifest {
    /// The manifest of shards that have been written.
    pub(crate) fn new(
        plan: &Plan,
        shards: &[Shard],
        files: Vec<FileRecord>,
        stored: &[StoredTensor],
        progress: &RunProgress,
    ) -> Self {
        let slices = shards.iter().flat_map(|shard| &shard.tensors).map(|tensor| tensor.slice.clone());
        let plan = with_absolute_paths(plan);
        Manifest {
            progress: progress.clone(),
            config: plan.to_toml(),
            plan,
            stored_tensors: stored.to_vec(),
            files,
            slices: slices.collect(),
        }
    }

    pub(crate) fn encode(&self) -> Vec<u8> {
        let manifest = serde_json::value::to_raw_value(self).expect("a manifest has string keys");
        let checksum = files::checksum(manifest.get().as_bytes());
        let envelope = Envelope { format: FORMAT.into(), version: VERSION, checksum, manifest };
        serde_json::to_vec(&envelope).expect("an envelope has string keys")
    }

    /// Reads the manifest of the checkpoint in `folder`.
    pub fn read(folder: &Path) -> Result<Self, CheckpointError> {
        let path = folder.join(MANIFEST);
        let bytes = input::bytes(&path, input::MAX_WRITTEN_BY_PROGRAMS)
            .map_err(|error| CheckpointError::new(&path, error))?;
        Manifest::decode(&bytes).map_err(|error| CheckpointError::new(&path, error))
    }

    fn decode(bytes: &[u8]) -> Result<Self, ManifestError> {
        let envelope: Envelope = serde_json::from_slice(bytes)?;
        if envelope.format != FORMAT {
            return Err(ManifestError::Format(envelope.format));
        }
        if envelope.version != VERSION {
            return Err(ManifestError::Version(envelope.version));
        }
        let text = envelope.manifest.get();
        let found = files::checksum(text.as_bytes());
        if found != envelope.checksum {
            return Err(ManifestError::Checksum { found, expected: envelope.checksum });
        }
        let manifest = serde_json::from_str(text)?;
        checks::check(&manifest)?;
        Ok(manifest)
    }
}

#[cfg(test)]
mod tests {
    use kintsugi_plan::config::ConfigSource;
    use proptest::prelude::*;

    use super::*;

    fn manifest() -> Manifest {
        let slice = Slice {
            parameter: "p".into(),
            stored: StoredTensor::FirstMoment,
            file: 0,
            columns: [0, 4],
            start: 3,
            len: 8,
        };
        Manifest {
            progress: RunProgress {
                step: 120,
                loss_scale: 65536.0,
                loss_first: Some(4.5),
                validation_loss: Some(0.1 + 0.2),
                ..RunProgress::default()
            },
            plan: ConfigSource::demo().plan().expect("the demo"),
            config: "[run]\nsteps = 200\n".into(),
            stored_tensors: [StoredTensor::Weights, StoredTensor::FirstMoment, StoredTensor::SecondMoment]
                .to_vec(),
            files: vec![FileRecord {
                name: "rank-0000.safetensors".into(),
                bytes: 99,
                checksum: "xxh3:0".into(),
            }],
            slices: vec![slice],
        }
    }

    #[test]
    fn it_reads_what_it_wrote() {
        assert_eq!(Manifest::decode(&manifest().encode()).expect("a manifest"), manifest());
    }

    #[test]
    fn a_manifest_without_a_validation_loss_is_read() {
        let mut expected = manifest();
        expected.progress.validation_loss = None;
        let text = String::from_utf8(expected.encode()).expect("JSON");
        assert!(!text.contains("validation_loss"), "{text}");
        assert_eq!(Manifest::decode(text.as_bytes()).expect("a manifest"), expected);
    }

    #[test]
    fn every_changed_byte_is_detected() {
        let bytes = manifest().encode();
        for at in 0..bytes.len() {
            for flip in [1_u8, 0x10, 0x80] {
                let mut changed = bytes.clone();
                changed[at] ^= flip;
                let error = Manifest::decode(&changed).expect_err("it was changed").to_string();
                assert!(error.contains("its ") || error.contains("complete manifest"), "{error}");
            }
        }
        for len in 0..bytes.len() {
            assert!(Manifest::decode(&bytes[..len]).is_err(), "cut to {len}");
        }
    }

    #[test]
    fn another_version_is_refused() {
        let text = String::from_utf8(manifest().encode()).expect("JSON");
        for other in [1, 3] {
            let changed = text.replacen("\"version\":2", &format!("\"version\":{other}"), 1);
            let error = Manifest::decode(changed.as_bytes()).expect_err("another version");
            assert_eq!(error.to_string(), format!("its version is {other}; this program reads version 2"));
        }
    }

    #[test]
    fn a_file_of_another_folder_is_refused() {
        for name in ["../../etc/passwd", "/etc/passwd", "", ".."] {
            let mut manifest = manifest();
            manifest.files[0].name = name.into();
            assert!(
                Manifest::decode(&manifest.encode())
                    .unwrap_err()
                    .to_string()
                    .contains("not the name of a file")
            );
        }
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_are_an_error(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            prop_assert!(Manifest::decode(&bytes).is_err());
        }

        #[test]
        fn arbitrary_contents_are_an_error(text in r#"[\[\]{}:,"0-9a-z]{0,80}"#, version in 0..=3_u32) {
            let envelope = format!(
                r#"{{"format":"{FORMAT}","version":{version},"checksum":"{}","manifest":{text}}}"#,
                files::checksum(text.as_bytes())
            );
            prop_assert!(Manifest::decode(envelope.as_bytes()).is_err());
        }
    }
}
