//! Broken checkpoints: opening one fails with the file and the reason.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use kintsugi_plan::Plan;
use kintsugi_plan::config::ConfigSource;
use kintsugi_plan::parameters::{Parameter, parameters};
use kintsugi_rank::{Elements, Store, StoreError, StoredTensor};
use proptest::prelude::*;
use safetensors::Dtype;

use crate::manifest::MANIFEST;
use crate::{
    Checkpoint, CheckpointError, CheckpointFolder, Manifest, RunLock, RunProgress, SlicePlace, TensorPlace,
    WeightsFolder, find, write,
};

mod resealed;

/// A store whose elements are all different.
struct Numbers;

impl Store for Numbers {
    fn read(&self, elements: Elements, out: &mut [f32]) -> Result<(), StoreError> {
        let Elements { parameter, stored, start } = elements;
        let base = parameter.name().bytes().map(u32::from).sum::<u32>() + stored as u32;
        for (value, index) in out.iter_mut().zip(start..) {
            *value = (base as usize * 1000 + index) as f32;
        }
        Ok(())
    }
}

/// A store without parameters.
struct Nothing;

impl Store for Nothing {
    fn read(&self, elements: Elements, _: &mut [f32]) -> Result<(), StoreError> {
        Err(StoreError::new(format!("there is no {}", elements.parameter.name())))
    }
}

/// A temporary folder for one test.
struct Temporary(PathBuf);

impl Temporary {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("kintsugi-{}-{name}", std::process::id()));
        fs::remove_dir_all(&path).ok();
        fs::create_dir_all(&path).expect("a folder for tests");
        Temporary(path)
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        fs::remove_dir_all(&self.0).ok();
    }
}

fn plan() -> Plan {
    let settings =
        ["model.hidden=8", "model.heads=2", "model.layers=2", "batch.sequence=4", "batch.global=8"];
    ConfigSource::demo().sets(settings).plan().expect("a legal config")
}

/// The progress of a run that has trained, without its counts.
fn trained() -> RunProgress {
    RunProgress { loss_scale: 1.0, ..RunProgress::default() }
}

/// A run with checkpoints of these steps.
fn saved(out: &Path, steps: &[u64]) -> CheckpointFolder {
    let folder = CheckpointFolder::of_run(out);
    for &step in steps {
        let progress = RunProgress { step, ..trained() };
        write(&folder.of_step(step), &plan(), &Numbers, &plan().stored_tensors(), &progress, None)
            .expect("it is written");
    }
    folder
}

/// The newest valid step, and the errors of newer checkpoints.
fn newest(folder: &CheckpointFolder) -> (Result<Option<u64>, CheckpointError>, Vec<CheckpointError>) {
    let mut broken = Vec::new();
    let newest = folder.newest(|error| broken.push(error.clone()));
    (newest.map(|checkpoint| checkpoint.map(|checkpoint| checkpoint.progress().step)), broken)
}

fn flip(path: &Path, at: usize) {
    let mut bytes = fs::read(path).expect("a file");
    bytes[at] ^= 1;
    fs::write(path, bytes).expect("it is changed");
}

#[test]
fn every_layout_reads_every_number() {
    let out = Temporary::new("numbers");
    let folder = saved(&out.0, &[1]);
    let checkpoint = Checkpoint::open(&folder.of_step(1)).expect("it is whole");
    let plan = plan();
    for parameter in plan.units().into_iter().flat_map(|unit| plan.layout(unit).placed).map(|p| p.parameter) {
        for stored in plan.stored_tensors() {
            let len = parameter.valid_elements();
            for range in [0..len, len / 3..len / 2, len - 1..len] {
                let [mut expected, mut found] = [vec![0.0; range.len()], vec![0.0; range.len()]];
                let elements = Elements { parameter: &parameter, stored, start: range.start };
                Numbers.read(elements, &mut expected).expect("numbers");
                checkpoint.read(elements, &mut found).expect("it is there");
                assert_eq!(expected, found, "{} {stored:?} {range:?}", parameter.name());
            }
        }
    }
    let foreign =
        Parameter { shape: [9, 9], valid_rows: 9, ..plan.layout(plan.units()[0]).placed[0].parameter };
    let error = checkpoint
        .read(Elements::of(&foreign, StoredTensor::Weights), &mut [0.0])
        .expect_err("another shape");
    assert!(error.to_string().contains("but should have"), "{error}");
}

