//! Helpers: copies of fixtures, and changes to them.

use std::fs;
use std::path::{Path, PathBuf};

use kintsugi_checkpoint::huggingface::HuggingFaceFolder;
use kintsugi_plan::Unit;
use kintsugi_plan::parameters::{Parameter, parameters};
use kintsugi_rank::{Elements, Store, StoredTensor};
use serde_json::{Map, Value};

/// The names of all fixtures.
pub fn fixtures() -> Vec<String> {
    let folder = fs::read_dir(fixture("")).unwrap();
    folder.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

pub fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

/// An unused path in the folder of tests.
pub fn fresh(name: &str) -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    fs::remove_dir_all(&path).ok();
    path
}

/// A copy of a fixture.
pub fn copy(fixture_name: &str, name: &str) -> PathBuf {
    let to = fresh(name);
    fs::create_dir_all(&to).unwrap();
    for entry in fs::read_dir(fixture(fixture_name)).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
    }
    to
}

/// Changes the description of a folder.
pub fn change(folder: &Path, change: impl FnOnce(&mut Map<String, Value>)) {
    let path = folder.join("config.json");
    let mut config: Map<String, Value> = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    change(&mut config);
    fs::write(&path, serde_json::to_vec(&config).unwrap()).unwrap();
}

/// Why a folder is refused, without the path in front.
pub fn refusal(folder: &Path) -> String {
    HuggingFaceFolder::open(folder).expect_err("it is to be refused").cause.to_string()
}

/// All parameters of a folder, with their values.
pub fn values(folder: &HuggingFaceFolder) -> Vec<(Parameter, Vec<f32>)> {
    let model = folder.model();
    let positions = model.has_learned_positions().then_some(Unit::Positions);
    let layers = (0..model.layers).map(Unit::Layer);
    let units = [Unit::Table, Unit::Head].into_iter().chain(positions).chain(layers);
    let all = units.flat_map(|unit| parameters(model, unit, 1));
    all.map(|parameter| {
        let mut values = vec![f32::NAN; parameter.valid_elements()];
        folder.read(Elements::of(&parameter, StoredTensor::Weights), &mut values).unwrap();
        (parameter, values)
    })
    .collect()
}
