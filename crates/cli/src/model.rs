//! The model of a folder, ready to run; shared by `generate` and `eval`.

use std::path::{Path, PathBuf};

use clap::Args;
use kintsugi_checkpoint::WeightsFolder;
use kintsugi_checkpoint::convert::plan_for;
use kintsugi_data::TextCodec;
use kintsugi_engine::{MemoryChoice, tokenizer};
use kintsugi_plan::{Data, Plan};
use kintsugi_rank::{AverageStore, FiniteStore, RankMemory, Store, StoredTensor};

use crate::failure::Failure;
use crate::fit;

/// The arguments that select a model and a layout.
#[derive(Args)]
pub struct ModelArguments {
    /// Folder of a run, a checkpoint, or a Hugging Face folder
    ///
    /// Of a run, the newest checkpoint is used, or with RUN/best the best one.
    folder: PathBuf,
    /// Overrides a value of the configuration, as in --set parallel.tp=2
    #[arg(long = "set", value_name = "TABLE.KEY=VALUE")]
    sets: Vec<String>,
    /// Uses the moving average of the weights (optimizer.ema) instead of the weights
    #[arg(long)]
    average: bool,
    /// Allows weights that are not finite; by default they are an error
    #[arg(long)]
    allow_non_finite: bool,
}

impl ModelArguments {
    /// Opens the folder.
    pub fn open(&self) -> Result<WeightsFolder, Failure> {
        let weights = WeightsFolder::open(&self.folder)?;
        if self.average {
            check_average(&weights, &self.folder)?;
        }
        Ok(weights)
    }

    /// Runs `work` with a reader of the weights. Weights that are not finite are an error, unless they are allowed.
    pub fn with_store<T>(
        &self,
        weights: &WeightsFolder,
        plan: &Plan,
        work: impl FnOnce(&dyn Store) -> T,
    ) -> T {
        let compute = plan.precision.compute;
        let average = AverageStore { store: weights };
        let store: &dyn Store = if self.average { &average } else { weights };
        if self.allow_non_finite { work(store) } else { work(&FiniteStore { store, compute }) }
    }

    /// The plan of its model. `--set` overrides `under`, and `over` overrides `--set`.
    pub fn plan(&self, weights: &WeightsFolder, under: &[String], over: &[String]) -> Result<Plan, Failure> {
        let plan = plan_for(weights, &[under, &self.sets, over].concat())?;
        weights.check_model(&plan)?;
        Ok(plan)
    }
}

/// Fails if a folder has no moving average of the weights.
pub fn check_average(weights: &WeightsFolder, folder: &Path) -> Result<(), Failure> {
    if weights.stored_tensors().contains(&StoredTensor::Average) {
        return Ok(());
    }
    let rule = "has no average of the weights; --average needs a checkpoint of a run with optimizer.ema";
    Err(Failure::mistake(format!("{} {rule}", folder.display())))
}

/// The memory of the ranks. Fails if they do not fit.
pub fn memory(plan: &Plan, stages: &[RankMemory]) -> Result<MemoryChoice, Failure> {
    fit::inference_here(plan, stages).map_err(Failure::mistake)?;
    Ok(MemoryChoice::Slab(stages.iter().map(|memory| memory.reserved).collect()))
}

/// The tokenizer: the one that was named, or the one that the model was trained with.
pub fn text(weights: &WeightsFolder, named: Option<&str>) -> Result<TextCodec, Failure> {
    let kept = || weights.tokenizer().map(|folder| folder.display().to_string());
    let name = match (named.map(str::to_owned).or_else(kept), weights) {
        (None, WeightsFolder::Checkpoint(checkpoint)) => trained_with(checkpoint.plan())?,
        (name, _) => name,
    };
    let missing = || {
        let rule =
            "no tokenizer is known for this model; choose one with --tokenizer, or use --prompt-tokens";
        Failure::mistake(rule)
    };
    Ok(TextCodec::open(&name.ok_or_else(missing)?)?)
}

/// The name of the tokenizer of a run that has stored none.
fn trained_with(plan: &Plan) -> Result<Option<String>, Failure> {
    match &plan.data {
        Data::Demo => Ok(plan.init.is_none().then(|| "demo".to_owned())),
        Data::Tokens(_) => Ok(tokenizer(plan)?),
    }
}
