//! Agents, ranks and the launcher as threads of one process. A rank is a connection.

use std::fs;
use std::io::Write;
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::thread::JoinHandle;
use std::time::Instant;
use std::{io, thread};

use super::*;

/// An agent that ends when its input is dropped.
struct TestAgent {
    input: UnixStream,
    thread: JoinHandle<io::Result<()>>,
}

fn task(server: &AgentServer) -> AgentTask {
    let AgentTask { invitation, folder } = server.task();
    AgentTask { invitation: invitation.clone(), folder: folder.clone() }
}

fn start(task: AgentTask) -> TestAgent {
    let (input, read) = UnixStream::pair().expect("a pair of sockets");
    TestAgent { input, thread: thread::spawn(move || run(task, read)) }
}

fn socket(server: &AgentServer) -> PathBuf {
    NodeFolder::socket_in(&NodeFolder::path_in(&server.task().folder))
}

/// Waits until the reports contain what is expected. Returns all of them.
fn until(server: &AgentServer, reports: &mut Vec<ReportKind>, is_there: impl Fn(&[RankEvent]) -> bool) {
    let begun = Instant::now();
    loop {
        reports.extend(server.reports().into_iter().map(|report| report.kind));
        if is_there(&events(reports)) {
            return;
        }
        assert!(begun.elapsed() < Duration::from_secs(30), "{reports:?}");
        thread::sleep(Duration::from_millis(5));
    }
}

fn events(reports: &[ReportKind]) -> Vec<RankEvent> {
    let of = |report: &ReportKind| match report {
        ReportKind::Events(events) => events.clone(),
        _ => Vec::new(),
    };
    reports.iter().flat_map(of).collect()
}

fn connected(socket: &PathBuf) -> UnixStream {
    let begun = Instant::now();
    loop {
        if let Ok(stream) = UnixStream::connect(socket) {
            return stream;
        }
        assert!(begun.elapsed() < Duration::from_secs(30), "the agent does not listen");
        thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn ranks_are_reported_in_the_order_in_which_they_end_and_the_folder_is_removed() {
    let server = AgentServer::start(true).expect("a free port");
    let agent = start(task(&server));
    let [mut first, mut second, mut third] = [(); 3].map(|()| connected(&socket(&server)));
    let mut reports = Vec::new();
    first.write_all(b"rank 0\n").expect("it listens");
    second.write_all(b"rank 1\nen").expect("it listens");
    third.write_all(b"rank 2\n").expect("it listens");
    until(&server, &mut reports, |events| events.len() == 3);
    drop(third);
    first.write_all(b"ended 0\n").expect("it listens");
    second.write_all(b"ded because of others 1\n").expect("it listens");
    drop((first, second));
    until(&server, &mut reports, |events| events.len() == 6);
    let ends = &events(&reports)[3..];
    let expected = [
        RankEvent::Died { rank: 2, signal: None },
        RankEvent::Ended { rank: 0, code: 0, names_cause: true },
        RankEvent::Ended { rank: 1, code: 1, names_cause: false },
    ];
    assert_eq!(ends, expected);
    assert_eq!(reports[0], ReportKind::Connected);
    let folder = server.task().folder.clone();
    assert!(fs::exists(&folder).expect("it can be asked"));
    server.order(Order::End);
    agent.thread.join().expect("no panic").expect("it ends well");
    assert!(!fs::exists(&folder).expect("it can be asked"));
}

#[test]
fn garbage_at_the_socket_and_at_the_port_and_a_wrong_secret_change_nothing() {
    let server = AgentServer::start(true).expect("a free port");
    let agent = start(task(&server));
    let mut good = connected(&socket(&server));
    for garbage in [&[0xff; 300][..], b"rank x\n", b"ended 3\n", b"rank 1\nrank 2\n", b"rank\n"] {
        connected(&socket(&server)).write_all(garbage).ok();
    }
    let AgentTask { invitation, folder } = task(&server);
    let address = invitation.addresses[0].clone();
    let mut strangers: Vec<TcpStream> =
        (0..20).map(|_| TcpStream::connect(&address).expect("it listens")).collect();
    for stranger in &mut strangers {
        stranger.write_all(&[0xff; 200]).ok();
    }
    let wrong = Invitation { secret: "another".into(), ..invitation };
    let introduction =
        crate::rendezvous::handshake::Introduction { rank: 7, size: 8, host: "stranger".into() };
    let refused = crate::rendezvous::meet::reach_first(
        &introduction,
        &wrong.addresses,
        &wrong.secret,
        Duration::from_secs(20),
    );
    assert!(matches!(refused, Err(crate::rendezvous::RendezvousError::Refused { .. })));
    good.write_all(b"rank 3\n").expect("it listens");
    let mut reports = Vec::new();
    until(&server, &mut reports, |events| events.contains(&RankEvent::Began { rank: 3 }));
    let allowed = |event: &RankEvent| {
        // What says first that it is a rank, and then something else, is one until then.
        matches!(event, RankEvent::Began { rank: 3 | 1 } | RankEvent::Died { rank: 1, .. })
    };
    assert!(events(&reports).iter().all(allowed), "{reports:?}");
    assert_eq!(server.connected(), [crate::rendezvous::host_name()]);
    // An agent whose launcher has gone ends, and leaves nothing.
    drop(good);
    until(&server, &mut reports, |events| events.contains(&RankEvent::Died { rank: 3, signal: None }));
    drop(agent.input);
    agent.thread.join().expect("no panic").expect("it ends well");
    assert!(!fs::exists(folder).expect("it can be asked"));
}

#[test]
fn an_agent_that_starts_again_takes_over_and_removes_what_killed_ones_have_left() {
    let server = AgentServer::start(true).expect("a free port");
    let left = job_folder().expect("random bytes");
    let folder = NodeFolder::create(&left).expect("it is ours");
    let path = folder.path().to_owned();
    NodeFolder::remove_abandoned(Path::new(""));
    assert!(path.is_dir(), "its agent lives");
    // A killed agent removes nothing, and its lock is gone.
    fs::remove_file(path.join("lock")).expect("it is there");
    fs::write(path.join("lock"), "").expect("it is ours");
    NodeFolder::remove_abandoned(&left);
    assert!(path.is_dir(), "another agent of the job takes over");
    let agent = start(task(&server));
    drop(connected(&socket(&server)));
    assert!(!path.exists());
    std::mem::forget(folder);
    drop(agent.input);
    agent.thread.join().expect("no panic").expect("it ends well");
    let again = start(task(&server));
    let mut rank = connected(&socket(&server));
    rank.write_all(b"rank 5\n").expect("it listens");
    let mut reports = Vec::new();
    until(&server, &mut reports, |events| events.contains(&RankEvent::Began { rank: 5 }));
    // An agent kills its ranks at the end, and this one is a part of this process.
    drop(rank);
    until(&server, &mut reports, |events| events.contains(&RankEvent::Died { rank: 5, signal: None }));
    drop(again.input);
    again.thread.join().expect("no panic").expect("it ends well");
}