#[test]
fn places_are_where_the_numbers_are() {
    let out = Temporary::new("places");
    let checkpoint = Checkpoint::open(&saved(&out.0, &[1]).of_step(1)).expect("it is whole");
    let plan = plan();
    let parameters: Vec<Parameter> =
        plan.units().into_iter().flat_map(|unit| parameters(&plan.model, unit, 1)).collect();
    let places = checkpoint.places();
    assert_eq!(places.len(), plan.stored_tensors().len() * parameters.len());
    assert!(places.iter().any(|place| place.slices.len() > 2), "the demo has several ranks");
    for TensorPlace { parameter, stored, shape: [rows, columns], slices } in places {
        let parameter = parameters.iter().find(|other| other.name() == parameter).expect("the model has it");
        let mut expected = vec![0.0; rows * columns];
        Numbers.read(Elements::of(parameter, stored), &mut expected).expect("numbers");
        let mut found = vec![0.0; expected.len()];
        for SlicePlace { file, offset, dtype, slice } in slices {
            assert_eq!(dtype, Dtype::F32);
            let bytes = fs::read(file).expect("a file");
            let numbers: Vec<f32> = bytes[offset as usize..][..4 * slice.len]
                .chunks_exact(4)
                .map(|bytes| f32::from_le_bytes(bytes.try_into().expect("four bytes")))
                .collect();
            for (at, run) in slice.runs(columns, 0..slice.len) {
                found[at..at + run.len()].copy_from_slice(&numbers[run]);
            }
        }
        assert_eq!(expected, found, "{} {stored:?}", parameter.name());
    }
}

#[test]
fn a_checkpoint_is_whole_or_absent_and_leaves_others_alone() {
    let out = Temporary::new("unfinished");
    let foreign = out.0.join("to.partial");
    fs::create_dir(&foreign).expect("a folder");
    fs::write(foreign.join("mine"), "").expect("a file");
    let to = out.0.join("to");
    let written = |store: &dyn Store| {
        let done =
            write(&to, &plan(), store, &plan().stored_tensors(), &RunProgress::default(), Some(&foreign));
        let entries = fs::read_dir(&out.0).expect("a folder").flatten();
        let mut names: Vec<String> =
            entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
        names.sort();
        (done.map_err(|error| error.cause.to_string().contains("there is no ")), names.join(" "))
    };
    assert_eq!(written(&Nothing), (Err(true), "to.partial".to_owned()));
    fs::write(foreign.join("tokenizer.json"), "{}").expect("a file");
    assert_eq!(written(&Numbers), (Ok(()), "to to.partial".to_owned()));
    assert!(to.join("tokenizer.json").is_file() && foreign.join("mine").is_file());
}

#[test]
fn what_is_broken_is_named_and_passed_over() {
    type Break = fn(&Path);
    let breaks: [(&str, Break, &str); 8] = [
        ("rank-00003.safetensors", |path| flip(path, 20), "its checksum is xxh3:"),
        ("rank-00000.safetensors", |path| flip(path, 0), "its checksum is xxh3:"),
        (
            "rank-00007.safetensors",
            |path| flip(path, fs::read(path).unwrap().len() - 1),
            "its checksum is xxh3:",
        ),
        ("rank-00002.safetensors", |path| fs::remove_file(path).unwrap(), "No such file"),
        (
            "rank-00001.safetensors",
            |path| fs::write(path, [0; 5]).unwrap(),
            "it has 5 bytes, but should have",
        ),
        (MANIFEST, |path| flip(path, 64), "its checksum is xxh3:"),
        (
            MANIFEST,
            |path| fs::write(path, &fs::read(path).unwrap()[..999]).unwrap(),
            "it is not a complete manifest: ",
        ),
        (MANIFEST, |path| fs::remove_file(path).unwrap(), "No such file"),
    ];
    for (file, do_break, reason) in breaks {
        let out = Temporary::new("broken");
        let folder = saved(&out.0, &[5, 10]);
        let path = folder.of_step(10).join(file);
        do_break(&path);
        let (step, broken) = newest(&folder);
        assert_eq!(step, Ok(Some(5)), "{file}");
        assert_eq!(broken.len(), 1);
        assert_eq!(broken[0].path, path);
        assert!(broken[0].cause.to_string().contains(reason), "{}", broken[0]);
        assert_eq!(find(&out.0, |_| {}).expect("the one before").progress().step, 5);
    }
}

