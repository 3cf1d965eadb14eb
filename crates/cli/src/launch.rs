//! `kintsugi launch`: runs a command as many processes, by the MPI launcher of this machine or without MPI.

mod agents;
mod descendants;
mod fewer;
mod local;
mod restarts;
mod slurm;
mod step;
mod stop;

use std::ffi::OsString;
use std::io::{self, BufRead, BufReader};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Args, Parser};

use crate::Cli;
use crate::failure::{ErrorContext, Failure};
use crate::output;
use crate::signals::send;
use agents::Agents;
use descendants::{Process, descendants, kill_and_wait, wait_for_end};
use fewer::{Attempt, FewerRanks, JobSize};
use restarts::RestartableRun;
use slurm::SlurmArguments;
pub use slurm::plugin_of_mpi;
use stop::StopRequests;

/// Runs a command as processes, one per rank.
///
/// It uses the installed mpirun (Open MPI, MPICH or Intel MPI) and adds the flags that the ranks need: no binding to single
/// cores, and oversubscription if there are more ranks than cores. With --no-mpi it starts the processes on this machine
/// itself, for GPUs that communicate by NCCL. They connect to rank 0 at a free port and authenticate with a random secret.
///
/// Rank 0 writes the output and the files; an error comes from the rank that had it, with its name. When one rank fails,
/// all end. Ctrl-C and SIGTERM stop the run after the running step, as without processes; a second one ends it at once.
///
/// With --restarts N, a run whose rank dies, is killed or hangs is started again from its newest whole checkpoint, N times
/// at most. What was lost is printed, and is in summary.json. A run that ends with an error of its own, as when the loss is
/// not finite, is not started again.
///
/// With --slurm it writes a batch script for the ranks of the configuration and submits it: nodes, GPUs and the order of
/// ranks follow from the plan, the rest from the site. A run saves before its time limit, and continues when its job is
/// requeued. Inside a Slurm allocation `srun kintsugi train ...` works by itself, without this command.
#[derive(Args)]
#[command(after_long_help = EXAMPLES)]
pub struct Arguments {
    /// Number of processes: the ranks of the configuration, tp × pp × dp
    #[arg(
        long,
        short = 'n',
        value_name = "N",
        required_unless_present = "slurm",
        value_parser = clap::value_parser!(u32).range(1..)
    )]
    ranks: Option<u32>,
    /// Number of nodes to divide them over; without it the launcher decides
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    nodes: Option<u32>,
    /// The launcher, if it is not the mpirun in PATH; srun in an allocation of Slurm
    #[arg(long, value_name = "PATH", default_value = "mpirun")]
    mpirun: PathBuf,
    /// Starts the processes on this machine without MPI, for run.transport = "nccl"
    #[arg(long, conflicts_with_all = ["nodes", "mpirun", "print"])]
    no_mpi: bool,
    /// Starts the ranks again from the newest whole checkpoint when one has failed, N times at most; for train
    #[arg(long, value_name = "N", default_value_t = 0, hide_default_value = true)]
    restarts: u32,
    /// Goes on with fewer ranks if too few nodes are left at a restart, with N at least, on the best layout of the planner
    ///
    /// The nodes that are left are those that Slurm says; elsewhere, a restart that fails before its first step has lost a
    /// node (with --nodes) or a rank. batch.global stays.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    min_ranks: Option<u32>,
    #[command(flatten)]
    slurm: SlurmArguments,
    /// Shows the command, or the script of the job, and does not run it
    #[arg(long)]
    print: bool,
    /// The command and its arguments, as in: train run.toml --set run.steps=100
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, required = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

const EXAMPLES: &str = "\
Examples:
  kintsugi launch --ranks 8 train
      the built-in demo as 8 processes
  kintsugi launch --ranks 16 --nodes 4 train run.toml --resume
      4 processes on each of 4 nodes of the allocation or host file
  kintsugi launch --ranks 8 --no-mpi train run.toml --set run.transport=nccl
      8 GPUs of this machine, without MPI
  kintsugi launch --ranks 8 --print train run.toml
      the command for mpirun, to change or to put into a job script
  kintsugi launch --slurm --time 2:00:00 --chain 3 train run.toml
      three jobs of a Slurm cluster, of which each continues the run of the one before
  kintsugi launch --slurm --print --site mine.toml train run.toml
      the batch script, with the options of a file of your own
  kintsugi launch --mpirun srun --ranks 8 --nodes 2 --restarts 3 train run.toml
      in an allocation of Slurm; a node that has failed is replaced by another one of the allocation
  kintsugi launch --ranks 8 --restarts 3 train run.toml --set run.checkpoint_every=100
      survives three failures of ranks
  kintsugi launch --mpirun srun --ranks 8 --nodes 4 --restarts 3 --min-ranks 4 train run.toml
      the same, and with fewer ranks if nodes are lost and none replaces them
  kintsugi launch --ranks 2 --mpirun /opt/mpich/bin/mpirun train run.toml
      another MPI; its library is found if it is in the loader's path, or named by KINTSUGI_MPI";

