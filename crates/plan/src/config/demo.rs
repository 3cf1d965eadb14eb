//! The built-in demo: the configuration without a file, until the user names another model or another cluster.

use toml::{Table, Value};

/// The text of the demo.
pub(super) const DEMO: &str = include_str!("demo.toml");

/// The keys that a model cannot do without. Together they describe a model of the user's own.
const SHAPE: [&str; 4] = ["layers", "hidden", "heads", "vocab"];

/// Removes from the demo what the user's settings replace. If they name another model, nothing remains: its sequence, batch
/// and layout are not the demo's. If they only name another cluster, the demo's model remains, because a plan needs one.
/// Other keys change the demo and nothing else.
pub(super) fn keep_what_applies(demo: &mut Table, sets: &Table) {
    let given = |key: &str| value(sets, "model", key).is_some();
    let names_model = names_another(demo, sets, "model") || given("init");
    let names_cluster = names_another(demo, sets, "cluster");
    if names_model || names_cluster && SHAPE.into_iter().all(given) {
        demo.clear();
    } else if names_cluster {
        demo.retain(|table, _| table == "model");
    }
}

/// A note that a plan for a cluster is about the demo's model. `rest` is what remains of the demo.
pub(super) fn note(rest: &Table, sets: &Table) -> Option<String> {
    let only_model = rest.len() == 1 && value(sets, "model", "preset").is_none();
    only_model.then(|| {
        "no model is named, so this is the demo's; name one, as in --set model.preset=llama3-8b".to_owned()
    })
}

/// Whether the settings have a preset of this table that is not the demo's.
fn names_another(demo: &Table, sets: &Table, table: &str) -> bool {
    value(sets, table, "preset").is_some_and(|preset| Some(preset) != value(demo, table, "preset"))
}

fn value<'a>(layer: &'a Table, table: &str, key: &str) -> Option<&'a Value> {
    layer.get(table)?.get(key)
}
