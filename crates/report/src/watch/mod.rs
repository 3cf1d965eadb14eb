//! A server for the live page: the list of runs and the report of the chosen ones, as server-sent events.
//!
//! `hyper` speaks HTTP, on one thread. Files are read, plans predicted and reports made on other threads, so that nobody waits
//! for another client's page.

mod access;
mod answer;
mod connection;
mod find;
mod prediction;
mod runs;
mod tuning;

use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use access::Access;
use answer::Server;
use runs::Runs;

pub use access::new_token;

use crate::Context;

/// The settings of the server.
pub struct Watch {
    /// A run, or a folder with runs.
    pub folder: PathBuf,
    /// What a client must send.
    pub token: String,
    /// Names and addresses under which browsers may reach the server, beside its address and those of their own machine.
    pub names: Vec<String>,
    /// What pages need beside the files.
    pub context: Context<'static>,
}

/// A bound listener and its address.
pub struct Listener {
    listener: TcpListener,
    /// The address.
    pub address: SocketAddr,
}

/// Whether a folder is a run or has runs in it.
pub fn has_runs(folder: &Path) -> bool {
    !find::find(folder).is_empty()
}

/// The name of this machine.
pub fn machine_name() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

/// Binds to an address; port 0 takes a free one.
pub fn listen(address: IpAddr, port: u16) -> io::Result<Listener> {
    let listener = TcpListener::bind((address, port))?;
    let address = listener.local_addr()?;
    Ok(Listener { listener, address })
}

/// Serves until the process ends.
pub fn serve(listening: Listener, watch: Watch) -> io::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().enable_time().build()?;
    let access = Access::new(watch.token, &watch.names);
    let server = Server::new(access, Arc::new(Runs::new(&watch.folder, watch.context)));
    runtime.block_on(async {
        listening.listener.set_nonblocking(true)?;
        let listener = tokio::net::TcpListener::from_std(listening.listener)?;
        connection::accept(listener, Arc::new(server)).await;
        Ok(())
    })
}
