//! Processes as threads of one process.

use std::io::Write;
use std::net::TcpStream;

use super::handshake::introduce;
use super::*;

const LIMIT: Duration = Duration::from_secs(60);

/// A member of a job that meets at a listener.
fn meet(
    rank: usize,
    size: usize,
    listener: &TcpListener,
    secret: &str,
) -> Result<Rendezvous, RendezvousError> {
    if rank == 0 {
        return Rendezvous::lead(size, host_name(), listener, secret, LIMIT);
    }
    let addresses = vec![listener.local_addr().expect("it is bound").to_string()];
    Rendezvous::join(rank, size, host_name(), &Invitation { addresses, secret: secret.to_owned() }, LIMIT)
}

fn listener() -> TcpListener {
    TcpListener::bind("127.0.0.1:0").expect("a free port")
}

/// The members of a job that has met, leaked as those of a process are.
fn met(size: usize) -> Vec<&'static Rendezvous> {
    let (listener, secret) = (listener(), new_secret().expect("random bytes"));
    let members = thread::scope(|scope| {
        let meet = |rank| {
            let (listener, secret) = (&listener, &secret);
            scope.spawn(move || meet(rank, size, listener, secret))
        };
        let meeting: Vec<_> = (0..size).map(meet).collect();
        meeting.into_iter().map(|one| one.join().expect("no panic").expect("they meet")).collect::<Vec<_>>()
    });
    let leak = |member: Rendezvous| -> &'static Rendezvous {
        let member: &'static Rendezvous = Box::leak(Box::new(member));
        member.start_threads(false);
        member
    };
    members.into_iter().map(leak).collect()
}

