//! Embedding, layer and head over two tensor-parallel ranks against one: outputs, loss and every gradient.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use kintsugi_comm::threads::World;
use kintsugi_comm::{Communicator, Solo};
use kintsugi_model::{embedding, head, layer};
use kintsugi_plan::parameters::{Parameter, Slot, Split, UnitLayout};
use kintsugi_plan::{Part, Plan, Unit};
use kintsugi_spec::Topology;

use crate::lab::{Lab, MODELS, UnitInLab, plan, shape};
use crate::numbers::{assert_close, random_tokens, random_weights};

/// What a pass through the model leaves on one rank.
struct Pass {
    loss: f64,
    /// This rank's rows of the stream and of its gradient, before and after the layer.
    streams: [Vec<f64>; 4],
    /// The gradients, by name, as they lie on this rank.
    gradients: BTreeMap<String, Vec<f64>>,
}

/// Forward and backward of the whole model on part `group.rank()`.
fn pass(plan: &Plan, group: &dyn Communicator, part: Part) -> Pass {
    let (lab, shape) = (Lab::new(), shape(plan, group.rank()));
    let ctx = lab.context(group, &shape);
    let layouts: Vec<UnitLayout> = plan.units().into_iter().map(|unit| plan.layout(unit)).collect();
    let units: BTreeMap<Unit, UnitInLab> = layouts
        .iter()
        .map(|layout| (layout.unit, lab.unit(layout, &own_weights(plan, layout, group.rank()))))
        .collect();
    let (table, positions) = (&units[&Unit::Table], units.get(&Unit::Positions));
    let (layer_unit, head_unit) = (&units[&Unit::Layer(0)], &units[&Unit::Head]);
    let tokens = lab.tokens(&random_tokens(plan.rows(), plan.model.vocab, 4));
    let targets = lab.tokens(&random_tokens(plan.rows(), plan.model.vocab, 5));
    let (sum, scale) = (lab.buffer(&[0.0]), lab.buffer(&[1024.0]));
    let (output_unit, slot) =
        if plan.model.tied { (table, Slot::Table) } else { (head_unit, Slot::Output) };
    let head_weights =
        head::HeadWeights { norm: head_unit.weights(), output: output_unit.weights().get(slot) };
    let output = head::Output { gradients: output_unit.gradients(), slot };

    let embedded = positions.map(UnitInLab::weights);
    let x = embedding::forward(&ctx, tokens.view(), &table.weights(), embedded.as_ref());
    let x_values = lab.values(x.view());
    let (y, saved) = layer::forward(&ctx, x, &layer_unit.weights());
    let y_values = lab.values(y.view());
    let loss = head::Loss { targets: targets.view(), sum: sum.view(), scale: scale.view() };
    let head_saved = head::forward(&ctx, y, &head_weights, loss);

    let (dy, deferred) = head::backward(&ctx, head_saved, &head_weights, &head_unit.gradients(), &output, part);
    deferred.iter().for_each(|deferred| head::weight_part(&ctx, deferred, &output));
    let dy_values = lab.values(dy.view());
    let (w, g) = (layer_unit.weights(), layer_unit.gradients());
    let (dx, deferred) = layer::backward(&ctx, dy, saved, &w, &g, part);
    deferred.into_iter().for_each(|deferred| layer::weight_part(&ctx, deferred, &g));
    let dpositions = positions.map(UnitInLab::gradients);
    embedding::backward(&ctx, &dx, tokens.view(), &table.gradients(), dpositions.as_ref());

    let gradient_of = |layout: &UnitLayout| {
        let values = lab.values(units[&layout.unit].gradient());
        let named = |p: &kintsugi_plan::parameters::Placed| (p.parameter.name(), values[p.range.clone()].to_vec());
        layout.placed.iter().map(named).collect::<Vec<_>>()
    };
    Pass {
        loss: lab.values(sum.view())[0],
        streams: [x_values, y_values, dy_values, lab.values(dx.view())],
        gradients: layouts.iter().flat_map(gradient_of).collect(),
    }
}