/// The option of this command that the command to run does not take.
fn own_option(error: &clap::Error) -> Option<String> {
    let Some(ContextValue::String(word)) = error.get(ContextKind::InvalidArg) else { return None };
    let name = word.strip_prefix("--")?;
    let launch = Arguments::augment_args(clap::Command::new("launch"));
    let is_own = launch.get_arguments().any(|option| option.get_long() == Some(name));
    (is_own && error.kind() == ErrorKind::UnknownArgument).then(|| word.clone())
}

/// Runs the command.
pub fn run(arguments: &Arguments) -> Result<(), Failure> {
    // A mistake in the command's arguments is shown once, and not by every process.
    let words = [OsString::from("kintsugi")].into_iter().chain(arguments.command.iter().cloned());
    let command = match Cli::try_parse_from(words) {
        Ok(parsed) => parsed.command,
        Err(error) => match own_option(&error) {
            Some(option) => {
                let inner = arguments.command[0].display();
                let text = format!("{option} is an option of launch; write it before {inner}");
                return Err(Failure::mistake(text));
            }
            None => error.exit(),
        },
    };
    if arguments.slurm.is_given() {
        let Some(crate::Command::Train(train)) = command else {
            return Err(Failure::mistake("--slurm needs the command train"));
        };
        if arguments.restarts > 0 {
            return Err(Failure::mistake(
                "--restarts is not for --slurm: a job whose rank fails is queued again by itself and continues",
            ));
        }
        return slurm::run(&arguments.slurm, arguments.nodes, arguments.print, &train, &arguments.command);
    }
    let ranks = arguments.ranks.expect("it is required without --slurm");
    if let Some(min) = arguments.min_ranks {
        if arguments.restarts == 0 {
            return Err(Failure::mistake(
                "--min-ranks needs --restarts: only a restart can go on with fewer ranks",
            ));
        }
        if min > ranks {
            return Err(Failure::mistake(format!("--min-ranks {min} is more than --ranks {ranks}")));
        }
    }
    let mut supervision = Supervision::new(arguments.restarts > 0)?;
    // A mistake in the configuration is reported by the ranks.
    let out_of_train = match &command {
        Some(crate::Command::Train(train)) => train.plan().ok().map(|plan| plan.run.out),
        _ => None,
    };
    let run: Option<RestartableRun> = match (arguments.restarts, command) {
        (0, _) => None,
        (restarts, Some(crate::Command::Train(train))) => {
            let run = RestartableRun::new(&train, restarts)?;
            let in_slurm = arguments.mpirun.ends_with("srun");
            let fewer = arguments.min_ranks.map(|min| FewerRanks::new(train, min, in_slurm)).transpose()?;
            Some(run.with_fewer(fewer))
        }
        (_, _) => return Err(Failure::mistake("--restarts needs the command train")),
    };
    let start_agents = |launcher| out_of_train.map(|out| Agents::start(launcher, &out)).transpose();
    let first = Attempt { words: arguments.command.clone(), size: JobSize { ranks, nodes: arguments.nodes } };
    if arguments.no_mpi {
        supervision.agents = start_agents(None)?;
        return restarts::run(run, &first, &supervision, |attempt| {
            local::run(attempt.size.ranks as usize, &attempt.words, &supervision)
        });
    }
    let launcher = Launcher::find(&arguments.mpirun)?;
    if let Some(nodes) = arguments.nodes.filter(|&nodes| !ranks.is_multiple_of(nodes)) {
        return Err(Failure::mistake(format!(
            "--ranks {ranks} cannot be divided equally over --nodes {nodes}"
        )));
    }
    let out = run.as_ref().map(|run| run.out().to_owned());
    let command = |attempt: &Attempt| {
        let JobSize { ranks, nodes } = attempt.size;
        launcher.command(&arguments.mpirun, ranks, nodes, &attempt.words, out.as_deref())
    };
    if arguments.print {
        return output::stdout(&(line(&command(&first)?) + "\n"));
    }
    supervision.agents = start_agents(Some(launcher))?;
    restarts::run(run, &first, &supervision, |attempt| {
        wait(command(attempt)?, attempt.size.ranks as usize, &supervision)
    })
}