#[test]
fn where_none_is_whole_nothing_begins_anew() {
    let out = Temporary::new("none-whole");
    assert_eq!(newest(&CheckpointFolder::of_run(&out.0)), (Ok(None), vec![]));
    let folder = saved(&out.0, &[5, 10]);
    for step in [5, 10] {
        flip(&folder.of_step(step).join(MANIFEST), 300);
    }
    let (step, broken) = newest(&folder);
    assert!(step.expect_err("all are broken").to_string().contains("none of its checkpoints is whole"));
    assert_eq!(broken.len(), 2);
}

#[test]
fn what_a_run_does_not_go_on_from_is_set_aside() {
    let out = Temporary::new("aside");
    let folder = saved(&out.0, &[5, 10, 15]);
    fs::create_dir(folder.unfinished(20)).expect("a folder");
    let foreign = out.0.join("checkpoints/download.partial");
    fs::create_dir(&foreign).expect("a folder");
    let tenth = Checkpoint::open(&folder.of_step(10)).expect("it is whole");
    let aside = folder.set_aside(Some((&tenth).into()), &[]).expect("it can be moved");
    assert_eq!(aside, Some(out.0.join("checkpoints-1")));
    let steps = |folder: &CheckpointFolder| {
        folder.list().expect("a folder").iter().map(|(step, _)| *step).collect::<Vec<_>>()
    };
    assert_eq!(steps(&folder), [10, 5]);
    assert!(Checkpoint::open(&out.0.join("checkpoints-1/step-00000015")).is_ok());
    assert_eq!(folder.set_aside(Some((&tenth).into()), &[]), Ok(None));
    assert_eq!(folder.set_aside(None, &[]), Ok(Some(out.0.join("checkpoints-2"))));
    let left = fs::read_dir(out.0.join("checkpoints")).expect("a folder");
    let left: Vec<PathBuf> = left.map(|entry| entry.expect("an entry").path()).collect();
    assert_eq!(left, [foreign], "what no run has made stays");
}

#[test]
fn what_is_set_aside_stays_on_its_disk() {
    let [out, disk] = ["linked", "disk"].map(Temporary::new);
    fs::create_dir(disk.0.join("large")).expect("a folder");
    symlink(disk.0.join("large"), out.0.join("checkpoints")).expect("a link");
    let folder = saved(&out.0, &[5]);
    let aside = disk.0.canonicalize().expect("a folder").join("large-1");
    assert_eq!(folder.set_aside(None, &[]), Ok(Some(aside.clone())));
    assert!(Checkpoint::open(&aside.join("step-00000005")).is_ok());
}

#[test]
fn a_name_that_contradicts_the_manifest_is_refused() {
    let out = Temporary::new("renamed");
    let folder = saved(&out.0, &[5, 10]);
    fs::rename(folder.of_step(10), folder.of_step(99)).expect("it is renamed");
    let (step, broken) = newest(&folder);
    assert_eq!((step, broken.len()), (Ok(Some(5)), 1));
    let reason = "its name says step 99, but its manifest step 10; rename the folder or move it away";
    assert_eq!(broken[0], CheckpointError::new(&folder.of_step(99), reason));
    // A folder with another name is accepted, and the checkpoint that a run resumes from stays.
    let best = folder.path().join("best");
    fs::rename(folder.of_step(99), &best).expect("it is renamed");
    let renamed = Checkpoint::open(&best).expect("it is whole");
    assert_eq!(folder.set_aside(Some((&renamed).into()), &[]), Ok(None));
    assert!(Checkpoint::open(renamed.path()).is_ok());
}

#[test]
fn a_folder_knows_its_checkpoints_by_any_path() {
    let out = Temporary::new("holds");
    let folder = saved(&out.0, &[5]);
    let elsewhere = saved(&out.0.join("else"), &[5]);
    symlink(folder.of_step(5), out.0.join("link")).expect("a link");
    symlink(elsewhere.of_step(5), folder.of_step(6)).expect("a link");
    let around = out.0.join("else/../checkpoints/step-00000005");
    for own in [folder.of_step(5), folder.of_step(6), out.0.join("link"), around] {
        assert!(folder.holds(&own), "{}", own.display());
    }
    assert!(!folder.holds(&elsewhere.of_step(5)), "another run's");
}

