//! Processes as threads of one process.

use super::*;

/// The members of a job that has met, leaked as those of a process are.
fn met(size: usize) -> Vec<&'static Rendezvous> {
    let [(_, address), (_, secret)] = arrange_locally().expect("a free port");
    let members = thread::scope(|scope| {
        let meet = |rank| {
            let (address, secret) = (&address, &secret);
            scope.spawn(move || Rendezvous::meet(rank, size, address, secret))
        };
        let meeting: Vec<_> = (0..size).map(meet).collect();
        meeting.into_iter().map(|one| one.join().expect("no panic").expect("they meet")).collect::<Vec<_>>()
    });
    let leak = |member: Rendezvous| -> &'static Rendezvous {
        let member: &'static Rendezvous = Box::leak(Box::new(member));
        member.start_threads();
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
        assert!(begun.elapsed() < Duration::from_secs(10), "it does not happen");
        thread::sleep(Duration::from_millis(5));
    }
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
    on_all(&members, |member| member.leave(false));
    assert!(members.iter().all(|member| member.failure().is_none()), "goodbye is no failure");
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
    let silent = [0, 1].map(|rank: usize| members[rank].reported_elsewhere.load(Ordering::Relaxed));
    assert_eq!(silent, [false, true], "rank 0 prints it");
}

#[test]
fn the_death_of_rank_0_is_printed_by_rank_1() {
    let members = met(3);
    // A dead process does not tell rank 2 that its connection to rank 1 has closed.
    members[0].ends.store(true, Ordering::Relaxed);
    for peer in &members[0].peers {
        peer.stream.shutdown(Shutdown::Both).expect("it is open");
    }
    eventually(|| {
        members[1..].iter().all(|member| member.failure().is_some_and(|failure| failure.rank == 0))
    });
    let silent = [1, 2].map(|rank: usize| members[rank].reported_elsewhere.load(Ordering::Relaxed));
    assert_eq!(silent, [false, true]);
}

#[test]
fn a_failure_of_one_is_the_failure_of_all_and_the_first_one_stays() {
    let members = met(4);
    let failure = RankFailure::new(3, "backward layer 1", "no memory");
    members[3].abort(&failure);
    eventually(|| members.iter().all(|member| member.failure() == Some(failure.clone())));
    members[1].abort(&RankFailure::new(1, "a step", "a consequence"));
    assert_eq!(members[1].failure(), Some(failure.clone()));
    assert_eq!(members[0].gather(4, Vec::new()), Err(failure));
}

#[test]
fn processes_that_do_not_fit_are_refused() {
    let [(_, address), (_, secret)] = arrange_locally().expect("a free port");
    thread::scope(|scope| {
        let root = scope.spawn(|| Rendezvous::meet(0, 2, &address, &secret));
        let wrong = Rendezvous::meet(1, 2, &address, "another secret").err().expect("it is refused");
        assert!(matches!(wrong, RendezvousError::Connect { rank: 1, .. }), "{wrong}");
        scope.spawn(|| Rendezvous::meet(1, 3, &address, &secret));
        let error = root.join().expect("no panic").err().expect("the sizes differ").to_string();
        assert!(error.contains("is one of 3 processes, and rank 0 one of 2"), "{error}");
    });
}

impl Rendezvous {
    /// Waits for bytes that nobody sends, until the job fails.
    fn receive_any(&self) -> Result<Vec<u8>, RankFailure> {
        self.receive(self.peers[0].rank)
    }
}
