//! Models and clusters by name: TOML files under `presets/`, compiled into the binary. Each figure states its origin.
//!
//! A preset is a part of a configuration. The configuration reader interprets its keys.

/// A named part of a configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Preset {
    /// The name in `model.preset` or `cluster.preset`.
    pub name: &'static str,
    /// Its TOML text.
    pub text: &'static str,
}

/// The error for an unknown preset name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("\"{name}\" is not a preset; the presets are {}", .known.join(", "))]
pub struct UnknownPreset {
    /// The name.
    pub name: String,
    /// The known names.
    pub known: Vec<&'static str>,
}

macro_rules! presets {
    ($folder:literal: $($name:literal),+) => {
        &[$(Preset { name: $name, text: include_str!(concat!("../presets/", $folder, "/", $name, ".toml")) }),+]
    };
}

/// The models, from small to large within each family.
pub const MODELS: &[Preset] = presets!("models":
    "demo", "gpt2-124m", "gpt2-1558m", "gpt-1.3b", "gpt-1.4b", "gpt-22b", "gpt-175b", "gpt-1t", "neox-20b",
    "llama2-7b", "llama3-8b", "llama3-70b", "llama3.1-8b");

/// The clusters.
pub const CLUSTERS: &[Preset] =
    presets!("clusters": "local", "frontier", "v100", "a100", "h100", "h200", "b200");

/// The frameworks.
pub const FRAMEWORKS: &[Preset] = presets!("frameworks":
    "megatron-2021", "megatron-2022", "megatron-deepspeed", "deepspeed-zero3", "frontier-megatron", "nanotron",
    "llm-foundry", "torchtitan", "torchtitan-eager", "aleph-alpha", "megatron-core", "nemo", "megatron", "eager");

/// The model with this name.
pub fn model(name: &str) -> Result<Preset, UnknownPreset> {
    find(MODELS, name)
}

/// The cluster with this name.
pub fn cluster(name: &str) -> Result<Preset, UnknownPreset> {
    find(CLUSTERS, name)
}

/// The framework with this name.
pub fn framework(name: &str) -> Result<Preset, UnknownPreset> {
    find(FRAMEWORKS, name)
}

fn find(presets: &[Preset], name: &str) -> Result<Preset, UnknownPreset> {
    presets.iter().find(|preset| preset.name == name).copied().ok_or_else(|| UnknownPreset {
        name: name.to_owned(),
        known: presets.iter().map(|preset| preset.name).collect(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_preset_has_its_own_table() {
        for (presets, table) in [(MODELS, "model"), (CLUSTERS, "cluster"), (FRAMEWORKS, "framework")] {
            for preset in presets {
                let text: toml::Table = toml::from_str(preset.text).expect(preset.name);
                assert!(text[table].is_table(), "{}", preset.name);
            }
        }
    }

    #[test]
    fn an_unknown_name_lists_the_known_ones() {
        assert_eq!(model("gpt-175b").unwrap().name, "gpt-175b");
        assert_eq!(
            cluster("fronteir").unwrap_err().to_string(),
            "\"fronteir\" is not a preset; the presets are local, frontier, v100, a100, h100, h200, b200"
        );
    }
}
