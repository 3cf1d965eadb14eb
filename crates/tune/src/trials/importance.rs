//! Which settings matter, and in which direction, by the trials that worked.
//!
//! A process without predictions is fitted to the logarithm of the measured times. Shapley values share the difference between
//! two trials among the settings in which they differ: the contribution of a setting is the mean, over orders in which the
//! settings are changed one after the other, of what changing it does (Štrumbelj and Kononenko, doi:10.1007/s10115-013-0679-x).
//! Fitting again to random selections of the trials gives intervals (the bootstrap).

use super::random::Random;
use super::space::{Proposal, Space, Values};
use super::surrogate::{Observation, Prior, Process};

/// How much a setting matters.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct Importance {
    /// Its key.
    pub key: String,
    /// By how much it changes the value of a trial, in the mean: 0.1 for a factor of e^0.1 in either direction.
    pub effect: f64,
    /// Nine in ten of the selections of trials have an effect between these two.
    pub interval: [f64; 2],
    /// Each of its values, with what it costs over the best of them: 0.1 for 10 % more.
    pub costs: Vec<(String, f64)>,
}

/// Trials below which nothing is said.
const MIN_TRIALS: usize = 5;
/// Selections of trials for the intervals.
const SELECTIONS: usize = 24;
/// Orders of the settings for each pair of trials.
const ORDERS: usize = 12;
/// Trials that are explained.
const EXPLAINED: usize = 48;
/// What is believed of the values before the trials.
const PRIOR: Prior =
    Prior { slope: 0.0, slope_deviation: 1e-3, level_deviation: 1.0, residual: 0.4, probability: 1.0 };

/// The importance of every setting that differs between trials with a value, the largest first. Empty for fewer than five.
pub fn importance(trials: &[(Values, f64)]) -> Vec<Importance> {
    if trials.len() < MIN_TRIALS {
        return Vec::new();
    }
    let proposal = |(values, _): &(Values, f64)| Proposal { values: values.clone(), ..Proposal::default() };
    let space = Space::new(&trials.iter().map(proposal).collect::<Vec<_>>());
    let logs: Vec<f64> = trials.iter().map(|(_, value)| value.ln()).collect();
    let mean = logs.iter().sum::<f64>() / logs.len() as f64;
    let logs: Vec<f64> = logs.into_iter().map(|log| log - mean).collect();
    let mut random = Random::new(trials.len() as u64);
    let whole: Vec<usize> = (0..logs.len()).collect();
    let effects = shapley(&space, &logs, &whole, &mut random);
    let selections: Vec<Contributions> = (0..SELECTIONS)
        .map(|_| {
            let selection: Vec<usize> = whole.iter().map(|_| random.below(logs.len())).collect();
            shapley(&space, &logs, &selection, &mut random)
        })
        .collect();
    let mut found: Vec<Importance> = (0..space.settings.len())
        .map(|setting| {
            let mut sizes: Vec<f64> = selections.iter().map(|one| one.size[setting]).collect();
            sizes.sort_by(f64::total_cmp);
            let interval = [sizes[SELECTIONS / 20], sizes[SELECTIONS - 1 - SELECTIONS / 20]];
            Importance {
                key: space.settings[setting].key.clone(),
                effect: effects.size[setting],
                interval,
                costs: costs(&space, &effects, setting),
            }
        })
        .collect();
    found.sort_by(|a, b| b.effect.total_cmp(&a.effect));
    found
}

/// The contributions of settings.
struct Contributions {
    /// For each setting the mean size.
    size: Vec<f64>,
    /// For each setting and value, the mean contribution of trials with that value; `None` without such trials.
    by_value: Vec<Vec<Option<f64>>>,
}

fn shapley(space: &Space, logs: &[f64], selection: &[usize], random: &mut Random) -> Contributions {
    let levels = |index: usize| &space.points[index].levels[..];
    let observe = |&index: &usize| Observation { levels: levels(index), trend: 0.0, value: logs[index] };
    let process = Process::fit(space, &[PRIOR], &selection.iter().map(observe).collect::<Vec<_>>());
    let settings = space.settings.len();
    let mut sums = vec![(0.0, 0_usize); settings];
    let mut by_value: Vec<Vec<(f64, usize)>> =
        space.settings.iter().map(|setting| vec![(0.0, 0); setting.values.len()]).collect();
    let step = selection.len().div_ceil(EXPLAINED);
    let mut order: Vec<usize> = (0..settings).collect();
    for &explained in selection.iter().step_by(step) {
        let mut contributions = vec![0.0; settings];
        for _ in 0..ORDERS {
            let mut at = levels(selection[random.below(selection.len())]).to_vec();
            random.shuffle(&mut order);
            let mut before = process.mean(&at, 0.0);
            for &setting in &order {
                if at[setting] != levels(explained)[setting] {
                    at[setting] = levels(explained)[setting];
                    let after = process.mean(&at, 0.0);
                    contributions[setting] += (after - before) / ORDERS as f64;
                    before = after;
                }
            }
        }
        for (setting, contribution) in contributions.into_iter().enumerate() {
            sums[setting] = (sums[setting].0 + f64::abs(contribution), sums[setting].1 + 1);
            let of_value = &mut by_value[setting][levels(explained)[setting] as usize];
            *of_value = (of_value.0 + contribution, of_value.1 + 1);
        }
    }
    let mean = |(sum, count): (f64, usize)| (count > 0).then(|| sum / count as f64);
    Contributions {
        size: sums.into_iter().map(|sum| mean(sum).unwrap_or(0.0)).collect(),
        by_value: by_value.into_iter().map(|values| values.into_iter().map(mean).collect()).collect(),
    }
}

