//! A server for the live page: the list of runs and the report of the chosen ones, as server-sent events.
//!
//! It is a few lines over `std::net`. There are two routes, every request is a GET without a body, and a browser reconnects
//! by itself; a web framework would add some sixty crates for that. Each connection has a thread; their number, the length of
//! a request and the time to send it are bounded.

mod http;
mod runs;

use std::io::{self, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use http::{Request, respond};
use runs::Runs;

use crate::Context;
use crate::page::{json, live};

/// Connections at a time. A browser opens up to six for one page.
const MOST_CONNECTIONS: usize = 64;
/// How often files are looked at.
const INTERVAL: Duration = Duration::from_secs(1);
/// A connection to which nothing can be written for so long is closed.
const PATIENCE: Duration = Duration::from_secs(20);
/// Events without data, so that a client that is gone is noticed.
const HEARTBEAT: u32 = 15;

/// The settings of the server: its folder, the token of its clients, and the context of its pages.
pub struct Watch<'a> {
    /// A run, or a folder with runs.
    pub folder: PathBuf,
    /// What a client must send, unless the server is only for this machine.
    pub token: Option<String>,
    /// What pages need beside the files.
    pub context: Context<'a>,
}

/// A bound listener and its address.
pub struct Listening {
    listener: TcpListener,
    /// The address.
    pub address: SocketAddr,
}

/// Sixteen random bytes, as text.
pub fn new_token() -> io::Result<String> {
    let mut bytes = [0; 16];
    io::Read::read_exact(&mut std::fs::File::open("/dev/urandom")?, &mut bytes)?;
    Ok(format!("{:032x}", u128::from_le_bytes(bytes)))
}

/// Whether a folder is a run or has runs in it.
pub fn has_runs(folder: &Path) -> bool {
    !runs::find(folder).is_empty()
}

/// Binds to an address; port 0 takes a free one.
pub fn listen(address: IpAddr, port: u16) -> io::Result<Listening> {
    let listener = TcpListener::bind((address, port))?;
    let address = listener.local_addr()?;
    Ok(Listening { listener, address })
}

/// Serves until the process ends.
pub fn serve(listening: &Listening, watch: &Watch) {
    let runs = Runs::new(&watch.folder);
    let open = Arc::new(AtomicUsize::new(0));
    thread::scope(|scope| {
        for stream in listening.listener.incoming() {
            let Ok(stream) = stream else {
                // As when there are no file descriptors left.
                thread::sleep(INTERVAL);
                continue;
            };
            let (open, runs) = (Arc::clone(&open), &runs);
            if open.fetch_add(1, Ordering::Relaxed) >= MOST_CONNECTIONS {
                open.fetch_sub(1, Ordering::Relaxed);
                respond(&stream, "503 Service Unavailable", "text/plain", "too many connections\n").ok();
                continue;
            }
            let started = thread::Builder::new().name("client".to_owned()).spawn_scoped(scope, {
                let open = Arc::clone(&open);
                move || {
                    // A client that leaves is no error.
                    answer(&stream, watch, runs, listening.address).ok();
                    open.fetch_sub(1, Ordering::Relaxed);
                }
            });
            if started.is_err() {
                open.fetch_sub(1, Ordering::Relaxed);
            }
        }
    });
}

fn answer(stream: &TcpStream, watch: &Watch, runs: &Runs, address: SocketAddr) -> io::Result<()> {
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    let Some(request) = Request::read(stream)? else {
        return respond(stream, "400 Bad Request", "text/plain", "this is no request that is understood\n");
    };
    match &watch.token {
        Some(token) if !request.has_token(token) => {
            return respond(stream, "403 Forbidden", "text/plain", "the token is missing or wrong\n");
        }
        // A page of another site that a name server sends here has the name of that site.
        None if !request.is_for_loopback(address.port()) => {
            return respond(stream, "403 Forbidden", "text/plain", "this server is for localhost alone\n");
        }
        _ => {}
    }
    match request.path.as_str() {
        "/" => respond(stream, "200 OK", "text/html; charset=utf-8", &live()),
        "/events" => events(stream, watch, runs, &request.values("run")),
        _ => respond(stream, "404 Not Found", "text/plain", "there is no such page\n"),
    }
}

/// Sends the list and the report of the chosen runs whenever they change, until the client leaves.
fn events(mut stream: &TcpStream, watch: &Watch, runs: &Runs, chosen: &[String]) -> io::Result<()> {
    let head = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nCache-Control: no-store\r\n\
                X-Content-Type-Options: nosniff\r\nConnection: close\r\n\r\nretry: 2000\n\n";
    stream.write_all(head.as_bytes())?;
    let (mut list, mut version, mut quiet) = (String::new(), None, 0);
    loop {
        let now = runs.list();
        let text = json(&now);
        quiet += 1;
        if text != list {
            stream.write_all(format!("event: runs\ndata: {text}\n\n").as_bytes())?;
            (list, quiet) = (text, 0);
        }
        if let Some((changed, report)) = runs.report(chosen, version, &watch.context) {
            version = Some(changed);
            stream.write_all(format!("event: report\ndata: {}\n\n", json(&report)).as_bytes())?;
            quiet = 0;
        }
        if quiet >= HEARTBEAT {
            stream.write_all(b": nothing is new\n\n")?;
            quiet = 0;
        }
        thread::sleep(INTERVAL);
    }
}
