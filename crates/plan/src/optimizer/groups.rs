//! Groups of parameters that the optimizer treats in another way than the others.

use serde::{Deserialize, Serialize};

use super::Optimizer;
use crate::config::ConfigError;
use crate::config::error::{between, invalid};
use crate::parameters::Parameter;
use crate::{Plan, StoredTensor};

/// The parameters whose names match a pattern, and what is different for them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ParameterGroup {
    /// A name such as `layer.0.query_weight`; `*` stands for any characters.
    #[serde(default)]
    pub parameters: String,
    /// The factor of their learning rate.
    #[serde(default = "one")]
    pub lr_factor: f64,
    /// Their weight decay. Without it the optimizer's, which norms and biases do not have.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weight_decay: Option<f64>,
    /// Whether they stay as they are.
    #[serde(default, skip_serializing_if = "is_false")]
    pub frozen: bool,
}

fn one() -> f64 {
    1.0
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_false(value: &bool) -> bool {
    !value
}

/// What the optimizer does with a parameter.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ParameterUpdate {
    /// The factor of the learning rate.
    pub lr_factor: f64,
    /// The factor of the update that the optimizer adds because of the parameter's shape. Weight decay does not have it.
    pub shape_factor: f64,
    /// Weight decay.
    pub weight_decay: f64,
}

impl Optimizer {
    /// The states of a parameter: see [`OptimizerKind::states_of`](crate::OptimizerKind::states_of).
    pub fn states_of(&self, parameter: &Parameter) -> &'static [StoredTensor] {
        self.kind.states_of(parameter)
    }

    /// What happens to a parameter: what the first group with its name says, or what holds for all.
    pub fn update_of(&self, parameter: &Parameter) -> ParameterUpdate {
        let weight_decay = if parameter.decay { self.weight_decay } else { 0.0 };
        let shape_factor = self.kind.shape_factor(parameter);
        let ordinary = ParameterUpdate { lr_factor: 1.0, shape_factor, weight_decay };
        self.group_of(parameter).map_or(ordinary, |group| ParameterUpdate {
            lr_factor: group.lr_factor,
            shape_factor,
            weight_decay: group.weight_decay.unwrap_or(weight_decay),
        })
    }

    /// The first group with a parameter.
    pub(crate) fn group_of(&self, parameter: &Parameter) -> Option<&ParameterGroup> {
        if self.groups.is_empty() {
            return None;
        }
        let name = parameter.name();
        self.groups.iter().find(|group| matches(&group.parameters, &name))
    }
}

/// Checks the numbers of groups.
pub(super) fn check(groups: Vec<ParameterGroup>) -> Result<Vec<ParameterGroup>, ConfigError> {
    for group in &groups {
        between("optimizer.groups.lr_factor", group.lr_factor, 0.0..=1e6)?;
        if let Some(decay) = group.weight_decay {
            between("optimizer.groups.weight_decay", decay, 0.0..=1e6)?;
        }
        let given = [
            ("lr_factor", Some(group.lr_factor).filter(|&factor| factor.total_cmp(&1.0).is_ne())),
            ("weight_decay", group.weight_decay),
        ];
        for (key, value) in given {
            if let Some(value) = value.filter(|_| group.frozen) {
                let key = format!("optimizer.groups.{key}");
                return Err(invalid(&key, value, "has no meaning with frozen = true; leave it out"));
            }
        }
    }
    Ok(groups)
}

/// Fails if a group has no parameter of the model: its pattern is a mistake.
pub(crate) fn check_names(plan: &Plan) -> Result<(), ConfigError> {
    let groups = &plan.optimizer.groups;
    if groups.is_empty() {
        return Ok(());
    }
    let placed = plan.units().into_iter().flat_map(|unit| plan.layout(unit).placed);
    let names: Vec<String> = placed.map(|placed| placed.parameter.name()).collect();
    for (number, group) in groups.iter().enumerate() {
        let pattern = &group.parameters;
        let earlier = |name: &String| groups[..number].iter().any(|group| matches(&group.parameters, name));
        let mut own = names.iter().filter(|name| matches(pattern, name)).peekable();
        let rule = if own.peek().is_none() {
            format!("matches no parameter of the model; its parameters are {}", some(&names))
        } else if own.all(earlier) {
            "matches only parameters of earlier groups, which count".to_owned()
        } else {
            continue;
        };
        return Err(invalid("optimizer.groups.parameters", format!("\"{pattern}\""), rule));
    }
    Ok(())
}

/// The first and the last of some names.
fn some(names: &[String]) -> String {
    match names {
        [first, second, .., last] => format!("{first}, {second}, …, {last}"),
        names => names.join(", "),
    }
}

/// Whether a pattern stands for a name.
fn matches(pattern: &str, name: &str) -> bool {
    let Some((start, rest)) = pattern.split_once('*') else { return pattern == name };
    let Some(mut left) = name.strip_prefix(start) else { return false };
    let (middle, end) = rest.rsplit_once('*').map_or((None, rest), |(middle, end)| (Some(middle), end));
    // Each part at its first place leaves most for the parts after it.
    for part in middle.into_iter().flat_map(|middle| middle.split('*')) {
        let Some(at) = left.find(part) else { return false };
        left = &left[at + part.len()..];
    }
    left.ends_with(end)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::ConfigSource;

    #[test]
    fn a_star_stands_for_any_characters() {
        let name = "layer.10.query_weight";
        for pattern in
            ["*", "layer.*", "*weight", "layer.*.query_weight", "*.query_*", name, "l*e*r*t", "layer.1*"]
        {
            assert!(matches(pattern, name), "{pattern}");
        }
        for pattern in
            ["", "layer.10", "layer.1.*", "*bias", "layer.*.key*", "weight*", "*query*query*", "*t*t"]
        {
            assert!(!matches(pattern, name), "{pattern}");
        }
        assert!(!matches("aba*aba", "aba"), "the start and the end do not overlap");
    }

    #[test]
    fn the_first_group_with_a_name_counts() {
        let groups = "optimizer.groups=[{ parameters = \"layer.1.*_bias\", lr_factor = 0.5, weight_decay = 0.25 }, \
                      { parameters = \"layer.*\", lr_factor = 2.0 }]";
        let plan = ConfigSource::demo().set(groups).plan().expect("a legal config");
        let update = |unit: usize, name: &str| {
            let layout = plan.layout(plan.units()[unit]);
            let placed = layout.placed.iter().find(|placed| placed.parameter.name().ends_with(name));
            let update = plan.optimizer.update_of(&placed.expect(name).parameter);
            (update.lr_factor, update.weight_decay)
        };
        assert_eq!(update(3, "query_bias"), (0.5, 0.25));
        assert_eq!(update(2, "query_bias"), (2.0, 0.0));
        assert_eq!(update(3, "query_weight"), (2.0, 0.1));
        assert_eq!(update(0, "table"), (1.0, 0.1));
        let again = ConfigSource::text(plan.to_toml()).plan().expect("a legal config");
        assert_eq!(again.optimizer, plan.optimizer);
    }
}