/// Runs this very command again, as `ranks` processes.
pub fn this_command(ranks: usize) -> Result<(), Failure> {
    let mpirun = PathBuf::from("mpirun");
    let words: Vec<OsString> = std::env::args_os().skip(1).collect();
    let command = Launcher::find(&mpirun)?.command(&mpirun, ranks as u32, None, &words, None)?;
    wait(command, ranks, &Supervision::new(false)?)
}

/// Runs this very command again, as `ranks` processes on this machine that communicate by NCCL.
pub fn this_command_without_mpi(ranks: usize) -> Result<(), Failure> {
    let arguments: Vec<OsString> = std::env::args_os().skip(1).collect();
    local::run(ranks, &arguments, &Supervision::new(false)?)
}

/// How `launch` watches the ranks that it has started.
pub struct Supervision {
    /// The signals to stop that are for the ranks.
    stop: StopRequests,
    /// Whether ranks are started again, so that those that are left after a failure are killed soon.
    restarts: bool,
    /// Those of a run that trains.
    agents: Option<Agents>,
}

impl Supervision {
    fn new(restarts: bool) -> Result<Self, Failure> {
        Ok(Supervision { stop: StopRequests::new()?, restarts, agents: None })
    }

    /// Whether the agents have seen that the attempt has failed.
    fn has_seen_failure(&self) -> bool {
        self.agents.as_ref().is_some_and(|agents| agents.watch(self.stop.any()))
    }

    /// Writes the verdict about an attempt that comes to its end, if it has failed and nobody has named the cause.
    fn add_verdict(&self) {
        if let Some(agents) = self.agents.as_ref().filter(|_| !self.stop.any()) {
            agents.add_verdict();
        }
    }

    /// The same after all ranks have ended.
    fn add_last_verdict(&self) {
        if let Some(agents) = self.agents.as_ref().filter(|_| !self.stop.any()) {
            agents.add_last_verdict();
        }
    }

    /// How long the other ranks may take to end after one has failed, if that is usually as long as `usual`. They learn of it at
    /// once, and abort what they wait for.
    fn grace(&self, usual: Duration) -> Duration {
        if self.restarts { Duration::from_secs(1) } else { usual }
    }
}

/// Whose mpirun it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Launcher {
    OpenMpi,
    /// MPICH's and Intel's.
    Hydra,
    /// Slurm's.
    Srun,
}

impl Launcher {
    fn find(mpirun: &PathBuf) -> Result<Self, Failure> {
        let answer = Command::new(mpirun).arg("--version").stdin(Stdio::null()).output().map_err(|error| {
            let name = mpirun.display();
            let advice =
                "install an MPI (Debian: apt-get install openmpi-bin or mpich), or name its launcher with --mpirun";
            Failure::mistake(ErrorContext::new(format!("cannot run {name}"), error).advise(advice))
        })?;
        Launcher::of(&String::from_utf8_lossy(&answer.stdout)).ok_or_else(|| {
            let name = mpirun.display();
            Failure::mistake(format!(
                "{name} --version names neither Open MPI nor MPICH nor Intel MPI nor Slurm; start the processes \
                 with your launcher itself, as in {name} -n 8 kintsugi train"
            ))
        })
    }

    fn of(version: &str) -> Option<Self> {
        if version.contains("Open MPI") || version.contains("OpenRTE") || version.contains("prterun") {
            return Some(Launcher::OpenMpi);
        }
        // Debian calls it slurm-wlm.
        if version.starts_with("slurm") {
            return Some(Launcher::Srun);
        }
        (version.contains("HYDRA") || version.contains("Intel(R) MPI")).then_some(Launcher::Hydra)
    }

    /// The launcher with its flags, this program and its arguments. `out` is the folder of a run that may be started again.
    fn command(
        self,
        mpirun: &PathBuf,
        ranks: u32,
        nodes: Option<u32>,
        words: &[OsString],
        out: Option<&Path>,
    ) -> Result<Command, Failure> {
        let program = std::env::current_exe()
            .map_err(|error| Failure::run(ErrorContext::new("cannot find kintsugi", error)))?;
        let mut command = Command::new(mpirun);
        command.args(["-n", &ranks.to_string()]);
        let per_node = nodes.map(|nodes| ranks / nodes);
        match self {
            Launcher::OpenMpi => {
                // Ranks divide the cores of their node among themselves, so the launcher binds none of them.
                command.args(["--bind-to", "none", "--oversubscribe"]);
                if is_root() {
                    command.arg("--allow-run-as-root");
                }
                if let Some(per_node) = per_node {
                    command.args(["--map-by", &format!("ppr:{per_node}:node")]);
                }
            }
            Launcher::Hydra => {
                // When a rank dies, the launcher would kill the others before one of them can say which. They end by themselves.
                command.arg("-disable-auto-cleanup");
                if let Some(per_node) = per_node {
                    command.args(["-ppn", &per_node.to_string()]);
                }
            }
            Launcher::Srun => {
                command.args(step::options(nodes, ranks, out)?);
            }
        }
        command.arg(program).args(words);
        Ok(command)
    }
}

