//! Trials as processes of their own: `kintsugi train` on a short run, with a deadline and a limit on memory.
//!
//! Memory is limited by the resident size that `/proc` reports, because a limit on the address space breaks CUDA. The
//! processes of a trial are found by the folder of its run, which is an argument of their command lines, so that ranks that a launcher started, and what
//! a killed tuning left behind, are found too.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use kintsugi_run::files::METRICS;

use super::executor::{Executor, ExecutorError, TrialReport, TrialRequest};
use super::measure::{Measurement, StepTimes};
use super::nodes::{NodeLease, NodePool};
use super::proc;
use super::record::{Ending, MAX_MESSAGE};

/// Runs each trial in a process, or in one process for each rank.
#[derive(Debug)]
pub struct Processes {
    /// The program.
    pub program: PathBuf,
    /// Its arguments before `train`; none if ranks are threads. `{ranks}` is the number of ranks, `{nodes}` that of their nodes,
    /// and `{nodelist}` the names of these.
    pub launcher: Vec<String>,
    /// The nodes of the allocation, if the program is srun. Trials run side by side on them.
    pub nodes: Option<NodePool>,
    /// How many trials run at the same time.
    pub slots: usize,
    /// The folder of the trials' files.
    pub folder: PathBuf,
    /// Steps to run before the measured ones.
    pub warm_up: usize,
    /// Steps to measure.
    pub steps: usize,
    /// How long a trial may take.
    pub deadline: Duration,
    /// The resident bytes that all processes of a trial may have together.
    pub memory: Option<u64>,
    /// Asks the tuning to stop.
    pub stop: Arc<AtomicBool>,
}

/// How long srun may take to end the ranks of its step, which it does when it is asked to end. If it is killed, they go on.
const END_OF_STEP: Duration = Duration::from_secs(10);
/// The time between two looks at a process.
const POLL: Duration = Duration::from_millis(20);
/// The time between two looks at all processes of the machine.
const SCAN: Duration = Duration::from_millis(250);
/// Steps after the warm-up before a trial may be stopped for being slow.
const STEPS_BEFORE_STOP: usize = 2;
/// The configuration of a trial, in its folder.
const CONFIG: &str = "trial.toml";
/// The exit code of an error in the configuration: the plan does not fit, for one.
const REFUSED: i32 = 2;

impl Executor for Processes {
    fn slots(&self) -> usize {
        self.slots
    }

    fn run(&self, request: &TrialRequest) -> Result<TrialReport, ExecutorError> {
        let folder = self.folder.join(format!("{:04}", request.trial));
        if self.slots == 1 {
            self.end_leftovers();
        }
        let lease = self.nodes.as_ref().map(|pool| self.lease(pool, request)).transpose()?;
        let mut trial = RunningTrial::start(self, request, &folder, lease.as_ref())?;
        let ended = trial.watch(self, request)?;
        Ok(trial.report(self, &ended))
    }
}

impl Processes {
    /// Ends what earlier trials in this folder left running.
    pub fn end_leftovers(&self) {
        let Ok(folder) = self.folder.canonicalize() else { return };
        // Only trials have an argument `run.out=FOLDER/NUMBER/run`.
        let left = || {
            proc::with_argument(|argument| trial_of(argument).is_some_and(|of| of.parent() == Some(&*folder)))
        };
        if self.nodes.is_some() {
            left().into_iter().for_each(proc::terminate);
            let begun = Instant::now();
            while !left().is_empty() && begun.elapsed() < END_OF_STEP {
                thread::sleep(POLL);
            }
        }
        left().into_iter().for_each(proc::kill);
    }

    /// Nodes for a trial, when they are free.
    fn lease<'a>(&self, pool: &'a NodePool, request: &TrialRequest) -> Result<NodeLease<'a>, ExecutorError> {
        let is_stopped = || self.stop.load(Ordering::Relaxed);
        pool.take(request.ranks, is_stopped).ok_or_else(|| {
            let nodes = pool.nodes_for(request.ranks);
            let too_few = ExecutorError::Nodes { trial: request.trial, nodes };
            if is_stopped() { ExecutorError::Stopped } else { too_few }
        })
    }
}

/// The folder of a trial whose process has this argument.
fn trial_of(argument: &Path) -> Option<&Path> {
    let run = argument.as_os_str().as_bytes().strip_prefix(b"run.out=")?;
    let run = Path::new(OsStr::from_bytes(run));
    (run.file_name() == Some(OsStr::new("run"))).then(|| run.parent()).flatten()
}