fn costs(space: &Space, effects: &Contributions, setting: usize) -> Vec<(String, f64)> {
    let means = &effects.by_value[setting];
    let least = means.iter().flatten().copied().fold(f64::INFINITY, f64::min);
    let values = space.settings[setting].values.iter().zip(means);
    values.filter_map(|(value, mean)| Some((value.clone(), ((*mean)? - least).exp_m1()))).collect()
}

/// The importance in a paragraph: the settings that matter, what their values cost, and those of which no effect is seen.
pub fn in_words(found: &[Importance]) -> String {
    let (told, quiet): (Vec<_>, Vec<_>) = found.iter().partition(|one| one.effect >= MIN_EFFECT);
    let name = |one: &Importance| one.key.rsplit('.').next().unwrap_or(&one.key).replace('_', " ");
    let percent = |share: f64| format!("{:.0} %", 100.0 * share);
    let mut sentences: Vec<String> = told
        .iter()
        .take(TOLD)
        .map(|one| {
            let [low, high] = one.interval.map(f64::exp_m1);
            let mut costs = one.costs.clone();
            costs.sort_by(|(_, a), (_, b)| a.total_cmp(b));
            let best = costs.first().map_or("", |(value, _)| value);
            let worse: Vec<String> = costs
                .iter()
                .skip(1)
                .rev()
                .take(2)
                .map(|(value, cost)| format!("{value} costs {} more", percent(*cost)))
                .collect();
            let worse = if worse.is_empty() { String::new() } else { format!("; {}", worse.join(", ")) };
            format!(
                "{} changes a trial by {} in the mean ({} to {}): best is {best}{worse}.",
                name(one),
                percent(one.effect.exp_m1()),
                percent(low),
                percent(high)
            )
        })
        .collect();
    if !quiet.is_empty() {
        let names: Vec<String> = quiet.iter().map(|one| name(one)).collect();
        sentences.push(format!("Of {} no effect above {} is seen.", names.join(", "), percent(MIN_EFFECT)));
    }
    sentences.join(" ")
}

/// Effects below this are not told.
const MIN_EFFECT: f64 = 0.01;
/// Settings that are told at most.
const TOLD: usize = 5;

#[cfg(test)]
mod tests {
    use super::*;

    fn trial(tp: usize, micro: usize, schedule: &str, value: f64) -> (Values, f64) {
        let pairs = [("parallel.tp", tp.to_string()), ("batch.micro", micro.to_string())];
        let mut values: Values = pairs.map(|(key, value)| (key.to_owned(), value)).into();
        values.insert("parallel.schedule".to_owned(), schedule.to_owned());
        (values, value)
    }

    #[test]
    fn the_setting_that_decides_comes_first_and_one_without_effect_last() {
        let mut trials = Vec::new();
        for tp in [1, 2, 4, 8] {
            for micro in [1, 2, 4] {
                for schedule in ["1f1b", "gpipe"] {
                    // Every doubling of tp costs 20 %, every doubling of the micro-batch gains 5 %.
                    let value = 1.2_f64.powf(f64::from(tp).log2()) * 0.95_f64.powf(f64::from(micro).log2());
                    trials.push(trial(tp as usize, micro as usize, schedule, value));
                }
            }
        }
        let found = importance(&trials);
        let keys: Vec<&str> = found.iter().map(|one| one.key.as_str()).collect();
        assert_eq!(keys, ["parallel.tp", "batch.micro", "parallel.schedule"]);
        // The mean distance of two of 0, 1, 2, 3 doublings is 1.25; one contribution is from the mean of all, so 1.
        assert!((found[0].effect - 1.2_f64.ln()).abs() < 0.05, "{found:#?}");
        assert!(found[0].interval[0] > found[1].interval[1] && found[2].effect < 0.005, "{found:#?}");
        let cost = |index: usize, value: &str| {
            found[index].costs.iter().find(|(found, _)| found == value).expect("a value").1
        };
        assert!((cost(0, "8") - 0.728).abs() < 0.15 && cost(0, "1") < 0.02, "{found:#?}");
        assert!((cost(1, "1") - 0.108).abs() < 0.05 && cost(1, "4") < 0.02, "{found:#?}");
        let words = in_words(&found);
        assert!(
            words.starts_with("tp changes a trial by") && words.contains("best is 1; 8 costs"),
            "{words}"
        );
        assert!(words.ends_with("Of schedule no effect above 1 % is seen."), "{words}");
        assert!(importance(&trials[..4]).is_empty());
    }
}
