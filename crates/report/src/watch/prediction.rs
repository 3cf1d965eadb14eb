//! Predicts the plans of runs in the background. A large plan takes many seconds, and pages are shown without its prediction
//! until then.

use std::sync::{Arc, Mutex, PoisonError};

use kintsugi_plan::Plan;
use tokio::sync::Semaphore;
use tokio::task::spawn_blocking;

use crate::Context;
use crate::run::ReportRun;
use crate::runs::PredictedRun;

/// Predictions at a time. Each takes one core, which a run on this machine may need.
const AT_A_TIME: usize = 2;

/// Starts predictions.
pub struct Predictions {
    context: Arc<Context<'static>>,
    places: Arc<Semaphore>,
}

/// The prediction for one run.
#[derive(Default)]
pub struct RunPrediction(Mutex<State>);

#[derive(Clone, Default)]
struct State {
    /// The configuration that is or was predicted.
    config: Option<String>,
    predicted: Option<Arc<PredictedRun>>,
    pending: bool,
}

impl Predictions {
    /// No predictions yet.
    pub fn new(context: Context<'static>) -> Self {
        Predictions { context: Arc::new(context), places: Arc::new(Semaphore::new(AT_A_TIME)) }
    }

    /// The prediction for a run, and whether it is still being computed. Each configuration is predicted once.
    pub fn get(&self, of: &Arc<RunPrediction>, run: &ReportRun) -> (Option<Arc<PredictedRun>>, bool) {
        let mut state = of.0.lock().unwrap_or_else(PoisonError::into_inner);
        if state.config.as_ref() != Some(&run.config) {
            let config = run.config.clone();
            *state = State { config: Some(config.clone()), predicted: None, pending: run.plan.is_some() };
            if let Some(plan) = run.plan.clone() {
                self.start(Arc::clone(of), config, plan);
            }
        }
        (state.predicted.clone(), state.pending)
    }

    fn start(&self, of: Arc<RunPrediction>, config: String, plan: Plan) {
        let (context, places) = (Arc::clone(&self.context), Arc::clone(&self.places));
        tokio::spawn(async move {
            let _place = places.acquire().await;
            let is_current = |state: &State| state.config.as_ref() == Some(&config);
            if !is_current(&of.0.lock().unwrap_or_else(PoisonError::into_inner)) {
                return;
            }
            // After a panic, which was printed, the run has no prediction.
            let predicted = spawn_blocking(move || predict(&plan, &context)).await.ok();
            let mut state = of.0.lock().unwrap_or_else(PoisonError::into_inner);
            if is_current(&state) {
                state.predicted = predicted.map(Arc::new);
                state.pending = false;
            }
        });
    }
}

/// Predicts a plan on one thread of its own. In the common pool, a small plan would wait for a large one.
fn predict(plan: &Plan, context: &Context) -> PredictedRun {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build().expect("a thread starts");
    pool.install(|| PredictedRun::of(plan, context))
}