/// Makes an empty folder for a trial. Files that no trial has left there are not removed.
fn make_folder(folder: &Path) -> io::Result<()> {
    match fs::read_dir(folder) {
        Ok(mut entries) => {
            if !folder.join(CONFIG).exists() && entries.next().is_some() {
                let text = "there are files that no trial has left: remove the folder, or choose another one with --out";
                return Err(io::Error::new(io::ErrorKind::AlreadyExists, text));
            }
            fs::remove_dir_all(folder)?;
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(error),
    }
    fs::create_dir_all(folder)
}

/// How a trial's process ended.
enum End {
    Exited(ExitStatus),
    TooSlow,
    Deadline,
    Memory(u64),
}

/// A trial under way. Its processes are killed if it is dropped.
struct RunningTrial {
    child: Child,
    /// The trial's files, by their whole path.
    folder: PathBuf,
    begun: Instant,
    metrics: StepTimes,
    /// Whether the process is srun, which ends its step when it is asked to end.
    is_step: bool,
}

impl RunningTrial {
    fn start(
        settings: &Processes,
        request: &TrialRequest,
        folder: &Path,
        lease: Option<&NodeLease>,
    ) -> Result<Self, ExecutorError> {
        let failed = |error| ExecutorError::write(folder, error);
        make_folder(folder).map_err(failed)?;
        let folder = folder.canonicalize().map_err(failed)?;
        let config = folder.join(CONFIG);
        fs::write(&config, &request.config).map_err(|error| ExecutorError::write(&config, error))?;
        let log = File::create(folder.join("log.txt")).map_err(failed)?;
        let errors = log.try_clone().map_err(failed)?;
        let run = folder.join("run");
        let mut command = Command::new(&settings.program);
        let ranks = request.ranks.to_string();
        let names = lease.map_or(&[][..], |lease| &lease.names);
        let (nodes, nodelist) = (names.len().to_string(), names.join(","));
        command.args(settings.launcher.iter().map(|word| {
            word.replace("{ranks}", &ranks).replace("{nodes}", &nodes).replace("{nodelist}", &nodelist)
        }));
        command.arg("train").arg(&config);
        let steps = settings.warm_up + settings.steps;
        for set in [
            format!("run.out={}", run.display()),
            format!("run.steps={steps}"),
            "run.keep=0".to_owned(),
            "run.replicate_every=0".to_owned(),
            "run.eval_every=0".to_owned(),
            "run.log=[]".to_owned(),
        ] {
            command.args(["--set", &set]);
        }
        // In a group of its own: otherwise Ctrl-C would reach it, and it would end as if it had failed.
        command.process_group(0).stdin(Stdio::null()).stdout(log).stderr(errors);
        let child = command.spawn().map_err(|error| ExecutorError::Start {
            program: settings.program.display().to_string(),
            error,
        })?;
        let metrics = StepTimes::new(run.join(METRICS));
        Ok(RunningTrial { child, folder, begun: Instant::now(), metrics, is_step: lease.is_some() })
    }

    /// Waits for the end of the process, or ends it.
    fn watch(&mut self, settings: &Processes, request: &TrialRequest) -> Result<End, ExecutorError> {
        let mut scanned: Option<Instant> = None;
        loop {
            if let Ok(Some(status)) = self.child.try_wait() {
                return Ok(End::Exited(status));
            }
            if settings.stop.load(Ordering::Relaxed) {
                return Err(ExecutorError::Stopped);
            }
            if self.begun.elapsed() > settings.deadline {
                return Ok(End::Deadline);
            }
            if scanned.is_none_or(|at| at.elapsed() > SCAN) {
                scanned = Some(Instant::now());
                let resident = self.resident(settings);
                if settings.memory.is_some_and(|most| resident > most) {
                    return Ok(End::Memory(resident));
                }
                if self.is_lost(settings, request) {
                    return Ok(End::TooSlow);
                }
            }
            thread::sleep(POLL);
        }
    }

    /// Resident bytes of the trial's processes.
    fn resident(&self, settings: &Processes) -> u64 {
        if settings.launcher.is_empty() {
            return proc::resident(self.child.id());
        }
        self.processes().into_iter().map(proc::resident).sum()
    }

    /// Whether even the fastest of the first steps was too slow.
    fn is_lost(&mut self, settings: &Processes, request: &TrialRequest) -> bool {
        let Some(most) = request.stop_above else { return false };
        let steps = self.metrics.after(settings.warm_up);
        steps.len() >= STEPS_BEFORE_STOP && steps.iter().all(|step| step.seconds > most)
    }

    fn processes(&self) -> Vec<u32> {
        proc::with_argument(|argument| trial_of(argument) == Some(&*self.folder))
    }

    fn kill(&mut self) {
        if self.is_step && matches!(self.child.try_wait(), Ok(None)) {
            proc::terminate(self.child.id());
            let begun = Instant::now();
            while matches!(self.child.try_wait(), Ok(None)) && begun.elapsed() < END_OF_STEP {
                thread::sleep(POLL);
            }
        }
        self.child.kill().ok();
        self.processes().into_iter().for_each(proc::kill);
        self.child.wait().ok();
    }

    fn report(mut self, settings: &Processes, end: &End) -> TrialReport {
        self.kill();
        let wall_s = self.begun.elapsed().as_secs_f64();
        let failed = |ending, message: String| TrialReport::failed(ending, message, wall_s);
        let measured = |ending, measurement: Measurement| TrialReport {
            ending,
            measured: measurement.figures,
            steps: measurement.steps,
            message: None,
            wall_s,
        };
        match end {
            End::Deadline => {
                failed(Ending::Timeout, format!("it took more than {} s", settings.deadline.as_secs_f64()))
            }
            End::Memory(bytes) => {
                failed(Ending::OutOfMemory, format!("its processes had {bytes} resident bytes"))
            }
            End::TooSlow => {
                let steps = self.metrics.after(settings.warm_up);
                match Measurement::of(steps, &self.folder.join("run")) {
                    Some(found) => measured(Ending::Stopped, found),
                    None => failed(Ending::Garbage, "it reported no times".to_owned()),
                }
            }
            End::Exited(status) if status.success() => {
                let steps = self.metrics.after(settings.warm_up);
                let whole = steps.len() == settings.steps;
                match Measurement::of(steps, &self.folder.join("run")).filter(|_| whole) {
                    Some(found) => measured(Ending::Finished, found),
                    None => failed(
                        Ending::Garbage,
                        format!("it reported {} sound steps of {}", steps.len(), settings.steps),
                    ),
                }
            }
            End::Exited(status) => {
                let log = self.end_of_log();
                failed(ending_of(*status, &log), log)
            }
        }
    }

    /// The last lines that the trial printed.
    fn end_of_log(&self) -> String {
        let read = || -> io::Result<String> {
            let mut file = File::open(self.folder.join("log.txt"))?;
            let length = file.metadata()?.len();
            file.seek(SeekFrom::Start(length.saturating_sub(MAX_MESSAGE as u64)))?;
            let mut bytes = Vec::new();
            file.take(MAX_MESSAGE as u64).read_to_end(&mut bytes)?;
            Ok(String::from_utf8_lossy(&bytes).trim().to_owned())
        };
        let text = read().unwrap_or_default();
        // Of a run that was refused the sentence is enough.
        match text.rfind("error: ") {
            Some(at) => text[at..].to_owned(),
            None => text,
        }
    }
}

impl Drop for RunningTrial {
    fn drop(&mut self) {
        self.kill();
    }
}

/// How a trial failed, by its exit and by what it said.
fn ending_of(status: ExitStatus, log: &str) -> Ending {
    let text = log.to_lowercase();
    let is_memory = ["out of memory", "does not fit", "cannot allocate", "memory allocation of"];
    if is_memory.iter().any(|said| text.contains(said)) {
        return Ending::OutOfMemory;
    }
    match (status.signal(), status.code()) {
        (Some(_), _) => Ending::Killed,
        (None, Some(REFUSED)) if text.contains("available") => Ending::OutOfMemory,
        _ => Ending::Crashed,
    }
}

/// Whether a failure is that of a full disk, which is not the trial's doing.
pub fn is_full_disk(message: &str) -> bool {
    let text = message.to_lowercase();
    text.contains("no space left") || text.contains("quota exceeded")
}

/// The folder of the trials beside `trials.jsonl`.
pub fn trials_folder(out: &Path) -> PathBuf {
    out.join("trials")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_is_named_by_what_the_trial_said_and_how_it_ended() {
        let exited = |code: i32| ExitStatus::from_raw(code << 8);
        let killed = ExitStatus::from_raw(9);
        assert_eq!(ending_of(exited(2), "error: the plan does not fit: …"), Ending::OutOfMemory);
        assert_eq!(ending_of(exited(1), "CUDA_ERROR_OUT_OF_MEMORY: out of memory"), Ending::OutOfMemory);
        assert_eq!(ending_of(exited(1), "error: a rank panicked"), Ending::Crashed);
        assert_eq!(ending_of(killed, ""), Ending::Killed);
        assert!(is_full_disk("cannot write: No space left on device (os error 28)"));
    }

    #[test]
    fn a_trial_is_known_by_the_folder_of_its_run_and_by_nothing_else() {
        let of =
            |argument: &'static str| trial_of(Path::new(argument)).map(|folder| folder.display().to_string());
        assert_eq!(of("run.out=/a/trials/0001/run").as_deref(), Some("/a/trials/0001"));
        for other in
            ["/a/trials/0001/run", "/a/trials.jsonl", "run.out=/a/trials/0001", "--plot=/a/trials/0001/run"]
        {
            assert_eq!(of(other), None, "{other}");
        }
    }

    #[test]
    fn files_that_no_trial_left_stay() {
        let folder = std::env::temp_dir().join(format!("kintsugi-{}-foreign", std::process::id()));
        make_folder(&folder).expect("a new folder");
        make_folder(&folder).expect("an empty folder");
        let [file, config] = ["notes.txt", CONFIG].map(|name| folder.join(name));
        fs::write(&file, "mine").expect("written");
        let error = make_folder(&folder).expect_err("it has foreign files");
        assert!(error.to_string().contains("no trial has left") && file.exists(), "{error}");
        fs::write(&config, "").expect("written");
        make_folder(&folder).expect("the folder of a trial");
        assert!(!file.exists());
        fs::remove_dir_all(&folder).expect("removed");
    }
}
