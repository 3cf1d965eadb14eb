//! The limits of connections: how many there are, and how long a client may take.
//!
//! A client without the token has little time, and is one of few: if there are too many of them, the oldest is closed. A
//! client with the token may stay, but not stop reading.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::io;
use std::net::IpAddr;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::AbortHandle;
use tokio::time::{sleep, timeout};
use tokio_io_timeout::TimeoutStream;

use super::answer::{Server, answer};

/// Connections with the token at a time. A browser opens up to six for one page.
const MAX_CLIENTS: usize = 64;
/// Connections at a time that have not sent the token yet.
const MAX_STRANGERS: usize = 64;
/// The time for a whole request to come.
const HEADER_DEADLINE: Duration = Duration::from_secs(5);
/// The time for a request without the token to come and for its refusal to be read.
const STRANGER_DEADLINE: Duration = Duration::from_secs(10);
/// A connection to which nothing can be written for so long is closed.
const WRITE_DEADLINE: Duration = Duration::from_secs(10);
/// The longest request: its first line and its headers.
const MAX_REQUEST: usize = 32 << 10;

/// What a connection knows of its client.
pub struct Client {
    /// The server's address that the client connected to.
    pub local: IpAddr,
    places: Arc<Semaphore>,
    place: OnceLock<OwnedSemaphorePermit>,
}

impl Client {
    /// Takes one of the places for clients with the token; `false` if there is none.
    pub fn admit(&self) -> bool {
        self.is_admitted()
            || Arc::clone(&self.places).try_acquire_owned().is_ok_and(|place| self.place.set(place).is_ok())
    }

    fn is_admitted(&self) -> bool {
        self.place.get().is_some()
    }
}

/// Accepts connections until the process ends.
pub async fn accept(listener: TcpListener, server: Arc<Server>) {
    let places = Arc::new(Semaphore::new(MAX_CLIENTS));
    let mut strangers: VecDeque<(Arc<Client>, AbortHandle)> = VecDeque::new();
    loop {
        let Ok((stream, client)) = accept_one(&listener, &places).await else {
            // As when there are no file descriptors left.
            sleep(Duration::from_secs(1)).await;
            continue;
        };
        strangers.retain(|(client, task)| !client.is_admitted() && !task.is_finished());
        if strangers.len() >= MAX_STRANGERS
            && let Some((_, oldest)) = strangers.pop_front()
        {
            oldest.abort();
        }
        let task = tokio::spawn(serve(stream, Arc::clone(&client), Arc::clone(&server)));
        strangers.push_back((client, task.abort_handle()));
    }
}

async fn accept_one(listener: &TcpListener, places: &Arc<Semaphore>) -> io::Result<(TcpStream, Arc<Client>)> {
    let (stream, _) = listener.accept().await?;
    let local = stream.local_addr()?.ip();
    Ok((stream, Arc::new(Client { local, places: Arc::clone(places), place: OnceLock::new() })))
}

/// Answers one request. Each page needs two, so connections are not kept for more.
async fn serve(stream: TcpStream, client: Arc<Client>, server: Arc<Server>) {
    let mut stream = Box::pin(TimeoutStream::new(stream));
    stream.as_mut().set_write_timeout_pinned(Some(WRITE_DEADLINE));
    let service = service_fn(|request| {
        let answered = answer(&server, &client, &request);
        async move { Ok::<_, Infallible>(answered) }
    });
    let mut builder = http1::Builder::new();
    builder.timer(TokioTimer::new()).header_read_timeout(HEADER_DEADLINE);
    builder.keep_alive(false).max_buf_size(MAX_REQUEST);
    let mut connection = Box::pin(builder.serve_connection(TokioIo::new(stream), service));
    // A client that leaves or is too slow is no error.
    if timeout(STRANGER_DEADLINE, connection.as_mut()).await.is_err() && client.is_admitted() {
        connection.await.ok();
    }
}