#[test]
fn the_newest_are_kept() {
    let out = Temporary::new("prune");
    let folder = saved(&out.0, &[5, 10, 15]);
    folder.prune(2, 0, &RunProgress { step: 15, ..trained() }).expect("it can be removed");
    assert_eq!(fs::read_dir(out.0.join("checkpoints")).expect("a folder").count(), 2);
    assert_eq!(newest(&folder), (Ok(Some(15)), vec![]));
}

/// Saves a checkpoint of a step with this validation loss.
fn save_evaluated(folder: &CheckpointFolder, step: u64, validation_loss: Option<f64>) -> RunProgress {
    let progress = RunProgress { step, validation_loss, ..trained() };
    write(&folder.of_step(step), &plan(), &Numbers, &plan().stored_tensors(), &progress, None)
        .expect("it is written");
    progress
}

/// The step of the best checkpoint, by the path that stands for it.
fn best(path: &Path) -> Result<u64, String> {
    let found = find(&path.join("best"), |_| {});
    found.map(|checkpoint| checkpoint.progress().step).map_err(|error| error.to_string())
}

#[test]
fn the_best_are_kept_beside_the_newest() {
    let out = Temporary::new("prune-best");
    let folder = CheckpointFolder::of_run(&out.0);
    let steps = || folder.list().expect("a folder").iter().map(|(step, _)| *step).collect::<Vec<_>>();
    let save = |step, validation_loss| {
        let progress = save_evaluated(&folder, step, validation_loss);
        folder.prune(1, 2, &progress).expect("it can be removed");
        steps()
    };
    assert_eq!(save(1, None), [1]);
    assert_eq!(save(2, Some(4.0)), [2], "a step without an evaluation is no candidate");
    assert_eq!(save(3, Some(3.0)), [3, 2]);
    assert_eq!(save(4, Some(5.0)), [4, 3, 2]);
    assert_eq!(save(5, Some(3.5)), [5, 3]);
    assert_eq!(save(6, Some(3.5)), [6, 5, 3], "of equal losses the earlier step stays");
    assert_eq!(save(7, None), [7, 5, 3]);
    // JSON has no NaN, so the manifest of such a step has no loss.
    assert_eq!(save(8, Some(f64::NAN)), [8, 5, 3]);
    assert_eq!(save(9, Some(1.0)), [9, 3]);
    assert_eq!((best(&out.0), best(&out.0.join("checkpoints"))), (Ok(9), Ok(9)));
    let newest = RunProgress { step: 9, validation_loss: Some(1.0), ..trained() };
    folder.prune(1, 0, &newest).expect("it can be removed");
    assert_eq!(steps(), [9], "by default only the newest are kept");
}

#[test]
fn the_best_whole_checkpoint_is_found() {
    let out = Temporary::new("best");
    assert!(best(&out.0).unwrap_err().ends_with("no checkpoint here has a validation loss"));
    let folder = CheckpointFolder::of_run(&out.0);
    for (step, loss) in [(1, Some(2.0)), (2, Some(1.0)), (3, Some(2.0)), (4, None)] {
        save_evaluated(&folder, step, loss);
    }
    assert_eq!(best(&out.0), Ok(2));
    flip(&folder.of_step(2).join("rank-00000.safetensors"), 500);
    let mut broken = Vec::new();
    let found = folder.best(|error| broken.push(error.clone())).expect("others are whole").expect("two");
    assert_eq!((found.progress().step, broken.len()), (1, 1), "of equal losses the earlier step");
    let error = WeightsFolder::open(&out.0.join("best")).expect_err("other weights would go unnoticed");
    assert_eq!(error.to_string(), broken[0].to_string());
    fs::create_dir(out.0.join("best")).expect("a folder");
    assert!(
        best(&out.0).unwrap_err().ends_with("there is no checkpoint here"),
        "a folder of this name is used"
    );
}

