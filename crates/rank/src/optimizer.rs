//! The end of a step: global norm, clipping, and the update of the parameters that this rank owns.

use kintsugi_comm::Collective;
use kintsugi_plan::{Axis, Group, LossScale, OptimizerKind, RateSchedule, Span};
use kintsugi_tensor::DType;
use kintsugi_tensor::ops::{
    LearningRate, LossScaler, Parameters, RateCurve, ScaledSum, Squares, SumsOfSquares, Update,
    UpdateControl, UpdateRule,
};

use crate::rank::{LOSS, Rank, SQUARES, STOP};
use crate::unit::UnitState;

impl Rank {
    /// Sums the squares of the gradients that this rank owns, so that each gradient counts once over the mesh. If several
    /// ranks hold the same gradient (dp ranks if it is not sharded over all of them, tp ranks if its parameter is replicated), the
    /// first one counts it.
    pub(crate) fn measure(&self) {
        let mut parts = Vec::with_capacity(2 * self.units.len());
        for (i, unit) in self.units.iter().enumerate().filter(|(_, unit)| unit.is_trained()) {
            let (gradient, _) = unit.owned_gradient();
            let unreduced = unit.first_reduction.is_none();
            let own = unreduced.then(|| self.unit_norms.slice(i..i + 1));
            let first = self.first_counted(unit);
            parts.push(Squares { from: gradient.slice(0..first), own, counts: false });
            parts.push(Squares { from: gradient.slice(first..gradient.len()), own, counts: true });
        }
        parts.retain(|part| !part.from.is_empty() && (part.own.is_some() || part.counts));
        let total = Some(self.sums().slice(SQUARES..SQUARES + 1));
        self.backend.sums_of_squares(SumsOfSquares { parts: &parts, total });
        if self.wants_to_stop {
            self.backend.fill(1.0, self.sums().slice(STOP..STOP + 1));
        }
    }

    /// The first element of a unit's gradient shard that this rank counts in the global norm. It counts all elements after
    /// it, too.
    fn first_counted(&self, unit: &UnitState) -> usize {
        let (gradient, owned) = unit.owned_gradient();
        // The ranks after the first `states` own the same states again.
        let first_owner = self.plan.mesh.replica(self.at) < self.plan.sharding.states;
        if !self.owned_units.contains(&unit.layout.unit) || !first_owner {
            return gradient.len();
        }
        let replicated = unit.layout.replicated.clamp(owned.start, owned.end) - owned.start;
        if self.at.tp() == 0 { 0 } else { replicated }
    }

    pub(crate) fn norm_start(&mut self, axis: Axis) {
        // The loss is the same on every tp rank, so only the first one counts it.
        if axis == Axis::Tensor && self.at.tp() > 0 {
            self.backend.fill(0.0, self.sums().slice(LOSS..LOSS + 1));
        }
        let sums = self.sums.take().expect("one norm at a time");
        let all = 0..sums.len();
        self.sums_pending =
            Some(self.groups.get(Group::Along(axis, Span::All)).start(Collective::AllReduce, sums, all));
    }

    pub(crate) fn norm_wait(&mut self, axis: Axis) {
        let pending = self.sums_pending.take().expect("a wait follows its start");
        self.sums = Some(self.groups.get(Group::Along(axis, Span::All)).wait(pending));
    }

    pub(crate) fn clip(&self) {
        let (optimizer, precision) = (&self.plan.optimizer, &self.plan.precision);
        let decay = optimizer.decay(self.plan.run.steps);
        let dynamic = self.shape.compute == DType::F16 && precision.loss_scale == LossScale::Dynamic;
        self.backend.update_control(UpdateControl {
            control: self.control.view(),
            sum_of_squares: self.sums().slice(SQUARES..SQUARES + 1),
            loss_sum: self.sums().slice(LOSS..LOSS + 1),
            tokens: self.plan.tokens_per_step() as f64,
            clip: optimizer.clip,
            rate: LearningRate {
                peak: optimizer.lr,
                floor: optimizer.min_lr,
                warmup: optimizer.warmup,
                curve: match optimizer.schedule {
                    RateSchedule::Constant => RateCurve::Constant,
                    RateSchedule::Cosine => RateCurve::Cosine,
                    RateSchedule::Linear | RateSchedule::Wsd => RateCurve::Linear,
                    RateSchedule::InverseSqrt => RateCurve::InverseSqrt,
                    RateSchedule::Sqrt | RateSchedule::WsdSqrt => RateCurve::Sqrt,
                },
                decay_start: decay.start,
                decay_steps: decay.steps,
            },
            betas: optimizer.kind.corrected_betas(),
            scaler: dynamic.then_some(LossScaler { window: LOSS_SCALE_WINDOW, largest: MAX_LOSS_SCALE }),
        });
    }

    pub(crate) fn update(&self) {
        let count = self.units.iter().map(UnitState::parameter_count).sum();
        let mut parameters: Vec<Parameters> = Vec::with_capacity(count);
        parameters.extend(self.units.iter().flat_map(UnitState::parameters));
        let rule = match self.plan.optimizer.kind {
            // What Muon does not orthogonalize, it updates as AdamW.
            OptimizerKind::AdamW { betas, eps } | OptimizerKind::Muon { betas, eps, .. } => {
                UpdateRule::AdamW { betas, epsilon: eps }
            }
            OptimizerKind::Lion { betas } => UpdateRule::Lion { betas },
            OptimizerKind::Sgd { momentum, nesterov } => UpdateRule::Sgd { momentum, nesterov },
        };
        self.backend.update(Update { parameters: &parameters, control: self.control.view(), rule });
    }
}

impl Rank {
    pub(crate) fn average(&self) {
        let ema = self.plan.optimizer.ema;
        for (average, weights) in self.units.iter().filter_map(UnitState::average) {
            self.backend.scaled_sum(ScaledSum { x: average, y: weights, factors: (ema, 1.0 - ema) });
        }
    }
}

/// Successful steps before the loss scale doubles.
const LOSS_SCALE_WINDOW: u64 = 1000;
/// The largest loss scale.
const MAX_LOSS_SCALE: f64 = 16_777_216.0;
