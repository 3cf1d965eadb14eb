//! The process of an agent.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use super::local_ranks::LocalRanks;
use super::outbox::{Message, Outbox};
use super::{AgentTask, NodeFolder, Order, SILENCE};
use crate::rendezvous::frame::Kind;
use crate::rendezvous::handshake::Introduction;
use crate::rendezvous::peer::Peer;
use crate::rendezvous::{host_name, meet};

/// How often the agent looks which ranks are stopped.
const LOOK: Duration = Duration::from_millis(500);

/// How long the agent tries to reach the launcher before it begins again.
const MEETING: Duration = Duration::from_secs(60);

/// How long a killed rank may take to go before the agent's end.
const LAST_KILL: Duration = Duration::from_millis(100);

/// Runs the agent of this node. It ends when the launcher says so, or when `input` ends: the launcher has died. Then it kills its
/// ranks, which nobody would start again.
pub fn run(task: AgentTask, input: impl Read + Send + 'static) -> io::Result<()> {
    NodeFolder::remove_abandoned(&task.folder);
    let folder = NodeFolder::create(&task.folder)?;
    let (wake, woken) = UnixStream::pair()?;
    let mut ranks = LocalRanks::listen(&NodeFolder::socket_in(folder.path()), woken)?;
    let (orders, received) = channel();
    let link = Arc::new(LauncherLink {
        orders,
        wake,
        peer: Mutex::new(None),
        has_reconnected: AtomicBool::new(false),
    });
    // The name of the node tells agents apart.
    let introduction = Introduction { rank: 0, size: 0, host: host_name() };
    spawn("launcher", Arc::clone(&link), move |link| link.stay_connected(&introduction, &task))?;
    spawn("input", Arc::clone(&link), move |link| link.watch_input(input))?;
    serve(&mut ranks, &link, &received)
}

fn spawn(
    name: &str,
    link: Arc<LauncherLink>,
    body: impl FnOnce(&LauncherLink) + Send + 'static,
) -> io::Result<()> {
    thread::Builder::new().name(name.into()).spawn(move || body(&link)).map(|_| ())
}

fn serve(ranks: &mut LocalRanks, link: &LauncherLink, orders: &Receiver<Order>) -> io::Result<()> {
    let (mut outbox, mut last_look) = (Outbox::new(), Instant::now());
    loop {
        outbox.add(ranks.wait(outbox.wait(Instant::now(), LOOK))?);
        if last_look.elapsed() >= LOOK {
            last_look = Instant::now();
            outbox.add(ranks.look_for_stops());
        }
        if let Some(peer) = link.peer() {
            if link.has_reconnected.swap(false, Ordering::Relaxed) {
                outbox.begin_with(ranks.present());
            }
            send(&peer, &mut outbox);
        }
        for order in orders.try_iter() {
            ranks.kill();
            if order == Order::End {
                if !ranks.present().is_empty() {
                    ranks.wait(LAST_KILL)?;
                }
                return Ok(());
            }
        }
    }
}

/// Sends what is due. What cannot be sent stays for the next connection.
fn send(peer: &Peer, outbox: &mut Outbox) {
    match outbox.due(Instant::now()) {
        None => {}
        // A lost connection is noticed by the thread that receives.
        Some(Message::Heartbeat) => drop(peer.write(Kind::Heartbeat, &[])),
        Some(Message::Events(events)) => {
            let bytes = postcard::to_stdvec(&events).expect("numbers can be encoded");
            if peer.write(Kind::Post, &bytes).is_err() {
                outbox.begin_with(events);
            }
        }
    }
}

/// The agent's connection to the launcher.
struct LauncherLink {
    orders: Sender<Order>,
    /// A byte ends the wait of the thread that serves the ranks.
    wake: UnixStream,
    peer: Mutex<Option<Arc<Peer>>>,
    /// Whether it has connected again since the last look.
    has_reconnected: AtomicBool,
}

impl LauncherLink {
    /// Connects, and connects again when the connection is lost.
    fn stay_connected(&self, introduction: &Introduction, task: &AgentTask) {
        let (addresses, secret) = (&task.invitation.addresses, &task.invitation.secret);
        let mut is_first = true;
        loop {
            let Ok(peer) = meet::reach_first(introduction, addresses, secret, MEETING) else {
                thread::sleep(LOOK);
                continue;
            };
            let peer = Arc::new(peer);
            self.set_peer(Some(Arc::clone(&peer)));
            self.has_reconnected.store(!std::mem::take(&mut is_first), Ordering::Relaxed);
            self.wake();
            while let Ok((kind, bytes)) = peer.read(|| SILENCE) {
                if kind == Kind::Post
                    && let Ok(order) = postcard::from_bytes(&bytes)
                {
                    self.order(order);
                }
            }
            self.set_peer(None);
        }
    }

    fn watch_input(&self, mut input: impl Read) {
        while input.read(&mut [0; 64]).is_ok_and(|read| read > 0) {}
        self.order(Order::End);
    }

    fn order(&self, order: Order) {
        self.orders.send(order).ok();
        self.wake();
    }

    fn wake(&self) {
        (&self.wake).write_all(&[0]).ok();
    }

    fn set_peer(&self, peer: Option<Arc<Peer>>) {
        *self.peer.lock().unwrap_or_else(PoisonError::into_inner) = peer;
    }

    fn peer(&self) -> Option<Arc<Peer>> {
        self.peer.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}