/// Runs `body` on every member at once.
fn on_all<T: Send>(members: &[&'static Rendezvous], body: impl Fn(&Rendezvous) -> T + Sync) -> Vec<T> {
    thread::scope(|scope| {
        let body = &body;
        let threads: Vec<_> = members.iter().map(|&member| scope.spawn(move || body(member))).collect();
        threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
    })
}

fn eventually(condition: impl Fn() -> bool) {
    let begun = Instant::now();
    while !condition() {
        assert!(begun.elapsed() < Duration::from_secs(20), "it does not happen");
        thread::sleep(Duration::from_millis(5));
    }
}

fn are_reported<const N: usize>(members: [&Rendezvous; N]) -> [bool; N] {
    members.map(|member| member.reported.load(Ordering::Relaxed))
}

#[test]
fn bytes_come_to_rank_0_in_order_and_go_to_all() {
    let members = met(4);
    let gathered = on_all(&members, |member| member.gather(4, vec![member.rank as u8; member.rank]));
    assert_eq!(gathered[0], Ok(Some(vec![vec![], vec![1], vec![2; 2], vec![3; 3]])));
    assert!(gathered[1..].iter().all(|other| *other == Ok(None)));
    let told = on_all(&members, |member| {
        member.broadcast(4, if member.rank == 0 { b"go".to_vec() } else { Vec::new() })
    });
    assert_eq!(told, vec![Ok(b"go".to_vec()); 4]);
    // A smaller job takes part without the others.
    let some = on_all(&members[..2], |member| member.gather(2, vec![member.rank as u8]));
    assert_eq!(some[0], Ok(Some(vec![vec![0], vec![1]])));
    members[3].post(b"beside all of it");
    eventually(|| members[0].take_post(3) == Some(b"beside all of it".to_vec()));
    assert_eq!(members[0].take_post(2), None);
    on_all(&members, |member| member.leave(false));
    on_all(&members, Rendezvous::disconnect);
    assert!(members.iter().all(|member| member.failure().is_none()), "goodbye is no failure");
}

#[test]
fn a_rank_that_gave_up_its_first_connection_may_come_again() {
    let (listener, secret) = (listener(), new_secret().expect("random bytes"));
    thread::scope(|scope| {
        let lead = scope.spawn(|| meet(0, 3, &listener, &secret));
        let introduction = Introduction { rank: 1, size: 3, host: host_name() };
        let address = listener.local_addr().expect("it is bound");
        for _ in 0..2 {
            let mut stream = TcpStream::connect(address).expect("rank 0 listens");
            introduce(&mut stream, &secret, &introduction).expect("it knows the secret");
        }
        let others = [1, 2].map(|rank| {
            let (listener, secret) = (&listener, &secret);
            scope.spawn(move || meet(rank, 3, listener, secret))
        });
        for member in others.into_iter().chain([lead]) {
            assert!(member.join().expect("no panic").is_ok());
        }
    });
}

#[test]
fn the_death_of_a_process_ends_the_job_and_is_named() {
    let members = met(3);
    // Rank 2 dies: the system closes its connection.
    members[2].peers[0].stream.shutdown(Shutdown::Both).expect("it is open");
    let errors =
        on_all(&members[..2], |member| member.broadcast(3, vec![1]).and_then(|_| member.receive_any()));
    for (member, error) in members.iter().zip(errors) {
        let failure = error.expect_err("the job has failed");
        assert_eq!((failure.rank, failure.reason.as_str()), (2, "its process has ended"), "{failure}");
        assert_eq!(failure.host.as_deref(), Some(host_name().as_str()), "rank {}", member.rank);
    }
    assert_eq!(are_reported([members[0], members[1]]), [true, true], "rank 0 has printed it");
}

#[test]
fn a_process_that_was_stopped_until_the_others_had_ended_accuses_none_of_them() {
    let members = met(3);
    let first = members[0];
    first.set_step_limit(Some(Duration::from_secs(6)));
    first.stops.stop(Duration::from_secs(7));
    members[2].peers[0].stream.shutdown(Shutdown::Both).expect("it is open");
    let failure = first.receive_any().expect_err("the job has failed");
    assert_eq!((failure.rank, failure.culprit()), (0, Some(0)), "{failure}");
    assert_eq!(
        failure.reason,
        "its process was stopped for 7 s, and meanwhile the process of rank 2 has ended"
    );
    // Nor does it if another asks it for the end of a chain that goes through it.
    let _wait = WaitGuard::new(first, Some(2), Activity::End, false);
    let stalled = first.explained(RankFailure::stalled(1, "a send", Some(0)));
    assert_eq!(stalled.culprit(), Some(0), "{stalled}");
    // A short stop is no reason for the others to end.
    first.stops.stop(Duration::from_secs(3));
    assert_eq!(first.lost(first.peer(2), &FrameError::Closed).culprit(), Some(2));
}

#[test]
fn of_several_processes_that_have_ended_none_is_accused() {
    let members = met(4);
    let connection = |of: usize| members[0].peer(of);
    members[3].peers[0].stream.shutdown(Shutdown::Both).expect("it is open");
    eventually(|| connection(3).has_hung_up());
    let one = members[0].lost(connection(3), &FrameError::Closed);
    assert_eq!((one.culprit(), one.reason.as_str()), (Some(3), "its process has ended"));
    assert!(!connection(1).has_hung_up() && !connection(2).has_hung_up());
    members[2].peers[0].stream.shutdown(Shutdown::Both).expect("it is open");
    eventually(|| connection(2).has_hung_up());
    let several = members[0].lost(connection(2), &FrameError::Closed);
    assert_eq!(several.culprit(), None);
    assert_eq!(several.reason, "its process has ended, and so has that of rank 3");
}

#[test]
fn if_rank_0_ends_some_ranks_on_other_nodes_say_so_in_turns() {
    static REPORTS: Mutex<Vec<String>> = Mutex::new(Vec::new());
    crate::report_failures_by(|failure| REPORTS.lock().expect("no panic").push(failure.to_string()));
    let members = met(6);
    // Like a process that is killed, it tells nobody.
    members[0].ends.store(true, Ordering::Relaxed);
    for peer in &members[0].peers {
        peer.stream.shutdown(Shutdown::Both).expect("it is open");
    }
    eventually(|| members[1..].iter().all(|member| member.has_failed()));
    let reports = REPORTS.lock().expect("no panic");
    let name_it = reports.iter().all(|report| report.starts_with("rank 0 on "));
    assert!(reports.len() == 3 && name_it, "by ranks 1, 2 and 4: {reports:?}");
}

#[test]
fn a_failure_of_one_is_the_failure_of_all_and_the_first_one_stays() {
    let members = met(4);
    let failure = RankFailure::new(3, "backward layer 1", "no memory");
    members[3].abort(failure.clone());
    eventually(|| members.iter().all(|member| member.failure() == Some(failure.clone())));
    assert_eq!(members[1].abort(RankFailure::new(1, "a step", "a consequence")), failure);
    assert_eq!(members[0].gather(4, Vec::new()), Err(failure));
    assert_eq!(are_reported([members[0], members[3]]), [true, false], "rank 3 prints it");
}

#[test]
fn a_stall_names_the_end_of_the_chain_of_waits() {
    let members = met(4);
    for member in &members {
        member.set_limit(Duration::from_secs(3));
    }
    // Rank 3 waits for rank 2 in a transfer, rank 2 waits for rank 1, and rank 1 computes for ever. Ranks 0 to 2 do not give up.
    let transfer = Activity::Message { group: kintsugi_spec::Group::PIPELINE, from: 2, to: 3, tag: 0 };
    let _second = WaitGuard::new(members[2], Some(1), transfer, false);
    let _third = WaitGuard::new(members[3], Some(2), transfer, false);
    eventually(|| members[0].peers.iter().filter(|peer| peer.inbox().status.wait.is_some()).count() == 2);
    let stalled = RankFailure::stalled(3, "a send", Some(2));
    let failure = members[3].abort(RankFailure { host: Some("c".into()), ..stalled });
    let host = host_name();
    let expected = format!(
        "rank 3 on c failed in a send: after 3s it still waits for rank 2 on {host}, which waits for rank 1 on {host}, which waits \
         for no other rank"
    );
    assert_eq!((failure.to_string(), failure.peer, failure.culprit()), (expected, Some(1), Some(1)));
    eventually(|| members.iter().all(|member| member.failure().is_some_and(|other| other == failure)));
    assert_eq!(
        are_reported([members[0], members[1], members[2], members[3]]),
        [true; 4],
        "rank 0 has printed it"
    );
}

#[test]
fn a_rank_that_never_comes_to_an_exchange_ends_it_after_the_limit() {
    let members = met(2);
    members[0].set_limit(Duration::from_millis(400));
    let failure = members[0].gather(2, Vec::new()).expect_err("rank 1 does not come");
    assert_eq!((failure.rank, failure.peer, failure.stalled), (0, Some(1), true));
    assert!(failure.reason.contains("after 400ms it still waits for rank 1"), "{failure}");
    eventually(|| members[1].failure() == Some(failure.clone()));
}

#[test]
fn a_step_has_a_shorter_limit_unless_a_rank_pauses() {
    let members = met(3);
    let (second, minute) = (Duration::from_secs(1), Duration::from_secs(60));
    for member in &members {
        member.set_limit(10 * minute);
        assert_eq!((member.limit(), member.longest_silence()), (10 * minute, minute));
        member.set_step_limit(Some(7 * second));
        assert_eq!((member.limit(), member.longest_silence()), (7 * second, 6 * second));
    }
    // All members are in one process, so all pause. Rank 0 tells the others.
    let pause = work::Pause::begin();
    assert_eq!(members[2].limit(), 10 * minute);
    eventually(|| members[2].peers[0].inbox().status.paused);
    drop(pause);
    eventually(|| members.iter().all(|member| member.limit() == 7 * second));
    members[1].set_step_limit(None);
    assert_eq!((members[1].limit(), members[1].longest_silence()), (10 * minute, 6 * second));
}

#[test]
fn rank_0_learns_how_long_every_rank_computes() {
    let members = met(3);
    let time = |rank: u64| Duration::from_millis(10 + rank);
    for member in &members {
        member.set_compute_time(time(member.rank as u64));
    }
    eventually(|| members[0].compute_times() == [0, 1, 2].map(time));
    assert_eq!(members[0].host_of(2), host_name());
}

#[test]
fn processes_that_do_not_fit_are_refused() {
    let listener = listener();
    thread::scope(|scope| {
        let root = scope.spawn(|| meet(0, 2, &listener, "the secret"));
        let wrong = meet(1, 2, &listener, "another secret").err().expect("it is refused");
        assert!(matches!(wrong, RendezvousError::Refused { .. }), "{wrong}");
        scope.spawn(|| meet(1, 3, &listener, "the secret"));
        let error = root.join().expect("no panic").err().expect("the sizes differ").to_string();
        assert!(error.contains("is one of 3 processes, and rank 0 one of 2"), "{error}");
    });
    assert_eq!(meet(0, 2, &listener, "").err(), Some(RendezvousError::EmptySecret));
    let beyond = meet(2, 2, &listener, "s").err().expect("ranks are 0 and 1");
    assert_eq!(beyond.to_string(), "this process has rank 2, and the job has 2 processes: ranks are 0 to 1");
}

#[test]
fn connections_that_prove_nothing_do_not_hold_up_the_others() {
    let listener = listener();
    let address = listener.local_addr().expect("it is bound");
    // Silent, and with a byte now and then: none of them ends its handshake while the others meet.
    let mut noise: Vec<TcpStream> =
        (0..40).map(|_| TcpStream::connect(address).expect("it listens")).collect();
    noise.iter_mut().step_by(2).for_each(|stream| stream.write_all(&[1]).expect("it is open"));
    thread::scope(|scope| {
        let root = scope.spawn(|| meet(0, 2, &listener, "the secret"));
        let begun = Instant::now();
        meet(1, 2, &listener, "the secret").expect("they meet");
        root.join().expect("no panic").expect("they meet");
        assert!(begun.elapsed() < Duration::from_secs(40), "one after the other they would take 200 s");
    });
}

impl Rendezvous {
    /// Waits for bytes that nobody sends, until the job fails.
    fn receive_any(&self) -> Result<Vec<u8>, RankFailure> {
        self.receive(self.peers[0].rank)
    }
}