#[test]
fn a_checkpoint_of_a_good_step_stays_while_steps_are_skipped() {
    let out = Temporary::new("prune-streak");
    let folder = saved(&out.0, &[5, 10]);
    let steps = || folder.list().expect("a folder").iter().map(|(step, _)| *step).collect::<Vec<_>>();
    let save = |step, skipped_in_a_row, updates| {
        let progress = RunProgress { step, updates, skipped_in_a_row, ..trained() };
        write(&folder.of_step(step), &plan(), &Numbers, &plan().stored_tensors(), &progress, None)
            .expect("it is written");
        folder.prune(1, 0, &progress).expect("it can be removed");
        steps()
    };
    assert_eq!(save(15, 3, 12), [15, 10]);
    // A resumed run counts skipped steps from 0, and its checkpoint was saved during consecutive skipped steps, too.
    assert_eq!(save(20, 1, 12), [20, 10]);
    assert_eq!(save(25, 0, 17), [25]);
    // The update of step 26 made the weights diverge, so its checkpoint is not good although the step succeeded.
    let progress = RunProgress { step: 26, updates: 18, ..trained() };
    write(&folder.of_step(26), &plan(), &Numbers, &plan().stored_tensors(), &progress, None)
        .expect("it is written");
    folder.prune(2, 0, &progress).expect("it can be removed");
    assert_eq!(save(30, 4, 18), [30, 25]);
}

#[test]
fn a_folder_is_locked_once() {
    let out = Temporary::new("lock");
    let take = || RunLock::take(&out.0, |error| panic!("{error}"));
    let lock = take().expect("no run has it");
    let error = take().expect_err("it is taken").to_string();
    assert!(error.contains(&format!("another run, process {}, is using", std::process::id())), "{error}");
    drop(lock);
    take().expect("it is free again");
}

/// A wrong field of a manifest whose checksum is still correct.
#[derive(Clone, Debug)]
enum WrongField {
    Slice { at: usize, field: usize, value: usize },
    Missing(usize),
    Twice(usize),
    Model { field: usize, value: usize },
    StoredTensor(Vec<StoredTensor>),
}

fn wrong_field() -> impl Strategy<Value = WrongField> {
    // The numbers of a configuration are signed.
    let number =
        prop_oneof![0..10_usize, any::<usize>().prop_map(|number| number >> 1), Just(usize::MAX >> 1)];
    prop_oneof![
        (any::<usize>(), 0..5_usize, number.clone()).prop_map(|(at, field, value)| WrongField::Slice {
            at,
            field,
            value
        }),
        any::<usize>().prop_map(WrongField::Missing),
        any::<usize>().prop_map(WrongField::Twice),
        (0..6_usize, number).prop_map(|(field, value)| WrongField::Model { field, value }),
        Just(WrongField::StoredTensor(vec![])),
    ]
}

#[test]
fn a_manifest_that_lies_is_refused_or_right() {
    let out = Temporary::new("lies");
    let path = saved(&out.0, &[1]).of_step(1);
    let original = Manifest::read(&path).expect("it is whole");
    let config = ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() };
    let result = proptest::test_runner::TestRunner::new(config).run(&wrong_field(), |wrong_field| {
        let mut manifest = original.clone();
        let count = manifest.slices.len();
        match wrong_field {
            WrongField::Slice { at, field, value } => {
                let slice = &mut manifest.slices[at % count];
                *match field {
                    0 => &mut slice.file,
                    1 => &mut slice.columns[0],
                    2 => &mut slice.columns[1],
                    3 => &mut slice.start,
                    _ => &mut slice.len,
                } = value;
            }
            WrongField::Missing(at) => drop(manifest.slices.remove(at % count)),
            WrongField::Twice(at) => manifest.slices.push(manifest.slices[at % count].clone()),
            WrongField::Model { field, value } => {
                let model = &mut manifest.plan.model;
                *match field {
                    0 => &mut model.layers,
                    1 => &mut model.hidden,
                    2 => &mut model.head_dim,
                    3 => &mut model.ffn,
                    4 => &mut model.vocab,
                    _ => &mut model.positions,
                } = value;
            }
            WrongField::StoredTensor(stored) => manifest.stored_tensors = stored,
        }
        fs::write(path.join(MANIFEST), manifest.encode()).expect("it is changed");
        let opened = Checkpoint::open(&path);
        prop_assert!(
            opened.is_err() || manifest == original,
            "{wrong_field:?}",
            wrong_field = manifest.stored_tensors
        );
        Ok(())
    });
    result.expect("no wrong_field is believed");
}
