//! Broken folders give an error with the file and the reason, and arbitrary bytes never cause a panic.

use std::fs;

use kintsugi_checkpoint::huggingface::HuggingFaceFolder;
use proptest::prelude::*;

use crate::support::{change, copy, fresh, refusal};

#[test]
fn weights_that_do_not_fit_the_description_are_refused() {
    let folder = copy("gpt2", "more-layers");
    change(&folder, |config| {
        config.insert("n_layer".into(), 3.into());
    });
    assert_eq!(refusal(&folder), "its weights have no tensor transformer.h.2.ln_1.weight");

    let folder = copy("llama", "fewer-layers");
    change(&folder, |config| {
        config.insert("num_hidden_layers".into(), 1.into());
    });
    assert_eq!(
        refusal(&folder),
        "its weights have a tensor model.layers.1.input_layernorm.weight that the model of config.json does not have"
    );

    let folder = copy("neox", "other-width");
    change(&folder, |config| {
        config.insert("intermediate_size".into(), 44.into());
    });
    assert_eq!(
        refusal(&folder),
        "gpt_neox.layers.0.mlp.dense_h_to_4h.weight has shape [40, 32], but config.json describes [44, 32]"
    );
}

#[test]
fn files_that_are_missing_or_cut_are_named() {
    let folder = copy("llama", "missing-file");
    fs::remove_file(folder.join("model-00002-of-00003.safetensors")).unwrap();
    let error = HuggingFaceFolder::open(&folder).unwrap_err();
    assert!(error.path.ends_with("model-00002-of-00003.safetensors"), "{error}");

    let folder = copy("gpt2", "cut-file");
    let path = folder.join("model.safetensors");
    let bytes = fs::read(&path).unwrap();
    for length in [0, 7, 8, 100, bytes.len() - 1] {
        fs::write(&path, &bytes[..length]).unwrap();
        let error = HuggingFaceFolder::open(&folder).unwrap_err();
        assert_eq!(error.path, path, "{error}");
    }
    fs::write(&path, "").unwrap();
    assert_eq!(refusal(&folder), "it is empty");
    fs::write(&path, "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n").unwrap();
    assert_eq!(
        refusal(&folder),
        "it is a Git LFS pointer, not the file itself; run git lfs pull to download the file"
    );
    fs::remove_file(&path).unwrap();
    assert_eq!(HuggingFaceFolder::open(&folder).unwrap_err().path, path);
    fs::write(folder.join("pytorch_model.bin"), "pickled").unwrap();
    assert_eq!(
        refusal(&folder),
        "it has pytorch_model.bin but no model.safetensors; only safetensors files are read"
    );
}

#[test]
fn an_index_names_files_of_its_own_folder() {
    for elsewhere in ["../llama/model.safetensors", "/etc/passwd", "", ".."] {
        let folder = copy("llama", "elsewhere");
        let path = folder.join("model.safetensors.index.json");
        let index = serde_json::json!({ "weight_map": { "lm_head.weight": elsewhere } });
        fs::write(&path, index.to_string()).unwrap();
        assert!(refusal(&folder).ends_with("which is not a file of this folder"), "{elsewhere}");
    }
    let folder = copy("llama", "wrong-file");
    let path = folder.join("model.safetensors.index.json");
    let text = fs::read_to_string(&path).unwrap();
    let first = text.find("model-00003").unwrap();
    let text = format!("{}model-00001{}", &text[..first], &text[first + 11..]);
    fs::write(&path, text).unwrap();
    assert!(refusal(&folder).ends_with("but the file does not have it"));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn arbitrary_files_are_an_error(
        file in prop::sample::select(&["config.json", "model.safetensors", "model.safetensors.index.json"][..]),
        bytes in prop::collection::vec(any::<u8>(), 0..200),
    ) {
        let folder = copy("llama", "arbitrary");
        fs::write(folder.join(file), bytes).unwrap();
        prop_assert!(HuggingFaceFolder::open(&folder).is_err());
    }

    #[test]
    fn an_arbitrary_header_is_an_error(
        length in prop_oneof![0..300_u64, any::<u64>()],
        text in r#"(\{"[a-z.]{1,9}":\{"dtype":"(F32|F16|I64|X)","shape":\[[0-9]{0,20}\],"data_offsets":\[[0-9]{1,20},[0-9]{1,20}\]\}\})|[\[\]{}:,"0-9a-z]{0,80}"#,
    ) {
        let folder = copy("gpt2", "arbitrary-header");
        let bytes = [&length.to_le_bytes()[..], text.as_bytes(), &[0; 64]].concat();
        fs::write(folder.join("model.safetensors"), bytes).unwrap();
        prop_assert!(HuggingFaceFolder::open(&folder).is_err());
    }

    #[test]
    fn a_changed_byte_of_a_description_is_an_error_or_a_model(at in any::<prop::sample::Index>(), to in any::<u8>()) {
        for name in ["config.json", "model.safetensors.index.json"] {
            let folder = copy("llama", "changed");
            let path = folder.join(name);
            let mut bytes = fs::read(&path).unwrap();
            let at = at.index(bytes.len());
            bytes[at] = to;
            fs::write(&path, bytes).unwrap();
            HuggingFaceFolder::open(&folder).ok();
        }
    }
}

#[test]
fn an_empty_folder_has_no_description() {
    let folder = fresh("empty");
    fs::create_dir_all(&folder).unwrap();
    assert!(HuggingFaceFolder::open(&folder).unwrap_err().path.ends_with("config.json"));
}