fn is_root() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ids = status.lines().find_map(|line| line.strip_prefix("Uid:"));
    ids.and_then(|ids| ids.split_whitespace().nth(1)) == Some("0")
}

/// A command as a shell would take it.
fn line(command: &Command) -> String {
    let words = [command.get_program()].into_iter().chain(command.get_args());
    words.map(|word| quoted(&word.to_string_lossy())).collect::<Vec<_>>().join(" ")
}

/// A word as a shell takes it.
fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./=:,+@%".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        word.to_owned()
    } else {
        format!("'{}'", word.replace('\'', "'\\''"))
    }
}

/// Runs the launcher to its end. A signal to stop goes to the ranks as SIGUSR1, which launchers pass on. A second one ends the
/// launcher, and it the ranks.
fn wait(mut command: Command, ranks: usize, supervision: &Supervision) -> Result<(), Failure> {
    if let Some(agents) = &supervision.agents {
        agents.begin_attempt(ranks)?;
        command.envs([agents.environment()]);
    }
    // In a group of its own: otherwise Ctrl-C would reach the launcher itself, which kills the ranks.
    let mut launcher =
        command.process_group(0).stdin(Stdio::null()).stderr(Stdio::piped()).spawn().map_err(|error| {
            Failure::run(ErrorContext::new(format!("cannot run {}", line(&command)), error))
        })?;
    let errors = launcher.stderr.take().expect("it is piped");
    let failed = Arc::new(AtomicBool::new(false));
    let passing = thread::spawn({
        let failed = Arc::clone(&failed);
        move || pass_on(BufReader::new(errors), &failed)
    });
    let ended = RunningLauncher { launcher, ranks: Vec::new(), failed: &failed }
        .wait(supervision)
        .map_err(|error| Failure::run(ErrorContext::new("cannot wait for the launcher", error)))?;
    passing.join().ok();
    // If a signal has ended the launcher itself, its ranks were ended in any order.
    if ended.signal().is_none() {
        supervision.add_last_verdict();
    }
    outcome(ended)
}

/// Passes errors on, without the launcher's notices that a rank has failed: the rank itself has said why. A notice of a signal
/// stays, since a rank that was killed cannot say anything. Sets `failed` when a rank reports an error.
fn pass_on(errors: impl BufRead, failed: &AtomicBool) {
    // Open MPI puts its notices between lines of dashes.
    let is_rule = |line: &str| line.len() > 20 && line.bytes().all(|byte| byte == b'-');
    let mut notice: Option<Vec<String>> = None;
    for line in errors.split(b'\n').map_while(Result::ok) {
        let line = String::from_utf8_lossy(&line).into_owned();
        // Only at the beginning of a line: launchers report harmless errors of their own, as "slurmstepd: error: …".
        if line.starts_with("error: ") {
            failed.store(true, Ordering::Relaxed);
        }
        match (&mut notice, is_rule(&line)) {
            (None, true) => notice = Some(Vec::new()),
            (None, false) => output::stderr(&line),
            (Some(lines), false) => lines.push(line),
            (Some(lines), true) => {
                if !is_expected(&lines.join(" ")) {
                    for line in lines.iter() {
                        output::stderr(line);
                    }
                }
                notice = None;
            }
        }
    }
    for line in notice.into_iter().flatten() {
        output::stderr(&line);
    }
}

/// Whether a notice only says that a rank has ended with an error.
fn is_expected(notice: &str) -> bool {
    let expected = ["Primary job", "exited with non-zero status", "MPI_ABORT was invoked"];
    expected.iter().any(|words| notice.contains(words)) && !notice.contains("signal")
}

/// A launcher under way.
struct RunningLauncher<'a> {
    launcher: Child,
    /// The processes that it has started on this machine, as far as they are known. Only if ranks are started again.
    ranks: Vec<Process>,
    /// Whether a rank has reported an error.
    failed: &'a AtomicBool,
}

