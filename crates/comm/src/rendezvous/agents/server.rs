//! The launcher's end: agents connect to it at any time, also again after they were killed.

use std::collections::BTreeMap;
use std::io;
use std::net::{Shutdown, TcpListener};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use super::outbox::HEARTBEAT;
use super::{AgentTask, Order, Report, ReportKind, SILENCE, job_folder};
use crate::rendezvous::frame::Kind;
use crate::rendezvous::meet::Handshakes;
use crate::rendezvous::peer::Peer;
use crate::rendezvous::{Rendezvous, host_name};

/// How long the launcher sleeps before it looks again whether an agent connects.
const PAUSE: Duration = Duration::from_millis(50);

/// Listens for agents. It closes their connections when it is dropped.
pub struct AgentServer {
    task: AgentTask,
    shared: Arc<Shared>,
    reports: Mutex<Receiver<Report>>,
}

struct Shared {
    agents: Mutex<BTreeMap<String, Arc<Peer>>>,
    ends: AtomicBool,
}

impl AgentServer {
    /// Listens for the agents of this machine only, or also of others.
    pub fn start(is_local: bool) -> io::Result<Self> {
        let elsewhere = if is_local { Vec::new() } else { vec![String::new()] };
        let (listener, invitation) = Rendezvous::invite(&host_name(), &elsewhere)?;
        let shared = Arc::new(Shared { agents: Mutex::default(), ends: AtomicBool::new(false) });
        let (sender, reports) = channel();
        let task = AgentTask { invitation, folder: job_folder()? };
        let (secret, accepting) = (task.invitation.secret.clone(), Arc::clone(&shared));
        thread::Builder::new()
            .name("agents".into())
            .spawn(move || accepting.accept(&listener, secret, &sender))?;
        Ok(AgentServer { task, shared, reports: Mutex::new(reports) })
    }

    /// What agents are told when they start.
    pub fn task(&self) -> &AgentTask {
        &self.task
    }

    /// The names of the nodes whose agents are connected.
    pub fn connected(&self) -> Vec<String> {
        self.shared.agents().keys().cloned().collect()
    }

    /// The reports that have come since the last call.
    pub fn reports(&self) -> Vec<Report> {
        self.reports.lock().unwrap_or_else(PoisonError::into_inner).try_iter().collect()
    }

    /// Tells all agents.
    pub fn order(&self, order: Order) {
        let bytes = postcard::to_stdvec(&order).expect("an order can be encoded");
        let agents: Vec<_> = self.shared.agents().values().cloned().collect();
        for agent in agents {
            // A lost connection is noticed by the thread that receives.
            agent.write(Kind::Post, &bytes).ok();
        }
    }
}

impl Drop for AgentServer {
    fn drop(&mut self) {
        self.shared.ends.store(true, Ordering::Relaxed);
        for agent in self.shared.agents().values() {
            agent.stream.shutdown(Shutdown::Both).ok();
        }
    }
}

impl Shared {
    fn agents(&self) -> MutexGuard<'_, BTreeMap<String, Arc<Peer>>> {
        self.agents.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn accept(self: &Arc<Self>, listener: &TcpListener, secret: String, reports: &Sender<Report>) {
        let Ok(mut handshakes) = Handshakes::new(listener, secret, PAUSE) else { return };
        let mut last_heartbeat = Instant::now();
        while !self.ends.load(Ordering::Relaxed) {
            if last_heartbeat.elapsed() >= HEARTBEAT {
                last_heartbeat = Instant::now();
                let agents: Vec<_> = self.agents().values().cloned().collect();
                for agent in agents {
                    agent.write(Kind::Heartbeat, &[]).ok();
                }
            }
            let Some((_, peer)) = handshakes.next() else { continue };
            let peer = Arc::new(peer);
            self.agents().insert(peer.host.clone(), Arc::clone(&peer));
            let (shared, reports) = (Arc::clone(self), reports.clone());
            let body = move || shared.listen(&peer, &reports);
            thread::Builder::new().name("from agent".into()).stack_size(128 << 10).spawn(body).ok();
        }
    }

    fn listen(&self, peer: &Arc<Peer>, reports: &Sender<Report>) {
        let report = |kind| {
            reports.send(Report { at: Instant::now(), host: peer.host.clone(), kind }).ok();
        };
        report(ReportKind::Connected);
        while let Ok((kind, bytes)) = peer.read(|| SILENCE) {
            if kind == Kind::Post
                && let Ok(events) = postcard::from_bytes(&bytes)
            {
                report(ReportKind::Events(events));
            }
        }
        let mut agents = self.agents();
        // It may have a successor.
        if agents.get(&peer.host).is_some_and(|current| Arc::ptr_eq(current, peer)) {
            agents.remove(&peer.host);
            report(ReportKind::Lost);
        }
    }
}
