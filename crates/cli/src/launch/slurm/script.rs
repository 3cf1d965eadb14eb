//! The batch script of a job: data in, text out.

use std::fmt::Write;
use std::path::{Path, PathBuf};

use kintsugi_plan::Mesh;

use super::super::quoted;
use super::site::{GpuBinding, Site};

/// The nodes of a job, which has exactly these.
pub struct Hosts {
    /// Their names as a list of Slurm.
    pub list: String,
    /// The host file: the node of every rank.
    pub file: PathBuf,
}

/// What a batch script depends on.
pub struct Job<'a> {
    /// The site.
    pub site: &'a Site,
    /// The plugin of srun by which MPI finds the other ranks.
    pub mpi: &'a str,
    /// The ranks.
    pub mesh: Mesh,
    /// How many nodes they are on.
    pub nodes: usize,
    /// Which nodes, if they were chosen.
    pub hosts: Option<Hosts>,
    /// The name by which the jobs of a run are found.
    pub name: &'a str,
    /// This program.
    pub program: &'a Path,
    /// The folder in which the command was given.
    pub working: &'a Path,
    /// The folder of the run, by its whole path.
    pub out: &'a Path,
    /// How many jobs follow each other.
    pub chain: u32,
    /// The command and its arguments.
    pub command: &'a [String],
    /// The same if the run goes on from a checkpoint of its own.
    pub resumed: &'a [String],
}

impl Job<'_> {
    /// The script.
    pub fn script(&self) -> String {
        let ranks = self.mesh.ranks();
        let per_node = ranks / self.nodes;
        let mut text = format!(
            "{}\n# Written by kintsugi launch --slurm for the run in {}: {ranks} ranks, {}.\n",
            if self.site.modules.is_empty() { "#!/bin/bash" } else { "#!/bin/bash -l" },
            self.out.display(),
            self.mesh,
        );
        for option in self.job_options(per_node) {
            writeln!(text, "#SBATCH {option}").expect("a string takes any text");
        }
        text.push_str("\n# Files are for the user only.\numask 077\n");
        for module in &self.site.modules {
            writeln!(text, "module load {module}").expect("a string takes any text");
        }
        for (name, value) in &self.site.environment {
            writeln!(text, "export {name}={}", quoted(value)).expect("a string takes any text");
        }
        text.push_str(&self.step(per_node));
        text
    }

    /// The options of sbatch, as they stand in a script.
    fn job_options(&self, per_node: usize) -> Vec<String> {
        let site = self.site;
        let mut options = vec![
            format!("--job-name={}", self.name),
            directive(&format!("--chdir={}", self.working.display())),
            // A percent sign of the path would begin one of Slurm's own patterns.
            directive(&format!(
                "--output={}/slurm-%j.log",
                self.out.display().to_string().replace('%', "%%")
            )),
            "--open-mode=append".to_owned(),
            format!("--nodes={}", self.nodes),
            format!("--ntasks-per-node={per_node}"),
        ];
        options.extend(self.hosts.as_ref().map(|hosts| directive(&format!("--nodelist={}", hosts.list))));
        options.extend(site.cores_per_rank.map(|cores| format!("--cpus-per-task={cores}")));
        options.extend(self.gpus(per_node));
        let named = [("account", &site.account), ("partition", &site.partition), ("time", &site.time)];
        options.extend(
            named.into_iter().filter_map(|(name, value)| Some(format!("--{name}={}", value.as_ref()?))),
        );
        options.push(format!("--signal=USR1@{}", site.signal()));
        options.push("--requeue".to_owned());
        // Jobs of one name run one after the other.
        options.extend((self.chain > 1).then(|| "--dependency=singleton".to_owned()));
        options.extend(site.job_options.iter().map(|option| directive(option)));
        options
    }

    fn gpus(&self, per_node: usize) -> Option<String> {
        self.site.gpus.map(|binding| match binding {
            GpuBinding::Node => format!("--gpus-per-node={per_node}"),
            GpuBinding::Rank => "--gpus-per-task=1".to_owned(),
        })
    }

    /// The job step, and what follows it.
    fn step(&self, per_node: usize) -> String {
        let words = |words: &[String]| words.iter().map(|word| quoted(word)).collect::<Vec<_>>().join(" ");
        let checkpoints = quoted(&self.out.join("checkpoints").display().to_string());
        let mut text = format!(
            "\nnewest() {{\n    local checkpoint last=\n    for checkpoint in {checkpoints}/step-????????; do\n        \
             if [ -d \"$checkpoint\" ]; then last=$checkpoint; fi\n    done\n    echo \"$last\"\n}}\nbefore=$(newest)\n\
             run=({})\n",
            words(self.command)
        );
        if self.command != self.resumed {
            write!(
                text,
                "# A job that was requeued, and a later one of a chain, continue the run.\n\
                 if [ -n \"$before\" ]; then run=({}); fi\n",
                words(self.resumed),
            )
            .expect("a string takes any text");
        }
        if let Some(hosts) = &self.hosts {
            let file = quoted(&hosts.file.display().to_string());
            writeln!(text, "# The node of every rank.\nexport SLURM_HOSTFILE={file}")
                .expect("a string takes any text");
        }
        // Consecutive ranks share a node: tp is the innermost axis of the mesh.
        let order = if self.hosts.is_some() { "arbitrary" } else { "block" };
        let mut step = vec![
            "srun".to_owned(),
            format!("--nodes={}", self.nodes),
            format!("--ntasks-per-node={per_node}"),
            format!("--distribution={order}"),
            format!("--mpi={}", self.mpi),
            // Ranks that outlive another say which one has failed, and end by themselves.
            "--kill-on-bad-exit=0".to_owned(),
            "--wait=60".to_owned(),
        ];
        step.extend(self.site.cores_per_rank.map(|cores| format!("--cpus-per-task={cores}")));
        step.extend(self.gpus(per_node));
        step.extend(self.site.step_options.iter().map(|option| quoted(option)));
        let program = quoted(&self.program.display().to_string());
        write!(
            text,
            "\n# Slurm sends SIGTERM to the ranks, to srun and to this shell. The ranks save and end; srun and the shell wait for them.\n\
             stopped=\ntrap 'stopped=yes' TERM\n(\n    trap '' TERM\n    exec {} \\\n    {program} \"${{run[@]}}\"\n)\ncode=$?\n",
            step.join(" "),
        )
        .expect("a string takes any text");
        if self.chain > 1 {
            let (out, name) = (quoted(&self.out.display().to_string()), self.name);
            write!(
                text,
                "\n# The rest of the chain has nothing to do if the run has finished or cannot begin.\n\
                 if [ $code = 2 ] || {{ [ $code = 0 ] && {program} status --finished {out}; }}; then\n\
                 \x20   scancel --user=\"$(id -un)\" --name={name} --state=PENDING\nfi\n",
            )
            .expect("a string takes any text");
        }
        text.push_str(
            "\n# A rank or its node has failed. The job is queued again if it has come further than before. A job that Slurm has ended\n\
             # is not, because Slurm itself may have queued it again.\n\
             if [ -z \"$stopped\" ] && [ $code != 0 ] && [ $code != 2 ] && [ \"$(newest)\" != \"$before\" ]; then\n    \
             scontrol requeue \"$SLURM_JOB_ID\"\nfi\nexit $code\n",
        );
        text
    }
}

/// A word as sbatch takes it in a line of the script. It has no backslash.
fn directive(word: &str) -> String {
    let special = |c: char| c.is_whitespace() || "\"'#".contains(c);
    if word.contains(special) { format!("\"{}\"", word.replace('"', "\\\"")) } else { word.to_owned() }
}
