//! `kintsugi watch`: the page of runs while they go on.

mod forward;

use std::net::{IpAddr, Ipv4Addr};
use std::path::PathBuf;

use clap::Args;
use kintsugi_report::watch::{Watch, has_runs, listen, machine_name, new_token, serve};
use kintsugi_spec::Cause;
use kintsugi_tune::trials::TRIALS;

use crate::failure::{ErrorContext, Failure};
use crate::output;
use crate::report::context;
use forward::Service;

/// Shows runs in a browser while they go on.
///
/// FOLDER is the folder of a run, or one with runs in it, which are listed and can be drawn over each other; runs that start
/// later appear by themselves. It only reads files, so it does not slow a run down, and the folder may be on a disk that
/// another machine trains on. A run that ends and is resumed goes on in the same page.
///
/// The address that it prints has a token in it, which the browser then keeps as a cookie. Everybody without the token is
/// refused, also on this machine. Links in the folder are not followed.
///
/// The server is for this machine alone, unless --address says otherwise. The connection is not encrypted: for another
/// machine, prefer a tunnel (ssh -L 8080:127.0.0.1:8080), and open the printed address there.
#[derive(Args)]
#[command(after_long_help = EXAMPLES)]
pub struct Arguments {
    /// The folder of a run, or one with runs in it
    #[arg(value_name = "FOLDER")]
    folder: PathBuf,
    /// The port; 0 takes a free one
    #[arg(long, value_name = "N", default_value_t = 8080)]
    port: u16,
    /// The address to listen on, as 0.0.0.0 for every network
    #[arg(long, value_name = "ADDRESS", default_value_t = IpAddr::V4(Ipv4Addr::LOCALHOST))]
    address: IpAddr,
    /// Another name or address by which browsers reach this machine; can be repeated
    #[arg(long = "host", value_name = "NAME", value_parser = host)]
    hosts: Vec<String>,
    /// Sends the metrics of the run in FOLDER to this service instead, until the run ends
    ///
    /// The service's own Python library does it, with its own settings; so Python and the library must be installed. Sending a
    /// run again goes on where it ended. Ctrl-C ends the sending, not the run.
    #[arg(long, value_enum, value_name = "SERVICE", conflicts_with_all = ["port", "address", "hosts"])]
    forward: Option<Service>,
    /// With --forward: the Python that has the service's library
    #[arg(long, value_name = "PROGRAM", default_value = "python3", requires = "forward")]
    python: PathBuf,
}

const EXAMPLES: &str = "\
Examples:
  kintsugi watch out
      the run in out, on port 8080
  kintsugi watch runs --port 0
      all runs in the folder runs, at a free port
  kintsugi watch runs --address 0.0.0.0
      for other machines, by the name of this one
  kintsugi watch runs --address 0.0.0.0 --host node7.example.org
      for other machines, by a name that they know
  kintsugi watch out --forward wandb
      sends the run in out to Weights & Biases while it goes on
  MLFLOW_TRACKING_URI=file:///data/mlruns kintsugi watch out --forward mlflow
      sends it to MLflow, here to its file store";

/// Runs the command.
pub fn run(arguments: &Arguments) -> Result<(), Failure> {
    let folder = &arguments.folder;
    if !folder.is_dir() {
        return Err(Failure::mistake(format!("{} is not a folder", folder.display())));
    }
    if let Some(service) = arguments.forward {
        return forward::forward(folder, service, &arguments.python);
    }
    let token = new_token().map_err(|error| Failure::run(ErrorContext::new("cannot make a token", error)))?;
    let listening = listen(arguments.address, arguments.port).map_err(|error| {
        let (address, port) = (arguments.address, arguments.port);
        let context = format!("cannot listen on {address}, port {port}");
        Failure::run(ErrorContext::new(context, error).advise("--port 0 takes a free port"))
    })?;
    let (address, port) = (arguments.address, listening.address.port());
    let mut names = arguments.hosts.clone();
    if !address.is_loopback() {
        names.push(machine_name());
    }
    // Not localhost: another user may listen on the same port of another address of that name.
    let shown = match names.first() {
        Some(name) if address.is_unspecified() || !arguments.hosts.is_empty() => name.clone(),
        _ => address.to_string(),
    };
    let shown = if shown.contains(':') { format!("[{shown}]") } else { shown };
    let has_trials = folder.join(TRIALS).is_file();
    let none = if has_runs(folder) || has_trials { "" } else { " (no run yet)" };
    let folder_name = folder.display();
    output::stdout(&format!("watching {folder_name}{none}: http://{shown}:{port}/?token={token}\n"))?;
    let watch = Watch { folder: folder.clone(), token, names, context: context() };
    serve(listening, watch).map_err(|error| Failure::run(ErrorContext::new("cannot serve pages", error)))
}

/// A name or an address, without a port and what else a URL has.
fn host(text: &str) -> Result<String, Cause> {
    let is_name = !text.is_empty() && text.bytes().all(|c| c.is_ascii_alphanumeric() || b"-._".contains(&c));
    if is_name || text.parse::<IpAddr>().is_ok() {
        return Ok(text.to_owned());
    }
    let rule =
        "it is neither the name of a machine nor an address; give it without http:// and without the port";
    Err(Cause::new(rule))
}
