//! Which transfers of sharded tensors carry codes: what a preset or the keys ask for, and what that means on a mesh.

use super::error::{ConfigError, invalid};
use super::keys::RawSharding;
use super::words::{Quantize, ShardPreset};
use crate::{Codes, Integer, Quantized, Sharding};

/// The integers that a configuration asks for.
struct Wanted {
    weights: Option<Integer>,
    refresh: Option<Integer>,
    gradients: Option<Integer>,
}

impl Wanted {
    /// The integers as given, or from the preset. The refresh of weights stays in the compute type unless it or the weights are
    /// given.
    fn of(raw: &RawSharding) -> Self {
        let (weights, gradients) = match raw.preset {
            Some(ShardPreset::ZeroPlusPlus | ShardPreset::ThreeLevel) => (Quantize::Int8, Quantize::Int4),
            Some(ShardPreset::Mics) | None => (Quantize::None, Quantize::None),
        };
        let refresh = raw.quantize_refresh.or(raw.quantize_weights).unwrap_or(Quantize::None);
        Wanted {
            weights: raw.quantize_weights.unwrap_or(weights).integer(),
            refresh: refresh.integer(),
            gradients: raw.quantize_gradients.unwrap_or(gradients).integer(),
        }
    }
}

/// The codes that a configuration asks for, whatever is sharded.
pub(super) fn requested(raw: &RawSharding) -> Result<Quantized, ConfigError> {
    let (wanted, block) = (Wanted::of(raw), raw.quantize_block()?);
    let codes = |integer: Option<Integer>| integer.map(|integer| Codes { integer, block });
    Ok(Quantized {
        weights: codes(wanted.weights),
        refresh: codes(wanted.refresh),
        gradients: codes(wanted.gradients),
    })
}

/// The transfers that carry codes if weights, gradients and states are sharded as in `sharding`. Transfers that this sharding
/// does not have carry none. `levels_given`: whether the configuration shards weights, and whether it shards states.
pub(super) fn resolve(
    raw: &RawSharding,
    sharding: [usize; 2],
    levels_given: [bool; 2],
) -> Result<Quantized, ConfigError> {
    let block = raw.quantize_block()?;
    if !block.is_power_of_two() {
        return Err(invalid("sharding.quantize_block", block, "is no power of two"));
    }
    for (field, given) in [
        ("sharding.quantize_weights", raw.quantize_weights),
        ("sharding.quantize_refresh", raw.quantize_refresh),
    ] {
        if given == Some(Quantize::Int4) {
            return Err(invalid(
                field,
                Quantize::Int4,
                "is too coarse for weights; use \"none\" or \"int8\"",
            ));
        }
    }
    let [weights_sharded, states_sharded] = levels_given;
    let needs = |field: &str, given: Option<Quantize>, possible: bool, rule: &str| match given {
        Some(kind) if kind != Quantize::None && !possible => Err(invalid(field, kind, rule)),
        _ => Ok(()),
    };
    needs(
        "sharding.quantize_weights",
        raw.quantize_weights,
        weights_sharded || states_sharded,
        "needs sharding.weights or sharding.states to be sharded: nothing else gathers weights",
    )?;
    needs(
        "sharding.quantize_refresh",
        raw.quantize_refresh,
        states_sharded,
        "needs sharding.states to be sharded: nothing else refreshes weights",
    )?;
    needs(
        "sharding.quantize_gradients",
        raw.quantize_gradients,
        states_sharded,
        "needs sharding.states to be sharded: a sum over replicas that own the same states is not quantised",
    )?;
    let [weights, states] = sharding;
    let wanted = Wanted::of(raw);
    let codes = |integer: Option<Integer>, transfers: bool| {
        integer.filter(|_| transfers).map(|integer| Codes { integer, block })
    };
    Ok(Quantized {
        weights: codes(wanted.weights, weights > 1),
        refresh: codes(wanted.refresh, weights < states),
        gradients: codes(wanted.gradients, states > 1),
    })
}

/// The keys that mean these codes.
pub(super) fn keys(quantized: Quantized) -> RawSharding {
    let Quantized { weights, refresh, gradients } = quantized;
    RawSharding {
        quantize_weights: Some(weights.into()),
        quantize_refresh: Some(refresh.into()),
        quantize_gradients: Some(gradients.into()),
        quantize_block: quantized.iter().next().map(|codes| codes.block),
        ..RawSharding::default()
    }
}

/// Notes about keys that ask for codes and get none.
pub(super) fn notes(raw: &RawSharding, sharding: &Sharding) -> Vec<String> {
    let Quantized { weights, refresh, gradients } = sharding.quantized;
    let keys = [
        ("weights", raw.quantize_weights, weights.is_some() || refresh.is_some(), "no weights are gathered"),
        ("refresh", raw.quantize_refresh, refresh.is_some(), "no weights are refreshed"),
        ("gradients", raw.quantize_gradients, gradients.is_some(), "no gradients are reduced to shards"),
    ];
    let same_as_none = |(what, given, used, why): (&str, Option<Quantize>, bool, &str)| {
        let kind = given.filter(|&kind| kind != Quantize::None && !used)?;
        Some(format!("sharding.quantize_{what} = {kind} is the same as \"none\": {why}"))
    };
    keys.into_iter().filter_map(same_as_none).collect()
}
