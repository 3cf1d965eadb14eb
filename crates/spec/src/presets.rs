//! Models and clusters by name: TOML files under `presets/`, compiled into the binary. Each figure states its origin.
//!
//! A preset is a part of a configuration. The configuration reader interprets its keys.

/// A named part of a configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Preset {
    /// The name in `model.preset` or `cluster.preset`.
    pub name: &'static str,
    /// The preset whose keys hold where this one has none.
    pub base: Option<&'static str>,
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
    ($folder:literal: $($name:literal $(over $base:literal)?),+) => {
        &[$(Preset {
            name: $name,
            base: presets!(@base $($base)?),
            text: include_str!(concat!("../presets/", $folder, "/", $name, ".toml")),
        }),+]
    };
    (@base) => { None };
    (@base $base:literal) => { Some($base) };
}

/// The models, from small to large within each family.
pub const MODELS: &[Preset] = presets!("models":
    "demo", "gpt2-124m", "gpt2-1558m", "gpt-1.3b", "gpt-1.4b", "gpt-22b", "gpt-175b", "gpt-1t", "neox-20b",
    "llama2-7b", "llama3-8b", "llama3-70b", "llama3.1-8b", "llama3.1-405b", "llama3.2-1b", "llama3.2-3b", "nemotron4-15b",
    "nemotron4-340b", "mistral-7b", "qwen2.5-0.5b", "qwen2.5-7b", "qwen2.5-72b", "qwen3-0.6b", "qwen3-8b",
    "qwen3-32b", "smollm3-3b", "phi-4", "starcoder2-3b", "gemma-2b", "gemma-7b", "gemma2-2b", "gemma2-9b", "gemma2-27b",
    "olmo2-1b", "olmo2-7b", "olmo2-13b", "olmo2-32b");

/// The clusters: this machine, nodes of one device each, and machines of a facility over these.
pub const CLUSTERS: &[Preset] = presets!("clusters":
    "local", "frontier", "v100", "a100", "h100", "h200", "b200", "mi300x", "perlmutter" over "a100", "leonardo" over "a100",
    "alps" over "h100", "jupiter" over "h100", "dgx-h100-superpod" over "h100", "lumi" over "frontier", "summit" over "v100",
    "supermuc-ng");

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

/// A cluster and those that it is based on, the outermost base first.
pub fn cluster_layers(name: &str) -> Result<Vec<Preset>, UnknownPreset> {
    let preset = cluster(name)?;
    let mut layers = preset.base.map(cluster_layers).transpose()?.unwrap_or_default();
    layers.push(preset);
    Ok(layers)
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
                assert!(preset.base.is_none_or(|base| presets.iter().any(|other| other.name == base)));
            }
        }
    }

    #[test]
    fn an_unknown_name_lists_the_known_ones() {
        assert_eq!(model("gpt-175b").unwrap().name, "gpt-175b");
        assert_eq!(
            cluster("fronteir").unwrap_err().to_string(),
            "\"fronteir\" is not a preset; the presets are local, frontier, v100, a100, h100, h200, b200, mi300x, perlmutter, \
             leonardo, alps, jupiter, dgx-h100-superpod, lumi, summit, supermuc-ng"
        );
    }
}
