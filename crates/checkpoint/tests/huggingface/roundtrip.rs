//! Exported weights equal the imported ones, in every type and number of files.

use std::fs;
use std::path::PathBuf;

use half::{bf16, f16};
use kintsugi_checkpoint::huggingface::{ExportOptions, HuggingFaceFolder, export};
use kintsugi_plan::Compute;
use kintsugi_rank::{Elements, Store, StoredTensor};
use kintsugi_spec::{Activation, Family, ModelSpec};

use crate::support::{copy, fixture, fixtures, fresh, values};

fn options(dtype: Compute, file_bytes: u64) -> ExportOptions {
    ExportOptions { dtype, file_bytes, like: None, end_of_document: None, non_finite: false }
}

#[test]
fn an_export_has_the_model_and_the_weights() {
    let rounded = |value: f32, dtype| match dtype {
        Compute::Fp32 => value,
        Compute::Bf16 => bf16::from_f32(value).to_f32(),
        Compute::Fp16 => f16::from_f32(value).to_f32(),
    };
    for name in fixtures() {
        let folder = HuggingFaceFolder::open(&fixture(&name)).unwrap();
        for (dtype, file_bytes) in [(Compute::Fp32, 20_000), (Compute::Bf16, 1 << 30), (Compute::Fp16, 1)] {
            let path = fresh(&format!("export-{name}-{dtype:?}"));
            export(&path, folder.model(), &folder, &options(dtype, file_bytes)).unwrap();
            assert_eq!(path.join("model.safetensors").exists(), dtype == Compute::Bf16, "{name}");
            let again = HuggingFaceFolder::open(&path).unwrap();
            assert_eq!(again.model(), folder.model(), "{name}");
            for ((parameter, before), (_, after)) in values(&folder).into_iter().zip(values(&again)) {
                // The file has the weights of Gemma's norms minus one.
                let offset = if name.starts_with("gemma") && !parameter.decay { 1.0 } else { 0.0 };
                let expected: Vec<f32> =
                    before.iter().map(|&value| offset + rounded(value - offset, dtype)).collect();
                assert_eq!(after, expected, "{name}, {dtype:?}: {}", parameter.name());
            }
        }
    }
}

#[test]
fn a_slice_of_a_parameter_equals_that_slice_of_the_whole() {
    for name in fixtures() {
        let folder = HuggingFaceFolder::open(&fixture(&name)).unwrap();
        for (parameter, whole) in values(&folder) {
            for (start, len) in [(0, 1), (whole.len() / 3, whole.len() / 2), (whole.len() - 1, 1)] {
                let mut part = vec![f32::NAN; len];
                folder
                    .read(Elements { parameter: &parameter, stored: StoredTensor::Weights, start }, &mut part)
                    .unwrap();
                assert_eq!(part, whole[start..start + len], "{name}: {}", parameter.name());
            }
            let mut states = [f32::NAN; 2];
            folder.read(Elements::of(&parameter, StoredTensor::SecondMoment), &mut states).unwrap();
            assert!(states.iter().all(|&state| state == 0.0), "there are no states");
            let after = Elements { parameter: &parameter, stored: StoredTensor::Weights, start: whole.len() };
            let beyond = folder.read(after, &mut [0.0]);
            assert!(beyond.unwrap_err().to_string().contains("is larger than"));
        }
    }
}

#[test]
fn a_model_saved_without_its_head_has_shorter_names() {
    let folder = copy("gpt2", "short-names");
    let path = folder.join("model.safetensors");
    let bytes = fs::read(&path).unwrap();
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header = String::from_utf8(bytes[8..8 + length].to_vec()).unwrap();
    let header = header.replace("\"transformer.", "\"");
    let header = format!("{header:length$}");
    fs::write(&path, [&bytes[..8], header.as_bytes(), &bytes[8 + length..]].concat()).unwrap();
    let short = HuggingFaceFolder::open(&folder).unwrap();
    let long = HuggingFaceFolder::open(&fixture("gpt2")).unwrap();
    assert_eq!(values(&short), values(&long));
}

#[test]
fn the_tokenizer_is_exported() {
    let like = copy("llama", "tokenizer-from");
    fs::write(like.join("tokenizer.json"), "{}").unwrap();
    crate::support::change(&like, |config| {
        config.insert("eos_token_id".into(), 7.into());
    });
    let folder = HuggingFaceFolder::open(&like).unwrap();
    let path = fresh("tokenizer-to");
    let options = ExportOptions { like: Some(like.clone()), ..options(Compute::Fp32, 1 << 30) };
    export(&path, folder.model(), &folder, &options).unwrap();
    assert_eq!(fs::read_to_string(path.join("tokenizer.json")).unwrap(), "{}");
    assert!(fs::read_to_string(path.join("config.json")).unwrap().contains("\"eos_token_id\": 7"));
}

#[test]
fn nothing_is_overwritten_and_nothing_is_left_half_written() {
    let folder = HuggingFaceFolder::open(&fixture("gpt2")).unwrap();
    let path = fresh("occupied");
    fs::create_dir_all(&path).unwrap();
    let write = |model: &ModelSpec| export(&path, model, &folder, &options(Compute::Fp32, 1 << 30));
    write(folder.model()).expect("an empty folder is no obstacle");
    let error = write(folder.model()).unwrap_err();
    assert_eq!((error.path.as_path(), &error.cause.to_string()[..]), (path.as_path(), "it already exists"));

    let path = fresh("impossible").join("to");
    let foreign = path.with_extension("partial");
    fs::create_dir_all(&foreign).unwrap();
    let larger = ModelSpec { ffn: 80, ..folder.model().clone() };
    let error = export(&path, &larger, &folder, &options(Compute::Fp32, 1 << 30)).unwrap_err();
    assert!(error.cause.to_string().contains("is larger than"), "{error}");
    let left: Vec<PathBuf> =
        fs::read_dir(path.parent().unwrap()).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert_eq!(left, [foreign], "only what was there");
}

#[test]
fn models_that_hugging_face_cannot_describe_are_refused() {
    let refused = |name: &str, change: &dyn Fn(&mut ModelSpec)| {
        let folder = HuggingFaceFolder::open(&fixture(name)).unwrap();
        let mut model = folder.model().clone();
        change(&mut model);
        let path = fresh("no-word");
        let error = export(&path, &model, &folder, &options(Compute::Fp32, 1 << 30)).unwrap_err();
        error
            .cause
            .to_string()
            .strip_prefix("Hugging Face cannot describe this model: ")
            .expect("that is why")
            .to_owned()
    };
    let grouped = refused("neox", &|model| model.kv_heads = 2);
    assert_eq!(grouped, "model.kv_heads = 2 is not model.heads = 4, which GPT-NeoX needs");
    let wide = refused("gpt2", &|model| model.head_dim = 8);
    assert_eq!(wide, "model.heads · model.head_dim = 4 · 8 is not model.hidden = 24, which GPT-2 needs");
    assert_eq!(
        refused("llama", &|model| model.activation = Activation::Gelu),
        "model.activation = \"gelu\" has no gate"
    );
    assert_eq!(
        refused("llama", &|model| model.rotary_fraction = 0.5),
        "model.rotary_fraction = 0.5 is not 1"
    );
    assert_eq!(Family::Gpt, HuggingFaceFolder::read_model(&fixture("gpt2")).unwrap().family);
}
