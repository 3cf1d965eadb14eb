//! `kintsugi watch`: the page of runs while they go on.

use std::net::{IpAddr, Ipv4Addr};
use std::path::PathBuf;

use clap::Args;
use kintsugi_report::watch::{Watch, has_runs, listen, new_token, serve};

use crate::failure::Failure;
use crate::output;
use crate::report::context;

/// Shows runs in a browser while they go on.
///
/// FOLDER is the folder of a run, or one with runs in it, which are listed and can be drawn over each other; runs that start
/// later appear by themselves. Only the files of the runs are read, so that a run takes no notice of it, and the folder may
/// be on a disk that another machine trains on. A run that ends and is resumed goes on in the same page.
///
/// The server is for this machine alone. With --address for another network it prints an address with a token in it, and
/// refuses everybody without the token. The connection is not encrypted: prefer a tunnel (ssh -L 8080:localhost:8080).
#[derive(Args)]
#[command(after_long_help = EXAMPLES)]
pub struct Arguments {
    /// The folder of a run, or one with runs in it
    #[arg(value_name = "FOLDER")]
    folder: PathBuf,
    /// The port; 0 takes a free one
    #[arg(long, value_name = "N", default_value_t = 8080)]
    port: u16,
    /// The address to listen on, as 0.0.0.0 for every network; clients then need a token
    #[arg(long, value_name = "ADDRESS", default_value_t = IpAddr::V4(Ipv4Addr::LOCALHOST))]
    address: IpAddr,
}

const EXAMPLES: &str = "\
Examples:
  kintsugi watch out
      the run in out, at http://localhost:8080
  kintsugi watch runs --port 0
      all runs in the folder runs, at a free port
  kintsugi watch runs --address 0.0.0.0
      for other machines, with the token that is printed";

/// Runs the command.
pub fn run(arguments: &Arguments) -> Result<(), Failure> {
    let folder = &arguments.folder;
    if !folder.is_dir() {
        return Err(Failure::Mistake(format!("{} is no folder", folder.display())));
    }
    let local = arguments.address.is_loopback();
    let token = if local { None } else { Some(new_token()) };
    let token = token.transpose().map_err(|error| Failure::Run(format!("cannot make a token: {error}")))?;
    let listening = listen(arguments.address, arguments.port).map_err(|error| {
        let (address, port) = (arguments.address, arguments.port);
        Failure::Run(format!("cannot listen on {address}, port {port}: {error}; --port 0 takes a free port"))
    })?;
    let port = listening.address.port();
    let host = match arguments.address {
        address if address.is_loopback() => "localhost".to_owned(),
        IpAddr::V6(address) => format!("[{address}]"),
        IpAddr::V4(address) => address.to_string(),
    };
    let query = token.as_ref().map(|token| format!("?token={token}")).unwrap_or_default();
    let none = if has_runs(folder) { "" } else { " (no run yet)" };
    output::stdout(&format!("watching {}{none}: http://{host}:{port}/{query}\n", folder.display()))?;
    serve(&listening, &Watch { folder: folder.clone(), token, context: context() });
    Ok(())
}
