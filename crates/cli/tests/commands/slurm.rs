//! Jobs of a real Slurm: a cluster that is only this machine, with a controller, two nodes and loopback between them.

use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use kintsugi_run::Flight;
use kintsugi_testing::{Need, cases, skip};
use serde_json::Value;

use crate::support::{TINY, folder, json_lines, kintsugi, stdout, tiny};
use crate::tutorial::{Tutorial, path};

/// A cluster that ends with this process.
struct Cluster {
    process: Child,
    folder: PathBuf,
}

impl Cluster {
    /// Starts a cluster. If that is impossible here, the test is skipped.
    fn start(nodes: usize) -> Option<Self> {
        if Command::new("mpirun.openmpi").arg("--version").output().is_err() {
            skip(Need::OpenMpi, "there is no mpirun.openmpi");
            return None;
        }
        let folder = std::env::temp_dir().join(format!("kintsugi-slurm-{}-{nodes}", std::process::id()));
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts/slurm-cluster");
        // It ends when its input ends, which is when this process ends, however it does.
        let mut process = Command::new(script)
            .arg(&folder)
            .args([&nodes.to_string(), "16", "sh", "-c", "echo ready; cat >/dev/null"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(process.stdout.take().unwrap()).read_line(&mut line).unwrap();
        if line == "ready\n" {
            return Some(Cluster { process, folder });
        }
        let output = process.wait_with_output().unwrap();
        let why = String::from_utf8_lossy(&output.stderr).trim().replace('\n', "; ");
        skip(Need::Slurm, format!("no Slurm cluster can be started: {why}"));
        None
    }

    /// A program in the network of the cluster, in a folder.
    fn command(&self, work: &Path, program: &str, arguments: &[&str]) -> Command {
        let mut command = Command::new("nsenter");
        command
            .arg(format!("--net=/proc/{}/ns/net", self.process.id()))
            .arg(program)
            .args(arguments)
            .current_dir(work);
        command.env("SLURM_CONF", self.folder.join("slurm.conf")).env_remove("COLUMNS");
        // Nodes that are one machine: see scripts/slurm-cluster.
        let open_mpi = [("pml", "ucx"), ("pml_ucx_tls", "any"), ("pml_ucx_devices", "any"), ("btl", "self")];
        command.envs(open_mpi.map(|(name, value)| (format!("OMPI_MCA_{name}"), value)));
        command.env("KINTSUGI_SECRET", "swordfish").env("HF_TOKEN", "swordfish");
        command
    }

    /// What a program prints.
    fn answer(&self, work: &Path, program: &str, arguments: &[&str]) -> String {
        stdout(&self.command(work, program, arguments).output().unwrap())
    }

    /// Submits a run, as `chain` jobs. Gives their numbers.
    fn submit(&self, work: &Path, options: &[&str], settings: &[&str]) -> Vec<String> {
        let sets = settings.iter().flat_map(|setting| ["--set", setting]);
        let launch = ["launch", "--slurm", "--site", "site.toml"];
        let arguments: Vec<&str> =
            launch.iter().chain(options).copied().chain(["train"]).chain(sets).collect();
        let text = self.answer(work, env!("CARGO_BIN_EXE_kintsugi"), &arguments);
        let (jobs, _) = text.split_once(" for ").unwrap();
        jobs.split_once(' ').unwrap().1.split_once(' ').unwrap().1.split(", ").map(str::to_owned).collect()
    }

    /// The status of a run.
    fn status(&self, work: &Path, out: &str) -> Value {
        let text = self.answer(work, env!("CARGO_BIN_EXE_kintsugi"), &["status", "--json", out]);
        let entries: Value = serde_json::from_str(&text).unwrap();
        entries[0].clone()
    }

    /// Starts a job that was requeued. Slurm would let it wait for two minutes.
    fn start_now(&self, work: &Path, job: &str) {
        let id = format!("jobid={job}");
        wait_for("the job in the queue", || {
            let state =
                self.answer(work, "squeue", &["--noheader", "--format=%T", "--states=all", "--jobs", job]);
            let update =
                || self.command(work, "scontrol", &["update", &id, "starttime=now"]).output().unwrap();
            (state.trim() == "PENDING" && update().status.success()).then_some(())
        });
    }

    /// The processes of this cluster with a setting, by rank.
    fn ranks(&self, setting: &str) -> std::collections::BTreeMap<usize, u32> {
        let mut found = std::collections::BTreeMap::new();
        for entry in fs::read_dir("/proc").unwrap().flatten() {
            let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
            let file = |name: &str| {
                let bytes = fs::read(entry.path().join(name)).unwrap_or_default();
                String::from_utf8_lossy(&bytes).into_owned()
            };
            let environment = file("environ");
            let conf = format!("SLURM_CONF={}", self.folder.join("slurm.conf").display());
            let is_one = environment.split('\0').any(|variable| variable == conf)
                && file("cmdline").split('\0').any(|word| word == setting);
            let number = |variable: &str| variable.strip_prefix("SLURM_PROCID=")?.parse().ok();
            let rank = environment.split('\0').find_map(number);
            found.extend(rank.filter(|_| is_one).map(|rank: usize| (rank, pid)));
        }
        found
    }

    /// Kills the daemon of a node, and everything that Slurm runs on it.
    fn lose(&self, node: &str) {
        let conf = self.folder.join("slurm.conf");
        let variables = [format!("SLURMD_NODENAME={node}"), format!("SLURM_CONF={}", conf.display())];
        let daemon = format!("slurmd\0-f\0{}\0-N\0{node}\0", conf.display());
        let mut killed = Vec::new();
        for entry in fs::read_dir("/proc").unwrap().flatten() {
            let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else {
                continue;
            };
            let file = |name: &str| {
                String::from_utf8_lossy(&fs::read(entry.path().join(name)).unwrap_or_default()).into_owned()
            };
            let environment = file("environ");
            let has = |variable: &String| environment.split('\0').any(|found| found == variable);
            if variables.iter().all(has) {
                // What started the task, which Slurm has on every node.
                let stat = file("stat");
                let fields = stat.rsplit_once(')').map_or("", |(_, fields)| fields);
                killed.extend(fields.split_whitespace().nth(1).and_then(|parent| parent.parse::<u32>().ok()));
                killed.push(pid);
            } else if file("cmdline").ends_with(&daemon) {
                killed.insert(0, pid);
            }
        }
        assert!(killed.len() > 3, "{node} runs nothing: {killed:?}");
        let pids: Vec<String> = killed.iter().filter(|&&pid| pid > 1).map(u32::to_string).collect();
        // A task may end before its turn.
        Command::new("kill").arg("-KILL").args(&pids).output().unwrap();
    }

    /// Waits until all jobs of a run have ended, and gives its status.
    fn wait_for_end(&self, work: &Path, out: &str) -> Value {
        let over = ["COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL"];
        wait_for(&format!("the end of the jobs of {out}"), || {
            let status = self.status(work, out);
            let jobs = status["jobs"].as_array().unwrap();
            let has_ended =
                !jobs.is_empty() && jobs.iter().all(|job| over.contains(&job["state"].as_str().unwrap()));
            has_ended.then_some(status)
        })
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        drop(self.process.stdin.take());
        self.process.wait().ok();
        fs::remove_dir_all(&self.folder).ok();
    }
}

fn wait_for<T>(what: &str, mut condition: impl FnMut() -> Option<T>) -> T {
    let begun = Instant::now();
    loop {
        if let Some(value) = condition() {
            return value;
        }
        assert!(begun.elapsed() < Duration::from_secs(120), "{what} does not come");
        sleep(Duration::from_millis(200));
    }
}

/// Step, loss and norm of every step, in all their digits.
fn losses(out: &Path) -> Vec<String> {
    let line = |step: &Value| format!("{} {} {}", step["step"], step["loss"], step["grad_norm"]);
    json_lines(&out.join("metrics.jsonl")).iter().map(line).collect()
}

/// Waits until a run has written some steps.
fn wait_for_steps(out: &Path) {
    wait_for(&format!("a step of {}", out.display()), || {
        let metrics = fs::read_to_string(out.join("metrics.jsonl")).ok()?;
        (metrics.lines().count() > 3).then_some(())
    });
}

/// Whether any file below a folder has a text.
fn has_text(folder: &Path, text: &[u8]) -> bool {
    fs::read_dir(folder).unwrap().any(|entry| {
        let path = entry.unwrap().path();
        match fs::symlink_metadata(&path).unwrap().file_type() {
            kind if kind.is_dir() => has_text(&path, text),
            kind if kind.is_file() => {
                fs::read(&path).unwrap().windows(text.len()).any(|window| window == text)
            }
            _ => false,
        }
    })
}

#[test]
fn jobs_train_what_threads_train_and_survive_the_queue() {
    let nodes = cases(2, 4);
    // One more, which replaces a node that is lost.
    let Some(cluster) = Cluster::start(nodes + cases(0, 1)) else { return };
    let work = &folder("slurm");
    // Two ranks on every node; messages between nodes take a while, so that there is time to stop a run.
    let dp = format!("parallel.dp={nodes}");
    let batch = format!("batch.global={}", 2 * nodes);
    let layout = ["parallel.tp=1", "parallel.pp=2", &dp, &batch, "cluster.per_node=2"];
    let slow = "cluster.emulated.cluster={ latency = 0.02 }";
    let common = ["optimizer.schedule=constant", "run.eval_every=0", "run.steps=40"];
    let run = |more: &[&'static str]| -> Vec<&str> {
        let fast = TINY.iter().chain(&layout).chain(&common).copied();
        fast.chain([slow]).chain(more.iter().copied()).collect()
    };
    let site = "mpi = 'pmix'\nsignal = 55\n[environment]\nKINTSUGI_MPI = 'libmpi.so.40'\n";
    fs::write(work.join("site.toml"), site).unwrap();

    // The shortest time limit of Slurm is a minute, and Slurm looks at it every half a minute. It goes on meanwhile.
    let limited = run(&["run.out=limited", "run.steps=1000000"]);
    cluster.submit(work, &["--time", "1"], &limited);
    let out = |name: &str| work.join(name);
    let threads: Vec<&str> = run(&["run.out=threads"]).into_iter().filter(|set| *set != slow).collect();
    stdout(&tiny(work, &["train"], &threads));
    let reference = losses(&out("threads"));
    assert_eq!(reference.len(), 40);

    let cancelled = cluster.submit(work, &[], &run(&["run.out=cancelled run", "run.steps=1000000"]));
    wait_for_steps(&out("cancelled run"));
    cluster.answer(work, "scancel", &[&cancelled[0]]);
    let status = cluster.wait_for_end(work, "cancelled run");
    let step = status["step"].as_u64().unwrap();
    let why = format!("stopped after step {step} by SIGTERM; job {} CANCELLED", cancelled[0]);
    assert!(status["ended"].as_str().unwrap().starts_with(&why), "{status}");
    assert_eq!(status["checkpoint"]["step"], step, "{status}");

    let requeued = cluster.submit(work, &[], &run(&["run.out=requeued"]));
    wait_for_steps(&out("requeued"));
    cluster.answer(work, "scontrol", &["requeue", &requeued[0]]);
    let saved = wait_for("a checkpoint", || cluster.status(work, "requeued")["checkpoint"]["step"].as_u64());
    assert!(saved < 40, "it has finished before it was requeued");
    cluster.start_now(work, &requeued[0]);

    let chain = cluster.submit(work, &["--chain", "3"], &run(&["run.out=chain"]));
    assert_eq!(chain.len(), 3);
    wait_for_steps(&out("chain"));
    // As at the time limit.
    cluster.answer(work, "scancel", &["--signal=USR1", &chain[0]]);
    let status = cluster.wait_for_end(work, "chain");
    let states: Vec<&str> =
        status["jobs"].as_array().unwrap().iter().map(|job| job["state"].as_str().unwrap()).collect();
    assert_eq!(states, ["COMPLETED", "COMPLETED", "CANCELLED"], "{status}");
    assert_eq!(status["ended"], "finished after step 40", "{status}");
    assert_eq!(losses(&out("chain")), reference);
    assert_eq!(json_lines(&out("chain/metrics.jsonl")).len(), 40);

    assert_eq!(cluster.wait_for_end(work, "requeued")["ended"], "finished after step 40");
    assert_eq!(losses(&out("requeued")), reference);
    let log = fs::read_to_string(out(&format!("requeued/slurm-{}.log", requeued[0]))).unwrap();
    assert!(log.contains("note     resumes after step"), "{log}");

    srun_trains_what_threads_train(&cluster, work, &threads, &reference, nodes);

    let status = cluster.wait_for_end(work, "limited");
    let step = status["step"].as_u64().unwrap();
    let why = format!("stopped after step {step} by SIGUSR1, which Slurm sends before the time limit");
    assert_eq!((status["ended"].as_str(), &status["checkpoint"]["step"]), (Some(&*why), &Value::from(step)));

    if cases(false, true) {
        a_rank_that_dies_in_an_allocation_is_replaced_by_a_new_step(
            &cluster,
            work,
            &run(&[]),
            &reference,
            nodes,
        );
        a_lost_node_is_replaced(
            &cluster,
            work,
            &run(&["run.out=lost", "run.checkpoint_every=5"]),
            &reference,
        );
    }

    // What Slurm stores has no secret, and nobody else reads what a run writes.
    assert!(!has_text(&cluster.folder, b"swordfish"), "a secret of the shell is in Slurm's files");
    for file in ["chain/metrics.jsonl", "chain/summary.json", &format!("requeued/slurm-{}.log", requeued[0])]
    {
        assert_eq!(fs::metadata(out(file)).unwrap().mode() & 0o077, 0, "{file}");
    }
}

/// `launch --mpirun srun --restarts` inside an allocation that has a node more than is needed.
fn a_rank_that_dies_in_an_allocation_is_replaced_by_a_new_step(
    cluster: &Cluster,
    work: &Path,
    settings: &[&str],
    reference: &[String],
    nodes: usize,
) {
    let nodes_of_allocation = nodes + 1;
    let [all, nodes, ranks] = [nodes_of_allocation, nodes, 2 * nodes].map(|count| count.to_string());
    let sets = ["run.out=step", "run.checkpoint_every=5"];
    let sets = settings.iter().chain(&sets).flat_map(|set| ["--set", set]);
    let salloc = ["--nodes", &all, "--ntasks-per-node=2", "--no-kill", env!("CARGO_BIN_EXE_kintsugi")];
    let launch =
        ["launch", "--mpirun", "srun", "--ranks", &ranks, "--nodes", &nodes, "--restarts", "1", "train"];
    let arguments: Vec<&str> = salloc.into_iter().chain(launch).chain(sets).collect();
    let mut salloc = cluster.command(work, "salloc", &arguments);
    salloc.env("KINTSUGI_MPI", "libmpi.so.40").stdout(Stdio::piped()).stderr(Stdio::piped());
    let job = salloc.spawn().unwrap();
    let saved = work.join("step/checkpoints/step-00000005");
    wait_for("a checkpoint", || saved.is_dir().then_some(()));
    let agents = || cluster.ranks("agent").len();
    wait_for("an agent on every node", || (agents() == nodes_of_allocation).then_some(()));
    let victim = cluster.ranks("run.out=step")[&3];
    Command::new("kill").args(["-KILL", &victim.to_string()]).output().unwrap();
    let output = job.wait_with_output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success() && text.contains("restarted: step "), "{text}");
    assert!(text.contains("verdict: rank 3 (") && text.contains("note     without node "), "{text}");
    assert_eq!(agents(), 0, "agents end with the job");
    assert_eq!(losses(&work.join("step")), *reference);
}

/// A node is lost with its daemon and all its tasks. The ranks that are left find out by themselves, before Slurm does. The job is
/// requeued, and continues on other nodes.
fn a_lost_node_is_replaced(cluster: &Cluster, work: &Path, settings: &[&str], reference: &[String]) {
    let jobs = cluster.submit(work, &[], settings);
    wait_for("a checkpoint", || cluster.status(work, "lost")["checkpoint"]["step"].as_u64());
    let list = cluster.answer(work, "squeue", &["--noheader", "--format=%N", "--jobs", &jobs[0]]);
    let names = cluster.answer(work, "scontrol", &["show", "hostnames", list.trim()]);
    let lost = names.lines().nth(1).unwrap();
    cluster.lose(lost);
    // It may start by itself, or wait for two minutes.
    let log = work.join(format!("lost/slurm-{}.log", jobs[0]));
    let id = format!("jobid={}", jobs[0]);
    wait_for("the job on other nodes", || {
        cluster.command(work, "scontrol", &["update", &id, "starttime=now"]).output().unwrap();
        fs::read_to_string(&log).unwrap().contains("note     resumes after step").then_some(())
    });
    assert_eq!(cluster.wait_for_end(work, "lost")["ended"], "finished after step 40");
    assert_eq!(losses(&work.join("lost")), *reference);
    let on_lost =
        |rank: usize| Flight::read(&work.join("lost"), rank).unwrap().place.contains(&format!("{lost},"));
    assert!(!(0..names.lines().count() * 2).any(on_lost), "{lost} is lost");
}

/// `srun kintsugi train` by itself, over both families of MPI.
fn srun_trains_what_threads_train(
    cluster: &Cluster,
    work: &Path,
    threads: &[&str],
    reference: &[String],
    nodes: usize,
) {
    for (need, plugin, library) in
        [(Need::OpenMpi, "pmix", "libmpi.so.40"), (Need::Mpich, "pmi2", "libmpich.so.12")]
    {
        let (nodes, plugin) = (format!("--nodes={nodes}"), format!("--mpi={plugin}"));
        let srun = [&nodes, "--ntasks-per-node=2", &plugin, env!("CARGO_BIN_EXE_kintsugi"), "train"];
        let sets = threads.iter().flat_map(|setting| ["--set", setting]).chain(["--set", "run.out=srun"]);
        let arguments: Vec<&str> = srun.into_iter().chain(sets).collect();
        let ran = cluster.command(work, "srun", &arguments).env("KINTSUGI_MPI", library).output().unwrap();
        if String::from_utf8_lossy(&ran.stderr).contains(&format!("cannot load {library}")) {
            skip(need, format!("there is no {library}"));
            continue;
        }
        stdout(&ran);
        assert_eq!(losses(&work.join("srun")), *reference, "{library}");
    }
}

#[test]
fn trials_of_a_tuning_run_side_by_side_in_an_allocation() {
    let Some(cluster) = Cluster::start(2) else { return };
    let work = &folder("slurm-tune");
    let sets = TINY.iter().chain(&["parallel.dp=2", "parallel.tp=1", "parallel.pp=1", "cluster.per_node=2"]);
    let sets: Vec<&str> = sets.flat_map(|set| ["--set", set]).collect();
    let tune = [
        "--nodes=2",
        "--exclusive",
        env!("CARGO_BIN_EXE_kintsugi"),
        "tune",
        "--executor",
        "srun",
        "--trials",
        "4",
    ];
    let space = [
        "--warm-up",
        "1",
        "--steps",
        "30",
        "--space",
        "parallel.schedule=1f1b",
        "--space",
        "sharding.zero=0,1",
    ];
    let arguments: Vec<&str> = tune.into_iter().chain(space).chain(sets).collect();
    let mut salloc = cluster.command(work, "salloc", &arguments);
    stdout(&salloc.env("SLURM_MPI_TYPE", "pmix").env("KINTSUGI_MPI", "libmpi.so.40").output().unwrap());
    let trials = json_lines(&work.join("tuning/trials.jsonl"));
    // A trial is stopped if its steps are slower than those of the best. On busy cores that is any of them.
    let is_measured = |trial: &Value| trial["outcome"] == "finished" || trial["outcome"] == "stopped";
    assert!(trials.len() == 4 && trials.iter().all(is_measured), "{trials:?}");
    let times = |trial: &Value| {
        let end = trial["ended"].as_f64().unwrap();
        (end - trial["wall_s"].as_f64().unwrap(), end)
    };
    let (one, two) = (times(&trials[0]), times(&trials[1]));
    assert!(one.0 < two.1 && two.0 < one.1, "the first two trials do not overlap: {one:?}, {two:?}");
    let outside = kintsugi(work, &["tune", "--executor", "srun"]);
    let text = String::from_utf8_lossy(&outside.stderr).into_owned();
    assert!(outside.status.code() == Some(2) && text.contains("needs an allocation of Slurm"), "{text}");
}

#[test]
fn a_job_on_chosen_nodes_has_its_ranks_where_the_placement_says() {
    let Some(cluster) = Cluster::start(4) else { return };
    let work = &folder("slurm-place");
    fs::write(work.join("site.toml"), "mpi = 'pmix'\n[environment]\nKINTSUGI_MPI = 'libmpi.so.40'\n")
        .unwrap();
    // In the order of names, every message and every sum would cross the pods.
    fs::write(work.join("nodes.txt"), "n1 a\nn2 b\nn3 a\nn4 b\n").unwrap();
    let layout =
        ["parallel.tp=1", "parallel.pp=2", "parallel.dp=2", "cluster.per_node=1", "cluster.nodes_per_pod=2"];
    let device = ["cluster.device.peak_fp32=1e11", "cluster.device.memory_bandwidth=1e10"];
    let settings: Vec<&str> =
        TINY.iter().chain(&layout).chain(&device).copied().chain(["run.out=placed"]).collect();
    cluster.submit(work, &["--place", "nodes.txt"], &settings);
    let status = cluster.wait_for_end(work, "placed");
    assert_eq!(status["jobs"][0]["state"], "COMPLETED", "{status}");
    let expected = ["pod a: n[1,3] with ranks 0–1", "pod b: n[2,4] with ranks 2–3"];
    assert_eq!(status["placed"], serde_json::json!(expected), "{status}");
    let places = (0..4).map(|rank| Flight::read(&work.join("placed"), rank).unwrap().place);
    for (place, node) in places.zip(["n1", "n3", "n2", "n4"]) {
        assert!(place.contains(&format!("/{node},")), "{place} is not on {node}");
    }
}

/// The commands of the page about Slurm, as a reader types them. A job ends before the next command begins.
#[test]
fn every_command_of_the_tutorial_for_slurm_runs() {
    let Some(cluster) = Cluster::start(2) else { return };
    let tutorial = Tutorial::new("slurm");
    let commands = tutorial.run(|line| {
        let mut shell = cluster.command(&tutorial.folder, "sh", &["-c", line]);
        let output = shell.env("PATH", path()).output().unwrap();
        if line.starts_with("kintsugi launch") && !line.contains("--print") {
            cluster.wait_for_end(&tutorial.folder, "out");
        }
        output
    });
    assert_eq!(commands, 7);
    let status = cluster.status(&tutorial.folder, "out");
    let states: Vec<&str> =
        status["jobs"].as_array().unwrap().iter().map(|job| job["state"].as_str().unwrap()).collect();
    assert_eq!(states, ["COMPLETED", "COMPLETED", "CANCELLED", "CANCELLED"], "{status}");
    assert_eq!(status["ended"], "finished after step 80", "{status}");
}

#[test]
fn mistakes_in_a_job_are_said_before_it_is_submitted() {
    let work = folder("slurm-mistakes");
    let error = |arguments: &[&str]| {
        let output = kintsugi(&work, &[&["launch", "--slurm"], arguments].concat());
        assert_eq!(output.status.code(), Some(2));
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    let site = work.join("site.toml");
    fs::write(&site, "mpi = 'pmix'\nacount = 'x'\n").unwrap();
    let unknown = error(&["--site", "site.toml", "train"]);
    assert!(unknown.starts_with("error: --site site.toml: line 2: unknown field `acount`"), "{unknown}");
    assert_eq!(
        error(&["--site", "nowhere", "train"]),
        "error: --site nowhere is neither a file nor a built-in site; the built-in ones are cpu, nvidia, frontier\n"
    );
    fs::write(&site, "mpi = 'pmix'\n").unwrap();
    let uneven = error(&["--site", "site.toml", "train", "--set", "cluster.per_node=6"]);
    assert!(uneven.starts_with("error: the 8 ranks of the configuration"), "{uneven}");
    assert!(error(&["verify"]).starts_with("error: --slurm needs the command train"));
    let after = error(&["train", "--site", "site.toml"]);
    assert_eq!(after, "error: --site is an option of launch; write it before train\n");
    let time = error(&["--site", "site.toml", "--time", "soon", "train"]);
    assert!(time.starts_with("error: --time = \"soon\" is not a time of Slurm"), "{time}");
    let mut lonely = crate::support::command(&work, &["launch", "--slurm", "--site", "site.toml", "train"]);
    let output = lonely.env("PATH", "/nowhere").output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(
        output.status.code() == Some(2) && text.starts_with("error: there is no sbatch in PATH"),
        "{text}"
    );
    fs::create_dir_all(work.join("out/checkpoints/step-00000001")).unwrap();
    let earlier = error(&["--site", "site.toml", "train"]);
    assert!(
        earlier.contains("out has checkpoints of an earlier run; add --resume to continue it"),
        "{earlier}"
    );
    let print =
        kintsugi(&work, &["launch", "--slurm", "--print", "--site", "site.toml", "train", "--resume"]);
    assert!(stdout(&print).contains("#SBATCH --nodes=1\n"));
}