impl RunningLauncher<'_> {
    /// Waits for the launcher. After a rank has failed it may wait for one that is stopped, and is then ended.
    fn wait(&mut self, supervision: &Supervision) -> io::Result<ExitStatus> {
        const POLL: Duration = Duration::from_millis(50);
        const GRACE: Duration = Duration::from_secs(15);
        let mut signals = ["USR1", "TERM", "KILL"].into_iter();
        let mut failed_at: Option<Instant> = None;
        // A launcher whose ranks were killed ends by itself, unless it hangs.
        let kills_ranks = supervision.restarts || supervision.agents.is_some();
        let mut endings = [None, Some("TERM"), Some("KILL")].into_iter().skip(usize::from(!kills_ranks));
        let (begun, mut looks) = (Instant::now(), 0);
        loop {
            if let Some(ended) = self.launcher.try_wait()? {
                // Ranks that it has left may be writing the verdict.
                wait_for_end(&self.ranks, supervision.grace(GRACE));
                kill_and_wait(&self.ranks)?;
                return Ok(ended);
            }
            let has_failed = supervision.has_seen_failure() || self.failed.load(Ordering::Relaxed);
            // Ranks are known before the launcher ends: after it they are children of nobody.
            if supervision.restarts && begun.elapsed() > Duration::from_millis(100 << looks.min(12)) {
                looks += 1;
                self.ranks = descendants(self.launcher.id());
            }
            if has_failed
                && failed_at.get_or_insert_with(Instant::now).elapsed() > supervision.grace(GRACE)
                && let Some(ending) = endings.next()
            {
                supervision.add_verdict();
                if let Some(agents) = &supervision.agents {
                    agents.kill_ranks();
                }
                if supervision.restarts {
                    self.ranks = descendants(self.launcher.id());
                    kill_and_wait(&self.ranks)?;
                }
                if let Some(signal) = ending {
                    send(signal, self.launcher.id())?;
                }
                failed_at = Some(Instant::now());
            }
            if supervision.stop.take()
                && let Some(signal) = signals.next()
            {
                send(signal, self.launcher.id())?;
            }
            thread::sleep(POLL);
        }
    }
}

/// A rank has printed why it failed, and the launcher how it ended.
fn outcome(ended: ExitStatus) -> Result<(), Failure> {
    match (ended.code(), ended.signal()) {
        (Some(0), _) => Ok(()),
        (Some(2), _) => Err(Failure::ReportedElsewhere(2)),
        (Some(_), _) => Err(Failure::ReportedElsewhere(1)),
        (None, Some(signal)) => Err(Failure::run(format!("signal {signal} ended the launcher"))),
        (None, None) => Err(Failure::run("the launcher ended")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn launchers_are_known_by_their_version() {
        assert_eq!(Launcher::of("mpirun (Open MPI) 4.1.4\n\nReport bugs to"), Some(Launcher::OpenMpi));
        assert_eq!(Launcher::of("HYDRA build details:\n    Version: 4.0.2"), Some(Launcher::Hydra));
        let intel = "Intel(R) MPI Library for Linux* OS, Version 2021.19";
        assert_eq!(Launcher::of(intel), Some(Launcher::Hydra));
        assert_eq!(Launcher::of("slurm 23.11.4\n"), Some(Launcher::Srun));
        assert_eq!(Launcher::of("slurm-wlm 22.05.8\n"), Some(Launcher::Srun));
        assert_eq!(Launcher::of("something else"), None);
    }

    #[test]
    fn only_an_error_of_a_rank_ends_a_job() {
        let has_failed = |text: &str| {
            let failed = AtomicBool::new(false);
            pass_on(text.as_bytes(), &failed);
            failed.into_inner()
        };
        assert!(has_failed("step 3\nerror: rank 1 failed\n"));
        assert!(!has_failed("slurmstepd: error: couldn't chdir to /a: going to /tmp instead\n"));
    }

    #[test]
    fn a_notice_of_a_signal_stays() {
        assert!(is_expected("MPI_ABORT was invoked on rank 3 in communicator MPI_COMM_WORLD"));
        assert!(!is_expected(
            "mpirun noticed that process rank 7 with PID 0 on node a exited on signal 9 (Killed)."
        ));
        assert!(!is_expected("There are not enough slots available in the system"));
    }

    #[test]
    fn a_command_is_shown_as_a_shell_takes_it() {
        let mut command = Command::new("mpirun");
        command.args(["-n", "2", "kintsugi", "train", "a b.toml", "it's", "--set", "run.steps=3"]);
        assert_eq!(line(&command), "mpirun -n 2 kintsugi train 'a b.toml' 'it'\\''s' --set run.steps=3");
    }
}
